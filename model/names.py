"""Names that users write: how an unknown one is refused, and what names of earlier versions are called now."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from k3sim.errors import UserError

#: Name before -> name now, by what is named. A name that stands here is refused with its successor.
RENAMED: Mapping[str, Mapping[str, str]] = {
    "path": {"persistent": "megakernel"},
    "switch": {
        "size-matched": "low-batch-kernels",
        "welded": "fused-allreduce",
        "shared-routing": "sharded-router",
        "prefetch": "l2-prefetch",
    },
    "part": {
        "kda-decode": "low-batch-kernels.kda-decode",
        "gemv": "low-batch-kernels.gemv",
        "mla": "low-batch-kernels.mla",
        "experts": "low-batch-kernels.experts",
        "shared-experts": "low-batch-kernels.shared-experts",
        "o-proj": "fused-allreduce.o-proj",
        "tail": "fused-allreduce.tail",
        "front": "sharded-router.logits",
        "sampling": "sharded-router.sampling",
        "prefetch": "l2-prefetch.weights",
    },
    "machine value": {
        "hbm_uneven_loss": "hbm_partial_grid_loss",
        "block_tail_s": "kernel_exit_cold_s",
        "held_block_tail_s": "kernel_exit_warm_s",
        "completion_flush_s": "grid_completion_s",
        "early_launch_s": "pdl_trigger_to_launch_s",
        "kernel_entry_s": "kernel_prologue_s",
        "l2_free_queue_s": "hbm_queue_threshold_s",
        "l2_queue_share": "l2_hit_queueing_fraction",
        "product_chain_s": "dependent_mma_s",
    },
    "probe": {
        "asked_at_once": "issue_burst",
        "met_by_burst": "hbm_contention",
        "taken_over": "carve_out_inheritance",
        "kept_carve_out": "carve_out_persistence",
        "meetings": "barriers",
    },
}

#: Names that are gone, by what they named: nothing that is predicted hung on them.
REMOVED: Mapping[str, frozenset[str]] = {
    "machine value": frozenset(
        {
            "fp8_flops",
            "hbm_datasheet_bytes_per_s",
            "l2_capacity_bytes",
            "l2_near_latency_s",
        }
    ),
}


def first_named(kind: str, text: str) -> str:
    """``text`` with the names of ``kind`` as they first were.

    Random draws are keyed by it, so that a new name moves no interval.
    """
    for before, now in RENAMED[kind].items():
        text = re.sub(rf"\b{now}\b", before, text)
    return text


def nearest(given: str, accepted: Iterable[str]) -> str:
    """`` (did you mean ...?)`` for a close name, else nothing."""
    from difflib import get_close_matches

    # A part of a long name counts as much as a short name whole: "route" is near "sharded-router".
    words = {word: name for name in accepted for word in (name.lower(), *name.lower().replace("-", " ").split())}
    found = get_close_matches(given.lower(), words, n=3, cutoff=0.5)
    close = list(dict.fromkeys(words[word] for word in found))
    return f" (did you mean {' or '.join(close)}?)" if close else ""


def check_name(kind: str, given: str, accepted: Iterable[str]) -> None:
    """UserError for a name that is none of ``accepted``; ``kind`` is what it names, and a key of ``RENAMED``."""
    names = list(accepted)
    if given in names:
        return
    now = RENAMED.get(kind, {}).get(given)
    if now is not None:
        raise UserError(f"{kind} {given!r} is called {now!r} now; accepted: {', '.join(names)}")
    raise UserError(f"unknown {kind} {given!r}{nearest(given, names)}; accepted: {', '.join(names)}")
