"""What a plain installation brings: run by the interpreter of a fresh environment that holds the wheel alone.

Not a pytest test: it looks at an environment without test tools. ``make wheel`` runs it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distributions
from pathlib import Path

MAX_MEGABYTES = 300
OF_THE_ENVIRONMENT = {"pip", "setuptools"}  # not brought by the wheel
UNWANTED = {"torch", "nvidia-cutlass-dsl", "triton"}


def main() -> int:
    """Print the size of every distribution; 1 when the total, or one of them, is not allowed."""
    megabytes: dict[str, float] = {}
    for one in distributions():
        files = (Path(str(one.locate_file(file))) for file in one.files or ())
        megabytes[one.name.lower()] = sum(file.stat().st_size for file in files if file.exists()) / 1e6
    brought = {name: size for name, size in megabytes.items() if name not in OF_THE_ENVIRONMENT}
    for name, size in sorted(brought.items(), key=lambda item: -item[1]):
        print(f"{name:20} {size:7.1f} MB")
    total = sum(brought.values())
    print(f"{'all':20} {total:7.1f} MB, at most {MAX_MEGABYTES} MB")

    unwanted = sorted(UNWANTED & set(brought))
    if unwanted:
        print(f"a plain installation brings {', '.join(unwanted)}")
        return 1
    if total > MAX_MEGABYTES:
        return 1

    command = Path(sysconfig.get_path("scripts")) / "k3sim"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([command, "timeline", "--concurrency", "1"], cwd=folder, check=True)
        # These read data files of other folders.
        for verb in ("machines", "validate"):
            subprocess.run([command, verb], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        files = sorted(path.name for path in Path(folder, "k3sim-out").iterdir())
    print(f"wrote {', '.join(files)}")
    return 0 if files == ["stages.csv", "timeline.html", "timeline.json", "timeline.pftrace"] else 1


if __name__ == "__main__":
    sys.exit(main())
