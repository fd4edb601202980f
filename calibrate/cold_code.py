"""What a launch pays for machine code that its SMs do not hold: ``python -m k3sim.calibrate.cold_code OUT.json``.

A chain of one kernel finds its code in the instruction caches of every SM; in a decode step a dozen other kernels have
run since, and tens of megabytes of weights have gone through L2. Each case is a call of ``kernels/cases.py`` behind a
launch that keeps all SMs busy: with a small loop or with 192 KB of straight code, and after reading nothing or 96 MB.

Isolates: with and without straight code the same data are in L2 or not, so the difference of the two is that of the
code, and where both have read 96 MB it is code that comes from HBM. Could mislead: a call behind such a launch starts
none of its work early, so code that would be fetched during a wait is counted; and what the call leaves in the
instruction caches makes the next straight code slower where L2 was not flushed (there the difference is too large, by
up to 2 us for a large kernel; it is not used). Times are of graphs of pairs, less those of the first launch alone.

Needs torch and CUTLASS, as the kernels do. ``fit_cold_code`` makes ``cold_code_s_per_byte`` of the file: a straight
line through the origin of what cold code adds over the bytes of code that the kernels of a case have.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes.gpu import PRELUDE, Gpu
from k3sim.errors import UserError

STORED = Path(__file__).parent / "data" / "h200-cold-code.json"
NUM_REPLAYS = 40
NUM_BOOTSTRAPS = 1000
STRAIGHT_INSTRUCTIONS = 12288  # of 16 bytes: more than the instruction caches of an SM hold
FLUSH_BYTES = 96 << 20
PAIRS = 24
THREADS = 128
#: Operator and case of ``kernels/cases.py``: one row, one GPU.
CASES = (
    ("skinny_gemv", "3216x7168, 1 row"),
    ("skinny_gemv", "2112x7168, 1 row"),
    ("skinny_gemv", "7168x768, 1 row"),
    ("skinny_gemv", "896x7168, 1 row"),
    ("skinny_gemv", "448x7168, 1 row"),
    ("kda_decode", "6 heads, 1 row, fp32 state"),
    ("kda_decode", "12 heads, 1 row, fp32 state"),
    ("expert_gemv", "16 experts a row of 192, 1 row"),
    ("expert_gemv", "16 experts a row of 384, 1 row"),
    ("expert_gemv", "16 experts a row of 192, 1 row, two launches"),
    ("router_topk", "push of 280x7168 and gather_topk, 16 shards looped back, 1 row"),
    ("latent_tail", "up, 16 ranks, 1 row"),
    ("proj_allreduce", "produce and consume, 16 slots of this GPU, 7168x768, 1 row"),
    ("proj_allreduce", "send, up and consume_gathered, 16 ranks looped back, 1 row"),
    ("mla_prep", "6 heads, 1 row, fp8 cache"),
    ("mla_decode", "6 heads, 8192 tokens, 1 row, fp8"),
    ("mla_decode", "lift_gate, 6 heads, 1 row"),
    ("attn_res", "combine of 9 sources, 1 row"),
    ("unfused", "all_reduce, 16 slots of this GPU, 1 row"),
)


def _line(number: int) -> str:
    """Two instructions, which cannot be made one."""
    value = f"a{number % 4}"
    return f"{value} = ({value} ^ {7919 * number + 1}) * {2 * number + 3};"


SOURCE = (
    PRELUDE
    + r"""
