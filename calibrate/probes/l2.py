"""Rate of L2, and what it keeps."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.gpu import Gpu, span_rate
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// All blocks walk the tiles of a region `iters` times. Tiles change hands from one round to the next unless
// their number is a multiple of the grid.
template <int U> DEV void l2_read(const uint4* src, int tiles, int iters, u64* timestamps) {
  u64 begin = gtime();
  u32 acc = 0, tile = blockIdx.x % tiles;
  for (u64 g = blockIdx.x; g < (u64)tiles * iters; g += gridDim.x) {
    const uint4* p = src + (u64)tile * blockDim.x * U + threadIdx.x;
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) v[u] = load4(p + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
    tile += gridDim.x;
    while (tile >= tiles) tile -= tiles;
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
KERNEL l2_read_4(const uint4* s, int tiles, int iters, u64* t) { l2_read<4>(s, tiles, iters, t); }
KERNEL l2_read_8(const uint4* s, int tiles, int iters, u64* t) { l2_read<8>(s, tiles, iters, t); }

KERNEL sample(const u32* region, int lines, u32* lat, int steps, u32 seed) {
  u32 r = seed ^ (blockIdx.x * 2654435761u);
  for (int i = 0; i < steps; ++i) {
    r = r * 1664525u + 1013904223u;
    const u32* p = region + (u64)((r >> 8) % lines) * 32;
    u64 a = clk();
    depend(load(p));
    lat[blockIdx.x * steps + i] = (u32)(clk() - a);
  }
}
"""



def l2(gpu: Gpu, recorder: Recorder) -> None:
    """L2 read rate to all SMs and to one, and what is left of a region after other traffic.

    Isolates: regions are read before they are timed, so their bytes come from L2; survival looks at single loads, which
    either hit or miss. Could mislead: an SM that returns to its own part needs no second copy in the other half of
    L2, so its rate holds to larger regions than that of data all SMs read (``tiles_change_sm``); 8.7 MB whose parts
    change SM run above every larger region, not explained; hit and miss are told apart at 515 cycles, a gap of few.
    """
    _rates(gpu, recorder)
    _survivals(gpu, recorder)


def _rates(gpu: Gpu, recorder: Recorder) -> None:
    sms, timestamps = gpu.num_sms, gpu.zeros(4096)
    tile = {4: 65536, 8: 131072}

    def rate(unroll: int, tiles: int, blocks: int, probe: str, threads: int = 1024) -> None:
        name, num_bytes = f"l2_read_{unroll}", tiles * tile[unroll] * threads // 1024
        iters = max(4, int(200e-6 * (5e12 if blocks > 1 else 8e10) / num_bytes))

        def body() -> None:
            gpu.launch(name, blocks, threads, (gpu.data, tiles, 3, timestamps))
            gpu.launch(name, blocks, threads, (gpu.data, tiles, iters, timestamps))

        graph = gpu.graph(body)
        recorder.record(
            probe,
            {
                "region_bytes": num_bytes,
                "loads": unroll,
                "threads": threads,
                "blocks": blocks,
                "tiles_change_sm": bool(tiles % blocks),
            },
            lambda: {
                "read_rate": (
                    "B/s",
                    span_rate(gpu, graph, timestamps, blocks, num_bytes * iters, recorder.replays),
                )
            },
        )

    for k in (1, 2, 3, 4, 5, 6):
        rate(4, k * sms, sms, "l2_read")
    for mib in (8, 16, 24, 30, 36, 40, 44, 48, 56, 64, 80):
        rate(4, mib * 16 + 5, sms, "l2_read")
    for mib in (16, 30, 40, 48):
        rate(4, mib * 16 + 5, 2 * sms, "l2_read")
    for mib in (1, 8):
        for unroll, threads in ((4, 256), (4, 512), (4, 1024), (8, 1024)):
            rate(unroll, (mib << 20) // (unroll * threads * 16), 1, "l2_read_one_sm", threads)


def _survivals(gpu: Gpu, recorder: Recorder) -> None:
    sms, timestamps, lat = gpu.num_sms, gpu.zeros(4096), gpu.zeros(1 << 14, "int32")
    steps = 24

    def survival(name: str, region_mib: int, streamed_mib: int, reads: int) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            kept, hits = [], []
            for trial in range(3 if recorder.quick else 10):
                # Clean start, then the region, then other traffic, from places not read for long.
                at = (64 + (trial * 131 + streamed_mib * 7) % 1500) << 18
                sweep = ctypes.c_uint64((160 << 20) // 16)
                gpu.launch("stream_loads_4", sms, 512, (gpu.data[at : at + 1], sweep, timestamps))
                gpu.launch("l2_read_4", sms, 1024, (gpu.data, region_mib * 16, reads, timestamps))
                if streamed_mib:
                    other = at + (170 << 18)
                    count = ctypes.c_uint64((streamed_mib << 20) // 16)
                    gpu.launch(name, sms, 512, (gpu.data[other : other + 1], count, timestamps))
                gpu.launch("sample", sms, 1, (gpu.data, region_mib * 8192, lat, steps, 977 * trial + 13))
                readings = lat[: sms * steps].cpu().numpy()
                kept.append(float((readings < 515).mean()))  # L2 far ends near 500, HBM begins near 530
                hits.append(readings)
            return {"kept": ("1", kept), "load": ("cycle", hits)}

        parameters = {
            "region_mib": region_mib,
            "region_reads": reads,
            "streamed_mib": streamed_mib,
            "evict_first": name == "stream_evict_first",
        }
        recorder.record("l2_survival", parameters, sampler)

    for region_mib in (8, 16, 32, 40):
        for streamed_mib in (0, 8, 16, 24, 28, 32, 36, 40, 48, 60):
            survival("stream_loads_4", region_mib, streamed_mib, 2)
    for streamed_mib in (0, 16, 24, 32, 40, 48, 60):
        survival("stream_loads_4", 16, streamed_mib, 1)
    for region_mib, streamed_mib in ((16, 0), (16, 40), (16, 120), (32, 40), (32, 120)):
        survival("stream_evict_first", region_mib, streamed_mib, 1)
