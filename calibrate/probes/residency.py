"""When a kernel that may start early finds room on an SM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Holds its SM for `spin` cycles, blocks of odd number for `late` more; lets a dependent start at once.
DEV void occupy(u64* timestamps, int spin, int late, int wait) {
  u64 t0 = clk(), t1 = t0;
  pdl_trigger();
  if (wait) { pdl_wait(); t1 = clk(); }
  u64 cycles = spin + (blockIdx.x & 1 ? late : 0);
  while (clk() - t1 < cycles);
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 *s = timestamps + 8 * blockIdx.x, t2 = clk();
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = gtime(); s[4] = smid();
  }
}
// Copies: what share of an SM's memory a kernel wants as shared memory is a setting of the kernel.
KERNEL first_any(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
KERNEL first_full(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
KERNEL second_any(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
KERNEL second_full(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
KERNEL third_full(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
KERNEL before_full(u64* s, int spin, int late, int wait) { occupy(s, spin, late, wait); }
// The same with 128 registers a thread held over the time.
extern "C" __global__ void __launch_bounds__(512, 1) first_registers(u64* timestamps, int spin, int late, int wait) {
  u64 t0 = clk();
  pdl_trigger();
  u32 held[114];
#pragma unroll
  for (int i = 0; i < 114; ++i) asm volatile("mov.u32 %0, %%clock;" : "=r"(held[i]) :: "memory");
  u64 cycles = spin + (blockIdx.x & 1 ? late : 0), sum = 0;
  for (u64 t = t0; t - t0 < cycles; t = clk()) {  // every value changes in every round: none can be given up
#pragma unroll
    for (int i = 0; i < 114; ++i) held[i] = held[i] * 3 + (u32)t;
  }
#pragma unroll
  for (int i = 0; i < 114; ++i) sum += held[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 *s = timestamps + 8 * blockIdx.x, t2 = clk();
    s[0] = t0; s[1] = t0; s[2] = t2; s[3] = gtime(); s[4] = smid(); s[5] = sum;
  }
}
"""

PAIRS = 8
SPIN, LATE = 30_000, 20_000  # cycles: about 15 us, and 10 us more for every other block
AFTER_WAIT = 2_000


