"""A machine as the simulator sees it: hardware primitives of one GPU and of the NVLink domain it stands in.

A profile is a JSON data file (``sim/machines/*.json``, or the user's own) in which every value carries its
unit, kind, source, date and interval. Only primitives are allowed: no duration here belongs to one kernel of
a model, and none is fitted to an end-to-end decode figure, so a predicted step is a prediction. One,
``rank_skew_relative_sd``, was read inside a step that is not judged for it.
``docs/machines.md`` says how a value was chosen where sources conflict.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

KINDS = ("datasheet", "measured", "fitted", "inferred", "user")

#: Points of a curve: (bytes in flight per SM with all SMs active, bytes per second of the whole GPU).
Curve = tuple[tuple[float, float], ...]


def _unit(unit: str, *, zero: bool = False) -> dict[str, Any]:
    """Metadata of a profile field: its unit, and whether zero is a value it can have."""
    return {"unit": unit, "zero": zero}


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a value comes from and how far it may be off.

    ``low`` and ``high`` bound the value in its own unit; for a curve they are factors on all its points.
    ``date`` is "YYYY-MM" of the source, or None where it states none.
    """

    unit: str
    kind: str  # one of KINDS
    source: str
    date: str | None
    low: float
    high: float
    note: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware primitives of one GPU and its NVLink domain, in SI units.

    This table is the only list of a profile's fields: name, type, unit, and where zero is allowed. Durations
    may be zero (a what-if without that cost); sizes and rates may not.
    """

    name: str
    title: str
    provenance: Mapping[str, Provenance] = field(hash=False, repr=False)

    # Streaming multiprocessors
    num_sms: int = field(metadata=_unit("SM"))
    sm_clock_hz: float = field(metadata=_unit("Hz"))
    smem_bytes_per_sm: int = field(metadata=_unit("B"))
    max_smem_bytes_per_block: int = field(metadata=_unit("B"))
    threads_per_sm: int = field(metadata=_unit("thread"))

    # HBM: capacity, ceiling that a read-only stream reaches, idle pointer chase, rate against
    # bytes in flight, and the most that one SM draws
    hbm_capacity_bytes: int = field(metadata=_unit("B"))
    hbm_read_bytes_per_s: float = field(metadata=_unit("B/s"))
    hbm_latency_s: float = field(metadata=_unit("s", zero=True))
    hbm_in_flight_curve: Curve = field(metadata=_unit("B/SM, B/s"))
    hbm_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    # What a grid on more than half of the SMs and not on all loses at most: blocks that share a pair of SMs end last
    hbm_partial_grid_loss: float = field(metadata=_unit("1", zero=True))
    # Bytes moved where as many are written as are read, and what one SM brings into L2 by bulk prefetches
    hbm_copy_bytes_per_s: float = field(metadata=_unit("B/s"))
    prefetch_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))

    # L2: size for data that every SM reads, rate to all SMs and to one SM, latency to the far partition and under load
    l2_effective_bytes: int = field(metadata=_unit("B"))
    l2_read_bytes_per_s: float = field(metadata=_unit("B/s"))
    l2_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    # What an SM loads of an input that all others load at the same moment: by whole rows; and as operands of tensor
    # cores lie, in pieces of 64 bytes, with what L2 hands out of them in all
    l2_input_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    l2_fragment_bytes_per_s_per_sm: float = field(metadata=_unit("B/s"))
    l2_fragment_bytes_per_s: float = field(metadata=_unit("B/s"))
    l2_far_latency_s: float = field(metadata=_unit("s", zero=True))
    l2_loaded_latency_s: float = field(metadata=_unit("s", zero=True))  # while HBM streams at its ceiling
    # Share of HBM's rate from which on an L2 hit queues. Where more is asked for than keeps HBM busy: the share of the
    # queue's time that a hit waits, and the time of a queue that costs nothing
    l2_queueing_utilisation: float = field(metadata=_unit("1"))
    l2_hit_queueing_fraction: float = field(metadata=_unit("1", zero=True))
    hbm_queue_threshold_s: float = field(metadata=_unit("s", zero=True))

    # Launch. Without PDL the first instruction of the next graph node comes completion_flush + launch_latency
    # after the last of its predecessor; a PDL kernel that already waits resumes completion_flush after it.
    launch_latency_s: float = field(metadata=_unit("s", zero=True))
    grid_completion_s: float = field(metadata=_unit("s", zero=True))
    # A PDL kernel's first instruction comes early_launch after the last block of its predecessor has triggered; where
    # its SMs are taken, block_refill after the end of the block that makes room. Of several nodes behind one, each
    # starts fork later than the one before it.
    pdl_trigger_to_launch_s: float = field(metadata=_unit("s", zero=True))
    block_refill_s: float = field(metadata=_unit("s", zero=True))
    fork_s: float = field(metadata=_unit("s", zero=True))
    # Inside: parameters and constants of every launch; stragglers and stores at the end of every kernel, whose code is
    # fetched or held.
    kernel_prologue_s: float = field(metadata=_unit("s", zero=True))
    kernel_exit_cold_s: float = field(metadata=_unit("s", zero=True))
    kernel_exit_warm_s: float = field(metadata=_unit("s", zero=True))
    block_dispatch_s: float = field(metadata=_unit("s", zero=True))  # for each block of a grid
    # From one instruction of a warp to the next in straight code, which its SM holds, or fetches
    instruction_s: float = field(metadata=_unit("s", zero=True))
    cold_instruction_s: float = field(metadata=_unit("s", zero=True))
    host_launch_s: float = field(metadata=_unit("s", zero=True))  # CPU time of one launch call
    host_graph_launch_s: float = field(metadata=_unit("s", zero=True))  # CPU time of one graph launch call

    # Synchronisation: a sum over one warp; a tree reduction over one block; arrive and wait of a cluster; all blocks of
    # a grid; the last block of a grid, from its arrival to what all others stored; blocks that hand over
    # to another through a counter in L2; fixed cost of a block that uses tensor cores
    warp_sum_s: float = field(metadata=_unit("s", zero=True))
    block_reduction_s: float = field(metadata=_unit("s", zero=True))
    cluster_sync_s: float = field(metadata=_unit("s", zero=True))
    grid_barrier_s: float = field(metadata=_unit("s", zero=True))
    last_block_s: float = field(metadata=_unit("s", zero=True))
    counter_handoff_s: float = field(metadata=_unit("s", zero=True))
    tensor_core_setup_s: float = field(metadata=_unit("s", zero=True))
    # From one mma.sync of a warp to the next that adds to its sums
    dependent_mma_s: float = field(metadata=_unit("s", zero=True))

    # Arithmetic, dense; zero where the chip lacks the format
    fp32_fma_per_clock_per_sm: float = field(metadata=_unit("FMA/clock/SM"))
    bf16_flops: float = field(metadata=_unit("FLOP/s"))
    fp4_flops: float = field(metadata=_unit("FLOP/s", zero=True))
    # At few rows the rate at which FP4 weights enter the tensor core (where there is no FP4: are decoded) bounds.
    fp4_weights_per_clock_per_sm: float = field(metadata=_unit("weight/clock/SM"))

    # NVLink: stores leave at the egress rate, arrive one_way later, and a polling peer acts on them a further
    # visibility; a system-scope fence orders stores before a flag
    nvlink_domain_gpus: int = field(metadata=_unit("GPU"))
    nvlink_egress_bytes_per_s: float = field(metadata=_unit("B/s"))
    nvlink_ingress_bytes_per_s: float = field(metadata=_unit("B/s"))
    nvlink_one_way_s: float = field(metadata=_unit("s", zero=True))
    nvlink_visibility_s: float = field(metadata=_unit("s", zero=True))
    system_fence_s: float = field(metadata=_unit("s", zero=True))
    nvlink_multicast: bool = field(metadata=_unit("bool"))
    nvlink_in_switch_reduction: bool = field(metadata=_unit("bool"))
    # A push that is looped back to slots of the own memory: until a poller has seen one slot, and for each further one
    loopback_visibility_s: float = field(metadata=_unit("s", zero=True))
    loopback_slot_s: float = field(metadata=_unit("s", zero=True))

    # Standard deviation between ranks of a kernel's duration, relative to that duration
    rank_skew_relative_sd: float = field(metadata=_unit("1", zero=True))

    # No value of a profile: what each slot beyond the first adds to the visibility of a push (``loopback_fabric``).
    slot_visibility_s: float = 0.0

    def partial_grid_efficiency(self, num_blocks: int) -> float:
        """Share of the read rate that a grid with one block an SM reaches, blocks having equal parts of the bytes.

        Blocks go to one SM of each pair first. Where some then have a pair to themselves and others have not, those
        read faster and end sooner: most is lost where each is half of the blocks, nothing where all are alike.
        """
        if not self.num_sms / 2 < num_blocks < self.num_sms:
            return 1.0
        paired = (2 * num_blocks - self.num_sms) / num_blocks
        return 1.0 - self.hbm_partial_grid_loss * 4 * paired * (1 - paired)

    def hbm_rate_for(self, bytes_in_flight: float) -> float:
        """HBM read rate in bytes/s that ``bytes_in_flight`` over the whole GPU sustain.

        Straight lines in log-log between the curve's points, proportional below the first, constant above the
        last, and never above ``hbm_read_bytes_per_s``.
        """
        assert bytes_in_flight >= 0, bytes_in_flight
        per_sm = bytes_in_flight / self.num_sms
        curve = self.hbm_in_flight_curve
        above = bisect_right(curve, per_sm, key=lambda point: point[0])
        if above == 0:
            rate = curve[0][1] * per_sm / curve[0][0]
        elif above == len(curve):
            rate = curve[-1][1]
        else:
            (x0, y0), (x1, y1) = curve[above - 1], curve[above]
            rate = y0 * (y1 / y0) ** (math.log(per_sm / x0) / math.log(x1 / x0))
        return min(rate, self.hbm_read_bytes_per_s)


#: The fields of a profile: those with a unit.
PROFILE_FIELDS: Mapping[str, Field[Any]] = {one.name: one for one in fields(Machine) if one.metadata}


def describe(machine: Machine) -> list[dict[str, object]]:
    """One row a field, in the order of the profile: field, value, unit, kind, low, high, source.

    ``low`` and ``high`` of a curve are factors on its points.
    """
    return [
        {
            "field": name,
            "value": getattr(machine, name),
            "unit": origin.unit,
            "kind": origin.kind,
            "low": origin.low,
            "high": origin.high,
            "source": origin.source,
        }
        for name, origin in machine.provenance.items()
    ]
