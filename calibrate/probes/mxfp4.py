"""How fast an SM turns MXFP4 weights into sums when memory is not in the way."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Eight 4-bit codes as four f16 pairs: the instructions of kernels/expert_gemv.
DEV void decode_codes(u32 w, u32 (&pair)[4]) {
  pair[0] = w & 0x8e008e00;
  pair[1] = (w << 3) & 0x8e008e00;
  pair[2] = ((w << 6) & 0x0e000e00) | ((w << 2) & 0x80008000);
  pair[3] = ((w << 9) & 0x0e000e00) | ((w << 1) & 0x80008000);
}
DEV void multiply_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9},"
               " {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV uint4 shared4(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

// A warp multiplies units of 16 outputs x 256 columns (2,048 bytes of codes, 128 of scales) out of shared memory, as
// the first product of the experts does: read, decode, 16 products, scale, sum over columns.
template <int MODE> DEV void mxfp4_loop(u32* out, u64* timestamps, int iters) {
  extern __shared__ __align__(128) char ring[];
  u32 at = (u32)__cvta_generic_to_shared(ring), lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (u32 i = threadIdx.x; i < 7 * 16 * 2176 / 4 && i < 48000; i += blockDim.x)
    *(u32*)(ring + 4 * i) = (i * 2654435761u) ^ 0x5bd1e995;
  __syncthreads();
  u32 x[4], slot = 0;
  for (int i = 0; i < 4; ++i) x[i] = 0x3c003c00 + lane * 16 + i;
  float low = 0, high = 0;
  u64 from = clk();
#pragma unroll 1
  for (int iter = 0; iter < iters; ++iter) {
    u32 unit = at + (slot * 16 + warp) * 1536;
    uint4 words[4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) words[pair] = shared4(unit + pair * 512 + lane * 16);
    u32 scales;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(unit + 2048 + lane * 4));
    float even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
    for (int block = 0; block < 8; ++block) {
      uint4 four = words[block / 2];
      u32 first = block & 1 ? four.z : four.x, second = block & 1 ? four.w : four.y, lo[4], hi[4], b[4];
      bool mine = (lane >> 2) == block;
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i] = mine ? x[i] : 0;
      if (MODE == 1) {  // the products alone
#pragma unroll
        for (int i = 0; i < 4; ++i) { lo[i] = first; hi[i] = second; }
      } else {
        decode_codes(first, lo);
        decode_codes(second, hi);
      }
      if (MODE == 2) {  // decoding alone
#pragma unroll
        for (int i = 0; i < 4; ++i) asm volatile("" :: "r"(lo[i]), "r"(hi[i]));
      } else {
        multiply_f16(even, lo[0], hi[0], lo[1], hi[1], b[0], b[1]);
        multiply_f16(odd, lo[2], hi[2], lo[3], hi[3], b[2], b[3]);
      }
    }
    float sum[4];
    u32 shifted[4] = {scales << 23, scales << 15, scales << 7, scales >> 1};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 exponent = shifted[i] & 0x7f800000;
      sum[i] = (even[i] + odd[i]) * __uint_as_float(exponent > 0x400000 ? exponent : 0x400000);
    }
    float upper = sum[0] + sum[1], lower = sum[2] + sum[3];
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      upper += __shfl_xor_sync(~0u, upper, offset);
      lower += __shfl_xor_sync(~0u, lower, offset);
    }
    low += upper;
    high += lower;
    if (++slot == 7) slot = 0;
  }
  __syncthreads();
  u64 cycles = clk() - from;
  out[blockIdx.x * blockDim.x + threadIdx.x] = __float_as_uint(low) ^ __float_as_uint(high);
  if (threadIdx.x == 0) timestamps[blockIdx.x] = cycles;
}
KERNEL mxfp4_whole(u32* out, u64* timestamps, int iters) { mxfp4_loop<0>(out, timestamps, iters); }
KERNEL mxfp4_products(u32* out, u64* timestamps, int iters) { mxfp4_loop<1>(out, timestamps, iters); }
KERNEL mxfp4_decode(u32* out, u64* timestamps, int iters) { mxfp4_loop<2>(out, timestamps, iters); }
"""

UNIT_WEIGHTS = 16 * 256


def mxfp4(gpu: Gpu, recorder: Recorder) -> None:
    """MXFP4 weights a clock and SM, with everything in shared memory: decoding, products, scales and sums.

    Isolates: the multiplying loop of the experts with its instructions and no barrier, copy or other block; with
    decoding or products alone it says which of them bounds. Could mislead: units overlap in memory and repeat, so
    bank conflicts are those of the kernel but values are not; in the kernel each unit is waited for, and its warps
    are not all busy at once; a compiler other than that of the kernel orders the instructions.
    """
    sms, iters = gpu.num_sms, 200
    out, timestamps = gpu.zeros(sms * 512, "int32"), gpu.zeros(4096)

    def case(form: str, warps: int, blocks: int) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            readings = []
            for _ in range(recorder.replays // 2):
                gpu.launch(f"mxfp4_{form}", blocks, 32 * warps, (out, timestamps, iters), smem=BLOCK_BYTES)
                cycles = float(timestamps[:blocks].float().mean().item())
                readings.append(warps * iters * UNIT_WEIGHTS / cycles)
            return {"weights_per_clock": ("1", readings)}

        recorder.record("mxfp4_rate", {"form": form, "warps": warps, "blocks": blocks}, sampler)

    for warps in (1, 4, 8, 14, 16):
        case("whole", warps, sms)
    case("whole", 14, 1)
    for form in ("products", "decode"):
        for warps in (1, 14):
            case(form, warps, sms)
