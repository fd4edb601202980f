"""Turning what a user gives (names, numbers, paths) into a checked question. Every mistake is a UserError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from k3sim.errors import UserError
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, check_layout, check_workload
from k3sim.model.memory import check_fits
from k3sim.model.paths import find_path
from k3sim.model.paths.own import check_own
from k3sim.model.step import Path as ExecutionPath
from k3sim.options import Options
from k3sim.sim.components.skew import Skew
from k3sim.sim.predict import Question
from k3sim.sim.profile import load_machine


def ask(options: Options) -> tuple[Question, ExecutionPath]:
    """Check everything and build the question and the path; nothing has been simulated or written yet."""
    machine = load_machine(options.machine)
    architecture = load_architecture(options.model)
    path = find_path(
        options.path, with_switches=options.with_switches, without=options.without, kernel_set=options.kernels
    )
    layout = Layout(tp=options.tp, ep=options.ep, dp=options.dp, dcp=options.dcp)
    check_layout(architecture, layout)
    if options.kv_dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {options.kv_dtype!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    workload = Workload(concurrency=options.concurrency, context=options.context, kv_dtype=options.kv_dtype)  # type: ignore[arg-type]
    check_workload(architecture, workload)
    if path.kernel_set == "own":
        check_own(architecture, layout, -(-workload.concurrency // layout.dp))
    if not 0.0 <= options.routing_skew <= 4.0:
        raise UserError(f"routing skew is {options.routing_skew}; accepted: 0 (uniform) to 4")
    if not 0 <= options.seed < 2**31:
        raise UserError(f"seed is {options.seed}; accepted: 0 to {2**31 - 1}")
    check_fits(
        architecture,
        path.layout(layout, workload, options.pad_experts),
        hbm_capacity_bytes=machine.hbm_capacity_bytes,
        machine_name=machine.name,
        concurrency=workload.concurrency,
        context=workload.context,
        kv_dtype=workload.kv_dtype,
    )
    skew = {None: Skew.EXPECTED, True: Skew.SAMPLED, False: Skew.OFF}[options.skew]
    question = Question(
        architecture=architecture,
        layout=layout,
        workload=workload,
        machine=machine,
        skew=skew,
        seed=options.seed,
        routing_skew=options.routing_skew,
        pad_experts=options.pad_experts,
        folded=skew is not Skew.SAMPLED,
    )
    return question, path


def warnings_of(question: Question) -> list[str]:
    """What a reader must know before using the answer."""
    machine, tp = question.machine, question.layout.tp
    if tp > machine.nvlink_domain_gpus:
        return [
            f"{tp} ranks span more than the {machine.nvlink_domain_gpus} GPUs of one NVLink domain of {machine.name}: "
            "exchanges are priced as if they shared one, no network between domains is modelled"
        ]
    return []


def writable_folder(folder: str | Path) -> Path:
    """Make the output folder; UserError when that or writing into it is not possible."""
    import os

    if not str(folder).strip():
        raise UserError("the name of the output folder is empty; give --out a folder")
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {path}: {error.strerror}; give --out a folder") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise UserError(f"the output folder {path} cannot be written; give --out a folder that can")
    return path


def parse_side(text: str, base: Options) -> Options:
    """``key=value,key=value`` on top of ``base``, for one side of a comparison.

    Keys are option names; ``with`` and ``without`` take switches joined by ``+``.
    """
    changes: dict[str, object] = {}
    accepted = "machine, tp, ep, dp, dcp, path, kernels, with, without, concurrency, context, kv-dtype, model"
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = item.partition("=")
        if not separator:
            raise UserError(f"{item!r} in side {text!r} is not key=value; accepted keys: {accepted}")
        if key in ("tp", "ep", "dp", "dcp", "concurrency", "context"):
            try:
                changes[key] = int(value)
            except ValueError:
                raise UserError(f"{key} is {value!r} in side {text!r}; a whole number is accepted") from None
        elif key in ("machine", "path", "kernels", "model"):
            changes[key] = value
        elif key == "kv-dtype":
            changes["kv_dtype"] = value
        elif key in ("with", "without"):
            names: Sequence[str] = [name for name in value.split("+") if name]
            changes["with_switches" if key == "with" else "without"] = tuple(names)
        else:
            raise UserError(f"unknown key {key!r} in side {text!r}; accepted: {accepted}")
    return replace(base, **changes)  # type: ignore[arg-type]
