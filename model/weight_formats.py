"""How weights are stored: bits of codes and scales of each format, and the bytes of a matrix.

| Format | Codes | Scales | Bits a weight |
| --- | --- | --- | --- |
| ``bf16``, ``fp32`` | 16, 32 | none | 16, 32 |
| ``fp8`` | e4m3 | one a matrix | 8 |
| ``fp8_block`` | e4m3 | fp32 for each 128 x 128 | 8.002 |
| ``mxfp8`` | e4m3 | e8m0 for each 32 of depth | 8.25 |
| ``nvfp4`` | e2m1 | e4m3 for each 16 of depth, fp32 a matrix | 4.5 |
| ``mxfp4`` | e2m1 | e8m0 for each 32 of depth | 4.25 |
| ``int4_g32``, ``int4_g128`` | int4 | bf16 for each 32 or 128 of depth | 4.5, 4.125 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """One format. ``group``: weights along the depth that share a scale; ``block``: outputs by depth that do."""

    name: str
    code_bits: int
    scale_bits: int = 0
    group: int = 0
    block: tuple[int, int] = (0, 0)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, the share of the scales included; those of whole matrices count nothing."""
        if self.block != (0, 0):
            return self.code_bits + self.scale_bits / (self.block[0] * self.block[1])
        return self.code_bits + (self.scale_bits / self.group if self.group else 0.0)

    def matrix_bytes(self, num_outputs: int, depth: int) -> int:
        """Bytes of codes and scales of ``[num_outputs, depth]``; a group or block that is cut has a scale too."""
        codes = -(-num_outputs * depth * self.code_bits // 8)
        if self.block != (0, 0):
            return codes + -(-num_outputs // self.block[0]) * -(-depth // self.block[1]) * self.scale_bits // 8
        if self.group:
            return codes + num_outputs * -(-depth // self.group) * self.scale_bits // 8
        return codes


BF16 = WeightFormat(name="bf16", code_bits=16)
FP8_BLOCK = WeightFormat(name="fp8_block", code_bits=8, scale_bits=32, block=(128, 128))
NVFP4 = WeightFormat(name="nvfp4", code_bits=4, scale_bits=8, group=16)
MXFP4 = WeightFormat(name="mxfp4", code_bits=4, scale_bits=8, group=32)

#: Every format by name.
FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            BF16,
            WeightFormat(name="fp32", code_bits=32),
            WeightFormat(name="fp8", code_bits=8),
            FP8_BLOCK,
            WeightFormat(name="mxfp8", code_bits=8, scale_bits=8, group=32),
            NVFP4,
            MXFP4,
            WeightFormat(name="int4_g32", code_bits=4, scale_bits=16, group=32),
            WeightFormat(name="int4_g128", code_bits=4, scale_bits=16, group=128),
        )
    }
)
