"""How the kernels are timed: one CUDA graph of many calls on rotated operands, replayed, every sample kept.

Weights must come from HBM, not from L2: give as many calls, each on its own copy, as make three times the L2
(``num_copies``). The graph repeats the round of copies until it is long against what a replay costs to start. Time is
between two events around a replay, divided by the calls in it; a chain of kernels with programmatic dependent launch is
thus timed as a chain. A second run of the same calls is the noise floor: differences below three times it mean nothing.

    calls = [lambda w=w: skinny_gemv(x, w, out) for w in copies]
    timing = time_calls("skinny_gemv 448x7168", calls)
    write_samples(path, [timing], environment())
"""

from __future__ import annotations

import datetime
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MIN_COPIES = 8
L2_FACTOR = 3
GRAPH_US = 2000.0  # a replay's own start, about 8 us on an H200, is then below half a percent


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Samples of one measurement: microseconds a call, one sample a replay."""

    name: str
    num_calls_per_replay: int
    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def percentile_us(self, percent: int) -> float:
        """Nearest-rank percentile, 1 to 99."""
        return percentile(self.samples_us, percent)


def percentile(samples: Sequence[float], percent: int) -> float:
    """Nearest-rank percentile of ``samples``, 1 to 99."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, math.ceil(percent / 100 * len(ordered)) - 1)]


def num_copies(num_bytes: int, l2_bytes: int) -> int:
    """Copies of an operand that keep it out of L2 when they take turns."""
    return max(MIN_COPIES, math.ceil(L2_FACTOR * l2_bytes / num_bytes))


def time_calls(
    name: str, calls: Sequence[Callable[[], object]], *, num_replays: int = 200, graph_us: float = GRAPH_US
) -> Timing:
    """Time ``calls``, each of which launches on the current stream; allocations inside them are not allowed."""
    return _Replayed(name, calls, graph_us).time(num_replays)


def time_twice(
    name: str, calls: Sequence[Callable[[], object]], *, num_replays: int = 200, graph_us: float = GRAPH_US
) -> tuple[Timing, Timing]:
    """``time_calls`` and the same graph once more: their difference is the noise floor."""
    replayed = _Replayed(name, calls, graph_us)
    return replayed.time(num_replays), replayed.time(num_replays)


class _Replayed:
    """A graph of rounds of calls, long against what a replay costs to start."""

    def __init__(self, name: str, calls: Sequence[Callable[[], object]], graph_us: float) -> None:
        import torch

        self.name = name
        for call in calls[:2]:
            call()  # compiles and loads, which a capture must not
        torch.cuda.synchronize()

        def capture(rounds: int) -> torch.cuda.CUDAGraph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(rounds):
                    for call in calls:
                        call()
            return graph

        self.graph = capture(1)
        once_us = min(self._replays_us(4)[1:])
        rounds = max(1, math.ceil(graph_us / once_us))
        if rounds > 1:
            self.graph = capture(rounds)
        self.num_calls = rounds * len(calls)

    def time(self, num_replays: int) -> Timing:
        self._replays_us(3)
        samples = tuple(one / self.num_calls for one in self._replays_us(num_replays))
        return Timing(name=self.name, num_calls_per_replay=self.num_calls, samples_us=samples)

    def _replays_us(self, repeats: int) -> list[float]:
        import torch

        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in pairs:
            start.record()
            self.graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def environment(commit: str | None = None) -> dict[str, Any]:
    """What a sample file says about where it was taken: GPU, driver, clocks, versions, date, commit."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    asked = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit"
    answer = subprocess.run(
        ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader", f"--id={torch.cuda.current_device()}"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        import cutlass

        versions["nvidia-cutlass-dsl"] = cutlass.__version__
    except ImportError:
        pass
    return {
        "gpu": properties.name,
        "num_sms": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        **dict(zip(asked.split(","), (one.strip() for one in answer.split(",")), strict=False)),
        "versions": versions,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
    }


def sample_row(timing: Timing) -> dict[str, Any]:
    """A measurement as it is stored: every sample, with the summary for reading.

    Four digits: an event's half microsecond in a graph of 2 ms is no less.
    """
    return {
        **asdict(timing),
        "samples_us": [float(f"{sample:.4g}") for sample in timing.samples_us],
        "median_us": round(timing.median_us, 4),
        "p10_us": round(timing.percentile_us(10), 4),
        "p90_us": round(timing.percentile_us(90), 4),
    }


def write_samples(path: Path, timings: Sequence[Timing | dict[str, Any]], where: dict[str, Any]) -> None:
    """Store measurements, or rows made from them, one line each. What was there before stays until all is written."""
    rows = [sample_row(one) if isinstance(one, Timing) else one for one in timings]
    lines = ",\n".join("  " + json.dumps(row, separators=(",", ":")) for row in rows)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(f'{{"environment": {json.dumps(where)},\n "timings": [\n{lines}\n]}}\n')
    partial.replace(path)
