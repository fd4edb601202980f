"""One kernel on one rank, from its launch to its exit: the phases that docs/design.md lists, in the order of time.

The process asks the components of its GPU for what it needs and waits for it; it knows no operator by name, and prices
nothing itself. Every wait leaves a span in the kernel's record, and one that takes no time leaves none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from k3sim.kernels.work import Pass, Work
from k3sim.model.program import Call
from k3sim.sim.clock import Clock, Steps
from k3sim.sim.components.instruction_cache import LaunchedCode
from k3sim.sim.components.launch_queue import Admission, KernelState
from k3sim.sim.components.load_pipeline import Pieces, late_reads
from k3sim.sim.components.memory import StreamLimit
from k3sim.sim.components.placement import Allocation, Placement, num_blocks
from k3sim.sim.components.sm_timing import last_slot_share
from k3sim.sim.components.stream import Stream
from k3sim.sim.components.wave import Wave, first_streaming
from k3sim.sim.gpu import Gpu
from k3sim.sim.timeline.timeline import Phase

EarlyReads = dict[int, Stream | None]  # what was started early, by position of the pass


@dataclass(eq=False, kw_only=True)
class KernelProcess:
    """One call of a program on one rank.

    ``previous`` is the kernel before it in its stream, ``pace`` a factor on its durations: its skew on this rank.
    """

    env: Clock
    gpu: Gpu
    calls: Sequence[Call]  # of the program
    states: Mapping[int, KernelState]  # of this rank, by index of the call
    call: Call
    state: KernelState
    work: Work
    previous: KernelState | None
    admission: Admission
    pace: float
    causes: list[int] = field(default_factory=list)
    begun_ps: int = 0  # since when what it does differs between ranks
    later_waves: list[simpy.Event] = field(default_factory=list)  # fire when they have ended

    @property
    def is_task(self) -> bool:
        """Of a megakernel: it has no launch and no exit of its own."""
        return self.call.launch == "task"

    @property
    def starts_together(self) -> bool:
        """No block does anything before all of them are resident. Tasks of a megakernel share its blocks."""
        return self.work.co_resident or self.work.prefetches or self.is_task

    @property
    def exchanges_inside(self) -> bool:
        """It sends, and then needs what all peers have sent."""
        return self.call.index in self.call.receives

    def run(self) -> Steps:
        """All phases."""
        call, work, run = self.call, self.work, self.state.run
        run.start_ps, run.launched_by = self.env.now, self.admission.cause
        self.causes = [] if self.admission.by is None else [self.admission.cause]
        code = self.gpu.instruction_cache.launch(call)
        placement = yield from self.launch()
        if work.prefetches:
            self.gpu.occupancy.release_all(placement, run.index)  # its blocks issue requests and leave
            run.hbm_bytes += yield from self.gpu.memory.prefetch_all(work)
            run.add_span(Phase.WEIGHTS, self.env.now)
            self.end(placement)
            return
        resident_blocks = placement.num_blocks - placement.num_pending
        l1_bytes = self.gpu.occupancy.l1_bytes(placement)
        wave = Wave(run, work, placement.num_blocks, resident_blocks, self.gpu.num_sms, self.pace, l1_bytes)
        early = self.read_early(wave, placement)
        yield from self.wait_for_predecessors()
        yield from self.wait_for_peers()
        yield from self.wait_for_all_blocks(wave, placement, early)
        self.begun_ps = self.env.now
        yield from self.run_serial_code(wave, code)
        if wave.is_part:
            self.admit_later_waves(wave, placement)
        yield from self.run_passes(
            wave, wave.passes(), early, triggers=call.trigger == "stream",
            behind_first=self.exchange_inside if self.exchanges_inside else None,
        )  # fmt: skip
        yield from self.send_and_exit(wave, placement, code)
        self.count_work()
        self.end(placement)

    def launch(self) -> Generator[simpy.Event, Any, Placement]:
        """Wait for completion of the node before, for SMs and for the launch; the kernel's blocks are resident then."""
        env, run, work, gpu, admission = self.env, self.state.run, self.work, self.gpu, self.admission
        launched_ps = first_ps = self.env.now
        if not self.is_task:
            if admission.completed and admission.by_kernel:
                yield env.timeout(gpu.launches.release_ps(run, admission))
                run.add_span(Phase.RELEASE, self.env.now, admission.cause, launched_ps)
            first_ps = self.env.now + gpu.launches.first_instruction_ps(admission)
        placement = gpu.occupancy.place(work)
        if not placement.resident:
            ended = yield placement.all_resident if self.starts_together else placement.first_resident
            # A launch that waits for SMs is ready when there are some. What its latency covers is no wait.
            refilled_ps = self.env.now + (0 if self.is_task else gpu.launches.refill_ps)
            if refilled_ps > first_ps:
                run.add_span(Phase.SM_SLOTS, self.env.now, ended, self.env.now)
                first_ps = refilled_ps
        if not self.is_task:
            # The first wave: later blocks are dispatched while earlier ones run.
            dispatch_ps = gpu.launches.dispatch_ps(placement.num_blocks)
            yield env.timeout(first_ps - self.env.now + gpu.launches.prologue_ps + dispatch_ps)
            run.add_span(Phase.LAUNCH, self.env.now, admission.cause, launched_ps)
        return placement

    # -- before the dependency wait: early reads, trigger ----------------------------------------------------------

    def read_early(self, wave: Wave, placement: Placement) -> EarlyReads:
        """Start what needs no predecessor, and trigger where the kernel does so at its start."""
        first = first_streaming(self.work.passes)
        one = self.work.passes[first]
        pending = placement.num_pending > 0
        if pending:
            self.env.start(self.start_pending_blocks(wave, placement, one))
        early: EarlyReads = {first: self.gpu.loads.start_early(wave, one)}
        if self.call.trigger == "start" and not pending:
            if self.work.trigger_waits_for_loads:
                self.env.start(self.trigger_at_start(wave))
            else:
                self.state.trigger(self.env.now)
        return early

    def trigger_at_start(self, wave: Wave) -> Steps:
        """Trigger now, or when the last of the early reads has been asked for."""
        if self.work.trigger_waits_for_loads:
            for asked in wave.asking:
                if not asked.processed:
                    yield asked
        self.state.trigger(self.env.now)

    def start_pending_blocks(self, wave: Wave, placement: Placement, one: Pass) -> Steps:
        """Blocks that were pending at first: they ask for their share, and then all blocks have triggered."""
        first_blocks, before = wave.resident_blocks, placement.num_on_sms()
        yield placement.all_resident
        if not wave.is_part:
            wave.later = self.gpu.loads.start_early(
                wave, one, blocks=wave.num_blocks - first_blocks,
                skipped_bytes=first_blocks * self.gpu.loads.early_bytes_of_a_block(wave, one),
                per_sm=placement.most_on_an_sm(before),
            )  # fmt: skip
            wave.resident_blocks = wave.num_blocks
        yield self.env.timeout(self.gpu.launches.refill_ps + self.gpu.launches.prologue_ps)
        if self.call.trigger == "start":
            yield from self.trigger_at_start(wave)

    # -- dependency wait: predecessors, peers, co-resident blocks --------------------------------------------------

    def wait_for_predecessors(self) -> Steps:
        """Wait for the stream's predecessor and what the call joins, unless all data comes from peers; trigger late."""
        call, run = self.call, self.state.run
        polls = any(index != call.index for index in call.receives)
        # A late trigger comes after the wait on the predecessor, and before the polling where there is some.
        late = call.trigger == "wait"
        needed = [self.previous] if self.previous is not None and call.launch != "graph" and (late or not polls) else []
        if self.is_task or needed:
            needed += [self.states[index] for index in call.after]
        last: KernelState | None = None
        for other in needed:
            if not other.done.reached:
                yield other.done.wait()
            if last is None or other.run.end_ps > last.run.end_ps:
                last = other
        if last is not None:
            ended = last.run
            self.causes.append(ended.index)
            run.add_span(Phase.DEPENDENCY, self.env.now, ended.index, ended.end_ps)
            settle_ps = self.gpu.launches.settle_ps(is_task=self.is_task) + self.gpu.memory.queueing_ps()
            left_ps = ended.end_ps + settle_ps - self.env.now
            if left_ps > 0 and not last.is_host:
                yield self.env.timeout(left_ps)
                run.add_span(Phase.BARRIER if self.is_task else Phase.RELEASE, self.env.now, ended.index, ended.end_ps)
        if late:
            self.state.trigger(self.env.now)

    def wait_for_peers(self) -> Steps:
        for index in self.call.receives:
            if index != self.call.index:
                sender = self.states[index]
                self.causes.append(sender.run.index)
                yield from self.gpu.peers.poll(self.state.run, self.calls[index], sender, self.work.polled_slots)

    def wait_for_all_blocks(self, wave: Wave, placement: Placement, early: EarlyReads) -> Steps:
        """Blocks that wait for one another do nothing before all of them are resident; others run in waves."""
        wave.is_part = placement.num_pending > 0 and not (self.starts_together or self.exchanges_inside)
        if not wave.is_part and not placement.all_resident.processed:
            ended = yield placement.all_resident
            wave.run.add_span(Phase.SM_SLOTS, self.env.now, ended, self.env.now)
            wave.resident_blocks = wave.num_blocks
        stream = early[first_streaming(self.work.passes)]
        if wave.later is not None and stream is not None:
            stream.later = wave.later

    # -- passes: stream, compute, reduce ---------------------------------------------------------------------------

    def run_serial_code(self, wave: Wave, code: LaunchedCode) -> Steps:
        serial_ps = round(self.pace * self.gpu.instruction_cache.serial_ps(code, self.work, wave.num_blocks))
        if serial_ps:
            yield self.env.timeout(serial_ps)
            wave.run.add_span(Phase.SERIAL_CODE, self.env.now)

    def run_passes(
        self, wave: Wave, passes: Sequence[Pass], early: EarlyReads, *,
        triggers: bool = False, behind_first: Callable[[], Steps] | None = None,
    ) -> Steps:  # fmt: skip
        """Passes one after the other. ``triggers``: behind the last stream. ``behind_first``: after the first pass."""
        for position, one in enumerate(passes):
            is_last = position + 1 == len(passes)
            reads = early.get(position)
            limit = self.gpu.loads.limit(wave, one)
            late = late_reads(one, reads)
            input_ps = yield from self.wait_for_first_bytes(wave, one, reads, late)
            start_ps = self.env.now
            yield from self.stream(wave, one, reads, late, limit)
            yield from self.compute(wave, one, start_ps, input_ps)
            if triggers and is_last:
                self.state.trigger(self.env.now)
            if not is_last and position + 1 not in early:
                early[position + 1] = self.gpu.loads.start_early(wave, passes[position + 1])
            yield from self.reduce(wave, one)
            if behind_first is not None and not position:
                yield from behind_first()

    def wait_for_first_bytes(
        self, wave: Wave, one: Pass, early: Stream | None, late: Pieces
    ) -> Generator[simpy.Event, Any, int]:
        """Loads that give addresses, tensor-core set-up, first bytes; returns when the pass's input is there."""
        env, gpu, run, pace = self.env, self.gpu, wave.run, self.pace
        loads_ps = 0
        if one.num_dependent_loads or one.activation_bytes_per_block:
            activation_ps = gpu.activations.load_ps(wave, one, one.activation_bytes_per_block)
            loads_ps = round(pace * (one.num_dependent_loads * gpu.memory.latency_ps() + activation_ps))
        setup_ps = round(pace * one.num_tensor_core_setups * gpu.sm_timing.tensor_core_setup_ps)
        if self.work.register_loads and early is not None and early.through is not None and not early.through.processed:
            yield early.through
            run.add_span(Phase.WEIGHTS, self.env.now)
        if early is not None:
            # A full pipeline moves on when the input is there. What is left of a set-up that began with the early reads
            # shows only if the loads are shorter.
            first_ps, loads_ps = loads_ps, 0
            setup_ps = max(0, early.began_ps + setup_ps - self.env.now - first_ps)
        else:
            first_ps = round(pace * one.num_address_loads * gpu.memory.latency_ps())
        if first_ps + setup_ps:
            yield env.timeout(first_ps + setup_ps)
            run.add_span(Phase.DEPENDENT_LOADS, run.spanned_ps + first_ps)
            run.add_span(Phase.TENSOR_CORE_SETUP, self.env.now)
        input_ps = self.env.now + loads_ps
        # A cold stream waits for its first bytes, and so does a load pipeline that has drained, since nothing is in
        # flight then; filling a tensor-core pipeline is part of its set-up.
        drained = early is None or early.through is None or early.through.processed
        if drained and late and not one.num_tensor_core_setups:
            if early is not None:
                # A ring that stands full asks for more when its first slot is free.
                yield env.timeout(round(pace * gpu.sm_timing.stage_ps(wave, one)))
                run.add_span(Phase.RING_STALL, self.env.now)
            yield env.timeout(gpu.loads.first_bytes_ps)
            run.add_span(Phase.RAMP, self.env.now)
        return input_ps

    def stream(self, wave: Wave, one: Pass, early: Stream | None, late: Pieces, limit: StreamLimit) -> Steps:
        """Bytes of a pass: what is left to ask for, and what was asked for early."""
        gpu, run, stream = self.gpu, wave.run, Stream()
        start_ps = shown_ps = self.env.now
        for read, num_bytes in late:
            gpu.loads.read(stream, read, num_bytes, limit)
        if one.written_bytes:
            # Stores are posted: they share HBM with what is read, and nobody waits for their end.
            gpu.memory.write(one.written_bytes, limit)
            run.hbm_bytes += one.written_bytes
        for part in stream.parts:
            if not part.processed:
                yield part
        run.count_bytes(stream.hbm_bytes, stream.l2_bytes)
        for reads in (early, None if early is None else early.later):
            if reads is None or reads.through is None:
                break
            if not reads.through.processed:
                yield reads.through
            first_ps = reads.began_ps + gpu.loads.first_bytes_ps
            if reads is early and not late and first_ps > start_ps:
                # Asked for so late that the first bytes are still on their way.
                run.add_span(Phase.RAMP, run.spanned_ps + first_ps - start_ps)
                shown_ps = first_ps
            run.count_bytes(reads.hbm_bytes, reads.l2_bytes)
            stream.expose(reads, first_ps, start_ps)
        if self.env.now > shown_ps:
            for phase, length_ps in stream.bounds(shown_ps, self.env.now, limit, gpu.hbm_bytes_per_us):
                run.add_span(phase, run.spanned_ps + length_ps)
            run.add_span(Phase.L2, self.env.now)

    def compute(self, wave: Wave, one: Pass, start_ps: int, input_ps: int) -> Steps:
        """The input, which was asked for with the stream, and arithmetic that outlasts the stream beside it."""
        timing, run, pace = self.gpu.sm_timing, wave.run, self.pace
        if input_ps > self.env.now:
            yield self.env.timeout(input_ps - self.env.now)
            run.add_span(Phase.DEPENDENT_LOADS, self.env.now)
        streamed_ps = self.gpu.activations.load_ps(wave, one, one.streamed_activation_bytes_per_block)
        compute_ps = round(pace * max(timing.arithmetic_ps(wave, one), streamed_ps))
        last_ps = compute_ps * last_slot_share(self.work, one) + pace * timing.last_slot_port_ps(wave, one)
        stage_ps = pace * timing.stage_ps(wave, one)
        left_ps = max(max(start_ps, input_ps) + compute_ps - self.env.now, round(last_ps), round(stage_ps))
        if left_ps > 0:
            yield self.env.timeout(left_ps)
            run.add_span(Phase.COMPUTE, self.env.now)

    def reduce(self, wave: Wave, one: Pass) -> Steps:
        """Reductions within blocks, then barriers between them."""
        run, each_ps = wave.run, self.gpu.sm_timing.block_reduction_ps
        reduce_ps = round(self.pace * one.num_block_reductions * each_ps)
        select_ps = round(self.pace * one.num_selection_rounds * each_ps)
        barrier_ps = round(self.pace * one.num_barriers * self.gpu.barriers.wait_ps(one.barrier))
        if reduce_ps + barrier_ps:
            yield self.env.timeout(reduce_ps + barrier_ps)
            run.add_span(Phase.SELECTION, run.spanned_ps + select_ps)
            run.add_span(Phase.BLOCK_REDUCTION, run.spanned_ps + reduce_ps - select_ps)
            run.add_span(Phase.BARRIER, self.env.now)

    def admit_later_waves(self, wave: Wave, placement: Placement) -> None:
        """Give every group of blocks that becomes resident from now on a wave of its own."""
        wave.resident_blocks = num_blocks(placement.first_wave)
        placement.on_later_wave = lambda blocks, by: self.env.start(self.run_later_wave(wave, placement, blocks, by))

    def run_later_wave(self, wave: Wave, placement: Placement, blocks: list[Allocation], by: int) -> Steps:
        """Blocks that became resident, as ``by`` made room, while others were at work: their part of all passes."""
        ended = simpy.Event(self.env)
        self.later_waves.append(ended)
        record = wave.run.later_wave(self.env.now, by)
        later = replace(wave, run=record, resident_blocks=num_blocks(blocks), later=None)
        yield self.env.timeout(self.gpu.launches.refill_ps + self.gpu.launches.prologue_ps)
        record.add_span(Phase.LAUNCH, self.env.now)
        passes = later.passes()
        first = first_streaming(passes)
        yield from self.run_passes(later, passes, {first: self.gpu.loads.start_early(later, passes[first])})
        yield self.env.timeout(round(self.pace * self.gpu.instruction_cache.exit_cold_ps))
        record.add_span(Phase.DRAIN, self.env.now)
        record.end_ps = self.env.now
        wave.run.count_bytes(record.hbm_bytes, record.l2_bytes)
        self.gpu.occupancy.release_blocks(placement, blocks, wave.run.index)
        ended.succeed()

    def wait_for_later_waves(self, placement: Placement) -> Steps:
        self.gpu.occupancy.release_blocks(placement, None, self.state.run.index)
        if not placement.all_resident.processed:
            yield placement.all_resident
        for ended in self.later_waves:
            if not ended.processed:
                yield ended
        self.state.run.show_later_waves()

    def send_and_exit(self, wave: Wave, placement: Placement, code: LaunchedCode) -> Steps:
        """Stragglers and stores, later waves, then the push; a task's stores are part of its counter."""
        pushes = bool(self.call.sends) and not self.exchanges_inside
        exit_ps, behind_push_ps = self.gpu.instruction_cache.exit_ps(code, pushes=pushes)
        if not self.is_task and exit_ps:
            yield self.env.timeout(round(self.pace * (exit_ps - behind_push_ps)) + self.gpu.memory.queueing_ps())
            wave.run.add_span(Phase.DRAIN, self.env.now)
        if wave.is_part:
            yield from self.wait_for_later_waves(placement)
        if pushes:
            yield from self.gpu.peers.push(self.state, self.call, self.work.sent_bytes_per_peer)
            if not self.is_task and behind_push_ps:
                yield self.env.timeout(round(self.pace * behind_push_ps))
                wave.run.add_span(Phase.DRAIN, self.env.now)

    def exchange_inside(self) -> Steps:
        """Between its first pass and the next: a kernel that sends and then receives."""
        self.count_work()
        yield from self.gpu.peers.swap(self.state, self.call, self.work.sent_bytes_per_peer)
        self.begun_ps = self.env.now

    def count_work(self) -> None:
        """Count what the kernel did since ``begun_ps`` as differing between ranks; waits for peers do not."""
        if self.call.stream == "main":
            self.gpu.peers.worked(self.env.now - self.begun_ps)

    def end(self, placement: Placement) -> None:
        """Release the SMs, and let those that wait for the kernel resume."""
        self.gpu.occupancy.release_all(placement, self.state.run.index)
        self.state.end(self.env.now, self.causes)
        self.state.done.reach()
