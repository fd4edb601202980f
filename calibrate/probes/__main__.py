"""``python -m k3sim.calibrate.probes OUT.json [--only clocks,hbm]``: the probes, without the rest of the project."""

from __future__ import annotations

import argparse
from pathlib import Path

from k3sim.calibrate.probes import PROBES, SOURCE
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import CannotResume, Recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the replays, to see that all probes run"
    )
    parser.add_argument("--only", default=",".join(PROBES), help=f"comma-separated: {', '.join(PROBES)}")
    given = parser.parse_args()
    wanted = given.only.split(",")
    unknown = [name for name in wanted if name not in PROBES]
    if unknown:
        parser.error(f"--only has {', '.join(unknown)}; accepted are {', '.join(PROBES)}")
    try:
        recorder = Recorder(Gpu(SOURCE), given.out, given.quick)
    except CannotResume as refusal:
        parser.error(str(refusal))
    for name in wanted:
        PROBES[name](recorder.gpu, recorder)


if __name__ == "__main__":
    main()
