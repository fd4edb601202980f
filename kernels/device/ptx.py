"""PTX accesses that several kernels share: one instruction a function, integer addresses (global 64, shared 32 bit).

Integer addresses keep page and slot arithmetic in 64 bits and make the width and cache policy of each access visible
where it happens. Imports cutlass, so only kernel modules import this one.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch.nvvm_wrappers import inline_ptx as inline_ptx

# Named in every launch here, as CUTLASS otherwise asks a device where ``min_blocks_per_mp`` is given, and a build has
# none. What a GPU heeds is the wish of the loaded kernel, which ``compiled`` sets.
from k3sim.kernels.toolchain.compile_cache import ALL_SHARED as ALL_SHARED
from k3sim.kernels.toolchain.compile_cache import REGISTER_LOAD_CARVE_OUT as REGISTER_LOAD_CARVE_OUT

# Cache policy of weights and cached tokens. A step reads tens of gigabytes of them once; with the usual policy that
# clears L2 of what it reads again: states, snapshots, machine code, tables. A stream with this one takes nothing of it
# (docs/machines.md). What createpolicy.fractional.L2::evict_first gives for all lines.
EVICT_FIRST = 0x12F0000000000000
Words = tuple[Uint32, ...]
_FOUR_OUT = "{{$w0}, {$w1}, {$w2}, {$w3}}"
_FOUR_IN = "{{$r1}, {$r2}, {$r3}, {$r4}}"


def _four_words(instruction: str, address: Any) -> Words:
    """16 bytes by a load that takes nothing but the address."""
    return inline_ptx(
        f"{instruction}.v4.b32 {_FOUR_OUT}, [{{$r0}}];", write_only_types=[Uint32] * 4, read_only_args=[address]
    )


def _one_value(instruction: str, kind: Any, address: Any) -> Any:
    """A value of ``kind`` by a load that takes nothing but the address."""
    return inline_ptx(f"{instruction} {{$w0}}, [{{$r0}}];", write_only_types=[kind], read_only_args=[address])


def load_stream(g_address: Int64) -> Words:
    """16 bytes that nobody else reads and no running kernel writes: past L1.

    Not ``.nc``: ptxas moves such loads behind a griddepcontrol.wait that follows them, and what was to be read ahead
    of the wait is read after it.
    """
    return _four_words("ld.global.L1::no_allocate", g_address)


def load_weights(g_address: Int64) -> Words:
    """As ``load_stream``, of data that a step reads once: in L2 its lines are the first to go (``EVICT_FIRST``).

    The whole line comes to L2 with its first sector. An MMA fragment asks for 64 bytes of each of eight rows, and HBM
    gives halves of lines at less than its rate (``mla_prep``, 12 heads, H200, 2026-11-30: 4.8 us, without 5.3).
    """
    return inline_ptx(
        f"ld.global.L1::no_allocate.L2::cache_hint.L2::128B.v4.b32 {_FOUR_OUT}, [{{$r0}}], {{$r1}};",
        write_only_types=[Uint32] * 4,
        read_only_args=[g_address, Int64(EVICT_FIRST)],
    )


def load_l2(g_address: Int64) -> Words:
    """16 bytes from L2: data that other blocks of this launch wrote before a fence."""
    return _four_words("ld.global.cg", g_address)


def load_cached(g_address: Int64) -> Words:
    """16 bytes through L1: small operands that several warps of a block read."""
    return _four_words("ld.global", g_address)


def load_from_peer(g_address: Int64) -> Words:
    """16 bytes that another GPU may be writing: each word whole, never from L1, never merged with another load."""
    return _four_words("ld.relaxed.sys.global", g_address)


def store_to_peer(g_address: Int64, words: Any) -> None:
    """16 bytes into memory of any GPU, for ``load_from_peer``."""
    inline_ptx(f"st.relaxed.sys.global.v4.b32 [{{$r0}}], {_FOUR_IN};", read_only_args=[g_address, *words])


def load_int(g_address: Int64) -> Int32:
    return _one_value("ld.global.b32", Int32, g_address)


def load_long(g_address: Int64) -> Int64:
    return _one_value("ld.global.b64", Int64, g_address)


def load_float(g_address: Int64) -> Float32:
    return _one_value("ld.global.f32", Float32, g_address)


def load_float_l2(g_address: Int64) -> Float32:
    return _one_value("ld.global.cg.f32", Float32, g_address)


def load_half_l2(g_address: Int64) -> Uint32:
    """16 bits that other blocks of this launch, or the launch before it, wrote; zero-extended."""
    return inline_ptx(
        "{ .reg .b16 h; ld.global.cg.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[g_address],
    )


def prefetch(g_address: Int64) -> None:
    """Bring the line of an address into L2: control words and tables that were last used a layer ago lie in HBM."""
    inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[g_address])


def store(g_address: Int64, words: Any) -> None:
    """16 bytes: four 32-bit values, integer or float."""
    inline_ptx(f"st.global.v4.b32 [{{$r0}}], {_FOUR_IN};", read_only_args=[g_address, *words])


def store_pair(g_address: Int64, words: Any) -> None:
    """8 bytes: two 32-bit values."""
    inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[g_address, *words])


def store_half(g_address: Int64, value: Uint32) -> None:
    """The low 16 bits of ``value``."""
    inline_ptx("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.b16 [{$r0}], h; }", read_only_args=[g_address, value])


def store_float(g_address: Int64, value: Float32) -> None:
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[g_address, value])


def store_int(g_address: Int64, value: Int32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[g_address, value])


def shared_load4(s_address: Int32) -> Words:
    return _four_words("ld.shared", s_address)


def shared_load2(s_address: Int32) -> Words:
    return inline_ptx(
        "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[s_address]
    )


def shared_load_int(s_address: Int32) -> Int32:
    return _one_value("ld.shared.b32", Int32, s_address)


def shared_load_float(s_address: Int32) -> Float32:
    return _one_value("ld.shared.f32", Float32, s_address)


def shared_load_half(s_address: Int32) -> Uint32:
    """16 bits, zero-extended."""
    return inline_ptx(
        "{ .reg .b16 h; ld.shared.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[s_address],
    )


def shared_store4(s_address: Int32, words: Any) -> None:
    inline_ptx(f"st.shared.v4.b32 [{{$r0}}], {_FOUR_IN};", read_only_args=[s_address, *words])


def shared_store_float(s_address: Int32, value: Float32) -> None:
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[s_address, value])


def shared_store_int(s_address: Int32, value: Int32) -> None:
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[s_address, value])


def shared_store_half(s_address: Int32, value: Uint32) -> None:
    """The low 16 bits of ``value``."""
    inline_ptx("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.b16 [{$r0}], h; }", read_only_args=[s_address, value])


def peer_shared(s_address: Int32, rank: Int32) -> Int32:
    """The same shared-memory offset in block ``rank`` of the cluster."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[s_address, rank]
    )


