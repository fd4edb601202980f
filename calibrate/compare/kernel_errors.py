"""Writes the table of kernel errors that intervals draw from (``sim/kernel_errors.py``): no GPU, a second of CPU.

Every kernel that was measured in a chain and has a cost: the shipped kernels and cuBLAS on an H200, exchanges between
two of them, and public tables. A change of costs or machine values makes it stale; a test compares it. What runs the
module writes the table and prints how many readings of each family lie inside what the others say:

    python -m k3sim.calibrate.compare.kernel_errors
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from k3sim.calibrate.compare.chain import family_of_chain, recorded_chain
from k3sim.calibrate.compare.shipped_kernels import MEASURED, kda_of_many_rows, measured_chains
from k3sim.calibrate.compare.shipped_links import link_chains
from k3sim.calibrate.compare.validate import loop_us
from k3sim.calibrate.evidence import load_evidence
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.intervals import quantiles
from k3sim.sim.kernel_errors import TABLE, Ratios, drawn_ratios, pools_for_chain, shipped_errors
from k3sim.sim.profile import load_machine

DIGITS = 4
NUM_DRAWN = 4000  # for a row of the table of what was left out
WHAT = (
    "Measured over predicted time of kernels in chains, by GPU and family, one number a reading. Sources: "
    "calibrate/data/h200-kernels*.json, h200-kda-attn-res.json and h200-links.json (one and two H200, 2026-11), "
    "calibrate/evidence/kernels.json (dates there). Method: docs/accuracy.md. "
    "Written by python -m k3sim.calibrate.compare.kernel_errors."
)


def measured_errors() -> dict[str, dict[str, list[float]]]:
    """Ratios by title of the GPU and family, both sorted, and of each family sorted by size."""
    found: dict[str, dict[str, list[float]]] = {}
    for gpu, family, ratio in _readings():
        found.setdefault(load_machine(gpu).title, {}).setdefault(family, []).append(round(ratio, DIGITS))
    return {gpu: {family: sorted(of[family]) for family in sorted(of)} for gpu, of in sorted(found.items())}


def _readings() -> Iterator[tuple[str, str, float]]:
    machine = load_machine(MEASURED)
    for one in (*measured_chains(), *kda_of_many_rows(), *link_chains()):
        yield MEASURED, family_of_chain(one.kernels), one.measured_us / one.predicted_us(machine)
    for record in load_evidence():
        if record.loop is not None and record.judged:
            family = family_of_chain(recorded_chain(record.loop))
            yield record.hardware, family, record.value / loop_us(record.loop)


def text_of(errors: Mapping[str, Mapping[str, list[float]]]) -> str:
    """The table as text, a line a family."""
    gpus = [
        f"  {json.dumps(gpu)}: {{\n"
        + ",\n".join(f"   {json.dumps(family)}: {json.dumps(ratios)}" for family, ratios in of.items())
        + "\n  }"
        for gpu, of in errors.items()
    ]
    ratios = ",\n".join(gpus)
    return f'{{\n "what": {json.dumps(WHAT)},\n "measured_over_predicted": {{\n{ratios}\n }}\n}}\n'


def write(path: Path = TABLE) -> None:
    """Write the table, whole or not at all. Raises UserError when ``path`` cannot be written."""
    write_whole_file(path, text_of(measured_errors()).encode())


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What bounds the readings of a family on a GPU beside them, which are left out: no machine is drawn."""

    gpu: str
    family: str
    num_readings: int
    num_pools: int  # other families, or readings of its own family on other GPUs, that bound it
    low: float  # measured over predicted
    high: float
    num_inside: int


def left_out_table(errors: Mapping[str, Mapping[str, Ratios]]) -> list[LeftOut]:
    """Each family of each GPU beside the 90 % interval that it gets there."""
    found = []
    for gpu, families in errors.items():
        for family, ratios in families.items():
            pools = pools_for_chain(errors, gpu, family)
            drawn = sorted(drawn_ratios(pools, ["chain"], NUM_DRAWN, f"0 {family}")["chain"])
            low, high = quantiles(drawn)
            inside = sum(low <= ratio <= high for ratio in ratios)
            found.append(
                LeftOut(
                    gpu=gpu, family=family, num_readings=len(ratios), num_pools=len(pools), low=low, high=high,
                    num_inside=inside,
                )
            )  # fmt: skip
    return found


def print_left_out(rows: Sequence[LeftOut]) -> None:
    """The table as Markdown."""
    print("| GPU | Family | Readings | Bounded by | Interval of measured over predicted | Inside |")
    print("| --- | --- | ---: | ---: | --- | ---: |")
    for one in rows:
        print(
            f"| {one.gpu} | {one.family} | {one.num_readings} | {one.num_pools} | {one.low:.2f} to {one.high:.2f} | "
            f"{one.num_inside} |"
        )
    inside, of = sum(one.num_inside for one in rows), sum(one.num_readings for one in rows)
    alike = sum(one.num_inside / one.num_readings for one in rows)
    print(f"\n{inside} of {of} readings inside; families counted alike, {alike:.1f} of {len(rows)}")


if __name__ == "__main__":
    write()
    print_left_out(left_out_table(shipped_errors()))
