"""Machine code that runs once: what a launch pays where its SMs, or L2, do not hold it."""

from __future__ import annotations

import ctypes

from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

LINE_BYTES = 32  # two instructions of 16 bytes
SIZES_KIB = (2, 4, 8, 16, 32)
OTHER_KIB = 192  # more than the instruction caches of an SM hold
FLUSH_BYTES = 96 << 20
THREADS = (32, 256)


def _straight(kib: int, seed: int) -> str:
    """Lines of two instructions each, which cannot be made one, in four chains."""
    lines = []
    for number in range(kib * 1024 // LINE_BYTES):
        value = f"a{number % 4}"
        lines.append(f"{value} = ({value} ^ {7919 * number + seed}) * {2 * number + 3 + 4 * seed};")
    return "\n".join(lines)


def _kernel(kib: int, seed: int) -> str:
    return (
        f"KERNEL straight_code_{kib}(u32* out, u64* timestamps) {{\n"
        "  u32 a0 = threadIdx.x, a1 = (u32)clk(), a2 = blockIdx.x, a3 = a0 ^ a1;  // nothing that a compiler knows\n"
        "  __syncthreads();\n  u64 from = clk();\n"
        f"{_straight(kib, seed)}\n"
        "  *(volatile u32*)(out + blockIdx.x * blockDim.x + threadIdx.x) = a0 ^ a1 ^ a2 ^ a3;\n"
        "  u64 to = clk();\n  if (threadIdx.x == 0) timestamps[blockIdx.x] = to - from;\n}\n"
    )


SOURCE = (
    "".join(_kernel(kib, 11 + place) for place, kib in enumerate((*SIZES_KIB, OTHER_KIB)))
    + r"""
// Reads `count` times 16 bytes, in a loop.
KERNEL read_through(const uint4* data, u64 count, u32* out) {
  u64 step = (u64)gridDim.x * blockDim.x;
  u32 acc = 0;
#pragma unroll 1
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) acc ^= fold(load4(data + i));
  if (acc == 0xfedcba98) *out = acc;
}
"""
)

STATES = {"warm": (False, False), "in_l2": (True, False), "in_hbm": (True, True)}


def cold_code(gpu: Gpu, recorder: Recorder) -> None:
    """Cycles of straight code of 2 to 32 KB that runs once a launch, by where it was before.

    ``warm``: a launch of the same kernel ended just before. ``in_l2``: a launch with 192 KB of other code came between.
    ``in_hbm``: and one that read 96 MB. ``run`` is the median over SMs, ``slowest`` the largest.

    Isolates: clocks of one SM around code that needs nothing but itself, all of it in registers; the difference to
    ``warm`` is the fetching. Could mislead: code without branches is what a fetcher does best; eight warps run the same
    code side by side, so the first of them pays for all; in a step the fetch also queues behind data on its way.
    """
    timestamps, out, sms = gpu.zeros(gpu.num_sms), gpu.zeros(256 * gpu.num_sms, "int32"), gpu.num_sms
    count = ctypes.c_uint64(FLUSH_BYTES // 16)

    def case(kib: int, threads: int, state: str) -> None:
        other, flushed = STATES[state]

        def body() -> None:
            gpu.launch(f"straight_code_{kib}", sms, threads, (out, timestamps))
            if other:
                gpu.launch(f"straight_code_{OTHER_KIB}", sms, 128, (out, timestamps))
            if flushed:
                gpu.launch("read_through", 8 * sms, 256, (gpu.data, count, out))
            gpu.launch(f"straight_code_{kib}", sms, threads, (out, timestamps))

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, list[float]]]:
            run, slowest = [], []
            gpu.replay(graph)
            for _ in range(recorder.replays // 2):
                gpu.replay(graph)
                gpu.stream.synchronize()
                cycles = timestamps.cpu().numpy()
                run.append(float(sorted(cycles)[sms // 2]))
                slowest.append(float(cycles.max()))
            return {"run": ("cycle", run), "slowest": ("cycle", slowest)}

        recorder.record("cold_code", {"code_kib": kib, "threads": threads, "state": state}, sampler)

    for threads in THREADS:
        for kib in SIZES_KIB:
            for state in STATES:
                case(kib, threads, state)
