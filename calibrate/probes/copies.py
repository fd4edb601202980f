"""HBM rate when reads and writes mix."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu, span_rate
from k3sim.calibrate.probes.recorder import Recorder

READS_IN_FLIGHT = 4  # of the eight slots of copy_bulk; the other four are on their way out

SOURCE = r"""
// One thread keeps four reads of `chunk` bytes under way, and up to four stores of what came. Of each four chunks the
// first `stored` go to the same place of dst.
KERNEL copy_bulk(const char* src, char* dst, u64 span, u64 total, int chunk, int stored, u64* timestamps) {
  extern __shared__ __align__(128) char ring[];
  __shared__ u64 bars[8];
  if (threadIdx.x) return;
  u64 begin = gtime();
  u32 ring_at = (u32)__cvta_generic_to_shared(ring), bar_at = (u32)__cvta_generic_to_shared(bars);
  for (u32 s = 0; s < 8; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar_at + 8 * s) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u64 mine = (total / chunk + gridDim.x - 1 - blockIdx.x) / gridDim.x, stride = (u64)gridDim.x * chunk;
  u64 at = (u64)blockIdx.x * chunk, out = at;
  for (u64 i = 0; i < mine + 4; ++i) {
    if (i >= 4) {  // chunk i - 4 has come: store it
      u32 s = (i - 4) & 7, parity = ((i - 4) >> 3) & 1, done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar_at + 8 * s), "r"(parity) : "memory");
      if (((i - 4) & 3) < stored)
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                     :: "l"(dst + out), "r"(ring_at + s * (u32)chunk), "r"(chunk) : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      out += stride;
      if (out >= span) out -= span;
    }
    if (i < mine) {
      u32 s = i & 7;
      // The store out of this slot, of chunk i - 8, is the fifth newest: it has left the slot.
      asm volatile("cp.async.bulk.wait_group.read 4;" ::: "memory");
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar_at + 8 * s), "r"(chunk)
                   : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(ring_at + s * (u32)chunk), "l"(src + at), "r"(chunk), "r"(bar_at + 8 * s) : "memory");
      at += stride;
      if (at >= span) at -= span;
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  timestamps[2 * blockIdx.x] = begin;
  timestamps[2 * blockIdx.x + 1] = gtime();
}

// Plain loads and stores, four of 16 bytes a thread at a time, of which the first `stored` are stored.
KERNEL copy_loads(const uint4* src, uint4* dst, u64 count, int stored, u64* timestamps) {
  u64 begin = gtime(), batch = (u64)blockDim.x * 4;
  u32 acc = 0;
  for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = load4(src + i + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      acc ^= fold(v[u]);
      if (u < stored) dst[i + u * blockDim.x] = v[u];
    }
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
KERNEL fill(uint4* dst, u64 count, u64* timestamps) {
  u64 begin = gtime();
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    u32 v = ((u32)i * 2654435761u) & 0x7fffffff;
    dst[i] = make_uint4(v, v ^ 0x2c1b3c6d, v ^ 0x297a2d39, v ^ 0x1b873593);
  }
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
"""


def copies(gpu: Gpu, recorder: Recorder) -> None:
    """Bytes read and written a second by a copy, against bytes in flight, SMs, and the share that is written.

    Isolates: the same rings and loads as the read-only streams, with the stores of none to all of what was read added;
    ``in_place`` stores to the lines that were just read, as an update of state does. Could mislead: a store ends in L2,
    so up to an L2 full of dirty lines is left behind and that of the replay before is written back instead (equal
    amounts once replays follow one another; the first is thrown away); reads of the next replay begin on other lines
    than those left in L2; with few bytes in flight the ring's stores hold its slots, so reads in flight are fewer than
    stated.
    """
    sms, timestamps, half = gpu.num_sms, gpu.zeros(4096), 2**30
    target = gpu.data[half // 4 :]

    def case(form: str, in_flight: int, blocks: int, stored: int, in_place: bool, graph: Any, num_bytes: int) -> None:
        moved = num_bytes * (4 + stored) / 4 if form != "fill" else num_bytes
        gpu.replay(graph)
        recorder.record(
            "hbm_copy",
            {
                "form": form,
                "read_bytes_in_flight_per_sm": in_flight,
                "blocks": blocks,
                "written_of_four": stored,
                "in_place": in_place,
            },
            lambda: {"moved_rate": ("B/s", span_rate(gpu, graph, timestamps, blocks, moved, recorder.replays // 2))},
        )

    def bulk(kib: int, blocks: int, stored: int, *, in_place: bool = False) -> None:
        chunk = kib * 1024 // READS_IN_FLIGHT
        window = half // (chunk * blocks) * chunk * blocks
        expected = min(4.2e12, blocks * kib * 1024 / 0.9e-6, blocks * 50e9)
        total = int(min(window, max(expected * 0.6e-3, 2e8))) // chunk * chunk
        into = gpu.data if in_place else target
        args = (gpu.data, into, ctypes.c_uint64(window), ctypes.c_uint64(total), chunk, stored, timestamps)
        graph = gpu.graph(lambda: gpu.launch("copy_bulk", blocks, 32, args, smem=BLOCK_BYTES))
        case("bulk", chunk * READS_IN_FLIGHT, blocks, stored, in_place, graph, total)

    for kib in (4, 8, 16, 32, 64, 96):
        bulk(kib, sms, 4)
    for stored in (1, 2):
        bulk(64, sms, stored)
    for kib in (16, 64):
        bulk(kib, sms, 4, in_place=True)
    for blocks in (8, 32, 64):
        bulk(64, blocks, 4)

    def loads(threads: int, blocks: int, stored: int, *, in_place: bool = False) -> None:
        count = half // 16 // (threads * 4) * threads * 4
        into = gpu.data if in_place else target
        args = (gpu.data, into, ctypes.c_uint64(count), stored, timestamps)
        graph = gpu.graph(lambda: gpu.launch("copy_loads", blocks, threads, args))
        case("loads", 64 * threads * max(1, blocks // sms), blocks, stored, in_place, graph, count * 16)

    for stored in (0, 1, 2, 4):
        loads(1024, 2 * sms, stored)
    loads(1024, 2 * sms, 4, in_place=True)
    for threads in (128, 256, 512):
        loads(threads, sms, 4)

    count = half // 16
    graph = gpu.graph(lambda: gpu.launch("fill", 2 * sms, 1024, (target, ctypes.c_uint64(count), timestamps)))
    case("fill", 0, 2 * sms, 4, False, graph, half)
