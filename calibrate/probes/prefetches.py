"""Bulk prefetches into L2: how fast they are issued, when their bytes are there, and what a product gains by them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import count
from typing import Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
DEV void bulk_prefetch(const char* p, u32 size) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(size) : "memory");
}
KERNEL prefetch_issue(const char* src, int size, int count, u64* timestamps) {
  if (threadIdx.x) return;
  const char* p = src + (u64)blockIdx.x * count * size;
  u64 t0 = clk();
  for (int i = 0; i < count; ++i) bulk_prefetch(p + (u64)i * size, size);
  timestamps[blockIdx.x] = clk() - t0;
}

// One block on each SM. From a common start on, the first `issuers` blocks ask for their shares of `bytes`, the last
// `streamers` stream; the others, and the issuers when they have asked, load lines of the region after `delay` ns.
KERNEL prefetch_arrival(const char* region, u64 bytes, int size, int issuers, const char* other, u64 span, int chunk,
                        int streamers, int delay, u32* lat, int steps, u64* begin_at, u32* counter, u32 seed) {
  if (threadIdx.x) return;
  if (blockIdx.x == 0) {
    while (load_acquire(counter) < gridDim.x - 1);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(begin_at), "l"(gtime() + 3000) : "memory");
  } else {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
  }
  u64 begin;
  do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(begin) : "l"(begin_at) : "memory"); while (!begin);
  int first_streamer = (int)gridDim.x - streamers;
  if ((int)blockIdx.x >= first_streamer) {
    while (gtime() < begin - 2000);  // at its rate before the prefetch begins
    stream_for(other, span, 2ull * (delay + 12000), chunk, 4, blockIdx.x - first_streamer, streamers);
    return;
  }
  while (gtime() < begin);
  for (u64 at = (u64)blockIdx.x * size; (int)blockIdx.x < issuers && at < bytes; at += (u64)issuers * size)
    bulk_prefetch(region + at, size);
  while (gtime() < begin + delay);
  u32 r = seed ^ (blockIdx.x * 2654435761u);
  for (int i = 0; i < steps; ++i) {
    r = r * 1664525u + 1013904223u;
    u64 line = ((u64)(r >> 8) * (bytes >> 7)) >> 24;
    u64 a = clk();
    depend(load((const u32*)(region + line * 128)));
    lat[blockIdx.x * steps + i] = (u32)(clk() - a);
  }
}

KERNEL prefetch_region(const char* region, u64 bytes, int size) {
  if (threadIdx.x) return;
  for (u64 at = (u64)blockIdx.x * size; at < bytes; at += (u64)gridDim.x * size) bulk_prefetch(region + at, size);
}
// Runs for `ns`: idle, or with a stream of `chunk` bytes four times in flight on each SM.
KERNEL prefetch_beside(const char* other, u64 span, int ns, int chunk) {
  pdl_trigger();
  if (threadIdx.x) return;
  if (chunk) {
    stream_for(other, span, (u64)ns * 2, chunk, 4, blockIdx.x, gridDim.x);
    return;
  }
  u64 begin = gtime();
  while (gtime() < begin + ns);
}
// Reads a matrix through a ring of 16 KiB slots; before its dependency wait as much as the ring holds, or nothing.
KERNEL prefetch_used(const char* src, u64 bytes, int slots, int early) {
  extern __shared__ __align__(128) char ring[];
  __shared__ u64 bars[16];
  if (threadIdx.x) return;
  const u32 size = 16384;
  u32 ring_at = (u32)__cvta_generic_to_shared(ring), bar_at = (u32)__cvta_generic_to_shared(bars);
  for (int s = 0; s < slots; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar_at + 8 * s) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u32 mine = (u32)((bytes / size + gridDim.x - 1 - blockIdx.x) / gridDim.x), slot = 0, parity = 0;
  if (!early) pdl_wait();
  for (u32 i = 0; i < mine + slots; ++i) {
    if (i == slots) pdl_wait();
    if (i >= slots) {
      u32 done = 0;
      while (!done && i - slots < mine)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar_at + 8 * slot), "r"(parity) : "memory");
    }
    if (i < mine) {
      const char* from = src + ((u64)i * gridDim.x + blockIdx.x) * size;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar_at + 8 * slot), "r"(size)
                   : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(ring_at + slot * size), "l"(from), "r"(size), "r"(bar_at + 8 * slot) : "memory");
    }
    if (++slot == slots) { slot = 0; if (i >= slots) parity ^= 1; }
  }
}
"""

