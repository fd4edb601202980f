"""Public kernel tables: what they say of a Blackwell profile, and how far it is off on rows that were set aside.

A table is a CSV file, plain or gzipped, with the columns of ``COLUMNS``; one row is one kernel and one shape. Rows that
the simulator has a cost for are turned into chains, the others are counted by the reason why not. Tables are read from
wherever they lie: none is part of the project, only the values that were fitted are, in the profiles.

**Held-out rows.** Before anything is fitted, a third of the rows is set aside by a rule that looks at what was measured
and never at the time: ``crc32`` of machine, operation and shape, modulo three, is zero. All rows of one operation and
shape, from whichever library, fall on the same side.

Traps, and what is done about them. Values of *one kernel a graph replay* hold the launch of the graph: the host's time
for it is added to the prediction, and such rows are never fitted. *Few copies of the weights* in rotation stay in L2
where they are small, and the model prices them cold: such rows are judged, and never fitted. *Eager* timings measure
the host and are left out, and so are collectives, whose counterpart is priced from primitives.
"""

from __future__ import annotations

import json
import re
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.chain import ChainedKernel, bf16, chain_us, kda_counts
from k3sim.calibrate.fit.kernel_fit import KernelFit, Parameters, Shape, fit_kernels
from k3sim.calibrate.fit.kernel_table_file import COLUMNS, cells_of
from k3sim.errors import UserError
from k3sim.model.documents.document import join, shown, shown_path
from k3sim.sim.machine import Machine
from k3sim.sim.profile import profile_path

MAX_ROWS = 16  # rows of a batch: decode at low concurrency
HIDDEN, LATENT, INTERMEDIATE, EXPERTS, TOP_K = 7168, 3584, 3072, 896, 16
TOO_MANY = f"more than {MAX_ROWS} rows"


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """A public reading as a chain of kernels that the simulator can price."""

    machine: str
    group: str
    op: str
    shape: str
    measured_us: float
    kernels: tuple[ChainedKernel, ...]
    copies: int | None = None
    one_a_replay: bool = False

    @property
    def held_out(self) -> bool:
        """Whether the rule sets this row aside: it is judged, and nothing is taken from it."""
        return zlib.crc32(f"{self.machine}|{self.op}|{self.shape}".encode()) % 3 == 0

    def stays_in_l2(self, machine: Machine) -> bool:
        """Whether all copies of the weights fit into L2, so that none is read from memory after the first round."""
        weights = sum(num_bytes for kernel in self.kernels for _, _, num_bytes in kernel.weights)
        return self.copies is not None and self.copies * weights <= machine.l2_effective_bytes

    def predicted_us(self, machine: Machine) -> float:
        chain = chain_us(self.kernels, machine)
        return chain + (machine.host_graph_launch_s * 1e6 if self.one_a_replay else 0.0)


def read_tables(paths: Iterable[Path], machines: Sequence[str]) -> tuple[list[TableRow], dict[str, int]]:
    """Rows of ``machines`` that can be priced, and how many of the others there are by reason.

    Raises UserError, all faults of a table in one line, for a file that cannot be read, is something else or lacks a
    column, for rows without all columns, and for times that are no number.
    """
    rows: list[TableRow] = []
    skipped: dict[str, int] = {}
    for path in paths:
        faults: list[str] = []
        for line, cells in cells_of(path):
            try:
                found = row_of(cells)
            except UserError as fault:
                faults.append(f"line {line}: {fault}")
                continue
            if isinstance(found, str):
                skipped[found] = skipped.get(found, 0) + 1
            elif found.machine in machines:
                rows.append(found)
        if faults:
            raise UserError(join(shown_path(path), faults))
    return rows, skipped


