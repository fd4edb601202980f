"""What one compiled skinny GEMV is: plain data, so that it can be chosen, cached and stored without the toolchain."""

from __future__ import annotations

import functools
import json
import math
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
# Where a block of the ``mma`` form streams several rings, a deep ring for itself is worth more than an early successor.
WHOLE_RING_BYTES = 200 * 1024
# An SM's part of the weights from which on two blocks stream it side by side (``fma``), each with half of the memory.
PAIR_FROM_BYTES = 240 * 1024
MAX_ROW_TILES = 8
# Clusters of four or eight find no room on all SMs at once: a GPC's SMs are no multiple of them (32 clusters of four
# blocks of 200 KB take 11.3 us where 64 of two take 8.0).
CLUSTERED_SHARE = 7 / 8
# What adding up over a cluster costs, as bytes that an SM reads meanwhile, for each doubling of the blocks that share.
DOUBLING_BYTES = 96 * 1024
MIN_STAGES = 3  # of a warp: with two it waits for its own copies
WARP_COUNTS = (8, 10, 9, 7, 6, 12, 11, 5, 4, 3, 2, 1)  # of the ``mma`` form, best first


@functools.cache
def measured_tilings() -> dict[tuple[int, int, bool], dict[int, Tiling]]:
    """The table of the H200: by (N, K, paired), then by the most rows that a tiling serves, ascending."""
    table: dict[tuple[int, int, bool], dict[int, Tiling]] = {}
    for one in sorted(json.loads(TABLE.read_text())["entries"], key=lambda one: one["rows"]):
        key = one["num_outputs"], one["depth"], one.get("paired", False)
        table.setdefault(key, {})[one["rows"]] = Tiling(**one["tiling"])
    return table


def choose_tiling(
    *, num_outputs: int, depth: int, rows: int, paired: bool = False, num_sms: int = 132, measured: bool = True
) -> Tiling | None:
    """The form of a product: that of the table (``measured``: of an H200) where it lists the shape, else by the rule.

    None: the product is cuBLAS's.
    """
    if measured:
        for most_rows, tiling in measured_tilings().get((num_outputs, depth, paired), {}).items():
            if rows <= most_rows:
                return tiling
    return rule_tiling(num_outputs=num_outputs, depth=depth, rows=rows, paired=paired, num_sms=num_sms)


def rule_tiling(
    *, num_outputs: int, depth: int, rows: int, paired: bool = False, num_sms: int = 132
) -> Tiling | None:
    """A tiling from shape and rows alone; None where neither form takes them, and the product is cuBLAS's.

    One or two rows use FMAs, more use tensor cores. The second take a depth of a multiple of 32, the first four rows.
    """
    if (rows <= 2 or depth % (4 * CHUNK)) and rows <= MAX_FMA_ROWS:
        return _fma_tiling(num_outputs, depth, rows, paired, num_sms)
    if depth % (4 * CHUNK):
        return None
    return _mma_tiling(num_outputs, depth, rows, num_sms)


def _fma_tiling(num_outputs: int, depth: int, rows: int, paired: bool, num_sms: int) -> Tiling:
    num_chunks = depth // CHUNK
    # The fewest accesses a thread that leave a group at most 512 threads; exact divisions before remainders.
    spans = [-(-num_chunks // (WARP * c)) * WARP for c in range(1, 9)]
    spans = [span for span in spans if span <= 512] or spans[-1:]
    threads_k = next((span for span in spans if num_chunks % span == 0), spans[0])
    accesses = -(-num_chunks // threads_k)
    columns = num_outputs // 2 if paired else num_outputs
    outputs = 2 if paired else 1
    per_sm_bytes = -(-columns // num_sms) * outputs * depth * 2
    pair = per_sm_bytes >= PAIR_FROM_BYTES
    num_tiles = min(num_sms * (2 if pair else 1), columns)
    per_tile = -(-columns // num_tiles) * outputs
    groups = max(1, min(384 // threads_k, per_tile))
    rows_per_stage = max(1, min(4 // accesses, 8 // rows, -(-per_tile // groups)))
    stages = SHARED_RING_BYTES // (rows_per_stage * accesses * 16 * threads_k * groups)
    return Tiling(
        method="fma",
        num_tiles=num_tiles,
        threads_k=threads_k,
        groups=groups,
        rows_per_stage=rows_per_stage,
        stages=max(1, min(stages, -(-per_tile // (groups * rows_per_stage)))),
    )


def _mma_tiling(num_outputs: int, depth: int, rows: int, num_sms: int) -> Tiling:
    """One block an SM, with a ring of all its memory; of such forms the one whose busiest SM reads least.

    A block reads its outputs' weights and, from L2, its part of all rows of x; wider blocks that share K read less x.
    """
    num_16s, steps, column_tiles = -(-num_outputs // 16), depth // (4 * CHUNK), -(-rows // 8)

    def read_bytes(split: int, row_tiles: int) -> float:
        """By the busiest SM."""
        by_block = (16 * row_tiles + 8 * column_tiles) * depth * 2 / split
        most_blocks = num_sms * (CLUSTERED_SHARE if split > 2 else 1)
        num_waves = math.ceil(-(-num_16s // row_tiles) * split / most_blocks)
        return num_waves * by_block + DOUBLING_BYTES * (split.bit_length() - 1)

    forms = [
        (split, row_tiles)
        for split in (1, 2, 4, 8)
        for row_tiles in range(1, MAX_ROW_TILES + 1)
        if steps % split == 0
    ]
    split, row_tiles = min(forms, key=lambda form: read_bytes(*form))
    fitting = [count for count in WARP_COUNTS if steps // split % count == 0]
    warps = next((count for count in fitting if steps // split // count >= MIN_STAGES), fitting[-1])
    stage_bytes = (2 * row_tiles + column_tiles) * 16 * warps * WARP
    return Tiling(
        method="mma",
        num_tiles=-(-num_16s // row_tiles),
        split=split,
        threads_k=warps * WARP,
        rows_per_stage=16 * row_tiles,
        stages=max(1, min(WHOLE_RING_BYTES // stage_bytes, steps // split // warps)),
    )
