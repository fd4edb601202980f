"""Waits: the walk along the critical path, and that the parts tile the step to the picosecond."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from walks import tiles

from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.step import Path
from k3sim.sim.components.skew import Skew
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine, machine_names
from k3sim.sim.question import Question
from k3sim.sim.timeline.critical_path import WORK_PARTS, Part, Segment, critical_path, cut, waits_ps
from k3sim.sim.timeline.timeline import KernelRun, Phase, Span, Timeline

K3 = load_architecture()


# -- the walk on hand-made timelines --------------------------------------------------------------------------------


def kernel(index: int, spans: list[Span], *, rank: int = 0, stream: str = "main", launched_by: int = -1) -> KernelRun:
    return KernelRun(
        index=index, rank=rank, stream=stream, layer=0, kind="", stage=f"k{index}", start_ps=spans[0].start_ps,
        end_ps=spans[-1].end_ps, spans=spans, launched_by=launched_by,
    )  # fmt: skip


def timeline(*kernels: KernelRun) -> Timeline:
    ranks = tuple(sorted({one.rank for one in kernels}))
    step_ps = max(one.end_ps for one in kernels)
    return Timeline("m", len(ranks), ranks, 1, list(kernels), [], step_ps)


def test_a_launch_continues_in_its_cause() -> None:
    first = kernel(0, [Span(Phase.LAUNCH, 0, 10), Span(Phase.WEIGHTS, 10, 50), Span(Phase.KV_STATE, 50, 60)])
    second = kernel(
        1, [Span(Phase.RELEASE, 60, 65, 0, 60), Span(Phase.LAUNCH, 65, 75), Span(Phase.COMPUTE, 75, 80)], launched_by=0
    )
    assert critical_path(timeline(first, second)) == tiles(
        (10, Part.LAUNCH, 0), (50, Part.WEIGHTS, 0), (60, Part.KV_STATE, 0), (65, Part.RAMP_DRAIN, 1),
        (75, Part.LAUNCH, 1), (80, Part.COMPUTE, 1),
    )  # fmt: skip


def test_work_beside_a_wait_is_off_path() -> None:
    first = kernel(0, [Span(Phase.LAUNCH, 0, 10), Span(Phase.WEIGHTS, 10, 50)])
    second = kernel(
        1,
        [Span(Phase.LAUNCH, 10, 20), Span(Phase.DEPENDENCY, 20, 50, 0, 50), Span(Phase.RELEASE, 50, 58, 0, 50),
         Span(Phase.L2, 58, 60)],
        launched_by=0,
    )  # fmt: skip
    assert critical_path(timeline(first, second)) == tiles(
        (10, Part.LAUNCH, 0), (50, Part.WEIGHTS, 0), (58, Part.RAMP_DRAIN, 1), (60, Part.L2, 1),
    )  # fmt: skip


def test_an_ended_wait_reaches_back_to_its_cause() -> None:
    first = kernel(0, [Span(Phase.WEIGHTS, 0, 50)])
    # Launched early, until 54; the first kernel ended at 50 and its flush is over at 58.
    second = kernel(1, [Span(Phase.LAUNCH, 40, 54), Span(Phase.RELEASE, 54, 58, 0, 50)], launched_by=0)
    assert critical_path(timeline(first, second)) == tiles((50, Part.WEIGHTS, 0), (58, Part.RAMP_DRAIN, 1))


def test_an_early_launch_continues_where_the_producer_triggered() -> None:
    first = kernel(0, [Span(Phase.LAUNCH, 0, 10), Span(Phase.WEIGHTS, 10, 50), Span(Phase.BARRIER, 50, 55)])
    second = kernel(1, [Span(Phase.LAUNCH, 50, 70), Span(Phase.DEPENDENT_LOADS, 70, 71)], launched_by=0)
    assert waits_ps(critical_path(timeline(first, second))) == {
        Part.WEIGHTS: 40,
        Part.LAUNCH: 30,
        Part.L2_TRIPS: 1,
    }


def test_a_wait_is_flight_then_slower_peer() -> None:
    sender = kernel(0, [Span(Phase.WEIGHTS, 0, 30), Span(Phase.SEND, 30, 34)])
    waiter = kernel(
        1,
        [Span(Phase.LAUNCH, 5, 10), Span(Phase.PEERS, 10, 80, 0, 34, arrival_ps=54),
         Span(Phase.POLL, 80, 85, 0, 34, arrival_ps=54, complete_ps=80)],
        launched_by=0,
    )  # fmt: skip
    assert critical_path(timeline(sender, waiter)) == tiles(
        (30, Part.WEIGHTS, 0), (34, Part.NVLINK, 0), (54, Part.NVLINK, 1), (80, Part.SLOWER_PEER, 1),
        (85, Part.NVLINK, 1),
    )  # fmt: skip


def test_a_late_poller_waits_for_flight_alone() -> None:
    sender = kernel(0, [Span(Phase.WEIGHTS, 0, 30), Span(Phase.SEND, 30, 34)])
    waiter = kernel(
        1,
        [Span(Phase.LAUNCH, 30, 60), Span(Phase.POLL, 60, 62, 0, 34, arrival_ps=50, complete_ps=57)],
        launched_by=0,
    )
    assert waits_ps(critical_path(timeline(sender, waiter))) == {
        Part.WEIGHTS: 30,
        Part.NVLINK: 4 + 16 + 5,
        Part.SLOWER_PEER: 7,
    }


def test_a_sender_that_waited_resumes_before_sending() -> None:
    both = kernel(
        0,
        [Span(Phase.DEPENDENT_LOADS, 0, 7), Span(Phase.SEND, 7, 9), Span(Phase.PEERS, 9, 29, 0, 9, arrival_ps=29),
         Span(Phase.DEPENDENT_LOADS, 29, 30)],
    )  # fmt: skip
    assert waits_ps(critical_path(timeline(both))) == {Part.L2_TRIPS: 8, Part.NVLINK: 22}


def test_the_path_is_of_the_last_rank() -> None:
    fast = kernel(0, [Span(Phase.WEIGHTS, 0, 30)])
    slow = kernel(1, [Span(Phase.WEIGHTS, 0, 40)], rank=1)
    assert critical_path(timeline(fast, slow)) == tiles((40, Part.WEIGHTS, 1))


def test_unexplained_time_is_host_or_kernel() -> None:
    measured = kernel(0, [Span(Phase.RUN, 20, 30)])
    assert waits_ps(critical_path(timeline(measured))) == {Part.HOST: 20, Part.UNKNOWN: 10}


def test_a_pending_kernel_waited_for_the_resident() -> None:
    holder = kernel(0, [Span(Phase.COMPUTE, 0, 50)])
    waiter = kernel(1, [Span(Phase.SM_SLOTS, 10, 50, 0, 50), Span(Phase.WEIGHTS, 50, 55)], launched_by=0)
    assert waits_ps(critical_path(timeline(holder, waiter))) == {Part.COMPUTE: 50, Part.WEIGHTS: 5}


def test_a_pending_side_stream_names_its_holder() -> None:
    holder = kernel(0, [Span(Phase.COMPUTE, 0, 50), Span(Phase.WEIGHTS, 50, 60)])
    first = kernel(1, [Span(Phase.LAUNCH, 0, 10)], stream="aux")
    aside = kernel(
        2, [Span(Phase.LAUNCH, 10, 20), Span(Phase.SM_SLOTS, 20, 60, 0, 60), Span(Phase.L2, 60, 65)],
        stream="aux", launched_by=1,
    )  # fmt: skip
    assert critical_path(timeline(holder, first, aside)) == tiles(
        (50, Part.COMPUTE, 0), (60, Part.WEIGHTS, 0), (65, Part.L2, 2)
    )


def waves_of_two() -> list[KernelRun]:
    """Kernel 1 gets some SMs at once, and others at 30, when kernel 0 leaves them; then two waves follow its own."""
    long = kernel(0, [Span(Phase.KV_STATE, 0, 30)], stream="aux")
    first = kernel(1, [Span(Phase.LAUNCH, 0, 5), Span(Phase.WEIGHTS, 5, 40)])
    waves = ((0, 30, 62, Phase.COMPUTE), (1, 40, 55, Phase.L2), (1, 55, 70, Phase.L2))
    for made_room, start_ps, end_ps, phase in waves:
        wave = first.later_wave(start_ps, made_room)
        wave.add_span(phase, end_ps)
        wave.end_ps = end_ps
    first.show_later_waves()
    first.end_ps = 70
    return [long, first]


def test_the_walk_follows_the_wave_that_ended_last() -> None:
    assert critical_path(timeline(*waves_of_two())) == tiles(
        (5, Part.LAUNCH, 1), (40, Part.WEIGHTS, 1), (55, Part.L2, 1), (70, Part.L2, 1)
    )


@pytest.mark.parametrize(
    ("released_ps", "path"),
    [
        (40, [(5, Part.LAUNCH, 1), (40, Part.WEIGHTS, 1)]),  # the first wave
        (55, [(5, Part.LAUNCH, 1), (40, Part.WEIGHTS, 1), (55, Part.L2, 1)]),  # the one in its place
        (62, [(30, Part.KV_STATE, 0), (62, Part.COMPUTE, 1)]),  # that for which another kernel made room
    ],
)
def test_a_wave_that_released_sms_is_followed(released_ps: int, path: list[tuple[int, Part, int]]) -> None:
    waiter = kernel(
        2, [Span(Phase.SM_SLOTS, 10, released_ps, 1, released_ps), Span(Phase.COMPUTE, released_ps, 80)], stream="b"
    )
    assert critical_path(timeline(*waves_of_two(), waiter)) == tiles(*path, (80, Part.COMPUTE, 2))


def test_cutting_keeps_what_lies_between() -> None:
    segments = [Segment(0, 10, Part.HOST, 0), Segment(10, 30, Part.L2, 1), Segment(30, 40, Part.BARRIER, 2)]
    assert cut(segments, 10, 35) == [Segment(10, 30, Part.L2, 1), Segment(30, 35, Part.BARRIER, 2)]
    assert cut(segments, 12, 13) == [Segment(12, 13, Part.L2, 1)]


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_a_part(phase: Phase) -> None:
    one = kernel(0, [Span(phase, 0, 5, -1, 0, 0, 0)])
    assert sum(waits_ps(critical_path(timeline(one))).values()) == 5


# -- the grid -------------------------------------------------------------------------------------------------------


def check(prediction: Prediction) -> None:
    """Segments tile the step of the critical rank, parts sum to it, and each is a sum of its segments."""
    segments = prediction.segments
    assert segments[0].start_ps == 0
    assert segments[-1].end_ps == prediction.timeline.step_ps
    assert all(one.end_ps == other.start_ps for one, other in pairwise(segments))
    assert all(one.start_ps < one.end_ps for one in segments)
    assert sum(prediction.waits_ps.values()) == prediction.step_ps
    assert min(prediction.waits_ps.values()) > 0
    critical = prediction.timeline.critical_rank
    of_rank = {run.index for run in prediction.timeline.of_rank(critical)}
    assert {one.kernel for one in segments} <= of_rank | {-1}
    # Whoever waits for SMs knows which kernel released them.
    for run in prediction.timeline.kernels:
        holders = [span.cause for span in run.spans if span.phase is Phase.SM_SLOTS]
        assert all(cause >= 0 for cause in (*holders, *(wave.launched_by for wave in run.waves))), run.stage
    if prediction.question.skew is Skew.OFF:
        assert Part.SLOWER_PEER not in prediction.waits_ps
    # Work is not slower than the hardware: HBM bytes on the critical path cannot exceed what the step could move.
    assert sum(prediction.waits_ps.get(part, 0) for part in WORK_PARTS) < prediction.step_ps
    assert prediction.step_us > prediction.floor_us
    assert 0 < prediction.hbm_busy_fraction < 1


WORKLOADS = [Workload(concurrency=c, context=s) for c, s in product((1, 4, 16, 64), (1, 8192, 131072))]
PLACES = [
    (machine, tp)
    for machine in machine_names()
    for tp in (1, 2, 4, 8, 16, 32)
    # Below eight ranks memory is short everywhere, which the simulation does not mind: once is enough.
    if tp <= load_machine(machine).nvlink_domain_gpus and (tp >= 8 or machine == "gb300")
]
# A fifth of the workloads at every place, in turn, so that each workload meets many places.
GRID = [
    (machine, tp, workload)
    for place, (machine, tp) in enumerate(PLACES)
    for number, workload in enumerate(WORKLOADS)
    if (number + place) % 5 == 0
]


def question(machine: str, tp: int, workload: Workload, skew: Skew = Skew.EXPECTED, **fields: object) -> Question:
    return Question(
        architecture=K3,
        layout=Layout(tp=tp),
        workload=workload,
        machine=load_machine(machine),
        skew=skew,
        **fields,  # type: ignore[arg-type]
    )


def test_the_grid_has_every_machine_size_and_workload() -> None:
    assert {machine for machine, _, _ in GRID} == set(machine_names())
    assert {tp for _, tp, _ in GRID} == {1, 2, 4, 8, 16, 32}
    assert {workload for _, _, workload in GRID} == set(WORKLOADS)


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", ("stock", "fused", "megakernel"))
@pytest.mark.parametrize(
    ("machine", "tp", "workload"),
    GRID,
    ids=lambda one: f"{one.concurrency}x{one.context}" if isinstance(one, Workload) else str(one),
)
def test_parts_sum_to_the_step(path: str, machine: str, tp: int, workload: Workload) -> None:
    skew = Skew.OFF if (tp + workload.concurrency) % 3 == 0 else Skew.EXPECTED
    check(predict(question(machine, tp, workload, skew, path=find_path(path))))


def subsets() -> list[Path]:
    return [
        find_path("fused", with_switches=tuple(one)) if one else find_path("stock")
        for one in ([s for s, on in zip(SWITCHES, bits, strict=True) if on] for bits in product((0, 1), repeat=4))
    ]


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", subsets(), ids=lambda path: "+".join(sorted(path.switches)) or "none")
def test_parts_sum_for_every_set_of_switches(path: Path) -> None:
    for skew in (Skew.OFF, Skew.EXPECTED):
        check(predict(question("gb300", 16, Workload(), skew, path=path)))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(("path", "rows"), [("fused", 1), ("fused", 4), ("stock", 1), ("stock", 8), ("fused", 16)])
def test_parts_sum_where_kernels_wait_for_sms(path: str, rows: int) -> None:
    """The shipped kernels are placed SM by SM: blocks wait, and follow in later waves."""
    prediction = predict(question("h200", 16, Workload(concurrency=rows), path=find_path(path, kernel_set="own")))
    check(prediction)
    assert any(run.waves for run in prediction.timeline.kernels)
    # All layers again give the same parts: holders and waves are those of the layer that stands there.
    assert waits_ps(critical_path(prediction.full)) == prediction.waits_ps


def test_awaited_experts_stand_on_the_path() -> None:
    """The shared experts wait on the side stream for SMs that the routed ones hold."""
    prediction = predict(question("h200", 16, Workload(), path=find_path("fused", kernel_set="own")))
    by_stage: dict[str, float] = {}
    for stage, _, us in prediction.contributions():
        by_stage[stage] = by_stage.get(stage, 0.0) + us
    assert max(by_stage, key=lambda stage: by_stage[stage]) == "moe.experts"
    assert by_stage["moe.experts"] > 0.1 * prediction.step_us


@pytest.mark.slow_but_one
@pytest.mark.parametrize("path", ("stock", "fused", "megakernel"))
def test_parts_sum_for_the_slowest_rank(path: str) -> None:
    check(predict(question("gb300", 8, Workload(), Skew.SAMPLED, folded=False, seed=3, path=find_path(path))))


@pytest.mark.slow_but_one
@pytest.mark.parametrize(
    ("layout", "workload"),
    [
        (Layout(tp=16, dcp=4), Workload(context=131072)),
        (Layout(tp=16, ep=16), Workload(concurrency=64)),
        (Layout(tp=8, ep=2, dcp=8), Workload(concurrency=4, context=65536)),
        (Layout(tp=16, dp=4), Workload(concurrency=64)),
    ],
    ids=lambda one: one.tag if isinstance(one, Layout) else "",
)
@pytest.mark.parametrize("path", ("stock", "fused", "megakernel"))
def test_parts_sum_with_experts_and_context_spread(path: str, layout: Layout, workload: Workload) -> None:
    machine = load_machine("gb300")
    asked = Question(architecture=K3, layout=layout, workload=workload, machine=machine, path=find_path(path))
    check(predict(asked))
