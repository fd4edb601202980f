"""Skinny GEMV: the reference against sums in float64, the arguments it refuses, the kernel on a GPU."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.skinny_gemv import reference  # noqa: E402
from k3sim.kernels.skinny_gemv.builds import OTHER_SHAPES  # noqa: E402
from k3sim.kernels.skinny_gemv.configuration import (  # noqa: E402
    MAX_ROWS,
    Epilogue,
    GemvConfiguration,
    Tiling,
    choose_tiling,
    measured_tilings,
    rule_tiling,
)
from k3sim.kernels.skinny_gemv.launch import skinny_gemv, skinny_gemv_push  # noqa: E402
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES  # noqa: E402

# (N, K) of every bf16 weight of a TP8 or TP16 rank that a decode step multiplies by; see model/layout.py.
SHAPES = [
    (6288, 7168), (3216, 7168),  # KDA in-projection
    (7168, 1536), (7168, 768),  # output projections, shared down
    (2112, 7168), (3648, 7168), (2880, 7168),  # MLA q_a and kv_a; with the output gate
    (1536, 7168), (768, 7168),  # MLA output gate, shared gate and up
    (2304, 1536), (1152, 1536),  # MLA q_b
    (896, 7168), (112, 7168), (56, 7168),  # router, whole and sharded
    (3584, 7168), (448, 7168), (224, 7168),  # latent down
    (7168, 3584), (896, 3584), (448, 3584),  # latent up
    (1536, 128), (768, 128),  # KDA decay, second factor
    (8448, 7168), (7168, 4224), (4224, 7168), (7168, 2112),  # dense layer 0
    (560, 7168), (280, 7168),  # router and latent down, a rank's part
    (20480, 7168), (10240, 7168),  # output head
    (7168, 384),  # shared down
]  # fmt: skip
PAIRED_SHAPES = [(8448, 7168), (4224, 7168), (1536, 7168), (768, 7168)]  # gate and up of dense layer and shared expert


def _inputs(
    n: int, k: int, m: int, *, device: str = "cpu", seed: int = 0, operand_width: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [m, k], w [n, k] scaled so that outputs are of order one, operand [m, operand_width]."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    w = (normal(n, k) / math.sqrt(k)).bfloat16()
    return normal(m, k).bfloat16(), w, normal(m, operand_width).bfloat16()


def test_reference_is_the_sum_of_products() -> None:
    x, w, _ = _inputs(6, 64, 3)
    y = reference.skinny_gemv(x, w)
    for m in range(3):
        for n in range(6):
            exact = math.fsum(a * b for a, b in zip(x[m].tolist(), w[n].tolist(), strict=True))
            assert y[m, n].item() == pytest.approx(exact, abs=1e-6)


def test_reference_adds_and_gates_with_the_operand() -> None:
    x, w, operand = _inputs(6, 64, 3, operand_width=6)
    y = reference.skinny_gemv(x, w).double()
    added = reference.skinny_gemv(x, w, epilogue=Epilogue.ADD, operand_MO=operand)
    gated = reference.skinny_gemv(x, w, epilogue=Epilogue.SIGMOID_GATE, operand_MO=operand)
    torch.testing.assert_close(added.double(), y + operand.double(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gated.double(), operand.double() / (1 + torch.exp(-y)), atol=1e-6, rtol=1e-6)


def test_situ_saturates_at_4_and_25() -> None:
    large = torch.full((1,), 1000.0)
    assert reference.situ_glu(large, large).item() == pytest.approx(100.0)
    assert reference.situ_glu(large, -large).item() == pytest.approx(-100.0)
    assert reference.situ_glu(-large, large).item() == 0.0
    g, u = 0.75, -3.0
    exact = 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25)
    assert reference.situ_glu(torch.tensor(g), torch.tensor(u)).item() == pytest.approx(exact, rel=1e-6)


def test_situ_takes_gates_from_the_first_half() -> None:
    x, w, _ = _inputs(8, 64, 2)
    y = reference.skinny_gemv(x, w)
    out = reference.skinny_gemv(x, w, epilogue=Epilogue.SITU_GLU)
    assert torch.equal(out, reference.situ_glu(y[:, :4], y[:, 4:]))


@pytest.mark.parametrize("paired", [False, True])
def test_the_rule_tiles_every_shape_and_row_count(paired: bool) -> None:
    for n, k in SHAPES:
        for rows in range(1, MAX_ROWS + 1):
            for num_sms in (132, 148, 152):
                GemvConfiguration(
                    num_outputs=n,
                    depth=k,
                    rows=rows,
                    epilogue=Epilogue.SITU_GLU if paired else Epilogue.NONE,
                    tiling=rule_tiling(num_outputs=n, depth=k, rows=rows, paired=paired, num_sms=num_sms),
                ).check()


def test_measured_tilings_serve_every_shape_and_rows() -> None:
    shapes = {(*shape, False) for shape in SHAPES} | {(*shape, True) for shape in PAIRED_SHAPES}
    assert set(measured_tilings()) == shapes
    for (n, k, paired), tilings in measured_tilings().items():
        assert list(tilings) == [1, 2, 8, 16]
        for rows in range(1, MAX_ROWS + 1):
            tiling = next(one for most, one in tilings.items() if rows <= most)
            assert choose_tiling(num_outputs=n, depth=k, rows=rows, paired=paired) == tiling
            epilogue = Epilogue.SITU_GLU if paired else Epilogue.NONE
            GemvConfiguration(num_outputs=n, depth=k, rows=rows, epilogue=epilogue, tiling=tiling).check()


@pytest.mark.parametrize(
    ("shape", "rows", "split", "row_tiles", "blocks"),
    [
        ((2048, 7168), 12, 2, 2, 128),  # one wave; pairs of blocks read half of x
        ((2048, 7168), 3, 1, 1, 128),
        ((4096, 4096), 8, 1, 2, 128),
        ((1280, 8192), 16, 4, 3, 108),  # clusters of four on less than all SMs
        ((28672, 4096), 12, 1, 7, 256),  # two waves
    ],
)
def test_the_rule_minimises_what_the_busiest_block_reads(
    shape: tuple[int, int], rows: int, split: int, row_tiles: int, blocks: int
) -> None:
    tiling = rule_tiling(num_outputs=shape[0], depth=shape[1], rows=rows)
    assert tiling is not None
    assert (tiling.split, tiling.rows_per_stage // 16, tiling.num_tiles * tiling.split) == (split, row_tiles, blocks)


def test_two_blocks_stream_where_an_sm_reads_much() -> None:
    assert [rule_tiling(num_outputs=n, depth=4096, rows=1).num_tiles for n in (3072, 4096)] == [132, 264]


def test_what_no_form_takes_is_cublas_product() -> None:
    from k3sim.kernels.cublas.cost import gemm
    from k3sim.kernels.skinny_gemv.cost import tiled
    from k3sim.model.program import Weight

    weight = Weight(region="w", num_outputs=3000, depth=1000, num_bytes=6_000_000)
    assert rule_tiling(num_outputs=3000, depth=1000, rows=4) is not None
    assert choose_tiling(num_outputs=3000, depth=1000, rows=5) is None
    assert tiled([weight], rows=5) == gemm([weight], rows=5)
    assert tiled([weight], rows=4) != gemm([weight], rows=4)


def test_a_tiling_that_does_not_divide_is_refused() -> None:
    tiling = Tiling(method="mma", num_tiles=28, split=8, threads_k=256, rows_per_stage=16, stages=2)
    with pytest.raises(UserError, match="depth 7168 in 8 slices of a multiple of 256"):
        GemvConfiguration(num_outputs=448, depth=7168, rows=4, tiling=tiling).check()


def test_bad_arguments_are_named() -> None:
    x, w, operand = _inputs(8, 64, 2, operand_width=8)
    out = torch.empty(2, 8, dtype=torch.bfloat16)
    peers = torch.zeros(2, dtype=torch.int64)
    wrong = {
        "x: got torch.float32, accepted: torch.bfloat16": lambda: skinny_gemv(x.float(), w, out),
        "x.shape: got \\(2, 32\\), accepted: \\(any, 64\\)": lambda: skinny_gemv(x[:, :32], w, out),
        "x.shape\\[0\\]: got 17, accepted: 1 to 16": lambda: skinny_gemv(_inputs(8, 64, 17)[0], w, out),
        "w.stride: got \\(1, 8\\), accepted: a contiguous": lambda: skinny_gemv(x, w.T.contiguous().T, out),
        "w.shape: got \\(8, 60\\)": lambda: skinny_gemv(x[:, :60], w[:, :60].contiguous(), out),
        "out.shape: got \\(2, 8\\), accepted: \\(2, 4\\)": lambda: skinny_gemv(x, w, out, epilogue=Epilogue.SITU_GLU),
        "out: got torch.float16": lambda: skinny_gemv(x, w, out.half()),
        "operand: got None": lambda: skinny_gemv(x, w, out, epilogue=Epilogue.ADD),
        "operand: got a tensor": lambda: skinny_gemv(x, w, out, operand=operand),
        "peers: got torch.int32": lambda: skinny_gemv_push(x, w, peers.int()),
        "peers.shape\\[0\\]: got 0, accepted: 1 to 16": lambda: skinny_gemv_push(x, w, peers[:0]),
        "out_dtype: got torch.float16": lambda: skinny_gemv_push(x, w, peers, out_dtype=torch.float16),
        "out_dtype: got torch.bfloat16": lambda: skinny_gemv_push(x, w, peers, polled=True),
    }
    for message, call in wrong.items():
        with pytest.raises(UserError, match=message):
            call()


def test_a_misaligned_weight_is_refused() -> None:
    x, _, _ = _inputs(8, 64, 1)
    shifted = torch.zeros(8 * 64 + 8, dtype=torch.bfloat16)[4:-4].view(8, 64)
    with pytest.raises(UserError, match=r"w.data_ptr: got 0x[0-9a-f]+, accepted: multiples of 16 B"):
        skinny_gemv(x, shifted, torch.empty(1, 8, dtype=torch.bfloat16))


def test_without_a_gpu_the_call_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    x, w, _ = _inputs(8, 64, 1)
    with pytest.raises(UserError, match="no CUDA GPU is visible"):
        skinny_gemv(x, w, torch.empty(1, 8, dtype=torch.bfloat16))


# Compiled in a process of its own: CUTLASS settles its target at import. What a long way of the code needs.
_BUILD = """
from k3sim.kernels.toolchain.compile_cache import get_cutlass
get_cutlass()
from k3sim.kernels.skinny_gemv.configuration import Epilogue, GemvConfiguration, Tiling, rule_tiling
from k3sim.kernels.skinny_gemv.kernel import compile_gemv
split = Tiling(method="mma", num_tiles=28, split=4, threads_k=224, rows_per_stage=16, stages=3)
remainder = rule_tiling(num_outputs=7168, depth=4224, rows=1)
for n, k, rows, tiling, more in [
    (6288, 7168, 1, None, {}),
    (1536, 7168, 2, None, {"epilogue": Epilogue.SITU_GLU}),
    (7168, 1536, 16, None, {"epilogue": Epilogue.ADD, "num_peers": 8, "fp32_out": True}),
    (448, 7168, 5, split, {"epilogue": Epilogue.SIGMOID_GATE}),
    (7168, 4224, 1, remainder, {}),
]:
    tiling = tiling or rule_tiling(num_outputs=n, depth=k, rows=rows, paired="epilogue" in more and k > n)
    configuration = GemvConfiguration(num_outputs=n, depth=k, rows=rows, tiling=tiling, **more).check()
    assert compile_gemv(configuration)
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_builds_without_a_gpu(architecture: str) -> None:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    done = subprocess.run(
        [sys.executable, "-c", _BUILD],
        env={**os.environ, "CUTE_DSL_ARCH": architecture},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _check_on_gpu(
    n: int,
    k: int,
    m: int,
    *,
    epilogue: Epilogue = Epilogue.NONE,
    out_dtype: torch.dtype = torch.bfloat16,
    tiling: Tiling | None = None,
    seed: int = 0,
) -> None:
    width = n // 2 if epilogue is Epilogue.SITU_GLU else n
    x, w, operand = _inputs(n, k, m, device="cuda", seed=seed, operand_width=width)
    given = operand if epilogue in (Epilogue.ADD, Epilogue.SIGMOID_GATE) else None
    guarded = torch.full((m + 2, width), math.nan, dtype=out_dtype, device="cuda")
    out = guarded[1:-1]
    skinny_gemv(x, w, out, epilogue=epilogue, operand=given, tiling=tiling)
    ref = reference.skinny_gemv(x, w, epilogue=epilogue, operand_MO=given)
    family = "fp32_sum" if out_dtype == torch.float32 else "bf16_sum"
    if epilogue in (Epilogue.SIGMOID_GATE, Epilogue.SITU_GLU):
        family = "bf16_activation"
    verdict = compare(out, ref, family, name=f"{n}x{k}, {m} rows, {epilogue.value}, {tiling}")
    assert verdict, str(verdict)
    assert guarded[0].isnan().all() and guarded[-1].isnan().all(), "written outside the output"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_matches_the_reference(shape: tuple[int, int]) -> None:
    for rows in (1, 2, 3, 8, 9, 16):
        _check_on_gpu(*shape, rows, seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_shapes_that_no_table_lists_match_too(shape: tuple[int, int]) -> None:
    for rows in (1, 2, 3, 8, 12, 16):
        _check_on_gpu(*shape, rows, seed=rows)


@pytest.mark.gpu
def test_what_no_form_takes_is_handed_to_cublas() -> None:
    _check_on_gpu(300, 1000, 4)
    _check_on_gpu(300, 1000, 5)
    x, w, operand = _inputs(300, 1000, 5, device="cuda", operand_width=300)
    out = torch.empty(5, 300, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(UserError, match="K a multiple of 32 beyond 4 rows"):
        skinny_gemv(x, w, out, epilogue=Epilogue.ADD, operand=operand)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", range(1, MAX_ROWS + 1))
def test_every_row_count_matches_the_reference_in_fp32(rows: int) -> None:
    _check_on_gpu(448, 7168, rows, out_dtype=torch.float32, seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("rows", [1, 5])
def test_every_epilogue_matches_the_reference(epilogue: Epilogue, rows: int) -> None:
    _check_on_gpu(1536, 7168, rows, epilogue=epilogue)
    _check_on_gpu(1152, 1536, rows, epilogue=epilogue)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [2, 4, 8])
def test_split_k_matches_the_reference(split: int) -> None:
    threads_k = {2: 224, 4: 224, 8: 128}[split]  # the last leaves 16 threads without work
    fma = Tiling(method="fma", num_tiles=28, split=split, threads_k=threads_k, rows_per_stage=2, stages=3)
    mma = Tiling(method="mma", num_tiles=28, split=split, threads_k=224, rows_per_stage=16, stages=3)
    _check_on_gpu(448, 7168, 1, tiling=fma)
    _check_on_gpu(448, 7168, 2, tiling=fma, epilogue=Epilogue.SITU_GLU)
    _check_on_gpu(448, 7168, 1, tiling=mma)
    _check_on_gpu(448, 7168, 11, tiling=mma, epilogue=Epilogue.ADD)


@pytest.mark.gpu
def test_push_writes_the_same_row_to_every_peer() -> None:
    for rows in (1, 7):
        x, w, _ = _inputs(7168, 768, rows, device="cuda")
        inboxes = [torch.full((rows, 7168), math.nan, device="cuda") for _ in range(8)]
        peers = torch.tensor([one.data_ptr() for one in inboxes], device="cuda")
        skinny_gemv_push(x, w, peers, out_dtype=torch.float32)
        verdict = compare(inboxes[0], reference.skinny_gemv(x, w), "fp32_sum")
        assert verdict, str(verdict)
        assert all(torch.equal(one, inboxes[0]) for one in inboxes)


@pytest.mark.gpu
def test_a_captured_chain_repeats_bit_for_bit() -> None:
    # Each kernel reads what the one before wrote: an input read before the dependency wait would show.
    x, up, _ = _inputs(1536, 768, 2, device="cuda", seed=1)
    _, down, _ = _inputs(768, 1536, 2, device="cuda", seed=2)
    rows = [x, *(torch.zeros(2, 1536 if i % 2 == 0 else 768, device="cuda").bfloat16() for i in range(20))]

    def chain() -> None:
        for i in range(20):
            skinny_gemv(rows[i], up if i % 2 == 0 else down, rows[i + 1])

    for i in range(20):
        skinny_gemv(rows[i], up if i % 2 == 0 else down, rows[i + 1])
        torch.cuda.synchronize()
    expected = rows[-1].clone()
    verdict = compare(rows[1], reference.skinny_gemv(x, up), "bf16_sum")
    assert verdict, str(verdict)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(1000):
        for row in rows[1:]:
            row.fill_(math.nan)
        graph.replay()
        assert torch.equal(rows[-1], expected)


@pytest.mark.gpu
def test_weights_beyond_4_gib_are_addressed() -> None:
    n, k = 300_000, 7168
    w = torch.zeros(n, k, dtype=torch.bfloat16, device="cuda")
    x = torch.ones(1, k, dtype=torch.bfloat16, device="cuda")
    w[-1, 0], w[160_000, 7] = 3.0, 5.0
    out = torch.full((1, n), math.nan, dtype=torch.bfloat16, device="cuda")
    skinny_gemv(x, w, out, tiling=Tiling(method="fma", num_tiles=2048, threads_k=448, rows_per_stage=2, stages=3))
    assert out[0, -1] == 3.0 and out[0, 160_000] == 5.0 and out.float().sum() == 8.0
