"""MXFP4: exact decode, rounding, and the order in which the expert kernel wants its weights.

A weight is an E2M1 code (sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives),
two a byte with the even column in the low nibble; 32 consecutive columns share an E8M0 scale, the byte e meaning
2**(e - 127), with 255 for NaN (OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1).

Packed order. The kernel multiplies with mma.sync m16n8k16, weights as operand A, 16 outputs to a tile. Both operands
may permute the columns of a 32-column block as they like if they agree, so lane (g, t) = (lane // 4, lane % 4) takes
columns 8 t .. 8 t + 7 of rows g and g + 8: one 32-bit word a row, two MMA a block. A *unit* is what one warp
multiplies between two scalings: up to eight blocks of one tile, which meet different columns of operand B and so
leave in different columns of the accumulator. It is stored as

    [block pair][lane][row g block 0, row g+8 block 0, row g block 1, row g+8 block 1]   words of 8 codes
    [lane][row g blocks 2t, 2t+1, row g+8 blocks 2t, 2t+1]                               scale bytes

so that every lane reads 16 bytes at a time and finds its scales in one word, with no exchange between lanes.

A word holds, for f16 operands, the codes of columns pair by pair so that few instructions place them: register q of
a lane needs columns 2q (low half) and 2q + 1 (high half) as sign at bit 15 and magnitude at bits 11 to 9, which as
f16 is the value times 2**-14, subnormal 0.5 included. ``PLACES`` lists the left shifts that bring them there. Four
bit patterns of this form cannot tile a half word by shifts alone (searched), so two of the four registers take their
sign from another shift.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BLOCK = 32  # columns that share a scale
SCALE_NAN = 255
TILE = 16  # outputs of an MMA
BLOCKS_OF_UNIT = 8
# (left shift of the magnitude, left shift of the sign) of the four registers decoded from one word.
PLACES = ((0, 0), (3, 3), (6, 2), (9, 1))


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of ``codes`` [..., K / 2] and ``scales`` [..., K / 32], both uint8, as ``dtype`` (fp32) [..., K].

    Exact in fp32 wherever the value is a normal number and in fp64 always; a scale of 255 gives NaN.
    """
    import torch

    dtype = torch.float32 if dtype is None else dtype
    table = torch.tensor(E2M1_VALUES, dtype=torch.float64, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    factor = torch.exp2(scales.double() - 127)
    factor = torch.where(scales == SCALE_NAN, torch.full_like(factor, torch.nan), factor)
    return (table[nibbles.long()] * factor.repeat_interleave(BLOCK, dim=-1)).to(dtype)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of ``weight`` [..., K], K a multiple of 32, by the rule of the format's specification:
    the scale is the power of two of the block's largest magnitude over that of 6, values round to the nearest.
    """
    import torch

    blocks = weight.double().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(dim=-1)
    exponent = torch.floor(torch.log2(largest.clamp_min(2.0**-126))) - 2
    scales = (exponent + 127).clamp(0, 254)
    magnitude = (blocks / torch.exp2(scales - 127).unsqueeze(-1)).abs()
    edges = torch.tensor((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), dtype=torch.float64, device=weight.device)
    code = torch.bucketize(magnitude.contiguous(), edges) + 8 * (blocks < 0)
    code = code.flatten(-2).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4), scales.to(torch.uint8)


def pack_gate_up(
    gate: torch.Tensor, gate_scales: torch.Tensor, up: torch.Tensor, up_scales: torch.Tensor
) -> torch.Tensor:
    """Packed w1 and w3 [experts, width / 8, bytes of a tile], uint8.

    ``gate``, ``up``: [experts, width, K / 2]; scales [experts, width, K / 32]; K a multiple of 256. A tile is eight
    gate rows, then the eight up rows of the same outputs, so that SiTU finds both in one lane.
    """
    import torch

    def interleave(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        pairs = torch.stack((one.unflatten(1, (-1, 8)), other.unflatten(1, (-1, 8))), dim=2)
        return pairs.flatten(1, 3)

    units = _pack_units(interleave(gate, up), interleave(gate_scales, up_scales), BLOCKS_OF_UNIT)
    return units.flatten(2)


def pack_down(down: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed w2 [experts, latent / 32, bytes of a tile pair], uint8.

    ``down``: [experts, latent, width / 2]; ``scales`` [experts, latent, width / 32]; width a multiple of 192. Units
    are six blocks long, so that 192 columns (TP16) are one and 384 (TP8) two.
    """
    units = _pack_units(down, scales, 6)
    return units.unflatten(1, (-1, 2)).flatten(2)


def _pack_units(codes: torch.Tensor, scales: torch.Tensor, blocks: int) -> torch.Tensor:
    """[experts, tiles, units, bytes] from codes [experts, rows, K / 2] and scales [experts, rows, K / 32]."""
    import torch

    experts, rows, half_k = codes.shape
    if rows % TILE or half_k % (blocks * BLOCK // 2):
        raise ValueError(f"codes: got {rows} rows of {2 * half_k}, accepted: multiples of {TILE} x {blocks * BLOCK}")
    if bool((scales == SCALE_NAN).any()):
        raise ValueError("scales: got 255 (NaN), accepted: 0 to 254")
    tiles, units = rows // TILE, 2 * half_k // (blocks * BLOCK)
    # Four bytes are the eight codes of one lane and row; columns 2q and 2q + 1 are the two nibbles of byte q.
    quads = codes.reshape(experts, tiles, 2, 8, units, blocks, 4, 4).int()  # e, tile, row half, g, unit, block, t, q
    word = torch.zeros(quads.shape[:-1], dtype=torch.int64, device=codes.device)
    for q, (shift, sign_shift) in enumerate(PLACES):
        for half, nibble in enumerate((quads[..., q] & 15, quads[..., q] >> 4)):
            word |= (nibble & 7).long() << (9 + 16 * half - shift)
            word |= (nibble >> 3).long() << (15 + 16 * half - sign_shift)
    # e, tile, unit, block, g, t, row half -> e, tile, unit, block pair, g, t, block of the pair, row half
    word = word.permute(0, 1, 4, 5, 3, 6, 2).unflatten(3, (-1, 2)).permute(0, 1, 2, 3, 5, 6, 4, 7)
    signed = torch.where(word >= 2**31, word - 2**32, word).int().contiguous()
    code_bytes = signed.view(torch.uint8).reshape(experts, tiles, units, -1)
    padded = torch.zeros((experts, tiles, 2, 8, units, BLOCKS_OF_UNIT), dtype=torch.uint8, device=codes.device)
    padded[..., :blocks] = scales.reshape(experts, tiles, 2, 8, units, blocks)
    # e, tile, row half, g, unit, t, block of 2 -> e, tile, unit, g, t, row half, block of 2
    scale_bytes = padded.unflatten(-1, (4, 2)).permute(0, 1, 4, 3, 5, 2, 6).reshape(experts, tiles, units, -1)
    return torch.cat((code_bytes, scale_bytes), dim=-1).contiguous()
