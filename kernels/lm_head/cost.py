"""Cost of the local top-k of distributed sampling, behind the product of this rank's vocabulary shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.work import MachineCode, Pass, Work
from k3sim.model.program import Weight


def select(weights: Sequence[Weight], *, rows: int) -> Work:
    """The local top candidates of finished logits, a launch behind the product: one cluster of eight blocks a row."""
    return Work(
        num_blocks=8 * rows,
        threads_per_block=256,
        smem_bytes_per_block=16 * 1024,
        bytes_in_flight_per_block=16 * 1024,
        max_blocks_per_sm=4,
        passes=(Pass(num_dependent_loads=1, activation_bytes_per_block=8192, num_block_reductions=8),),
    )


CODE: Mapping[str, MachineCode] = {
    "select": MachineCode(num_bytes=26240, serial_instructions=1620),
}
