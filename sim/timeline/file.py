"""Timelines as JSON: what ``k3sim timeline`` writes beside its page, and what a measured step is stored as.

Both hold a list ``stages``, one entry a kernel with rank, layer, kind, stage, stream, start_us and end_us. Reading one
gives a ``Timeline`` whose kernels have one ``Phase.RUN`` span each: what they did inside is not in the file. An entry
of a measured step also has what the program knows of the call (``start_end.CallFacts``), so that the file keeps its
meaning when the program changes; ``measured_timeline`` divides the kernels by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind
from k3sim.sim.timeline.critical_path import critical_path, waits_ps
from k3sim.sim.timeline.measured import CallFacts, divide
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

ACCEPTED = Accepted(
    what="a step that 'k3sim timeline' or 'k3sim decode' wrote",
    kinds=(Kind.PREDICTED_STEP, Kind.MEASURED_STEP),
    most_bytes=32 << 20,
)
MEASURED = replace(ACCEPTED, what="a measured step, as 'k3sim decode' writes it", kinds=(Kind.MEASURED_STEP,))


def stage_rows(timeline: Timeline, facts: Mapping[int, CallFacts] | None = None) -> list[dict[str, Any]]:
    """One entry a kernel, by rank and start; ``facts``, by index of a kernel, are added where they are given."""
    ordered = sorted(timeline.kernels, key=lambda run: (run.rank, run.start_ps, run.index))
    return [
        {
            "rank": run.rank,
            "layer": run.layer,
            "kind": run.kind,
            "stage": run.stage,
            "stream": run.stream,
            "start_us": run.start_ps / PS_PER_US,
            "end_us": run.end_ps / PS_PER_US,
            **({} if facts is None else _fact_columns(facts[run.index])),
        }
        for run in ordered
    ]


def _fact_columns(facts: CallFacts) -> dict[str, Any]:
    pairs = [list(pair) for pair in facts.prefetched]
    return {**asdict(facts), "waits_for": list(facts.waits_for), "prefetched": pairs}


def timeline_of(document: Mapping[str, Any]) -> Timeline:
    """The timeline in a document that has been checked (``read_document``), or that this program made."""
    runs = [_run(entry, index) for index, entry in enumerate(document["stages"])]
    ranks = tuple(sorted({run.rank for run in runs}))
    end_ps = max(run.end_ps for run in runs)
    return Timeline(
        machine=str(document.get("machine", "")),
        num_ranks=len(ranks),
        ranks=ranks,
        num_layers=len({run.layer for run in runs}) - 2,
        kernels=runs,
        counters=[],
        # A measured step has its median, of replays that nobody watched, and the kernels of one that was profiled.
        step_ps=end_ps if document.get("measured") is True else max(round(document["step_us"] * PS_PER_US), end_ps),
    )


def measured_timeline(document: Mapping[str, Any], name: str) -> Timeline:
    """The timeline of a measured step, its kernels divided as far as start and end allow; ``name`` is what errors say.

    Raises UserError for a step that was not profiled, or without a rate to divide by.
    """
    if not document.get("stages"):
        raise UserError(f"{name}: this step was not profiled, so it has no kernels; measure it without --no-profile")
    rate = document.get("read_bytes_per_s")
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 1e6 <= rate < 1e18:
        raise UserError(f"{name}: read_bytes_per_s is {rate!r:.40}; 1e6 to 1e18 bytes a second are accepted")
    facts = {entry["call"]: _facts(entry) for entry in document["stages"]}
    return divide(timeline_of(document), facts, rate)


def waits_document(timeline: Timeline) -> dict[str, Any]:
    """Parts of the step and the critical path in microseconds, as the documents hold them."""
    segments = critical_path(timeline)
    stages = {run.index: run.stage for run in timeline.kernels}
    totals: dict[tuple[str, str], int] = {}
    for one in segments:
        key = (stages.get(one.kernel, "host"), one.part.value)
        totals[key] = totals.get(key, 0) + one.end_ps - one.start_ps
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return {
        "waits_us": {part.value: duration_ps / PS_PER_US for part, duration_ps in waits_ps(segments).items()},
        "critical_path": [
            {"stage": stage, "part": part, "us": duration_ps / PS_PER_US} for (stage, part), duration_ps in ordered
        ],
    }


def _facts(entry: Mapping[str, Any]) -> CallFacts:
    return CallFacts(
        call=entry["call"],
        launch=entry["launch"],
        waits_for=tuple(entry["waits_for"]),
        polls=entry["polls"],
        weight_bytes=entry["weight_bytes"],
        kv_state_bytes=entry["kv_state_bytes"],
        early_bytes=entry["early_bytes"],
        prefetched=tuple((call, num_bytes) for call, num_bytes in entry["prefetched"]),
    )


def _run(entry: Mapping[str, Any], index: int) -> KernelRun:
    start_ps, end_ps = (round(entry[name] * PS_PER_US) for name in ("start_us", "end_us"))
    call = entry.get("call")
    return KernelRun(
        index=call if isinstance(call, int) else index,
        rank=entry["rank"],
        layer=entry["layer"],
        kind=entry["kind"],
        stage=entry["stage"],
        stream=entry["stream"],
        start_ps=start_ps,
        end_ps=end_ps,
        spans=[Span(Phase.RUN, start_ps, end_ps)],
    )


def read_document(path: str | Path, *, measured: bool = False) -> dict[str, Any]:
    """A step from a file, checked; ``measured`` asks for one that ``k3sim decode`` wrote.

    Raises UserError, all faults in one line, each with field, value, what is accepted and line, for a file that cannot
    be read, is something else, is of another schema or holds names of one, or is no whole step.
    """
    from k3sim.sim.timeline.step_rules import check_step

    document = read_json(path, MEASURED if measured else ACCEPTED)
    check_step(document)
    document.settle()
    found: dict[str, Any] = document.value
    return found


def read_timeline(path: str | Path) -> Timeline:
    """The timeline in a file of ``k3sim timeline`` or ``k3sim decode``."""
    return timeline_of(read_document(path))
