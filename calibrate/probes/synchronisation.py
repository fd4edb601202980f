"""Barriers, reductions and fences."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Args, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL reduce_loop(u32* out, u64* timestamps, int iters) {
  __shared__ u32 part[32];
  u32 v = threadIdx.x;
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) v = block_reduce(v, part);
  u64 b = clk();
  if (v == 12345) *out = v;
  if (threadIdx.x == 0) timestamps[blockIdx.x] = b - a;
}
DEV void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
KERNEL cluster_loop(u64* timestamps, int iters, int exchange) {
  __shared__ u32 box[2];
  u32 rank, v = 1, remote, mine = (u32)__cvta_generic_to_shared(box);
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(mine), "r"((rank + 1) % 8));
  if (threadIdx.x == 0) box[0] = box[1] = 0;
  cluster_barrier();
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    if (exchange && threadIdx.x == 0)
      asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(remote + 4 * (i & 1)), "r"(v) : "memory");
    cluster_barrier();
    if (exchange) { v += *(volatile u32*)(box + (i & 1)); v &= 0xffff; }
  }
  depend(v);
  u64 b = clk();
  if (threadIdx.x == 0) timestamps[blockIdx.x] = b - a;
}
KERNEL grid_loop(u32* counter, u64* timestamps, int iters) {
  u64 a = clk();
#pragma unroll 1
  for (int i = 1; i <= iters; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
      while (load_acquire(counter) < gridDim.x * i);
    }
    __syncthreads();
  }
  u64 b = clk();
  if (threadIdx.x == 0) timestamps[blockIdx.x] = b - a;
}
KERNEL fence_loop(u32* out, u64* timestamps, int iters, int scope) {
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    *(volatile u32*)(out + threadIdx.x) = i;
    if (scope == 1) __threadfence();
    if (scope == 2) __threadfence_system();
  }
  u64 b = clk();
  if (threadIdx.x == 0) timestamps[blockIdx.x] = b - a;
}
"""



def synchronisation(gpu: Gpu, recorder: Recorder) -> None:
    """Block reduction, cluster barrier, grid barrier and fences, each in a loop of 200 on an idle GPU.

    Isolates: the loop holds one primitive and what feeds it. Could mislead: in a loop all warps and blocks arrive in
    step and nothing else uses L2; once in a kernel the slowest warp's load is waited for too (a reduction costs 0.1 to
    0.2 us more), and beside a stream near HBM's ceiling each round trip queues.
    """
    timestamps, out, counter, iters = gpu.zeros(4096), gpu.zeros(4096), gpu.zeros(4, "int32"), 200

    def loop(
        probe: str, parameters: dict[str, Any], name: str, grid: int, block: int, args: Args, **how: Any
    ) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            readings = []
            for _ in range(recorder.replays):
                counter.zero_()
                gpu.launch(name, grid, block, args, **how)
                readings.append(float(timestamps[:grid].max().item()) / iters)
            hz = Clocks(gpu).hz
            return {"time": ("us", [1e6 * r / hz for r in readings])}

        recorder.record(probe, parameters, sampler)

    for threads in (128, 256, 512, 1024):
        loop("block_reduction", {"threads": threads}, "reduce_loop", 1, threads, (out, timestamps, iters))
    for exchange in (0, 1):
        for grid in (8, 128):
            loop(
                "cluster_barrier",
                {"cluster": 8, "blocks": grid, "store_to_neighbour": bool(exchange)},
                "cluster_loop",
                grid,
                256,
                (timestamps, iters, exchange),
                cluster=8,
            )
    for grid in (8, 64, 132):
        loop(
            "grid_barrier",
            {"blocks": grid},
            "grid_loop",
            grid,
            256,
            (counter, timestamps, iters),
            smem=BLOCK_BYTES,
        )
    for scope, name in ((0, "none"), (1, "gpu"), (2, "system")):
        for threads in (32, 256):
            loop(
                "fence",
                {"scope": name, "threads": threads},
                "fence_loop",
                1,
                threads,
                (out, timestamps, iters, scope),
            )
