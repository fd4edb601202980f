"""Loads into registers against what the carve-out leaves of an SM's memory as L1."""

from __future__ import annotations

import ctypes

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu, span_rate
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Every warp but the last streams, with U loads of 16 bytes a thread on their way. The last one chases a ring of words
// in L2 meanwhile, one trip after the other, and records the cycles of all and whether the others still streamed then.
// No shared memory: with some, the driver gives all of it whatever the wish.
template <int U> DEV void loads_and_trips(const uint4* src, u64 count, const u32* ring, int trips, u64* stamps) {
  u32 threads = blockDim.x - 32;
  u32* ended = (u32*)(stamps + 4 * gridDim.x) + 32 * blockIdx.x;
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
    if (threadIdx.x == 0) { stamps[4 * blockIdx.x] = begin; stamps[4 * blockIdx.x + 1] = gtime(); }
  } else if (threadIdx.x == threads && trips) {
    u64 until = clk() + 8000;  // the stream has settled
    while (clk() < until);
    u32 at = blockIdx.x * 64;
    u64 from = clk();
#pragma unroll 1
    for (int i = 0; i < trips; ++i) at = load(ring + at);
    depend(at);
    u64 to = clk();
    stamps[4 * blockIdx.x + 2] = to - from;
    stamps[4 * blockIdx.x + 3] = load(ended) == 0;
  }
}
#define LOADS_AND_TRIPS(U) extern "C" __global__ void __launch_bounds__(544, 1) loads_and_trips_##U( \
    const uint4* s, u64 n, const u32* r, int k, u64* t) { loads_and_trips<U>(s, n, r, k, t); }
LOADS_AND_TRIPS(4) LOADS_AND_TRIPS(8) LOADS_AND_TRIPS(16)

// A warp's tile is eight rows of 512 bytes, read by eight loads of 512 bytes: each a whole row's, or, as operands of
// mma.sync are, 64 bytes of every row. FORM 2: those, and each brings the rest of its line to L2.
template <int FORM> DEV void tiles(const char* src, u64 count, int row_bytes, u64* stamps) {
  u64 begin = gtime(), warps = gridDim.x * (blockDim.x >> 5);
  u32 lane = threadIdx.x & 31, acc = 0, across = row_bytes >> 9;
  for (u64 tile = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); tile < count; tile += warps) {
    const char* at = src + tile / across * 8 * row_bytes + tile % across * 512;
    at += FORM ? (u64)(lane >> 2) * row_bytes + (lane & 3) * 16 : lane * 16;
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) {
      const char* p = at + (FORM ? u * 64 : (u64)u * row_bytes);
      if (FORM == 2)
        asm volatile("ld.global.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(p) : "memory");
      else
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[u].x), "=r"(v[u].y), "=r"(v[u].z), "=r"(v[u].w) : "l"(p) : "memory");
    }
#pragma unroll
    for (int u = 0; u < 8; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { stamps[2 * blockIdx.x] = begin; stamps[2 * blockIdx.x + 1] = gtime(); }
}
#define TILES(F) KERNEL tiles_##F(const char* s, u64 n, int b, u64* t) { tiles<F>(s, n, b, t); }
TILES(0) TILES(1) TILES(2)
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
    stamps = gpu.zeros(20 * sms)
    words = 64 * sms
    ring = gpu.zeros(words, "int32")
    ring.copy_((gpu.torch.arange(words, device="cuda") + 32 * 97) % words)  # a line and more from word to word
    hz = Clocks(gpu).hz

    def case(blocks: int, loads: int, carve_out: int) -> None:
        batch = THREADS * loads * 16
        count = blocks * (8 << 20) // batch * batch // 16
        args = (gpu.data, ctypes.c_uint64(count), ring, TRIPS, stamps)
        graph = gpu.graph(
            lambda: gpu.launch(f"loads_and_trips_{loads}", blocks, THREADS + 32, args, carve_out=carve_out)
        )

        def sampler() -> dict[str, tuple[str, list[float]]]:
            gpu.replay(graph)
            rates, trips, inside = [], [], []
            for _ in range(recorder.replays // 4):
                stamps.zero_()
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = stamps[: 4 * blocks].cpu().numpy().reshape(-1, 4)
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


def fragments(gpu: Gpu, recorder: Recorder) -> None:
    """Rate of loads that are operands of ``mma.sync``, 64 bytes of each of eight rows, beside loads of whole rows.

    Isolates: the same bytes by as many loads, and only which of them a load names differs; 16 SMs leave HBM free, so the
    rate is that of an SM's loads. A fragment's two halves of a line are asked for one after the other, so that the
    second one may find the line in L1 or on its way. Could mislead: eight loads a warp are in flight and then waited
    for, where kernels ask for all they need.
    """
    sms, row_bytes, threads = gpu.num_sms, 4096, 512
    stamps = gpu.zeros(2 * sms)
    for blocks in (16, sms):
        for form, name in enumerate(("rows", "fragments", "fragments, whole lines to L2")):
            for carve_out in (60, 100):
                count = blocks * (8 << 20) // 4096
                args = (gpu.data, ctypes.c_uint64(count), row_bytes, stamps)
                graph = gpu.graph(
                    lambda args=args, form=form, blocks=blocks, carve_out=carve_out: gpu.launch(  # type: ignore[misc]
                        f"tiles_{form}", blocks, threads, args, carve_out=carve_out
                    )
                )
                recorder.record(
                    "fragments",
                    {"blocks": blocks, "loads": name, "carve_out": carve_out},
                    lambda graph=graph, blocks=blocks, count=count: {  # type: ignore[misc]
                        "read_rate": ("B/s", span_rate(gpu, graph, stamps, blocks, 4096 * count, recorder.replays // 4))
                    },
                )
