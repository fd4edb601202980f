"""A measured step read from its file: checked, with what its calls wait for and read, and with its parts.

A predicted step of the same kernels can be read as if it had been measured, so that the two are divided by one rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3sim.calibrate.decode.options import DecodeOptions, case_of
from k3sim.errors import UserError
from k3sim.model.paths import SWITCHES
from k3sim.model.program import Program
from k3sim.sim.timeline.file import measured_timeline, stage_rows, timeline_of, waits_document
from k3sim.sim.timeline.measured import facts_of
from k3sim.sim.timeline.timeline import Timeline


def measured_step(document: Mapping[str, Any], name: str) -> tuple[dict[str, Any], Timeline]:
    """The document with ``profiled_us``, ``waits_us`` and ``critical_path``, and its timeline with divided kernels.

    A file of before calls were kept gets them from the program, where its kernels are still the same. Raises UserError
    where they are not, and as ``measured_timeline`` does.
    """
    stages = document.get("stages")
    old = isinstance(stages, list) and stages and isinstance(stages[0], dict) and "call" not in stages[0]
    if old and document.get("measured") is True:
        document = {**document, "stages": _with_calls(document, name)}
    timeline = measured_timeline(document, name)
    parts = {"profiled_us": timeline.step_us, **waits_document(timeline)}
    return {**document, **parts, "stages": document["stages"]}, timeline


def _with_calls(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    timeline, program = timeline_of(document), _program_of(document, name)
    environment = document.get("environment")
    num_sms = environment.get("num_sms") if isinstance(environment, dict) else None
    if not isinstance(num_sms, int) or num_sms < 1:
        raise UserError(f"{name}: environment.num_sms is {num_sms!r}; the number of SMs of the GPU is accepted")
    index_of = {(call.layer, call.stage, call.stream): call.index for call in program.calls}
    keys = [(run.layer, run.stage, run.stream) for run in timeline.kernels]
    if sorted(keys) != sorted(index_of):
        raise UserError(
            f"{name}: its kernels are not those that {document.get('command')!r} runs now; measure the step again"
        )
    for run, key in zip(timeline.kernels, keys, strict=True):
        run.index = index_of[key]
    return stage_rows(timeline, facts_of(program, num_sms))


def as_if_measured(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Parts and critical path of a predicted step by starts and ends alone, as those of a measured one.

    A predicted kernel starts when it is handed to the GPU, so its launch is within it and not in *launch*. Raises
    UserError where the document is not a prediction for one rank of the project's own kernels as they are now.
    """
    found = document.get("machine_values")
    values = {row.get("field"): row.get("value") for row in found} if isinstance(found, list) else {}
    posed = {
        **document,
        "measured": True,
        "environment": {"num_sms": values.get("num_sms")},
        "read_bytes_per_s": values.get("hbm_read_bytes_per_s"),
        "layers": max((run.layer for run in timeline_of(document).kernels), default=0),
    }
    _, timeline = measured_step(posed, name)
    return waits_document(timeline)


def _program_of(document: Mapping[str, Any], name: str) -> Program:
    """The program of a measured step as it is now."""
    try:
        switches = tuple(document["switches"])
        fused = document["path"] == "fused"
        options = DecodeOptions(
            path=document["path"],
            with_switches=switches if fused else (),
            without=SWITCHES if fused and not switches else (),
            tp=int(document["layout"].removeprefix("tp").partition("ep")[0]),
            layers=document["layers"],
            concurrency=document["concurrency"],
            context=document["context"],
            kv_dtype=document["kv_dtype"],
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(f"{name}: it does not say which path, layout and workload were measured") from None
    return case_of(options).program
