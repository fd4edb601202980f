"""Which row each kernel of one rank is drawn on, shared by the Perfetto trace and the HTML report.

Kernels of one stream may overlap in time: programmatic dependent launch starts the next before the last ends.
A viewer shows one slice at a time on a row, so an overlapping kernel gets a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from k3sim.sim.timeline.timeline import KernelRun

STREAM_ORDER = ("main", "aux", "shared", "prefetch", "host")


def assign_lanes(kernels: Iterable[KernelRun]) -> dict[str, list[KernelRun]]:
    """Lane name to its kernels, in start order and free of overlap.

    A kernel takes the lowest lane of its stream that is free when it starts. The first lane is named after
    the stream, further ones ``main (overlap 1)``, ``main (overlap 2)``. Streams come in ``STREAM_ORDER``,
    others follow by name. The kernels must be of one rank.
    """
    by_stream: dict[str, list[list[KernelRun]]] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.start_ps, kernel.index)):
        lanes = by_stream.setdefault(kernel.stream, [])
        for lane in lanes:
            if lane[-1].end_ps <= kernel.start_ps:
                lane.append(kernel)
                break
        else:
            lanes.append([kernel])
    return {
        stream if number == 0 else f"{stream} (overlap {number})": lane
        for stream in sorted(by_stream, key=_stream_rank)
        for number, lane in enumerate(by_stream[stream])
    }


def _stream_rank(stream: str) -> tuple[int, str]:
    return (STREAM_ORDER.index(stream) if stream in STREAM_ORDER else len(STREAM_ORDER), stream)
