"""A large kernel and a tiny one by turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Copies differ in ID only, so that each has code of its own. The large kernel also executes 10 KB of straight
// code once, as kernels of a real step do: twenty copies are more than the instruction caches of an SM hold.

template <int ID>
DEV void large(const uint4* w, int batches, const uint4* x, u32* out, u64* timestamps, int trigger) {
  __shared__ u32 part[32];
  u64 t0 = clk();
  depend64((u64)w);
  u64 t1 = clk();
  if (trigger) pdl_trigger();
  uint4 first = load4(x + threadIdx.x);
  depend(first.x);
  u64 t2 = clk();
  u32 acc = fold(first);
#pragma unroll 1
  for (int b = 0; b < batches; ++b) {
    const uint4* p = w + ((u64)b * gridDim.x + blockIdx.x) * (512 * 8) + threadIdx.x;
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = load4(p + 512 * u);
#pragma unroll
    for (int u = 0; u < 8; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  u64 t3 = clk();
#pragma unroll
  for (int k = 0; k < 320; ++k) acc = (acc ^ (ID * 7919 + k * k + 1)) * (2 * k + 3);
  acc = block_reduce(acc, part);
  u32 row = blockIdx.x * 28 + threadIdx.x;
  if (threadIdx.x < 28 && row < 3584) {
    out[row] = (acc + threadIdx.x) & 0x7fffffff;
    out[row + 3584] = acc & 0x7fffffff;
  }
  if (threadIdx.x == 0) {
    u64 *s = timestamps + 16 * blockIdx.x, t4 = clk(), g = gtime();
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = t4; s[5] = g;
  }
}

// Each block loads 14 KB (with 512 threads; 4 KB with 128), then from addresses that depend on it as much again,
// reduces, and stores its share of 14 KB. A rehearsal runs the same code on other data before the wait, so that its
// instructions are there when the wait ends.
template <int ID>
DEV void tiny(const uint4* in, uint4* out, const uint4* other, uint4* scrap, int share, u64* timestamps, int wait,
              int rehearse) {
  __shared__ u32 part[32];
  u64 t0 = clk();
  depend64((u64)in);
  u64 t1 = clk(), t2 = t1, t3, t4, t5, t6, t7, t8;
  if (wait) pdl_trigger();
#pragma unroll 1
  for (int pass = rehearse ? 0 : 1; pass < 2; ++pass) {
    const uint4* src = pass ? in : other;
    uint4* dst = pass ? out : scrap;
    if (pass && wait) pdl_wait();
    t2 = clk();
    // All four words of each load are used, or the compiler narrows it or loads the others later.
    uint4 v = load4(src + threadIdx.x), w = make_uint4(0, 0, 0, 0);
    if (threadIdx.x + 512 < 896) w = load4(src + threadIdx.x + 512);
    u32 a = fold(v);
    depend(a);
    t3 = clk();
    u32 b = fold(w);
    depend(b);
    __syncthreads();
    t4 = clk();
    uint4 x = load4(src + 896 + threadIdx.x + (a >> 31) + (b >> 31));
    u32 c = fold(x);
    depend(c);
    t5 = clk();
    __syncthreads();
    t6 = clk();
    u32 sum = block_reduce((a >> 16) + (b >> 16) + (c >> 16) + ID, part);
    depend(sum);
    t7 = clk();
    for (u32 i = threadIdx.x; i < share; i += blockDim.x)
      dst[blockIdx.x * share + i] = make_uint4(sum, a, b, c);
    t8 = clk();
  }
  u64 g = gtime();
  if (threadIdx.x == 0) {
    u64* s = timestamps + 16 * blockIdx.x;
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = t4; s[5] = t5; s[6] = t6; s[7] = t7; s[8] = t8; s[9] = g;
  }
}
#define LARGE(ID) \
  extern "C" __global__ void __launch_bounds__(512) large_##ID(const uint4* w, int batches, const uint4* x, \
      u32* out, u64* timestamps, int trigger) { large<ID>(w, batches, x, out, timestamps, trigger); }
#define TINY(ID) \
  extern "C" __global__ void __launch_bounds__(512) tiny_##ID(const uint4* in, uint4* out, \
      const uint4* other, uint4* scrap, int share, u64* timestamps, int wait, int rehearse) { \
    tiny<ID>(in, out, other, scrap, share, timestamps, wait, rehearse); }
#define TEN(M, T) M(T##0) M(T##1) M(T##2) M(T##3) M(T##4) M(T##5) M(T##6) M(T##7) M(T##8) M(T##9)
LARGE(0) LARGE(1) LARGE(2) LARGE(3) LARGE(4) LARGE(5) LARGE(6) LARGE(7) LARGE(8) LARGE(9)
TEN(LARGE, 1)
TINY(0) TINY(1) TINY(2) TINY(3) TINY(4) TINY(5) TINY(6) TINY(7) TINY(8) TINY(9)
TEN(TINY, 1) TEN(TINY, 2) TINY(30) TINY(31)
"""



# Name of a stage, and the timestamps at its end and start.
LARGE_STAGES = (("parameter", 1, 0), ("first_load", 2, 1), ("stream", 3, 2), ("tail", 4, 3))
TINY_STAGES = (
    ("parameter", 1, 0),
    ("prologue_or_wait", 2, 1),
    ("first_load", 3, 2),
    ("first_load_all_warps", 4, 3),
    ("dependent_load", 5, 4),
    ("dependent_load_all_warps", 6, 5),
    ("reduction", 7, 6),
    ("store", 8, 7),
    ("entry_to_end", 8, 0),
)


