"""Keys of 64 bits whose order is that of (value, then lower number), so that all keys of a selection differ.

Imports cutlass, so only kernel modules import this one.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, Uint64
from cutlass.cute.arch.nvvm_wrappers import inline_ptx

from k3sim.kernels.device import ptx


def ordered_key(value: Float32, number: Int32) -> Uint64:
    """Larger for a larger value, then for a lower number; NaN is below minus infinity, -0 below +0."""
    bits = ptx.float_as_bits(value)
    ordered = inline_ptx(
        # The sign bit flips; a negative number's other bits flip too. NaN, unequal to itself, becomes 0.
        "{ .reg .b32 s; .reg .pred p; shr.s32 s, {$r0}, 31; or.b32 s, s, 0x80000000; xor.b32 s, s, {$r0};"
        " setp.nan.f32 p, {$r1}, {$r1}; selp.b32 {$w0}, 0, s, p; }",
        write_only_types=[Uint32],
        read_only_args=[bits, value],
    )
    return (ordered.to(Uint64) << Uint64(32)) | (Uint32(0xFFFFFFFF) - number.to(Uint32)).to(Uint64)


def larger_key(a: Uint64, b: Uint64) -> Uint64:
    return inline_ptx("max.u64 {$w0}, {$r0}, {$r1};", write_only_types=[Uint64], read_only_args=[a, b])


def exchange_key(key: Uint64, offset: int) -> Uint64:
    high = cute.arch.shuffle_sync_bfly((key >> Uint64(32)).to(Uint32), offset=offset)
    low = cute.arch.shuffle_sync_bfly(key.to(Uint32), offset=offset)
    return (high.to(Uint64) << Uint64(32)) | low.to(Uint64)


def load_key(s_address: Int32) -> Uint64:
    return inline_ptx("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[s_address])


def store_key(s_address: Int32, key: Uint64) -> None:
    inline_ptx("st.shared.b64 [{$r0}], {$r1};", read_only_args=[s_address, key])