REGION = 8 << 20
HIT_CYCLES = {0: 515, 32 * 1024: 640}  # below: a hit in L2, idle and beside a stream with so much in flight on each SM


def prefetches(gpu: Gpu, recorder: Recorder) -> None:
    """Cycles of one thread for each cp.async.bulk.prefetch.L2, and the share of 8 MiB that is in L2 some time after.

    Isolates: issue is timed over 64 requests of one thread a block, cold and rotating through 2 GiB; arrival looks at
    few single loads of one thread on each SM at a fixed time after a start that all blocks share. Could mislead: issue
    blocks where the copy engine's queue is full, so at large sizes it is the rate of HBM; looking takes 0.3 to 0.8 us
    and brings lines in, so a share is of up to so much later; a line on its way counts as not there; beside a stream
    hits and misses overlap, 3 % of either on the other side; begin is exact to the 32 ns of the timer.
    """
    turns = count(1)  # of regions, so that none was read for 1.9 GB
    _issues(gpu, recorder, turns)
    _arrivals(gpu, recorder, turns)


def _issues(gpu: Gpu, recorder: Recorder, turns: Iterator[int]) -> None:
    sms, timestamps = gpu.num_sms, gpu.zeros(4096)

    def issue(kib: float, blocks: int) -> None:
        size = int(kib * 1024)
        requests = min(64, REGION // (size * blocks))

        def sampler() -> dict[str, tuple[str, Any]]:
            readings = []
            for _ in range(recorder.replays // 4):
                cold = gpu.data[(next(turns) % 240) * (REGION // 4) :]
                gpu.launch("prefetch_issue", blocks, 32, (cold, size, requests, timestamps))
                readings.append(float(timestamps[:blocks].float().mean().item()) / requests)
            return {"issue": ("cycle", readings)}

        parameters = {"bytes_each": size, "blocks": blocks, "requests": requests}
        recorder.record("prefetch_issue", parameters, sampler)

    for kib in (0.5, 2, 4, 16, 64):
        issue(kib, 1)
    for kib in (2, 16):
        issue(kib, 8)
    issue(2, sms)


def _arrivals(gpu: Gpu, recorder: Recorder, turns: Iterator[int]) -> None:
    sms, lat = gpu.num_sms, gpu.zeros(1 << 12, "int32")
    begin, counter = gpu.zeros(2), gpu.zeros(4, "int32")
    other, span = gpu.data[2**28 :], 2**30

    def arrival(issuers: int, delay_us: float, in_flight: int) -> None:
        streamers = 3 * sms // 4 if in_flight else 0
        steps = 2 if not in_flight else 6
        samplers = sms - streamers
        chunk = in_flight // 4 or 4096
        window = span // (chunk * max(1, streamers)) * chunk * max(1, streamers)

        def sampler() -> dict[str, tuple[str, Any]]:
            kept, loads = [], []
            for _ in range(recorder.replays // 4):
                begin.zero_()
                counter.zero_()
                # Regions of the first GiB; the other one is streamed.
                turn = next(turns)
                region = gpu.data[(turn % 120) * (REGION // 4) :]
                args = (
                    region, ctypes.c_uint64(REGION), 16384, issuers, other, ctypes.c_uint64(window), chunk, streamers,
                    int(1000 * delay_us), lat, steps, begin, counter, 7919 * turn + 13,
                )  # fmt: skip
                gpu.launch("prefetch_arrival", sms, 32, args, smem=BLOCK_BYTES)
                readings = lat[: samplers * steps].cpu().numpy()
                kept.append(float((readings < HIT_CYCLES[in_flight]).mean()))
                loads.append(readings)
            return {"in_l2": ("1", kept), "load": ("cycle", loads)}

        parameters = {
            "issuing_blocks": issuers,
            "bytes": REGION,
            "bytes_each": 16384,
            "after_us": delay_us,
            "stream_bytes_in_flight_per_sm": in_flight,
            "streaming_blocks": streamers,
        }
        recorder.record("prefetch_arrival", parameters, sampler)

    for issuers, in_flight in ((8, 0), (sms, 0), (8, 32 * 1024)):
        for delay_us in (0.5, 1, 1.5, 2, 2.5, 3, 4, 6, 10, 16):
            arrival(issuers, delay_us, in_flight)


SLOTS = 11  # of 16 KiB: 176 KiB of an SM, beside a stream's 32
PAIRS = 40  # of a graph: with 4 MiB each they read more than any L2 holds


def prefetch_gain(gpu: Gpu, recorder: Recorder) -> None:
    """Time of a kernel and the product behind it, in a graph of 40 such pairs, with and without a prefetch beside it.

    Isolates: the first kernel (a block an SM) does nothing for 5, 10 or 20 us, or streams with 16 or 32 KiB in flight
    on each SM; the second reads a matrix of 4, 12 or 24 MiB, each pair its own, launched behind it or early by PDL. A
    prefetch of the whole matrix is forked to another stream behind the pair before, and nobody waits for it; with 0
    bytes it is the fork alone. Could mislead: the streaming kernel ends up to a ring later than it says, the same in
    all three; the second kernel multiplies nothing; at 40 issuing blocks requests may be dropped.
    """
    side = gpu.torch.cuda.Stream()
    other, half = gpu.data[2**28 :], 2**30

    def follow(one: Any, then: Any) -> None:
        """Let what comes on stream ``then`` wait for what is on ``one``."""
        event = gpu.call(gpu.driver.cuEventCreate(2))  # without times
        gpu.call(gpu.driver.cuEventRecord(event, one.cuda_stream))
        gpu.call(gpu.driver.cuStreamWaitEvent(then.cuda_stream, event, 0))

    def pairs(us: int, chunk: int, num_bytes: int, early: bool, prefetched: int | None, issuers: int) -> Any:
        window = half // (max(chunk, 4096) * gpu.num_sms) * max(chunk, 4096) * gpu.num_sms

        def body() -> None:
            for pair in range(PAIRS):
                matrix = gpu.data[pair * (num_bytes // 4) :]
                if prefetched is not None:
                    follow(gpu.stream, side)
                    args: Any = (matrix, ctypes.c_uint64(prefetched), 16384)
                    gpu.launch("prefetch_region", issuers, 32, args, stream=side)
                args = (other, ctypes.c_uint64(window), 1000 * us, chunk)
                gpu.launch("prefetch_beside", gpu.num_sms, 32, args, smem=4 * chunk, carve_out=100)
                args = (matrix, ctypes.c_uint64(num_bytes), SLOTS, int(early))
                gpu.launch("prefetch_used", gpu.num_sms, 32, args, smem=16384 * SLOTS, pdl=early, carve_out=100)
            if prefetched is not None:
                follow(side, gpu.stream)

        return gpu.graph(body)

    def case(us: int, chunk: int, mib: int, early: bool, prefetched: int | None, issuers: int = 16) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            graph = pairs(us, chunk, mib << 20, early, prefetched, issuers)
            gpu.event_us(graph, 3)
            return {"pair": ("us", [one / PAIRS for one in gpu.event_us(graph, recorder.replays // 4)])}

        parameters = {
            "predecessor_us": us,
            "stream_bytes_in_flight_per_sm": 4 * chunk,
            "matrix_bytes": mib << 20,
            "early_launch": early,
            "prefetched_bytes": prefetched,
            "issuing_blocks": issuers if prefetched is not None else 0,
        }
        recorder.record("prefetch_gain", parameters, sampler)

    for us in (5, 10, 20):
        for chunk in (0, 4096, 8192):
            for mib in (4, 12, 24):
                for prefetched in (None, 0, mib << 20):
                    case(us, chunk, mib, False, prefetched)
    for mib in (4, 12, 24):
        for prefetched in (None, 0, mib << 20):
            case(10, 0, mib, True, prefetched)
    for issuers in (8, 40):
        case(20, 0, 24, False, 24 << 20, issuers)
