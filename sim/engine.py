"""The engine: runs a program on a machine and returns the timeline.

Each stream of each rank is a launch queue, each kernel a process that goes through its phases (design, "What a
kernel does in time") and asks the components for what it needs: room on the SMs, HBM and L2, NVLink. The engine
knows no operator by name; it prices the Work that the cost functions state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from k3sim.kernels import costs
from k3sim.kernels.costs import work_of
from k3sim.kernels.work import ActivationForm, Barrier, Pass, Read, ReadKind, Unit, Work
from k3sim.model.program import Call, Program
from k3sim.sim.components.fabric import Exchange, Fabric
from k3sim.sim.components.memory import Memory, StreamLimit, bytes_per_us, picoseconds
from k3sim.sim.components.occupancy import Occupancy, Placement, Share, warps_of
from k3sim.sim.components.skew import Paces, Skew, expected_maximum_of_normals
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import KernelRun, Phase, Span, Timeline

Steps = Generator[simpy.Event, Any, None]

# Of code that ran before: straight code of 32 KB runs again at its pace, behind 192 KB of others' it is fetched anew
# (H200, probe ``cold_code``); 64 is assumed between them. Which SMs a kernel's blocks ran on is not followed.
HELD_CODE_BYTES = 64 * 1024
SCHEDULERS = 4  # of an SM: each issues an instruction of one warp a clock
SMEM_BYTES_PER_CLOCK = 128  # that an SM loads from shared memory: 32 banks of 4 bytes (CUDA C++ Programming Guide)


@dataclass(eq=False)
class _State:
    """What others may wait for of one kernel: its trigger and its end."""

    run: KernelRun
    triggered: simpy.Event
    done: simpy.Event
    trigger_ps: int = -1
    sent_ps: int = -1  # when its last store to peers left
    is_host: bool = False


@dataclass(eq=False)
class _Stream:
    """Bytes under way for one pass, and when the HBM and the L2 part were through.

    Of reads that were started ahead, ``through`` fires when they are complete and ``budget`` says how many
    bytes of the early reads they cover.
    """

    hbm_bytes: int = 0
    l2_bytes: int = 0
    kv_state_bytes: int = 0
    hbm_end_ps: int = -1
    l2_end_ps: int = -1
    parts: list[simpy.Event] = field(default_factory=list)
    through: simpy.Event | None = None
    asked: simpy.Event | None = None  # for the last of it: no more is left to come than may be on its way at once
    budget: int = 0
    began_ps: int = 0
    more: _Stream | None = None  # of blocks that found room later

    def expose(self, ahead: _Stream, first_ps: int, start_ps: int) -> None:
        """Count in of what was started ahead what came after ``start_ps``, evenly from ``first_ps`` on."""
        if ahead.hbm_end_ps > start_ps:
            exposed_ps, whole_ps = ahead.hbm_end_ps - max(first_ps, start_ps), ahead.hbm_end_ps - first_ps
            self.hbm_bytes += ahead.hbm_bytes * exposed_ps // whole_ps
            self.kv_state_bytes += ahead.kv_state_bytes * exposed_ps // whole_ps
        self.hbm_end_ps = max(self.hbm_end_ps, ahead.hbm_end_ps)
        self.l2_end_ps = max(self.l2_end_ps, ahead.l2_end_ps)


def code_of(call: Call) -> str:
    """What tells a kernel's machine code from others': products are compiled, or chosen by cuBLAS, for their shape."""
    return " ".join([call.operator, *(f"{one.num_outputs}x{one.depth}" for one in call.weights)])


class _Gpu:
    """Components of one rank."""

    def __init__(self, env: simpy.Environment, machine: Machine) -> None:
        self.memory = Memory(env, machine)
        self.slots = Occupancy(env, machine)
        self.variance_ps2 = 0.0  # of the rank's time since the last exchange, for expected skew
        self._code: dict[str, int] = {}  # of kernels in the order of their last launch

    def fetches(self, code: str, num_bytes: int) -> bool:
        """Whether a kernel launched now fetches its code (never where its size is unknown, ``num_bytes`` 0)."""
        if not num_bytes:
            return False
        others = 0
        for name, other_bytes in reversed(self._code.items()):
            if name == code:
                break
            others += other_bytes
        held = code in self._code and others + num_bytes <= HELD_CODE_BYTES
        self._code.pop(code, None)
        self._code[code] = num_bytes
        return not held


@dataclass(eq=False)
class _Room:
    """A kernel at work: its GPU, its record, its resident blocks and its pace."""

    gpu: _Gpu
    run: KernelRun
    work: Work
    resident_blocks: int
    pace: float
    rest: _Stream | None = None  # what blocks that started later have asked for
    l1_bytes: int = 0  # of an SM, as carved out: loads into registers have their place there until they have come
    asking: list[simpy.Event] = field(default_factory=list)  # fire when blocks have asked for their early reads
    in_waves: bool = False  # its blocks make room for one another


class _Engine:
    def __init__(self, program: Program, machine: Machine, ranks: tuple[int, ...], skew: Skew, seed: int) -> None:
        self.env = simpy.Environment(initial_time=0)
        self.program = program
        self.machine = machine
        self.ranks = ranks
        self.skew = skew
        self.paces = Paces(machine.rank_skew_relative_sd, seed)
        self.fabric = Fabric(self.env, machine, ranks)
        self.gpus = {rank: _Gpu(self.env, machine) for rank in ranks}
        self.works = [None if call.launch == "host" else work_of(call.operator, call.weights, call.shape)
                      for call in program.calls]
        # Nothing is known of the code of public kernels.
        own = program.path.kernel_set == "own"
        self.code_bytes = [costs.code_of(call.operator).num_bytes if own else 0 for call in program.calls]
        self.states: dict[tuple[int, int], _State] = {}
        self._maxima: dict[int, float] = {}
        num_calls = len(program.calls)
        for position, rank in enumerate(ranks):
            for call in program.calls:
                run = KernelRun(
                    index=position * num_calls + call.index,
                    rank=rank,
                    stream=call.stream,
                    layer=call.layer,
                    kind=call.kind,
                    stage=call.stage,
                )
                self.states[rank, call.index] = _State(run, simpy.Event(self.env), simpy.Event(self.env))

        # Machine primitives in picoseconds, once.
        self.launch_ps = picoseconds(machine.launch_latency_s)
        self.early_launch_ps = picoseconds(machine.pdl_trigger_to_launch_s)
        self.refill_ps = picoseconds(machine.block_refill_s)
        self.fork_ps = picoseconds(machine.fork_s)
        self.entry_ps = picoseconds(machine.kernel_prologue_s)
        self.tail_ps = picoseconds(machine.kernel_exit_cold_s)
        self.held_tail_ps = picoseconds(machine.kernel_exit_warm_s)
        self.warp_sum_ps = picoseconds(machine.warp_sum_s)
        self.flush_ps = picoseconds(machine.grid_completion_s)
        self.handoff_ps = picoseconds(machine.counter_handoff_s)
        self.num_sms = int(machine.num_sms)
        self.hbm_latency_ps = picoseconds(machine.hbm_latency_s)
        self.reduction_ps = picoseconds(machine.block_reduction_s)
        self.setup_ps = picoseconds(machine.tensor_core_setup_s)
        self.product_chain_ps = picoseconds(machine.dependent_mma_s)
        self.visibility_ps = picoseconds(machine.nvlink_visibility_s)
        self.slot_ps = picoseconds(machine.slot_visibility_s)
        self.barrier_ps = {
            Barrier.NONE: 0,
            Barrier.CLUSTER: picoseconds(machine.cluster_sync_s),
            Barrier.CLUSTER_RELEASE: 2 * picoseconds(machine.cluster_sync_s),
            Barrier.GRID: picoseconds(machine.grid_barrier_s),
            Barrier.LAST: picoseconds(machine.last_block_s),
            Barrier.LAUNCH: self.tail_ps + self.flush_ps + self.launch_ps + self.entry_ps,
        }

    # -- launch queue -----------------------------------------------------------------------------------------

    def issue(self, rank: int, calls: list[Call]) -> Steps:
        """One stream: hand each call to the GPU when its turn has come."""
        previous: _State | None = None
        for call in calls:
            state = self.states[rank, call.index]
            # What a programmatic launch joins from another stream lets it in by its trigger too: capture makes all
            # edges of such a node programmatic (timestamps of blocks: the tail begins before the shared columns are sent).
            # Its wait is for the end of all of them.
            before, let_in = [self.states[rank, index] for index in call.after], []
            if previous is not None:
                if call.launch == "pdl":
                    before, let_in = [], [previous, *before]
                elif call.launch == "task":
                    let_in = [previous]
                else:
                    before = [*before, previous]
            for needed in before:
                if not needed.done.triggered:
                    yield needed.done
            for needed in let_in:
                if not needed.triggered.triggered:
                    yield needed.triggered
            ready_ps, cause = 0, None
            for needed in before:
                if needed.run.end_ps >= ready_ps:
                    ready_ps, cause = needed.run.end_ps, needed
            held_back = cause is not None
            for needed in let_in:
                if needed.trigger_ps >= ready_ps:
                    ready_ps, cause, held_back = needed.trigger_ps, needed, False
            self.env.process(self.kernel(rank, call, state, previous, cause, held_back))
            previous = state

    # -- one kernel -------------------------------------------------------------------------------------------

    def kernel(
        self, rank: int, call: Call, state: _State, previous: _State | None, cause: _State | None, held_back: bool
    ) -> Steps:
        """Phases of one kernel. ``held_back``: a completed predecessor, not an early trigger, let it launch."""
        env, run, gpu = self.env, state.run, self.gpus[rank]
        now = int(env.now)
        cause_index = -1 if cause is None else cause.run.index
        run.start_ps = now
        run.launched_by = cause_index
        causes: list[int] = [] if cause is None else [cause_index]
        work = self.works[call.index]
        if work is None:
            yield from self.host(call, state, cause_index)
            return
        pace = self.paces.pace(rank, call.index) if self.skew is Skew.SAMPLED else 1.0
        fetches = gpu.fetches(code_of(call), self.code_bytes[call.index])
        launches = call.launch != "task"
        if launches and held_back and cause is not None and not cause.is_host:
            # Of several nodes behind one, that of its own stream comes first.
            forks = run.stream != "main" and cause.run.stream == "main"
            yield env.timeout(self.flush_ps + (self.fork_ps if forks else 0))
            self.span(run, Phase.RELEASE, cause_index, now)
        # First instruction: of a node behind a full edge, or of one that its predecessor's trigger lets in.
        early = launches and not held_back and cause is not None and not cause.is_host
        first_ps = int(env.now) + (0 if not launches else self.early_launch_ps if early else self.launch_ps)
        held = gpu.slots.footprint(work)
        granted = gpu.slots.acquire(held, placed=bool(work.registers_per_thread))
        waited = granted is not None
        if granted is not None:
            left_by = yield granted
            self.span(run, Phase.SM_SLOTS, left_by, int(env.now))
        placement = gpu.slots.place(work, held) if work.registers_per_thread else None
        if placement is not None and not placement.on:
            waited = True
            left_by = yield placement.whole if work.co_resident else placement.begun
            self.span(run, Phase.SM_SLOTS, left_by, int(env.now))
        if launches:
            # A launch that waits for room is ready when there is some. The first wave: later blocks are dispatched
            # while earlier ones run.
            if waited:
                first_ps = max(first_ps, int(env.now) + self.refill_ps)
            dispatch_ps = picoseconds(held.blocks * self.machine.block_dispatch_s)
            yield env.timeout(first_ps - int(env.now) + self.entry_ps + dispatch_ps)
            self.span(run, Phase.LAUNCH, cause_index, now)
        started = placement is None or not placement.missing
        if work.prefetches:
            yield from self.prefetch(gpu, run, work)
            self.finish(rank, state, held, causes)
            return
        room = _Room(gpu, run, work, held.blocks if placement is None else held.blocks - placement.missing, pace)
        room.l1_bytes = gpu.slots.l1_bytes(work, placement)
        # The first pass that streams may be asked for at once, whatever the passes before it wait for.
        first = next((position for position, one in enumerate(work.passes) if one.reads), 0)
        both_ways = call.index in call.receives
        if placement is not None and not started:
            env.process(self.start_rest(room, placement, held.blocks, work.passes[first], call, state))
        ahead: dict[int, _Stream | None] = {first: self.start_early(room, work.passes[first])}
        if call.trigger == "start" and started:
            if work.trigger_waits_for_loads:
                env.process(self.trigger_when_asked(room, state))
            else:
                self.trigger(state)

        # Dependency: the stream's predecessor, unless all data comes through buffers that peers fill.
        polls = tuple(index for index in call.receives if index != call.index)
        # A late trigger comes after the wait on the predecessor, and before the polling where there is some.
        late = call.trigger == "wait"
        needed = [previous] if previous is not None and call.launch != "graph" and (late or not polls) else []
        if not launches or needed:
            needed += [self.states[rank, index] for index in call.after]
        last: _State | None = None
        for other in needed:
            if not other.done.triggered:
                yield other.done
            if last is None or other.run.end_ps > last.run.end_ps:
                last = other
        if last is not None:
            causes.append(last.run.index)
            self.span(run, Phase.DEPENDENCY, last.run.index, last.run.end_ps)
            settle_ps = self.flush_ps if launches else self.handoff_ps
            phase = Phase.RELEASE if launches else Phase.REDUCE
            left_ps = last.run.end_ps + settle_ps + gpu.memory.queueing_ps() - int(env.now)
            if left_ps > 0 and not last.is_host:
                yield env.timeout(left_ps)
                self.span(run, phase, last.run.index, last.run.end_ps)
        if late:
            self.trigger(state)
        for index in polls:
            sender = self.program.calls[index]
            causes.append(self.states[rank, index].run.index)
            yield from self.poll(
                rank, run, self.fabric.exchange(index, rank, sender.group_size), self.states[rank, index],
                work.polled_slots,
            )

        room.in_waves = (
            placement is not None and placement.missing > 0 and not (work.co_resident or both_ways)
        )
        if placement is not None and not room.in_waves and not placement.whole.processed:
            left_by = yield placement.whole
            self.span(run, Phase.SM_SLOTS, left_by, int(env.now))
            room.resident_blocks = held.blocks
        if room.rest is not None and (stream := ahead.get(first)) is not None:
            stream.more = room.rest
        begun_ps = int(env.now)
        if code_ps := round(pace * self.code_ps(call, work, held.blocks, fetches=fetches)):
            yield env.timeout(code_ps)
            self.span(run, Phase.COMPUTE, -1, -1)
        later: list[simpy.Event] = []
        if placement is not None and room.in_waves:
            placed, room.resident_blocks = placement, len(placement.first)
            placed.on_start = lambda shares: env.process(self.later_blocks(room, placed, held.blocks, shares, later))

        def meet_peers() -> Steps:
            nonlocal begun_ps
            self.vary(gpu, call, begun_ps)
            yield from self.exchange_inside(rank, call, state, work)
            begun_ps = int(env.now)

        yield from self.run_passes(
            room, self.passes_of(room, held.blocks), ahead, triggers=state if call.trigger == "stream" else None,
            behind_first=meet_peers if both_ways else None,
        )  # fmt: skip
        tail_ps, exit_ps = self.tails_ps(call, fetches=fetches)
        if launches and tail_ps:
            # Stragglers and stores. A task's are part of its counter.
            yield env.timeout(round(pace * (tail_ps - exit_ps)) + gpu.memory.queueing_ps())
            self.span(run, Phase.DRAIN, -1, -1)
        if placement is not None and room.in_waves:
            gpu.slots.give(placement, None, run.index)
            if not placement.whole.processed:
                yield placement.whole
            for finished in later:
                if not finished.processed:
                    yield finished
            self.span(run, Phase.SM_SLOTS, -1, -1)
        if call.sends and not both_ways:
            sent_ps = int(env.now)
            exchange = self.fabric.exchange(call.index, rank, call.group_size)
            yield self.fabric.push(rank, exchange, work.sent_bytes_per_peer)
            self.span(run, Phase.SEND, -1, sent_ps)
            run.sent_bytes = self.fabric.sent_bytes(work.sent_bytes_per_peer, call.group_size)
            state.sent_ps = int(env.now)
            if launches and exit_ps:
                yield env.timeout(round(pace * exit_ps))
                self.span(run, Phase.DRAIN, -1, -1)
        self.vary(gpu, call, begun_ps)
        if placement is not None:
            gpu.slots.leave(placement, run.index)
        self.finish(rank, state, held, causes)

    def tails_ps(self, call: Call, *, fetches: bool) -> tuple[int, int]:
        """What a kernel's end takes, and how much of it comes behind its push to peers, who wait for no exit.

        Code that the SMs hold ends a block sooner; nothing is known of that of public kernels.
        """
        held = not fetches and self.code_bytes[call.index] > 0
        tail_ps = self.held_tail_ps if held else self.tail_ps
        pushes = bool(call.sends) and call.index not in call.receives
        return tail_ps, min(tail_ps, self.held_tail_ps) if pushes else 0

    def trigger_when_asked(self, room: _Room, state: _State) -> Steps:
        for asked in room.asking:
            if not asked.processed:
                yield asked
        self.trigger(state)

    def start_rest(
        self, room: _Room, placement: Placement, num_blocks: int, one: Pass, call: Call, state: _State
    ) -> Steps:
        """The blocks that found no room at first: they ask for their share, and then all blocks have triggered."""
        first_blocks, before = room.resident_blocks, placement.num_on()
        yield placement.whole
        if not room.in_waves:
            room.rest = self.start_early(
                room, one, blocks=num_blocks - first_blocks,
                skipped_bytes=first_blocks * room.work.bytes_in_flight_per_block,
                per_sm=placement.most_on_an_sm(before),
            )  # fmt: skip
            room.resident_blocks = num_blocks
        yield self.env.timeout(self.refill_ps + self.entry_ps)
        if call.trigger == "start":
            if room.work.trigger_waits_for_loads:
                yield from self.trigger_when_asked(room, state)
            else:
                self.trigger(state)

    def later_blocks(
        self, room: _Room, placement: Placement, num_blocks: int, shares: list[Share], done: list[simpy.Event]
    ) -> Steps:
        """Blocks that found room while others of their kernel were at work already: their part of all passes."""
        finished = simpy.Event(self.env)
        done.append(finished)
        run = replace(room.run, spans=[], start_ps=int(self.env.now), hbm_bytes=0, l2_bytes=0)
        group = replace(room, run=run, resident_blocks=len(shares), rest=None)
        yield self.env.timeout(self.refill_ps + self.entry_ps)
        passes = self.passes_of(group, num_blocks)
        first = next((position for position, one in enumerate(passes) if one.reads), 0)
        yield from self.run_passes(group, passes, {first: self.start_early(group, passes[first])})
        yield self.env.timeout(round(room.pace * self.tail_ps))
        room.run.hbm_bytes += run.hbm_bytes
        room.run.l2_bytes += run.l2_bytes
        room.gpu.slots.give(placement, shares, room.run.index)
        finished.succeed()

    def run_passes(
        self, room: _Room, passes: tuple[Pass, ...], ahead: dict[int, _Stream | None], *,
        triggers: _State | None = None, behind_first: Callable[[], Steps] | None = None,
    ) -> Steps:  # fmt: skip
        """Passes one after the other. ``ahead``: early reads that were started, by pass.

        ``triggers``: what triggers behind the last stream. ``behind_first``: what comes between the first pass and the
        next.
        """
        for position, one in enumerate(passes):
            is_last = position + 1 == len(passes)
            yield from self.stream_pass(room, one, ahead.get(position), triggers if is_last else None)
            if not is_last and position + 1 not in ahead:
                ahead[position + 1] = self.start_early(room, passes[position + 1])
            yield from self.reduce_pass(room, one)
            if behind_first is not None and not position:
                yield from behind_first()

    def passes_of(self, room: _Room, num_blocks: int) -> tuple[Pass, ...]:
        """What the blocks of this wave do of each pass."""
        if not room.in_waves:
            return room.work.passes
        share = room.resident_blocks / num_blocks
        return tuple(
            replace(
                one,
                reads=tuple(replace(read, num_bytes=round(share * read.num_bytes)) for read in one.reads),
                written_bytes=round(share * one.written_bytes),
                flops=share * one.flops,
                decoded_weights=round(share * one.decoded_weights),
                num_blocks=max(1, round(share * (one.num_blocks or room.work.num_blocks))),
            )
            for one in room.work.passes
        )

    def host(self, call: Call, state: _State, cause_index: int) -> Steps:
        state.is_host = True
        duration_ps = picoseconds(
            call.shape["num_launches"] * self.machine.host_launch_s
            + call.shape["num_graph_launches"] * self.machine.host_graph_launch_s
        )
        start_ps = int(self.env.now)
        yield self.env.timeout(duration_ps)
        self.span(state.run, Phase.HOST, cause_index, start_ps)
        self.finish(state.run.rank, state, None, [] if cause_index < 0 else [cause_index])

    def prefetch(self, gpu: _Gpu, run: KernelRun, work: Work) -> Steps:
        limit = gpu.memory.prefetch_limit(work.num_blocks, work.bytes_in_flight_per_block)
        for one in work.passes:
            for read in one.reads:
                run.hbm_bytes += yield gpu.memory.prefetch(read.region, read.num_bytes, limit)
        self.span(run, Phase.WEIGHTS, -1, -1)

    def stream_pass(self, room: _Room, one: Pass, early: _Stream | None, triggers: _State | None) -> Steps:
        """Dependent loads, then the stream beside the arithmetic."""
        env, gpu, run, pace = self.env, room.gpu, room.run, room.pace
        limit = self.limit(room, one)
        loads_ps = 0
        if one.num_dependent_loads or one.activation_bytes_per_block:
            input_ps = self.input_ps(room, one, one.activation_bytes_per_block)
            loads_ps = round(pace * (one.num_dependent_loads * gpu.memory.latency_ps() + input_ps))
        setup_ps = round(pace * one.num_tensor_core_setups * self.setup_ps)
        stream, rest = _Stream(), self.late_reads(one, early)
        behind = early.through if early is not None and room.work.register_loads else None
        if behind is not None and not behind.processed:
            yield behind
            self.span(run, Phase.WEIGHTS, -1, -1)
        if early is not None:
            # The pipeline is full: it moves on when the input is there. The set-up began with the early reads;
            # what is left of it shows only if the loads are shorter.
            ahead_ps = loads_ps + max(0, early.began_ps + setup_ps - int(env.now) - loads_ps)
            loads_ps = 0
        else:
            ahead_ps = round(pace * one.num_address_loads * gpu.memory.latency_ps()) + setup_ps
        if ahead_ps:
            yield env.timeout(ahead_ps)
            self.span(run, Phase.LATENCY, -1, -1)
        asked_ps = int(env.now)
        # A cold stream waits for its first bytes, and so does one whose ring had filled and stood still, since nothing
        # is under way then; filling a tensor-core pipeline is part of its set-up.
        idle = early is None or early.through is None or early.through.processed
        if idle and rest and not one.num_tensor_core_setups:
            if early is not None:
                # A ring that stands full asks for more when its first slot is free.
                yield env.timeout(round(pace * self.stage_ps(room, one)))
                self.span(run, Phase.COMPUTE, -1, -1)
            yield env.timeout(self.hbm_latency_ps)
            self.span(run, Phase.RAMP, -1, -1)
        start_ps = stream_start_ps = int(env.now)
        for read, num_bytes in rest:
            self.start(gpu, stream, read, num_bytes, limit)
        if one.written_bytes:
            # Stores are posted: they share HBM with what is read, and nobody waits for their end.
            gpu.memory.write(one.written_bytes, limit)
            run.hbm_bytes += one.written_bytes
        for part in stream.parts:
            if not part.processed:
                yield part
        run.hbm_bytes += stream.hbm_bytes
        run.l2_bytes += stream.l2_bytes
        if early is not None and early.through is not None:
            if not early.through.processed:
                yield early.through
            first_ps = early.began_ps + self.hbm_latency_ps
            if not rest and first_ps > start_ps:
                # Asked for so late that the first bytes are still under way.
                self.span(run, Phase.RAMP, -1, -1, length_ps=first_ps - start_ps)
                stream_start_ps = first_ps
            run.hbm_bytes += early.hbm_bytes
            run.l2_bytes += early.l2_bytes
            stream.expose(early, first_ps, start_ps)
            if early.more is not None and early.more.through is not None:
                if not early.more.through.processed:
                    yield early.more.through
                run.hbm_bytes += early.more.hbm_bytes
                run.l2_bytes += early.more.l2_bytes
                stream.expose(early.more, early.more.began_ps + self.hbm_latency_ps, start_ps)
        self.stream_spans(run, stream, limit, stream_start_ps)
        # The input was asked for together with the stream.
        left_ps = asked_ps + loads_ps - int(env.now)
        if left_ps > 0:
            yield env.timeout(left_ps)
            self.span(run, Phase.LATENCY, -1, -1)
        stage_ps = self.stage_ps(room, one)
        compute_ps = self.compute_ps(one, min(one.num_blocks or room.work.num_blocks, self.num_sms))
        beside_ps = self.input_ps(room, one, one.streamed_activation_bytes_per_block)
        compute_ps = round(pace * max(compute_ps, one.num_stages * stage_ps, beside_ps))
        left_ps = max(start_ps, asked_ps + loads_ps) + compute_ps - int(env.now)
        last_ps = compute_ps * self.last_slot(room.work, one)
        # A stage on CUDA cores has its loads in it, and the rate of FP4 those of the probe that gave it.
        if room.work.ring_slots and one.unit is Unit.BF16:
            last_ps += pace * self.port_ps(room, room.work.bytes_in_flight_per_block / room.work.ring_slots)
        left_ps = max(left_ps, round(last_ps), round(pace * stage_ps))
        if left_ps > 0:
            yield env.timeout(left_ps)
            self.span(run, Phase.COMPUTE, -1, -1)
        if triggers is not None:
            self.trigger(triggers)

    def input_ps(self, room: _Room, one: Pass, num_bytes: int) -> float:
        """What blocks take to load ``num_bytes`` of input each, all of them the same at the same moment.

        By loads of whole rows an SM's own trips bound, by copies what L2 hands out; as operands of tensor cores lie, in
        pieces of 64 bytes, L2 hands out less of the same lines (H200, probe ``same_input``).
        """
        machine = self.machine
        blocks = min(room.resident_blocks, one.num_blocks or room.work.num_blocks)
        of_an_sm, of_all = {
            ActivationForm.COALESCED: (machine.l2_input_bytes_per_s_per_sm, math.inf),
            ActivationForm.CP_ASYNC: (machine.l2_input_bytes_per_s_per_sm, machine.l2_read_bytes_per_s),
            ActivationForm.MMA_FRAGMENTS: (machine.l2_fragment_bytes_per_s_per_sm, machine.l2_fragment_bytes_per_s),
        }[one.activation_form]
        return 1e12 * num_bytes * max(-(-blocks // self.num_sms) / of_an_sm, blocks / of_all)

    def last_slot(self, work: Work, one: Pass) -> float:
        """Share of a pass's arithmetic that comes after its last bytes: that of one slot of each block's ring."""
        num_bytes = sum(read.num_bytes for read in one.reads)
        if not work.ring_slots or not num_bytes:
            return 0.0
        slot_bytes = work.bytes_in_flight_per_block / work.ring_slots
        return min(1.0, slot_bytes * (one.num_blocks or work.num_blocks) / num_bytes)

    def reduce_pass(self, room: _Room, one: Pass) -> Steps:
        """Reductions within blocks, then barriers between them."""
        reduce_ps = round(room.pace * one.num_block_reductions * self.reduction_ps)
        barrier_ps = round(room.pace * one.num_barriers * self.barrier_ps[one.barrier])
        if reduce_ps + barrier_ps:
            yield self.env.timeout(reduce_ps + barrier_ps)
            self.span(room.run, Phase.LATENCY, -1, -1, length_ps=reduce_ps)
            self.span(room.run, Phase.REDUCE, -1, -1)

    # -- streams ----------------------------------------------------------------------------------------------

    def limit(self, room: _Room, one: Pass, started: int | None = None, *, early: bool = False) -> StreamLimit:
        """What the blocks of a pass can draw, at the kernel's pace: those that are resident, or ``started`` of them.

        ``early``: before the kernel's wait, where it may have less on its way at once.
        """
        blocks = one.num_blocks or room.work.num_blocks
        if started is not None:
            blocks = min(blocks, started)
        resident = min(blocks, room.resident_blocks if started is None else started)
        in_flight = self.in_flight_bytes(room, resident, early=early)
        limit = room.gpu.memory.limit(blocks, resident, in_flight, deep_prefetch=room.work.deep_prefetch)
        if room.pace == 1.0:
            return limit
        return StreamLimit(
            max(1, round(limit.hbm_bytes_per_us / room.pace)),
            max(1, round(limit.l2_bytes_per_us / room.pace)),
            limit.queue_bytes,
            limit.share,
        )

    def in_flight_bytes(self, room: _Room, blocks: int, *, early: bool = False) -> int:
        """What a block may have on its way at once, of ``blocks`` that are resident."""
        work = room.work
        in_flight = work.bytes_in_flight_per_block
        if early and work.early_bytes_in_flight_per_block:
            in_flight = min(in_flight, work.early_bytes_in_flight_per_block)
        if work.register_loads:
            in_flight = min(in_flight, room.l1_bytes // -(-blocks // self.num_sms))
        return in_flight

    def start_early(
        self, room: _Room, one: Pass, *, blocks: int | None = None, skipped_bytes: int = 0, per_sm: int = 0
    ) -> _Stream | None:
        """Start the reads of a pass that need no predecessor, as far as the load pipeline of ``blocks`` holds them.

        The first ``skipped_bytes`` are read by blocks that started before. ``per_sm``: most of the blocks on one SM, 0
        where they are spread evenly.
        """
        limit, resident = self.limit(room, one, blocks, early=True), room.resident_blocks if blocks is None else blocks
        budget = resident * room.work.bytes_in_flight_per_block
        reads = [read for read in one.reads if read.early and read.num_bytes]
        if not reads:
            return None
        asked = simpy.Event(self.env)
        room.asking.append(asked)
        stream = _Stream(through=simpy.Event(self.env), asked=asked, budget=budget, began_ps=int(self.env.now))
        pieces: list[tuple[Read, int]] = []
        left, skipped = budget, skipped_bytes
        for read in reads:
            passed = min(skipped, read.num_bytes)
            skipped -= passed
            num_bytes = min(left, read.num_bytes - passed)
            left -= num_bytes
            if num_bytes > 0:
                pieces.append((read, num_bytes))
        on_the_way = resident * self.in_flight_bytes(room, resident, early=True)
        asking_ps = 0
        if room.work.triggers_after_loads:
            each = room.work.bytes_in_flight_per_block * (per_sm or -(-resident // self.num_sms))
            asking_ps = round(each * 1e12 / self.machine.hbm_bytes_per_s_per_sm)
        self.env.process(self.read_early(room.gpu, stream, pieces, limit, on_the_way, asking_ps))
        return stream

    def read_early(
        self, gpu: _Gpu, stream: _Stream, pieces: list[tuple[Read, int]], limit: StreamLimit, on_the_way: int,
        asking_ps: int,
    ) -> Steps:  # fmt: skip
        """Bring in what is asked for ahead: all but the last ``on_the_way`` bytes, and these when the others have come.

        ``asking_ps``: what the SMs take to ask for all of it where all may be on its way.
        """
        assert stream.asked is not None and stream.through is not None
        # Asked for from now on, though the first bytes take their time.
        num_bytes = sum(one for _, one in pieces)
        asked_bytes = min(num_bytes, limit.queue_bytes)
        gpu.memory.asked_bytes += asked_bytes
        yield self.env.timeout(self.hbm_latency_ps)
        gpu.memory.asked_bytes -= asked_bytes
        left = max(0, num_bytes - on_the_way)
        in_turns, last = [], []
        for read, whole in pieces:
            before = min(whole, left)
            left -= before
            in_turns.append((read, before))
            last.append((read, whole - before))
        for part in self.start_all(gpu, stream, in_turns, limit):
            if not part.processed:
                yield part
        if (left_ps := stream.began_ps + asking_ps - int(self.env.now)) > 0:
            # Nobody waits for what comes meanwhile.
            self.env.process(self.asked_later(stream.asked, left_ps))
        else:
            stream.asked.succeed()
        for part in self.start_all(gpu, stream, last, limit):
            if not part.processed:
                yield part
        stream.through.succeed()

    def asked_later(self, asked: simpy.Event, left_ps: int) -> Steps:
        yield self.env.timeout(left_ps)
        asked.succeed()

    def start_all(
        self, gpu: _Gpu, stream: _Stream, pieces: list[tuple[Read, int]], limit: StreamLimit
    ) -> list[simpy.Event]:
        before = len(stream.parts)
        for read, num_bytes in pieces:
            if num_bytes:
                self.start(gpu, stream, read, num_bytes, limit)
        return stream.parts[before:]

    def late_reads(self, one: Pass, early: _Stream | None) -> list[tuple[Read, int]]:
        """Reads of a pass, less what was started ahead."""
        left = 0 if early is None else early.budget + (early.more.budget if early.more is not None else 0)
        late: list[tuple[Read, int]] = []
        for read in one.reads:
            num_bytes = read.num_bytes
            if read.early:
                ahead = min(left, num_bytes)
                left -= ahead
                num_bytes -= ahead
            if num_bytes > 0:
                late.append((read, num_bytes))
        return late

    def start(self, gpu: _Gpu, stream: _Stream, read: Read, num_bytes: int, limit: StreamLimit) -> None:
        reused = bool(read.region) and read.kind is ReadKind.KV_STATE
        hbm, l2, hbm_bytes, l2_bytes = gpu.memory.fetch(read.region, num_bytes, limit, reused=reused)
        stream.hbm_bytes += hbm_bytes
        stream.l2_bytes += l2_bytes
        if read.kind is ReadKind.KV_STATE:
            stream.kv_state_bytes += hbm_bytes
        if hbm_bytes:
            self.note_end(stream, hbm, "hbm_end_ps")
        if l2_bytes:
            self.note_end(stream, l2, "l2_end_ps")

    def note_end(self, stream: _Stream, part: simpy.Event, name: str) -> None:
        """Make ``part`` one of the stream's, and note under ``name`` when it was through."""
        stream.parts.append(part)
        assert part.callbacks is not None
        part.callbacks.append(lambda _: setattr(stream, name, int(self.env.now)))

    def stream_spans(self, run: KernelRun, stream: _Stream, limit: StreamLimit, start_ps: int) -> None:
        """Divide a streaming interval by what bounded it.

        The HBM part, in order: weights and then KV or state at HBM speed, what too few bytes in flight cost, and
        what sharing cost (on the main stream that is HBM at work for another kernel: still reading). Then the
        part that only L2 was busy for.
        """
        end_ps = int(self.env.now)
        if end_ps <= start_ps:
            return
        hbm_end_ps = min(end_ps, max(start_ps, stream.hbm_end_ps))
        duration_ps = hbm_end_ps - start_ps
        if duration_ps > 0 and stream.hbm_bytes:
            peak = bytes_per_us(self.machine.hbm_read_bytes_per_s)
            at_peak_ps = min(duration_ps, -(-stream.hbm_bytes * 1_000_000 // peak))
            at_cap_ps = min(duration_ps, -(-stream.hbm_bytes * 1_000_000 // limit.hbm_bytes_per_us))
            state_ps = at_peak_ps * stream.kv_state_bytes // stream.hbm_bytes
            at_cap_ps = max(at_cap_ps, at_peak_ps)
            shared_ps = duration_ps - at_cap_ps
            weights_ps = at_peak_ps - state_ps
            if run.stream == "main":
                shared_state_ps = shared_ps * stream.kv_state_bytes // stream.hbm_bytes
                state_ps += shared_state_ps
                weights_ps += shared_ps - shared_state_ps
                shared_ps = 0
            for phase, length_ps in (
                (Phase.WEIGHTS, weights_ps),
                (Phase.KV_STATE, state_ps),
                (Phase.IN_FLIGHT, at_cap_ps - at_peak_ps),
                (Phase.STARVED, shared_ps),
            ):
                self.span(run, phase, -1, -1, length_ps=length_ps)
        self.span(run, Phase.L2, -1, -1)

    def compute_ps(self, one: Pass, sms: int) -> float:
        """Arithmetic of a pass on the SMs that run it, or its longest chain where that takes longer."""
        chain_ps = max(
            2 * one.num_tile_epilogues * self.reduction_ps, one.num_dependent_mmas * self.product_chain_ps
        )
        return max(self.flops_ps(one, sms), chain_ps)

    def stage_ps(self, room: _Room, one: Pass) -> float:
        """One stage of a warp: what it multiplies, its instructions and its sums.

        All warps of an SM begin a stage when its bytes have come: these pass the port of shared memory, and then
        instructions are issued in turn with those of the other warps.
        """
        if not one.num_stages:
            return 0.0
        warps = warps_of(room.work) * -(-room.resident_blocks // self.num_sms)
        num_bytes = sum(read.num_bytes for read in one.reads) / (one.num_blocks or room.work.num_blocks)
        port_ps = self.port_ps(room, num_bytes / one.num_stages)
        each_s = max(self.machine.instruction_s, warps / SCHEDULERS / self.machine.sm_clock_hz)
        return 1e12 * one.stage_instructions * each_s + port_ps + self.warp_sum_ps

    def port_ps(self, room: _Room, num_bytes: float) -> float:
        """What an SM takes to load ``num_bytes`` of each of its blocks from shared memory."""
        per_sm = -(-room.resident_blocks // self.num_sms)
        return 1e12 * per_sm * num_bytes / SMEM_BYTES_PER_CLOCK / self.machine.sm_clock_hz

    def code_ps(self, call: Call, work: Work, num_blocks: int, *, fetches: bool) -> float:
        """What a warp takes to run through the straight code behind its wait, with the others of its SM."""
        machine = self.machine
        if not self.code_bytes[call.index]:
            return 0.0
        code = costs.code_of(call.operator)
        if fetched := code.icache_miss_instructions:
            # A drawn machine may have the one slower than the other.
            more_s = max(0.0, machine.cold_instruction_s - machine.instruction_s)
            return 1e12 * fetched * more_s if fetches else 0.0
        warps = warps_of(work) * -(-num_blocks // self.num_sms)
        issue_s = warps / SCHEDULERS / machine.sm_clock_hz
        each_s = max(issue_s, machine.cold_instruction_s if fetches else machine.instruction_s)
        return 1e12 * each_s * (work.serial_instructions or code.serial_instructions)

    def flops_ps(self, one: Pass, sms: int) -> float:
        machine = self.machine
        share = sms / machine.num_sms
        if one.unit is Unit.CUDA_CORE:
            return 1e12 * one.flops / (2 * machine.fp32_fma_per_clock_per_sm * machine.sm_clock_hz * sms)
        if one.unit is Unit.FP4:
            # At few rows the rate at which weights enter the tensor core bounds, not the flops.
            per_clock = machine.fp4_weights_per_clock_per_sm
            weights = one.decoded_weights / (per_clock * machine.sm_clock_hz * sms)
            return 1e12 * max(weights, one.flops / ((machine.fp4_flops or machine.bf16_flops) * share))
        rate = {Unit.BF16: machine.bf16_flops, Unit.FP8: machine.fp8_flops, Unit.FP4: machine.fp4_flops}[one.unit]
        return 1e12 * one.flops / (rate * share)

    # -- exchanges --------------------------------------------------------------------------------------------

    def exchange_inside(self, rank: int, call: Call, state: _State, work: Work) -> Steps:
        """A kernel that sends and then needs what all peers sent: push and poll, or barrier and load."""
        run, sent_ps = state.run, int(self.env.now)
        exchange = self.fabric.exchange(call.index, rank, call.group_size)
        pulls = call.transport == "pull"
        bytes_per_peer = FLAG_BYTES if pulls else work.sent_bytes_per_peer
        yield self.fabric.push(rank, exchange, bytes_per_peer, fenced=pulls)
        self.span(run, Phase.SEND, -1, sent_ps)
        run.sent_bytes = self.fabric.sent_bytes(bytes_per_peer, call.group_size)
        state.sent_ps = int(self.env.now)
        yield from self.poll(rank, run, exchange, state)
        if pulls:
            yield self.fabric.load(rank, exchange, work.sent_bytes_per_peer)
            run.sent_bytes += work.sent_bytes_per_peer * (call.group_size - 1)  # every peer loads this rank's part
            self.span(run, Phase.SEND, -1, -1)

    def poll(self, rank: int, run: KernelRun, exchange: Exchange, sender: _State, slots: int = 0) -> Steps:
        """Wait until every rank's data is visible, then until this poller has seen it."""
        env, gpu = self.env, self.gpus[rank]
        if not exchange.complete.triggered:
            yield exchange.complete
        complete_ps = max(exchange.visible_ps.values())
        if self.skew is Skew.EXPECTED and gpu.variance_ps2:
            slowest_ps = round(self.expected_maximum(exchange.group_size) * math.sqrt(gpu.variance_ps2))
            gpu.variance_ps2 = 0.0
            complete_ps += slowest_ps
            if complete_ps > int(env.now):
                yield env.timeout(complete_ps - int(env.now))
        self.span(
            run, Phase.PEERS, sender.run.index, sender.sent_ps, arrival_ps=exchange.visible_ps[rank]
        )
        # A store, its way to be seen, and the look that finds it: beside a deep stream a hand-over takes three of the
        # waits of an L2 hit longer (calibrate/probes, ``handoff_beside_stream``).
        trips_ps = 3 * gpu.memory.queueing_ps()
        slots_ps = ((slots or exchange.group_size) - 1) * self.slot_ps
        left_ps = complete_ps + self.visibility_ps + slots_ps + trips_ps - int(env.now)
        if left_ps > 0:
            yield env.timeout(left_ps)
            self.span(
                run, Phase.POLL, sender.run.index, sender.sent_ps, arrival_ps=exchange.visible_ps[rank],
                complete_ps=complete_ps,
            )

    def expected_maximum(self, count: int) -> float:
        if count not in self._maxima:
            self._maxima[count] = expected_maximum_of_normals(count)
        return self._maxima[count]

    def vary(self, gpu: _Gpu, call: Call, since_ps: int) -> None:
        """Add the variance between ranks of what a kernel did since; a wait for peers has none of its own."""
        if call.stream == "main":
            gpu.variance_ps2 += (self.machine.rank_skew_relative_sd * (int(self.env.now) - since_ps)) ** 2

    # -- bookkeeping ------------------------------------------------------------------------------------------

    def span(
        self,
        run: KernelRun,
        phase: Phase,
        cause: int,
        cause_ps: int,
        *,
        arrival_ps: int = -1,
        complete_ps: int = -1,
        length_ps: int | None = None,
    ) -> None:
        """Append a span from where the last one ended to now (or for ``length_ps``); none when empty."""
        start_ps = run.spans[-1].end_ps if run.spans else run.start_ps
        end_ps = int(self.env.now) if length_ps is None else start_ps + length_ps
        if end_ps > start_ps:
            run.spans.append(Span(phase, start_ps, end_ps, cause, cause_ps, arrival_ps, complete_ps))

    def trigger(self, state: _State) -> None:
        if not state.triggered.triggered:
            state.trigger_ps = int(self.env.now)
            state.triggered.succeed()

    def finish(self, rank: int, state: _State, held: Any, causes: Iterable[int]) -> None:
        state.run.end_ps = int(self.env.now)
        state.run.causes = tuple(dict.fromkeys(causes))
        self.trigger(state)
        if held is not None:
            self.gpus[rank].slots.release(held, state.run.index)
        state.done.succeed()

    def run(self) -> Timeline:
        for rank in self.ranks:
            streams: dict[str, list[Call]] = defaultdict(list)
            for call in self.program.calls:
                streams[call.stream].append(call)
            for calls in streams.values():
                self.env.process(self.issue(rank, calls))
        self.env.run()
        runs = [state.run for state in self.states.values()]
        stuck = [run.stage for run in runs if run.end_ps < 0]
        assert not stuck, f"kernels never finished: {stuck[:5]}"
        counters = [counter for rank in self.ranks for counter in self.gpus[rank].memory.counters(rank)]
        counters += self.fabric.counters()
        return Timeline(
            machine=self.machine.name,
            num_ranks=self.program.num_ranks,
            ranks=self.ranks,
            num_layers=len(self.program.layers),
            kernels=runs,
            counters=counters,
            step_ps=max(run.end_ps for run in runs),
        )


FLAG_BYTES = 128  # one line to each peer


def simulate(
    program: Program, machine: Machine, *, all_ranks: bool = False, skew: Skew = Skew.OFF, seed: int = 0
) -> Timeline:
    """Run ``program`` on every rank (``all_ranks``) or on one that stands for all; same input, same timeline."""
    if skew is Skew.SAMPLED:
        all_ranks = True
    ranks = tuple(range(program.num_ranks)) if all_ranks else (0,)
    return _Engine(program, machine, ranks, skew, seed).run()
