"""Tensor-core products in series: what one that needs the sums of the one before takes."""

from __future__ import annotations

from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
DEV void multiply_bf16(float (&c)[4], u32 a, u32 b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%5,%5},"
               " {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a), "r"(b));
}
template <int CHAINS> DEV void product_chain(u32* out, u64* timestamps, int iters) {
  float c[CHAINS][4];
#pragma unroll
  for (int i = 0; i < CHAINS; ++i)
    for (int k = 0; k < 4; ++k) c[i][k] = 0;
  u32 a = threadIdx.x * 0x10001u, b = 0x3f803f80u;
  __syncthreads();
  u64 from = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int k = 0; k < CHAINS; ++k) multiply_bf16(c[k], a, b);
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CHAINS; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  if (sum == 1.2345f) *out = 1;
  u64 to = clk();
  if (threadIdx.x == 0) timestamps[blockIdx.x] = to - from;
}
#define PRODUCT_CHAIN(N) KERNEL product_chain_##N(u32* o, u64* t, int i) { product_chain<N>(o, t, i); }
PRODUCT_CHAIN(1) PRODUCT_CHAIN(2) PRODUCT_CHAIN(4)
"""

LOOPS = 64


def product_chains(gpu: Gpu, recorder: Recorder) -> None:
    """Cycles from a ``mma.sync`` m16n8k16 in bf16 to the next that adds to its sums, by warps and chains of a warp.

    Isolates: operands are in registers and nothing else runs; with one chain a warp each product waits for the one
    before, with more they overlap. Could mislead: in a kernel operands come from shared memory between products, which
    hides behind a chain where it is asked for ahead; loop and last sums are inside (some 40 of 512 products' cycles).
    """
    timestamps, out = gpu.zeros(4096), gpu.zeros(16, "int32")

    def case(chains: int, warps: int) -> None:
        graph = gpu.graph(
            lambda: gpu.launch(f"product_chain_{chains}", gpu.num_sms, 32 * warps, (out, timestamps, LOOPS))
        )

        def sampler() -> dict[str, tuple[str, list[float]]]:
            cycles = []
            gpu.replay(graph)
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                cycles.append(float(timestamps[: gpu.num_sms].double().median()) / (8 * LOOPS))
            return {"step": ("cycle", cycles)}

        recorder.record("product_chain", {"chains": chains, "warps": warps}, sampler)

    for chains in (1, 2, 4):
        for warps in (1, 4, 8, 16):
            case(chains, warps)
