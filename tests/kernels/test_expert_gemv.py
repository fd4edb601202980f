"""MXFP4 decode and packing, the reference against direct formulas, the kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.expert_gemv import mxfp4  # noqa: E402
from k3sim.kernels.expert_gemv.cases import random_experts  # noqa: E402
from k3sim.kernels.expert_gemv.launch import (  # noqa: E402
    ExpertWorkspace,
    PackedExperts,
    expert_down,
    expert_gate_up,
    expert_gemv,
    expert_gemv_push,
    pack_experts,
)
from k3sim.kernels.expert_gemv.reference import expert_gemv as reference  # noqa: E402
from k3sim.kernels.expert_gemv.reference import situ_glu  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots, send, send_shared  # noqa: E402
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES  # noqa: E402

LATENT = 3584

_BUILD = """
from k3sim.kernels.expert_gemv.kernel import ExpertConfiguration, compile_experts
for width, fp32_out in ((384, True), (192, False)):
    for part in ("both", "gate_up", "down"):
        compile_experts(ExpertConfiguration(width=width, fp32_out=fp32_out, part=part))
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_it_builds_without_a_gpu(architecture: str, compiles: Callable[[str, str], None]) -> None:
    compiles(_BUILD, architecture)


def e2m1(code: int) -> float:
    """The format's own formula: exponent bias 1, subnormals at exponent 0."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2))


def test_all_codes_and_scales_decode_exactly() -> None:
    codes = torch.tensor([low | high << 4 for low in range(16) for high in range(16)], dtype=torch.uint8)
    nibbles = [code for low in range(16) for high in range(16) for code in (low, high)]
    for scale in range(255):
        scales = torch.full((codes.numel() // 16,), scale, dtype=torch.uint8)
        values = mxfp4.decode(codes, scales, torch.float64)
        assert values.tolist() == [math.ldexp(e2m1(code), scale - 127) for code in nibbles]


def test_scale_255_is_nan() -> None:
    assert bool(mxfp4.decode(torch.zeros(16, dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8)).isnan().all())


def test_half_bit_patterns_are_scaled_codes() -> None:
    """What the kernel's shifts and masks make of a word, by the f16 format itself."""
    for code in range(16):
        for q, (shift, sign_shift) in enumerate(mxfp4.PLACES):
            for half in range(2):
                word = (code & 7) << (9 + 16 * half - shift) | (code >> 3) << (15 + 16 * half - sign_shift)
                register = (word << shift & 0x0E000E00 | word << sign_shift & 0x80008000) & 0xFFFFFFFF
                bits = torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.uint16)
                values = (bits.view(torch.float16).double() * 2**14).tolist()
                assert values[half] == e2m1(code), (q, half)
                assert values[1 - half] == 0.0


def read_unit(unit: torch.Tensor, blocks: int) -> torch.Tensor:
    """Values [16, 32 x blocks] of a packed unit, lane by lane as the kernel's registers receive them."""
    raw = unit.tolist()
    values = torch.full((16, 32 * blocks), torch.nan, dtype=torch.float64)
    for lane in range(32):
        group, t = lane // 4, lane % 4
        for block in range(blocks):
            for half in range(2):
                at = block // 2 * 512 + lane * 16 + block % 2 * 8 + half * 4
                word = int.from_bytes(bytes(raw[at : at + 4]), "little")
                # The lane whose accumulator holds (row, block) applies the scale.
                at = blocks // 2 * 512 + (group * 4 + block // 2) * 4 + half * 2 + block % 2
                factor = 2.0 ** (raw[at] - 127)
                for q, (shift, sign_shift) in enumerate(mxfp4.PLACES):
                    for side in range(2):
                        magnitude = word >> (9 + 16 * side - shift) & 7
                        sign = word >> (15 + 16 * side - sign_shift) & 1
                        column = 32 * block + 8 * t + 2 * q + side
                        values[group + 8 * half, column] = e2m1(sign << 3 | magnitude) * factor
    return values


def test_packed_gate_up_is_where_the_kernel_reads() -> None:
    experts = random_experts(2, 192, scale_low=0, scale_high=255)
    tile = pack_experts(experts).gate_up[1, 5]
    gate = mxfp4.decode(experts.gate[1, 40:48], experts.gate_scales[1, 40:48], torch.float64)
    up = mxfp4.decode(experts.up[1, 40:48], experts.up_scales[1, 40:48], torch.float64)
    for unit in (0, 13):
        columns = slice(256 * unit, 256 * unit + 256)
        expected = torch.cat((gate[:, columns], up[:, columns]))
        assert torch.equal(read_unit(tile[2176 * unit : 2176 * unit + 2176], 8), expected)


