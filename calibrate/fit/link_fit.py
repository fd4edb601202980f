"""NVLink's values of a machine from samples of links: ``python -m k3sim.calibrate.fit.link_fit FILE.json``.

The same machinery as ``fit.py``: centre cases give a value, cases around it widen its interval, a bootstrap gives the
noise, and what the samples do not determine is said and left as it was. Only primitives enter; the all-reduces and
projections of the same file are what predictions are held against.

The simulator lets a push leave through the egress port, arrive one way later, and be acted upon by a poller a further
visibility later. One way is what the link adds to a store's way to a poller; half of what it adds to a load's round
trip stands beside it. Visibility is the rest of a round between two GPUs whose blocks push and poll as those of an
all-reduce do, but in step and in one launch: what comes with a launch and with ranks out of step is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from k3sim.calibrate.fit.fit import Fitting
from k3sim.calibrate.fit.profile_text import Calibration, base_of, profile_text
from k3sim.calibrate.fit.statements import Reader, Reading, Statement, Undetermined
from k3sim.calibrate.samples import SampleFile, read_samples
from k3sim.errors import UserError
from k3sim.sim.export.whole_file import write_whole_file
from k3sim.sim.machine import Machine
from k3sim.sim.profile import machine_of

SOURCE = "k3sim calibrate/probes/links.py"
MIB = 1 << 20
MOST_AT_PORT = 0.25  # of a round: beyond, its bytes at the port hide what else it takes, as blocks are not in step


def _full(read: Reader, case: str, num_bytes: int, **parameters: Any) -> list[Statement]:
    """Rates of all SMs, one or two blocks on each."""
    num_sms = read.file.num_sms
    return read.stated(case, "rate", bytes=num_bytes, blocks=(num_sms, 2 * num_sms), **parameters)


def _hops_less_local(read: Reader) -> list[Statement]:
    """What the link adds to a hop within the GPU, for the forms without a fence."""
    found = []
    for form in ("word", "16_bytes"):
        over_link, in_l2 = (read.one("link_hop", "one_way", form=form, over=over) for over in ("link", "l2"))
        found.append((f"link_hop form={form} over the link less in l2", over_link - in_l2))
    return found


def _loads_less_local(read: Reader) -> list[Statement]:
    """Half of what the link adds to a load's round trip; none where no load was waited for, which reads as no time."""
    round_trips = [
        [value for _, value in read.all("link_load", "round_trip", over=over) if value > 0] for over in ("link", "l2")
    ]
    if not all(round_trips):
        return []
    over_link, in_l2 = (values[0] for values in round_trips)
    return [("link_load round_trip over the link less in l2, halved", (over_link - in_l2) / 2)]


def _one_way_s(read: Reader) -> float:
    return statistics.median(value for _, value in _hops_less_local(read))


def _rest_of_rounds(read: Reader, **parameters: Any) -> list[Statement]:
    """Rounds of blocks that push and poll, less one way and the bytes' time at the port, where those are few."""
    one_way_s = _one_way_s(read)
    rates = [rate for _, rate in _full(read, "link_push", 64 * MIB, both_ways=False)]
    if not rates:
        raise Undetermined("no stable sample of link_push 64 MiB, which prices the bytes of a round")
    rate = max(rates)
    return [
        (f"{one.label} less one way", value - one_way_s - one.parameters["bytes"] / rate)
        for one, value in read.all("link_exchange", "round", **parameters)
        if one.parameters["bytes"] / rate <= MOST_AT_PORT * one.value / read.clock_hz
    ]


def _rest_of_hops(read: Reader) -> list[Statement]:
    one_way_s = _one_way_s(read)
    return [
        (f"{one.label} less one way", value - one_way_s)
        for form in ("word", "16_bytes")
        for one, value in read.all("link_hop", "one_way", form=form, over="link")
    ]


