"""Whether two Python versions give the same bytes: pages, traces, tables and JSON of a few questions.

    python tools/same_bytes.py python3.10 python3.13 [--only timeline]

Each gets an environment of its own with this checkout in it; an argument that ends in ``k3sim`` is the command of one
that is there already. Exit status 1 when a file or a standard output differs.
Results must not hang on the version: the sum of floats, for one, is exact from Python 3.12 on and was not before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTIONS = (
    "timeline --concurrency 1 --out {out}",
    "timeline --machine h200 --kernels own --out {out}",
    "timeline --concurrency 7 --context 32768 --dcp 2 --json",
    "timeline --intervals --draws 3 --json",
    "compare path=stock path=fused --out {out}",
    "validate gb300-router --draws 3 --html {out}/validation.html",
    "machines gb300",
    "paths fused",
)


def environment(python: str, folder: Path) -> Path:
    """The ``k3sim`` command of a new environment of ``python`` with this checkout."""
    if Path(python).name == "k3sim":
        folder.mkdir(parents=True)
        return Path(python).absolute()
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "--editable", str(ROOT)], check=True)
    return folder / "bin" / "k3sim"


def answers(command: Path, folder: Path, only: str) -> dict[str, bytes]:
    """Standard output and files of every question, by name. The outputs lie in folders of the same name."""
    found: dict[str, bytes] = {}
    for question in (one for one in QUESTIONS if only in one):
        out = folder / "out"
        out.mkdir(parents=True)
        words = [word.format(out="out") for word in question.split()]
        done = subprocess.run([str(command), *words], cwd=folder, capture_output=True, check=False)
        if done.returncode:
            raise SystemExit(f"{question}: exit status {done.returncode}: {done.stderr.decode()[:300]}")
        found[f"{question}: standard output"] = done.stdout
        for file in sorted(out.iterdir()):
            found[f"{question}: {file.name}"] = file.read_bytes()
            file.unlink()
        out.rmdir()
    return found


def first_difference(one: bytes, other: bytes) -> str:
    at = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), -1)
    if at < 0:
        return f"{len(one)} and {len(other)} bytes"
    return f"byte {at}: {one[max(0, at - 60) : at + 40]!r} and {other[max(0, at - 60) : at + 40]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs=2)
    parser.add_argument("--only", default="", help="questions that hold this text")
    asked = parser.parse_args()
    first, second = asked.python
    with tempfile.TemporaryDirectory() as scratch:
        one, other = (
            answers(environment(python, Path(scratch) / name / "venv"), Path(scratch) / name, asked.only)
            for name, python in (("one", first), ("other", second))
        )
    differing = 0
    for name in sorted(one.keys() | other.keys()):
        same = one.get(name) == other.get(name)
        differing += not same
        print(f"{'same' if same else 'DIFFERS'}  {name}")
        if not same:
            print(f"    {first_difference(one.get(name, b''), other.get(name, b''))}")
    print(f"{len(one) - differing} of {len(one)} equal")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
