"""A measured step as lines of text, without a table library: machines that measure may not have one.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from k3sim.calibrate.decode.measured import Measured, by_stage, idle_us
from k3sim.kernels.device.timestamps import RecordedLaunch
from k3sim.sim.timeline.critical_path import WORK_PARTS, Part


def lines_of(measured: Measured) -> list[str]:
    """The result as text, without a table library."""
    case = measured.case
    lines = [
        f"{case.options.command()}",
        f"{measured.environment.get('gpu', 'GPU')}, {case.architecture.num_layers} layers, {case.layout.tag}, "
        f"concurrency {case.workload.concurrency}, context {case.workload.context}",
        *standing_lines(case.layout.tp, measured.num_gpus),
        f"step {measured.step_us:.1f} us (p10 {measured.percentile_us(10):.1f}, p90 {measured.percentile_us(90):.1f}, "
        f"{len(measured.samples_us)} replays), {1e6 / measured.step_us:.1f} tok/s/user",
        f"floor {measured.floor_us:.1f} us: {measured.moved_bytes / 1e9:.2f} GB at "
        f"{measured.read_bytes_per_s / 1e12:.2f} TB/s, which is {100 * measured.floor_us / measured.step_us:.1f} % of "
        "the step",
        f"memory {measured.allocated_bytes / 1e9:.2f} GB allocated, {measured.needed_bytes / 1e9:.2f} GB predicted; "
        f"first step after {measured.start_s:.1f} s; clocks {measured.environment.get('clocks_after', '')}",
    ]
    if measured.timeline is not None:
        lines.append(
            f"{measured.num_launches} launches a step, {idle_us(measured.timeline):.1f} us of the profiled one with no "
            "kernel running; kernels by stage:"
        )
        lines.append(f"{'stage':24}{'count':>7}{'total us':>11}{'each us':>9}{'alone us':>11}")
        lines += [
            f"{row['stage']:24}{row['count']:7}{row['total_us']:11.1f}{row['total_us'] / row['count']:9.2f}"
            f"{row['alone_us']:11.1f}"
            for row in by_stage(measured.timeline)
        ]
        lines += part_lines(measured.to_dict())
    if measured.timestamped:
        lines += timestamp_lines(measured.timestamped)
    return [*lines, *measured.notes]


def standing_lines(num_ranks: int, num_gpus: int) -> list[str]:
    """Who the ranks' peers are."""
    if num_gpus == num_ranks > 1:
        return [f"{num_gpus} GPUs, a rank each, exchange over NVLink"]
    if num_gpus > 1:
        return [
            f"{num_gpus} GPUs stand for {num_ranks} ranks, each for {num_ranks // num_gpus}: of a rank's {num_ranks} "
            f"pushes {num_ranks - num_ranks // num_gpus} cross NVLink and the others land in its own memory"
        ]
    return ["one GPU, its peers looped back: no push crosses a link"] if num_ranks > 1 else []


def timestamp_lines(timestamped: Sequence[RecordedLaunch]) -> list[str]:
    """By kernel: from the first block's beginning to the last one's, from the last release to the last end, in all."""
    of_kernel: dict[str, list[RecordedLaunch]] = defaultdict(list)
    for one in timestamped:
        of_kernel[one.kernel].append(one)
    head = ("count", 7), ("blocks", 8), ("begin in", 10), ("released to end", 17), ("whole", 8)
    lines = [f"{'timestamps of blocks, medians in us':34}" + "".join(f"{word:>{width}}" for word, width in head)]
    for kernel, launches in of_kernel.items():
        begin_us = statistics.median(one.began_us[1] - one.began_us[0] for one in launches)
        whole_us = statistics.median(one.ended_us[1] - one.began_us[0] for one in launches)
        tails = [one.ended_us[1] - one.released_us[1] for one in launches if one.released_us is not None]
        tail = f"{statistics.median(tails):.2f}" if tails else ""
        lines.append(
            f"{kernel:34}{len(launches):7}{launches[0].num_blocks:8}{begin_us:10.2f}{tail:>17}{whole_us:8.2f}"
        )
    return lines


def part_lines(document: Mapping[str, Any]) -> list[str]:
    """Where the profiled step goes, of a document that has its parts."""
    step_us = document["profiled_us"]
    lines = [f"{'where the profiled step goes':34}{'us':>9}{'of it':>8}"]
    for part in Part:
        if part.value in document["waits_us"]:
            us = document["waits_us"][part.value]
            label = part.word if part in (*WORK_PARTS, Part.UNKNOWN, Part.EXCHANGE) else f"wait: {part.word}"
            lines.append(f"{label:34}{us:9.1f}{100 * us / step_us:6.1f} %")
    return [*lines, f"{'step':34}{step_us:9.1f}"]
