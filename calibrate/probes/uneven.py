"""How unevenly blocks of equal work end when all SMs stream, and loads that a burst of bulk copies meets."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL equal_shares(const char* src, u64 span, u64 total, int chunk, int stages, u64* timestamps) {
  if (threadIdx.x) return;
  u64 begin = gtime();
  stream(src, span, total, chunk, stages, blockIdx.x, gridDim.x);
  u64* s = timestamps + 3 * blockIdx.x;
  s[0] = begin; s[1] = gtime(); s[2] = smid();
}

// All blocks of both kernels leave together, a fixed time after the last one has come; `delay_ns` more for this kernel.
DEV u64 leave_together(u32* counter, u32 expected, int delay_ns) {
  if (!meet(counter, expected)) return 0;
  u64 at = ((gtime() + 3000) & ~(u64)4095) + 4096;
  while (gtime() < at + delay_ns);
  return at;
}
// What every thread asks for at once, 16 bytes a copy, into shared memory; until all of it is there.
KERNEL small_copies(const char* src, int copies, u32* counter, u32 expected, int delay_ns, u64* timestamps) {
  extern __shared__ __align__(128) char room[];
  __shared__ u64 began;
  if (threadIdx.x == 0) began = leave_together(counter, expected, delay_ns);
  __syncthreads();
  u32 to = (u32)__cvta_generic_to_shared(room) + threadIdx.x * 16;
  const char* from = src + ((u64)blockIdx.x * copies * blockDim.x + threadIdx.x) * 16;
  for (int i = 0; i < copies; ++i)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(to + i * blockDim.x * 16), "l"(from + (u64)i * blockDim.x * 16) : "memory");
  u64 asked = gtime();
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    u64* s = timestamps + 4 * blockIdx.x;
    s[0] = began; s[1] = asked; s[2] = gtime(); s[3] = smid();
  }
}
KERNEL later_burst(const char* src, u64 span, u64 cycles, int chunk, int stages, u32* counter, u32 expected,
                   int delay_ns, u64* timestamps) {
  if (threadIdx.x) return;
  u64* s = timestamps + 4 * blockIdx.x;
  s[0] = leave_together(counter, expected, delay_ns);
  s[1] = stream_for(src, span, cycles, chunk, stages, blockIdx.x, gridDim.x);
  s[3] = smid();
}
"""

QUANTILES = (0, 10, 25, 50, 75, 90)
BURST_CYCLES = 40_000  # about 20 us
THREADS = 448  # of the block that asks at once, as of the shared experts' first product
FIRST_NS = 2000  # of whoever leaves first after the meeting


