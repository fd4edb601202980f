"""Two streams of one GPU that read HBM at once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Waits until `expected` blocks of all kernels are there, at most 200 us. Returns whether they are.
DEV u64 meet(u32* counter, u32 expected) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
  u64 from = gtime();
  while (load_acquire(counter) < expected)
    if (gtime() - from > 200000) return 0;
  return 1;
}
KERNEL share_bulk(const char* src, u64 span, u64 cycles, int chunk, int stages, u32* counter, u32 expected,
                  u64* timestamps) {
  if (threadIdx.x) return;
  u64* s = timestamps + 4 * blockIdx.x;
  s[2] = meet(counter, expected);
  u64 begin = clk();
  s[0] = stream_for(src, span, cycles, chunk, stages, blockIdx.x, gridDim.x);
  s[1] = clk() - begin;
}
// Plain loads in batches of four a thread, as GEMVs make them; a warp counts what it has read in time.
KERNEL share_loads(const uint4* src, u64 span, u64 cycles, u32* counter, u32 expected, u64* timestamps) {
  __shared__ u32 batches, met;
  u64* s = timestamps + 4 * blockIdx.x;
  if (threadIdx.x == 0) { batches = 0; met = (u32)meet(counter, expected); }
  __syncthreads();
  u64 begin = clk(), batch = (u64)blockDim.x * 4, at = blockIdx.x * batch + threadIdx.x, stride = gridDim.x * batch;
  u64 most = span / 16 / stride * stride;
  u32 acc = 0, mine = 0;
  while (true) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; ++u) v[u] = load4(src + at + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < 4; ++u) acc ^= fold(v[u]);
    depend(acc);
    if (clk() - begin >= cycles) break;
    ++mine;
    at += stride;
    if (at >= most) at -= most;
  }
  if ((threadIdx.x & 31) == 0) atomicAdd(&batches, mine);
  __syncthreads();
  if (threadIdx.x == 0) { s[0] = (u64)batches * 32 * 64; s[1] = clk() - begin; s[2] = met; }
}
"""

CYCLES = 200_000  # about 100 us
STAGES = 4


