"""Steps of layouts beyond plain tensor parallelism: GPUs, exchanges, stages, and what is refused."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.paths import find_path
from k3sim.model.program import Call, Program
from k3sim.report import report_of
from k3sim.sim.engine import simulate
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.profile import load_machine
from k3sim.sim.question import ask, gpus_of, question_of
from k3sim.sim.timeline.timeline import PS_PER_US

DECODE_CELL = "k3sim timeline --machine gb200 --dcp 8 --concurrency 183 --context 8704 --path stock --kv-dtype bf16 "
# Tokens a rank, microseconds of dispatch and combine (AIConfigurator 2026-08: DeepEP low latency, hidden 7168, 8 of 256
# experts), by machine and ranks.
EXCHANGES = {
    ("gb300", 4): ((1, 16.7, 18.3), (128, 26.3, 36.6), (1024, 112.9, 166.6)),
    ("b300", 8): ((1, 21.3, 21.9), (128, 33.4, 42.7), (1024, 127.7, 190.8)),
    ("h200", 8): ((1, 11.9, 12.6), (128, 35.1, 67.7), (1024, 211.1, 481.0)),
}


def predicted(**options: object) -> Prediction:
    return predict(ask(Options(path="stock", **options)))  # type: ignore[arg-type]


def stages_of(one: Prediction) -> set[str]:
    return {call.stage for call in one.program.calls}


# -- as engines write them ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "written",
    [
        "--tp 16 --attn-dp 2 --ep 16",
        "--tp 16 --dp 2 --enable-dp-attention --ep 16",
        "--flags vllm --tp 8 --dp 2 --ep 16",
    ],
)
def test_one_layout_in_three_spellings(written: str) -> None:
    question = question_of(DECODE_CELL + written)
    assert (question.layout.tag, question.layout.num_gpus) == ("tp16attndp2ep16dcp8", 16)
    assert gpus_of(DECODE_CELL + written) == 16
    assert not [one for one in question.warnings if "replicas" in one]


def test_replicas_are_never_taken_for_groups() -> None:
    question = question_of(DECODE_CELL + "--tp 16 --dp 2 --ep 16")
    assert question.layout.num_gpus == 32
    (said,) = [one for one in question.warnings if "replicas" in one]
    assert "32 GPUs" in said and "--attn-dp" in said and "--flags vllm" in said


def test_a_checkpoint_that_fits_once_all_is_divided() -> None:
    layout = {"machine": "b200", "path": "stock", "tp": 16, "dcp": 8, "pad_experts": False, "memory": 103.0}
    with pytest.raises(UserError, match="shard-all would fit"):
        ask(Options(**layout))  # type: ignore[arg-type]
    room = ask(Options(**layout, shard_all=True)).room()  # type: ignore[arg-type]
    # A user of 16 cards of 96 GB reports room for some 1.05 million tokens.
    assert room.tokens == pytest.approx(1.05e6, rel=0.15)


def test_sides_and_commands_hold_the_layout() -> None:
    asked = Options(path="stock", tp=16, attn_dp=4, ep=16, expert_exchange="dispatch", expert_imbalance=1.5, pp=2)
    assert question_of(asked.command()) == ask(asked)


# -- exchanges ------------------------------------------------------------------------------------------------------


def test_groups_gather_or_dispatch() -> None:
    groups = {"tp": 16, "attn_dp": 4, "ep": 16, "concurrency": 64}
    plain, gathered = predicted(tp=16, ep=16, concurrency=64), predicted(**groups)
    sent = predicted(**groups, expert_exchange="dispatch")
    assert {"moe.gather", "moe.combine"} <= stages_of(gathered) - stages_of(plain)
    assert {"moe.dispatch", "moe.combine", "moe.tail_gather"} <= stages_of(sent)
    assert not {"moe.gather", "moe.permutation", "moe.tail_reduce"} & stages_of(sent)
    alone = predicted(**{**groups, "attn_dp": 16}, expert_exchange="dispatch")
    assert not {"kda.all_reduce", "mla.all_reduce", "moe.tail_gather"} & stages_of(alone)


def test_other_models_gather_and_dispatch_too() -> None:
    groups = {"model": "deepseek-r1", "machine": "b200", "tp": 8, "attn_dp": 8, "ep": 8, "concurrency": 64}
    assert "moe.gather" in stages_of(predicted(**groups))
    assert "moe.dispatch" in stages_of(predicted(**groups, expert_exchange="dispatch"))


def test_a_busier_rank_makes_a_longer_step() -> None:
    groups = {"tp": 16, "attn_dp": 16, "ep": 16, "concurrency": 64, "expert_exchange": "dispatch"}
    steps = [predicted(**groups, expert_imbalance=factor).step_ps for factor in (1.0, 1.5, 2.0, 3.0)]
    assert steps == sorted(steps)
    assert steps[-1] > 1.1 * steps[0]


def test_all_ranks_agree_with_one_of_them() -> None:
    options = {"tp": 4, "attn_dp": 2, "ep": 4, "model": "kimi-linear-48b-a3b", "machine": "h200", "concurrency": 8}
    question = ask(Options(path="stock", **options))  # type: ignore[arg-type]
    program = predict(ask(Options(path="stock", skew=False, **options))).program  # type: ignore[arg-type]
    one, every = (simulate(program, question.machine, all_ranks=ranks).step_ps for ranks in (False, True))
    assert every == pytest.approx(one, rel=0.002)


def exchange_us(machine: str, ranks: int, operator: str, tokens: int) -> float:
    shape = {"rows": tokens, "received_rows": tokens, "top_k": 8, "depth": 7168, "ranks": ranks}
    call = Call(
        index=0, layer=0, kind="", stage=operator, operator=f"expert_exchange.{operator}", weights=(), shape=shape,
        stream="main", launch="graph", trigger="end", after=(), sends="tokens", transport="all-to-all",
        group_size=ranks, receives=(0,),
    )  # fmt: skip
    program = Program(path=find_path("stock"), num_ranks=ranks, layers=(0,), calls=(call,))
    (run,) = simulate(program, load_machine(machine)).kernels
    return (run.end_ps - run.start_ps) / PS_PER_US


def test_exchanges_beside_a_public_table() -> None:
    """They are too fast (docs/layouts.md says by how much); they never are too slow, nor off by more than half."""
    errors = [
        exchange_us(machine, ranks, operator, tokens) / measured - 1
        for (machine, ranks), rows in EXCHANGES.items()
        for tokens, *both in rows
        for operator, measured in zip(("dispatch", "combine"), both, strict=True)
    ]
    assert statistics.median(errors) == pytest.approx(-0.35, abs=0.05)
    assert min(errors) > -0.55 and max(errors) < 0


# -- stages and a divided front -------------------------------------------------------------------------------------


def test_stages_add_a_hand_over_each() -> None:
    whole, two, four = (predicted(tp=8, pp=stages) for stages in (1, 2, 4))
    assert (two.question.layout.num_gpus, four.question.layout.num_gpus) == (16, 32)
    assert [one.stage for one in two.full.kernels].count("pipeline.hand_over") == 1
    assert [one.stage for one in four.full.kernels].count("pipeline.hand_over") == 3
    assert 2 < two.step_us - whole.step_us < 20
    assert 2 < (four.step_us - two.step_us) / 2 < 20


def test_a_divided_front_reads_a_part_and_gathers() -> None:
    whole, divided = predicted(), predicted(shard_all=True)
    assert "moe.front_gather" in stages_of(divided) - stages_of(whole)
    saved = 92 * (896 + 3584) * 7168 * 2 * 15 // 16
    assert whole.moved_bytes - divided.moved_bytes == pytest.approx(saved, rel=0.02)


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("--attn-dp 2", "path fused with public kernels has no attention groups; accepted: --path stock"),
        ("--pp 2 --path megakernel", "no pipeline stages"),
        ("--kernels own --path stock --attn-dp 2", "no attention groups"),
        ("--kernels own --shard-all", "no front that is divided"),
        ("--path stock --tp 16 --attn-dp 2 --ep 16 --expert-exchange dispatch --shard-all", "give one"),
        ("--with sharded-router.latent --shard-all", "give the whole switch"),
        ("--flags mine", "unknown meaning of flags 'mine'"),
        ("--expert-exchange post", "unknown expert exchange 'post'"),
        ("--tp -1 --attn-dp -1", "tp=-1"),
        ("--expert-imbalance 2", "needs ep above 1"),
    ],
)
def test_layouts_without_kernels_are_refused(written: str, shown: str) -> None:
    with pytest.raises(UserError) as caught:
        question_of(f"k3sim timeline {written}")
    assert shown in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_report_leaves_out_paths_without_the_layout() -> None:
    report = report_of(Options(path="stock", tp=16, attn_dp=4, ep=16, concurrency=4))
    assert report.fused is None and report.megakernel is None
    assert set(report.refused) == {"fused", "megakernel"}
    assert "attention groups" in report.refused["fused"]
    assert list(report.labelled) == ["stock"]


@given(
    tp=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    ep=st.sampled_from([1, 2, 4, 8, 16, 32, 64]),
    attn_dp=st.sampled_from([1, 2, 4, 8, 16]),
    dcp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 5]),
    exchange=st.sampled_from(["gather", "dispatch"]),
    shard_all=st.booleans(),
    concurrency=st.integers(1, 256),
)
@settings(max_examples=60, deadline=None)
def test_any_layout_gives_a_step_or_one_refusal(
    tp: int, ep: int, attn_dp: int, dcp: int, pp: int, exchange: str, shard_all: bool, concurrency: int
) -> None:
    options = Options(
        path="stock", model="kimi-k3", tp=tp, ep=ep, attn_dp=attn_dp, dcp=dcp, pp=pp, expert_exchange=exchange,
        shard_all=shard_all, concurrency=concurrency, memory=4000.0,
    )  # fmt: skip
    try:
        question = ask(options)
    except UserError as refused:
        assert "\n" not in str(refused)
        return
    one = predict(question)
    assert one.step_us > 0
    assert sum(one.waits_ps.values()) == one.step_ps
