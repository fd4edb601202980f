"""What one compiled skinny GEMV is: plain data, so that it can be chosen, cached and stored without the toolchain."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from k3sim.errors import UserError

TABLE = Path(__file__).parent / "h200.json"
MAX_ROWS = 16
MAX_PEERS = 16
CHUNK = 8  # bf16 values of one 16-byte access
WARP = 32
MAX_FMA_ROWS = 4
# Dynamic shared memory that a block can have on compute capability 9.0, 10.0 and 10.3 (CUDA programming guide).
MAX_SMEM_BYTES = 227 * 1024
# Before the wait others are still at work, and what they read queues behind what is asked for here. HBM is busy with
# this much an SM; a ring of 200 KB asked for at once makes a small kernel's trip to L2 take 3 us instead of 0.6 (H200).
EARLY_BYTES = 56 * 1024


class Epilogue(Enum):
    """What becomes of the sums y before they are stored."""

    NONE = "none"  # y
    ADD = "add"  # y + operand
    SIGMOID_GATE = "sigmoid_gate"  # operand * sigmoid(y)
    SITU_GLU = "situ_glu"  # 4 tanh(g / 4) sigmoid(g) * 25 tanh(u / 25), g = y[:, :N/2], u = y[:, N/2:]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the weights are dealt to blocks, threads and stages.

    ``method``: "fma" or "mma". ``num_tiles``: parts of the outputs, each done by ``split`` blocks that share K.
    ``threads_k``: threads that together span K (one group). ``groups``: such groups a block (``fma`` only).
    ``rows_per_stage``: output rows of a group in a stage; for ``mma`` 16 times the row tiles of the block.
    ``steps_per_stage``: 32-wide steps along K that a warp takes in a stage (``mma`` only). ``stages``: ring depth.
    """

    method: str
    num_tiles: int
    split: int = 1
    threads_k: int
    groups: int = 1
    rows_per_stage: int
    steps_per_stage: int = 1
    stages: int


