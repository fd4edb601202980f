"""SMs: what instructions, products, sums, barriers, hand-overs and fences take."""

from __future__ import annotations

from k3sim.calibrate.fit.readings_launch import CHAIN, chain_by, tiny_stages
from k3sim.calibrate.fit.statements import (
    LOADED_BYTES,
    Reader,
    Reading,
    Statement,
    Undetermined,
    slope_of,
)


def _queued_barrier(read: Reader) -> list[Statement]:
    try:
        factor = read.queue_factor
    except Undetermined:
        return []
    found = read.stated("grid_barrier", "time", blocks=read.file.num_sms)
    return [(f"{label} x queue beside a stream", value * factor) for label, value in found]


INSTRUCTIONS_PER_KIB = 64


def _instructions(read: Reader, *, threads: int, state: str) -> list[Statement]:
    """What an instruction of straight code takes: slope over the sizes."""
    points = [
        (float(INSTRUCTIONS_PER_KIB * one.parameters["code_kib"]), value)
        for one, value in read.all("cold_code", "run", threads=threads, state=state)
    ]
    if len(points) < 3:
        raise Undetermined(f"fewer than 3 stable sizes of cold_code {state} with {threads} threads")
    return [(f"cold_code {state} threads={threads} slope", slope_of(points)[1])]


SM_CLOCK = Reading(
    "sm_clock_hz", 3,
    "clock64 against %globaltimer on every SM, in the run itself.",
    centre=lambda read: [("clocks sm_clock", read.clock_hz)],
)

SM_READINGS: tuple[Reading, ...] = (
    Reading(
        "instruction_s", 3,
        "Straight code of 2 to 32 KB that ran just before, one warp, four chains of its values: slope; around: "
        "eight warps, which share the issue.",
        centre=lambda read: _instructions(read, threads=32, state="warm"),
        around=lambda read: _instructions(read, threads=256, state="warm"),
    ),
    Reading(
        "cold_instruction_s", 3,
        "The same where neither the SMs nor L2 hold it; around: eight warps.",
        centre=lambda read: _instructions(read, threads=32, state="in_hbm"),
        around=lambda read: _instructions(read, threads=256, state="in_hbm"),
    ),
    Reading(
        "dependent_mma_s", 3,
        "mma.sync m16n8k16 in bf16, each adding to the sums of the one before, 1 to 8 warps; around: 16 warps, "
        "and two chains a warp.",
        centre=lambda read: read.stated("product_chain", "step", chains=1, warps=(1, 4, 8)),
        around=lambda read: [
            *read.stated("product_chain", "step", chains=1, warps=16),
            *read.stated("product_chain", "step", chains=2, warps=1),
        ],
    ),
    Reading(
        "warp_sum_s", 3,
        "Five shuffles and additions, each waiting for the one before: what they add to the period of a chain of "
        "kernels; around: blocks of 14 warps.",
        centre=lambda read: chain_by(read, "warp_sums", 1, **CHAIN),
        around=lambda read: chain_by(read, "warp_sums", 1, blocks=132, threads=448),
    ),
    Reading(
        "block_reduction_s", 3,
        "512 threads in a loop: 10 shuffles, shared memory, two __syncthreads; around: 128 to 1,024 threads, and "
        "once in a tiny kernel, with the slowest warp's load in it.",
        centre=lambda read: read.stated("block_reduction", "time", threads=512),
        around=lambda read: [
            *read.stated("block_reduction", "time"),
            *tiny_stages(read, "reduction", pdl=False, tiny_threads=512),
        ],
    ),
    Reading(
        "cluster_sync_s", 2,
        "Barrier of 8 blocks with a store to the neighbour, 16 clusters; around: one cluster, no store.",
        centre=lambda read: read.stated("cluster_barrier", "time", blocks=128, store_to_neighbour=True),
        around=lambda read: read.stated("cluster_barrier", "time"),
    ),
    Reading(
        "grid_barrier_s", 3,
        "A block on every SM, release add and acquire poll by one thread of each; around: fewer blocks, and the "
        "same with its round trips as long as a hand-over's beside a stream at HBM's ceiling.",
        centre=lambda read: read.stated("grid_barrier", "time", blocks=read.file.num_sms),
        around=lambda read: [*read.stated("grid_barrier", "time"), *_queued_barrier(read)],
    ),
    Reading(
        "last_block_s", 3,
        "From the last arrival of a block to loaded data of all, through one counter, 64 blocks and all SMs; "
        "around: fewer and more blocks, and a fence of every thread.",
        centre=lambda read: read.stated(
            "last_block_barrier", "arrival_to_loaded", blocks=(64, read.file.num_sms), fence=False
        ),
        around=lambda read: read.stated("last_block_barrier", "arrival_to_loaded"),
    ),
    Reading(
        "counter_handoff_s", 3,
        "16 bytes and a release store to an acquire poll on another SM, half a round trip, idle and beside up to "
        "32 KiB in flight on each SM; around: beside 64 KiB.",
        centre=lambda read: read.stated(
            "handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=(0, 16384, 32768)
        ),
        around=lambda read: read.stated(
            "handoff_beside_stream", "one_handoff", stream_bytes_in_flight_per_sm=LOADED_BYTES
        ),
    ),
    Reading(
        "system_fence_s", 2,
        "__threadfence_system after a store to own memory, 32 and 256 threads.",
        centre=lambda read: read.stated("fence", "time", scope="system"),
    ),
    Reading(
        "fp4_weights_per_clock_per_sm", 2,
        "The multiplying loop of the experts out of shared memory, 14 and 16 warps: decoding, products, scales, "
        "sums; around: 8 warps, and one block alone.",
        centre=lambda read: read.stated(
            "mxfp4_rate", "weights_per_clock", form="whole", warps=(14, 16), blocks=read.file.num_sms
        ),
        around=lambda read: read.stated("mxfp4_rate", "weights_per_clock", form="whole", warps=(8, 14)),
    ),
)
