"""Cost of the AttnRes combine: a softmax mix of snapshots and the running prefix, then the sublayer's RMSNorm.

``combine`` is the whole of it; ``snapshot_part`` prepares the snapshots' share for a fused consume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import Barrier, MachineCode, Pass, Read, ReadKind, Work
from k3sim.model.program import Weight

BF16_BYTES = 2
SNAPSHOTS = "attn_res/snapshots"


def parameters(hidden: int, *, early: bool) -> Read:
    """Read of the AttnRes norm, pseudo-query and the sublayer's norm, one ``[hidden]`` vector each."""
    return Read(region="", num_bytes=3 * hidden * BF16_BYTES, early=early)


COMBINE, SNAPSHOT_PART = "combine_snapshots8", "snapshot_part_snapshots8"  # the largest forms
ROW_BLOCKS = 4  # of the project's own kernels, which split a row over a cluster


def _row_cluster(
    *, rows: int, hidden: int, num_snapshots: int, loaded_rows: int, num_barriers: int, form: str
) -> Work:
    row_bytes = hidden * BF16_BYTES
    return Work(
        num_blocks=ROW_BLOCKS * rows,
        threads_per_block=224,
        smem_bytes_per_block=footprint("attn_res", form).smem_bytes,
        # Parameters and snapshots, all asked for at once.
        bytes_in_flight_per_block=(num_snapshots + 3) * row_bytes // ROW_BLOCKS,
        max_blocks_per_sm=4,
        registers_per_thread=footprint("attn_res", form).allocated_registers,
        passes=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=loaded_rows * row_bytes // ROW_BLOCKS,
                reads=(
                    parameters(hidden, early=True),
                    Read(
                        region=SNAPSHOTS,
                        num_bytes=rows * num_snapshots * row_bytes,
                        kind=ReadKind.KV_STATE,
                        early=True,
                    ),
                ),
                num_block_reductions=1,
                barrier=Barrier.CLUSTER,
                num_barriers=num_barriers,
            ),
        ),
    )


def combine(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """Mix ``sources`` vectors and normalise: four blocks a row, logits and then the norm over their cluster."""
    return _row_cluster(
        rows=rows, hidden=hidden, num_snapshots=sources - 1, loaded_rows=2, num_barriers=2, form=COMBINE
    )


def snapshot_part(weights: Sequence[Weight], *, rows: int, hidden: int, sources: int) -> Work:
    """The snapshots' share of one call site: four blocks a row.

    The pseudo-query is widened, and so waited for, before the snapshots are asked for: two trips in series. The last is
    that of the fence behind its stores, which whoever joins it relies on.
    """
    work = _row_cluster(
        rows=rows, hidden=hidden, num_snapshots=sources - 1, loaded_rows=0, num_barriers=1, form=SNAPSHOT_PART
    )
    (mix,) = work.passes
    return replace(work, passes=(replace(mix, num_dependent_loads=2), Pass(num_dependent_loads=1)))


CODE: Mapping[str, MachineCode] = {
    "combine": built_code("attn_res", COMBINE),
    "snapshot_part": built_code("attn_res", SNAPSHOT_PART),
}