def peer_store4(s_peer: Int32, words: Any) -> None:
    inline_ptx(f"st.shared::cluster.v4.b32 [{{$r0}}], {_FOUR_IN};", read_only_args=[s_peer, *words])


def peer_store_float(s_peer: Int32, value: Float32) -> None:
    inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[s_peer, value])


def peer_store_half(s_peer: Int32, value: Uint32) -> None:
    inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared::cluster.b16 [{$r0}], h; }", read_only_args=[s_peer, value]
    )


def cluster_arrive() -> None:
    inline_ptx("barrier.cluster.arrive.release.aligned;")


def cluster_arrive_relaxed() -> None:
    """As ``cluster_arrive``, but no earlier access becomes visible: of barriers, see ``barrier_init_fence``."""
    inline_ptx("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait() -> None:
    inline_ptx("barrier.cluster.wait.acquire.aligned;")


def count_wrapping(g_address: Int64, last: Int32) -> Int32:
    """Count an arrival; returns how many came before. The counter returns to 0 after ``last`` + 1 arrivals."""
    return inline_ptx(
        "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[g_address, last],
    )


def bits_as_float(word: Uint32) -> Float32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word])


def float_as_bits(value: Float32) -> Uint32:
    return inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value])


def low_bf16(pair: Uint32) -> Float32:
    return bits_as_float(pair << Uint32(16))


