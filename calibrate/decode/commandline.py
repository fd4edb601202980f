"""A decode step of the project's own kernels, measured: ``python -m k3sim.calibrate.decode``, as ``k3sim decode`` does.

This form needs torch and the kernels alone, for machines on which the rest of the package is not installed. One rank
runs on one GPU, in loop-back where its layout has peers; under ``torchrun --nproc-per-node 8 -m k3sim.calibrate.decode
--tp 8 --layers 40`` each GPU of a host runs one, and they exchange over NVLink. With fewer processes than ranks, if
they divide them, each GPU stands for several ranks (``kernels/multi_gpu/symmetric.py``); the output says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from k3sim.calibrate.decode.lines import lines_of
from k3sim.calibrate.decode.measure import decode
from k3sim.calibrate.decode.measured import write
from k3sim.calibrate.decode.options import DecodeOptions
from k3sim.calibrate.decode.tables import run_table
from k3sim.errors import UserError


def main(arguments: Sequence[str] | None = None) -> int:
    """The command without the package's command-line library; exit status."""
    defaults = DecodeOptions()
    parser = argparse.ArgumentParser(prog="python -m k3sim.calibrate.decode", description=__doc__)
    parser.add_argument("--path", default=defaults.path)
    parser.add_argument("--with", dest="with_switches", action="append", default=[], metavar="SWITCH")
    parser.add_argument("--without", action="append", default=[], metavar="SWITCH")
    for name in ("tp", "concurrency", "context", "replays", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--kv-dtype", default=defaults.kv_dtype)
    parser.add_argument("--no-profile", dest="profile", action="store_false")
    parser.add_argument("--loop-back", action="store_true", help="under torchrun, too, each rank by itself")
    parser.add_argument("--timestamps", action="store_true", help="kernels record when each of their blocks ran")
    parser.add_argument("--timestamps-of", action="append", default=[], metavar="FAMILY", help="only this family's")
    parser.add_argument("--table", default="", metavar="FILE", help="measure every case of the table into FILE")
    parser.add_argument("--budget-s", type=float, default=480.0, help="begin no case of the table after these seconds")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", default="")
    given = vars(parser.parse_args(arguments))
    as_json, out = given.pop("json"), given.pop("out")
    table, budget_s = given.pop("table"), given.pop("budget_s")
    for name in ("with_switches", "without", "timestamps_of"):
        given[name] = tuple(given[name])
    try:
        if table:
            left = run_table(DecodeOptions(**given), Path(table), budget_s=budget_s)
            if os.environ.get("RANK", "0") == "0":
                sys.stdout.write(f"{left} cases left\n")
            return 0
        measured = decode(DecodeOptions(**given))
    except UserError as error:
        sys.stderr.write(f"k3sim: {error}\n")
        return 2
    if os.environ.get("RANK", "0") != "0":
        return 0  # the first of several processes reports for all
    if out:
        write(measured, Path(out))
    text = json.dumps(measured.to_dict()) if as_json else "\n".join(lines_of(measured))
    sys.stdout.write(text + "\n")
    return 0
