"""LM head: top-k against a sort of pairs, merge over ranks, refusals, the kernel on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.lm_head import launch, reference  # noqa: E402


def test_top_k_orders_by_logit_then_by_id() -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, 3.0, -math.inf, 3.0, math.inf, 0.0]])
    found = reference.top_k(logits, 8, first_id=100)
    pairs = sorted((-(-math.inf if math.isnan(one) else one), at) for at, one in enumerate(logits[0].tolist()))
    assert found.ids_BK[0].tolist() == [at + 100 for _, at in pairs]
    assert found.logits_BK[0].tolist() == [-one for one, _ in pairs]


def test_merged_candidates_are_the_whole_top_k() -> None:
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(0)).bfloat16().float()  # bf16: many ties
    shards = [reference.top_k(shard, 64, first_id=1000 * rank) for rank, shard in enumerate(logits.split(1000, dim=1))]
    merged, whole = reference.merge(shards, 64), reference.top_k(logits, 64)
    assert torch.equal(merged.ids_BK, whole.ids_BK) and torch.equal(merged.logits_BK, whole.logits_BK)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logits": torch.zeros(1, 1040)}, r"logits.shape: got \(1, 1040\), accepted: \(1, 1024\)"),
        ({"x": torch.zeros(1, 1792)}, "x: got torch.float32"),
        ({"top": torch.zeros(1, 65)}, r"top.shape\[1\]: got 65, accepted: 1 to 64"),
        ({"ids": torch.zeros(1, 8, dtype=torch.int64)}, "ids: got torch.int64"),
        ({"ids": torch.zeros(1, 9, dtype=torch.int32)}, r"ids.shape: got \(1, 9\), accepted: \(1, 8\)"),
    ],
)
def test_what_cannot_be_honoured_is_named(change, named) -> None:  # type: ignore[no-untyped-def]
    arguments = {
        "x": torch.zeros(1, 1792, dtype=torch.bfloat16),
        "weight": torch.zeros(1024, 1792, dtype=torch.bfloat16),
        "logits": torch.zeros(1, 1024),
        "top": torch.zeros(1, 8),
        "ids": torch.zeros(1, 8, dtype=torch.int32),
    }
    with pytest.raises(UserError, match=named):
        launch.lm_head(**{**arguments, **change})


@pytest.mark.parametrize("num_outputs", [1030, 512, 32768])
def test_outputs_that_have_no_kernel_are_named(num_outputs: int) -> None:
    top, ids = torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(UserError, match=f"outputs: got {num_outputs}, accepted: multiples of 16"):
        launch.top_k(torch.zeros(1, num_outputs), top, ids)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "num_outputs", "k"), [(1, 10240, 64), (1, 20480, 1), (3, 20480, 64), (16, 10240, 40)])
def test_kernel_against_reference(rows, num_outputs, k) -> None:  # type: ignore[no-untyped-def]
    generator = torch.Generator(device="cuda").manual_seed(rows)
    x = torch.randn(rows, 7168, generator=generator, device="cuda").bfloat16()
    weight = (torch.randn(num_outputs, 7168, generator=generator, device="cuda") / 85).bfloat16()
    weight[3] *= 4
    weight[num_outputs - 1] = weight[3]  # equal logits at the ends of the shard
    weight[100:180] = weight[50]
    if rows > 2:
        x[1] = 0  # every logit equal: the survivors' list at its largest
        x[2, 5] = math.nan
    logits = torch.full((rows, num_outputs), math.nan, device="cuda")
    top = torch.full((rows, k), math.nan, device="cuda")
    ids = torch.full((rows, k), -1, dtype=torch.int32, device="cuda")
    launch.lm_head(x, weight, logits, top, ids, first_id=5 * num_outputs)
    finite = [row for row in range(rows) if row != 2]
    assert (verdict := compare(logits[finite], reference.logits(x, weight)[finite], "fp32_sum")), verdict
    expected = reference.top_k(logits, k, first_id=5 * num_outputs)
    assert torch.equal(ids.long(), expected.ids_BK) and torch.equal(top, expected.logits_BK)
    first = ids.clone(), top.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.lm_head(x, weight, logits, top, ids, first_id=5 * num_outputs)
    ids.fill_(-1)
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(ids, first[0]) and torch.equal(top, first[1])
