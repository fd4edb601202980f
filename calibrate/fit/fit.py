"""Machine values from the probes' samples: what ``k3sim calibrate`` writes into a profile, with intervals.

A value is *direct* when one primitive's cases give it (READINGS: a formula over medians; no model of the machine is
needed), *joint* when a rule of the simulator must be inverted over many cases (``l2_effective_bytes``: what least
recently used replacement leaves of a region). Whole decode steps never enter, and no kernel of the model does:
``kernel_fit.py`` asks what kernels say of the values that no probe gives, and reports it.

Each reading names ``centre`` cases, whose median is the value, and ``around`` cases, which describe the same primitive
under other circumstances (another grid, traffic beside it, another GPU in the file). The interval of a value covers the
bootstrap of its centre (runs and repetitions drawn anew, seeded) and the medians around it: in a kernel, circumstances
move a primitive by far more than the noise of its probe.

A value whose cases are missing or unstable is not guessed: the profile keeps what it had, and the result says why.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from k3sim.calibrate.samples import Run, Sample, SampleFile
from k3sim.errors import UserError
from k3sim.model.names import first_named
from k3sim.sim.intervals import quantiles
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine, machine_names, profile_path

SOURCE = "k3sim calibrate/probes"
BOOTSTRAP_DRAWS = 200
#: Profile of a device by the name that its driver gives.
PROFILES = {
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA B200": "b200",
    "NVIDIA B300": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
}
MIB = 1 << 20
LOADED_BYTES = 65536  # in flight on each SM: HBM is at its ceiling, and loads queue behind it
AFTER_WEIGHTS = {"pattern": "Gt", "streamed_bytes": 51904512, "copies_of_code": 32, "rehearsed": False}


class Undetermined(Exception):
    """These samples do not give a value, and why."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case's statement of a value, in SI units; ``central`` ones give the value."""

    label: str
    value: float
    central: bool