@pytest.mark.parametrize("width", [192, 384])
def test_packed_down_is_where_the_kernel_reads(width: int) -> None:
    experts = random_experts(1, width)
    pair = pack_experts(experts).down[0, 111]
    for tile in range(2):
        rows = slice(3552 + 16 * tile, 3568 + 16 * tile)
        expected = mxfp4.decode(experts.down[0, rows], experts.down_scales[0, rows], torch.float64)
        for unit in range(width // 192):
            at = (tile * (width // 192) + unit) * 1664
            assert torch.equal(read_unit(pair[at : at + 1664], 6), expected[:, 192 * unit : 192 * unit + 192])


def test_packing_refuses_nan_scales() -> None:
    experts = random_experts(1, 192)
    experts.up_scales[0, 3, 7] = 255
    with pytest.raises(ValueError, match="255"):
        pack_experts(experts)


def test_quantise_returns_what_the_format_can_hold() -> None:
    values = mxfp4.decode(
        torch.randint(0, 256, (4, 64), dtype=torch.uint8), torch.randint(100, 140, (4, 4), dtype=torch.uint8)
    )
    values[:, ::32] = values[:, ::32].sign() * 0 + values.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert torch.equal(mxfp4.decode(*mxfp4.quantise(values)), values)


def test_situ_is_bounded_and_linear_near_zero() -> None:
    gate, up = torch.tensor([1e9, -1e9, 1e-3]).double(), torch.tensor([1e9, 1e9, 1e-3]).double()
    assert situ_glu(gate, up)[:2].tolist() == [100.0, 0.0]
    assert situ_glu(gate, up)[2].item() == pytest.approx(1e-3 * 0.5 * 1e-3, rel=1e-3)


def test_reference_is_the_sum_over_known_experts() -> None:
    experts = random_experts(3, 192)
    x = torch.randn(1, LATENT, dtype=torch.float64)
    ids, weights = torch.tensor([[2, -1, 3, 0]]), torch.tensor([[0.5, 9.0, 9.0, 0.25]], dtype=torch.float64)
    expected = torch.zeros(LATENT, dtype=torch.float64)
    for expert, weight in ((2, 0.5), (0, 0.25)):
        gate = mxfp4.decode(experts.gate[expert], experts.gate_scales[expert], torch.float64) @ x[0]
        up = mxfp4.decode(experts.up[expert], experts.up_scales[expert], torch.float64) @ x[0]
        hidden = 100 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * torch.tanh(up / 25)
        expected += weight * mxfp4.decode(experts.down[expert], experts.down_scales[expert], torch.float64) @ hidden
    torch.testing.assert_close(reference(x, ids, weights, experts)[0], expected)


def test_launch_names_the_argument_at_fault() -> None:
    packed = PackedExperts(
        gate_up=torch.zeros(2, 24, 30464, dtype=torch.uint8), down=torch.zeros(2, 112, 3328, dtype=torch.uint8)
    )
    workspace = ExpertWorkspace.allocate(packed, max_rows=1)
    x, out = torch.zeros(1, LATENT, dtype=torch.bfloat16), torch.zeros(1, LATENT)
    ids, weights = torch.zeros(1, 16, dtype=torch.int32), torch.zeros(1, 16)
    for changed, message in (
        ({"x": x.float()}, "x: got torch.float32"),
        ({"ids": ids.long()}, "ids: got torch.int64"),
        ({"weights": weights[:, :8]}, "weights.shape"),
        ({"out": out.half()}, "out: got torch.float16"),
        ({"x": torch.zeros(17, LATENT, dtype=torch.bfloat16)}, "rows of x: got 17, accepted: 1 to 16"),
    ):
        arguments = {"x": x, "ids": ids, "weights": weights, "packed": packed, "out": out, "workspace": workspace}
        with pytest.raises(UserError, match=message.replace("(", r"\(")):
            expert_gemv(**{**arguments, **changed})


def test_two_launches_name_the_argument_at_fault() -> None:
    packed = PackedExperts(
        gate_up=torch.zeros(2, 24, 30464, dtype=torch.uint8), down=torch.zeros(2, 112, 3328, dtype=torch.uint8)
    )
    x, out = torch.zeros(2, LATENT, dtype=torch.bfloat16), torch.zeros(2, LATENT)
    ids, weights, hidden = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, 16), torch.zeros(2, 16, 192).half()
    for call, message in (
        (lambda: expert_gate_up(x, ids[:1], weights, packed, hidden), "ids.shape"),
        (lambda: expert_gate_up(x, ids, weights, packed, hidden.bfloat16()), "hidden: got torch.bfloat16"),
        (lambda: expert_gate_up(x, ids, weights, packed, torch.zeros(2, 16, 384).half()), "hidden.shape"),
        (lambda: expert_down(hidden[:1], ids, packed, out), "hidden.shape"),
        (lambda: expert_down(hidden, ids, packed, out.half()), "out: got torch.float16"),
        (lambda: expert_down(hidden, ids, packed, torch.zeros(17, LATENT)), "rows: got 17, accepted: 1 to 16"),
    ):
        with pytest.raises(UserError, match=message):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [192, 384])
@pytest.mark.parametrize("rows", [1, 2, 5, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernel_matches_the_reference(width: int, rows: int, dtype: str) -> None:
    experts = random_experts(40, width, "cuda")
    x = torch.randn(rows, LATENT, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(40, device="cuda")[:16] for _ in range(rows)]).int()
    weights = torch.rand(rows, 16, device="cuda")
    packed = pack_experts(experts)
    out = torch.full((rows, LATENT), torch.nan, dtype=getattr(torch, dtype), device="cuda")
    expert_gemv(x, ids, weights, packed, out, ExpertWorkspace.allocate(packed))
    verdict = compare(out, reference(x, ids, weights.double(), experts), "expert_bf16")
    assert verdict, verdict


@pytest.mark.gpu
def test_kernel_is_exact_at_the_scale_ends() -> None:
    """Gate and up of exactly known size through scales that f16 could not hold: 2**-100 against 2**100 in x's stead."""
    experts = random_experts(16, 192, "cuda", scale_low=0, scale_high=3)
    packed = pack_experts(experts)
    x = torch.full((1, LATENT), 1.0, device="cuda").bfloat16()
    ids, weights = torch.arange(16, device="cuda").int().reshape(1, 16), torch.ones(1, 16, device="cuda")
    out = torch.full((1, LATENT), torch.nan, device="cuda")
    expert_gemv(x, ids, weights, packed, out, ExpertWorkspace.allocate(packed))
    assert bool((out == 0).all())  # 2**-124 squared is nothing in fp32, and no NaN arises


@pytest.mark.gpu
def test_replays_agree_and_unknown_ids_contribute_nothing() -> None:
    experts = random_experts(40, 384, "cuda")
    packed = pack_experts(experts)
    workspace = ExpertWorkspace.allocate(packed)
    x = torch.randn(2, LATENT, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(40, device="cuda")[:16] for _ in range(2)]).int()
    ids[0, 3], ids[1, 15] = -1, 40
    weights, out = torch.rand(2, 16, device="cuda"), torch.full((2, LATENT), torch.nan, device="cuda")
    expert_gemv(x, ids, weights, packed, out, workspace)
    assert compare(out, reference(x, ids, weights.double(), experts), "expert_bf16")
    first = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        expert_gemv(x, ids, weights, packed, out, workspace)
    for _ in range(1000):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [192, 384])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_two_launches_give_the_bits_of_one(width: int, rows: int) -> None:
    packed = pack_experts(random_experts(40, width, "cuda"))
    x = torch.randn(rows, LATENT, device="cuda").bfloat16()
    ids = torch.stack([torch.randperm(40, device="cuda")[:16] for _ in range(rows)]).int()
    ids[0, 3] = -1
    weights = torch.rand(rows, 16, device="cuda")
    expected, out = (torch.full((rows, LATENT), torch.nan, device="cuda").bfloat16() for _ in range(2))
    hidden = torch.full((rows, 16, width), torch.nan, device="cuda").half()
    expert_gemv(x, ids, weights, packed, expected, ExpertWorkspace.allocate(packed))

    def both() -> None:
        expert_gate_up(x, ids, weights, packed, hidden)
        expert_down(hidden, ids, packed, out)

    both()
    assert torch.equal(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for _ in range(1000):
        out.fill_(torch.nan)
        hidden.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "ranks"), [(192, 16), (384, 8), (192, 2)])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_pushed_sums_fill_slots_like_a_send(width: int, ranks: int, rows: int) -> None:
    packed = pack_experts(random_experts(40, width, "cuda"))
    workspace = ExpertWorkspace.allocate(packed)
    weights, out = torch.rand(rows, 16, device="cuda"), torch.empty(rows, LATENT, dtype=torch.bfloat16, device="cuda")
    pushed, sent = ([TailSlots.allocate(ranks=ranks, max_rows=16, device="cuda") for _ in range(ranks)] for _ in "ab")
    for rank in range(ranks):
        x = torch.randn(rows, LATENT, device="cuda").bfloat16()
        shared = torch.randn(rows, 7168, device="cuda").bfloat16()
        ids = torch.stack([torch.randperm(40, device="cuda")[:16] for _ in range(rows)]).int()
        expert_gemv_push(x, ids, weights, packed, TailPeers.of(pushed), rank, workspace)
        send_shared(shared, TailPeers.of(pushed), rank)
        expert_gemv(x, ids, weights, packed, out, workspace)
        send(out, shared, TailPeers.of(sent), rank)
    for one, other in zip(pushed, sent, strict=True):
        assert torch.equal(one.latent.view(torch.int16), other.latent.view(torch.int16))
        assert torch.equal(one.shared.view(torch.int16), other.shared.view(torch.int16))
        assert bool((one.gathered.view(torch.int16) == -1).all())
