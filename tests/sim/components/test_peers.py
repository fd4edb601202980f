"""Exchanges as kernels take part in them: push, poll, pull, skew between ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, PUSH, PUSH_CALLS, TINY, call, counter_bytes, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Pass
from k3sim.sim.components.skew import Paces, Skew
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.timeline import Phase
from k3sim.sim.whatif import loopback_fabric

Patch = pytest.MonkeyPatch
#: Of a push whose ranks are alike: a stream, two launches, a ramp, a load, and the flight.
PUSH_WAITS = {Part.WEIGHTS: 1000, Part.LAUNCH: 1000, Part.RAMP_DRAIN: 100, Part.L2_TRIPS: 10, Part.NVLINK: 330}


def test_one_slot_is_seen_sooner_than_eight(monkeypatch: Patch) -> None:
    machine = replace(TINY, slot_visibility_s=5 * PS)

    def end_ps(polled_slots: int) -> int:
        works = {
            "a": replace(stream(1000), sent_bytes_per_peer=100),
            "b": replace(work(Pass()), polled_slots=polled_slots),
        }
        calls = [
            call(0, "a", sends="x", group_size=8, trigger="start"), call(1, "b", launch="pdl", receives=(0,))
        ]
        return kernel(simulate(monkeypatch, works, calls, machine, num_ranks=8), "b").end_ps

    assert end_ps(0) - end_ps(1) == 7 * 5


def test_a_loopback_push_is_seen_slot_by_slot(monkeypatch: Patch) -> None:
    own = loopback_fabric(TINY)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, own, num_ranks=4)
    waited = [one for one in kernel(timeline, "b").spans if one.phase is Phase.POLL]
    other = simulate(monkeypatch, PUSH, PUSH_CALLS, replace(own, slot_visibility_s=0.0), num_ranks=4)
    assert kernel(timeline, "b").end_ps - kernel(other, "b").end_ps == 5  # one slot beyond the first
    assert waited


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_push_leaves_flies_and_is_seen(monkeypatch: Patch, all_ranks: bool) -> None:
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, all_ranks=all_ranks)
    for rank in timeline.ranks:
        sender, run = kernel(timeline, "a", rank), kernel(timeline, "b", rank)
        assert spans(sender)[-2:] == [("weights", 1100, 2100), ("send", 2100, 2200)]
        assert sender.sent_bytes == 100
        # The consumer does not wait for its own rank's kernel but for what all ranks sent.
        assert spans(run) == [
            ("launch", 1000, 2000),
            ("peers", 2000, 2400),
            ("poll", 2400, 2430),
            ("dependent loads", 2430, 2440),
        ]
        assert (run.spans[1].cause, run.spans[1].cause_ps, run.spans[1].arrival_ps) == (sender.index, 2200, 2400)
    assert waits_ps(critical_path(timeline)) == PUSH_WAITS


def test_without_multicast_every_peer_costs_egress(monkeypatch: Patch) -> None:
    machine = replace(TINY, nvlink_multicast=False)
    calls = [replace(one, group_size=5) for one in PUSH_CALLS]
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, PUSH, calls, machine, num_ranks=5, all_ranks=all_ranks)
        sender = kernel(timeline, "a")
        assert spans(sender)[-1] == ("send", 2100, 2500)
        assert sender.sent_bytes == 400
        assert counter_bytes(timeline, "nvlink egress") == 400
        assert counter_bytes(timeline, "nvlink ingress") == 400


def test_with_multicast_ingress_is_the_limit(monkeypatch: Patch) -> None:
    calls = [replace(one, group_size=5) for one in PUSH_CALLS]
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, PUSH, calls, num_ranks=5, all_ranks=all_ranks)
        # Four peers send 100 bytes each at the same time into every port.
        assert spans(kernel(timeline, "a"))[-1] == ("send", 2100, 2500)
        assert counter_bytes(timeline, "nvlink egress") == 100
        assert counter_bytes(timeline, "nvlink ingress") == 400


def test_an_exchange_inside_resumes_on_all_data(monkeypatch: Patch) -> None:
    reduce = work(Pass(num_dependent_loads=1), Pass(num_block_reductions=1), sent_bytes_per_peer=100)
    for all_ranks in (False, True):
        timeline = simulate(monkeypatch, {"r": reduce}, [call(0, "r", sends="x", receives=(0,))], all_ranks=all_ranks)
        assert spans(kernel(timeline, "r")) == [
            ("launch", 0, 1000),
            ("dependent loads", 1000, 1010),
            ("send", 1010, 1110),
            ("peers", 1110, 1310),
            ("poll", 1310, 1340),
            ("block reduction", 1340, 1347),
        ]
        assert waits_ps(critical_path(timeline)) == {
            Part.LAUNCH: 1000, Part.L2_TRIPS: 10, Part.BLOCK_REDUCTION: 7, Part.NVLINK: 330
        }  # fmt: skip
        assert kernel(timeline, "r").sent_bytes == counter_bytes(timeline, "nvlink egress") == 100


def test_a_pull_is_a_fenced_flag_and_load(monkeypatch: Patch) -> None:
    reduce = work(Pass(num_dependent_loads=1), Pass(num_block_reductions=1), sent_bytes_per_peer=100)
    calls = [call(0, "r", sends="x", receives=(0,), transport="pull")]
    timeline = simulate(monkeypatch, {"r": reduce}, calls)
    assert spans(kernel(timeline, "r"))[2:] == [
        ("send", 1010, 1138),  # a line of 128 bytes
        ("peers", 1138, 1398),  # fence and flight
        ("poll", 1398, 1428),
        ("send", 1428, 1938),  # there, an access to L2, and back, and 100 bytes
        ("block reduction", 1938, 1945),
    ]


def test_without_switch_reduction_every_part_is_loaded(monkeypatch: Patch) -> None:
    machine = replace(TINY, nvlink_in_switch_reduction=False)
    reduce = work(Pass(num_dependent_loads=1), sent_bytes_per_peer=100)
    calls = [call(0, "r", sends="x", receives=(0,), transport="pull", group_size=4)]
    timeline = simulate(monkeypatch, {"r": reduce}, calls, machine, num_ranks=4)
    # There, an access to L2, and back, and a port that serves three peers; rates are whole.
    assert spans(kernel(timeline, "r"))[-1][2] - spans(kernel(timeline, "r"))[-1][1] == 410 + 301


#: Of 400 bytes on four ranks: spans behind the load, bytes that leave a rank and that enter its port, flags included.
FORMS = {
    # Three copies of all, which three peers send as well; a third of the port is rounded down.
    "one-shot": ([("send", 1010, 2211), ("peers", 2211, 2411), ("poll", 2411, 2441)], 1200, 1200),
    "two-shot": (
        [
            ("send", 1010, 1395), ("peers", 1395, 1595), ("poll", 1595, 1625),  # three flags
            ("send", 1625, 2336),  # there, L2, and back, and three slices of 100 bytes
            ("send", 2336, 2637),  # the sum to three peers
            ("peers", 2637, 3307), ("poll", 3307, 3337),  # acknowledged (410), fence (60), flight (200)
        ],
        384 + 300 + 300,
        384 + 300 + 300,
    ),
    "in-switch": (
        [
            ("send", 1010, 1395), ("peers", 1395, 1595), ("poll", 1595, 1625), ("send", 1625, 2336),
            ("send", 2336, 2637), ("peers", 2637, 3307), ("poll", 3307, 3337),
        ],
        128 + 300 + 100,  # a flag and a sum by multicast; the switch reads a slice for each peer
        384 + 100 + 300,
    ),
}  # fmt: skip


@pytest.mark.parametrize("all_ranks", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_an_all_reduce_moves_what_its_form_says(monkeypatch: Patch, form: str, all_ranks: bool) -> None:
    reduce = work(Pass(num_dependent_loads=1), sent_bytes_per_peer=400)
    calls = [call(0, "r", sends="x", receives=(0,), transport=form, group_size=4)]
    timeline = simulate(monkeypatch, {"r": reduce}, calls, num_ranks=4, all_ranks=all_ranks)
    expected, sent, received = FORMS[form]
    found = spans(kernel(timeline, "r"))[2:]
    assert [name for name, _, _ in found] == [name for name, _, _ in expected]
    for (_, *times), (_, *right) in zip(found, expected, strict=True):
        assert times == pytest.approx(right, abs=4)  # rates are whole, and ports shared by three
    assert kernel(timeline, "r").sent_bytes == sent
    assert counter_bytes(timeline, "nvlink egress") == pytest.approx(sent, abs=4)
    assert counter_bytes(timeline, "nvlink ingress") == pytest.approx(received, abs=4)


@pytest.mark.parametrize("all_ranks", [False, True])
def test_a_ring_hands_slices_on_in_turn(monkeypatch: Patch, all_ranks: bool) -> None:
    reduce = work(Pass(num_dependent_loads=1), sent_bytes_per_peer=400)
    calls = [call(0, "r", sends="x", receives=(0,), transport="ring", group_size=4)]
    timeline = simulate(monkeypatch, {"r": reduce}, calls, num_ranks=4, all_ranks=all_ranks)
    hop = [("send", 100), ("peers", 200), ("poll", 30)]
    assert [(name, end - start) for name, start, end in spans(kernel(timeline, "r"))[2:]] == 6 * hop
    assert counter_bytes(timeline, "nvlink egress") == counter_bytes(timeline, "nvlink ingress") == 600


def test_a_slower_rank_holds_its_peers_up(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Paces, "pace", lambda self, rank, index: 2.0 if (rank, index) == (1, 0) else 1.0)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.SAMPLED)
    # Rank 1 streams until 3100 and has sent at 3200; its data is visible at 3400.
    assert kernel(timeline, "a", 0).end_ps == 2200
    assert kernel(timeline, "a", 1).end_ps == 3200
    run = kernel(timeline, "b", 0)
    assert spans(run) == [
        ("launch", 1000, 2000),
        ("peers", 2000, 3400),
        ("poll", 3400, 3430),
        ("dependent loads", 3430, 3440),
    ]
    assert run.spans[1].arrival_ps == 2400
    assert timeline.critical_rank == 0
    assert waits_ps(critical_path(timeline)) == {**PUSH_WAITS, Part.SLOWER_PEER: 1000}


def test_expected_skew_is_the_mean_slowest(monkeypatch: Patch) -> None:
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, skew=Skew.EXPECTED)
    # The slower of two standard normals is 1/sqrt(pi) = 0.5642 late; a worked for 1200 ps, of which a tenth is
    # the standard deviation: 0.5642 * 120 = 68.
    run = kernel(timeline, "b")
    assert spans(run)[1:3] == [("peers", 2000, 2468), ("poll", 2468, 2498)]
    assert waits_ps(critical_path(timeline))[Part.SLOWER_PEER] == 68


def test_a_wait_for_peers_is_no_own_skew(monkeypatch: Patch) -> None:
    # The kernel computes for 1000 ps, exchanges, computes for 500 and sends what a third kernel waits for.
    both = work(Pass(flops=10_000.0), Pass(flops=5000.0), sent_bytes_per_peer=100)
    works = {"r": both, "a": work(Pass(), sent_bytes_per_peer=100), "b": work(Pass())}
    calls = [call(0, "r", sends="x", receives=(0,)), call(1, "a", sends="y"), call(2, "b", receives=(1,))]
    late_ps = []
    for skew in (Skew.OFF, Skew.EXPECTED):
        timeline = simulate(monkeypatch, works, calls, replace(TINY, nvlink_one_way_s=5000 * PS), skew=skew)
        waits = (kernel(timeline, name).spans for name in ("r", "b"))
        late_ps.append([sum(one.end_ps - one.start_ps for one in of if one.phase is Phase.PEERS) for of in waits])
    # 0.5642 of a tenth of 1000, then of a tenth of 500 and of the 100 that the second sending took.
    assert [late - on_time for late, on_time in zip(late_ps[1], late_ps[0], strict=True)] == [
        56,
        29,
    ]  # sqrt(50**2 + 10**2) = 51


def test_a_late_poller_waits_for_no_peer(monkeypatch: Patch) -> None:
    works = {**PUSH, "long": stream(5000)}
    calls = [PUSH_CALLS[0], call(1, "long"), call(2, "b", receives=(0,))]
    timeline = simulate(monkeypatch, works, calls)
    assert [name for name, _, _ in spans(kernel(timeline, "b"))] == ["release", "launch", "dependent loads"]


def test_visibility_under_way_is_nvlink_flight(monkeypatch: Patch) -> None:
    # Data of 590 bytes' streaming is complete at 1990 and seen at 2020; the poller comes in between, at 2000.
    works = {**PUSH, "a": work(Pass(reads=(reads(590),)), sent_bytes_per_peer=100)}
    timeline = simulate(monkeypatch, works, PUSH_CALLS)
    assert spans(kernel(timeline, "b")) == [
        ("launch", 1000, 2000), ("poll", 2000, 2020), ("dependent loads", 2020, 2030)
    ]  # fmt: skip
    assert waits_ps(critical_path(timeline)) == {
        Part.WEIGHTS: 590,
        Part.LAUNCH: 1000,
        Part.RAMP_DRAIN: 100,
        Part.L2_TRIPS: 10,
        Part.NVLINK: 330,
    }


def test_a_context_group_waits_for_its_own_ranks(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Paces, "pace", lambda self, rank, index: 2.0 if (rank, index) == (3, 0) else 1.0)
    timeline = simulate(monkeypatch, PUSH, PUSH_CALLS, num_ranks=4, skew=Skew.SAMPLED)
    assert kernel(timeline, "b", 0).end_ps == kernel(timeline, "b", 1).end_ps == 2440
    assert kernel(timeline, "b", 2).end_ps == 3440
