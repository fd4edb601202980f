"""The four switches of the fused path, and the parts that each is made of.

A public build grew in steps finer than a switch, so a switch is a group of *parts*: each turns on the rows of the
stages that it names. All parts of a switch together are the switch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from k3sim.errors import UserError
from k3sim.model.names import RENAMED, check_name

SWITCHES = ("low-batch-kernels", "fused-allreduce", "sharded-router", "l2-prefetch")

#: ``switch.part`` -> how the stages that it changes begin.
PARTS: Mapping[str, tuple[str, ...]] = {
    "low-batch-kernels.kda-decode": ("kda.f_b", "kda.decode", "kda.conv", "kda.recurrent", "kda.gated_norm"),
    "low-batch-kernels.gemv": ("kda.in_proj", "dense."),
    "low-batch-kernels.mla": ("mla.",),
    "low-batch-kernels.experts": ("moe.experts", "moe.pack", "moe.permutation", "moe.routing", "moe.quantise"),
    "low-batch-kernels.shared-experts": ("moe.shared",),
    "fused-allreduce.o-proj": ("kda.", "mla.", "attn_res.ffn"),
    "fused-allreduce.tail": ("attn_res.mixer", "attn_res.snapshots", "moe.", "dense.", "embed.", "head."),
    "sharded-router.latent": ("moe.",),
    "sharded-router.logits": ("moe.",),
    "sharded-router.sampling": ("head.", "host."),
    "l2-prefetch.weights": ("prefetch.",),
}

#: What each switch, and each part of one, changes, in a line.
MEANINGS: Mapping[str, str] = {
    "low-batch-kernels": "kernels for one to a few rows: weight loads before the dependency wait, fewer launches",
    "low-batch-kernels.kda-decode": "one kernel for convolution, recurrence and gated norm of KDA",
    "low-batch-kernels.gemv": "in-projection of KDA, and the dense layer",
    "low-batch-kernels.mla": "MLA: one kernel before attention, one after it",
    "low-batch-kernels.experts": "selection, both expert matrices and their sum in one launch",
    "low-batch-kernels.shared-experts": "products of the shared experts",
    "fused-allreduce": "output projection, all-reduce and residual in one hand-over between ranks",
    "fused-allreduce.o-proj": "output projection of attention, and the residual before the FFN",
    "fused-allreduce.tail": "end of the FFN, the residual before the mixer, embedding and head",
    "sharded-router": "router and sampling divided over the ranks instead of computed in full on each",
    "sharded-router.latent": "latent down-projection divided over the ranks",
    "sharded-router.logits": "router scores divided too, and pushed with the latent",
    "sharded-router.sampling": "sampling from the candidates of every rank, in the graph",
    "l2-prefetch": "weights of the next kernels loaded into L2 while HBM is idle",
    "l2-prefetch.weights": "every prefetch",
}


def parts_of(name: str) -> frozenset[str]:
    """The parts of a switch, or of one part itself.

    Raises UserError for a name that is neither.
    """
    if name in PARTS:
        return frozenset((name,))
    if "." in name and name not in RENAMED["switch"]:
        check_name("part of a switch", name, PARTS)
    check_name("switch", name, SWITCHES)
    return frozenset(part for part in PARTS if part.startswith(f"{name}."))


def switch_of(part: str) -> str:
    return part.partition(".")[0]


def named(parts: Iterable[str]) -> tuple[str, ...]:
    """The shortest names of a set of parts, in the order of the table: a switch where all of its parts are on."""
    on = set(parts)
    names: list[str] = []
    for switch in SWITCHES:
        whole = parts_of(switch)
        names += [switch] if whole <= on else [part for part in PARTS if part in whole & on]
    return tuple(names)


def switches_at(stage: str, names: Iterable[str]) -> frozenset[str]:
    """What is on for one stage: the parts that name it, and the switches that these belong to."""
    parts = [part for name in names for part in parts_of(name) if stage.startswith(PARTS[part])]
    return frozenset(parts) | frozenset(switch_of(part) for part in parts) | frozenset(
        name for name in names if name in SWITCHES
    )


def parts_at(stage: str, switches: Iterable[str]) -> tuple[str, ...]:
    """The parts of some switches that change one stage; a switch itself where none of its parts names the stage."""
    found: list[str] = []
    for switch in switches:
        parts = [part for part in PARTS if switch_of(part) == switch and stage.startswith(PARTS[part])]
        found += parts or [switch]
    return tuple(found)


def chosen(with_switches: Iterable[str], without: Iterable[str]) -> frozenset[str]:
    """Names of what is on: all four less ``without``, or, where some are named, ``with_switches`` alone.

    Raises UserError for an unknown name, and for a part that is both named and taken away.
    """
    added = frozenset[str]().union(*(parts_of(one) for one in with_switches))
    removed = frozenset[str]().union(*(parts_of(one) for one in without))
    both = named(added & removed)
    if both:
        what = "switch" if both[0] in SWITCHES else "part"
        raise UserError(f"{what} {both[0]!r} is given to both --with and --without; give it to one of them")
    return frozenset(named(added if added else frozenset(PARTS) - removed))