def residency(gpu: Gpu, recorder: Recorder) -> None:
    """Entry of a kernel that is let in early, against what the kernel before it leaves of each SM.

    The first kernel lets the second start at its own start, and holds its SMs for 15 us, every other block for 25.
    ``share_beside``: blocks of the second that entered while a block of the first was on the same SM.
    ``entry_after_sm``: from the end of the first's last block on an SM to the entry of the second's there (median;
    negative: beside it). ``first_entry_after_start``, ``last_entry_after_end`` and ``resume_after_end`` are against
    the first's last entry and last end; with no room, the last is the edge between the two kernels, launch and all.

    Isolates: nothing is read or written, so what keeps a block out is shared memory, how the SM's memory was divided
    for the kernel that is on it, threads or registers, one at a time. The division follows the carve-out that each
    kernel prefers: the driver's choice or all of it (100). Could mislead: the driver's choice for a kernel depends on
    its threads and shared memory, not known here; an SM is idle before each first kernel, in a step it may not be;
    entry times compare two SMs' clocks on a timer of 32 ns; blocks of one SM compare on one clock.
    """
    sms, most = gpu.num_sms, 2 * gpu.num_sms
    width = 8 * most
    timestamps = gpu.zeros(2 * PAIRS * width)

    def case(
        smem: tuple[int, int],
        carve_outs: tuple[bool, bool] = (False, False),
        *,
        blocks: tuple[int, int] = (sms, sms),
        threads: tuple[int, int] = (256, 256),
        registers: bool = False,
        pdl: bool = True,
        cluster: int = 0,
    ) -> None:
        first = "first_registers" if registers else ("first_any", "first_full")[carve_outs[0]]
        second = ("second_any", "second_full")[carve_outs[1]]

        def body() -> None:
            for pair in range(PAIRS):
                at = timestamps[2 * pair * width :], timestamps[(2 * pair + 1) * width :]
                gpu.launch(
                    first, blocks[0], threads[0], (at[0], SPIN, LATE, 0), smem=smem[0],
                    carve_out=100 if carve_outs[0] else None, cluster=cluster,
                )  # fmt: skip
                gpu.launch(
                    second, blocks[1], threads[1], (at[1], AFTER_WAIT, 0, int(pdl)), smem=smem[1], pdl=pdl,
                    carve_out=100 if carve_outs[1] else None,
                )  # fmt: skip

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            found: dict[str, list[float]] = {}
            gpu.replay(graph)
            for _ in range(recorder.replays // 4):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps.cpu().numpy().reshape(PAIRS, 2, most, 8)
                for quantity, value in _entries(clocks, rows[:, 0, : blocks[0]], rows[:, 1, : blocks[1]]).items():
                    found.setdefault(quantity, []).append(float(value))
            return {name: ("1" if name.startswith("share") else "us", values) for name, values in found.items()}

        recorder.record(
            "residency",
            {
                "shared_memory": list(smem),
                "prefers_all_shared": list(carve_outs),
                "blocks": list(blocks),
                "threads": list(threads),
                "registers_full": registers,
                "pdl": pdl,
                "cluster": cluster,
            },
            sampler,
        )

    for take in _placements(case, sms):
        take()


def _entries(clocks: Clocks, one: Any, two: Any) -> dict[str, Any]:
    """What the records of the first and the second kernel's blocks say, mean over the pairs of one replay."""
    import numpy

    begun, ended = (clocks.us(one[..., n], one[..., 2], one[..., 3]) for n in (0, 2))
    entered, resumed = (clocks.us(two[..., n], two[..., 2], two[..., 3]) for n in (0, 1))
    beside, after = [], []
    for pair in range(PAIRS):
        last = numpy.zeros(max(one[pair, :, 4].max(), two[pair, :, 4].max()) + 1, dtype=one.dtype)
        numpy.maximum.at(last, one[pair, :, 4], one[pair, :, 2])
        there = last[two[pair, :, 4]]
        gaps = (two[pair, :, 0] - there)[there > 0]  # on SMs that the first kernel was on
        beside.append((gaps < 0).sum() / two.shape[1])
        after.append(numpy.median(gaps) / clocks.hz * 1e6 if gaps.size else 0.0)
    return {
        "share_beside": numpy.mean(beside),
        "entry_after_sm": numpy.mean(after),
        "first_entry_after_start": (entered.min(1) - begun.max(1)).mean(),
        "last_entry_after_end": (entered.max(1) - ended.max(1)).mean(),
        "resume_after_end": (resumed.min(1) - ended.max(1)).mean(),
    }


def _placements(case: Callable[..., None], sms: int) -> Iterator[Callable[[], None]]:
    """The shapes of the two kernels, each as a case to take."""
    large, small = 200 * 1024, 8 * 1024
    yield partial(case, (0, 0))
    yield partial(case, (large, large))
    yield partial(case, (large, large), pdl=False)
    for smem in ((small, large), (0, large), (large, small), (large, 0)):
        yield partial(case, smem)
        yield partial(case, smem, (True, True))
    yield partial(case, (small, large), (True, False))
    yield partial(case, (small, large), (False, True))
    yield partial(case, (small, 64 * 1024))
    yield partial(case, (small, 128 * 1024))
    yield partial(case, (48 * 1024, 128 * 1024))
    # Half of the SMs are free.
    yield partial(case, (small, large), blocks=(sms // 2, sms))
    yield partial(case, (small, large), (True, True), blocks=(sms // 2, sms))
    yield partial(case, (large, large), blocks=(sms // 2, sms))
    # No room by threads, and by registers.
    yield partial(case, (0, 0), blocks=(2 * sms, sms), threads=(1024, 256))
    yield partial(case, (0, 0), threads=(512, 256), registers=True)
    yield partial(case, (0, large), threads=(512, 512), registers=True)
    # Beside a kernel of few small blocks, launched as clusters and not.
    for cluster in (0, 8):
        yield partial(case, (2 * 1024, 144 * 1024), (True, True), blocks=(16, sms), threads=(128, 448), cluster=cluster)
        yield partial(case, (2 * 1024, 56 * 1024), (True, True), blocks=(16, sms), threads=(128, 448), cluster=cluster)
    # Registers lie in four parts of an SM, and a block's warps are dealt out over them: thirteen warps of 128 take as
    # much as sixteen of a block that has eight.
    yield partial(case, (0, 0), threads=(384, 256), registers=True)
    yield partial(case, (0, 0), threads=(416, 256), registers=True)


FIRST_SPIN, SECOND_SPIN = 20_000, 120_000  # cycles: 10 us, and 60 us
THREE_KIB = (
    (60, 128, 85), (0, 128, 85), (60, 128, 30), (60, 128, 50), (85, 65, 141), (0, 65, 141), (73, 65, 85),
)  # fmt: skip


def three_blocks(gpu: Gpu, recorder: Recorder) -> None:
    """Whether shared memory that a block has left counts together with what was free above a second block.

    On every SM a block of a first kernel, for 10 us; one of a second beside it, for 60; one of a third, which was let
    in at once too. ``third_entry`` is from the first's entry to the third's on the same SM (median over SMs).

    Isolates: nothing is read, all three want all of an SM's memory as shared, threads and registers have room. Could
    mislead: where an SM puts a block is not known, so that memory in one piece could still matter with a fourth one.
    """
    import numpy

    sms = gpu.num_sms
    timestamps = [gpu.zeros(8 * sms) for _ in range(3)]

    def case(kib: tuple[int, int, int]) -> None:
        def body() -> None:
            for number, (name, spin) in enumerate(
                (("first_full", FIRST_SPIN), ("second_full", SECOND_SPIN), ("third_full", AFTER_WAIT))
            ):
                gpu.launch(
                    name,
                    sms,
                    256,
                    (timestamps[number], spin, 0, 0),
                    smem=kib[number] << 10,
                    pdl=number > 0,
                    carve_out=100,
                )

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            hz = Clocks(gpu).hz
            found = []
            gpu.replay(graph)
            for _ in range(recorder.replays // 4):
                gpu.replay(graph)
                gpu.stream.synchronize()
                first, _, third = (one.cpu().numpy().reshape(sms, 8) for one in timestamps)
                began = {int(row[4]): int(row[0]) for row in first}
                late = [int(row[0]) - began[int(row[4])] for row in third if int(row[4]) in began]
                found.append(float(numpy.median(late)) / hz * 1e6 if late else 0.0)
            return {"third_entry": ("us", found)}

        recorder.record("three_blocks", {"shared_memory": [one << 10 for one in kib]}, sampler)

    for kib in THREE_KIB:
        case(kib)


BEFORE_KIB, FIRST_KIB, THIRD_KIB = 4, 28, 84
BEFORE_SPIN = 12_000  # cycles, about 6 us


def carve_out_inheritance(gpu: Gpu, recorder: Recorder) -> None:
    """How an SM is divided when a block takes it over from one that began beside blocks that wanted more L1.

    A kernel wants ``before_wish`` per cent of an SM's memory as shared and holds four blocks an SM; a second, which
    wants all, begins beside it or when it has left (``first_begins``); a third, which wants all, stands waiting
    for threads until the second has left, or is launched then (``second_begins``); a fourth of 84 KB was let in at the
    third's start. ``share_beside``: SMs on which the fourth begins beside the third. With 127 KB of the third there is
    room where the SM was divided anew, and none as it was for the first.

    Isolates: nothing is read, threads and registers have room for third and fourth. Could mislead: blocks hold their
    SMs for microseconds, the moments of a hand-over are those of blocks that end at once on all SMs.
    """
    import numpy

    sms = gpu.num_sms
    timestamps = [gpu.zeros(8 * 4 * sms) for _ in range(4)]

    def case(before_wish: int, first_begins: str, second_begins: str, second_kib: int) -> None:
        def body() -> None:
            gpu.launch("before_full", 4 * sms, 128, (timestamps[0], BEFORE_SPIN, 0, 0), smem=BEFORE_KIB << 10,
                       carve_out=before_wish)  # fmt: skip
            for number, (name, blocks, threads, spin, kib, early) in enumerate(
                (
                    ("first_full", 2 * sms, 768, 2 * BEFORE_SPIN, FIRST_KIB, first_begins == "beside"),
                    ("second_full", sms, 1024, 2 * BEFORE_SPIN, second_kib, second_begins == "waiting"),
                    ("third_full", sms, 512, AFTER_WAIT, THIRD_KIB, True),
                ),
                1,
            ):
                gpu.launch(
                    name, blocks, threads, (timestamps[number], spin, 0, 0), smem=kib << 10, pdl=early, carve_out=100
                )

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            found: dict[str, list[float]] = {"share_beside": [], "first_beside": []}
            gpu.replay(graph)
            for _ in range(recorder.replays // 4):
                gpu.replay(graph)
                gpu.stream.synchronize()
                before, first, second, third = (one.cpu().numpy().reshape(-1, 8) for one in timestamps)
                ended = {int(row[4]): int(row[2]) for row in second[:sms]}
                beside = [int(row[0]) < ended[int(row[4])] for row in third[:sms] if int(row[4]) in ended]
                found["share_beside"].append(sum(beside) / sms)
                left = {int(row[4]): int(row[2]) for row in before[: 4 * sms]}
                came = [int(row[0]) < left[int(row[4])] for row in first[: 2 * sms] if int(row[4]) in left]
                found["first_beside"].append(float(numpy.mean(came)) if came else 0.0)
            return {name: ("1", values) for name, values in found.items()}

        recorder.record(
            "carve_out_inheritance",
            {
                "before_wish": before_wish, "first_begins": first_begins, "second_begins": second_begins,
                "second_kib": second_kib,
            },
            sampler,
        )  # fmt: skip

    for wish in (60, 100):
        for first_begins in ("beside", "after"):
            for second_begins in ("waiting", "launched"):
                case(wish, first_begins, second_begins, 127)
    case(60, "beside", "waiting", 140)
