"""Timelines as JSON: what ``k3sim timeline`` writes beside its page, and what a measured step is stored as.

Both hold a list ``stages``, one entry a kernel with rank, layer, kind, stage, stream, start_us and end_us. Reading one
gives a ``Timeline`` whose kernels have one ``Phase.RUN`` span each: what they did inside is not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from k3sim.errors import UserError
from k3sim.sim.timeline import PS_PER_US, KernelRun, Phase, Span, Timeline

MAX_FILE_BYTES = 256 << 20
_TEXT = ("kind", "stage", "stream")
_NUMBERS = ("start_us", "end_us")


def stage_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """One entry a kernel, by rank and start."""
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
        }
        for run in ordered
    ]


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
    return Timeline(
        machine=str(document.get("machine", "")),
        num_ranks=len(ranks),
        ranks=ranks,
        num_layers=len({run.layer for run in runs}) - 2,
        kernels=runs,
        counters=[],
        step_ps=max(round(step_us * PS_PER_US), *(run.end_ps for run in runs)),
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
    return KernelRun(
        index=index,
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
    return document


def read_timeline(path: str | Path) -> Timeline:
    """The timeline in a file of ``k3sim timeline`` or ``k3sim decode``."""
    return timeline_of(read_document(path), str(path))
