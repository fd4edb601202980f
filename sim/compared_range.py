"""Which questions lie within what was compared with measured steps, and what a reader must know of the others.

A prediction is as good as its nearest comparison. The table holds, for each family of models and layout by layout, the
concurrency and the context of the steps that were: published results that are judged, and whole ranks on one H200. It
stands here because a prediction may read neither; ``tests/calibrate/compare/test_compared_range.py`` makes it anew from
the records and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from k3sim.model.architecture import Architecture
    from k3sim.model.layout import Layout, Workload


@dataclass(frozen=True, kw_only=True)
class ComparedRange:
    """Least and most of the steps of one family of models and one layout, by its tag."""

    family: str
    layout: str
    concurrency: tuple[int, int]
    context: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.family} {self.layout} at concurrency {_span(self.concurrency)} and context {_span(self.context)}"


KIMI_K3, KIMI_LINEAR, DEEPSEEK = "kimi-k3", "kimi-linear", "deepseek"
SPARSE, GROUPED = " with sparse attention", "grouped-query attention"

COMPARED = (
    ComparedRange(family=KIMI_K3, layout="tp16ep1dcp1", concurrency=(1, 16), context=(512, 131072)),
    ComparedRange(family=KIMI_K3, layout="tp8ep1dcp1", concurrency=(1, 16), context=(384, 8704)),
    ComparedRange(family=KIMI_K3, layout="tp8ep8dcp1", concurrency=(1, 1), context=(1024, 1024)),
    ComparedRange(family=KIMI_K3, layout="tp8ep8dcp8", concurrency=(24, 48), context=(131072, 131072)),
    ComparedRange(family=DEEPSEEK, layout="tp8ep1dcp1", concurrency=(1, 16), context=(1536, 8704)),
    ComparedRange(family=DEEPSEEK, layout="tp8ep4dcp1", concurrency=(1, 1), context=(1900, 8492)),
    ComparedRange(family=DEEPSEEK, layout="tp8ep8dcp1", concurrency=(1, 16), context=(1536, 8492)),
    ComparedRange(family=DEEPSEEK, layout="tp4ep1dcp1", concurrency=(1, 16), context=(1536, 8704)),
    ComparedRange(family=DEEPSEEK, layout="tp4ep4dcp1", concurrency=(1, 16), context=(1536, 1536)),
)


def family_of(architecture: Architecture) -> str:
    """Which comparisons count for a model: by its residual, its mixers, and whether attention is sparse."""
    if architecture.gqa_layers:
        return GROUPED
    sparse = SPARSE if architecture.mla.index_heads else ""
    if architecture.attn_res_block_size:
        return KIMI_K3 + sparse
    return (KIMI_LINEAR if architecture.kda_layers else DEEPSEEK) + sparse


def range_warnings(architecture: Architecture, layout: Layout, workload: Workload) -> list[str]:
    """What lies outside of ``COMPARED``, as one line, and how many groups would be idle, as another."""
    found = []
    if layout.num_groups > workload.concurrency:
        idle = layout.num_groups - workload.concurrency
        groups = "replicas" if layout.attn_dp == 1 else "attention groups"
        found.append(
            f"{idle} of {layout.num_groups} {groups} {'has' if idle == 1 else 'have'} no request at concurrency "
            f"{workload.concurrency}: their GPUs are idle, and tok/s/GPU counts them"
        )
    outside = _outside(family_of(architecture), layout, workload)
    if outside:
        found.append(
            f"no measured step was compared with {outside}, so the error there is not known; 'k3sim validate' shows "
            "what was"
        )
    return found


def _outside(family: str, layout: Layout, workload: Workload) -> str:
    """The first of family, layout, concurrency and context that no comparison covers, with what is; else nothing."""
    of_family = [one for one in COMPARED if one.family == family]
    if not of_family:
        return f"a model of the family {family} (but with {', '.join(dict.fromkeys(one.family for one in COMPARED))})"
    of_layout = next((one for one in of_family if one.layout == layout.tag), None)
    if of_layout is None:
        return f"layout {layout.tag} (but with {', '.join(one.layout for one in of_family)})"
    parts = [
        (f"{name} {value}", f"{name} {_span(span)}")
        for name, value, span in (
            ("concurrency", workload.concurrency, of_layout.concurrency),
            ("context", workload.context, of_layout.context),
        )
        if not span[0] <= value <= span[1]
    ]
    if not parts:
        return ""
    given, covered = (" and ".join(texts) for texts in zip(*parts, strict=True))
    return f"{given} at {layout.tag} (but with {covered})"


def _span(span: tuple[int, int]) -> str:
    low, high = span
    return str(low) if low == high else f"{low} to {high}"


#: The table in words, for a command's help.
COMPARED_TEXT = "; ".join(map(str, COMPARED))
