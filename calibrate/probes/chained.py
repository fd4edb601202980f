"""Kernels that wait for one another in a chain of programmatic launches: what each thing they do adds to the chain."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Behind its wait: loads in series of words that the kernel before stored, each warp's line another one; sums over
// warps in series, and barriers at which every warp leaves a number and each thread adds up those of all; then the
// first `stored` threads store.
template <int LOADS, int SUMS, int MEETINGS> DEV void chained(const u32* in, u32* out, int stored) {
  __shared__ float part[2][16];
  pdl_trigger();
  pdl_wait();
  u32 value = 0;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) value = load(in + i * 512 + threadIdx.x + value);
  float sum = value;
#pragma unroll
  for (int i = 0; i < SUMS; ++i)
#pragma unroll
    for (int offset = 16; offset; offset >>= 1) sum += __shfl_xor_sync(~0u, sum, offset);
#pragma unroll
  for (int i = 0; i < MEETINGS; ++i) {
    if ((threadIdx.x & 31) == 0) part[i & 1][threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int warp = 0; warp < 8; ++warp) sum += part[i & 1][warp];
  }
  if (threadIdx.x < stored) out[blockIdx.x * stored + threadIdx.x] = sum != 0 ? value : 0;
}
#define CHAINED(L, S, M) \
  KERNEL chained_##L##_##S##_##M(const u32* in, u32* out, int stored) { chained<L, S, M>(in, out, stored); }
CHAINED(1, 0, 0) CHAINED(2, 0, 0) CHAINED(3, 0, 0) CHAINED(4, 0, 0) CHAINED(1, 4, 0) CHAINED(1, 8, 0)
CHAINED(1, 0, 1) CHAINED(1, 0, 4) CHAINED(1, 0, 8)

// All of a block asks at once for the same `bytes` that all other blocks ask for: by plain loads or copies of whole
// rows of 512 bytes by a warp, or by copies of 64 bytes of each of eight rows, as a tensor core's operand has them.
// Where `written`, blocks store the same region for the next kernel; else nobody has since the first.
KERNEL same_input(const char* in, char* out, int bytes, int form, int written) {
  extern __shared__ __align__(128) char room[];
  pdl_trigger();
  u32 to = (u32)__cvta_generic_to_shared(room) + threadIdx.x * 16;
  u32 at = threadIdx.x * 16, step = 4096, sum = 0;
  if (form == 2) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    at = (lane >> 2) * (bytes / 8) + warp * 64 + (lane & 3) * 16;
    step = 512;
  }
  pdl_wait();
  if (form == 0) {
    uint4 v[14];
#pragma unroll
    for (int i = 0; i < 14; ++i)
      if (i * 4096 < bytes)
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[i].x), "=r"(v[i].y), "=r"(v[i].z), "=r"(v[i].w) : "l"(in + at + i * 4096));
#pragma unroll
    for (int i = 0; i < 14; ++i) if (i * 4096 < bytes) sum |= fold(v[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 14; ++i)
      if (i * 4096 < bytes)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(to + i * 4096), "l"(in + at + i * step) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
  }
  __syncthreads();
  u32 mine = (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  if (written ? mine < bytes : threadIdx.x < 8) *(uint4*)(out + mine) = make_uint4(sum, sum, sum, sum);
}
"""

SHORT, LONG = 200, 600
FORMS = ("loads", "copies", "fragments")


def _period(gpu: Gpu, recorder: Recorder, launch: Any) -> Any:
    """Sampler of the period of a chain: ``launch(number)`` puts one kernel into a graph."""
    import numpy

    def body(num: int) -> None:
        for number in range(num):
            launch(number)

    short, long = (gpu.graph(lambda num=num: body(num)) for num in (SHORT, LONG))  # type: ignore[misc]

    def sampler() -> dict[str, tuple[str, Any]]:
        gpu.event_us(short, 5)
        base = numpy.median(gpu.event_us(short, recorder.replays))
        return {"period": ("us", (numpy.array(gpu.event_us(long, recorder.replays)) - base) / (LONG - SHORT))}

    return sampler


def chained(gpu: Gpu, recorder: Recorder) -> None:
    """Period of a chain of kernels, each let in early and waiting for the one before, by what it does after its wait.

    Isolates: the code ran just before and is held, the next kernel's blocks stand waiting on the SMs, so a period is
    from one end of a wait to the next: what is done, stores and end of the blocks, and the release. Differences between
    cases are what one more load, sum over a warp or meeting of eight warps takes where a kernel does it once. Could
    mislead: a kernel that does nothing is bound by its launch (the period then does not fall any more); all blocks load
    the same lines.
    """
    buffers = [gpu.zeros(1 << 20, "int32") for _ in range(2)]

    def case(blocks: int, threads: int, loads: int, sums: int = 0, barriers: int = 0, stored: int = 32) -> None:
        def launch(number: int) -> None:
            args = (buffers[number % 2], buffers[1 - number % 2], stored)
            gpu.launch(f"chained_{loads}_{sums}_{barriers}", blocks, threads, args, pdl=True)

        recorder.record(
            "chained",
            {
                "blocks": blocks, "threads": threads, "loads": loads, "warp_sums": sums, "barriers": barriers,
                "stored_bytes_per_block": 4 * stored,
            },
            _period(gpu, recorder, launch),
        )  # fmt: skip

    sms = gpu.num_sms
    for blocks, threads in ((sms, 256), (sms, 128), (sms, 448), (8, 256), (56, 256), (2 * sms, 256)):
        for loads in (1, 2, 3):
            case(blocks, threads, loads)
    case(sms, 256, 4)
    for sums in (4, 8):
        case(sms, 256, 1, sums=sums)
        case(sms, 448, 1, sums=sums)
    for barriers in (1, 4, 8):
        case(sms, 256, 1, barriers=barriers)
    for stored in (8, 256):
        case(sms, 256, 1, stored=stored)


def same_input(gpu: Gpu, recorder: Recorder) -> None:
    """Period of a chain of kernels whose blocks all load one input at the same moment, after their wait.

    Isolates: what many SMs asking for the same lines at once costs, by bytes, blocks, how a warp's request lies, and
    whether the lines were just stored. Less ``chained`` with one load, a period is what the input takes. Could mislead:
    where the region is written, its first blocks store it, a kernel's output is stored by those that made it.
    """
    buffers = [gpu.zeros(1 << 21, "int32") for _ in range(2)]

    def case(blocks: int, kib: int, form: str, written: bool) -> None:
        def launch(number: int) -> None:
            source, target = (buffers[number % 2], buffers[1 - number % 2]) if written else (buffers[0], buffers[1])
            args = (source, target, kib << 10, FORMS.index(form), int(written))
            gpu.launch("same_input", blocks, 256, args, smem=kib << 10, pdl=True)

        recorder.record(
            "same_input",
            {"blocks": blocks, "kib_per_block": kib, "form": form, "written": written},
            _period(gpu, recorder, launch),
        )

    for kib in (4, 16, 32, 56):
        for form in FORMS:
            for written in (False, True):
                case(112, kib, form, written)
                if kib in (4, 32):
                    case(28, kib, form, written)