@dataclass(frozen=True, kw_only=True)
class GemvConfiguration:
    """One specialisation: ``rows`` times a ``num_outputs`` x ``depth`` weight.

    ``polled``: peers watch each word of the fp32 output, so it is stored with system scope.
    """

    num_outputs: int
    depth: int
    rows: int
    fp32_out: bool = False
    epilogue: Epilogue = Epilogue.NONE
    num_peers: int = 0
    polled: bool = False
    tiling: Tiling

    @property
    def is_mma(self) -> bool:
        return self.tiling.method == "mma"

    @property
    def paired(self) -> bool:
        return self.epilogue is Epilogue.SITU_GLU

    @property
    def out_width(self) -> int:
        """Columns of the output."""
        return self.num_outputs // 2 if self.paired else self.num_outputs

    @property
    def threads(self) -> int:
        return self.tiling.threads_k * self.tiling.groups

    @property
    def slice_depth(self) -> int:
        """K of one block."""
        return self.depth // self.tiling.split

    @property
    def chunks_per_thread(self) -> int:
        """16-byte accesses along K that a thread of the ``fma`` form makes a row."""
        return -(-self.slice_depth // (CHUNK * self.tiling.threads_k))

    @property
    def fills_threads(self) -> bool:
        """Whether every access along K exists for every thread (``fma``)."""
        return self.slice_depth % (CHUNK * self.tiling.threads_k) == 0

    @property
    def column_tiles(self) -> int:
        """8-wide tiles of x rows in the ``mma`` form."""
        return -(-self.rows // 8)

    @property
    def max_columns(self) -> int:
        """Most output columns that a tile gets."""
        return -(-self.out_width // self.tiling.num_tiles)

    @property
    def max_local_rows(self) -> int:
        """Weight rows that a block keeps sums for, rounded up to whole stages."""
        rows = self.max_columns * (2 if self.paired else 1)
        unit = self.tiling.rows_per_stage * (1 if self.is_mma else self.tiling.groups)
        return -(-rows // unit) * unit

    @property
    def num_stages(self) -> int:
        """Stages that a block goes through, at most (exactly, for ``mma``)."""
        tiling = self.tiling
        if self.is_mma:
            return self.slice_depth // (4 * CHUNK * self.num_parts * tiling.steps_per_stage)
        return self.max_local_rows // (tiling.rows_per_stage * tiling.groups)

    @property
    def turns(self) -> int:
        """Outputs that a thread finishes."""
        return -(-self.rows * self.max_local_rows // ((2 if self.paired else 1) * self.threads))

    @property
    def num_parts(self) -> int:
        """Warps whose sums are added up in shared memory for one output."""
        return self.tiling.threads_k // WARP

    @property
    def slots_per_stage(self) -> int:
        """16-byte slots of one thread in one stage."""
        tiling = self.tiling
        if self.is_mma:
            return (tiling.rows_per_stage // 8 + self.column_tiles) * tiling.steps_per_stage
        return tiling.rows_per_stage * self.chunks_per_thread

    @property
    def stage_bytes(self) -> int:
        return self.slots_per_stage * 16 * self.threads

    @property
    def ring_bytes(self) -> int:
        return self.tiling.stages * self.stage_bytes

    @property
    def early_stages(self) -> int:
        """Stages that are on their way at once before the dependency wait (``fma``).

        The shared experts have HBM to themselves until the others are selected, and what they then still lack waits
        behind all that those ask for: they ask at once (13 layers of the fused path, H200: 598 us, so 600.5).
        """
        return self.tiling.stages if self.paired else max(1, EARLY_BYTES // self.stage_bytes)

    @property
    def partial_bytes(self) -> int:
        return self.num_parts * self.rows * self.max_local_rows * 4

    @property
    def smem_bytes(self) -> int:
        # In the mma form sums leave the registers when the ring is done with, and take its place.
        received = self.tiling.split * self.rows * self.max_local_rows * 4 if self.tiling.split > 1 else 0
        body = max(self.ring_bytes, self.partial_bytes) if self.is_mma else self.ring_bytes + self.partial_bytes
        return body + received

    def check(self) -> GemvConfiguration:
        """Itself. Raises UserError where the tiling cannot do the shape."""
        tiling, unit = self.tiling, CHUNK
        if self.is_mma:
            unit = 4 * CHUNK * (tiling.threads_k // WARP) * tiling.steps_per_stage
        wrong = {
            f"depth {self.depth} in {tiling.split} slices of a multiple of {unit}": self.depth % (tiling.split * unit),
            f"threads_k {tiling.threads_k} in whole warps": tiling.threads_k % WARP,
            f"{self.threads} threads a block, at most 1024": self.threads > 1024,
            f"rows {self.rows}, 1 to {MAX_ROWS}": not 1 <= self.rows <= MAX_ROWS,
            f"num_peers {self.num_peers}, at most {MAX_PEERS}": self.num_peers > MAX_PEERS,
            "fp32 outputs and peers where they are polled": self.polled and not (self.fp32_out and self.num_peers),
            f"split {tiling.split}, 1, 2, 4 or 8": tiling.split not in (1, 2, 4, 8),
            f"num_outputs {self.num_outputs} in gate and up pairs": self.paired and self.num_outputs % 2,
            f"{self.smem_bytes} B of shared memory, at most {MAX_SMEM_BYTES}": self.smem_bytes > MAX_SMEM_BYTES,
        }
        if self.is_mma:
            wrong |= {
                "one group": tiling.groups != 1,
                f"rows_per_stage {tiling.rows_per_stage} in 16s": tiling.rows_per_stage % 16,
                f"{self.max_local_rows} rows in one stage": self.max_local_rows > tiling.rows_per_stage,
            }
        else:
            values = tiling.rows_per_stage * self.rows
            wrong |= {
                f"{values} sums a thread and stage, at most 32": values > WARP,
                f"{self.rows} rows of x in registers, at most {MAX_FMA_ROWS}": self.rows > MAX_FMA_ROWS,
            }
        for rule, broken in wrong.items():
            if broken:
                raise UserError(f"skinny_gemv tiling: needs {rule}")
        return self


# A block and its successor, which fills its ring meanwhile, share an SM's 228 KB; 1 KB a block is the system's.
SHARED_RING_BYTES = 104 * 1024
# Where a block streams several rings, a deep ring for itself is worth more than an early successor (h200.json).
WHOLE_RING_BYTES = 200 * 1024
WHOLE_FROM_BYTES = 300 * 1024


@functools.cache
def measured_tilings() -> dict[tuple[int, int], dict[int, Tiling]]:
    """The table of the H200: by (N, K), then by the most rows that a tiling serves, ascending."""
    table: dict[tuple[int, int], dict[int, Tiling]] = {}
    for one in sorted(json.loads(TABLE.read_text())["entries"], key=lambda one: one["rows"]):
        table.setdefault((one["num_outputs"], one["depth"]), {})[one["rows"]] = Tiling(**one["tiling"])
    return table


def rule_tiling(*, num_outputs: int, depth: int, rows: int, paired: bool = False, num_sms: int = 132) -> Tiling:
    """A tiling from shape alone, for what no table lists. One or two rows use FMAs, more use tensor cores."""
    if (rows <= 2 or depth % (4 * CHUNK)) and rows <= MAX_FMA_ROWS:
        return _fma_tiling(num_outputs, depth, rows, paired, num_sms)
    return _mma_tiling(num_outputs, depth, rows, num_sms)


def _fma_tiling(num_outputs: int, depth: int, rows: int, paired: bool, num_sms: int) -> Tiling:
    num_chunks = depth // CHUNK
    # The fewest accesses a thread that leave a group at most 512 threads; exact divisions before remainders.
    spans = [-(-num_chunks // (WARP * c)) * WARP for c in range(1, 9)]
    spans = [span for span in spans if span <= 512] or spans[-1:]
    threads_k = next((span for span in spans if num_chunks % span == 0), spans[0])
    accesses = -(-num_chunks // threads_k)
    columns = num_outputs // 2 if paired else num_outputs
    per_tile = -(-columns // num_sms) * (2 if paired else 1)
    groups = max(1, min(384 // threads_k, per_tile))
    rows_per_stage = max(1, min(4 // accesses, 4 // rows, -(-per_tile // groups)))
    ring_bytes = WHOLE_RING_BYTES if per_tile * depth * 2 >= WHOLE_FROM_BYTES else SHARED_RING_BYTES
    stages = ring_bytes // (rows_per_stage * accesses * 16 * threads_k * groups)
    return Tiling(
        method="fma",
        num_tiles=min(num_sms, columns),
        threads_k=threads_k,
        groups=groups,
        rows_per_stage=rows_per_stage,
        stages=max(1, min(stages, -(-per_tile // (groups * rows_per_stage)))),
    )


def _mma_tiling(num_outputs: int, depth: int, rows: int, num_sms: int) -> Tiling:
    num_16s = -(-num_outputs // 16)
    row_tiles = min(4, -(-num_16s // num_sms))
    num_tiles = -(-num_16s // row_tiles)
    steps = depth // (4 * CHUNK)
    split = 1
    # Split while a block has more than its ring holds and two blocks an SM still hold them all.
    while (
        split < 8
        and row_tiles == 1
        and 16 * depth * 2 > 64 * 1024 * split
        and num_tiles * split * 2 <= num_sms * 7 // 4
        and steps % (split * 8) == 0
    ):
        split *= 2
    warps = next(w for w in (8, 7, 6, 12, 11, 4, 3, 2, 1) if steps // split % w == 0)
    stage_bytes = (2 * row_tiles + -(-rows // 8)) * 16 * warps * WARP
    ring_bytes = WHOLE_RING_BYTES if row_tiles > 1 else SHARED_RING_BYTES
    return Tiling(
        method="mma",
        num_tiles=num_tiles,
        split=split,
        threads_k=warps * WARP,
        rows_per_stage=16 * row_tiles,
        stages=max(1, min(ring_bytes // stage_bytes, steps // split // warps)),
    )
