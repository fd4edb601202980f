"""Which machine values a step hangs on: the critical path by the value that prices each of its spans.

No further simulation: the phase of a span says which values priced it, and the kernel's counted work how much of each.
A span that one value prices counts for it whole. One that several price is divided among them in proportion to count x
value, which is how the components add them up (``docs/design.md``, what a kernel does in time). To first order this is
what the step would lose if a latency were zero or a rate infinite, while the critical path stays where it is. So it
says which values to look at; what another value does, a simulation says (``k3sim sensitivity``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from k3sim.kernels.costs import work_of
from k3sim.kernels.work import ActivationForm, Barrier, Pass, Unit, Work
from k3sim.model.program import Call
from k3sim.sim.components.instruction_cache import UNKNOWN, InstructionCache, LaunchedCode
from k3sim.sim.machine import describe
from k3sim.sim.predict import Prediction, program_of
from k3sim.sim.timeline.critical_path import PART_OF_PHASE, Part, Segment, cut
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span

Weights = dict[str, float]  # name of a machine value -> seconds that it adds to a span

_OF_PHASE = {
    Phase.RELEASE: "grid_completion_s",
    Phase.RAMP: "hbm_latency_s",
    Phase.WEIGHTS: "hbm_read_bytes_per_s",
    Phase.KV_STATE: "hbm_read_bytes_per_s",
    Phase.SM_SLOTS: "num_sms",
    Phase.SEND: "nvlink_egress_bytes_per_s",
    Phase.POLL: "nvlink_visibility_s",
    Phase.TENSOR_CORE_SETUP: "tensor_core_setup_s",
    Phase.SELECTION: "block_reduction_s",
    Phase.BLOCK_REDUCTION: "block_reduction_s",
    Phase.RING_STALL: "instruction_s",
}
_OF_BARRIER = {
    Barrier.NONE: (),
    Barrier.CLUSTER: ("cluster_sync_s",),
    Barrier.CLUSTER_RELEASE: ("cluster_sync_s", "cluster_sync_s"),
    Barrier.GRID: ("grid_barrier_s",),
    Barrier.LAST: ("last_block_s",),
    Barrier.LAUNCH: ("kernel_exit_cold_s", "grid_completion_s", "launch_latency_s", "kernel_prologue_s"),
}
_OF_UNIT = {Unit.BF16: "bf16_flops", Unit.FP4: "fp4_flops"}


def machine_shares(prediction: Prediction) -> dict[str, float]:
    """Microseconds of the step that each machine value prices on the critical path, the most first.

    They add up to the step. What no value prices has the name "".
    """
    pricing = _Pricing(prediction)
    totals: dict[str, float] = {}
    for cell in prediction.cells:
        for segment in cut(prediction.segments, cell.start_ps, cell.end_ps):
            length_us = (segment.end_ps - segment.start_ps) * len(cell.stands_for) / PS_PER_US
            weights = pricing.of_segment(segment)
            whole = sum(weights.values())
            for name, weight in (weights if whole else {"": 1.0}).items():
                totals[name] = totals.get(name, 0.0) + length_us * weight / (whole or 1.0)
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))


_NO_CODE = LaunchedCode(UNKNOWN, is_warm=False)


def described_shares(prediction: Prediction) -> list[dict[str, object]]:
    """Rows of ``describe`` for the values that price the critical path, the most first, with ``us`` of the step."""
    rows = {row["field"]: row for row in describe(prediction.question.machine)}
    return [{**rows[name], "us": us} for name, us in machine_shares(prediction).items() if name in rows and us > 0]


@dataclass(frozen=True)
class _Kernel:
    """A kernel of the timeline with the call that it is, its work and its code; of the host it has neither."""

    run: KernelRun
    call: Call
    work: Work | None = None
    code: LaunchedCode = _NO_CODE


class _Pricing:
    """Machine values behind the spans of a prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._machine = machine = prediction.question.machine
        program, _ = program_of(prediction.question)
        calls = {(call.layer, call.stage): call for call in program.calls}
        self._cache = InstructionCache(machine, counts_code=program.path.kernel_set == "own")
        self._kernels: dict[int, _Kernel] = {}
        runs = prediction.timeline.of_rank(prediction.timeline.critical_rank)
        for run in sorted(runs, key=lambda run: (run.start_ps, run.index)):
            call = calls[run.layer, run.stage]
            self._kernels[run.index] = _Kernel(run, call)
            if call.launch != "host":
                work = work_of(call.operator, call.weights, call.shape)
                self._kernels[run.index] = _Kernel(run, call, work, self._cache.launch(call))

    def of_segment(self, segment: Segment) -> Weights:
        """What prices a stretch of the critical path."""
        kernel = self._kernels.get(segment.kernel)
        if kernel is None or kernel.work is None:
            return self._host(kernel)
        span = _span_of(kernel.run, segment)
        if segment.part is Part.SLOWER_PEER:
            return {"rank_skew_relative_sd": 1.0}
        if segment.part is Part.NVLINK and (span is None or span.phase not in (Phase.SEND, Phase.POLL)):
            return {"nvlink_one_way_s": 1.0}
        if span is None or span.phase is Phase.DEPENDENCY:
            return {"launch_latency_s": 1.0} if segment.part is Part.LAUNCH else {"": 1.0}
        return self._of_span(kernel, kernel.work, span)

    def _host(self, kernel: _Kernel | None) -> Weights:
        shape: Mapping[str, int] = {} if kernel is None else kernel.call.shape
        machine = self._machine
        return {
            "host_launch_s": shape.get("num_launches", 0) * machine.host_launch_s,
            "host_graph_launch_s": shape.get("num_graph_launches", 0) * machine.host_graph_launch_s,
        }

    def _of_span(self, kernel: _Kernel, work: Work, span: Span) -> Weights:
        if span.phase is Phase.LAUNCH:
            return self._launch(kernel.run, work)
        if span.phase is Phase.IN_FLIGHT:
            return {self._bound_in_flight(work): 1.0}
        if span.phase is Phase.L2:
            of_sms = min(work.num_blocks, self._machine.num_sms) * self._machine.l2_bytes_per_s_per_sm
            whole = of_sms > self._machine.l2_read_bytes_per_s
            return {"l2_read_bytes_per_s" if whole else "l2_bytes_per_s_per_sm": 1.0}
        if span.phase is Phase.DRAIN:
            return {"kernel_exit_warm_s" if kernel.code.is_warm else "kernel_exit_cold_s": 1.0}
        if span.phase is Phase.SERIAL_CODE:
            return {"instruction_s" if kernel.code.is_warm else "cold_instruction_s": 1.0}
        if span.phase is Phase.COMPUTE:
            return _sum(self._arithmetic(work, one) for one in work.passes)
        if span.phase is Phase.DEPENDENT_LOADS:
            return _sum(self._loads(work, one) for one in work.passes)
        if span.phase is Phase.BARRIER:
            return {"counter_handoff_s": 1.0} if span.cause >= 0 else _sum(map(self._barrier, work.passes))
        return {_OF_PHASE.get(span.phase, ""): 1.0}

    def _launch(self, run: KernelRun, work: Work) -> Weights:
        """From the predecessor's completion where the kernel waited for it, else from its trigger."""
        machine = self._machine
        completed = run.spans[0].phase is Phase.RELEASE
        first = "launch_latency_s" if completed else "pdl_trigger_to_launch_s"
        return {
            first: getattr(machine, first),
            "kernel_prologue_s": machine.kernel_prologue_s,
            "block_dispatch_s": work.num_blocks * machine.block_dispatch_s,
        }

    def _bound_in_flight(self, work: Work) -> str:
        """What keeps a stream below the rate of HBM: the least of the rates that cap it (``memory.py``)."""
        machine, sms = self._machine, min(work.num_blocks, self._machine.num_sms)
        caps = {
            "hbm_in_flight_curve": machine.hbm_rate_for(work.num_blocks * work.bytes_in_flight_per_block),
            "hbm_bytes_per_s_per_sm": sms * machine.hbm_bytes_per_s_per_sm,
            "hbm_partial_grid_loss": machine.hbm_read_bytes_per_s * machine.partial_grid_efficiency(work.num_blocks),
        }
        return min(caps, key=lambda name: caps[name])

    def _arithmetic(self, work: Work, one: Pass) -> Weights:
        """The longest of what runs beside the stream of a pass (``sm_timing.py``)."""
        machine, blocks = self._machine, one.num_blocks or work.num_blocks
        sms = min(blocks, machine.num_sms)
        longest: dict[str, float] = {
            "block_reduction_s": 2 * one.num_tile_epilogues * machine.block_reduction_s,
            "dependent_mma_s": one.num_dependent_mmas * machine.dependent_mma_s,
            "instruction_s": one.num_stages * one.stage_instructions * machine.instruction_s,
            **self._input(work, one, one.streamed_activation_bytes_per_block),
        }
        if one.unit is Unit.CUDA_CORE:
            clocks = machine.fp32_fma_per_clock_per_sm * machine.sm_clock_hz
            longest["fp32_fma_per_clock_per_sm"] = one.flops / (2 * clocks * sms)
        else:
            rate = getattr(machine, _OF_UNIT[one.unit]) or machine.bf16_flops
            longest[_OF_UNIT[one.unit]] = one.flops / (rate * sms / machine.num_sms)
        if one.decoded_weights:
            clocks = machine.fp4_weights_per_clock_per_sm * machine.sm_clock_hz
            longest["fp4_weights_per_clock_per_sm"] = one.decoded_weights / (clocks * sms)
        name = max(longest, key=lambda one: longest[one])
        return {name: longest[name]}

    def _loads(self, work: Work, one: Pass) -> Weights:
        return {
            "l2_far_latency_s": (one.num_address_loads + one.num_dependent_loads) * self._machine.l2_far_latency_s,
            **self._input(work, one, one.activation_bytes_per_block),
        }

    def _input(self, work: Work, one: Pass, num_bytes: int) -> Weights:
        """Activations that all blocks load at once, by the rate that bounds them (``activations.py``)."""
        machine, blocks = self._machine, one.num_blocks or work.num_blocks
        of_an_sm, of_all = {
            ActivationForm.COALESCED: ("l2_input_bytes_per_s_per_sm", ""),
            ActivationForm.CP_ASYNC: ("l2_input_bytes_per_s_per_sm", "l2_read_bytes_per_s"),
            ActivationForm.MMA_FRAGMENTS: ("l2_fragment_bytes_per_s_per_sm", "l2_fragment_bytes_per_s"),
        }[one.activation_form]
        each_s = num_bytes * -(-blocks // machine.num_sms) / getattr(machine, of_an_sm)
        all_s = num_bytes * blocks / getattr(machine, of_all) if of_all else 0.0
        return {of_an_sm: each_s} if each_s >= all_s else {of_all: all_s}

    def _barrier(self, one: Pass) -> Weights:
        return _sum({name: one.num_barriers * getattr(self._machine, name)} for name in _OF_BARRIER[one.barrier])


def _sum(many: Iterable[Weights]) -> Weights:
    totals: Weights = {}
    for weights in many:
        for name, seconds in weights.items():
            totals[name] = totals.get(name, 0.0) + seconds
    return totals


def _span_of(run: KernelRun, segment: Segment) -> Span | None:
    """The span of a kernel that a segment is: of its own, or of a later wave that the path goes through."""
    time_ps = (segment.start_ps + segment.end_ps) // 2
    own = _span_at(run.spans, time_ps)
    if own is None or PART_OF_PHASE.get(own.phase) is not segment.part:
        of_waves = (_span_at(wave.spans, time_ps) for wave in run.waves)
        return next((one for one in of_waves if one and PART_OF_PHASE.get(one.phase) is segment.part), own)
    return own


def _span_at(spans: list[Span], time_ps: int) -> Span | None:
    """The span that a time lies in."""
    position = bisect_right([span.start_ps for span in spans], time_ps) - 1
    return spans[position] if position >= 0 and time_ps < spans[position].end_ps else None