def row_of(given: Mapping[str, str | None]) -> TableRow | str:
    """The row as a chain, or why there is none. Raises UserError for a short row, or a time that is no number."""
    cells = {name: given.get(name) or "" for name in COLUMNS}
    lacking = [name for name in COLUMNS if given.get(name) is None]
    if lacking:
        raise UserError(f"lacks {', '.join(lacking)}")
    machine = _machine(cells["hardware"])
    if machine is None:
        return "machine without a profile"
    if "eager" in cells["condition"].lower():
        return "eager: the host is measured"
    for group, op, read in READERS:
        if re.search(op, cells["op"]) is None:
            continue
        try:
            kernels, copies = read(cells)
        except Unpriced as reason:
            return str(reason)
        if not cells["time_us"].strip():
            return "no time"
        measured_us = _time_us(cells["time_us"])
        replay = "one kernel per CUDA-graph replay" in cells["notes"]
        return TableRow(
            machine=machine,
            group=group,
            op=cells["op"],
            shape=cells["shape"],
            measured_us=measured_us,
            kernels=kernels,
            copies=copies,
            one_a_replay=replay,
        )
    return "no cost for this operation"


def _time_us(cell: str) -> float:
    try:
        found = float(cell.strip().lstrip("~"))
    except ValueError:
        found = 0.0
    if not 0.1 < found < 1e6:
        raise UserError(f"time_us is {shown(cell)}, accepted: 0.1 to 1e+06")
    return found


def _machine(hardware: str) -> str | None:
    """Profile of a single GPU as a table names it."""
    if re.search(r" x\d|\dx |ranks|NVL|world", hardware) and not hardware.endswith(" x1"):
        return None
    found = re.match(r"(?:NVIDIA )?(GB300|GB200|B300|B200|H200)\b", hardware)
    return found.group(1).lower() if found and "/" not in hardware else None


# -- one reader a kind of row -----------------------------------------------------------------------------------------

Chain = tuple[tuple[ChainedKernel, ...], int | None]


class Unpriced(Exception):
    """Nothing can be priced that a row describes, and why."""


def _shape(cells: dict[str, str], *names: str, lacking: str = "shape is not stated") -> list[int]:
    found = _numbers(cells["shape"], *names)
    if found is None:
        raise Unpriced(lacking)
    return found


def _check_rows(rows: int) -> None:
    if rows > MAX_ROWS:
        raise Unpriced(TOO_MANY)


def _numbers(text: str, *names: str) -> list[int] | None:
    found = [re.search(rf"\b{name}=(\d+)", text) for name in names]
    return [int(one.group(1)) for one in found if one] if all(found) else None


def _gemm(cells: dict[str, str]) -> Chain:
    if cells["dtype"] != "bfloat16":
        raise Unpriced("not a bf16 product")
    rows, outputs, depth = _shape(cells, "M", "N", "K", lacking="not a bf16 product")
    _check_rows(rows)
    # cuBLASLt launches its Blackwell kernels as programmatic dependents that wait inside (xiaguan/kern-k3-pp-prefill
    # notes/d-mlp.md, 2026-10).
    operator, launch = ("gemm", "graph") if _machine(cells["hardware"]) == "h200" else ("public_gemm", "pdl")
    kernel = ChainedKernel(operator=f"cublas.{operator}", weights=(bf16(outputs, depth),), shape={"rows": rows},
                launch=launch, trigger="end")  # fmt: skip
    return (kernel,), 6 if "6 different weight copies" in cells["condition"] else None


def _gemv(cells: dict[str, str]) -> Chain:
    rows, outputs, depth = _shape(cells, "M", "N", "K")
    _check_rows(rows)
    kernel = ChainedKernel(operator="skinny_gemv.low_latency", weights=(bf16(outputs, depth),), shape={"rows": rows},
                trigger="stream")  # fmt: skip
    return (kernel,), 8


def _attn_res(cells: dict[str, str]) -> Chain:
    (rows,) = _shape(cells, "tokens", lacking=TOO_MANY)
    _check_rows(rows)
    kernel = ChainedKernel(operator="attn_res.single_block", shape={"rows": rows, "hidden": HIDDEN, "sources": 9},
                launch="graph", trigger="end")  # fmt: skip
    return (kernel,), None


def _kda(cells: dict[str, str]) -> Chain:
    heads, rows = _numbers(cells["shape"], "heads", "batch") or _shape(cells, "H", "batch")
    _check_rows(rows)
    shape = kda_counts(heads, rows)
    return (ChainedKernel(operator="kda_decode.per_head", shape=shape, launch="graph", trigger="end"),), None


