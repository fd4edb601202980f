"""Timelines as JSON: what ``k3sim timeline`` writes beside its page, and what a measured step is stored as.

Both hold a list ``stages``, one entry a kernel with rank, layer, kind, stage, stream, start_us and end_us. Reading one
gives a ``Timeline`` whose kernels have one ``Phase.RUN`` span each: what they did inside is not in the file. An entry
of a measured step also has what the program knows of the call (``start_end.CallFacts``), so that the file keeps its
meaning when the program changes; ``measured_timeline`` divides the kernels by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.model.names import RENAMED
from k3sim.sim.export.document import SCHEMA_VERSION
from k3sim.sim.timeline.critical_path import critical_path, waits_ps
from k3sim.sim.timeline.measured import CallFacts, divide
from k3sim.sim.timeline.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

MAX_FILE_BYTES = 256 << 20
_TEXT = ("kind", "stage", "stream")
_NUMBERS = ("start_us", "end_us")


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


def timeline_of(document: Mapping[str, Any], name: str) -> Timeline:
    """The timeline in a document; ``name`` is what errors call it.

    Raises UserError for a document without stages, or with an entry that is not one.
    """
    stages = document.get("stages")
    if not isinstance(stages, list) or not stages:
        raise UserError(f"{name}: no list of stages; give a file that 'k3sim timeline' or 'k3sim decode' wrote")
    runs = [_run(entry, index, name) for index, entry in enumerate(stages)]
    step_us = document.get("step_us")
    if not isinstance(step_us, (int, float)) or isinstance(step_us, bool) or step_us <= 0:
        raise UserError(f"{name}: step_us is {step_us!r}; a positive number of microseconds is accepted")
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
        step_ps=end_ps if document.get("measured") is True else max(round(step_us * PS_PER_US), end_ps),
    )


def measured_timeline(document: Mapping[str, Any], name: str) -> Timeline:
    """The timeline of a measured step, its kernels divided as far as start and end allow; ``name`` is what errors say.

    Raises UserError where the document is none of a measured step, or where an entry is not one.
    """
    if document.get("measured") is not True:
        raise UserError(f"{name}: not a measured step; give a file that 'k3sim decode' wrote")
    if not document.get("stages"):
        raise UserError(f"{name}: this step was not profiled, so it has no kernels; measure it without --no-profile")
    timeline = timeline_of(document, name)
    rate = document.get("read_bytes_per_s")
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 1e6 <= rate < 1e18:
        raise UserError(f"{name}: read_bytes_per_s is {rate!r}; 1e6 to 1e18 bytes a second are accepted")
    if len(timeline.ranks) > 1:
        raise UserError(f"{name}: kernels of {len(timeline.ranks)} ranks; a measured step has those of one")
    facts = [_facts(entry, index, name) for index, entry in enumerate(document["stages"])]
    by_call = {one.call: one for one in facts}
    if len(by_call) < len(facts):
        raise UserError(f"{name}: {len(facts)} stages name {len(by_call)} different calls; each is one call")
    return divide(timeline, by_call, rate)


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


def _facts(entry: Any, index: int, name: str) -> CallFacts:
    lists = [entry.get("waits_for"), entry.get("prefetched")]
    counts = [entry.get(field) for field in ("call", "weight_bytes", "kv_state_bytes", "early_bytes")]
    good = all(isinstance(one, list) for one in lists)
    pairs = lists[1] if good else []
    good = good and all(isinstance(one, list) and len(one) == 2 for one in pairs)
    numbers = [*counts, *(lists[0] if good else []), *(one for pair in pairs for one in pair)] if good else []
    good = good and all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 60 for one in numbers)
    good = good and isinstance(entry.get("polls"), bool) and isinstance(entry.get("launch"), str)
    good = good and all(one < entry["call"] for one in lists[0])
    if not good:
        raise UserError(
            f"{name}: stages[{index}] ({str(entry.get('stage'))[:40]}) does not say what its call waits for and reads: "
            "call, launch, waits_for (earlier calls), polls, weight_bytes, kv_state_bytes, early_bytes and prefetched"
        )
    return CallFacts(
        call=entry["call"],
        launch=entry["launch"],
        waits_for=tuple(lists[0]),
        polls=entry["polls"],
        weight_bytes=entry["weight_bytes"],
        kv_state_bytes=entry["kv_state_bytes"],
        early_bytes=entry["early_bytes"],
        prefetched=tuple((call, num_bytes) for call, num_bytes in pairs),
    )


def _run(entry: Any, index: int, name: str) -> KernelRun:
    if not isinstance(entry, dict):
        raise UserError(f"{name}: stages[{index}] is not an object")
    whole: list[Any] = [entry.get(field) for field in ("rank", "layer")]
    numbers: list[Any] = [entry.get(field) for field in _NUMBERS]
    words: list[Any] = [entry.get(field) for field in _TEXT]
    good = all(isinstance(one, int) and not isinstance(one, bool) for one in whole)
    good = good and all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in numbers)
    good = good and all(isinstance(one, str) for one in words)
    if not good or not 0 <= numbers[0] <= numbers[1] < 1e9:
        raise UserError(
            f"{name}: stages[{index}] is {str(entry)[:80]}; rank, layer, kind, stage, stream, start_us and end_us "
            "with 0 <= start_us <= end_us are accepted"
        )
    start_ps, end_ps = (round(one * PS_PER_US) for one in numbers)
    call = entry.get("call")
    return KernelRun(
        index=call if isinstance(call, int) else index,
        rank=whole[0],
        layer=whole[1],
        kind=words[0],
        stage=words[1],
        stream=words[2],
        start_ps=start_ps,
        end_ps=end_ps,
        spans=[Span(Phase.RUN, start_ps, end_ps)],
    )


def read_document(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError when it cannot be read or is none."""
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{file}: larger than {MAX_FILE_BYTES >> 20} MiB")
        document = json.loads(file.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file}: not valid JSON") from error
    if not isinstance(document, dict):
        raise UserError(f"{file}: not a JSON object")
    check_schema(document, str(file))
    return document


def check_schema(document: Mapping[str, Any], name: str) -> None:
    """Raises UserError for a step of another schema, or with a name of an earlier version, and says what to do."""
    switches = document.get("switches")
    named = {"path": [document.get("path")], "switch": switches if isinstance(switches, list) else []}
    old = [
        f"{kind} {one!r} is called {RENAMED[kind][one]!r} now"
        for kind, names in named.items()
        for one in names
        if isinstance(one, str) and one in RENAMED[kind]
    ]
    version = document.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION or isinstance(version, bool):
        what = "measure it again, or correct the file" if document.get("measured") is True else "predict it again"
        old = [f"schema_version is {version!r:.40}; accepted: {SCHEMA_VERSION}; {what}", *old]
    if old:
        raise UserError(f"{name}: {'; '.join(old)}")


def read_timeline(path: str | Path) -> Timeline:
    """The timeline in a file of ``k3sim timeline`` or ``k3sim decode``."""
    return timeline_of(read_document(path), str(path))