def tiny_kernels(gpu: Gpu, recorder: Recorder) -> None:
    """What a tiny kernel costs after a stream of cold weights, against the same kernel alone in a loop.

    Isolates: timestamps divide it into parameters, first code, two dependent loads, reduction and stores; stages add up
    to the whole. Could mislead: a stage ends with one warp's timestamp, and the slowest warp's time falls into the next
    one; a timestamp orders instructions that would overlap; the streaming kernel beside it ends unevenly over the SMs.

    A pattern is one round of the graph: G streams weights on all SMs, t is tiny. Every kernel depends on the one
    before it.
    """
    rounds, width, sms = 32, 16 * 132, gpu.num_sms
    timestamps = gpu.zeros(3 * rounds * width)
    mid, result, third, other, scrap = (gpu.zeros(4096) for _ in range(5))
    other.copy_(gpu.data[:8192].view(gpu.torch.int64))

    def case(
        pattern: str,
        batches: int,
        copies: int,
        blocks: int = 1,
        threads: int = 512,
        pdl: bool = False,
        rehearse: bool = False,
    ) -> None:
        wait, length = int(pdl), len(pattern)

        def body() -> None:
            source = result
            for n in range(rounds * length):
                i, slot = n // length, timestamps[n * width :]
                if pattern[n % length] == "G":
                    weights = gpu.data[i * batches * sms * 512 * 8 * 4 :]
                    gpu.launch(
                        f"large_{i % min(copies, 20)}", sms, 512, (weights, batches, source, mid, slot, wait)
                    )
                    source = mid
                else:
                    target = third if source is result else result
                    args = (source, target, other, scrap, 896 // blocks, slot, wait, int(rehearse))
                    gpu.launch(f"tiny_{n % copies}", blocks, threads, args, pdl=bool(wait))
                    source = target

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            found: dict[str, tuple[str, Any]] = {}

            def add(position: int, quantity: str, unit: str, readings: Any) -> None:
                found.setdefault(f"{position}{pattern[position]}.{quantity}", (unit, []))[1].append(readings)

            gpu.replay(graph)
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps[: length * rounds * width].cpu().numpy().reshape(rounds, length, 132, 16)
                _stages_of_replay(rows, pattern, blocks, sms, clocks, bool(wait), add)
            return found

        parameters = {
            "pattern": pattern,
            "streamed_bytes": batches * sms * 65536,
            "copies_of_code": copies,
            "tiny_blocks": blocks,
            "tiny_threads": threads,
            "pdl": pdl,
            "rehearsed": rehearse,
        }
        recorder.record("tiny_kernel", parameters, sampler)

    for take in _patterns(case):
        take()


def _stages_of_replay(
    rows: Any,
    pattern: str,
    blocks: int,
    sms: int,
    clocks: Clocks,
    wait: bool,
    add: Callable[[int, str, str, Any], None],
) -> None:
    """Add the stages of every kernel of a pattern, by the records of one replay: round, position, block, timestamp."""
    import numpy

    rounds, length = rows.shape[0], len(pattern)
    begun, ended, resumed = (numpy.zeros((rounds, length)) for _ in range(3))
    for position, kind in enumerate(pattern):
        large = kind == "G"
        row = rows[:, position, : sms if large else blocks]
        last, timer = (row[..., 4], row[..., 5]) if large else (row[..., 8], row[..., 9])
        entry, end = clocks.us(row[..., 0], last, timer), clocks.us(last, last, timer)
        begun[:, position], ended[:, position] = entry.min(1), end.max(1)
        resumed[:, position] = clocks.us(row[..., 2], last, timer).min(1)
        add(position, "first_to_last_entry", "us", (entry.max(1) - entry.min(1)).mean())
        add(position, "first_to_last_end", "us", (end.max(1) - end.min(1)).mean())
        for quantity, late, early in LARGE_STAGES if large else TINY_STAGES:
            add(position, quantity, "cycle", (row[:, 0, late] - row[:, 0, early]).mean())
    before = numpy.roll(ended.ravel(), 1).reshape(rounds, length)
    for position, kind in enumerate(pattern):
        add(position, "end_to_entry", "us", (begun - before)[1:, position].mean())
        add(position, "end_to_end", "us", (ended - before)[1:, position].mean())
        if wait and kind == "t":
            add(position, "end_to_resume", "us", (resumed - before)[1:, position].mean())
    add(0, "period_of_round", "us", (ended[-1, -1] - ended[0, -1]) / (rounds - 1))


def _patterns(case: Callable[..., None]) -> Iterator[Callable[[], None]]:
    """Patterns with their batches of weights and copies of code, each as a case to take."""
    for copies in (1, 8, 32):
        yield partial(case, "t", 0, copies)
    yield partial(case, "t", 0, 1, blocks=8)
    yield partial(case, "t", 0, 1, threads=128)
    yield partial(case, "t", 0, 1, pdl=True)
    for batches in (0, 1, 2, 4, 6):
        yield partial(case, "G", batches, 32)
    yield partial(case, "G", 6, 1)
    for batches, copies in ((0, 1), (0, 32), (1, 32), (6, 1), (6, 8), (6, 32)):
        yield partial(case, "Gt", batches, copies)
    yield partial(case, "Gt", 6, 32, blocks=8)
    yield partial(case, "Gt", 6, 32, threads=128)
    yield partial(case, "t", 0, 1, rehearse=True)
    yield partial(case, "Gt", 6, 32, rehearse=True)
    yield partial(case, "Gt", 6, 32, threads=128, rehearse=True)
    yield partial(case, "Gt", 6, 32, pdl=True)
    yield partial(case, "Gt", 6, 32, pdl=True, rehearse=True)
    yield partial(case, "Gt", 6, 32, blocks=8, pdl=True)
    yield partial(case, "Gtt", 6, 32)
