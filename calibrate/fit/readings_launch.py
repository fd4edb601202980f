"""Launches: what boundaries of kernels, their prologue and exit, and residency cost.

Boundaries are read at full grids that write, as kernels of a step are; other grids stand around them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from k3sim.calibrate.fit.statements import Reader, Reading, Statement, Undetermined, needed, slope_of

AFTER_WEIGHTS: dict[str, Any] = {
    "pattern": "Gt", "streamed_bytes": 51904512, "copies_of_code": 32, "rehearsed": False,
}  # fmt: skip


def edges_of(read: Reader, **parameters: Any) -> list[tuple[str, float, float]]:
    """(case, end to first instruction without PDL, end to the end of the wait with it) of every grid that has both."""
    found = []
    for case in ("graph_boundary", "graph_boundary_other_gpu"):
        for sample, entry in read.all(case, "end_to_entry", pdl=False, **parameters):
            same = {**sample.parameters, "pdl": True}
            waits = [value for one, value in read.all(case, "end_to_resume", **same) if one.parameters == same]
            if waits:
                label = sample.label.replace("pdl=False ", "").removesuffix(" end_to_entry")
                found.append((label, entry, waits[0]))
    return found


def full_grids(read: Reader) -> list[tuple[str, float, float]]:
    """Boundaries of full grids that write: what kernels of a step are like."""
    edges = edges_of(read, threads=256, bytes_written_per_block=4096)
    wanted = f"producer_blocks={read.file.num_sms} consumer_blocks={read.file.num_sms} "
    return [one for one in edges if wanted in one[0] and "204800" not in one[0]]


def tiny_stages(read: Reader, *quantities: str, **parameters: Any) -> list[Statement]:
    """Sums of stages of the tiny kernel after a stream of weights."""
    first, *others = (dict(_stage_of_tiny(read, f"1t.{one}", **parameters)) for one in quantities)
    return [
        (f"tiny_kernel {name} {'+'.join(quantities)}", value + sum(one[name] for one in others))
        for name, value in first.items()
        if all(name in one for one in others)
    ]


def _stage_of_tiny(read: Reader, quantity: str, **parameters: Any) -> list[Statement]:
    return [
        (" ".join(f"{name}={value}" for name, value in one.parameters.items()), value)
        for one, value in read.all("tiny_kernel", quantity, **{**AFTER_WEIGHTS, **parameters})
    ]


def _tails(read: Reader) -> list[Statement]:
    """Reduction and stores of a tiny kernel less the same block's reduction in a loop."""
    found = []
    for blocks, threads in ((1, 512), (8, 512), (1, 128)):
        both = tiny_stages(read, "reduction", "store", pdl=False, tiny_blocks=blocks, tiny_threads=threads)
        loop = read.one("block_reduction", "time", threads=threads)
        found += [(label, value - loop) for label, value in both]
    return found


def _dispatch(read: Reader, kernel: str) -> list[Statement]:
    fewer, more = (
        read.one("graph_node_period", "node_period", kernel=kernel, blocks=blocks) for blocks in (132, 528)
    )
    return [(f"graph_node_period {kernel} 528 less 132 blocks", (more - fewer) / 396)]


def _entry_of_blocks(read: Reader) -> list[Statement]:
    """First to last entry of a full grid, by blocks beyond the first."""
    num_sms = read.file.num_sms
    whole = read.stated(
        "graph_boundary", "first_to_last_block", pdl=False, producer_blocks=num_sms, consumer_blocks=num_sms
    )
    return [(label, value / (num_sms - 1)) for label, value in whole]


def _placed(read: Reader, quantity: str, *, beside: bool, **parameters: Any) -> list[Statement]:
    """Of the second kernel, which its predecessor lets in early: cases in which all its blocks found room, or none.

    A case in which a few of many did says nothing: what it reads is of those few.
    """
    return [
        (one.label, value)
        for one, value in read.all("residency", quantity, pdl=True, **parameters)
        for other, placed in read.all("residency", "share_beside", **one.parameters)
        if other.parameters == one.parameters and (placed > 0.97 if beside else placed == 0)
    ]


def _forks(read: Reader) -> list[Statement]:
    """The second of two nodes behind one, less the first."""
    found = []
    for case in ("graph_join", "graph_fork_join"):
        for sample, first in read.all(case, "fork_same_stream"):
            others = read.all(case, "fork_other_stream", **sample.parameters)
            found += [(sample.label.replace("same", "other less same"), value - first) for _, value in others]
    return found


CHAIN = {"blocks": 132, "threads": 256}