KERNEL occupy(int straight, int loops, const uint4* data, u64 count, u32* out) {
  u32 a0 = threadIdx.x, a1 = clk(), a2 = blockIdx.x, a3 = a0 ^ a1;  // nothing that a compiler knows
  u64 step = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += 4 * step) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = i + k * step < count ? load4(data + i + k * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int k = 0; k < 4; ++k) a0 ^= fold(v[k]);
  }
  if (straight) {
    STRAIGHT
  } else {
#pragma unroll 1
    for (int i = 0; i < loops; ++i) { LOOP }
  }
  if ((a0 ^ a1 ^ a2 ^ a3) == 0x12345) out[0] = a0;
}
""".replace("STRAIGHT", "\n".join(map(_line, range(STRAIGHT_INSTRUCTIONS // 2)))).replace(
        "LOOP", "\n".join(map(_line, range(32)))
    )
)


Row = dict[str, Any]


def cold_code(gpu: Gpu, num_replays: int, on_row: Callable[[Row], None]) -> None:
    """Time each of ``CASES``, and its product by cuBLAS, in the four states of code and data, microseconds a pair.

    The first rows, without an operator, are those of the launch in front alone.
    """
    from k3sim.kernels.cases import cases_of

    sink = gpu.zeros(1 << 10)
    loops = STRAIGHT_INSTRUCTIONS // 64

    def occupy(straight: bool, flushed: bool) -> None:
        count = ctypes.c_uint64(FLUSH_BYTES // 16 if flushed else 0)
        gpu.launch("occupy", gpu.num_sms, THREADS, (straight, loops, gpu.data, count, sink))

    def time(operator: str, name: str, calls: Sequence[Callable[[], object]]) -> None:
        for call in calls[:2]:
            call()  # compiles and loads, which a capture must not
        gpu.stream.synchronize()
        for straight in (False, True):
            for flushed in (False, True):

                def body(straight: bool = straight, flushed: bool = flushed) -> None:
                    for number in range(PAIRS):
                        occupy(straight, flushed)
                        if calls:
                            calls[number % len(calls)]()

                graph = gpu.graph(body)
                gpu.event_us(graph, 3)
                samples_us = [one / PAIRS for one in gpu.event_us(graph, num_replays)]
                on_row(
                    {
                        "operator": operator,
                        "case": name,
                        "straight_code": straight,
                        "flushed": flushed,
                        "median_us": round(statistics.median(samples_us), 4),
                        "samples_us": [round(one, 3) for one in samples_us],
                    }
                )

    time("", "", ())
    known = {(one.operator, one.name): one for one in cases_of([])}
    for operator, name in CASES:
        timed_of = known[operator, name].timed
        assert timed_of is not None, name
        timed = timed_of("cuda", 0, gpu.l2_bytes)
        time(operator, name, timed.calls)
        if "cuBLAS" in timed.peers:
            time("cublas", name, timed.peers["cuBLAS"]())
        del timed
        gpu.torch.cuda.empty_cache()


@dataclass(frozen=True, kw_only=True)
class ColdCode:
    """What cold code costs: seconds a byte, the middle 90 % of bootstraps over cases, and the cases behind it.

    ``cases``: name to bytes of code and what they added, in seconds.
    """

    value: float
    low: float
    high: float
    cases: Mapping[str, tuple[int, float]]


def fit_cold_code(code_bytes: Mapping[tuple[str, str], int], path: Path = STORED, seed: int = 0) -> ColdCode:
    """Fit a file of ``cold_code``. ``code_bytes``: of the kernels of a case, by operator and case; others are left out.

    Raises UserError for a file that is not one, or that has fewer than five of the cases.
    """
    import numpy

    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        pair_us = {
            (one["operator"], one["case"], one["straight_code"]): float(one["median_us"])
            for one in rows
            if one["flushed"]
        }

        def added_us(operator: str, case: str) -> float:
            return pair_us[operator, case, True] - pair_us[operator, case, False]

        cases = {
            f"{one[0]} {one[1]}": (num_bytes, 1e-6 * (added_us(*one) - added_us("", "")))
            for one, num_bytes in code_bytes.items()
            if (*one, True) in pair_us
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a file of k3sim.calibrate.cold_code: {error!r}") from None
    if len(cases) < 5:
        raise UserError(f"{path} has {len(cases)} cases whose code is known, accepted: 5 or more")
    table = numpy.array(list(cases.values()))

    def slope(rows: Any) -> float:
        return float((rows[:, 0] * rows[:, 1]).sum() / (rows[:, 0] ** 2).sum())

    chosen = numpy.random.default_rng(seed).integers(0, len(table), (NUM_BOOTSTRAPS, len(table)))
    slopes = sorted(slope(table[one]) for one in chosen)
    return ColdCode(
        value=slope(table),
        low=slopes[NUM_BOOTSTRAPS // 20],
        high=slopes[-NUM_BOOTSTRAPS // 20],
        cases=cases,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    from k3sim.kernels.bench import environment

    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.cold_code", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--replays", type=int, default=NUM_REPLAYS, help="of each graph; every one is a sample")
    given = parser.parse_args(arguments)
    if given.replays < 1:
        parser.error(f"--replays is {given.replays}; accepted: 1 or more")
    rows: list[Row] = []
    gpu = Gpu(SOURCE)
    where = environment()

    def keep(row: Row) -> None:
        rows.append(row)
        lines = ",\n".join("  " + json.dumps(one, separators=(",", ":")) for one in rows)
        partial = given.out.with_name(f".{given.out.name}.partial")
        partial.write_text(f'{{"environment": {json.dumps(where)},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        partial.replace(given.out)

    cold_code(gpu, given.replays, keep)


if __name__ == "__main__":
    main()
