"""L2: what its probes say of rates, latencies, inputs that all blocks load, and waits behind HBM's queue."""

from __future__ import annotations

from k3sim.calibrate.fit.statements import (
    LOADED_BYTES,
    MIB,
    Reader,
    Reading,
    Statement,
    Undetermined,
    less_timestamp,
    needed,
    slope_of,
)


def _same_input(read: Reader, form: str, *, blocks: int, of_all: bool = False) -> list[Statement]:
    """Rate at which blocks get an input that all of them load: slope over its size, of one block or of all."""
    found = []
    for written in (False, True):
        points = [
            (1024.0 * one.parameters["kib_per_block"], value)
            for one, value in read.all("same_input", "period", form=form, blocks=blocks, written=written)
        ]
        if len(points) >= 2:
            rate = (blocks if of_all else 1) / slope_of(points)[1]
            found.append((f"same_input {form} blocks={blocks} written={written}", rate))
    return needed(found, f"same_input {form} with {blocks} blocks")


def _stream_share(read: Reader, *kib: int) -> list[Statement]:
    whole = read.one("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=128 * 1024)
    in_flight = tuple(1024 * each for each in kib)
    rates = read.stated("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=in_flight)
    return [(label, rate / whole) for label, rate in rates]


QUEUES_KIB = (48, 64, 96, 128)  # in flight on each SM: beyond, a queue grows and what a hit waits does not


def queue_points(read: Reader) -> list[tuple[str, float, float]]:
    """(case, time of the queue, what a hit in L2 waits) beside streams that ask for more than keeps HBM busy."""
    rate = read.one("loads_beside_stream", "stream_rate", stream_bytes_in_flight_per_sm=128 * 1024)
    idle = read.one("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=0)
    points = []
    for kib in QUEUES_KIB:
        for one, value in read.all("loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=kib * 1024):
            points.append((one.label, kib * 1024 * (read.file.num_sms - 2) / rate, value - idle))
    return points


def queue_rule(read: Reader, without: str = "") -> tuple[float, float]:
    """Share of the queue's time that a hit waits, and time of a queue that costs nothing (sim/components/memory.py)."""
    points = [(at, waited) for label, at, waited in queue_points(read) if label != without]
    if len(points) < 3:
        raise Undetermined(f"{len(points)} stable samples of loads_beside_stream with a queue; accepted are 3 or more")
    at_zero, share = slope_of(points)
    if share <= 0 or at_zero >= 0:
        raise Undetermined("what a hit in L2 waits beside a stream does not grow with the queue")
    return share, -at_zero / share


def _queue(read: Reader, which: int) -> list[Statement]:
    return [("loads_beside_stream mean_in_l2, 48 to 128 KiB", queue_rule(read)[which])]


def _queue_without(read: Reader, which: int) -> list[Statement]:
    labels = [label for label, _, _ in queue_points(read)]
    return [(f"without {label}", queue_rule(read, label)[which]) for label in labels] if len(labels) > 3 else []


L2_READINGS: tuple[Reading, ...] = (
    Reading(
        "l2_read_bytes_per_s", 3,
        "All SMs, each returning to its own part of 8.7 to 52 MB; around: parts that change SM, 17 to 47 MB.",
        centre=lambda read: read.stated("l2_read", "read_rate", tiles_change_sm=False),
        around=lambda read: [
            (sample.label, value)
            for sample, value in read.all("l2_read", "read_rate", tiles_change_sm=True)
            if 10e6 < sample.parameters["region_bytes"] < 51e6
        ],
    ),
    Reading(
        "l2_bytes_per_s_per_sm", 3,
        "One SM alone, 64 KiB of 128-bit loads in flight over 8 MiB; around: 32 KiB in flight, and 1 MiB.",
        centre=lambda read: read.stated("l2_read_one_sm", "read_rate", region_bytes=8 * MIB, loads=4, threads=1024),
        around=lambda read: read.stated("l2_read_one_sm", "read_rate", threads=(512, 1024)),
    ),
    Reading(
        "l2_input_bytes_per_s_per_sm", 2,
        "112 blocks of a chain load the same 4 to 56 KiB at the same moment by plain loads, just stored or not: "
        "slope over the size; around: by copies into shared memory.",
        centre=lambda read: _same_input(read, "loads", blocks=112),
        around=lambda read: _same_input(read, "copies", blocks=112),
    ),
    Reading(
        "l2_fragment_bytes_per_s_per_sm", 2,
        "The same by copies of 64 bytes of each of eight rows, 28 blocks, 4 and 32 KiB.",
        centre=lambda read: _same_input(read, "fragments", blocks=28),
    ),
    Reading(
        "l2_fragment_bytes_per_s", 2,
        "The same, 112 blocks together, 4 to 56 KiB.",
        centre=lambda read: _same_input(read, "fragments", blocks=112, of_all=True),
    ),
    Reading(
        "l2_far_latency_s", 3,
        "Upper group of lines that other SMs wrote just before, less the clock readings; median over SMs.",
        centre=lambda read: less_timestamp(read, "l2_chase_written", "first_read_far_decile"),
    ),
    Reading(
        "l2_loaded_latency_s", 2,
        "Mean of loads that hit L2 while the other SMs stream with 64 KiB in flight each; around: 32, 48 and 128 "
        "KiB. The queue decides.",
        centre=lambda read: less_timestamp(
            read, "loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=LOADED_BYTES
        ),
        around=lambda read: less_timestamp(
            read, "loads_beside_stream", "mean_in_l2", stream_bytes_in_flight_per_sm=(32768, 49152, 131072)
        ),
    ),
    Reading(
        "l2_queueing_utilisation", 2,
        "Rate of a stream with 32 KiB in flight on each SM, of that with 128 KiB: the last at which an L2 hit "
        "takes less than 1.35 times as long; around: 24 and 48 KiB.",
        centre=lambda read: _stream_share(read, 32),
        around=lambda read: _stream_share(read, 24, 48),
    ),
    Reading(
        "l2_hit_queueing_fraction", 2,
        "What L2 hits wait beside streams with 48 to 128 KiB in flight on each SM, by the time that HBM takes for "
        "what is in flight: slope of the straight line; around: one stream left out.",
        centre=lambda read: _queue(read, 0),
        around=lambda read: _queue_without(read, 0),
        joint=True,
    ),
    Reading(
        "hbm_queue_threshold_s", 2,
        "As l2_hit_queueing_fraction: where the straight line begins.",
        centre=lambda read: _queue(read, 1),
        around=lambda read: _queue_without(read, 1),
        joint=True,
    ),
)
