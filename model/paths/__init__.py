"""Execution paths by name: ``stock``, ``fused`` with its switches, ``megakernel``; public kernels or the project's own.

Sources of the sequences: vLLM's K3 model of autumn 2026 for ``stock`` (vllm/models/kimi_k3/nvidia), and for the
switches the public low-latency builds (vLLM 53525, 53526, 53152, 54168; SGLang 32624, 36304; TokenSpeed 957,
1154; the "k3opt" plugin for 16 GB200).
"""

from __future__ import annotations

from k3sim.errors import UserError
from k3sim.model.names import check_name
from k3sim.model.paths.families import FAMILY_NEXT_WEIGHTS, FAMILY_TABLES
from k3sim.model.paths.megakernel import MEGAKERNEL_TABLES
from k3sim.model.paths.own import OWN_TABLES
from k3sim.model.paths.public import BLOCK_ROWS, FUSED_NEXT_WEIGHTS, FUSED_TABLES, FUSED_TAIL_ROWS
from k3sim.model.step import ANY_ROWS, Path
from k3sim.model.switches import PARTS, SWITCHES, chosen

__all__ = ["ENGINES", "KERNEL_SETS", "PARTS", "PATH_MEANINGS", "PATH_NAMES", "SWITCHES", "find_path"]

#: Every path with what it is, in a line.
PATH_MEANINGS = {
    "stock": "one launch an operation, as a public engine runs it; fused with every switch off",
    "fused": "kernels joined and overlapped, switch by switch",
    "megakernel": "one kernel for the whole step, tasks and counters in place of launches; projected",
}
PATH_NAMES = tuple(PATH_MEANINGS)
# Whose kernels a path runs: the public ones that its sources describe, or those that this project ships.
KERNEL_SETS = ("public", "own")
# Whose list of kernels the stock path of a model is, where two are public.
ENGINES = ("vllm", "sglang")


PUBLIC_TABLES = {**FUSED_TABLES, **FAMILY_TABLES}


def find_path(
    name: str,
    *,
    with_switches: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    kernel_set: str = "public",
    engine: str = "vllm",
) -> Path:
    """The path ``name``; ``fused`` has all four switches unless some are named.

    ``with_switches`` alone starts from none and adds; ``without`` takes away from all four; both name switches, or
    parts of them (``fused-allreduce.o-proj``). ``kernel_set``: the public kernels of that path, or this project's own.
    ``engine``: whose list of public kernels, where engines differ.

    Raises UserError for an unknown path, switch, kernel set or engine, a switch both named and taken away, switches on
    a path that has none, parts of switches with own kernels, and the megakernel with own kernels, which do not exist.
    """
    names = chosen(with_switches, without)
    check_name("path", name, PATH_NAMES)
    if name != "fused" and (with_switches or without):
        raise UserError(f"--with and --without change the path 'fused'; path {name!r} has no switches")
    check_name("kernels", kernel_set, KERNEL_SETS)
    check_name("engine", engine, ENGINES)
    if name == "megakernel":
        if kernel_set == "own":
            raise UserError("path 'megakernel' has no kernels of the project's own; give it with --kernels public")
        return Path(
            name=name,
            switches=frozenset(SWITCHES),
            tables=MEGAKERNEL_TABLES,
            next_weights=FUSED_NEXT_WEIGHTS,
            unpadded_rows=ANY_ROWS,
        )
    switches = names if name == "fused" else frozenset()
    if kernel_set == "own":
        split = sorted(switches.difference(SWITCHES))
        if split:
            raise UserError(
                f"the project's own kernels take a switch whole, and here only a part of it is on ({split[0]}); "
                "give whole switches, or --kernels public"
            )
        return Path(
            name=name,
            switches=switches,
            tables=OWN_TABLES,
            next_weights=FUSED_NEXT_WEIGHTS,
            unpadded_rows=ANY_ROWS,
            kernel_set=kernel_set,
        )
    dedicated_experts = switches & {"low-batch-kernels", "low-batch-kernels.experts"}
    return Path(
        name=name,
        switches=switches,
        tables=PUBLIC_TABLES,
        next_weights={**FUSED_NEXT_WEIGHTS, **FAMILY_NEXT_WEIGHTS},
        unpadded_rows=BLOCK_ROWS if dedicated_experts else 0,
        exchange_rows=FUSED_TAIL_ROWS,
        engine=engine,
    )