LINK_READINGS: tuple[Reading, ...] = (
    Reading(
        "nvlink_egress_bytes_per_s", 3,
        "16-byte stores of all SMs to one peer, 64 MiB, until performed there; around: 16 MiB, both ways at once, "
        "torch's copy.",
        centre=lambda read: _full(read, "link_push", 64 * MIB, both_ways=False),
        around=lambda read: [
            *_full(read, "link_push", 16 * MIB, both_ways=False),
            *_full(read, "link_push", 64 * MIB, both_ways=True),
            *read.stated("link_copy", "rate"),
        ],
    ),
    Reading(
        "nvlink_ingress_bytes_per_s", 3,
        "16-byte loads of all SMs from one peer, 64 MiB; around: 16 MiB, and stores of the peer.",
        centre=lambda read: _full(read, "link_pull", 64 * MIB),
        around=lambda read: [
            *_full(read, "link_pull", 16 * MIB),
            *_full(read, "link_push", 64 * MIB, both_ways=False),
        ],
    ),
    Reading(
        "nvlink_one_way_s", 3,
        "A word or 16 bytes from a thread to one that polls its own memory on the peer, less the same within a "
        "GPU; around: half of what the link adds to a load's round trip.",
        centre=_hops_less_local,
        around=_loads_less_local,
    ),
    Reading(
        "nvlink_visibility_s", 3,
        "Rounds of eight blocks on two GPUs that push to each other and poll one to seven slots, less one way and "
        "the bytes at the egress rate, where those take a quarter of the round at most; around: one and 32 blocks, and "
        "single threads.",
        centre=lambda read: _rest_of_rounds(read, blocks=8),
        around=lambda read: [
            *_rest_of_rounds(read, blocks=1),
            *_rest_of_rounds(read, blocks=32),
            *_rest_of_hops(read),
        ],
    ),
)


def is_of_links(file: SampleFile) -> bool:
    return file.metadata.get("source") == SOURCE


def fit_links(file: SampleFile, base: Machine, seed: int = 0) -> Calibration:
    """All values of NVLink that the samples determine.

    Raises UserError where the file is not of ``probes/links.py``.
    """
    if file.kind != "primitives" or not is_of_links(file):
        raise UserError(f"samples {file.path} are not of links; accepted are those of {SOURCE.split()[1]}")
    under_way = Fitting(file, base, seed)
    under_way.read_all(LINK_READINGS)
    return under_way.finished("no probe of links reads it")


def link_profile(found: Calibration, name: str) -> dict[str, Any]:
    """The base's profile document with the fitted values of links; all others stay as they are."""
    document = found.profile(name)
    for one in found.fitted:
        document["values"][one.field]["source"] = SOURCE
    return document


def lines_of(found: Calibration) -> list[str]:
    lines = []
    for one in found.fitted:
        unit = found.base.provenance[one.field].unit
        lines.append(f"{one.field}  {one.value:.4g} {unit}  ({one.low:.4g} to {one.high:.4g})")
        lines += [
            f"    {case.value:.4g}  {'centre' if case.central else 'around'}  {case.label}" for case in one.cases
        ]
    lines += [
        f"{name}  not determined: {found.undetermined[name]}"
        for name in (one.field for one in LINK_READINGS)
        if name in found.undetermined
    ]
    return lines + [f"refused: {sample.label}: {reason}" for sample, reason in found.file.refused]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.fit.link_fit", description=__doc__)
    parser.add_argument("samples", type=Path)
    parser.add_argument("--base", default=None, help="profile whose other values stay; by default that of the GPU")
    parser.add_argument("--machine-out", type=Path, default=None, help="file for the profile, ending in .json")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        file = read_samples(given.samples)
        found = fit_links(file, base_of(file.gpu, given.base), given.seed)
        if given.machine_out is not None:
            if given.machine_out.suffix.lower() != ".json":
                raise UserError(f"machine-out is {str(given.machine_out)!r}; accepted: a path that ends in .json")
            profile = link_profile(found, given.machine_out.stem)
            machine_of(profile, f"the profile fitted from {given.samples}")
            write_whole_file(given.machine_out, profile_text(profile).encode())
    except UserError as error:
        sys.stderr.write(f"k3sim: {error}\n")
        return 2
    sys.stdout.write("\n".join(lines_of(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
