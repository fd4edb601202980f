"""Footprints of the project's own kernels: registers, shared memory, launch and code, as the compiler made them.

A number that a compiler decides is read from what it built, never typed: ``python -m k3sim.kernels.footprints`` builds
every kernel (CUTLASS, no GPU) and writes one file an architecture beside this module, with the date, the compilers and
their options. Costs ask for a form by its name in ``builds.py``; a test builds and compares. Times are not in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from k3sim.kernels.work import BLOCK_SLOTS, REGISTER_UNIT, Block, MachineCode

MEASURED = "sm_90a"  # of the GPU that the costs' other counts were compared with
# What the columns of a file's rows are, in order.
COLUMNS = (
    "form", "registers", "static_smem_bytes", "dynamic_smem_bytes", "threads", "grid", "cluster", "code_bytes",
    "serial_instructions",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """One compiled form. A dimension of ``grid`` is 0 where the call gives it, which is a number of rows.

    ``static_smem_bytes`` is without the kilobyte that the system keeps for every block. ``serial_instructions``:
    ``kernels/toolchain/serial_code.py`` has the rule.
    """

    registers: int
    static_smem_bytes: int
    dynamic_smem_bytes: int
    threads: int
    grid: tuple[int, int, int]
    cluster: int
    code_bytes: int
    serial_instructions: int

    @property
    def allocated_registers(self) -> int:
        """Of a thread, as an SM gives them out."""
        return -(-self.registers // REGISTER_UNIT) * REGISTER_UNIT

    @property
    def smem_bytes(self) -> int:
        return self.static_smem_bytes + self.dynamic_smem_bytes

    def block(self, *, max_per_sm: int = BLOCK_SLOTS, carve_out_percent: int | None = 100) -> Block:
        """What a block of it holds of an SM."""
        return Block(
            threads=self.threads,
            registers=self.allocated_registers,
            smem_bytes=self.smem_bytes,
            max_per_sm=max_per_sm,
            carve_out_percent=carve_out_percent,
        )


def path_of(architecture: str) -> Path:
    """File of an architecture's footprints."""
    return Path(__file__).with_name(f"{architecture}.json")


@cache
def footprints(architecture: str = MEASURED) -> dict[tuple[str, str], Footprint]:
    """All that an architecture's file holds, by operator and form."""
    document: dict[str, Any] = json.loads(path_of(architecture).read_text())
    assert tuple(document["columns"]) == COLUMNS
    found = {}
    for operator, rows in document["kernels"].items():
        for form, registers, static, dynamic, threads, grid, cluster, code_bytes, serial in rows:
            found[operator, form] = Footprint(
                registers=registers,
                static_smem_bytes=static,
                dynamic_smem_bytes=dynamic,
                threads=threads,
                grid=(grid[0], grid[1], grid[2]),
                cluster=cluster,
                code_bytes=code_bytes,
                serial_instructions=serial,
            )
    return found


def footprint(operator: str, form: str) -> Footprint:
    """The form of ``kernels/<operator>/builds.py`` as built for the H200. An unknown name is a programmer's mistake."""
    return footprints()[operator, form]


def built_code(operator: str, form: str, *, half_the_ranks: str = "") -> MachineCode:
    """Machine code of a form, as built.

    ``half_the_ranks``: the same form for half as many ranks, of a kernel that polls a slot a rank. What grows with the
    ranks is then left out, in proportion: it is part of the exchange's visibility.
    """
    built = footprint(operator, form)
    serial_instructions = built.serial_instructions
    if half_the_ranks:
        serial_instructions = max(0, 2 * footprint(operator, half_the_ranks).serial_instructions - serial_instructions)
    return MachineCode(num_bytes=built.code_bytes, serial_instructions=serial_instructions)
