"""Cases of probes as they are kept: a file that is written anew after each case, and that a later run resumes from."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.model.documents.document import Accepted, read_json
from k3sim.model.documents.kinds import Kind

SCHEMA_VERSION = 2
MOST_KEPT = 2000  # of more values (single loads, not repetitions) the percentiles 0 to 100 are kept


def checksum(document: Mapping[str, Any]) -> str:
    """Over a sample file's head and rows; spacing and the checksum itself do not count."""
    rows = document.get("cases", document.get("timings"))
    if not isinstance(rows, list):
        rows = []  # whoever reads the file says what is wrong with it
    head = {name: value for name, value in document.items() if name not in ("checksum", "cases", "timings")}
    return _checksum(head, [_digest(row) for row in rows])


def _checksum(head: Mapping[str, Any], digests: Sequence[str]) -> str:
    return "sha256:" + _digest([_digest(head), *digests])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class CannotResume(ValueError):
    """The file is of another GPU or program, or is no file of probes."""


class Recorder:
    """Takes each case twice and keeps every repetition and a summary of both; writes after every case.

    Cases that ``path`` holds already are not taken again. Raises CannotResume where its head differs from this run's.
    """

    def __init__(self, gpu: Gpu, path: Path, quick: bool, on_case: Callable[[str], None] | None = None) -> None:
        self.path, self.gpu, self.quick = path, gpu, quick
        self.replays = 20 if quick else 200
        self.started = time.monotonic()
        self.on_case = on_case or _print_line
        self.head = metadata(gpu, quick)
        self.rows: list[str] = []
        self.digests: list[str] = []
        self.done: set[str] = set()
        for case in cases_of(path, self.head):
            self._keep(case)

    def record(
        self, probe: str, parameters: dict[str, Any], sampler: Callable[[], dict[str, tuple[str, Any]]]
    ) -> None:
        """``sampler`` gives {quantity: (unit, readings)}, and is called twice."""
        if _name(probe, parameters) in self.done:
            return
        before_hz = Clocks(self.gpu).hz
        runs = [sampler(), sampler()]
        clock_hz = [round(before_hz), round(Clocks(self.gpu).hz)]
        readings = {
            quantity: {"unit": unit, **summary([run[quantity][1] for run in runs])}
            for quantity, (unit, _) in runs[0].items()
            if all(quantity in run for run in runs)
        }
        self._keep({"probe": probe, "parameters": parameters, "sm_clock_hz": clock_hz, "readings": readings})
        shown = " ".join(f"{name}={value}" for name, value in parameters.items())
        self.on_case(f"{time.monotonic() - self.started:6.1f} {probe} {shown}")
        self.write()

    def _keep(self, case: dict[str, Any]) -> None:
        self.done.add(_name(case["probe"], case["parameters"]))
        self.rows.append(json.dumps(case, separators=(",", ":")))
        self.digests.append(_digest(case))

    def write(self) -> None:
        """The whole file or none: a run that is killed leaves the file of the case before."""
        head = json.dumps({**self.head, "checksum": _checksum(self.head, self.digests)}, indent=1)[:-2]
        rows = ",\n  ".join(self.rows)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(f'{head},\n "cases": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
        partial.replace(self.path)


def summary(runs: Sequence[Any]) -> dict[str, Any]:
    """Rows of median, p10, p90, count, and the values of each run, five digits each."""
    import numpy

    rows: list[list[float]] = []
    kept: list[list[float]] = []
    for run in runs:
        values = numpy.asarray(run, dtype=float).ravel()
        row = [float(f"{v:.5g}") for v in numpy.percentile(values, (50, 10, 90))]
        rows.append([*row, int(values.size)])
        if values.size > MOST_KEPT:
            values = numpy.percentile(values, range(101))
        kept.append([float(f"{v:.5g}") for v in values])
    return {"runs": rows, "samples": kept}


def cases_of(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cases of an earlier run with the same head, none where there is no file; raises CannotResume otherwise."""
    if not path.exists():
        return []
    accepted = Accepted(what="a file of probes", kinds=(Kind.PROBES,), most_bytes=32 << 20)
    try:
        read = read_json(path, accepted)
        read.settle()
        document = read.value
        was = {name: document[name] for name in ("schema_version", "gpu", "quick", "torch")}
        cases: list[dict[str, Any]] = document["cases"]
        whole = document["checksum"] == checksum(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotResume(f"cannot resume from {path}: it is no file of probes; accepted is one, or none") from error
    if not whole:
        raise CannotResume(f"cannot resume from {path}: its content does not match its checksum")
    for name, value in was.items():
        if value != head[name]:
            raise CannotResume(f"cannot resume from {path}: its {name} is {value!r}, this run's is {head[name]!r}")
    return cases


def _name(probe: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps([probe, parameters], sort_keys=True)


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def metadata(gpu: Gpu, quick: bool) -> dict[str, Any]:
    fields = "driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": gpu.name,
        "num_sms": gpu.num_sms,
        "l2_bytes": gpu.l2_bytes,
        "torch": gpu.torch.__version__,
        "cuda": gpu.torch.version.cuda,
        "driver_and_clocks": {
            k: v.strip() for k, v in zip(fields.split(","), done.stdout.split(","), strict=False)
        },
        "date": time.strftime("%Y-%m"),
        "source": "k3sim calibrate/probes",
        "quick": quick,
        "columns_of_runs": ["median", "p10", "p90", "count"],
        "method": (
            "Graph replays or launches; each case twice, one complete run after the other (two entries under runs)."
            " Percentiles are over replays (each the mean of its graph's nodes), or over single loads where those"
            " are timed. Cycles are clock64 of one SM; us across SMs come from %globaltimer. Samples are every"
            " repetition, or the percentiles 0 to 100 of more than 2,000 single loads."
        ),
    }
