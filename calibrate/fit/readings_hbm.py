"""HBM: what its probes say of rates, latency, copies and prefetches."""

from __future__ import annotations

import statistics
from typing import Any

from k3sim.calibrate.fit.statements import (
    LOADED_BYTES,
    Reader,
    Reading,
    Statement,
    Undetermined,
    less_timestamp,
    slope_of,
)


def _uneven(read: Reader) -> list[Statement]:
    whole = read.one("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=2 * LOADED_BYTES, stages=8)
    found = []
    for one, rate in read.all("hbm_bulk_by_sms", "read_rate"):
        blocks, sms = one.parameters["blocks"], read.file.num_sms
        if sms / 2 < blocks < sms:
            paired = (2 * blocks - sms) / blocks
            found.append((one.label, (1 - rate / whole) / (4 * paired * (1 - paired))))
    return found


def _copies(read: Reader, form: str, in_flight: int | tuple[int, ...], **parameters: Any) -> list[Statement]:
    return read.stated(
        "hbm_copy", "moved_rate", form=form, read_bytes_in_flight_per_sm=in_flight, written_of_four=4, **parameters
    )


def _prefetched(read: Reader) -> list[Statement]:
    """Rate of an SM whose prefetches bring in 8 MiB: slope of the share that is there, of the share in the end."""
    issuers = 8
    where = {"issuing_blocks": issuers, "streaming_blocks": 0}
    points = {one.parameters["after_us"]: (value, one) for one, value in read.all("prefetch_arrival", "in_l2", **where)}
    rising = [(at * 1e-6, value) for at, (value, _) in points.items() if 1 <= at <= 3]
    level = [value for at, (value, _) in points.items() if at >= 6]
    if len(rising) < 3 or not level:
        raise Undetermined("fewer than 3 stable samples of prefetch_arrival between 1 and 3 us, or none from 6 us on")
    num_bytes = next(iter(points.values()))[1].parameters["bytes"]
    rate = slope_of(rising)[1] / statistics.fmean(level) * num_bytes / issuers
    return [(f"prefetch_arrival {issuers} blocks, 1 to 3 us in_l2", rate)]


def _issued(read: Reader) -> list[Statement]:
    return [
        (one.label, one.parameters["bytes_each"] / value)
        for one, value in read.all("prefetch_issue", "issue")
        if one.parameters["bytes_each"] >= 16384
    ]


HBM_READINGS: tuple[Reading, ...] = (
    Reading(
        "hbm_read_bytes_per_s", 3,
        "Plain 128-bit loads, two blocks of 1,024 threads on each SM, and bulk copies with 64 KiB in flight on "
        "each; around: bulk copies with more in flight, and a stream beside a chase of single loads.",
        centre=lambda read: [
            *read.stated("hbm_loads_in_flight", "read_rate", blocks=2 * read.file.num_sms),
            *read.stated("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=LOADED_BYTES, stages=4),
        ],
        around=lambda read: [
            *read.stated("hbm_bulk_in_flight", "read_rate", bytes_in_flight_per_sm=(98304, 131072, 196608), stages=4),
            *read.stated("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=131072),
            *read.stated("hbm_bulk_in_flight_other_gpu", "read_rate"),
        ],
    ),
    Reading(
        "hbm_latency_s", 3,
        "Pointer chase of one thread over 1 GiB; around: 128 MiB, and single loads of another pass.",
        centre=lambda read: read.stated("hbm_chase", "mean_without_stamps", region_mib=1024),
        around=lambda read: [
            *read.stated("hbm_chase", "mean_without_stamps", region_mib=128),
            *less_timestamp(read, "loads_beside_stream", "not_in_l2", stream_bytes_in_flight_per_sm=0),
        ],
    ),
    Reading(
        "hbm_bytes_per_s_per_sm", 3,
        "Bulk copies with 128 KiB in flight on one SM, and each of 32; around: plain loads in batches of 64 KiB.",
        centre=lambda read: [
            *read.stated("hbm_bulk_by_sms", "read_rate", blocks=1),
            *read.stated("hbm_bulk_by_sms", "read_rate", blocks=32, scale=1 / 32),
        ],
        around=lambda read: read.stated("hbm_loads_by_sms", "read_rate", blocks=1),
    ),
    Reading(
        "hbm_partial_grid_loss", 2,
        "Bulk copies with 128 KiB in flight on 96 SMs against all 132, by the share of blocks that have a pair of "
        "SMs to themselves (sim/machine.py, partial_grid_efficiency).",
        centre=_uneven,
        joint=True,
    ),
    Reading(
        "hbm_copy_bytes_per_s", 2,
        "Read and written bytes of copies with 32 to 128 KiB of reads in flight on each SM, bulk and plain loads; "
        "around: in place.",
        centre=lambda read: [
            *_copies(read, "bulk", (32768, 65536, 98304), blocks=132, in_place=False),
            *_copies(read, "loads", (32768, 131072), in_place=False),
        ],
        around=lambda read: [*_copies(read, "bulk", 65536, in_place=True), *_copies(read, "loads", 131072)],
    ),
    Reading(
        "prefetch_bytes_per_s_per_sm", 2,
        "Share of 8 MiB that is in L2 some time after 8 SMs asked for it; around: requests of 16 and 64 KiB by "
        "the time that their issue takes, which blocks where the queue is full.",
        centre=_prefetched,
        around=_issued,
    ),
)
