"""Waits of a timeline of which only the start and end of each kernel are known, as a profiler gives them.

``divide`` gives every kernel spans, so that the walk of ``waits`` runs on a measured step as on a simulated one. What
it goes by is the program: which kernels a call waits for, what it reads, and how much of that needs no predecessor.

* From its start until the last kernel that it waits for has ended, an early launch *waits*: whatever it does meanwhile
  runs beside that kernel, whose time it is.
* Then its bytes, at the read bandwidth that was measured: *weights* and *KV and state*, less those that it may have
  read before (as the engine of the simulator counts them: up to what its load pipeline holds) and those that a prefetch
  may have brought into L2, each no more than the time since its start allows. So this is the least that reading took.
* What is left is *exchange* for a kernel that takes what peers sent, and *kernel* for others. Release, first bytes,
  dependent loads, arithmetic, barriers, a share of HBM lost to another stream, stores and drain are all in there: start
  and end do not tell them apart. Bytes are drawn before it, though when they came is not known either.
* A kernel may start after all that it waits for has ended: the gap is *launch*, completion of the one before included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from k3sim.kernels.costs import work_of
from k3sim.kernels.work import THREADS_PER_SM, ReadKind, Work
from k3sim.model.program import Call, Program
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline


@dataclass(frozen=True, kw_only=True)
class CallFacts:
    """What the program knows of a kernel whose times were measured. Calls go by their index in the program.

    ``prefetched`` holds (call, bytes) of the prefetches that fetch what this kernel reads.
    """

    call: int
    launch: str
    waits_for: tuple[int, ...]
    polls: bool
    weight_bytes: int
    kv_state_bytes: int
    early_bytes: int  # of them, what may be read before the predecessor's end
    prefetched: tuple[tuple[int, int], ...] = ()


def facts_of(program: Program, num_sms: int) -> dict[int, CallFacts]:
    """Facts of every call by its index, on a GPU of ``num_sms`` SMs."""
    previous: dict[str, int] = {}
    fetched: dict[str, tuple[int, int]] = {}  # region -> the prefetch that fetches it, and how much
    found: dict[int, CallFacts] = {}
    for call in program.calls:
        work = work_of(call.operator, call.weights, call.shape)
        if work.prefetches:
            for one in work.passes:
                fetched.update({read.region: (call.index, read.num_bytes) for read in one.reads})
        reads = [] if work.prefetches else [read for one in work.passes for read in one.reads]
        state = sum(read.num_bytes for read in reads if read.kind is ReadKind.KV_STATE)
        written = sum(one.written_bytes for one in work.passes)
        found[call.index] = CallFacts(
            call=call.index,
            launch=call.launch,
            waits_for=_waits_for(call, previous.get(call.stream)),
            polls=bool(call.receives),
            weight_bytes=sum(read.num_bytes for read in reads) - state,
            kv_state_bytes=state + written,
            early_bytes=0 if work.prefetches or call.launch != "pdl" else _early_bytes(work, num_sms),
            prefetched=tuple(fetched[read.region] for read in reads if read.region in fetched),
        )
        previous[call.stream] = call.index
    return found


def _waits_for(call: Call, previous: int | None) -> tuple[int, ...]:
    needed = [*call.after, *(index for index in call.receives if index != call.index)]
    return tuple(dict.fromkeys(needed if previous is None else [previous, *needed]))


def _early_bytes(work: Work, num_sms: int) -> int:
    """Bytes of the first pass that streams which need no predecessor, as far as the load pipelines hold them."""
    first = next((one for one in work.passes if one.reads), None)
    if first is None:
        return 0
    most_on_an_sm = min(work.max_blocks_per_sm, THREADS_PER_SM // work.threads_per_block)
    resident_blocks = min(work.num_blocks, num_sms * most_on_an_sm)
    early = sum(read.num_bytes for read in first.reads if read.early)
    return min(early, resident_blocks * work.bytes_in_flight_per_block)


def divide(timeline: Timeline, facts: Mapping[int, CallFacts], read_bytes_per_s: float) -> Timeline:
    """``timeline`` of one rank with causes, bytes and spans of its kernels; ``facts`` by index of a kernel."""
    bytes_per_us = max(1, round(read_bytes_per_s / 1e6))
    runs = {run.index: run for run in timeline.kernels}
    return replace(timeline, kernels=[_divided(run, facts[run.index], runs, bytes_per_us) for run in timeline.kernels])


def _divided(run: KernelRun, facts: CallFacts, runs: Mapping[int, KernelRun], bytes_per_us: int) -> KernelRun:
    # One that ended later was not waited for, whatever the program allows.
    causes = [index for index in facts.waits_for if index in runs and runs[index].end_ps < run.end_ps]
    last = max(causes, key=lambda index: (runs[index].end_ps, index), default=-1)
    free_ps = max(run.start_ps, runs[last].end_ps) if last >= 0 else run.start_ps

    def movable(since_ps: int) -> int:
        return max(0, free_ps - since_ps) * bytes_per_us // PS_PER_US

    there = min(facts.early_bytes, movable(run.start_ps))
    for index, num_bytes in facts.prefetched:
        if index in runs:
            there += min(num_bytes, movable(runs[index].start_ps))
    counted = facts.weight_bytes + facts.kv_state_bytes
    left = max(0, counted - there)
    hbm_ps = min(run.end_ps - free_ps, -(-left * PS_PER_US // bytes_per_us))
    state_ps = hbm_ps * facts.kv_state_bytes // counted if counted else 0
    spans: list[Span] = []
    now = run.start_ps

    def span(phase: Phase, end_ps: int, cause: int = -1) -> None:
        nonlocal now
        if end_ps > now:
            spans.append(Span(phase, now, end_ps, cause, runs[cause].end_ps if cause >= 0 else -1))
            now = end_ps

    span(Phase.DEPENDENCY, free_ps, last)
    span(Phase.WEIGHTS, free_ps + hbm_ps - state_ps)
    span(Phase.KV_STATE, free_ps + hbm_ps)
    span(Phase.EXCHANGE if facts.polls else Phase.RUN, run.end_ps)
    return replace(run, spans=spans, launched_by=last, causes=tuple(causes), hbm_bytes=counted)
