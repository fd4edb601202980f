"""One calibration from end to end: measure on the GPU at hand (or take a sample file), fit, write a profile.

What ``k3sim calibrate`` runs. The documents returned are those of ``--json`` and of the page (page.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase
from k3sim.calibrate.compare.check import STORED, families, summary
from k3sim.calibrate.fit.fit import fit, labels_read, require_scipy
from k3sim.calibrate.fit.kernel_fit import fit_stored
from k3sim.calibrate.fit.profile_text import Calibration, base_of, profile_text
from k3sim.calibrate.probes.recorder import checksum
from k3sim.calibrate.samples import read_samples
from k3sim.errors import UserError
from k3sim.sim.export.document import SCHEMA_VERSION
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.machine import Machine
from k3sim.sim.profile import machine_of


def measure(out: Path | None, *, quick: bool = False, on_case: Callable[[str], None] = lambda _: None) -> Path:
    """Run the probes on this GPU; returns the file of samples, which a run that was stopped resumes.

    ``out``: by default ``<gpu>-primitives.json`` in the current folder. ``quick``: a tenth of the replays, to see that
    all probes run. Raises UserError where no GPU or toolkit is, or the file is of another GPU or program.
    """
    require_scipy()  # before minutes of measuring, not after
    try:
        import torch
    except ImportError as missing:
        raise UserError(
            "calibrating needs torch: pip install 'k3sim[gpu,calibrate]', or --from with a file of samples"
        ) from missing
    if not torch.cuda.is_available():
        raise UserError("calibrating needs a CUDA GPU and sees none; --from refits a file of samples anywhere")
    from k3sim.calibrate.probes import PROBES, SOURCE
    from k3sim.calibrate.probes.gpu import Gpu
    from k3sim.calibrate.probes.recorder import CannotResume, Recorder

    gpu = Gpu(SOURCE)
    path = out or default_samples(gpu.name)
    if not path.absolute().parent.is_dir():
        raise UserError(f"samples: the folder {path.parent} does not exist")
    try:
        recorder = Recorder(gpu, path, quick, on_case)
    except CannotResume as refusal:
        raise UserError(str(refusal)) from None
    for probe in PROBES.values():
        probe(gpu, recorder)
    return path


def default_samples(gpu: str) -> Path:
    """``h200-primitives.json`` for "NVIDIA H200"."""
    words = [one for one in re.split(r"[^a-z0-9]+", gpu.lower()) if one and one != "nvidia"]
    return Path(f"{'-'.join(words) or 'gpu'}-primitives.json")


def calibrate(
    samples: Path, *, base: str | None = None, machine_out: Path | None = None, seed: int = 0
) -> dict[str, Any]:
    """Fit a file of samples, write the profile to ``machine_out`` if given, and return what was found.

    ``base``: the shipped profile whose values stay where samples give none; by default that of the samples' GPU.
    Raises UserError for a bad file, an unknown GPU without ``base``, or values that contradict each other.
    """
    found, profile = fitted(samples, base=base, machine_out=machine_out, seed=seed)
    if machine_out is not None:
        write_whole_file(machine_out, profile)
    return found


def fitted(
    samples: Path, *, base: str | None = None, machine_out: Path | None = None, seed: int = 0
) -> tuple[dict[str, Any], bytes]:
    """What ``calibrate`` returns, and the profile that it writes to ``machine_out``; writes nothing."""
    if machine_out is not None and machine_out.suffix.lower() != ".json":
        raise UserError(f"machine-out is {str(machine_out)!r}; accepted: a path that ends in .json")
    file = read_samples(samples)
    found = fit(file, base_of(file.gpu, base), seed)
    profile = found.profile(machine_out.stem if machine_out else found.base.name)
    machine_of(profile, f"the profile fitted from {samples}")
    return document(found, machine_out), profile_text(profile).encode()


THINNED = (
    "Every repetition is kept of each quantity that a machine value is read from, and of each that is refused. Of the "
    "others, most of them stages of tiny kernels, median, deciles and count of both runs are kept."
)


def thinned(samples: Path) -> str:
    """A file of probes with the repetitions that a fit reads and the summaries of all others, as it is stored."""
    file = read_samples(samples)
    keep = labels_read(file) | {one.label for one, _ in file.refused}
    document = json.loads(samples.read_text(encoding="utf-8"))
    for case in document["cases"]:
        for quantity, reading in case["readings"].items():
            shown = " ".join(f"{name}={value}" for name, value in case["parameters"].items())
            if " ".join(one for one in (case["probe"], shown, quantity) if one) not in keep:
                reading.pop("samples", None)
    return stored_text({**document, "thinned": THINNED})


def stored_text(document: dict[str, Any]) -> str:
    """A file of probes as the probes write it: a case a line, with its checksum."""
    cases = document["cases"]
    head = {name: value for name, value in document.items() if name not in ("cases", "checksum")}
    head = {**head, "checksum": checksum({**head, "cases": cases})}
    rows = ",\n  ".join(json.dumps(case, separators=(",", ":")) for case in cases)
    return f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n  {rows}\n ]\n}}\n'


def document(found: Calibration, machine_out: Path | None) -> dict[str, Any]:
    """A calibration as JSON; docs/json.md describes it."""
    provenance = found.base.provenance
    kernels = fit_stored(found.base) if found.base.name == STORED else []
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": machine_out.stem if machine_out else found.base.name,
        "base": found.base.name,
        "gpu": found.file.gpu,
        "date": found.file.date,
        "samples": str(found.file.path),
        "num_samples": len(found.file.samples),
        "seed": found.seed,
        "values": [
            {
                "field": one.field,
                "value": one.value,
                "low": one.low,
                "high": one.high,
                "unit": provenance[one.field].unit,
                "statistical": list(one.statistical),
                "how": one.how,
                "left_out_error": one.left_out_error,
                "cases": [
                    {
                        "case": case.label,
                        "value": case.value,
                        "central": case.central,
                        "residual": case.value / (1.0 if isinstance(one.value, list) else one.value) - 1.0,
                    }
                    for case in one.cases
                ],
            }
            for one in found.fitted
        ],
        "undetermined": found.undetermined,
        "refused": [{"case": sample.label, "reason": reason} for sample, reason in found.file.refused],
        "from_kernels": [
            {
                "found": [{**asdict(one), "profile_value_inside": one.profile_value_inside} for one in group.found],
                "residuals": dict(group.residuals),
                "left_out_errors": dict(group.left_out_errors),
                "singular_values": list(group.singular_values),
            }
            for group in kernels
        ],
        "profile": str(machine_out) if machine_out else None,
    }


def check_document(
    machines: Sequence[Machine], cases: list[ComparedCase], num_draws: int, seed: int, skipped: Sequence[str] = ()
) -> dict[str, Any]:
    """A check by these profiles as JSON; docs/json.md describes it. ``skipped``: kernels that nothing predicts."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": ", ".join(one.name for one in machines),
        "draws": num_draws,
        "seed": seed,
        "cases": [one.to_dict() for one in cases],
        "summary": summary(cases),
        "families": families(cases),
        "skipped": list(skipped),
    }
