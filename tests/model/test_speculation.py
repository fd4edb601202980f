"""Acceptance of drafts, and a draft's matrices and rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from k3sim.errors import UserError
from k3sim.model.config_file import load_architecture
from k3sim.model.draft import Draft
from k3sim.model.layout import Layout, Workload
from k3sim.model.matrices import rank_matrices
from k3sim.model.memory import resident_bytes
from k3sim.model.paths import find_path
from k3sim.model.program import build_program, dimensions
from k3sim.model.routing import UNIFORM
from k3sim.model.speculation import TABLES, find_draft, read_acceptance

K3 = load_architecture(None)
DRAFTED = replace(K3, draft=Draft(num_drafts=7))


def test_layer_of_the_draft_has_the_published_bytes() -> None:
    matrices = rank_matrices(DRAFTED, Layout(tp=8))
    layer = sum(one.num_bytes for name, one in matrices.items() if name.startswith("draft_layer."))
    assert layer == pytest.approx(128.8e6, abs=0.1e6)
    assert matrices["draft_context.projection"].num_bytes == 35840 * 7168 * 2
    assert matrices["draft_context.kv"].num_bytes == 2880 * 7168 * 2
    assert not any(name.startswith("draft") for name in rank_matrices(K3, Layout(tp=8)))


def test_memory_holds_draft_and_a_state_a_row() -> None:
    def held(architecture):  # type: ignore[no-untyped-def]
        return resident_bytes(architecture, Layout(tp=8), concurrency=4, context=1024, kv_dtype="fp8")

    plain, drafted = held(K3), held(DRAFTED)
    assert drafted.kda_state == 8 * plain.kda_state
    weights = 5 * 128_778_240 + 35840 * 7168 * 2 + 2880 * 7168 * 2 + (163840 + 163840 // 8) * 256 * 2
    assert drafted.weights - plain.weights == pytest.approx(weights, rel=1e-3)
    assert drafted.kv_cache - plain.kv_cache == 4 * 1024 * 5 * 576


def test_verification_reads_a_cache_once_a_user() -> None:
    program = build_program(DRAFTED, Layout(tp=8), Workload(concurrency=2), find_path("stock"))
    by_stage = {call.stage: call for call in program.calls}
    attention = by_stage["mla.attention"].shape
    assert (attention["rows"], attention["heads"]) == (2, 12 * 8)
    assert by_stage["kda.recurrent"].operator == "unfused.recurrent_update_verified"
    assert by_stage["kda.in_proj"].shape["rows"] == 16
    assert "kda.decode" not in by_stage


def test_positions_of_the_draft_are_serial_calls() -> None:
    program = build_program(DRAFTED, Layout(tp=8), Workload(), find_path("fused"))
    drafted = [call for call in program.calls if call.kind == "draft"]
    assert sum(call.operator == "lm_head.top_k" for call in drafted) == 7
    assert sum(call.stage == "draft.attention" for call in drafted) == 5
    assert len({call.stage for call in drafted if ".markov." in call.stage}) == 7


def test_distinct_experts_of_verified_rows_match_drawing() -> None:
    dims = dimensions(DRAFTED, Layout(tp=8), Workload(), UNIFORM)
    draws = random.Random(5)
    counted = [len({one for _ in range(8) for one in draws.sample(range(896), 16)}) for _ in range(2000)]
    assert dims["distinct_milli"] / 1000 == pytest.approx(sum(counted) / len(counted), rel=0.005)


def test_acceptance_sums_what_positions_give() -> None:
    assert read_acceptance("0,0").tokens_per_step(2) == 1.0
    assert read_acceptance("0.9,0.5").tokens_per_step(1) == pytest.approx(1.9)
    assert read_acceptance("geometric:0.5").tokens_per_step(2) == pytest.approx(1.75)
    assert read_acceptance("3.8").tokens_per_step(7) == 3.8
    assert read_acceptance("coding").tokens_per_step(7) == pytest.approx(1 + sum(TABLES["coding"]))


def test_tokens_rise_with_acceptance_and_length() -> None:
    found = [read_acceptance(f"geometric:{tenth / 10}").tokens_per_step(7) for tenth in range(11)]
    assert found == sorted(found) and found[0] == 1.0 and found[-1] == 8.0
    coding = [read_acceptance("coding").tokens_per_step(length) for length in range(8)]
    assert coding == sorted(coding)


@pytest.mark.parametrize("text", ["nan", "inf", "0.5", "x", "0.5,0.7", "1.2,0.3", "geometric:2", "geometric:nan", ""])
def test_acceptance_refuses_what_is_no_share(text: str) -> None:
    with pytest.raises(UserError, match="acceptance is"):
        read_acceptance(text)


def test_acceptance_refuses_more_than_is_drafted() -> None:
    with pytest.raises(UserError, match="at most 4"):
        read_acceptance("4.5").tokens_per_step(3)
    with pytest.raises(UserError, match="2 positions; 3 drafts"):
        read_acceptance("0.9,0.8").tokens_per_step(3)


@pytest.mark.parametrize("length", ["-1", "16", "2.5", "x", "best"])
def test_draft_refuses_lengths_that_are_none(length: str) -> None:
    with pytest.raises(UserError, match="draft-length"):
        find_draft("dspark", K3, Layout(), length)


def test_draft_refuses_other_layouts_and_models() -> None:
    with pytest.raises(UserError, match="dcp"):
        find_draft("dspark", K3, Layout(dcp=8), "7")
    with pytest.raises(UserError, match="draft of kimi-k3"):
        find_draft("dspark", load_architecture("deepseek-r1"), Layout(tp=8), "7")
    with pytest.raises(UserError, match="verify drafts"):
        build_program(DRAFTED, Layout(), Workload(), find_path("megakernel"))
