"""Forty questions whose numbers are compared with stored digests: a change of words must not change a number.

    python tools/same_numbers.py                 compare with tools/same_numbers.json; exit status 1 on a difference
    python tools/same_numbers.py --record        store the digests of the numbers as they are now
    python tools/same_numbers.py --keep FOLDER   also keep every JSON document there, to find what differs
    python tools/same_numbers.py --only TEXT     only the questions that contain TEXT

A digest is of every number of a question's JSON document, rounded to twelve digits and sorted, so that names and the
order of keys may change and values may not. The version of the schema is left out. Whoever changes the physics records
anew and says so in the change log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")

#: One question a line: arguments of ``k3sim``, to which ``--json`` is added. ``{data}`` holds the stored samples.
QUESTIONS = """
timeline
timeline --machine gb200
timeline --machine gb200 --concurrency 4
timeline --machine b300 --tp 8
timeline --machine b300 --tp 16 --concurrency 16
timeline --machine b200 --tp 16
timeline --machine h200
timeline --machine h100 --tp 32
timeline --concurrency 2
timeline --concurrency 4
timeline --concurrency 8
timeline --concurrency 16
timeline --concurrency 32
timeline --concurrency 64
timeline --path stock --no-skew
timeline --path megakernel --no-skew --concurrency 3
timeline --without l2-prefetch
timeline --with low-batch-kernels --with fused-allreduce --concurrency 2
timeline --tp 8 --machine b300 --skew --seed 7
timeline --context 131072 --dcp 4
timeline --ep 16 --concurrency 8
timeline --dp 2 --tp 8 --concurrency 8 --kv-dtype bf16
timeline --routing uniform --pad-experts --concurrency 4
timeline --intervals --draws 3
timeline --kernels own --machine h200
timeline --kernels own --machine h200 --path stock --concurrency 4
timeline --kernels own --machine h200 --concurrency 16 --no-skew
timeline --kernels own --machine b300 --tp 8 --concurrency 2
timeline --kernels own --machine gb300
compare path=stock path=fused --machine gb200
compare dcp=1 dcp=4 --context 131072
compare kernels=public,path=stock kernels=own,path=stock --machine h200
compare {work}/timeline.json {data}/h200-decode-fused.json
report {data}/h200-decode-fused.json
report {data}/h200-decode-stock.json
machines
validate --draws 2
validate --own
claims --draws 2
calibrate --from h200
""".strip().splitlines()

#: Written before a file of a prediction is compared with a measured one.
PREPARATION = "timeline --kernels own --machine h200 --no-skew --out {work}"


def numbers(document: Any) -> Iterator[str]:
    """Every number of a JSON document, to twelve digits; the version of its schema is not one of them."""
    if isinstance(document, bool) or document is None or isinstance(document, str):
        return
    if isinstance(document, (int, float)):
        yield f"{document:.12g}"
    elif isinstance(document, list):
        for one in document:
            yield from numbers(one)
    else:
        for key, one in document.items():
            if key != "schema_version":
                yield from numbers(one)


def digest(document: Any) -> dict[str, Any]:
    """How many numbers a document has, and the hash of them sorted."""
    found = sorted(numbers(document))
    return {"numbers": len(found), "sha256": hashlib.sha256("\n".join(found).encode()).hexdigest()[:32]}


def ask(question: str, work: Path) -> Any:
    """The JSON document that ``k3sim`` answers with."""
    arguments = question.format(work=work, data=ROOT / "calibrate" / "data").split()
    if "--out" not in arguments and arguments[0] in ("timeline", "compare", "report", "calibrate"):
        arguments += ["--out", tempfile.mkdtemp(dir=work)]
    done = subprocess.run(
        [sys.executable, "-m", "k3sim", *arguments, "--json"], capture_output=True, text=True, cwd=work, check=False
    )
    if done.returncode:
        raise SystemExit(f"{question}: exit status {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="store the digests instead of comparing")
    parser.add_argument("--keep", type=Path, help="folder for the documents")
    parser.add_argument("--only", default="", help="only questions that contain this")
    parser.add_argument("--jobs", type=int, default=2, help="questions at a time")
    given = parser.parse_args()
    stored: dict[str, Any] = json.loads(STORED.read_text()) if STORED.exists() else {}
    chosen = [(number, one) for number, one in enumerate(QUESTIONS) if given.only in one]
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    different = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as workers:
        work = Path(folder)
        ask(PREPARATION, work)
        for (number, question), document in zip(
            chosen, workers.map(lambda one: ask(one[1], work), chosen), strict=True
        ):
            if given.keep is not None:
                (given.keep / f"{number:02}.json").write_text(json.dumps(document))
            found = digest(document)
            same = stored.get(question) == found
            if given.record:
                stored[question] = found
            else:
                different += not same
            print(f"{'recorded' if given.record else 'same' if same else 'DIFFERENT':10}"
                  f"{found['numbers']:8} numbers  k3sim {question}", flush=True)  # fmt: skip
    if given.record:
        STORED.write_text(json.dumps({one: stored[one] for one in QUESTIONS if one in stored}, indent=1) + "\n")
    else:
        print(f"{len(chosen)} questions, {different} different")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
