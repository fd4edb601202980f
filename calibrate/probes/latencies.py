"""Latency of L2 and HBM, idle and beside a stream."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL write_chain(const u32* next, u32* base, int lines) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < lines) base[(u64)i * 32] = next[i];
}

// A pointer chase by the block on SM `sm`; first with a clock reading around each load, then without.
KERNEL chase(const u32* base, u32* state, u32* lat, int steps, int passes, int sm, u64 warm) {
  __shared__ u32 samples[4096];
  if (smid() != sm) return;
  u32 acc = 0;
  for (int r = 0; r < 2; ++r)
    for (u64 i = threadIdx.x; i < warm; i += blockDim.x) acc ^= fold(load4((const uint4*)base + i));
  depend(acc);
  __syncthreads();
  if (threadIdx.x) return;
  u32 start = state[0], line = start;
  for (int p = 0; p < passes; ++p) {
    line = start;
    for (int i = 0; i < steps; ++i) {
      u64 a = clk();
      line = load(base + (u64)line * 32);
      depend(line);
      samples[i] = (u32)(clk() - a);
    }
    for (int i = 0; i < steps; ++i) lat[p * steps + i] = samples[i];
  }
  u64 a = clk();
  for (int i = 0; i < steps; ++i) line = load(base + (u64)line * 32);
  depend(line);
  lat[passes * steps] = (u32)(clk() - a);
  state[0] = line;
}

// Blocks 0 and 1 measure while the others stream (total = 0: nobody does). mode 0: block 0 loads a line that
// is not in L2 and then the same line again. mode 1: blocks 0 and 1 hand over 16 bytes through a flag in turn.
KERNEL loaded(const char* src, u64 span, u64 total, int chunk, int stages, const u32* probe, u32 lines,
              u32* lat, int steps, u32* flags, u64* timestamps, int mode) {
  if (threadIdx.x) return;
  __shared__ u32 samples[1024];
  u64 begin = gtime();
  if (blockIdx.x > 1) {
    if (total) stream(src, span, total, chunk, stages, blockIdx.x - 2, gridDim.x - 2);
  } else {
    while (gtime() - begin < 15000);
    u32 r = (u32)begin, *mine = flags + 64 * blockIdx.x, *other = flags + 64 * (1 - blockIdx.x);
    if (mode == 0 && blockIdx.x == 0) {
      for (int i = 0; i < steps; ++i) {
        r = r * 1664525u + 1013904223u;
        const u32* p = probe + (u64)((r >> 8) % lines) * 32;
        u64 a = clk();
        u32 v = load(p);
        depend(v);
        u64 b = clk();
        depend(load(p + (v >> 31)));
        samples[2 * i] = (u32)(b - a);
        samples[2 * i + 1] = (u32)(clk() - b);
      }
      for (int i = 0; i < 2 * steps; ++i) lat[i] = samples[i];
    } else if (mode == 1) {
      uint4 data = make_uint4(0, 0, 0, 0);
      for (int i = 1; i <= steps; ++i) {
        u64 a = clk();
        if (blockIdx.x == 0) { *(uint4*)(mine + 32) = data; store_release(mine, i); }
        while (load_acquire(other) != i);
        data = load4((const uint4*)(other + 32));
        depend(data.x);
        data.x = (data.x + 1) & 0xffff;
        if (blockIdx.x == 1) { *(uint4*)(mine + 32) = data; store_release(mine, i); }
        else samples[i - 1] = (u32)(clk() - a);
      }
      if (blockIdx.x == 0) for (int i = 0; i < steps; ++i) lat[i] = samples[i];
    }
  }
  timestamps[2 * blockIdx.x] = begin;
  timestamps[2 * blockIdx.x + 1] = gtime();
}
"""



def cycle(gpu: Gpu, lines: int) -> Any:
    """A random permutation of ``lines`` that is one cycle: next[i]."""
    torch = gpu.torch
    order = torch.randperm(lines, device="cuda")
    following = torch.empty(lines, dtype=torch.int32, device="cuda")
    following[order] = order.roll(-1).to(torch.int32)
    return following


