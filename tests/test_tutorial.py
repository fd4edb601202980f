"""What the tutorial says of its own question is what the program answers today.

Each statement stands here as the page has it, so that neither can change alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from k3sim.kernels.l2_prefetch.cost import ISSUING_BLOCKS
from k3sim.sim.export.colours import WAITING, word_of_phase
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.question import ask
from k3sim.sim.timeline.critical_path import WORK_PARTS
from k3sim.sim.timeline.timeline import Counter, KernelRun, Phase

PAGE = " ".join((Path(__file__).parents[1] / "docs" / "tutorial.md").read_text(encoding="utf-8").split())
LAYER = 46  # the KDA layer that the page shows


@cache
def step(path: str = "fused", without: str = "", faster_hbm: float = 1.0) -> Prediction:
    question = ask(Options(path=path, without=(without,) if without else ()))
    machine = question.machine
    rates = (
        "hbm_read_bytes_per_s", "hbm_copy_bytes_per_s", "hbm_bytes_per_s_per_sm",
        "prefetch_bytes_per_s_per_sm",
    )  # fmt: skip
    changed = {name: getattr(machine, name) * faster_hbm for name in rates}
    curve = tuple((at, rate * faster_hbm) for at, rate in machine.hbm_in_flight_curve)
    return predict(replace(question, machine=replace(machine, **changed, hbm_in_flight_curve=curve)))


def share(one: Prediction, *parts: str) -> float:
    return sum(one.waits_us[part] for part in parts) / one.step_us


def every_path_takes_more_than_twice_its_floor() -> bool:
    return all(step(path).step_us > 2 * step(path).floor_us for path in ("fused", "stock", "megakernel"))


def faster_hbm_saves_less_than_five_percent() -> bool:
    return 0 < 1 - step(faster_hbm=1.25).step_us / step().step_us < 0.05


def stock_reads_weights_for_a_quarter() -> bool:
    stock = step("stock")
    latency = ("l2_round_trips", "tensor_core_setup", "block_reduction")
    waits = [("ramp_drain",), latency, ("nvlink_flight", "slower_peer"), ("launch",)]
    shares = [share(stock, *parts) for parts in waits]
    other_work = sum(share(stock, part.value) for part in WORK_PARTS if part.value != "weights")
    return 0.2 < share(stock, "weights") < 0.3 and other_work < 0.02 and min(shares) > 0.05 and sum(shares) > 0.6


def six_lines_grow() -> bool:
    stock, fused = step("stock").waits_us, step().waits_us
    grow = {part for part in fused if fused[part] > stock.get(part, 0.0)}
    return grow == {"l2", "compute", "selection_rounds", "l2_round_trips", "barrier", "slower_peer"} and (
        fused["slower_peer"] < 1.2 * stock["slower_peer"]
    )


def routing_hid_beside_the_latent_projection() -> bool:
    """On stock no selection is on the path; on fused experts wait for theirs, and for L2 more than all others."""

    def by_stage(path: str, part: str) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for stage, one, us in step(path).contributions():
            found[stage] += us if one.value == part else 0.0
        return found

    selection, round_trips = by_stage("fused", "selection_rounds"), by_stage("fused", "l2_round_trips")
    most_of_both = [max(one, key=lambda stage: one[stage]) for one in (selection, round_trips)]
    return sum(by_stage("stock", "selection_rounds").values()) == 0 and most_of_both == ["moe.experts"] * 2


def phases_us(path: str, stage: str) -> dict[str, float]:
    """Microseconds of a kernel's phases in the layer."""
    (run,) = (one for one in runs(step(path)) if one.layer == LAYER and one.stage == stage)
    found: dict[str, float] = defaultdict(float)
    for span in run.spans:
        found[span.phase.value] += (span.end_ps - span.start_ps) / 1e6
    return found


def runs(one: Prediction) -> list[KernelRun]:
    return list(one.full.of_rank(one.full.critical_rank))


def most(path: str, stage: str, *phases: str) -> bool:
    found = phases_us(path, stage)
    return sum(found[phase] for phase in phases) > sum(found.values()) / 2


def hbm(one: Prediction) -> Counter:
    return next(c for c in one.full.counters if (c.rank, c.resource) == (one.full.critical_rank, "hbm"))


def rates_between(counter: Counter, start_ps: int, end_ps: int) -> list[float]:
    """Shares of the rate of HBM that were in use, step by step."""
    steps = zip(counter.steps, counter.steps[1:], strict=False)
    return [
        rate / counter.capacity_bytes_per_us
        for (begin_ps, rate), (next_ps, _) in steps
        if begin_ps < end_ps and next_ps > start_ps
    ]