def _experts(cells: dict[str, str]) -> Chain:
    if "balanced" not in cells["condition"]:
        raise Unpriced("experts of another popularity")
    tp, ep, rows = _shape(cells, "moe_tp", "moe_ep", "tokens", lacking="experts of another popularity")
    if "w4a8" not in cells["dtype"]:
        raise Unpriced("experts with other activations")
    _check_rows(rows)
    width = -(-INTERMEDIATE // tp // 256) * 256  # the tables' backend pads to it: 384 take as long as 512, 96 as 192
    distinct = max(1, min(EXPERTS, rows * TOP_K) // ep)
    num_bytes = round(3 * width * LATENT * distinct * 4.25 / 8)
    counts = {"rows": rows, "top_k": TOP_K, "distinct_milli": 1000 * distinct}
    w13, w2 = (2 * width, LATENT, num_bytes * 2 // 3), (LATENT, width, num_bytes // 3)
    one: dict[str, Any] = {"launch": "pdl", "trigger": "end"}
    kernels = (
        ChainedKernel(
            operator="unfused.quantise", shape={"rows": rows, "width": LATENT}, launch="graph", trigger="end"
        ),
        ChainedKernel(operator="unfused.permutation", shape={"rows": rows, "experts": EXPERTS, "selects": 1}, **one),
        ChainedKernel(operator="expert_gemv.gemm1", weights=(w13,), shape={**counts, "width": width}, **one),
        ChainedKernel(operator="expert_gemv.gemm2", weights=(w2,), shape={**counts, "latent": LATENT}, **one),
        ChainedKernel(operator="unfused.elementwise", shape={"rows": rows * TOP_K, "width": LATENT}, **one),
    )
    return kernels, None


def _one_launch_experts(cells: dict[str, str]) -> Chain:
    if "standalone" not in cells["condition"]:
        raise Unpriced("experts inside a server")
    (rows,) = _shape(cells, "M", lacking="experts inside a server")
    distinct_milli = round(1000 * EXPERTS * (1 - (1 - TOP_K / EXPERTS) ** rows))
    num_bytes = 3 * 192 * LATENT * distinct_milli * 17 // 32 // 1000
    counts = {"rows": rows, "top_k": TOP_K, "distinct_milli": distinct_milli, "width": 192, "experts": EXPERTS,
              "latent": LATENT, "selects": 0}  # fmt: skip
    weights = ((384, LATENT, num_bytes * 2 // 3), (LATENT, 192, num_bytes // 3))
    return (ChainedKernel(operator="expert_gemv.block", weights=weights, shape=counts, trigger="end"),), None


def _mla(cells: dict[str, str]) -> Chain:
    heads, rows, context = _shape(cells, "heads", "batch", "kv_len")
    _check_rows(rows)
    row_bytes = 576 if "kv fp8" in cells["dtype"] else 1152
    counts = {"rows": rows, "heads": heads, "context": context, "kv_row_bytes": row_bytes, "kv_lora_rank": 512}
    return (ChainedKernel(operator="mla_decode.split_kv", shape=counts, launch="graph", trigger="end"),), None


def _lift(cells: dict[str, str]) -> Chain:
    heads, rows = _shape(cells, "heads", "tokens", lacking=TOO_MANY)
    _check_rows(rows)
    outputs, depth = (heads * 512, 128) if "pre" in cells["op"] else (heads * 128, 512)
    kernel = ChainedKernel(
        operator="cublas.batched_gemm",
        weights=(bf16(outputs, depth),),
        shape={"rows": rows},
        launch="graph",
        trigger="end",
    )
    return (kernel,), None


READERS: Sequence[tuple[str, str, Callable[[dict[str, str]], Chain]]] = (
    ("cuBLAS", r"^GEMM (torch|sglang|vllm)", _gemm),
    ("GEMV", r"^decode GEMV (MLA|KDA|MoE|latent|TP16)|^K3 router GEMM LL|^latent up-proj", _gemv),
    ("attention residual", r"^attention-residual kernel", _attn_res),
    ("KDA", r"^KDA (kda_fused_decode|fused_kda_decode)$|^SGLang fused KDA decode", _kda),
    ("grouped experts", r"^MoE sglang_flashinfer_trtllm", _experts),
    ("one-launch experts", r"^K3 routed MoE one-launch", _one_launch_experts),
    ("MLA", r"^MLA decode", _mla),
    ("lift", r"^mla_gen_(pre|post) (sglang|vllm)_torch_bmm", _lift),
)


# -- fitting ----------------------------------------------------------------------------------------------------------

#: Values that tables fix, the range within which each is looked for, and the group of rows that fixes it. Each group is
#: fitted apart. Primitives that probes have read on the same GPU are not looked for again.
FITTED: Sequence[tuple[Parameters, str]] = (({"tensor_core_setup_s": (1e-8, 5e-6)}, "cuBLAS"),)


@dataclass(frozen=True, kw_only=True)
class TableFit:
    """What the rows that are not held out say of one machine, and the errors of both halves with those values."""

    machine: str
    fits: tuple[KernelFit, ...]
    errors: tuple[tuple[str, bool, Errors], ...]  # group, held out, errors; the last two are of all groups

    def to_dict(self) -> dict[str, Any]:
        """As JSON; docs/json.md describes it."""
        return {
            "machine": self.machine,
            "found": [{**one.__dict__, "profile_value_inside": one.profile_value_inside}
                      for fit in self.fits for one in fit.found],
            "errors": [{"group": group, "held_out": held_out, **errors.__dict__}
                       for group, held_out, errors in self.errors],
        }  # fmt: skip


def fit_tables(machine: Machine, rows: Sequence[TableRow]) -> TableFit:
    """Fit FITTED to cold rows of ``machine`` that are not held out. Raises UserError where there are none."""
    mine = [row for row in rows if row.machine == machine.name]
    fits = []
    values: dict[str, Any] = {}
    for parameters, group in FITTED:
        shapes = [
            Shape(case=f"{row.op} {row.shape}", measured_us=row.measured_us, kernels=row.kernels)
            for row in mine
            if row.group == group and not (row.held_out or row.one_a_replay or row.stays_in_l2(machine))
        ]
        if len(shapes) < len(parameters):
            raise UserError(f"no {group} rows of {machine.name} in the tables; accepted: a table that has some")
        fit = fit_kernels(machine, shapes, parameters, leave_out=False)
        fits.append(fit)
        values |= {one.field: one.value for one in fit.found if one.determined}
    fitted = replace(machine, **values)
    errors = []
    for group in (*dict.fromkeys(name for name, _, _ in READERS), ""):
        for held_out in (False, True):
            chosen = [row for row in mine if row.held_out == held_out and group in ("", row.group)]
            if chosen:
                errors.append((group or "all", held_out, errors_of(chosen, fitted)))
    return TableFit(machine=machine.name, fits=tuple(fits), errors=tuple(errors))


def profile_of(found: TableFit, name: str, source: str) -> dict[str, Any]:
    """The base profile with the values that were determined; ``source`` says which tables they are from."""
    document: dict[str, Any] = json.loads(profile_path(found.machine).read_text(encoding="utf-8"))
    document["name"] = name
    for fit in found.fits:
        for one in fit.found:
            if one.determined and one.low is not None and one.high is not None:
                document["values"][one.field] |= {
                    "value": _digits(one.value), "kind": "fitted", "source": source, "low": _digits(one.low),
                    "high": _digits(one.high), "note": f"k3sim calibrate --tables: {len(fit.residuals)} rows; interval "
                    "by profile likelihood.",
                }  # fmt: skip
    return document


def _digits(value: float) -> float:
    return float(f"{value:.3g}")


# -- judging ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of a group of rows."""

    rows: int
    median: float
    p95: float
    mean_signed: float


def errors_of(rows: Sequence[TableRow], machine: Machine) -> Errors:
    signed = [row.predicted_us(machine) / row.measured_us - 1 for row in rows]
    ordered = sorted(abs(one) for one in signed)
    return Errors(
        rows=len(rows),
        median=statistics.median(ordered),
        p95=ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        mean_signed=statistics.fmean(signed),
    )
