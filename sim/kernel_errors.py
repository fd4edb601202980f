"""How far kernels are off their predictions, and what that does to a value that is made up of kernels.

``kernel_errors.json`` holds measured over predicted time of kernels in chains by GPU and family: the shipped kernels
and cuBLAS on an H200, exchanges over NVLink, and public kernel tables. No time of a decode step is in it.
``python -m k3sim.calibrate.compare.kernel_errors`` writes it. No prediction depends on it, only intervals do.

A family that is asked about gets the errors of *other* families, and a GPU those of *other* GPUs: what a family and a
GPU deserve that were never seen. In each draw a family of kernels takes the place of another, picked at random, and
each of its stages has the error of one reading of that other family. So errors within a family have a part in common,
and families are independent of each other. (A kernel alone whose family was read ``LEAST_READINGS`` times on other
GPUs is bounded by those readings.) Readings of one family are not exchangeable with those of another, families
are, as far as anything is: each counts once, however many readings it has, and with ``n`` families an unseen one is
beyond all of them with the chance of 1 / (n + 1). It then has the worst reading of all, on either side.

A step does not take over what all families have in common. In chains of one kernel families may be slower than
predicted in the mean where steps of the same kernels are not (``docs/accuracy.md``), so a step gets each family's error
over the mean of them. A kernel alone is measured in a chain itself and gets the error as it is.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_name("kernel_errors.json")
LEVEL = 0.90
ERRORS_A_DRAW = 200  # errors of kernels that are drawn for each drawn machine

Ratios = Sequence[float]  # measured over predicted
KernelTimes = Mapping[tuple[str, str], float]  # microseconds by family and stage


def conformal_rank(count: int, level: float = LEVEL) -> int:
    """Which of ``count`` sorted errors bounds a new one with the chance ``level``; above ``count``: none of them."""
    return math.ceil((count + 1) * level - 1e-9)


#: Fewest families that bound a new one at all: with eight, the ninth of eight would be needed.
LEAST_FAMILIES = next(count for count in range(1, 1000) if conformal_rank(count) <= count)


#: Fewest readings that bound a new one on either side.
LEAST_READINGS = next(count for count in range(1, 1000) if conformal_rank(count, (1 + LEVEL) / 2) <= count)


def family_of(operator: str) -> str:
    """The family of kernels of an operator: its folder, since cost functions of one folder share what they leave out.

    All-reduces, which lie among kernels that have nothing in common but to be one step each, are a family of their own.
    """
    return "all_reduce" if "all_reduce" in operator else operator.partition(".")[0]


@cache
def shipped_errors() -> Mapping[str, Mapping[str, tuple[float, ...]]]:
    """Ratios by title of the GPU and family."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))["measured_over_predicted"]
    return {gpu: {family: tuple(ratios) for family, ratios in of.items()} for gpu, of in table.items()}


def left_out(
    errors: Mapping[str, Mapping[str, Ratios]], gpu: str, family: str
) -> dict[str, tuple[float, ...]]:
    """Ratios of the families other than ``family``, those of ``gpu`` left out as well.

    Where fewer than ``LEAST_FAMILIES`` were read on other GPUs, those of ``gpu`` count: without them nothing would
    bound a new family.
    """
    for without in (gpu, None):
        found: dict[str, list[float]] = {}
        for other, of in errors.items():
            for name, ratios in of.items():
                if other != without and name != family:
                    found.setdefault(name, []).extend(ratios)
        if len(found) >= LEAST_FAMILIES:
            break
    return {name: tuple(sorted(ratios)) for name, ratios in sorted(found.items())}


def pools_for_chain(errors: Mapping[str, Mapping[str, Ratios]], gpu: str, family: str) -> list[tuple[float, ...]]:
    """What bounds a kernel alone: readings of its family on other GPUs, each by itself, or the other families."""
    own = sorted(ratio for other, of in errors.items() if other != gpu for ratio in of.get(family, ()))
    return [(ratio,) for ratio in own] if len(own) >= LEAST_READINGS else list(left_out(errors, gpu, family).values())


def mean_over_families(families: Iterable[Ratios]) -> float:
    """The mean ratio, each family counting once."""
    return statistics.fmean(statistics.fmean(one) for one in families)


def drawn_ratios(
    pools: Sequence[Ratios], stages: Sequence[str], count: int, key: str
) -> dict[str, list[float]]:
    """``count`` draws of the ratios of a family's stages: in each, one reading a stage of one of the ``pools``.

    With the chance of 1 / (number of pools + 1) all stages have the smallest or the largest ratio of all. A stage
    of the same name and ``key`` gets the same draws, whatever the other stages are.
    """
    generator = random.Random(key)
    worst = (min(map(min, pools)), max(map(max, pools)))
    picks: list[Ratios] = []
    for slice_ in generator.sample(range(count), count):  # one from each of equally likely slices
        place = (slice_ + generator.random()) / count * (len(pools) + 1)
        beyond = place - len(pools)
        picks.append(pools[int(place)] if beyond < 0 else (worst[0],) if beyond < 0.5 else (worst[1],))
    found = {}
    for stage in stages:
        generator = random.Random(f"{key} {stage}")
        found[stage] = [pool[int(generator.random() * len(pool))] for pool in picks]
    return found


def with_kernel_errors(
    values: Sequence[float],
    kernels: Sequence[KernelTimes],
    gpu: str,
    seed: int,
    *,
    in_chain: bool = False,
    errors: Mapping[str, Mapping[str, Ratios]] | None = None,
) -> list[float]:
    """``values`` with errors of kernels: the first as it is, and ``ERRORS_A_DRAW`` for each of the others.

    The first value is that of a profile, the others of machines drawn from it; ``kernels`` are the times of kernels
    that each is made up of, to first order: a value grows by what they do. ``in_chain``: the value is a chain of one
    kernel, as those that the errors were read on. Values of the same ``gpu`` and ``seed`` have the same errors in the
    same order, so that they can be divided one by one. ``errors``: in place of the shipped table.
    """
    table = shipped_errors() if errors is None else errors
    num_drawn = len(values) - 1
    if num_drawn < 1:
        return list(values)
    stages = sorted(set().union(*kernels[1:]))
    count = num_drawn * ERRORS_A_DRAW
    changes: dict[tuple[str, str], list[float]] = {}
    for family in sorted({family for family, _ in stages}):
        pools = pools_for_chain(table, gpu, family) if in_chain else list(left_out(table, gpu, family).values())
        centre = 1.0 if in_chain else mean_over_families(pools)
        own = [stage for of, stage in stages if of == family]
        for stage, ratios in drawn_ratios(pools, own, count, f"{seed} {family}").items():
            changes[family, stage] = [ratio / centre - 1.0 for ratio in ratios]
    found = [values[0]]
    for index, (value, times) in enumerate(zip(values[1:], kernels[1:], strict=True)):
        for at in range(index * ERRORS_A_DRAW, (index + 1) * ERRORS_A_DRAW):
            found.append(value + sum(time_us * changes[key][at] for key, time_us in times.items()))
    return found
