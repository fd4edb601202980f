"""What a plain installation brings: run by the interpreter of a fresh environment that holds the wheel alone.

Not a pytest test: it looks at an environment without test tools. ``make wheel`` runs it. Three questions: is every
file of the rooms in the wheel and nothing else; how large is it with all that it requires; does the default command
run from an empty folder.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("model", "kernels", "sim", "calibrate", "k3sim")
MAX_MEGABYTES = 200  # of what the wheel brings
MAX_ENVIRONMENT_MEGABYTES = 250  # with the environment's own tools and compiled bytecode, as it lies on the disk
OF_THE_ENVIRONMENT = {"pip", "setuptools"}  # not brought by the wheel
UNWANTED = {"torch", "nvidia-cutlass-dsl", "triton"}
WRITTEN = ["stages.csv", "timeline.html", "timeline.json", "timeline.pftrace"]


def contents() -> list[str]:
    """What is wrong with the files of the wheel, beside the tracked ones of the checkout."""
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True)
    wanted = {
        name if name.startswith("k3sim/") else f"k3sim/{name}"
        for name in listed.stdout.splitlines()
        if (ROOT / name).suffix != ".md" and (ROOT / name).exists()
    }
    found = {
        str(file)
        for file in distribution("k3sim").files or ()
        if ".dist-info" not in str(file) and file.suffix != ".pyc" and not str(file).startswith("..")
    }
    missing = [f"not in the wheel: {name}" for name in sorted(wanted - found)]
    return missing + [f"in the wheel, but not of a room: {name}" for name in sorted(found - wanted)]


def sizes() -> list[str]:
    """Print the size of every distribution; what is wrong with them."""
    megabytes: dict[str, float] = {}
    for one in distributions():
        files = (Path(str(one.locate_file(file))) for file in one.files or ())
        megabytes[one.name.lower()] = sum(file.stat().st_size for file in files if file.exists()) / 1e6
    brought = {name: size for name, size in megabytes.items() if name not in OF_THE_ENVIRONMENT}
    for name, size in sorted(brought.items(), key=lambda item: -item[1]):
        print(f"{name:20} {size:7.1f} MB")
    total = sum(brought.values())
    print(f"{'all':20} {total:7.1f} MB, at most {MAX_MEGABYTES} MB")
    environment = sum(path.stat().st_size for path in Path(sys.prefix).rglob("*") if path.is_file()) / 1e6
    print(f"{'the environment':20} {environment:7.1f} MB, at most {MAX_ENVIRONMENT_MEGABYTES} MB")
    wrong = [f"a plain installation brings {name}" for name in sorted(UNWANTED & set(brought))]
    for found, most in ((total, MAX_MEGABYTES), (environment, MAX_ENVIRONMENT_MEGABYTES)):
        wrong += [f"{found:.0f} MB are more than {most}"] if found > most else []
    return wrong


def runs() -> list[str]:
    """Run commands in an empty folder; what is wrong with what the default one wrote."""
    command = Path(sysconfig.get_path("scripts")) / "k3sim"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([command, "timeline", "--concurrency", "1"], cwd=folder, check=True)
        # These read data files of other folders: machines, all tables of published results, claims.
        for given in (["machines"], ["validate", "gb200-q-b", "--draws", "2"], ["claims", "ascend"]):
            subprocess.run([command, *given], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        files = sorted(path.name for path in Path(folder, "k3sim-out").iterdir())
    print(f"wrote {', '.join(files)}")
    return [] if files == WRITTEN else [f"the default command should write {', '.join(WRITTEN)}"]


def main() -> int:
    """Print what was found; 1 when something is wrong."""
    wrong = contents() + sizes()
    wrong += runs() if not wrong else []
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