class Reader:
    """Samples in SI units by case, quantity and parameters; ``draw`` replaces medians by bootstrap draws."""

    def __init__(self, file: SampleFile, draw: Callable[[Sample], float] | None = None) -> None:
        self.file = file
        self._draw = draw or (lambda sample: sample.value)
        self._hz: float | None = None
        self.used: set[str] = set()  # labels of the samples that were asked for

    @property
    def clock_hz(self) -> float:
        if self._hz is None:
            self._hz = self.one("clocks", "sm_clock")
        return self._hz

    def one(self, case: str, quantity: str, **parameters: Any) -> float:
        """The only stable sample with these parameters; Undetermined where there is none, or it is unstable."""
        found = list(self.file.matching(case, quantity, **parameters))
        shown = " ".join([case, *(f"{name}={value}" for name, value in parameters.items()), quantity])
        if not found:
            raise Undetermined(f"no sample of {shown}")
        if len(found) > 1:
            raise Undetermined(f"{len(found)} samples of {shown}, accepted is one")
        if found[0].instability:
            raise Undetermined(f"{found[0].label}: {found[0].instability}")
        return self._si(found[0])

    def all(self, case: str, quantity: str, **parameters: Any) -> list[tuple[Sample, float]]:
        """Every stable sample with these parameters."""
        found = self.file.matching(case, quantity, **parameters)
        return [(one, self._si(one)) for one in found if not one.instability]

    def _si(self, sample: Sample) -> float:
        self.used.add(sample.label)
        value = self._draw(sample)
        if sample.unit == "us":
            return value * 1e-6
        return value / self.clock_hz if sample.unit == "cycle" else value

    @property
    def timestamp_s(self) -> float:
        """What reading the clock around a load adds: single loads against the mean of a chain of the same."""
        region = {"region_mib": 8}
        return self.one("l2_chase_resident", "load", **region) - self.one(
            "l2_chase_resident", "mean_without_stamps", **region
        )

    @property
    def queue_factor(self) -> float:
        """How much longer an L2 round trip takes while HBM is at its ceiling, by the hand-over through a flag."""
        loaded = self.one("handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=LOADED_BYTES)
        return loaded / self.one("handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=0)


Statement = tuple[str, float]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How one field of the profile follows from samples. ``digits``: significant ones that the cases agree on."""

    field: str
    digits: int
    note: str  # what it is read from; the profile's note, before the cases' range
    centre: Callable[[Reader], list[Statement]]
    around: Callable[[Reader], list[Statement]] = lambda read: []
    joint: bool = False  # a rule of the simulator is inverted over several cases


def _named(found: Iterable[tuple[Sample, float]], scale: float = 1.0) -> list[Statement]:
    return [(one.label, value * scale) for one, value in found]


def _needs(found: list[Statement], what: str) -> list[Statement]:
    if not found:
        raise Undetermined(f"no stable sample of {what}")
    return found


def _edges(read: Reader, **parameters: Any) -> list[tuple[str, float, float]]:
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


def _full_grids(read: Reader) -> list[tuple[str, float, float]]:
    """Boundaries of full grids that write: what kernels of a step are like."""
    edges = _edges(read, threads=256, bytes_written_per_block=4096)
    wanted = f"producer_blocks={read.file.num_sms} consumer_blocks={read.file.num_sms} "
    return [one for one in edges if wanted in one[0] and "204800" not in one[0]]


def _tiny(read: Reader, *quantities: str, **parameters: Any) -> list[Statement]:
    """Sums of stages of the tiny kernel after a stream of weights."""
    first, *others = (dict(_by_parameters(read, f"1t.{one}", **parameters)) for one in quantities)
    return [
        (f"tiny_kernel {name} {'+'.join(quantities)}", value + sum(one[name] for one in others))
        for name, value in first.items()
        if all(name in one for one in others)
    ]


def _by_parameters(read: Reader, quantity: str, **parameters: Any) -> list[Statement]:
    return [
        (" ".join(f"{name}={value}" for name, value in one.parameters.items()), value)
        for one, value in read.all("tiny_kernel", quantity, **{**AFTER_WEIGHTS, **parameters})
    ]


def _tails(read: Reader) -> list[Statement]:
    """Reduction and stores of a tiny kernel less the same block's reduction in a loop."""
    found = []
    for blocks, threads in ((1, 512), (8, 512), (1, 128)):
        both = _tiny(read, "reduction", "store", pdl=False, tiny_blocks=blocks, tiny_threads=threads)
        loop = read.one("block_reduction", "time", threads=threads)
        found += [(label, value - loop) for label, value in both]
    return found


def _dispatch(read: Reader, kernel: str) -> list[Statement]:
    fewer, more = (
        read.one("graph_node_period", "node_period", kernel=kernel, blocks=blocks) for blocks in (132, 528)
    )
    return [(f"graph_node_period {kernel} 528 less 132 blocks", (more - fewer) / 396)]


def _queued_barrier(read: Reader) -> list[Statement]:
    try:
        factor = read.queue_factor
    except Undetermined:
        return []
    found = _named(read.all("grid_barrier", "time", blocks=read.file.num_sms))
    return [(f"{label} x queue beside a stream", value * factor) for label, value in found]


def _chases(read: Reader) -> list[Statement]:
    return [
        one
        for mib in (1, 4, 8, 16, 24)
        for one in _named(read.all("l2_chase_resident", "mean_without_stamps", region_mib=mib))
    ]


def _stamped(read: Reader, case: str, quantity: str, **parameters: Any) -> list[Statement]:
    return [(label, value - read.timestamp_s) for label, value in _named(read.all(case, quantity, **parameters))]


def _beside(read: Reader, case: str, quantity: str, in_flight: Sequence[int]) -> list[Statement]:
    return [
        one for each in in_flight for one in _named(read.all(case, quantity, stream_bytes_in_flight_per_sm=each))
    ]


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


def _uneven(read: Reader) -> list[Statement]:
    whole = read.one("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=2 * LOADED_BYTES, stages=8)
    found = []
    for one, rate in read.all("hbm_bulk_by_sms", "read_rate"):
        blocks, sms = one.parameters["blocks"], read.file.num_sms
        if sms / 2 < blocks < sms:
            paired = (2 * blocks - sms) / blocks
            found.append((one.label, (1 - rate / whole) / (4 * paired * (1 - paired))))
    return found


def _copies(read: Reader, form: str, in_flight: int, **parameters: Any) -> list[Statement]:
    return _named(
        read.all(
            "hbm_copy", "moved_rate", form=form, read_bytes_in_flight_per_sm=in_flight, written_of_four=4, **parameters
        )
    )


def slope_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Straight line through ``points`` by least squares: value at zero, and slope."""
    mean_x, mean_y = (statistics.fmean(one[axis] for one in points) for axis in (0, 1))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


CHAIN = {"blocks": 132, "threads": 256}


def _chain(read: Reader, by: str, which: int, **parameters: Any) -> list[Statement]:
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
    resumes = _needs([(label, resume) for label, _, resume in _full_grids(read)], "graph_boundary of full grids")
    flush = statistics.median(resume for _, resume in resumes)
    return [
        (f"{label} less the release", value - flush)
        for blocks, threads in grids
        for label, value in _chain(read, "loads", 0, blocks=blocks, threads=threads)
    ]


def _same_input(read: Reader, form: str, *, blocks: int, of_all: bool = False) -> list[Statement]:
    """Rate at which blocks get an input that all of them load: slope over its size, of one block or of all."""
    found = []
    for written in (False, True):
        points = [
            (1024.0 * one.parameters["kib_per_block"], value)
            for one, value in read.all("same_input", "period", form=form, blocks=blocks, written=written)
        ]
        if len(points) >= 2:
            rate = (blocks if of_all else 1) / slope_of(points)[1]
            found.append((f"same_input {form} blocks={blocks} written={written}", rate))
    return _needs(found, f"same_input {form} with {blocks} blocks")


INSTRUCTIONS_PER_KIB = 64


def _instructions(read: Reader, *, threads: int, state: str) -> list[Statement]:
    """What an instruction of straight code takes: slope over the sizes."""
    points = [
        (float(INSTRUCTIONS_PER_KIB * one.parameters["code_kib"]), value)
        for one, value in read.all("cold_code", "run", threads=threads, state=state)
    ]
    if len(points) < 3:
        raise Undetermined(f"fewer than 3 stable sizes of cold_code {state} with {threads} threads")
    return [(f"cold_code {state} threads={threads} slope", slope_of(points)[1])]


def _prefetched(read: Reader) -> list[Statement]:
    """Rate of an SM whose prefetches bring in 8 MiB: slope of the share that is there, of the share in the end."""
    issuers = 8
    where = {"issuing_blocks": issuers, "streaming_blocks": 0}
    points = {one.parameters["after_us"]: (value, one) for one, value in read.all("prefetch_arrival", "in_l2", **where)}
    rising = [(at * 1e-6, value) for at, (value, _) in points.items() if 1 <= at <= 3]
    level = [value for at, (value, _) in points.items() if at >= 6]
    if len(rising) < 3 or not level:
        raise Undetermined("fewer than 3 stable samples of prefetch_arrival between 1 and 3 us, or none from 6 us on")
    num_bytes = next(iter(points.values()))[1].parameters["bytes"]
    rate = slope_of(rising)[1] / statistics.fmean(level) * num_bytes / issuers
    return [(f"prefetch_arrival {issuers} blocks, 1 to 3 us in_l2", rate)]


def _rates(read: Reader, form: str, warps: int, **parameters: Any) -> list[Statement]:
    return _named(read.all("mxfp4_rate", "weights_per_clock", form=form, warps=warps, **parameters))


def _issued(read: Reader) -> list[Statement]:
    return [
        (one.label, one.parameters["bytes_each"] / value)
        for one, value in read.all("prefetch_issue", "issue")
        if one.parameters["bytes_each"] >= 16384
    ]


def _stream_share(read: Reader, kib: int) -> list[Statement]:
    whole = read.one("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=128 * 1024)
    return [
        (label, rate / whole)
        for label, rate in _named(
            read.all("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=kib * 1024)
        )
    ]


QUEUES_KIB = (48, 64, 96, 128)  # in flight on each SM: beyond, a queue grows and what a hit waits does not


def queue_points(read: Reader) -> list[tuple[str, float, float]]:
    """(case, time of the queue, what a hit in L2 waits) beside streams that ask for more than keeps HBM busy."""
    rate = read.one("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=128 * 1024)
    idle = read.one("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=0)
    points = []
    for kib in QUEUES_KIB:
        for one, value in read.all("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=kib * 1024):
            points.append((one.label, kib * 1024 * (read.file.num_sms - 2) / rate, value - idle))
    return points


def queue_rule(read: Reader, without: str = "") -> tuple[float, float]:
    """Share of the queue's time that a hit waits, and time of a queue that costs nothing (sim/components/memory.py)."""
    points = [(at, waited) for label, at, waited in queue_points(read) if label != without]
    if len(points) < 3:
        raise Undetermined(f"{len(points)} stable samples of loads_beside_stream with a queue; accepted are 3 or more")
    at_zero, share = slope_of(points)
    if share <= 0 or at_zero >= 0:
        raise Undetermined("what a hit in L2 waits beside a stream does not grow with the queue")
    return share, -at_zero / share


def _queue(read: Reader, which: int) -> list[Statement]:
    return [("loads_beside_stream mean_in_l2, 48 to 128 KiB", queue_rule(read)[which])]


def _queue_without(read: Reader, which: int) -> list[Statement]:
    labels = [label for label, _, _ in queue_points(read)]
    return [(f"without {label}", queue_rule(read, label)[which]) for label in labels] if len(labels) > 3 else []


def _slots(read: Reader, which: int, **parameters: Any) -> list[Statement]:
    """A looped-back push to 1, 8 and 16 slots: the straight line's value at one slot, or its slope."""
    points = [
        (one.parameters["slots"] - 1.0, value)
        for one, value in read.all("looped_back_push", "one_way", blocks=8, threads=128, **parameters)
    ]
    if len(points) < 3:
        raise Undetermined(f"{len(points)} stable samples of looped_back_push by slots; accepted are 3 or more")
    shown = " ".join(f"{name}={value}" for name, value in parameters.items())
    return [(f"looped_back_push 1 to 16 slots {shown}", slope_of(points)[which])]


def _slots_of_others(read: Reader, which: int) -> list[Statement]:
    """Of other grids: what is left of their time when the line's slope is taken off, or with its first value."""
    (_, first), (_, slope) = (_slots(read, number, same_block=False)[0] for number in (0, 1))
    found = []
    for one, value in read.all("looped_back_push", "one_way", same_block=False):
        more = one.parameters["slots"] - 1
        if (which == 0 and one.parameters["threads"] != 128) or (which == 1 and more):
            found.append((one.label, value - slope * more if which == 0 else (value - first) / more))
    return found


READINGS: tuple[Reading, ...] = (
    Reading(
        field="sm_clock_hz",
        digits=3,
        note="clock64 against %globaltimer on every SM, in the run itself.",
        centre=lambda read: [("clocks sm_clock", read.clock_hz)],
    ),
    Reading(
        field="hbm_read_bytes_per_s",
        digits=3,
        note="Plain 128-bit loads, two blocks of 1,024 threads on each SM, and bulk copies with 64 KiB in flight on "
        "each; around: bulk copies with more in flight, and a stream beside a chase of single loads.",
        centre=lambda read: [
            *_named(read.all("hbm_loads_in_flight", "read_rate", blocks=2 * read.file.num_sms)),
            *_named(read.all("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=LOADED_BYTES, stages=4)),
        ],
        around=lambda read: [
            *(
                one
                for kib in (96, 128, 192)
                for one in _named(
                    read.all("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=kib * 1024, stages=4)
                )
            ),
            *_beside(read, "loads_beside_stream", "stream_rate", (131072,)),
            *_named(read.all("hbm_bulk_in_flight_other_gpu", "read_rate")),
        ],
    ),
    Reading(
        field="hbm_latency_s",
        digits=3,
        note="Pointer chase of one thread over 1 GiB; around: 128 MiB, and single loads of another pass.",
        centre=lambda read: _named(read.all("hbm_chase", "mean_without_stamps", region_mib=1024)),
        around=lambda read: [
            *_named(read.all("hbm_chase", "mean_without_stamps", region_mib=128)),
            *_stamped(read, "loads_beside_stream", "not_in_l2", stream_bytes_in_flight_per_sm=0),
        ],
    ),
    Reading(
        field="hbm_bytes_per_s_per_sm",
        digits=3,
        note="Bulk copies with 128 KiB in flight on one SM, and each of 32; around: plain loads in batches of 64 KiB.",
        centre=lambda read: [
            one
            for blocks in (1, 32)
            for one in _named(read.all("hbm_bulk_by_sms", "read_rate", blocks=blocks), 1 / blocks)
        ],
        around=lambda read: _named(read.all("hbm_loads_by_sms", "read_rate", blocks=1)),
    ),
    Reading(
        field="hbm_partial_grid_loss",
        digits=2,
        note="Bulk copies with 128 KiB in flight on 96 SMs against all 132, by the share of blocks that have a pair of "
        "SMs to themselves (sim/machine.py, partial_grid_efficiency).",
        centre=_uneven,
        joint=True,
    ),
    Reading(
        field="hbm_copy_bytes_per_s",
        digits=2,
        note="Read and written bytes of copies with 32 to 128 KiB of reads in flight on each SM, bulk and plain loads; "
        "around: in place.",
        centre=lambda read: [
            *(one for kib in (32, 64, 96) for one in _copies(read, "bulk", 1024 * kib, blocks=132, in_place=False)),
            *(one for kib in (32, 128) for one in _copies(read, "loads", 1024 * kib, in_place=False)),
        ],
        around=lambda read: [*_copies(read, "bulk", 65536, in_place=True), *_copies(read, "loads", 131072)],
    ),
    Reading(
        field="prefetch_bytes_per_s_per_sm",
        digits=2,
        note="Share of 8 MiB that is in L2 some time after 8 SMs asked for it; around: requests of 16 and 64 KiB by "
        "the time that their issue takes, which blocks where the queue is full.",
        centre=_prefetched,
        around=_issued,
    ),
    Reading(
        field="l2_read_bytes_per_s",
        digits=3,
        note="All SMs, each returning to its own part of 8.7 to 52 MB; around: parts that change SM, 17 to 47 MB.",
        centre=lambda read: _named(read.all("l2_read", "read_rate", tiles_change_sm=False)),
        around=lambda read: [
            one
            for sample, value in read.all("l2_read", "read_rate", tiles_change_sm=True)
            if 10e6 < sample.parameters["region_bytes"] < 51e6
            for one in [(sample.label, value)]
        ],
    ),
    Reading(
        field="l2_bytes_per_s_per_sm",
        digits=3,
        note="One SM alone, 64 KiB of 128-bit loads in flight over 8 MiB; around: 32 KiB in flight, and 1 MiB.",
        centre=lambda read: _named(
            read.all("l2_read_one_sm", "read_rate", region_bytes=8 * MIB, loads=4, threads=1024)
        ),
        around=lambda read: [
            one for threads in (512, 1024) for one in _named(read.all("l2_read_one_sm", "read_rate", threads=threads))
        ],
    ),
    Reading(
        field="l2_input_bytes_per_s_per_sm",
        digits=2,
        note="112 blocks of a chain load the same 4 to 56 KiB at the same moment by plain loads, just stored or not: "
        "slope over the size; around: by copies into shared memory.",
        centre=lambda read: _same_input(read, "loads", blocks=112),
        around=lambda read: _same_input(read, "copies", blocks=112),
    ),
    Reading(
        field="l2_fragment_bytes_per_s_per_sm",
        digits=2,
        note="The same by copies of 64 bytes of each of eight rows, 28 blocks, 4 and 32 KiB.",
        centre=lambda read: _same_input(read, "fragments", blocks=28),
    ),
    Reading(
        field="l2_fragment_bytes_per_s",
        digits=2,
        note="The same, 112 blocks together, 4 to 56 KiB.",
        centre=lambda read: _same_input(read, "fragments", blocks=112, of_all=True),
    ),
    Reading(
        field="l2_near_latency_s",
        digits=4,
        note="Pointer chase over 1 to 24 MiB that the same SM had read; around: the lower decile of lines that other "
        "SMs wrote.",
        centre=_chases,
        around=lambda read: _stamped(read, "l2_chase_written", "first_read_near_decile"),
    ),
    Reading(
        field="l2_far_latency_s",
        digits=3,
        note="Upper group of lines that other SMs wrote just before, less the clock readings; median over SMs.",
        centre=lambda read: _stamped(read, "l2_chase_written", "first_read_far_decile"),
    ),
    Reading(
        field="l2_loaded_latency_s",
        digits=2,
        note="Mean of loads that hit L2 while the other SMs stream with 64 KiB in flight each; around: 32, 48 and 128 "
        "KiB. The queue decides.",
        centre=lambda read: _stamped(
            read, "loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=LOADED_BYTES
        ),
        around=lambda read: [
            one
            for kib in (32, 48, 128)
            for one in _stamped(
                read, "loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=kib * 1024
            )
        ],
    ),
    Reading(
        field="l2_queueing_utilisation",
        digits=2,
        note="Rate of a stream with 32 KiB in flight on each SM, of that with 128 KiB: the last at which an L2 hit "
        "takes less than 1.35 times as long; around: 24 and 48 KiB.",
        centre=lambda read: _stream_share(read, 32),
        around=lambda read: [one for kib in (24, 48) for one in _stream_share(read, kib)],
    ),
    Reading(
        field="l2_hit_queueing_fraction",
        digits=2,
        note="What L2 hits wait beside streams with 48 to 128 KiB in flight on each SM, by the time that HBM takes for "
        "what is in flight: slope of the straight line; around: one stream left out.",
        centre=lambda read: _queue(read, 0),
        around=lambda read: _queue_without(read, 0),
        joint=True,
    ),
    Reading(
        field="hbm_queue_threshold_s",
        digits=2,
        note="As l2_hit_queueing_fraction: where the straight line begins.",
        centre=lambda read: _queue(read, 1),
        around=lambda read: _queue_without(read, 1),
        joint=True,
    ),
    Reading(
        field="pdl_trigger_to_launch_s",
        digits=3,
        note="Trigger in the last block's first instructions to the first instruction of a PDL kernel that finds room "
        "beside it on every SM; around: half of the SMs taken.",
        centre=lambda read: _placed(read, "first_entry_after_start", beside=True, blocks=[132, 132]),
        around=lambda read: _named(
            read.all("residency", "first_entry_after_start", pdl=True, blocks=[read.file.num_sms // 2, 132])
        ),
    ),
    Reading(
        field="block_refill_s",
        digits=2,
        note="End of the last block on an SM to the first instruction there of a PDL kernel that had no room: by "
        "shared memory, carve-out, threads and registers.",
        centre=lambda read: _placed(read, "entry_after_sm", beside=False, blocks=[132, 132]),
        around=lambda read: _placed(read, "entry_after_sm", beside=False),
    ),
    Reading(
        field="fork_s",
        digits=2,
        note="Two nodes on two streams behind one: entry of the second less that of the first, all grids.",
        centre=_forks,
    ),
    Reading(
        field="launch_latency_s",
        digits=2,
        note="Boundary without PDL less the release of a waiting consumer of the same grids, all grids.",
        centre=lambda read: [(label, entry - resume) for label, entry, resume in _edges(read, threads=256)],
    ),
    Reading(
        field="grid_completion_s",
        digits=2,
        note="End of the producer to the end of griddepcontrol.wait in a waiting consumer, full grids that write; "
        "around: other grids, nothing written, and after a stream of weights.",
        centre=lambda read: [(f"{label} end_to_resume", resume) for label, _, resume in _full_grids(read)],
        around=lambda read: [
            *((f"{label} end_to_resume", resume) for label, _, resume in _edges(read, threads=256)),
            *_tiny(read, "end_to_resume", pdl=True),
        ],
    ),
    Reading(
        field="kernel_prologue_s",
        digits=2,
        note="Kernel parameters, block size and first code of a tiny kernel after weights; around: other shapes, and "
        "the parameters of a kernel that has few.",
        centre=lambda read: _tiny(
            read, "parameter", "prologue_or_wait", pdl=False, tiny_blocks=1, tiny_threads=512
        ),
        around=lambda read: [
            *_tiny(read, "parameter", "prologue_or_wait", pdl=False),
            *_named(read.all("tiny_kernel", "0G.parameter", **AFTER_WEIGHTS, pdl=False)),
        ],
    ),
    Reading(
        field="kernel_exit_cold_s",
        digits=2,
        note="Slowest warp and stores of a tiny kernel after weights: its reduction and store stages less a reduction "
        "in a loop; median of three shapes.",
        centre=_tails,
    ),
    Reading(
        field="kernel_exit_warm_s",
        digits=2,
        note="Period of a chain of kernels whose code is held, by the loads they do one after another: at none, less "
        "the release; around: other grids and blocks.",
        centre=lambda read: _held_tails(read, [(132, 256)]),
        around=lambda read: _held_tails(read, [(132, 128), (132, 448), (8, 256), (56, 256), (264, 256)]),
    ),
    Reading(
        field="block_dispatch_s",
        digits=2,
        note="Period of empty nodes at 528 blocks less that at 132; around: nodes that write, and first to last entry "
        "of a full grid.",
        centre=lambda read: _dispatch(read, "empty"),
        around=lambda read: [
            *_dispatch(read, "write_rows"),
            *(
                (label, value / (read.file.num_sms - 1))
                for label, value in _named(
                    read.all(
                        "graph_boundary",
                        "first_to_last_block",
                        pdl=False,
                        producer_blocks=read.file.num_sms,
                        consumer_blocks=read.file.num_sms,
                    )
                )
            ),
        ],
    ),
    Reading(
        field="instruction_s",
        digits=3,
        note="Straight code of 2 to 32 KB that ran just before, one warp, four chains of its values: slope; around: "
        "eight warps, which share the issue.",
        centre=lambda read: _instructions(read, threads=32, state="warm"),
        around=lambda read: _instructions(read, threads=256, state="warm"),
    ),
    Reading(
        field="cold_instruction_s",
        digits=3,
        note="The same where neither the SMs nor L2 hold it; around: eight warps.",
        centre=lambda read: _instructions(read, threads=32, state="in_hbm"),
        around=lambda read: _instructions(read, threads=256, state="in_hbm"),
    ),
    Reading(
        field="dependent_mma_s",
        digits=3,
        note="mma.sync m16n8k16 in bf16, each adding to the sums of the one before, 1 to 8 warps; around: 16 warps, "
        "and two chains a warp.",
        centre=lambda read: [
            one for warps in (1, 4, 8) for one in _named(read.all("product_chain", "step", chains=1, warps=warps))
        ],
        around=lambda read: [
            *_named(read.all("product_chain", "step", chains=1, warps=16)),
            *_named(read.all("product_chain", "step", chains=2, warps=1)),
        ],
    ),
    Reading(
        field="warp_sum_s",
        digits=3,
        note="Five shuffles and additions, each waiting for the one before: what they add to the period of a chain of "
        "kernels; around: blocks of 14 warps.",
        centre=lambda read: _chain(read, "warp_sums", 1, **CHAIN),
        around=lambda read: _chain(read, "warp_sums", 1, blocks=132, threads=448),
    ),
    Reading(
        field="block_reduction_s",
        digits=3,
        note="512 threads in a loop: 10 shuffles, shared memory, two __syncthreads; around: 128 to 1,024 threads, and "
        "once in a tiny kernel, with the slowest warp's load in it.",
        centre=lambda read: _named(read.all("block_reduction", "time", threads=512)),
        around=lambda read: [
            *_named(read.all("block_reduction", "time")),
            *_tiny(read, "reduction", pdl=False, tiny_threads=512),
        ],
    ),
    Reading(
        field="cluster_sync_s",
        digits=2,
        note="Barrier of 8 blocks with a store to the neighbour, 16 clusters; around: one cluster, no store.",
        centre=lambda read: _named(read.all("cluster_barrier", "time", blocks=128, store_to_neighbour=True)),
        around=lambda read: _named(read.all("cluster_barrier", "time")),
    ),
    Reading(
        field="grid_barrier_s",
        digits=3,
        note="A block on every SM, release add and acquire poll by one thread of each; around: fewer blocks, and the "
        "same with its round trips as long as a hand-over's beside a stream at HBM's ceiling.",
        centre=lambda read: _named(read.all("grid_barrier", "time", blocks=read.file.num_sms)),
        around=lambda read: [
            *_named(read.all("grid_barrier", "time")),
            *_queued_barrier(read),
        ],
    ),
    Reading(
        field="last_block_s",
        digits=3,
        note="From the last arrival of a block to loaded data of all, through one counter, 64 blocks and all SMs; "
        "around: fewer and more blocks, and a fence of every thread.",
        centre=lambda read: [
            one
            for blocks in (64, read.file.num_sms)
            for one in _named(read.all("last_block_barrier", "arrival_to_loaded", blocks=blocks, fence=False))
        ],
        around=lambda read: _named(read.all("last_block_barrier", "arrival_to_loaded")),
    ),
    Reading(
        field="counter_handoff_s",
        digits=3,
        note="16 bytes and a release store to an acquire poll on another SM, half a round trip, idle and beside up to "
        "32 KiB in flight on each SM; around: beside 64 KiB.",
        centre=lambda read: _beside(read, "handoff_beside_stream", "one_handoff", (0, 16384, 32768)),
        around=lambda read: _beside(read, "handoff_beside_stream", "one_handoff", (LOADED_BYTES,)),
    ),
    Reading(
        field="system_fence_s",
        digits=2,
        note="__threadfence_system after a store to own memory, 32 and 256 threads.",
        centre=lambda read: _named(read.all("fence", "time", scope="system")),
    ),
    Reading(
        field="loopback_visibility_s",
        digits=2,
        note="A row pushed to slots of the own memory until a poller in another block has it, half a round: at one "
        "slot, by a straight line over 1, 8 and 16; around: other grids at 16 slots.",
        centre=lambda read: _slots(read, 0, same_block=False),
        around=lambda read: _slots_of_others(read, 0),
        joint=True,
    ),
    Reading(
        field="loopback_slot_s",
        digits=2,
        note="As loopback_visibility_s: what each further slot adds, a store and a load a thread; around: other grids, "
        "and the line of a block that polls what it pushed itself.",
        centre=lambda read: _slots(read, 1, same_block=False),
        around=lambda read: [*_slots_of_others(read, 1), *_slots(read, 1, same_block=True)],
        joint=True,
    ),
    Reading(
        field="fp4_weights_per_clock_per_sm",
        digits=2,
        note="The multiplying loop of the experts out of shared memory, 14 and 16 warps: decoding, products, scales, "
        "sums; around: 8 warps, and one block alone.",
        centre=lambda read: [
            one for warps in (14, 16) for one in _rates(read, "whole", warps, blocks=read.file.num_sms)
        ],
        around=lambda read: [*_rates(read, "whole", 8), *_rates(read, "whole", 14)],
    ),
)

CURVE_NOTE = (
    "Ring of four bulk copies on each SM, capped at the ceiling; the interval is of plain loads with as many bytes in "
    "flight. Eight copies of 1 to 2 KiB each are bound by issue and not inside it."
)
L2_NOTE = (
    "Of regions of 8 to 40 MiB that all SMs had read, what was left after other traffic, by least-recently-used "
    "replacement (least squares over all cases, whole MiB). Low: one region size left out at a time; high: the largest "
    "region that is read at L2 speed when each SM returns to its own part."
)
CURVE_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """One determined value. ``low`` and ``high`` are in its unit, for the curve factors on all points."""

    field: str
    value: Any
    low: float
    high: float
    statistical: tuple[float, float]  # 90 % of the bootstrap alone, in the unit of low and high
    cases: tuple[Case, ...]
    note: str
    how: str  # "direct" or "joint"
    left_out_error: float | None  # worst relative error of a central case predicted without it; None: only one case


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a fit found: values, what it could not determine, and the samples it refused."""

    file: SampleFile
    base: Machine
    fitted: tuple[Fitted, ...]
    undetermined: dict[str, str]  # field -> reason
    seed: int

    def profile(self, name: str) -> dict[str, Any]:
        """The profile document: fitted values, and the base's for all others."""
        document: dict[str, Any] = json.loads(profile_path(self.base.name).read_text(encoding="utf-8"))
        own = PROFILES.get(self.file.gpu) == self.base.name
        entries = document["values"]
        if not own:  # what was measured on another GPU is not measured here
            for entry in entries.values():
                if entry["kind"] == "measured":
                    entry["kind"] = "inferred"
                    entry["note"] = f"Carried over from {self.base.name}. {entry.get('note', '')}".strip()
        for one in self.fitted:
            entries[one.field] = _entry(one, entries[one.field]["unit"], self.file.date)
        return {**document, "name": name}


def profile_text(document: dict[str, Any]) -> str:
    """A profile as it is stored, byte for byte."""
    return json.dumps(document, indent=2) + "\n"


def base_of(gpu: str, given: str | None = None) -> Machine:
    """Shipped profile whose values stay where samples give none: ``given``, or that of the device.

    Raises UserError for a device without one, and for a name or a file that is no shipped profile.
    """
    if given is not None:
        if given.lower().endswith(".json"):
            raise UserError(f"base is {given!r}; accepted: a shipped profile, {', '.join(machine_names())}")
        return load_machine(given)
    if gpu not in PROFILES:
        raise UserError(
            f"no shipped profile is of {gpu!r}; give one to start from with --base: {', '.join(PROFILES.values())}"
        )
    return load_machine(PROFILES[gpu])


class Fitting:
    """A fit under way: the values that one file has given so far, and why it gives no others."""

    def __init__(self, file: SampleFile, base: Machine, seed: int) -> None:
        self.file, self.base, self.seed = file, base, seed
        self.read = Reader(file)
        self.readers = [Reader(file, _drawer(seed, number)) for number in range(BOOTSTRAP_DRAWS)]
        self.fitted: list[Fitted] = []
        self.undetermined: dict[str, str] = {}

    def keep(self, name: str, step: Callable[[], Fitted]) -> None:
        """The value of ``step``, or the reason that samples do not determine it."""
        try:
            self.fitted.append(step())
        except Undetermined as reason:
            self.undetermined[name] = str(reason)
        except KeyError as missing:
            self.undetermined[name] = f"a case lacks the parameter {missing}"

    def read_all(self, readings: Sequence[Reading]) -> None:
        for reading in readings:
            self.keep(reading.field, partial(_direct, reading, self.read, self.readers))

    def value_of(self, name: str) -> Any:
        """A value fitted so far, or that of the profile that the fit starts from."""
        return next((one.value for one in self.fitted if one.field == name), getattr(self.base, name))

    def finished(self, otherwise: str) -> Calibration:
        """The calibration; ``otherwise`` says why values stay that no step was about."""
        known = {one.field for one in self.fitted} | self.undetermined.keys()
        rest = {one.name: otherwise for one in fields(Machine) if one.metadata and one.name not in known}
        return Calibration(
            file=self.file,
            base=self.base,
            fitted=tuple(self.fitted),
            undetermined=self.undetermined | rest,
            seed=self.seed,
        )


def fit(file: SampleFile, base: Machine, seed: int = 0) -> Calibration:
    """All values that the samples of one file of probes determine. Needs scipy.

    Raises UserError where the file is of kernels, or scipy is not installed.
    """
    if file.kind != "primitives":
        raise UserError(f"samples {file.path} are of {file.kind}; accepted for a fit are those of 'k3sim calibrate'")
    require_scipy()
    under_way = Fitting(file, base, seed)
    under_way.read_all(READINGS)
    read, readers = under_way.read, under_way.readers
    ceiling = under_way.value_of("hbm_read_bytes_per_s")
    under_way.keep("hbm_in_flight_curve", partial(_curve, read, readers, ceiling))
    rate = under_way.value_of("l2_read_bytes_per_s")
    under_way.keep("l2_effective_bytes", partial(_l2_size, read, readers, rate))
    under_way.fitted += [_reported("num_sms", file.num_sms), _reported("l2_capacity_bytes", file.l2_bytes)]
    return under_way.finished("no probe reads it")


def labels_read(file: SampleFile) -> set[str]:
    """Labels of the stable samples that any value is read from."""
    read = Reader(file)
    steps: list[Callable[[], object]] = [partial(cases_of, one, read) for one in READINGS]
    steps.append(partial(_points, read, math.inf))
    for step in steps:
        try:
            step()
        except (Undetermined, KeyError):
            continue  # says nothing of other values
    survivals(read)
    read.all("hbm_loads_in_flight", "read_rate")
    read.all("l2_read", "read_rate")
    return read.used


def require_scipy() -> None:
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise UserError("fitting needs scipy: pip install 'k3sim[calibrate]'") from None


def _drawer(seed: int, number: int) -> Callable[[Sample], float]:
    """A bootstrap draw of a sample's value: runs with replacement, then the median of drawn repetitions.

    The generator depends on the sample too, so that adding a case to a file moves no other value.
    """
    drawn: dict[str, float] = {}

    def draw(sample: Sample) -> float:
        key = sample.label
        if key not in drawn:
            random_ = random.Random(f"{seed} {number} {first_named('probe', key)}")
            runs = random_.choices(sample.runs, k=len(sample.runs))
            drawn[key] = statistics.fmean(_median_of(run, random_) for run in runs)
        return drawn[key]

    return draw


def _median_of(run: Run, random_: random.Random) -> float:
    # The median of so many repetitions is near enough normal; deciles stand for repetitions, which older files lack.
    return random_.gauss(run.median, run.standard_error)


def cases_of(reading: Reading, read: Reader) -> tuple[Case, ...]:
    """What the samples state of a field: the cases that give its value, then those around. Undetermined without any."""
    centre = _needs(reading.centre(read), reading.field)
    cases = [Case(label=label, value=value, central=True) for label, value in centre]
    seen = {label for label, _ in centre}
    around = [(label, value) for label, value in reading.around(read) if label not in seen]
    cases += [Case(label=label, value=value, central=False) for label, value in around]
    return tuple(cases)


def _direct(reading: Reading, read: Reader, readers: Sequence[Reader]) -> Fitted:
    cases = cases_of(reading, read)
    centre = [one.value for one in cases if one.central]
    value = rounded(statistics.median(centre), reading.digits)
    draws = sorted(statistics.median(value for _, value in reading.centre(one)) for one in readers)
    statistical = quantiles(draws)
    bounds = [value, *statistical, *(one.value for one in cases)]
    return Fitted(
        field=reading.field,
        value=value,
        low=min(value, outward(min(bounds), -1)),
        high=max(value, outward(max(bounds), +1)),
        statistical=statistical,
        cases=cases,
        note=reading.note,
        how="joint" if reading.joint else "direct",
        left_out_error=_left_out(centre),
    )


def _left_out(values: Sequence[float]) -> float | None:
    """Worst error of predicting one case by the median of the others."""
    if len(values) < 2:
        return None
    return max(
        abs(statistics.median([*values[:index], *values[index + 1 :]]) / value - 1)
        for index, value in enumerate(values)
    )


def _curve(read: Reader, readers: Sequence[Reader], ceiling: float) -> Fitted:
    points = _points(read, ceiling)
    rates = dict(points)
    others = [
        (one.label, value / rates[one.parameters["bytes_in_flight_per_sm"]])
        for one, value in read.all("hbm_loads_in_flight", "read_rate")
        if one.parameters["bytes_in_flight_per_sm"] in rates
    ]
    draws = sorted(
        statistics.fmean(rate / rates[at] for at, rate in _points(one, ceiling) if at in rates) for one in readers
    )
    statistical = quantiles(draws)
    bounds = [1.0, *statistical, *(one for _, one in others)]
    cases = [Case(label=f"hbm_bulk_in_flight at {at} B, of the curve", value=1.0, central=True) for at, _ in points]
    cases += [Case(label=f"{label}, of the curve", value=one, central=False) for label, one in others]
    left_out = [
        abs(_between(points[index - 1], points[index + 1], points[index][0]) / points[index][1] - 1)
        for index in range(1, len(points) - 1)
    ]
    return Fitted(
        field="hbm_in_flight_curve",
        value=[[at, rounded(rate, CURVE_DIGITS)] for at, rate in points],
        low=min(1.0, outward(min(bounds), -1)),
        high=max(1.0, outward(max(bounds), +1)),
        statistical=statistical,
        cases=tuple(cases),
        note=CURVE_NOTE,
        how="direct",
        left_out_error=max(left_out, default=None),
    )


def _points(read: Reader, ceiling: float) -> list[tuple[int, float]]:
    """(bytes in flight per SM, B/s) of the ring of four copies, up to the first point at the ceiling."""
    found = sorted(
        (one.parameters["bytes_in_flight_per_sm"], value)
        for one, value in read.all("hbm_bulk_in_flight", "read_rate", stages=4, blocks=read.file.num_sms)
    )
    if len(found) < 3:
        raise Undetermined(f"{len(found)} stable samples of hbm_bulk_in_flight, four stages; accepted are 3 or more")
    points: list[tuple[int, float]] = []
    for at, rate in found:
        points.append((at, min(rate, ceiling)))
        if rate >= ceiling:
            break
    return points


def _between(before: tuple[int, float], after: tuple[int, float], at: int) -> float:
    """The curve at ``at`` by a straight line in log-log, as the machine interpolates it."""
    share = math.log(at / before[0]) / math.log(after[0] / before[0])
    return before[1] * math.pow(after[1] / before[1], share)


Survival = tuple[str, float, float, float]  # case, region and traffic in bytes, share that was left


def survivals(read: Reader) -> list[Survival]:
    return [
        (one.label, one.parameters["region_mib"] * MIB, one.parameters["streamed_mib"] * MIB, value)
        for one, value in read.all("l2_survival", "kept", evict_first=False)
    ]


def kept_share(capacity: float, region: float, traffic: float) -> float:
    """What least-recently-used replacement leaves of a region (sim/components/memory.py)."""
    return min(1.0, max(0.0, (capacity - traffic) / region))


def fit_capacity(cases: Sequence[Survival]) -> float:
    """Capacity in bytes, by least squares over the shares that were left."""
    from scipy.optimize import least_squares

    def residuals(capacity_mib: Any) -> list[float]:
        return [kept_share(float(capacity_mib[0]) * MIB, region, traffic) - kept for _, region, traffic, kept in cases]

    # The sum of squares has kinks: begin from the best of a coarse sweep.
    start = min(range(4, 257, 2), key=lambda mib: sum(one * one for one in residuals([mib])))
    found = least_squares(residuals, [float(start)], bounds=([1.0], [1024.0]), diff_step=1e-3)
    return float(found.x[0]) * MIB


def _reported(name: str, value: int) -> Fitted:
    """A size that the device states of itself."""
    return Fitted(
        field=name,
        value=value,
        low=value,
        high=value,
        statistical=(value, value),
        cases=(Case(label="the device's own report", value=float(value), central=True),),
        note="As the device reports it.",
        how="direct",
        left_out_error=None,
    )


def _l2_size(read: Reader, readers: Sequence[Reader], l2_bytes_per_s: float) -> Fitted:
    cases = survivals(read)
    partly = [one for one in cases if 0.1 < one[3] < 0.9]
    if len(partly) < 3:
        # Shares of all or nothing bound the capacity and do not fix it.
        raise Undetermined(f"{len(partly)} stable cases of l2_survival keep part of a region; accepted are 3 or more")
    capacity = fit_capacity(cases)
    regions = sorted({one[1] for one in cases})
    subsets = [[one for one in cases if one[1] != region] for region in regions] if len(regions) > 1 else []
    others = [fit_capacity(subset) for subset in subsets]
    draws = sorted(fit_capacity(survivals(one)) for one in readers[:40])
    statistical = quantiles(draws)
    whole = round(capacity / MIB) * MIB
    shown = [Case(label=f"{label} ({share:.2f} left)", value=capacity, central=True) for label, _, _, share in partly]
    errors = [
        abs(kept_share(other, region, traffic) - kept)
        for size, other in zip(regions, others, strict=False)
        for _, region, traffic, kept in cases
        if region == size
    ]
    own_parts = [
        one.parameters["region_bytes"]
        for one, value in read.all("l2_read", "read_rate", tiles_change_sm=False)
        if value > 0.95 * l2_bytes_per_s
    ]
    bounds = [whole, *statistical, *others]
    return Fitted(
        field="l2_effective_bytes",
        value=whole,
        low=math.floor(min(bounds) / MIB) * MIB,
        high=max([math.ceil(max(bounds) / MIB) * MIB, *own_parts]),
        statistical=statistical,
        cases=tuple(shown),
        note=L2_NOTE,
        how="joint",
        left_out_error=max(errors, default=None),
    )


def rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits - 1}e}")


def outward(value: float, direction: int) -> float:
    """Four significant digits, away from the value that it bounds."""
    if value == 0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(abs(value))) - 3)
    units = value / step
    near = round(units)
    # A quotient of a value that has four digits is off them by rounding alone.
    whole = near if abs(units - near) < 1e-6 else (math.ceil(units) if direction > 0 else math.floor(units))
    return float(f"{whole * step:.3e}")


def _entry(one: Fitted, unit: str, date: str) -> dict[str, Any]:
    curve = one.field == "hbm_in_flight_curve"
    return {
        "value": one.value,
        "unit": unit,
        "kind": "measured" if one.how == "direct" else "fitted",
        "source": SOURCE,
        "date": date,
        **({"interval": [one.low, one.high]} if curve else {"low": one.low, "high": one.high}),
        "note": one.note,
    }