def latencies(gpu: Gpu, recorder: Recorder) -> None:
    """Pointer chases of one thread in L2 and in HBM.

    Isolates: each load's address comes from the load before, so nothing overlaps; a mean over the chain holds no clock
    reading, single loads (timestamped, about 20 cycles more) give the two groups of near and far lines. Could mislead:
    a mean over near and far is neither; lines that others wrote are read more slowly the first time; regions above a
    few hundred MiB add page-table walks; one thread's load ends with its own line, where a block waits for the slowest
    of its lines.
    """
    import numpy

    torch, sms = gpu.torch, gpu.num_sms
    arena = torch.randint(0, 2**31 - 1, (2**28,), dtype=torch.int32, device="cuda")  # 1 GiB
    state, lat, timestamps = gpu.zeros(4, "int32"), gpu.zeros(1 << 16, "int32"), gpu.zeros(4096)

    def chase(steps: int, passes: int, sm: int, warm: int) -> None:
        args = (arena, state, lat, steps, passes, sm, ctypes.c_uint64(warm))
        gpu.launch("chase", sms, 256, args, smem=BLOCK_BYTES - 20_000)

    # Lines written by all SMs just before, then read twice by one SM. Which of them are far depends on the place.
    lines, steps = 2**15, 2048
    following = cycle(gpu, lines)
    for sm in (0, 1, sms // 2, sms - 1):

        def written(sm: int = sm) -> dict[str, tuple[str, Any]]:
            first, second, plain = [], [], []
            for _ in range(recorder.replays // 4):
                gpu.launch("write_chain", sms, 256, (following, arena, lines))
                chase(steps, 2, sm, 0)
                readings = lat[: 2 * steps + 1].cpu().numpy()
                first.append(readings[:steps])
                second.append(readings[steps:-1])
                plain.append(readings[-1] / steps)
            return {
                "first_read_after_write": ("cycle", first),
                "first_read_near_decile": ("cycle", [numpy.percentile(f, 10) for f in first]),
                "first_read_far_decile": ("cycle", [numpy.percentile(f, 90) for f in first]),
                "first_read_mean": ("cycle", [f.mean() for f in first]),
                "first_read_share_above_400": ("1", [(f > 400).mean() for f in first]),
                "second_read": ("cycle", second),
                "mean_without_stamps": ("cycle", plain),
            }

        recorder.record("l2_chase_written", {"lines": lines, "sm": sm}, written)
    for mib in (1, 4, 8, 16, 24, 32, 40, 48, 56):
        lines = mib * 8192
        arena[: lines * 32 : 32] = cycle(gpu, lines)
        state.zero_()
        # Lines that were written in part are read slowly the first time: write them back.
        gpu.launch("stream_loads_4", sms, 512, (gpu.data, ctypes.c_uint64(2**28 // 16), timestamps))

        def resident(lines: int = lines) -> dict[str, tuple[str, Any]]:
            single, plain = [], []
            for _ in range(max(4, recorder.replays // 10)):
                chase(2048, 1, 0, lines * 8)
                readings = lat[:2049].cpu().numpy()
                single.append(readings[:-1])
                plain.append(readings[-1] / 2048)
            return {"load": ("cycle", single), "mean_without_stamps": ("cycle", plain)}

        recorder.record("l2_chase_resident", {"region_mib": mib}, resident)
    for mib in (128, 1024):
        lines = mib * 8192
        arena[: lines * 32 : 32] = cycle(gpu, lines)
        state.zero_()

        def cold() -> dict[str, tuple[str, Any]]:
            single, plain = [], []
            for _ in range(max(4, recorder.replays // 10)):
                gpu.launch("stream_loads_4", sms, 512, (gpu.data, ctypes.c_uint64(2**28 // 16), timestamps))
                chase(2048, 1, 0, 0)
                readings = lat[:2049].cpu().numpy()
                single.append(readings[:-1])
                plain.append(readings[-1] / 2048)
            return {"load": ("cycle", single), "mean_without_stamps": ("cycle", plain)}

        recorder.record("hbm_chase", {"region_mib": mib}, cold)


def beside_stream(gpu: Gpu, recorder: Recorder) -> None:
    """Single loads of one thread, and hand-over of a value through a flag, while the other SMs stream or do nothing.

    Isolates: a load of a line that is not in L2, then of the same line, with no other work on their SM. Could mislead:
    beside a stream the queue decides, so a value belongs to its bytes in flight; one thread's load ends with its own
    line, where a block waits for the slowest of its lines; a stream refills its queue at once, the ring of a kernel
    that waits does not.
    """
    blocks = gpu.num_sms
    lat, timestamps, flags = gpu.zeros(1 << 16, "int32"), gpu.zeros(4096), gpu.zeros(256, "int32")
    arena = gpu.torch.randint(0, 2**31 - 1, (2**24,), dtype=gpu.torch.int32, device="cuda")  # 64 MiB
    # What was written just now would be read from L2.
    gpu.launch("stream_loads_4", blocks, 512, (gpu.data, ctypes.c_uint64(2**28 // 16), timestamps))

    def beside(mode: int, in_flight: int) -> None:
        steps, stages = (60, 4) if mode else (150, 4)
        chunk = in_flight // stages or 4096
        window = 2**31 // (chunk * (blocks - 2)) * chunk * (blocks - 2)
        streamed = window if in_flight else 0
        args = (
            gpu.data,
            ctypes.c_uint64(window),
            ctypes.c_uint64(streamed),
            chunk,
            stages,
            arena,
            2**19,
            lat,
        )

        def sampler() -> dict[str, tuple[str, Any]]:
            first, second, turns, rates, inside = [], [], [], [], []
            for _ in range(recorder.replays // 3):
                flags.zero_()
                gpu.launch("loaded", blocks, 32, (*args, steps, flags, timestamps, mode), smem=BLOCK_BYTES)
                readings = lat[: 2 * steps].cpu().numpy()
                times = timestamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
                first.append(readings[0::2])
                second.append(readings[1::2])
                turns.append(readings[:steps] / 2)
                rates.append(1e9 * streamed / float(times[2:, 1].max() - times[2:, 0].min() + 1))
                inside.append(float(times[0, 1] < times[2:, 1].max()))
            found: dict[str, tuple[str, Any]] = (
                {"one_handoff": ("cycle", turns)}
                if mode
                else {
                    "not_in_l2": ("cycle", first),
                    "in_l2": ("cycle", second),
                    "mean_in_l2": ("cycle", [row.mean() for row in second]),
                }
            )
            if streamed:
                found |= {"stream_rate": ("B/s", rates), "ended_inside_stream": ("1", inside)}
            return found

        name = "handoff_beside_stream" if mode else "loads_beside_stream"
        recorder.record(name, {"stream_bytes_in_flight_per_sm": in_flight, "region_mib": 64}, sampler)

    for kib in (0, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192):
        beside(0, kib * 1024)
    for kib in (0, 16, 32, 64, 128):
        beside(1, kib * 1024)
