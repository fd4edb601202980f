"""What a rank needs, before and after allocation, and what is said when it does not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from small_model import small_architecture  # noqa: E402

from k3sim.calibrate.decode import commandline  # noqa: E402
from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.rank.memory import check_memory, needed_bytes  # noqa: E402
from k3sim.kernels.rank.state import build_rank  # noqa: E402
from k3sim.kernels.rank.weights import random_weights  # noqa: E402
from k3sim.model.config_file import load_architecture  # noqa: E402
from k3sim.model.layout import Layout, Workload  # noqa: E402
from k3sim.model.memory import resident_bytes  # noqa: E402
from k3sim.model.paths import find_path  # noqa: E402
from k3sim.model.program import Program, build_program  # noqa: E402
from k3sim.model.subset import subset  # noqa: E402

K3 = load_architecture()


def test_a_whole_rank_of_k3_fits_one_h200() -> None:
    path, layout, workload = find_path("fused", kernel_set="own"), Layout(tp=16), Workload()
    needed = check_memory(K3, layout, workload, path, max_tokens=8448, free_bytes=150 * 10**9)
    # 92 layers of 896 experts, a slice of 192: 16 * (384 + 192) * 3584 weights of 4.25 bits for each sixteenth.
    assert needed.experts == 92 * 896 * 3 * 192 * 3584 * 17 // 32
    assert 100 * 10**9 < needed.total < 112 * 10**9


def test_the_fused_rank_lacks_only_what_is_sharded() -> None:
    """Router and both latent projections are sharded by the path, as --shard-all has them."""
    layout, workload = Layout(tp=16), Workload()
    program = build_program(K3, layout, workload, find_path("fused", kernel_set="own"))
    mine = needed_bytes(program, K3, layout, workload, max_tokens=workload.context)
    sharded = Layout(tp=16, shard_all=True)
    assert mine.weights == resident_bytes(K3, sharded, concurrency=1, context=8192, kv_dtype="fp8").weights


@pytest.mark.parametrize("name", ["stock", "fused"])
def test_what_is_allocated_is_what_was_predicted(name: str) -> None:
    architecture, layout = small_architecture(), Layout(tp=2)
    workload = Workload(concurrency=3, context=100, kv_dtype="bf16")
    program = build_program(architecture, layout, workload, find_path(name, kernel_set="own"))
    weights = random_weights(program, architecture, layout, device="cpu", packed=False)
    rank = build_rank(architecture, layout, workload, program, weights, device="cpu")
    needed = needed_bytes(program, architecture, layout, workload, max_tokens=100)
    assert weights.allocated_bytes() == needed.weights
    assert rank.state_bytes() == needed.states
    assert sum(one.numel() * one.element_size() for one in rank.buffers.values()) == needed.activations


def test_too_much_is_refused_with_what_would_fit() -> None:
    path, workload = find_path("fused", kernel_set="own"), Workload()
    wanted = r"93 layers of a tp8ep1dcp1 rank need 19\d\.\d GB, .* --layers \d\d or --tp 16"
    with pytest.raises(UserError, match=wanted):
        check_memory(K3, Layout(tp=8), workload, path, max_tokens=8192, free_bytes=150 * 10**9)
    with pytest.raises(UserError, match="lower --concurrency or --context"):
        check_memory(K3, Layout(tp=16), workload, path, max_tokens=8192, free_bytes=2 * 10**9)


def test_padding_is_named_where_less_would_fit() -> None:
    path, workload, padded = find_path("fused", kernel_set="own"), Workload(), Layout(tp=16, pad_experts=True)
    # A slice of 192 becomes 256: the experts, 90 of 100 GB, grow by a third.
    wanted = r"93 layers of a tp16ep1dcp1 rank need 130\.6 GB, 20\.6 GB more than the 110\.0 GB that are free"
    with pytest.raises(UserError, match=wanted) as refused:
        check_memory(K3, padded, workload, path, max_tokens=8448, free_bytes=110 * 10**9)
    assert "--layers" in str(refused.value) and "unpadded expert slices would fit" in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [([], "--layers"), (["--tp", "8"], "--tp 16 would fit"), (["--table", "steps.json"], "--layers")],
)
def test_too_little_memory_is_refused_before_allocation(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    advice: str,
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something is allocated or measured")

    free_bytes = 110 * 10**9 if "--tp" in arguments else 40 * 10**9
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_bytes, 150 * 10**9))
    monkeypatch.setattr("k3sim.kernels.rank.weights.random_weights", never)
    monkeypatch.setattr("k3sim.kernels.harness.read_rate.read_rate", never)
    assert commandline.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    found = re.fullmatch(
        r"k3sim: 93 layers of a tp\d+ep1dcp1 rank need ([\d.]+) GB, ([\d.]+) GB more than the ([\d.]+) GB that are "
        r"free on the GPU; .* would fit\n",
        captured.err,
    )
    assert found is not None, captured.err
    needed, missing, free = map(float, found.groups())
    assert free == free_bytes / 1e9 and needed - free == pytest.approx(missing, abs=0.11)
    assert advice in captured.err
    assert list(tmp_path.iterdir()) == []


def test_the_layers_named_are_the_most_that_fit() -> None:
    path, layout, workload, free_bytes = find_path("fused", kernel_set="own"), Layout(tp=16), Workload(), 40 * 10**9
    with pytest.raises(UserError) as refused:
        check_memory(K3, layout, workload, path, max_tokens=8448, free_bytes=free_bytes)
    count = int(str(refused.value).partition("--layers ")[2].split()[0])
    check_memory(subset(K3, count), layout, workload, path, max_tokens=8448, free_bytes=free_bytes)
    with pytest.raises(UserError):
        check_memory(subset(K3, count + 1), layout, workload, path, max_tokens=8448, free_bytes=free_bytes)


def test_weights_of_several_paths_are_counted_once() -> None:
    layout, workload = Layout(tp=16), Workload(concurrency=1, context=8192)
    stock, fused = (
        build_program(K3, layout, workload, find_path(name, kernel_set="own")) for name in ("stock", "fused")
    )

    def weights(program: Program, *also: Program) -> int:
        return needed_bytes(program, K3, layout, workload, max_tokens=8192, also=also).weights

    assert weights(stock, stock) == weights(stock)
    assert weights(stock, fused) == weights(fused, stock)
    assert max(weights(stock), weights(fused)) < weights(stock, fused) < weights(stock) + weights(fused)