def chain_by(read: Reader, by: str, which: int, **parameters: Any) -> list[Statement]:
    """Period of a chain of kernels by one of the things they do: the straight line's value at none, or its slope."""
    doing = {"loads": 1, "warp_sums": 0, "barriers": 0, "stored_bytes_per_block": 128, **parameters}
    fixed = {name: value for name, value in doing.items() if name != by}
    points = [(float(one.parameters[by]), value) for one, value in read.all("chained", "period", **fixed)]
    if len(points) < 3:
        raise Undetermined(f"{len(points)} stable samples of chained by {by}; accepted are 3 or more")
    shown = " ".join(f"{name}={value}" for name, value in parameters.items())
    return [(f"chained {shown} by {by}", slope_of(points)[which])]


def _held_tails(read: Reader, grids: Iterable[tuple[int, int]]) -> list[Statement]:
    """What is left of a period when no load is left in it and the release of the next kernel is taken off."""
    resumes = needed([(label, resume) for label, _, resume in full_grids(read)], "graph_boundary of full grids")
    flush = statistics.median(resume for _, resume in resumes)
    return [
        (f"{label} less the release", value - flush)
        for blocks, threads in grids
        for label, value in chain_by(read, "loads", 0, blocks=blocks, threads=threads)
    ]


LAUNCH_READINGS: tuple[Reading, ...] = (
    Reading(
        "pdl_trigger_to_launch_s", 3,
        "Trigger in the last block's first instructions to the first instruction of a PDL kernel that finds room "
        "beside it on every SM; around: half of the SMs taken.",
        centre=lambda read: _placed(read, "first_entry_after_start", beside=True, blocks=[132, 132]),
        around=lambda read: read.stated(
            "residency", "first_entry_after_start", pdl=True, blocks=[read.file.num_sms // 2, 132]
        ),
    ),
    Reading(
        "block_refill_s", 2,
        "End of the last block on an SM to the first instruction there of a PDL kernel that had no room: by "
        "shared memory, carve-out, threads and registers.",
        centre=lambda read: _placed(read, "entry_after_sm", beside=False, blocks=[132, 132]),
        around=lambda read: _placed(read, "entry_after_sm", beside=False),
    ),
    Reading(
        "fork_s", 2,
        "Two nodes on two streams behind one: entry of the second less that of the first, all grids.",
        centre=_forks,
    ),
    Reading(
        "launch_latency_s", 2,
        "Boundary without PDL less the release of a waiting consumer of the same grids, all grids.",
        centre=lambda read: [(label, entry - resume) for label, entry, resume in edges_of(read, threads=256)],
    ),
    Reading(
        "grid_completion_s", 2,
        "End of the producer to the end of griddepcontrol.wait in a waiting consumer, full grids that write; "
        "around: other grids, nothing written, and after a stream of weights.",
        centre=lambda read: [(f"{label} end_to_resume", resume) for label, _, resume in full_grids(read)],
        around=lambda read: [
            *((f"{label} end_to_resume", resume) for label, _, resume in edges_of(read, threads=256)),
            *tiny_stages(read, "end_to_resume", pdl=True),
        ],
    ),
    Reading(
        "kernel_prologue_s", 2,
        "Kernel parameters, block size and first code of a tiny kernel after weights; around: other shapes, and "
        "the parameters of a kernel that has few.",
        centre=lambda read: tiny_stages(
            read, "parameter", "prologue_or_wait", pdl=False, tiny_blocks=1, tiny_threads=512
        ),
        around=lambda read: [
            *tiny_stages(read, "parameter", "prologue_or_wait", pdl=False),
            *read.stated("tiny_kernel", "0G.parameter", **AFTER_WEIGHTS, pdl=False),
        ],
    ),
    Reading(
        "kernel_exit_cold_s", 2,
        "Slowest warp and stores of a tiny kernel after weights: its reduction and store stages less a reduction "
        "in a loop; median of three shapes.",
        centre=_tails,
    ),
    Reading(
        "kernel_exit_warm_s", 2,
        "Period of a chain of kernels whose code is held, by the loads they do one after another: at none, less "
        "the release; around: other grids and blocks.",
        centre=lambda read: _held_tails(read, [(132, 256)]),
        around=lambda read: _held_tails(read, [(132, 128), (132, 448), (8, 256), (56, 256), (264, 256)]),
    ),
    Reading(
        "block_dispatch_s", 2,
        "Period of empty nodes at 528 blocks less that at 132; around: nodes that write, and first to last entry "
        "of a full grid.",
        centre=lambda read: _dispatch(read, "empty"),
        around=lambda read: [
            *_dispatch(read, "write_rows"),
            *_entry_of_blocks(read),
        ],
    ),
)