def sharing(gpu: Gpu, recorder: Recorder) -> None:
    """Rate of each of two kernels on two streams that stream from HBM for the same 100 us.

    Isolates: both start when the last block of either is there and stop after as many cycles, so each rate is of the
    time in which both ran; they read different halves of 2 GiB, and nothing is computed. A case with no second kernel
    is the first's rate alone. Max-min sharing gives either its rate alone or the same rate as the other; sharing by
    bytes in flight gives rates in that proportion. Could mislead: the rates of kernels on SMs of their own also depend
    on which GPCs those lie in; bytes that come after the time are not counted (at most what is in flight, below 1 %
    of it); neither kernel ramps up or ends inside, which those of a step do; ``together`` below 1 means that not all
    blocks fitted at once, and the case says nothing.
    """
    sms, side = gpu.num_sms, gpu.torch.cuda.Stream()
    timestamps, counter, half = gpu.zeros(2 * 4096), gpu.zeros(4, "int32"), 2**30

    def launch(number: int, kind: str, blocks: int, in_flight: int, smem: int, expected: int, stream: Any) -> None:
        source, out = gpu.data[number * half // 4 :], timestamps[number * 4096 :]
        if kind == "bulk":
            chunk = in_flight // STAGES
            window = half // (chunk * blocks) * chunk * blocks
            args: tuple[Any, ...] = (
                source, ctypes.c_uint64(window), ctypes.c_uint64(CYCLES), chunk, STAGES, counter, expected, out,
            )  # fmt: skip
            gpu.launch("share_bulk", blocks, 32, args, smem=smem, stream=stream, carve_out=100)
        else:
            args = (source, ctypes.c_uint64(half), ctypes.c_uint64(CYCLES), counter, expected, out)
            gpu.launch("share_loads", blocks, in_flight // 64, args, smem=smem, stream=stream, carve_out=100)

    def case(
        first: tuple[str, int, int], second: tuple[str, int, int] | None = None, *, same_sms: bool = False
    ) -> None:
        both = [first] if second is None else [first, second]
        expected = sum(blocks for _, blocks, _ in both)

        def smem(kind: str, in_flight: int) -> int:
            if not same_sms:
                return BLOCK_BYTES
            return in_flight if kind == "bulk" else 0

        def body() -> None:
            driver, main = gpu.driver, gpu.stream.cuda_stream
            begun, ended = (gpu.call(driver.cuEventCreate(2)) for _ in range(2))  # without timing
            gpu.call(driver.cuEventRecord(begun, main))
            for number, (kind, blocks, in_flight) in enumerate(both):
                stream = side if number else gpu.stream
                if number:
                    gpu.call(driver.cuStreamWaitEvent(side.cuda_stream, begun, 0))
                launch(number, kind, blocks, in_flight, smem(kind, in_flight), expected, stream)
            if second is not None:
                gpu.call(driver.cuEventRecord(ended, side.cuda_stream))
                gpu.call(driver.cuStreamWaitEvent(main, ended, 0))

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            found: dict[str, tuple[str, Any]] = {}
            for _ in range(recorder.replays // 2):
                counter.zero_()
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps.cpu().numpy().reshape(2, -1, 4)
                together = 1.0
                for number, (_, blocks, _) in enumerate(both):
                    row = rows[number, :blocks]
                    rate = float((row[:, 0] / CYCLES).sum()) * hz
                    found.setdefault(("first_rate", "second_rate")[number], ("B/s", []))[1].append(rate)
                    together = min(together, float(row[:, 2].min()))
                found.setdefault("together", ("1", []))[1].append(together)
            return found

        parameters: dict[str, Any] = {"same_sms": same_sms}
        for name, (kind, blocks, in_flight) in zip(("first", "second"), both, strict=False):
            parameters |= {f"{name}_kind": kind, f"{name}_blocks": blocks, f"{name}_bytes_in_flight_per_sm": in_flight}
        recorder.record("shared_hbm", parameters, sampler)

    hz = Clocks(gpu).hz
    for take in _pairs(case, sms):
        take()


def _pairs(case: Callable[..., None], sms: int) -> Iterator[Callable[[], None]]:
    """Kernels by themselves and in pairs, each as a case to take."""
    kib = 1024
    most = sms // 2
    for blocks in (8, 32, most):
        yield partial(case, ("bulk", blocks, 128 * kib))
    for in_flight in (16, 32, 64):
        yield partial(case, ("bulk", most, in_flight * kib))
    yield partial(case, ("bulk", sms, 96 * kib))
    yield partial(case, ("bulk", sms, 16 * kib))
    yield partial(case, ("loads", sms, 64 * kib))
    for in_flight in (128, 64, 32, 16):
        yield partial(case, ("bulk", most, 128 * kib), ("bulk", most, in_flight * kib))
    for blocks in (8, 32):
        yield partial(case, ("bulk", sms - blocks, 128 * kib), ("bulk", blocks, 128 * kib))
        yield partial(case, ("bulk", sms - blocks, 32 * kib), ("bulk", blocks, 128 * kib))
    for in_flight in (96, 48, 16):
        yield partial(case, ("bulk", sms, 96 * kib), ("bulk", sms, in_flight * kib), same_sms=True)
    yield partial(case, ("bulk", sms, 96 * kib), ("loads", sms, 64 * kib), same_sms=True)
    yield partial(case, ("bulk", sms, 96 * kib), ("loads", sms, 16 * kib), same_sms=True)
    yield partial(case, ("loads", sms, 64 * kib), ("loads", sms, 64 * kib), same_sms=True)
    yield partial(case, ("bulk", most, 128 * kib), ("loads", most, 64 * kib))
