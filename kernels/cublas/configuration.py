"""What cuBLAS launches for a product of one to 128 rows: its records on an H200, and the rule for other sizes.

cuBLAS is closed; what a profiler records of its launches (grid, threads, registers, shared memory) is not, and its
kernels' names say tile, stages and cluster (``nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_TNT``: a tile of 64 outputs and
8 rows, 16 stages 64 deep, clusters of 4 blocks). ``h200.json`` holds one record a shape and number of rows; its head
says with which versions, when, and the command that makes it.

**Other sizes.** Of a listed shape, the record of the next larger number of rows, beyond the largest the last one:
cuBLAS chooses by tiles of rows. Of another shape, the listed one of the same kind (one product, or one a head) that is
nearest in outputs and depth, measured in factors of two, with its grid divided anew by its tile.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from math import log2
from pathlib import Path
from typing import Any

COLUMNS = (
    "heads", "outputs", "depth", "rows", "kernel", "blocks", "threads", "registers", "smem_bytes", "add_up_blocks",
    "add_up_threads", "add_up_registers",
)  # fmt: skip
_NAME = re.compile(r"nvjet_\w+?_(\d+)x(\d+)_(\d+)x(\d+)_(\d+)x(\d+)_")


@dataclass(frozen=True, kw_only=True)
class CublasLaunch:
    """The launches of one product: the one that multiplies, and where it splits K the one that adds up."""

    tile_outputs: int
    tile_rows: int
    stage_depth: int
    stages: int
    cluster_blocks: int
    num_blocks: int
    threads: int
    registers: int
    smem_bytes: int
    add_up_blocks: int  # 0: K is not split
    add_up_threads: int
    add_up_registers: int

    @property
    def ring_weight_bytes(self) -> int:
        """Of a block: what its stages hold of the weights."""
        return self.stages * self.stage_depth * self.tile_outputs * 2


def _launch(row: list[Any]) -> CublasLaunch:
    """A row of the file, without the columns that say which product it is of."""
    name, blocks, threads, registers, smem_bytes, add_blocks, add_threads, add_registers = row
    found = _NAME.match(name)
    assert found is not None, f"a kernel of cuBLAS with another form of name: {name}"
    tile_outputs, tile_rows, stage_depth, stages, cluster_x, cluster_y = map(int, found.groups())
    return CublasLaunch(
        tile_outputs=tile_outputs,
        tile_rows=tile_rows,
        stage_depth=stage_depth,
        stages=stages,
        cluster_blocks=cluster_x * cluster_y,
        num_blocks=blocks,
        threads=threads,
        registers=registers,
        smem_bytes=smem_bytes,
        add_up_blocks=add_blocks,
        add_up_threads=add_threads,
        add_up_registers=add_registers,
    )


@cache
def launches() -> dict[tuple[bool, int, int], dict[int, CublasLaunch]]:
    """(a product a head, outputs of all heads, depth) -> rows -> launch, rows ascending."""
    document: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text())
    assert tuple(document["columns"]) == COLUMNS
    found: dict[tuple[bool, int, int], dict[int, CublasLaunch]] = {}
    for heads, outputs, depth, rows, *launch in sorted(document["launches"], key=lambda row: row[:4]):
        found.setdefault((heads > 0, max(1, heads) * outputs, depth), {})[rows] = _launch(launch)
    return found


def cublas_launch(*, num_outputs: int, depth: int, rows: int, by_head: bool = False) -> CublasLaunch:
    """What cuBLAS launches for ``rows`` rows of ``[num_outputs, depth]``, by the rule of this module.

    ``by_head``: a product a head, whose ``num_outputs`` are those of all heads.
    """
    listed = launches()
    if (found := listed.get((by_head, num_outputs, depth))) is not None:
        return _of_rows(found, rows)

    def distance(other: tuple[bool, int, int]) -> float:
        return abs(log2(other[1] / num_outputs)) + abs(log2(other[2] / depth))

    nearest = min((one for one in listed if one[0] == by_head), key=distance)
    like = _of_rows(listed[nearest], rows)
    its_tiles, tiles = (-(-outputs // like.tile_outputs) for outputs in (nearest[1], num_outputs))
    # Blocks that share a tile stay as many, and clusters are launched whole.
    blocks = -(-tiles * max(like.num_blocks, its_tiles) // its_tiles)
    return replace(
        like,
        num_blocks=-(-blocks // like.cluster_blocks) * like.cluster_blocks,
        add_up_blocks=-(-like.add_up_blocks * num_outputs // nearest[1]),
    )


def _of_rows(by_rows: dict[int, CublasLaunch], rows: int) -> CublasLaunch:
    listed = list(by_rows)
    return by_rows[listed[min(bisect_left(listed, rows), len(listed) - 1)]]
