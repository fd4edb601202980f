"""``python -m k3sim.calibrate.decode``: a measured step, without the rest of the project (commandline.py)."""

from __future__ import annotations

import sys

from k3sim.calibrate.decode.commandline import main

if __name__ == "__main__":
    sys.exit(main())