def high_bf16(pair: Uint32) -> Float32:
    return bits_as_float(pair & Uint32(0xFFFF0000))


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    return inline_ptx("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low])


def widen_bf16(words: Words) -> list[Float32]:
    """The bf16 pairs of ``words`` as fp32."""
    return [value for word in words for value in (low_bf16(word), high_bf16(word))]


def narrow_bf16(values: list[Float32]) -> list[Uint32]:
    """fp32 values as bf16 pairs, rounded to nearest."""
    return [pack_bf16(values[2 * i], values[2 * i + 1]) for i in range(len(values) // 2)]


def without_negative_zero(pair: Uint32) -> Uint32:
    """The bf16 pair x 1 + 0: -0 becomes +0, all else stays."""
    return inline_ptx(
        "{ .reg .b32 one, zero; mov.b32 one, 0x3f803f80; mov.b32 zero, 0; fma.rn.bf16x2 {$w0}, {$r0}, one, zero; }",
        write_only_types=[Uint32],
        read_only_args=[pair],
    )


def pack_f16(low: Float32, high: Float32) -> Uint32:
    return inline_ptx("cvt.rn.f16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low])


def pack_e4m3(low: Float32, high: Float32) -> Uint32:
    """Two e4m3 bytes in the low half, rounded to nearest, saturated at 448."""
    return inline_ptx(
        "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, {$r0}, {$r1}; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[high, low],
    )


def narrow_e4m3(values: list[Float32]) -> list[Uint32]:
    """Eight fp32 values as two words of e4m3 bytes."""
    pairs = [pack_e4m3(values[2 * i], values[2 * i + 1]) for i in range(4)]
    return [pairs[2 * i] | (pairs[2 * i + 1] << Uint32(16)) for i in range(2)]


def e4m3x4_to_f16(word: Uint32) -> Words:
    """Four e4m3 bytes as two pairs of f16 (every e4m3 value is exact in f16)."""
    return inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[word],
    )


def select_bytes(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Byte permute: nibble i of ``selector`` names the source of byte i (0 to 3 in ``a``, 4 to 7 in ``b``)."""
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def mma(sums: Any, a: Any, b: Any, *, operand: str) -> tuple[Float32, ...]:
    """m16n8k16: ``sums`` [4] fp32 + ``a`` [4] x ``b`` [2]; ``operand`` is "bf16" or "f16"."""
    return inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{operand}.{operand}.f32 {_FOUR_OUT}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *sums],
    )


def exp2(value: Float32) -> Float32:
    """2 to the ``value``; 0 at -infinity."""
    return inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def log2(value: Float32) -> Float32:
    """-infinity at 0."""
    return inline_ptx("lg2.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value])


def maximum(a: Float32, b: Float32) -> Float32:
    return inline_ptx("max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def barrier_init(s_barrier: Int32, count: int) -> None:
    inline_ptx(f"mbarrier.init.shared::cta.b64 [{{$r0}}], {count};", read_only_args=[s_barrier])


def barrier_init_fence() -> None:
    inline_ptx("fence.mbarrier_init.release.cluster;")


def barrier_expect(s_barrier: Int32, num_bytes: int) -> None:
    """One arrival, and ``num_bytes`` of bulk copies that the phase waits for."""
    inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[s_barrier, Int32(num_bytes)]
    )


def bulk_copy(s_address: Int32, g_address: Int64, num_bytes: int, s_barrier: Int32) -> None:
    """Weights to shared memory by the copy engine, completion counted in bytes at ``s_barrier``; multiples of 16."""
    inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[s_address, g_address, Int32(num_bytes), s_barrier, Int64(EVICT_FIRST)],
    )


def barrier_arrive(s_barrier: Int32) -> None:
    """One arrival; this thread's earlier accesses are visible to whoever waits for the phase."""
    inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[s_barrier])


def barrier_arrive_after_copies(s_barrier: Int32) -> None:
    """One arrival, out of the barrier's count, once all of this thread's ``copy_async`` so far are there."""
    inline_ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[s_barrier])


def barrier_wait(s_barrier: Int32, parity: Int32) -> None:
    inline_ptx(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @!p bra again; }",
        read_only_args=[s_barrier, parity],
    )


def copy_async(s_address: Int32, g_address: Int64) -> None:
    """16 bytes from L2 to shared memory, past L1 and registers."""
    inline_ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[s_address, g_address])


def copy_async_or_zero(s_address: Int32, g_address: Int64, num_bytes: Int32) -> None:
    """As ``copy_async``, but only the first ``num_bytes`` (0 to 16) are read; zeros take the place of the others.

    Of data that a step reads once.
    """
    inline_ptx(
        "cp.async.cg.shared.global.L2::cache_hint.L2::128B [{$r0}], [{$r1}], 16, {$r2}, {$r3};",
        read_only_args=[s_address, g_address, num_bytes, Int64(EVICT_FIRST)],
    )


def copy_async_wait() -> None:
    """Until all of this thread's ``copy_async`` are there."""
    inline_ptx("cp.async.wait_all;")


def bulk_prefetch(g_address: Int64, num_bytes: Int32) -> None:
    inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[g_address, num_bytes])
