"""Waits of a measured step: small timelines whose parts are known, and the step that was measured on an H200."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import open_in_browser
from trace_slices import read_slices
from walks import tiles

from k3sim.calibrate.decode.measured import idle_us, moved_bytes
from k3sim.calibrate.decode.options import DecodeOptions, case_of
from k3sim.measured_report import read_measured
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps
from k3sim.sim.timeline.measured import CallFacts, divide, facts_of
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

STORED = Path(__file__).parents[3] / "calibrate" / "data" / "h200-decode-fused.json"
ONE_BYTE_A_PS = 1e12


def step(*kernels: tuple[int, int, CallFacts], streams: str = "") -> Timeline:
    """Kernels (start, end, facts), divided; ``streams``: a letter a kernel, ``a`` for the side stream."""
    runs = [
        KernelRun(
            index=facts.call, rank=0, stream="aux" if streams[at : at + 1] == "a" else "main", layer=0, kind="",
            stage=f"k{facts.call}", start_ps=start_ps, end_ps=end_ps, spans=[Span(Phase.RUN, start_ps, end_ps)],
        )
        for at, (start_ps, end_ps, facts) in enumerate(kernels)
    ]  # fmt: skip
    bare = Timeline("measured", 16, (0,), 1, runs, [], max(run.end_ps for run in runs))
    return divide(bare, {facts.call: facts for _, _, facts in kernels}, ONE_BYTE_A_PS)


def facts(call: int, *waits_for: int, polls: bool = False, weights: int = 0, state: int = 0, early: int = 0,
          prefetched: tuple[tuple[int, int], ...] = ()) -> CallFacts:  # fmt: skip
    return CallFacts(
        call=call, launch="pdl", waits_for=waits_for, polls=polls, weight_bytes=weights, kv_state_bytes=state,
        early_bytes=early, prefetched=prefetched,
    )  # fmt: skip


def test_serial_kernels_are_bytes_rest_and_launch() -> None:
    found = step((0, 10, facts(0, weights=4)), (12, 30, facts(1, 0, weights=5, state=5)))
    assert critical_path(found) == tiles(
        (4, Part.WEIGHTS, 0), (10, Part.UNKNOWN, 0), (12, Part.LAUNCH, 1), (17, Part.WEIGHTS, 1),
        (22, Part.KV_STATE, 1), (30, Part.UNKNOWN, 1),
    )  # fmt: skip


def test_what_an_early_kernel_loaded_costs_nothing() -> None:
    # 7 ps before its predecessor ends: of 12 bytes its pipeline may hold 4.
    found = step((0, 10, facts(0)), (3, 20, facts(1, 0, weights=12, early=4)))
    assert [(span.phase, span.start_ps, span.end_ps) for span in found.kernels[1].spans] == [
        (Phase.DEPENDENCY, 3, 10),
        (Phase.WEIGHTS, 10, 18),
        (Phase.RUN, 18, 20),
    ]
    assert waits_ps(critical_path(found)) == {Part.WEIGHTS: 8, Part.UNKNOWN: 12}
    # A larger pipeline has had time for 7.
    found = step((0, 10, facts(0)), (3, 20, facts(1, 0, weights=12, early=12)))
    assert waits_ps(critical_path(found)) == {Part.WEIGHTS: 5, Part.UNKNOWN: 15}


def test_early_kernels_count_every_instant_once() -> None:
    found = step((0, 10, facts(0, weights=9)), (1, 14, facts(1, 0)), (2, 16, facts(2, 1)), (3, 30, facts(3, 2)))
    assert [(one.kernel, one.end_ps) for one in critical_path(found)] == [(0, 9), (0, 10), (1, 14), (2, 16), (3, 30)]


def test_a_prefetch_takes_bytes_off_its_reader() -> None:
    kernels = ((0, 10, facts(0)), (4, 5, facts(1, 0)), (10, 20, facts(2, 0, weights=9, prefetched=((1, 9),))))
    # Asked for at 4, until 10 at most 6 bytes came.
    assert waits_ps(critical_path(step(*kernels, streams="mam"))) == {Part.WEIGHTS: 3, Part.UNKNOWN: 17}


def test_a_timely_side_stream_is_off_the_path() -> None:
    found = step((0, 10, facts(0)), (2, 9, facts(1, weights=7)), (10, 15, facts(2, 0, 1)), streams="mam")
    assert {one.kernel for one in critical_path(found)} == {0, 2}
    assert waits_ps(critical_path(found)) == {Part.UNKNOWN: 15}


def test_an_awaited_side_stream_is_on_the_path() -> None:
    found = step(
        (0, 10, facts(0)), (11, 40, facts(1, 0, weights=20)), (10, 15, facts(2, 0)), (14, 45, facts(3, 2, 1)),
        streams="mamm",
    )  # fmt: skip
    assert critical_path(found) == tiles(
        (10, Part.UNKNOWN, 0), (11, Part.LAUNCH, 1), (31, Part.WEIGHTS, 1), (40, Part.UNKNOWN, 1),
        (45, Part.UNKNOWN, 3),
    )  # fmt: skip


def test_polling_behind_the_producer_is_exchange() -> None:
    found = step((0, 10, facts(0)), (4, 17, facts(1, 0, polls=True, weights=2)))
    assert waits_ps(critical_path(found)) == {Part.WEIGHTS: 2, Part.UNKNOWN: 10, Part.EXCHANGE: 5}


def test_bytes_never_take_longer_than_the_kernel() -> None:
    assert waits_ps(critical_path(step((0, 10, facts(0, weights=30, state=70))))) == {Part.WEIGHTS: 3, Part.KV_STATE: 7}


def test_a_kernel_that_ended_first_did_not_wait() -> None:
    """A consumer may take data of a producer that has not ended: polls need no completion."""
    found = step((0, 12, facts(0)), (5, 12, facts(1, 0, polls=True)), (12, 14, facts(2, 0, 1)))
    assert found.kernels[1].causes == ()
    assert sum(waits_ps(critical_path(found)).values()) == 14


@pytest.mark.parametrize("seed", range(50))
def test_segments_tile_the_step_whatever_the_order(seed: int) -> None:
    choose = random.Random(seed)
    kernels: list[tuple[int, int, CallFacts]] = []
    for call in range(40):
        start = choose.randrange(max(1, 10 * call)) if call else 0
        needed = tuple(sorted(choose.sample(range(call), min(call, choose.randrange(4)))))
        size = choose.randrange(60)
        kernels.append(
            (start, start + choose.randrange(1, 80), facts(
                call, *needed, polls=choose.random() < 0.3, weights=size, early=choose.randrange(size + 1),
                prefetched=((choose.randrange(call), 5),) if call else (),
            ))
        )  # fmt: skip
    found = step(*kernels)
    segments = critical_path(found)
    assert segments[0].start_ps == 0 and segments[-1].end_ps == found.step_ps
    assert all(one.end_ps == other.start_ps for one, other in pairwise(segments))
    assert sum(waits_ps(segments).values()) == found.step_ps
    for run in found.kernels:
        assert (run.spans[0].start_ps, run.spans[-1].end_ps) == (run.start_ps, run.end_ps)
        assert all(one.end_ps == other.start_ps for one, other in pairwise(run.spans))


# -- the program ------------------------------------------------------------------------------------------------------


def test_the_program_says_waits_and_early_reads() -> None:
    program = case_of(DecodeOptions(layers=2)).program
    known = facts_of(program, 132)
    last = {call.stage: call.index for call in program.calls if call.layer == 1}
    by_stage = {stage: known[index] for stage, index in last.items()}
    # Its predecessor on the stream, a side stream, and the producer that it polls (once, though it is also the first).
    assert by_stage["kda.o_proj"].waits_for == (last["kda.decode"], last["attn_res.part_ffn"])
    assert by_stage["attn_res.ffn"].waits_for == (last["kda.o_proj"],)
    assert by_stage["attn_res.ffn"].polls and not by_stage["kda.o_proj"].polls
    # The pipelines hold less than the matrix.
    assert 0 < by_stage["kda.in_proj"].early_bytes < by_stage["kda.in_proj"].weight_bytes
    assert by_stage["moe.experts"].early_bytes == 0  # it first must know which
    assert by_stage["moe.shared_gate_up"].early_bytes == 0  # launched when its predecessor has ended


def test_what_is_prefetched_names_the_prefetch() -> None:
    program = case_of(DecodeOptions(layers=4)).program
    known = facts_of(program, 132)
    last = {call.stage: call.index for call in program.calls if call.kind.startswith("mla")}
    projection = known[last["mla.o_proj"]]
    # 7168 outputs of a 768 wide slice in bf16, fetched whole.
    assert projection.weight_bytes == 7168 * 768 * 2
    assert projection.prefetched == ((last["prefetch.o_proj"], 7168 * 768 * 2),)
    assert known[last["prefetch.o_proj"]].weight_bytes == 0


@pytest.mark.parametrize("path", ["stock", "fused"])
def test_facts_hold_the_bytes_of_the_step(path: str) -> None:
    program = case_of(DecodeOptions(path=path)).program
    known = facts_of(program, 132)
    assert sum(one.weight_bytes + one.kv_state_bytes for one in known.values()) == moved_bytes(program)


# -- the step that was measured ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(STORED.read_text())
    return document


def test_parts_of_the_stored_step_sum_to_it(stored: dict[str, Any]) -> None:
    report = read_measured(str(STORED))
    parts = waits_ps(critical_path(report.timeline))
    assert sum(parts.values()) == report.timeline.step_ps == max(run.end_ps for run in report.timeline.kernels)
    assert stored["waits_us"] == {part.value: ps / PS_PER_US for part, ps in parts.items()}
    assert stored["profiled_us"] == report.timeline.step_us
    assert sum(row["us"] for row in stored["critical_path"]) == pytest.approx(stored["profiled_us"], abs=1e-6)
    assert report.document["critical_path"] == stored["critical_path"]
    # On the path there can be no more bytes than there are, and an instant at which no kernel runs is a gap.
    assert stored["waits_us"]["weights"] + stored["waits_us"]["kv_state"] < stored["floor_us"]
    assert stored["idle_us"] == pytest.approx(idle_us(report.timeline), abs=1e-6)
    assert stored["waits_us"]["launch"] > stored["idle_us"]


def test_the_stored_step_opens_as_page_and_trace(stored: dict[str, Any], tmp_path: Path) -> None:
    files = read_measured(str(STORED)).write(tmp_path)
    slices = [one for one in read_slices(Path(files["perfetto"]).read_bytes()) if "start_ps" in one.annotations]
    assert len(slices) == len(stored["stages"])
    assert {one.process for one in slices} == {"fused, measured rank 0"}
    assert max(one.annotations["end_ps"] for one in slices) == round(stored["profiled_us"] * PS_PER_US)
    page, console = open_in_browser(Path(files["html"]), tmp_path)
    assert console == []
    assert 'data-errors="0"' in page and 'data-drawn="yes"' in page
    for word in ("fused, measured", "One KDA layer", "One MLA layer", "exchange", "What was measured"):
        assert word in page
    assert "HBM busy" not in page  # nobody measured it
