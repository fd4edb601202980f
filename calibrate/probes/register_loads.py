"""Loads into registers against what the carve-out leaves of an SM's memory as L1."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Every warp but the last streams, with U loads of 16 bytes a thread on their way. The last one chases a ring of words
// in L2 meanwhile, one trip after the other, and records the cycles of all and whether the others still streamed then.
// No shared memory: with some, the driver gives all of it whatever the wish.
template <int U> DEV void loads_and_trips(const uint4* src, u64 count, const u32* ring, int trips, u64* timestamps) {
  u32 threads = blockDim.x - 32;
  u32* ended = (u32*)(timestamps + 4 * gridDim.x) + 32 * blockIdx.x;
  if (threadIdx.x < threads) {
    u64 begin = gtime(), batch = (u64)threads * U;
    u32 acc = 0;
    for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
      uint4 v[U];
#pragma unroll
      for (int u = 0; u < U; ++u) v[u] = load4(src + i + u * threads);
#pragma unroll
      for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
    }
    depend(acc);
    if ((threadIdx.x & 31) == 0) atomicAdd(ended, 1u);
    if (threadIdx.x == 0) { timestamps[4 * blockIdx.x] = begin; timestamps[4 * blockIdx.x + 1] = gtime(); }
  } else if (threadIdx.x == threads && trips) {
    u64 until = clk() + 8000;  // the stream has settled
    while (clk() < until);
    u32 at = blockIdx.x * 64;
    u64 from = clk();
#pragma unroll 1
    for (int i = 0; i < trips; ++i) at = load(ring + at);
    depend(at);
    u64 to = clk();
    timestamps[4 * blockIdx.x + 2] = to - from;
    timestamps[4 * blockIdx.x + 3] = load(ended) == 0;
  }
}
#define LOADS_AND_TRIPS(U) extern "C" __global__ void __launch_bounds__(544, 1) loads_and_trips_##U( \
    const uint4* s, u64 n, const u32* r, int k, u64* t) { loads_and_trips<U>(s, n, r, k, t); }
LOADS_AND_TRIPS(4) LOADS_AND_TRIPS(8) LOADS_AND_TRIPS(16)

// Eight warps ask for U loads of 512 bytes each at once. FORM 0: a row each. FORM 1: as operands of mma.sync are, 64
// bytes of each of eight rows, the other half of each line by the next load. FORM 2: those, and each brings the rest of
// its line to L2.
template <int FORM, int U> DEV void issue_burst(const char* src, u64* timestamps) {
  u32 lane = threadIdx.x & 31, row_bytes = U * 64, acc = 0;
  const char* at = src + ((u64)blockIdx.x * 8 + (threadIdx.x >> 5)) * U * 512;
  at += FORM ? (lane >> 2) * row_bytes + (lane & 3) * 16 : lane * 16;
  u64 begin = gtime();
  uint4 v[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const char* p = at + (FORM ? u * 64 : u * 512);
    if (FORM == 2)
      asm volatile("ld.global.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(p) : "memory");
    else
      asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(p) : "memory");
  }
  u64 asked = gtime();
#pragma unroll
  for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
  depend(acc);
  u64 there = gtime();
  if (lane == 0) {
    u64* s = timestamps + 24 * blockIdx.x + 3 * (threadIdx.x >> 5);
    s[0] = begin; s[1] = asked; s[2] = there;
  }
}
#define ASKED(F) \
  KERNEL asked_##F(const char* s, u64* t) { issue_burst<F / 100, F % 100>(s, t); }
ASKED(8) ASKED(16) ASKED(24) ASKED(108) ASKED(116) ASKED(124) ASKED(208) ASKED(216) ASKED(224)

// Holds every SM with the whole of its memory as shared for `spin` cycles and lets the next kernel in at once.
KERNEL carved_for_all(int spin) {
  pdl_trigger();
  u64 from = clk();
  while (clk() - from < spin);
}
// Blocks below `readers` read in four batches, each asked for at once and waited for.
DEV void carved_for_less(const uint4* src, int readers, u64* timestamps) {
  u64 begin = gtime();
  if (blockIdx.x >= readers) return;
  u32 acc = 0;
  for (int round = 0; round < 4; ++round) {
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u)
      v[u] = load4(src + ((u64)(round * readers + blockIdx.x) * 8 + u) * blockDim.x + threadIdx.x);
#pragma unroll
    for (int u = 0; u < 8; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
// Copies: the wish is a setting of the kernel.
#define CARVED(W) extern "C" __global__ void __launch_bounds__(1024, 1) carved_##W( \
    const uint4* s, int r, u64* t) { carved_for_less(s, r, t); }
CARVED(60) CARVED(100)
"""

