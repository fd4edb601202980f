"""Kernels in a long graph: the one program in which a kernel by itself is predicted as it was measured.

A kernel's time alone means little: what counts is a round of a chain in which every round reads its own weights, so
that L2 is cold, and launches overlap as in a step. Benchmarks of the project and public tables measure such chains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from k3sim.model.collectives import FORMS, Collectives, Form
from k3sim.model.paths import find_path
from k3sim.model.program import COLLECTIVES, Call, Program, Weight
from k3sim.sim.components.skew import Skew
from k3sim.sim.engine import simulate
from k3sim.sim.kernel_errors import family_of, with_kernel_errors
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import PS_PER_US

ROUNDS = 12  # of a chain; the first ones are not counted
WARM_UP = 3
LIBRARY_ALL_REDUCE = "unfused.library_all_reduce"


@dataclass(frozen=True, kw_only=True)
class ChainedKernel:
    """One kernel of a chain."""

    operator: str
    weights: tuple[tuple[int, int, int], ...] = ()  # outputs, depth, bytes
    shape: dict[str, int]
    launch: str = "pdl"
    trigger: str = "start"
    sends: str = ""
    receives: str = ""
    transport: str = "push"


def kda_counts(heads: int, rows: int) -> dict[str, int]:
    """Shape of a KDA step with an fp32 state: 128 by 128 a head, a convolution over four tokens."""
    return {
        "rows": rows,
        "heads": heads,
        "state_bytes": heads * 128 * 128 * 4,
        "conv_state_bytes": heads * 2304,
        "conv_weight_bytes": heads * 6144,
    }


def bf16(num_outputs: int, depth: int) -> tuple[int, int, int]:
    """Weights of a matrix in two bytes each."""
    return num_outputs, depth, 2 * num_outputs * depth


def recorded_chain(
    loop: Mapping[str, Any], collectives: Collectives = COLLECTIVES
) -> tuple[ChainedKernel, ...]:
    """The chain of a kernel's record in ``calibrate/evidence``; an all-reduce in the form that a library chooses."""
    return tuple(
        ChainedKernel(
            operator=kernel["operator"],
            weights=tuple((outputs, depth, num_bytes) for outputs, depth, num_bytes in kernel["weights"]),
            shape=kernel["shape"],
            launch=loop["launch"],
            trigger=loop.get("trigger", "stream"),
        )
        if kernel["operator"] != LIBRARY_ALL_REDUCE
        else library_all_reduce(kernel["shape"], collectives, launch=loop["launch"])
        for kernel in loop["calls"]
    )


def family_of_chain(kernels: Sequence[ChainedKernel]) -> str:
    """The family of its last kernel: those before it prepare or send what that one needs."""
    return family_of(kernels[-1].operator)


def chain_with_errors(kernels: Sequence[ChainedKernel], values_us: Sequence[float], gpu: str, seed: int) -> list[float]:
    """Rounds of a chain on a profile's machine and on machines drawn from it, with drawn errors of kernels.

    ``gpu``: title of the machine.
    """
    whole = [{(family_of_chain(kernels), "chain"): one} for one in values_us]
    return with_kernel_errors(values_us, whole, gpu, seed, in_chain=True)


def library_all_reduce(
    shape: Mapping[str, int], collectives: Collectives, *, form: Form | None = None, launch: str = "graph"
) -> ChainedKernel:
    """All-reduce of ``rows`` x ``hidden`` in bf16 over ``ranks``, in ``form`` or, by default, the library's."""
    chosen = form or collectives.form(2 * shape["rows"] * shape["hidden"], shape["ranks"])
    return ChainedKernel(
        operator=LIBRARY_ALL_REDUCE,
        shape={**shape, "form": FORMS.index(chosen)},
        launch=launch,
        trigger="end",
        sends="sum",
        receives="sum",
        transport=chosen.value,
    )


def chain_us(
    kernels: Sequence[ChainedKernel],
    machine: Machine,
    *,
    kernel_set: str = "own",
    group_size: int = 16,
    skew: Skew = Skew.OFF,
    draw: int = 0,
) -> float:
    """Time of one round of ``kernels`` in a long graph in which every round reads its own weights.

    ``kernel_set``: whose machine code it is. ``group_size``: ranks of an exchange.
    ``draw``: of footprints that are not published.
    """
    calls = [call for number in range(ROUNDS) for call in _round(kernels, number, group_size)]
    path = find_path("stock", kernel_set=kernel_set)
    program = Program(path=path, num_ranks=1, layers=tuple(range(ROUNDS)), calls=tuple(calls))
    timeline = simulate(program, machine, skew=skew, draw=draw)
    ends = [max(run.end_ps for run in timeline.kernels if run.layer == number) for number in range(ROUNDS)]
    return (ends[-1] - ends[WARM_UP - 1]) / (ROUNDS - WARM_UP) / PS_PER_US


def _round(kernels: Sequence[ChainedKernel], number: int, group_size: int) -> list[Call]:
    calls: list[Call] = []
    sent: dict[str, int] = {}
    for position, kernel in enumerate(kernels):
        index = number * len(kernels) + position
        if kernel.sends:
            sent[kernel.sends] = index
        calls.append(
            Call(
                index=index,
                layer=number,
                kind="loop",
                stage=f"{position}",
                operator=kernel.operator,
                weights=tuple(
                    Weight(region=f"{number}/{position}/{at}", num_outputs=outputs, depth=depth, num_bytes=num_bytes)
                    for at, (outputs, depth, num_bytes) in enumerate(kernel.weights)
                ),
                shape=kernel.shape,
                stream="main",
                launch=kernel.launch,
                trigger=kernel.trigger,
                after=(),
                sends=kernel.sends,
                transport=kernel.transport,
                group_size=group_size,
                receives=(sent[kernel.receives],) if kernel.receives in sent else (),
            )
        )
    return calls
