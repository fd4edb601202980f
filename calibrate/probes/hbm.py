"""HBM read rate against bytes in flight and number of SMs."""

from __future__ import annotations

import ctypes

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu, span_rate
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL stream_bulk(const char* src, u64 span, u64 total, int chunk, int stages, u64* timestamps) {
  if (threadIdx.x) return;
  u64 begin = gtime();
  stream(src, span, total, chunk, stages, blockIdx.x, gridDim.x);
  timestamps[2 * blockIdx.x] = begin;
  timestamps[2 * blockIdx.x + 1] = gtime();
}

template <int U, bool EVICT_FIRST> DEV void stream_loads(const uint4* src, u64 count, u64* timestamps) {
  u64 begin = gtime(), batch = (u64)blockDim.x * U, policy = 0;
  u32 acc = 0;
  if (EVICT_FIRST) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint4* p = src + i + u * blockDim.x;
      if (EVICT_FIRST)
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(v[u].x), "=r"(v[u].y),
                     "=r"(v[u].z), "=r"(v[u].w) : "l"(p), "l"(policy) : "memory");
      else v[u] = load4(p);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
#define LOADS(U) KERNEL stream_loads_##U(const uint4* s, u64 n, u64* t) { stream_loads<U, false>(s, n, t); }
LOADS(1) LOADS(2) LOADS(4) LOADS(8)
KERNEL stream_evict_first(const uint4* s, u64 n, u64* t) { stream_loads<4, true>(s, n, t); }
"""



def hbm_streams(gpu: Gpu, recorder: Recorder) -> None:
    """HBM read rate against bytes in flight and number of SMs, by bulk copies and by plain loads.

    Isolates: nothing is computed and no byte is read twice, so a rate is of HBM or of what is in flight; time runs from
    the first block's start to the last block's end. Could mislead: start and end of the stream are inside (0.5 % of a
    1 ms stream); eight copies of 1 to 2 KiB are bound by their issue and not by bytes in flight; 96 SMs stream more
    slowly than 64, since blocks are then unequal between GPCs; no write is among the traffic.
    """
    sms, timestamps = gpu.num_sms, gpu.zeros(4096)
    span = 2**31

    def bulk(kib: float, stages: int, blocks: int, probe: str) -> None:
        chunk = int(kib * 1024) // stages
        window = span // (chunk * blocks) * chunk * blocks
        expected = min(4.2e12, blocks * kib * 1024 / 0.7e-6, blocks * 60e9)
        total = int(min(window, max(expected * 1e-3, 4e8))) // chunk * chunk
        args = (gpu.data, ctypes.c_uint64(window), ctypes.c_uint64(total), chunk, stages, timestamps)
        graph = gpu.graph(lambda: gpu.launch("stream_bulk", blocks, 32, args, smem=BLOCK_BYTES))
        recorder.record(
            probe,
            {"bytes_in_flight_per_sm": chunk * stages, "stages": stages, "blocks": blocks},
            lambda: {"read_rate": ("B/s", span_rate(gpu, graph, timestamps, blocks, total, recorder.replays))},
        )

    for kib in (0.5, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192):
        bulk(kib, 4, sms, "hbm_bulk_in_flight")
    for kib in (8, 16, 32, 64, 128):
        bulk(kib, 8, sms, "hbm_bulk_in_flight")
        bulk(kib, 2, sms, "hbm_bulk_in_flight")
    for blocks in (1, 2, 4, 8, 16, 32, 48, 64, 96):
        bulk(128, 8, blocks, "hbm_bulk_by_sms")

    def loads(threads: int, unroll: int, blocks: int, probe: str, num_bytes: int) -> None:
        count = num_bytes // 16 // (threads * unroll) * threads * unroll
        args = (gpu.data, ctypes.c_uint64(count), timestamps)
        graph = gpu.graph(lambda: gpu.launch(f"stream_loads_{unroll}", blocks, threads, args))
        per_sm = 16 * threads * unroll * max(1, blocks // sms)
        recorder.record(
            probe,
            {"bytes_in_flight_per_sm": per_sm, "threads": threads, "loads": unroll, "blocks": blocks},
            lambda: {
                "read_rate": ("B/s", span_rate(gpu, graph, timestamps, blocks, count * 16, recorder.replays))
            },
        )

    for threads, unroll in ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4)):
        loads(threads, unroll, sms, "hbm_loads_in_flight", 2**29)
    loads(512, 8, sms, "hbm_loads_in_flight", 2**31)
    loads(1024, 4, 2 * sms, "hbm_loads_in_flight", 2**31)
    for blocks in (1, 4, 16, 32, 64):
        loads(1024, 4, blocks, "hbm_loads_by_sms", 2**29)