def hbm_drops_to_zero() -> bool:
    layer = [one for one in runs(step()) if one.layer == LAYER]
    return 0.0 in rates_between(hbm(step()), min(one.start_ps for one in layer), max(one.end_ps for one in layer))


def without_prefetch_weights_come_from_hbm() -> bool:
    with_it, without = step(), step(without="l2-prefetch")
    more = without.waits_us["weights"] - with_it.waits_us["weights"]
    lost = with_it.waits_us["l2"] - without.waits_us.get("l2", 0.0)
    begin = ("kda.in_proj", "mla.qkv_a_gate")
    weights = [
        sum(us for stage, part, us in one.contributions() if part.value == "weights" and stage in begin)
        for one in (with_it, without)
    ]
    return more > lost > 0 == without.waits_us.get("l2", 0.0) and 0.88 < (weights[1] - weights[0]) / more < 0.96


def longest(path: str, stage: str) -> str:
    phases = phases_us(path, stage)
    return max(phases, key=lambda phase: phases[phase])


def latency_inside_kernels_stays() -> bool:
    with_it, without = step(), step(without="l2-prefetch")
    latency = ("l2_round_trips", "tensor_core_setup", "block_reduction", "selection_rounds")
    change_us = sum(without.waits_us[part] - with_it.waits_us[part] for part in latency)
    # Beside a prefetch and nothing else, while kernels of the main stream load what L2 holds.
    machine = with_it.question.machine
    alone = machine.prefetch_bytes_per_s_per_sm * ISSUING_BLOCKS / machine.hbm_read_bytes_per_s
    latencies = [
        span
        for run in runs(with_it)
        if run.layer == LAYER and run.stage in ("attn_res.mixer", "kda.in_proj")
        for span in run.spans
        if span.phase is Phase.DEPENDENT_LOADS
    ]
    beside = [max(rates_between(hbm(with_it), one.start_ps, one.end_ps)) for one in latencies]
    return (
        abs(change_us) < 20
        and 0.5 < alone < 0.6
        and any(abs(one - alone) < 0.01 for one in beside)
        and max(beside) < machine.l2_queueing_utilisation
    )


STATEMENTS: list[tuple[str, Callable[[], bool]]] = [
    ("Every path takes more than twice as long", every_path_takes_more_than_twice_its_floor),
    (
        "A quarter more bandwidth would shorten the fused step by less than 5 %",
        faster_hbm_saves_less_than_five_percent,
    ),
    (
        "On **stock** weights are read at HBM speed for about a quarter of the step. Most of the rest is waiting: the "
        "first bytes of each kernel, serial latency inside small kernels, other ranks, launch latency.",
        stock_reads_weights_for_a_quarter,
    ),
    ("From **stock** to **fused** most lines shrink", six_lines_grow),
    ("Six grow. *L2* and *compute*", six_lines_grow),
    ("So did the *selection rounds* of the routing, beside the latent", routing_hid_beside_the_latent_projection),
    ("*Slower peer* grows by less than a fifth", six_lines_grow),
    (
        f"On the fused path most of `in_proj` is *{WAITING}*, in the phase *dependency*",
        lambda: most("fused", "kda.in_proj", "dependency")
        and word_of_phase(Phase.DEPENDENCY) == WAITING,
    ),
    ("`attn_res.ffn` is longest in the phase *peers*", lambda: longest("fused", "attn_res.ffn") == "peers"),
    (
        "On the stock path the same wait is inside a kernel of its own, `kda.all_reduce`",
        lambda: most("stock", "kda.all_reduce", "peers", "poll"),
    ),
    ("Where the curve drops to zero, that rank reads nothing", hbm_drops_to_zero),
    (
        "*weights* grows by more than *L2* loses, nine tenths of it in the projections that begin a layer's mixer",
        without_prefetch_weights_come_from_hbm,
    ),
    (
        "kernels changes by less than 20 us: the prefetch alone takes little more than half of HBM's rate",
        latency_inside_kernels_stays,
    ),
]


@pytest.mark.parametrize(("statement", "holds"), STATEMENTS, ids=[said[:40] for said, _ in STATEMENTS])
def test_a_statement_of_the_tutorial_holds(statement: str, holds: Callable[[], bool]) -> None:
    assert statement in PAGE
    assert holds()
