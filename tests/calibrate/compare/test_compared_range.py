"""The range that predictions were compared in is that of the records, and questions outside it are answered with a
warning."""

from __future__ import annotations

import pytest

from k3sim.calibrate.compare.shipped_steps import measured_steps
from k3sim.calibrate.evidence import load_evidence
from k3sim.sim.compared_range import COMPARED, KIMI_K3, ComparedRange, family_of
from k3sim.sim.options import Options
from k3sim.sim.question import ask, question_of


def test_the_table_is_that_of_the_records() -> None:
    points = [((KIMI_K3, one["layout"]), one["concurrency"], one["context"]) for one in measured_steps()]
    for record in load_evidence():
        if record.kind == "step" and record.judged:
            question = question_of(record.command)
            place = (family_of(question.architecture), question.layout.tag)
            points.append((place, question.workload.concurrency, question.workload.context))
    found = set()
    for family, layout in {place for place, _, _ in points}:
        concurrency, context = zip(*((c, n) for place, c, n in points if place == (family, layout)), strict=True)
        spans = {"concurrency": (min(concurrency), max(concurrency)), "context": (min(context), max(context))}
        found.add(ComparedRange(family=family, layout=layout, **spans))
    assert set(COMPARED) == found and len(COMPARED) == len(found)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(), []),
        (Options(tp=8, ep=8), ["with context 8192 at tp8ep8dcp1 (but with context 1024)"]),
        (Options(concurrency=16, context=131072), []),
        (Options(concurrency=17), ["with concurrency 17 at tp16ep1dcp1 (but with concurrency 1 to 16)"]),
        (
            Options(concurrency=128, context=511),
            ["concurrency 128 and context 511 at tp16ep1dcp1 (but with concurrency 1 to 16 and context 512 to 131072)"],
        ),
        (Options(tp=32), ["with layout tp32ep1dcp1 (but with tp16ep1dcp1, tp8ep1dcp1, tp8ep8dcp1, tp8ep8dcp8)"]),
        (Options(dp=64), ["63 of 64 replicas have no request", "with layout tp16dp64ep1dcp1", "1024 GPUs"]),
        (Options(dp=2), ["1 of 2 replicas has no request at concurrency 1", "with layout tp16dp2ep1dcp1", "32 GPUs"]),
        (Options(dp=2, concurrency=2), ["with layout tp16dp2ep1dcp1", "32 GPUs"]),
        (Options(attn_dp=2, path="stock"), ["1 of 2 attention groups has no", "with layout tp16attndp2ep1dcp1"]),
    ],
)
def test_a_question_outside_says_so(options: Options, says: list[str]) -> None:
    warnings = ask(options).warnings
    assert len(warnings) == len(says)
    for warning, part in zip(warnings, says, strict=True):
        assert part in warning
