"""What the charts of a timeline are drawn from."""

from __future__ import annotations

from itertools import accumulate

import pytest
from synthetic_timeline import synthetic_timeline

from k3sim.sim.export.timeline_data import layer_window, timeline_data
from k3sim.sim.timeline.critical_path import critical_path, waits_ps
from k3sim.sim.timeline.timeline import PS_PER_US, Counter, KernelRun, Phase, Span, Timeline


def one_layer() -> Timeline:
    """Layer 1 from 2 to 10 us between two other layers; the last kernel of layer 0 reaches into it."""
    kernels = [
        KernelRun(0, 0, "main", 0, "kda+moe", "moe.gather", 0, 3 * PS_PER_US),
        KernelRun(1, 0, "main", 1, "kda+moe", "kda.in_proj", 2 * PS_PER_US, 6 * PS_PER_US),
        KernelRun(2, 0, "main", 1, "kda+moe", "kda.o_proj", 6 * PS_PER_US, 10 * PS_PER_US),
        KernelRun(3, 0, "prefetch", 1, "kda+moe", "prefetch.next", 0, 1 * PS_PER_US),  # before the layer runs
        KernelRun(4, 0, "main", 2, "kda+moe", "attn_res", 10 * PS_PER_US, 11 * PS_PER_US),
    ]
    kernels[1].spans = [
        Span(Phase.LAUNCH, 2 * PS_PER_US, 3 * PS_PER_US),
        Span(Phase.RAMP, 3 * PS_PER_US, 3 * PS_PER_US),  # empty
        Span(Phase.WEIGHTS, 3 * PS_PER_US, 6 * PS_PER_US),
    ]
    hbm = Counter(0, "hbm", 8_000_000, ((0, 1_000_000), (3 * PS_PER_US, 4_000_000), (6 * PS_PER_US, 0)))
    return Timeline("h200", 1, (0,), 3, kernels, [hbm], 11 * PS_PER_US)


def phases_of(span: Span) -> list[tuple[int, int, str, str]]:
    """The phases drawn for a kernel with that one span: offset, length, word, phase."""
    kernel = KernelRun(0, 0, "main", 0, "kda+moe", "kda.in_proj", 0, span.end_ps, spans=[span])
    data = timeline_data(Timeline("h200", 1, (0,), 1, [kernel], [], span.end_ps))
    return [
        (at, length, data["words"][word], data["phases"][phase])
        for at, length, word, phase in data["patterns"][data["kernels"]["pattern"][0]]
    ]


def test_kernels_lie_in_lanes_and_in_time() -> None:
    data = timeline_data(one_layer())

    kernels = data["kernels"]
    assert [data["stages"][number] for number in kernels["stage"]] == [
        "moe.gather", "prefetch.next", "kda.in_proj", "kda.o_proj", "attn_res"
    ]  # fmt: skip
    assert [data["lanes"][row] for row in kernels["lane"]] == ["main", "prefetch", "main (overlap 1)", "main", "main"]
    assert list(accumulate(kernels["start"])) == [us * PS_PER_US for us in (0, 0, 2, 6, 10)]
    assert kernels["length"] == [us * PS_PER_US for us in (3, 1, 4, 4, 1)]


def test_phases_that_last_are_drawn() -> None:
    data = timeline_data(one_layer())

    drawn = data["patterns"][data["kernels"]["pattern"][2]]
    assert [(at, length, data["words"][word]) for at, length, word, _ in drawn] == [
        (0, PS_PER_US, "launch"),
        (PS_PER_US, 3 * PS_PER_US, "weights"),
    ]


def test_a_phase_has_the_word_of_its_part() -> None:
    assert phases_of(Span(Phase.RELEASE, 0, 5)) == [(0, 5, "ramp and drain", "release")]
    assert phases_of(Span(Phase.DEPENDENT_LOADS, 0, 5)) == [(0, 5, "L2 round trips", "dependent loads")]
    assert phases_of(Span(Phase.DEPENDENCY, 0, 5)) == [(0, 5, "waits for a kernel", "dependency")]
    assert phases_of(Span(Phase.SM_SLOTS, 0, 5)) == [(0, 5, "waits for a kernel", "sm slots")]


def test_waiting_for_peers_is_flight_then_slower_peer() -> None:
    assert phases_of(Span(Phase.PEERS, 0, 9, arrival_ps=4)) == [
        (0, 4, "NVLink flight", "peers"),
        (4, 5, "slower peer", "peers"),
    ]
    assert phases_of(Span(Phase.PEERS, 0, 9, arrival_ps=20)) == [(0, 9, "NVLink flight", "peers")]


def test_the_drawn_path_adds_up_to_the_waits() -> None:
    timeline = synthetic_timeline(num_layers=8)
    path = timeline_data(timeline)["path"]
    words = timeline_data(timeline)["words"]

    totals: dict[str, int] = {}
    for length, word in zip(path["length"], path["word"], strict=True):
        totals[words[word]] = totals.get(words[word], 0) + length

    assert sum(path["length"]) == timeline.step_ps
    assert totals == {part.word: ps for part, ps in waits_ps(critical_path(timeline)).items()}


def test_equal_kernels_share_their_phases() -> None:
    data = timeline_data(synthetic_timeline(num_layers=8, slowness=0.0))

    assert len(data["patterns"]) < len(data["kernels"]["start"]) / 4


def test_rates_keep_the_bytes() -> None:
    timeline = synthetic_timeline(num_layers=8)

    (hbm,) = timeline_data(timeline)["rates"]

    times = [*accumulate(hbm["time"]), hbm["end"]]
    moved = sum(rate * (until - since) for rate, since, until in zip(hbm["rate"], times, times[1:], strict=False))
    assert moved / PS_PER_US == pytest.approx(sum(kernel.hbm_bytes for kernel in timeline.kernels), rel=1e-3)


def test_a_layer_runs_while_its_main_stream_does() -> None:
    assert layer_window(one_layer(), 1) == (2 * PS_PER_US, 10 * PS_PER_US)
    assert layer_window(one_layer(), 7) is None


def test_sublayers_tile_the_step() -> None:
    timeline = synthetic_timeline(num_layers=8)
    layers = timeline_data(timeline)["layers"]

    assert [layer["start"] for layer in layers] == [0, *(layer["end"] for layer in layers[:-1])]
    assert layers[-1]["end"] == timeline.step_ps
    assert [layer["names"] for layer in layers[6:8]] == [
        ["layer 3 mla", "3 mla", "mla"],
        ["layer 3 moe", "3 moe", "moe"],
    ]


def test_a_measured_timeline_without_counters_has_no_rates() -> None:
    timeline = one_layer()
    timeline.counters = []

    assert timeline_data(timeline)["rates"] == []
