"""The selection against a plain sort; ties, NaN, infinities; the kernel against the reference, sharded and polled."""

from __future__ import annotations

import importlib.util
import math
import os
import random
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.compile_cache import ARCHITECTURES  # noqa: E402
from k3sim.kernels.router_topk.launch import router_topk  # noqa: E402
from k3sim.kernels.router_topk.reference import router_topk as reference  # noqa: E402

EXPERTS = 896

_BUILD = """
from k3sim.kernels.router_topk.kernel import RouterConfiguration, compile_router
compile_router(RouterConfiguration(num_shards=1))
compile_router(RouterConfiguration(num_shards=8, table=True))
compile_router(RouterConfiguration(num_shards=16, poll=True))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_builds_without_a_gpu(architecture: str) -> None:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    environment = {**os.environ, "CUTE_DSL_ARCH": architecture}
    command = [sys.executable, "-c", _BUILD]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def by_sorting(logits: list[float], bias: list[float]) -> list[int]:
    """Python's own sort on (NaN last, choice descending, id ascending)."""
    choice = [1 / (1 + math.exp(-x)) + b if x == x else x for x, b in zip(logits, bias, strict=True)]
    last = [math.isnan(one) for one in choice]
    return sorted(range(len(choice)), key=lambda i: (last[i], 0.0 if last[i] else -choice[i], i))[:16]


def hard_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, 896] that break a careless selection, and a bias [896]; values have gaps that fp32 sigmoids resolve."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.stack([torch.randperm(EXPERTS, generator=generator) for _ in range(8)]).float() / 128 - 4
    rows = [steps[0], steps[1]]
    rows.append(torch.zeros(EXPERTS))  # all equal: ids 0 to 15
    rows.append((steps[2] * 2).round() / 2)  # many ties at the sixteenth place
    nan = steps[3].clone()
    nan[steps[3].topk(20).indices] = torch.nan  # NaN in place of the best
    rows.append(nan)
    few = torch.full((EXPERTS,), torch.nan)
    few[torch.tensor([5, 100, 895])] = torch.tensor([-1.0, 2.0, 0.5])  # three numbers, so 13 NaN by id
    rows.append(few)
    infinite = steps[4].clone()
    infinite[torch.tensor([7, 3, 800])] = torch.inf  # sigmoid 1, a tie
    infinite[:400:2] = -torch.inf
    rows.append(infinite)
    rows.append(torch.full((EXPERTS,), -torch.inf))  # scores all 0
    rows.append(torch.full((EXPERTS,), torch.nan))
    rows.append(torch.arange(EXPERTS).float() / 128 - 4)  # the best 16 in one group, the best groups adjacent
    rows.append(torch.where(torch.arange(EXPERTS) % 56 < 16, 1.0, -1.0))  # 256 ties
    saturated = torch.full((EXPERTS,), 30.0)  # all sigmoids round to 1
    saturated[::3] = 40.0
    rows.append(saturated)
    return torch.stack(rows), torch.zeros(EXPERTS)


def test_reference_orders_like_a_sort() -> None:
    rows, bias = hard_rows()
    ids, _ = reference(rows.double(), bias.double())
    for row, got in zip(rows, ids, strict=True):
        assert got.tolist() == by_sorting([max(x, -700.0) if x == x else x for x in row.tolist()], bias.tolist())


def test_equal_scores_go_to_the_lower_id_and_nan_last() -> None:
    rows, bias = hard_rows()
    ids, weights = reference(rows, bias)
    assert ids[2].tolist() == list(range(16))
    assert weights[2].tolist() == pytest.approx([1 / 16] * 16)
    assert ids[5].tolist() == [100, 895, 5, 0, 1, 2, 3, 4, *range(6, 14)]
    assert weights[5, 3:].tolist() == [0.0] * 13
    assert ids[6, :3].tolist() == [3, 7, 800]
    assert weights[7].tolist() == [0.0] * 16
    assert ids[8].tolist() == list(range(16))


def test_bias_selects_but_does_not_weigh() -> None:
    logits, bias = torch.zeros(1, EXPERTS), torch.zeros(EXPERTS)
    chosen = random.Random(0).sample(range(EXPERTS), 16)
    bias[chosen] = torch.linspace(1.0, 0.1, 16)
    ids, weights = reference(logits, bias)
    assert ids[0].tolist() == chosen
    assert weights[0].tolist() == pytest.approx([1 / 16] * 16)


def test_launch_names_the_argument_at_fault() -> None:
    ids, weights = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 16)
    logits, bias = torch.zeros(2, EXPERTS), torch.zeros(EXPERTS)
    for arguments, message in (
        ((logits.bfloat16(), bias, ids, weights), "logits: got torch.bfloat16"),
        ((logits[:1], bias, ids, weights), "logits.shape"),
        ((torch.zeros(3, 2, EXPERTS), bias, ids, weights), "shards of logits: got 3"),
        ((logits, bias[:10], ids, weights), "bias.shape"),
        ((logits, bias, ids.long(), weights), "ids: got torch.int64"),
    ):
        with pytest.raises(UserError, match=message):
            router_topk(*arguments)


def run_sharded(
    logits: torch.Tensor, bias: torch.Tensor, num_shards: int, form: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel on ``logits`` in ``num_shards`` shards: "buffer", "table" or "poll" (a buffer filled late)."""
    rows = logits.shape[0]
    ids = torch.full((rows, 16), -7, dtype=torch.int32, device="cuda")
    weights = torch.full((rows, 16), torch.nan, device="cuda")
    shards = logits.cuda().unflatten(1, (num_shards, -1)).transpose(0, 1).contiguous()
    if form == "table":
        parts = [shard.clone() for shard in shards]
        router_topk(torch.tensor([one.data_ptr() for one in parts], device="cuda"), bias.cuda(), ids, weights)
    elif form == "poll":
        buffer = torch.full_like(shards, -1, dtype=torch.int32).view(torch.float32)
        router_topk(shards.clone(), bias.cuda(), ids, weights, poll=True)  # compiles, with everything arrived
        ids.fill_(-7)
        torch.cuda.synchronize()
        other = torch.cuda.Stream()
        router_topk(buffer, bias.cuda(), ids, weights, poll=True)
        with torch.cuda.stream(other):
            for shard in range(num_shards):
                buffer[shard].copy_(shards[shard])
        torch.cuda.synchronize()
        assert bool((buffer.view(torch.int32) == -1).all())  # ready for the next use
    else:
        router_topk(shards, bias.cuda(), ids, weights)
    torch.cuda.synchronize()
    return ids.cpu(), weights.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["buffer", "table", "poll"])
@pytest.mark.parametrize("num_shards", [1, 8, 16])
def test_kernel_selects_exactly(num_shards: int, form: str) -> None:
    rows, bias = hard_rows()
    ids, weights = run_sharded(rows, bias, num_shards, form)
    expected, expected_weights = reference(rows, bias)
    assert torch.equal(ids, expected)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_kernel_on_random_rows_with_a_bias() -> None:
    logits, bias = torch.randn(256, EXPERTS), torch.randn(EXPERTS) * 0.1
    ids, weights = run_sharded(logits, bias, 8, "buffer")
    # Sigmoids differ in the last bits, so two choices closer than that may change places.
    choice = logits.double().sigmoid() + bias.double()
    best = choice.sort(dim=-1, descending=True).values[:, :16]
    torch.testing.assert_close(choice.gather(1, ids.long()), best, rtol=0, atol=1e-6)
    chosen = logits.double().sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(-1, keepdim=True), rtol=1e-5, atol=0)
    assert all(len(set(row)) == 16 for row in ids.tolist())