def uneven_ends(gpu: Gpu, recorder: Recorder) -> None:
    """When blocks of equal work end, one an SM, all streaming from HBM: quantiles over SMs, of the last one's time.

    Isolates: every block reads the same number of bytes through the same ring, begins within a microsecond of the
    others and computes nothing, so an SM that ends early was given more. ``same_sms`` is the correlation of an SM's
    time with its mean over all replays: 1 where it is always the same SMs. Could mislead: which SMs share a GPC, and
    how many it has, differs from card to card; the 0.7 us of latency in a block's time do not shrink with its bytes.
    """
    import numpy

    sms, timestamps = gpu.num_sms, gpu.zeros(3 * gpu.num_sms)
    for kib_in_flight in (96, 192):
        chunk = (kib_in_flight << 10) // 4
        for chunks in (8, 16, 32, 128):
            total = chunk * chunks * sms
            window = 2**31 // (chunk * sms) * chunk * sms
            args = (gpu.data, ctypes.c_uint64(window), ctypes.c_uint64(total), chunk, 4, timestamps)
            graph = gpu.graph(lambda args=args: gpu.launch("equal_shares", sms, 32, args, smem=BLOCK_BYTES))  # type: ignore[misc]

            def sampler(graph: Any = graph, total: int = total) -> dict[str, tuple[str, Any]]:
                rows = []
                gpu.replay(graph)
                for _ in range(recorder.replays // 2):
                    gpu.replay(graph)
                    gpu.stream.synchronize()
                    row = timestamps[: 3 * sms].cpu().numpy().reshape(-1, 3)
                    ends = (row[:, 1] - row[:, 0].min()).astype(float)
                    rows.append(ends[numpy.argsort(row[:, 2])])
                times = numpy.array(rows)
                last = times.max(axis=1)
                found: dict[str, tuple[str, Any]] = {
                    f"end_p{q}": ("1", list(numpy.percentile(times, q, axis=1) / last)) for q in QUANTILES
                }
                mean = times.mean(axis=0)
                found["same_sms"] = ("1", [float(numpy.corrcoef(one, mean)[0, 1]) for one in times])
                found["read_rate"] = ("B/s", list(1e9 * total / last))
                return found

            recorder.record(
                "uneven_ends", {"bytes_per_sm": chunk * chunks, "bytes_in_flight_per_sm": 4 * chunk}, sampler
            )


def hbm_contention(gpu: Gpu, recorder: Recorder) -> None:
    """Loads that every SM asks for at once, and a burst of bulk copies that comes before, with or after them.

    Isolates: 42 KB an SM, asked for within a fraction of a microsecond, would be there after 2 us alone; ``last`` and
    ``middle`` are from the start of those loads to the end of the last and the median block. A queue in order gives
    every case in which the burst comes later the time of the loads alone. ``free_sms`` are the blocks whose SM has none
    of the burst. Could mislead: both kernels stand waiting on the SM before they leave, which those of a step do not.
    """
    import numpy

    sms, side = gpu.num_sms, gpu.torch.cuda.Stream()
    loads, burst, counter = gpu.zeros(4 * sms), gpu.zeros(4 * sms), gpu.zeros(4, "int32")
    half = 2**30

    def case(copies: int, burst_blocks: int, in_flight: int, later_ns: int) -> None:
        expected = sms + burst_blocks
        chunk = in_flight // 4
        window = half // (chunk * max(1, burst_blocks)) * chunk * max(1, burst_blocks)

        def body() -> None:
            driver, main = gpu.driver, gpu.stream.cuda_stream
            begun, ended = (gpu.call(driver.cuEventCreate(2)) for _ in range(2))
            gpu.call(driver.cuEventRecord(begun, main))
            args = (gpu.data, copies, counter, expected, max(0, -later_ns) + FIRST_NS, loads)
            gpu.launch("small_copies", sms, THREADS, args, smem=THREADS * copies * 16, carve_out=100)
            if burst_blocks:
                gpu.call(driver.cuStreamWaitEvent(side.cuda_stream, begun, 0))
                many = (
                    gpu.data[half // 4 :], ctypes.c_uint64(window), ctypes.c_uint64(BURST_CYCLES), chunk, 4, counter,
                    expected, max(0, later_ns) + FIRST_NS, burst,
                )  # fmt: skip
                gpu.launch("later_burst", burst_blocks, 32, many, smem=in_flight, stream=side, carve_out=100)
                gpu.call(driver.cuEventRecord(ended, side.cuda_stream))
                gpu.call(driver.cuStreamWaitEvent(main, ended, 0))

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            found: dict[str, list[float]] = {"asked": [], "middle": [], "last": [], "free_sms": [], "together": []}
            for _ in range(recorder.replays // 2):
                counter.zero_()
                gpu.replay(graph)
                gpu.stream.synchronize()
                mine, others = (one.cpu().numpy().reshape(-1, 4) for one in (loads, burst))
                start = mine[:, 0] + max(0, -later_ns) + FIRST_NS
                took = (mine[:, 2] - start) / 1e3
                starts = [*mine[:, 0], *others[:burst_blocks, 0]]
                found["asked"].append(float(numpy.median(mine[:, 1] - start)) / 1e3)
                found["middle"].append(float(numpy.median(took)))
                found["last"].append(float(took.max()))
                free = ~numpy.isin(mine[:, 3], others[:burst_blocks, 3]) if burst_blocks else numpy.ones(sms, bool)
                found["free_sms"].append(float(took[free].max()) if free.any() else 0.0)
                found["together"].append(float(min(starts) == max(starts) and min(starts) > 0))
            return {name: ("1" if name == "together" else "us", values) for name, values in found.items()}

        recorder.record(
            "hbm_contention",
            {
                "bytes_per_sm": THREADS * copies * 16, "burst_blocks": burst_blocks,
                "burst_bytes_in_flight_per_sm": in_flight, "burst_later_ns": later_ns,
            },
            sampler,
        )  # fmt: skip

    kib = 1024
    case(6, 0, 128 * kib, 0)
    for blocks in (sms, sms // 2):
        for later_ns in (-1000, 0, 500, 1000, 2000, 3000):
            case(6, blocks, 128 * kib, later_ns)
    for later_ns in (0, 1000, 2000):
        case(6, sms, 32 * kib, later_ns)