THREADS = 512
TRIPS = 24


def register_loads(gpu: Gpu, recorder: Recorder) -> None:
    """Rate of plain loads, and trips of another warp of the same SM to L2, by carve-out and bytes in flight.

    Isolates: the same loads with more or less of the SM's memory left as L1; on 16 SMs HBM has plenty left, so a rate
    that the carve-out changes is the SM's. The trips are dependent loads of one thread, of words that only L2 holds
    (``.cg``), beside the stream of its own SM. Could mislead: what the driver makes of a percentage is not reported (it
    rounds up to one of ten sizes, and gives a kernel that uses shared memory all of it); the trips share the SM's load
    unit with sixteen warps that issue whenever they can; on all SMs a trip also queues in front of HBM. ``inside`` is 1
    where every stream outlasted the trips.
    """
    sms = gpu.num_sms
    timestamps = gpu.zeros(20 * sms)
    words = 64 * sms
    ring = gpu.zeros(words, "int32")
    ring.copy_((gpu.torch.arange(words, device="cuda") + 32 * 97) % words)  # a line and more from word to word
    hz = Clocks(gpu).hz

    def case(blocks: int, loads: int, carve_out: int) -> None:
        batch = THREADS * loads * 16
        count = blocks * (8 << 20) // batch * batch // 16
        args = (gpu.data, ctypes.c_uint64(count), ring, TRIPS, timestamps)
        graph = gpu.graph(
            lambda: gpu.launch(f"loads_and_trips_{loads}", blocks, THREADS + 32, args, carve_out=carve_out)
        )

        def sampler() -> dict[str, tuple[str, list[float]]]:
            gpu.replay(graph)
            rates, trips, inside = [], [], []
            for _ in range(recorder.replays // 4):
                timestamps.zero_()
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps[: 4 * blocks].cpu().numpy().reshape(-1, 4)
                span_ns = max(1.0, float(rows[:, 1].max() - rows[:, 0].min()))
                rates.append(1e9 * 16 * count / span_ns)
                trips.append(1e6 * float(rows[:, 2].mean()) / TRIPS / hz)
                inside.append(float(rows[:, 3].min()))
            return {"read_rate": ("B/s", rates), "trip": ("us", trips), "inside": ("1", inside)}

        recorder.record(
            "register_loads", {"blocks": blocks, "bytes_in_flight_per_sm": batch, "carve_out": carve_out}, sampler
        )

    for blocks in (16, sms):
        for loads in (4, 8, 16):
            for carve_out in (0, 50, 75, 100):
                case(blocks, loads, carve_out)


def issue_burst(gpu: Gpu, recorder: Recorder) -> None:
    """What eight warps take to ask for all they need, by whole rows or by operands of ``mma.sync``, and to have it.

    ``asked`` and ``there`` are from a block's first load to the last warp's last one issued and arrived (median over
    SMs). 48 SMs, data in HBM alone.

    Isolates: the same bytes by as many loads, and only which of them a load names differs: 512 bytes in a row, or 64 of
    each of eight rows, where the other half of each line is asked for by the next load. Could mislead: one shot of a
    microsecond on a timer of 32 ns; what a kernel asks for behind it is not among the loads.
    """
    import numpy

    blocks, threads = 48, 256
    timestamps = gpu.zeros(24 * blocks)
    for carve_out in (60, 100):
        for form, name in enumerate(("rows", "fragments", "fragments, whole lines to L2")):
            for loads in (8, 16, 24):
                graph = gpu.graph(
                    lambda form=form, loads=loads, carve_out=carve_out: gpu.launch(  # type: ignore[misc]
                        f"asked_{100 * form + loads}", blocks, threads, (gpu.data, timestamps), carve_out=carve_out
                    )
                )

                def sampler(graph: Any = graph) -> dict[str, tuple[str, Any]]:
                    asked, there = [], []
                    gpu.replay(graph)
                    for _ in range(recorder.replays // 4):
                        evict(gpu)
                        gpu.replay(graph)
                        gpu.stream.synchronize()
                        times = timestamps.cpu().numpy().reshape(blocks, 8, 3)
                        begin = times[:, :, 0].min(axis=1)
                        asked.append(float(numpy.median(times[:, :, 1].max(axis=1) - begin)) / 1e3)
                        there.append(float(numpy.median(times[:, :, 2].max(axis=1) - begin)) / 1e3)
                    return {"asked": ("us", asked), "there": ("us", there)}

                recorder.record(
                    "issue_burst",
                    {"loads": name, "bytes_per_sm": threads * 16 * loads, "carve_out": carve_out},
                    sampler,
                )


def evict(gpu: Gpu) -> None:
    """Fill L2 with other lines than those that probes read first."""
    gpu.data[2**28 : 2**28 + 2**25].fill_(1)


def carve_out_persistence(gpu: Gpu, recorder: Recorder) -> None:
    """Rate of loads of a kernel that wants L1, on SMs that the kernel before it had carved out as shared memory alone.

    ``follows``: whether the second kernel stands waiting when the first one's block leaves an SM (PDL), is launched
    when the first has ended (a plain edge), or runs alone. 16 SMs read 512 KB each, 128 at once, from HBM.

    Isolates: the first kernel does nothing but hold 200 KB an SM for 10 us; what differs is how long the SM is idle in
    between. A rate as with a wish of 100 says that the division was kept. Could mislead: one launch of 512 KB an SM
    holds four trips to HBM, so rates are lower than those of a long stream; only their ratio is of interest.
    """
    sms, readers, threads = gpu.num_sms, 16, 1024
    timestamps = gpu.zeros(2 * sms)
    num_bytes = readers * threads * 16 * 8 * 4
    for wish in (60, 100):
        for held_kib in (0, 48):
            for follows in ("alone", "edge", "pdl"):

                def body(wish: int = wish, held_kib: int = held_kib, follows: str = follows) -> None:
                    if follows != "alone":
                        gpu.launch("carved_for_all", sms, 32, (20_000,), smem=BLOCK_BYTES, carve_out=100)
                    gpu.launch(
                        f"carved_{wish}", sms, threads, (gpu.data, readers, timestamps), smem=held_kib << 10,
                        pdl=follows == "pdl", carve_out=wish,
                    )  # fmt: skip

                graph = gpu.graph(body)

                def sampler(graph: Any = graph) -> dict[str, tuple[str, Any]]:
                    rates = []
                    gpu.replay(graph)
                    for _ in range(recorder.replays // 4):
                        evict(gpu)
                        gpu.replay(graph)
                        gpu.stream.synchronize()
                        times = timestamps[: 2 * readers].cpu().numpy().reshape(-1, 2)
                        rates.append(1e9 * num_bytes / readers / float((times[:, 1] - times[:, 0]).mean()))
                    return {"read_rate": ("B/s", rates)}

                recorder.record(
                    "carve_out_persistence", {"carve_out": wish, "held_kib": held_kib, "follows": follows}, sampler
                )
