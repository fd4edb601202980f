"""Cost of the local top-k of distributed sampling, behind the product of this rank's vocabulary shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.work import MachineCode, Pass, Work, block_work
from k3sim.model.program import Weight


def select(weights: Sequence[Weight], *, rows: int) -> Work:
    """The local top candidates of finished logits, a launch behind the product: one cluster of eight blocks a row."""
    return block_work(
        8 * rows,
        Pass(num_dependent_loads=1, activation_bytes_per_block=8192, num_block_reductions=8, num_selection_rounds=8),
        block=footprint("lm_head", "top64_of_10240").block(),
        in_flight_kib=16,
    )


CODE: Mapping[str, MachineCode] = {
    "select": built_code("lm_head", "top64_of_10240"),
}
