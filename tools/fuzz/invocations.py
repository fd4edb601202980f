"""Invocations by kind: each a command with files beside it, most of them at fault, drawn from a seed."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from mutations import BYTES, WORDS, mutated_file, mutated_words, twice

ROOT = Path(__file__).parents[2]
DATA = ROOT / "calibrate" / "data"


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command line, the files that lie in its folder, and what becomes of its streams."""

    kind: str
    arguments: list[str]
    files: Mapping[str, bytes | str] = field(default_factory=dict)  # text: a special file, by its word
    streams: str = ""
    alone: bool = False

    def lay_out(self, work: Path) -> None:
        """Put the files into an empty folder."""
        for name, content in self.files.items():
            path = work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == "fifo":
                os.mkfifo(path)
            elif content == "folder":
                path.mkdir()
            else:
                path.symlink_to(content)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Originals:
    """Good files of every kind, as small as they can be: a run parses some thousand of them."""

    predicted: Any
    measured: Any
    pftrace: bytes
    html: bytes

    config = _json(ROOT / "model" / "data" / "kimi-k3.json")
    profiles = tuple(_json(one) for one in sorted((ROOT / "sim" / "machines").glob("*.json")))
    evidence = _json(ROOT / "calibrate" / "evidence" / "kernels.json")
    steps = _json(ROOT / "calibrate" / "evidence" / "steps.json")
    scenarios = tuple(_json(one) for one in sorted((ROOT / "calibrate" / "evidence" / "claims").glob("*.json")))
    kernel_times = _json(DATA / "h200-skinny-gemv.json")

    @classmethod
    def of(cls, folder: Path) -> Originals:
        """``folder`` holds what ``k3sim timeline`` wrote."""
        predicted, measured = _json(folder / "timeline.json"), _json(DATA / "h200-decode-fused.json")
        predicted["stages"] = predicted["stages"][:40] + predicted["stages"][-8:]
        calls = sorted(measured["stages"], key=lambda row: row["call"])[:60]
        measured["stages"] = calls
        for document in (predicted, measured):
            document["critical_path"] = document["critical_path"][:5]
            document["machine_values"] = document.get("machine_values", [])[:3]
        page = (folder / "timeline.html").read_bytes()[:20_000]
        return cls(predicted, measured, (folder / "timeline.pftrace").read_bytes()[:50_000], page)


def probes() -> Any:
    """A file of probes with every twentieth of its cases."""
    found = _json(DATA / "h200-primitives.json")
    return {**found, "cases": found["cases"][::20]}


PROBES = probes()
TABLE = "hardware,op,shape,dtype,condition,time_us,notes,source_url\n" + "".join(
    f"{gpu},{op},{shape},bf16,CUDA graph,{us},,https://example.org\n"
    for gpu in ("NVIDIA GB200", "B200", "H200", "H100 x8")
    for op, shape, us in (("gemm", "M=1 N=7168 K=7168", "12.5"), ("rmsnorm", "1x7168", "~3.2"), ("x", "", ""))
)


def _options(random: Random, originals: Originals) -> Invocation:
    command = random.choice(
        (
            "timeline --concurrency 1",
            "timeline --tp 8 --machine gb200 --json",
            "paths fused --with fused-allreduce",
            "paths stock --tp 8 --ep 2 --json",
            "compare path=stock path=fused,tp=8 --machine b300",
            "machines gb300 --json",
            "machines",
            "validate gb300 --draws 2 --jobs 1",
            "claims kda-kernels --draws 2 --jobs 1",
            "sensitivity gb300-one-user --values 1 --draws 2 --jobs 1",
            "calibrate --from h200 --base b200 --machine-out m.json",
            "calibrate --check --machine h200 --draws 2 --jobs 1",
            "decode --path stock --layers 2",
            "report x.json",
            "kernels list --json",
            "kernels check router_topk",
            "kernels bench --replays 2",
            "kernels build router_topk",
            "paths --concurrency 4 --context 100 --kv-dtype bf16 --seed 3 --no-skew --routing text",
        )
    )
    words = mutated_words(random, mutated_words(random, command.split()))
    # What answers after all takes minutes of honest work, and says nothing of input: a wrong value is put in.
    if any(one in words for one in ("validate", "claims", "sensitivity", "calibrate")):
        words += random.choice(("--seed -1", "--seed x", "--jobs 0 --draws 0", "--draws 2 --jobs x", "--bogus")).split()
    elif random.random() < 0.97 and words == command.split() and words[0] not in ("machines", "paths"):
        words += [random.choice(("--tp", "--bogus", "--draws")), random.choice(WORDS)]
    return Invocation(kind="options", arguments=words)


def _config(random: Random, originals: Originals) -> Invocation:
    data = mutated_file(random, originals.config)
    folder = random.random() < 0.2
    name = "model" if folder else "config.json"
    command = _drawn(
        random, ("paths fused --model", 30), ("compare path=stock tp=8 --model", 3), ("timeline --model", 1)
    )
    return Invocation(
        kind="config.json", arguments=[*command, name], files={"model/config.json" if folder else name: data}
    )


def _profile(random: Random, originals: Originals) -> Invocation:
    data = mutated_file(random, random.choice(originals.profiles))
    command = _drawn(
        random,
        ("machines --json", 16),
        ("machines", 8),
        ("paths fused --machine", 4),
        ("compare path=stock path=stock --machine", 5),
        ("timeline --machine", 1),
    )
    return Invocation(kind="machine profile", arguments=[*command, "mine.json"], files={"mine.json": data})


def _samples(random: Random, originals: Originals) -> Invocation:
    from k3sim.calibrate.probes.recorder import checksum

    document = originals.kernel_times if random.random() < 0.2 else PROBES
    data = mutated_file(random, document)
    if random.random() < 0.5:  # as whoever edits a file and knows of its checksum
        try:
            found = json.loads(data)
            if isinstance(found, dict) and "checksum" in found:
                data = json.dumps({**found, "checksum": checksum(found)}).encode()
        except (ValueError, TypeError, RecursionError):
            pass
    # Beside the stored samples' own profile kernels are fitted too, which takes seconds.
    more = _drawn(
        random, ("--base b200", 8), ("--base b200 --json", 8), ("--base gb300 --out deep/er", 8), ("--json", 1)
    )
    arguments = ["calibrate", "--from", "s.json", "--machine-out", "m.json", *more]
    return Invocation(kind="samples", arguments=arguments, files={"s.json": data})


def _table(random: Random, originals: Originals) -> Invocation:
    text = twice(random, TABLE) if random.random() < 0.7 else TABLE
    rows = text.split("\n")
    row = random.randrange(len(rows))
    cells = rows[row].split(",")
    cells[random.randrange(len(cells))] = random.choice(WORDS)
    rows[row] = ",".join(cells)
    data = "\n".join(rows).encode("utf-8", errors="surrogatepass")
    data = random.choice(BYTES)(random, data) if random.random() < 0.4 else data
    arguments = ["calibrate", "--tables", "t.csv", "--machine", "gb200", "--machine-out", "m.json"]
    return Invocation(kind="kernel table", arguments=arguments, files={"t.csv": data})


def _evidence(random: Random, originals: Originals) -> Invocation:
    table = random.choice((originals.evidence, originals.evidence, originals.steps))
    record = random.choice(table["records"])
    data = mutated_file(random, {**table, "records": [record]})
    arguments = ["validate", "--evidence", "e.json", "--draws", "2", "--jobs", "1", "--html", "page.html"]
    return Invocation(kind="evidence", arguments=arguments, files={"e.json": data})


def _scenario(random: Random, originals: Originals) -> Invocation:
    document = {**random.choice(originals.scenarios)}
    document["figures"] = [{**document["figures"][0], "surplus": 1}] if random.random() < 0.8 else document["figures"]
    arguments = ["claims", "c.json", "--draws", "2", "--jobs", "1"]
    return Invocation(kind="scenario", arguments=arguments, files={"c.json": mutated_file(random, document)})


def _measured(random: Random, originals: Originals) -> Invocation:
    data = mutated_file(random, originals.measured)
    if random.random() < 0.5:
        return Invocation(kind="measured step", arguments=["report", "m.json"], files={"m.json": data})
    files = {"m.json": data, "good.json": json.dumps(originals.measured).encode()}
    sides = random.sample(["m.json", "good.json"], 2)
    return Invocation(
        kind="measured step", arguments=["compare", *sides, *random.choice(([], ["--json"]))], files=files
    )


def _predicted(random: Random, originals: Originals) -> Invocation:
    data = mutated_file(random, originals.predicted)
    other = originals.measured if random.random() < 0.5 else originals.predicted
    files = {"p.json": data, "other.json": json.dumps(other).encode()}
    arguments = _drawn(
        random,
        ("compare p.json other.json", 5),
        ("compare other.json p.json --json", 5),
        ("report p.json", 1),
        ("compare p.json path=stock", 1),
    )
    return Invocation(kind="predicted step", arguments=arguments, files=files)


TAKES_FILE = (
    "report",
    "compare x.json",
    "timeline --machine",
    "timeline --model",
    "paths --model",
    "machines",
    "claims",
    "validate --evidence",
    "calibrate --tables",
    "calibrate --machine-out m.json --from",
    "calibrate --check --machine",
    "paths fused --machine",
    "compare path=stock",
)


def _database() -> bytes:
    with sqlite3.connect(":memory:") as database:
        database.execute("create table CUPTI_ACTIVITY_KIND_KERNEL(start integer)")
        return bytes(database.serialize()) if hasattr(database, "serialize") else b"SQLite format 3\0" + bytes(4080)


EVENTS = [{"ph": "X", "name": "kernel", "ts": float(one), "dur": 1.0, "pid": 0, "tid": 7} for one in range(50)]
FOREIGN: Mapping[str, bytes] = {
    "torch.json": json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}).encode(),
    "torch.json.gz": gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()),
    "events.json": json.dumps(EVENTS).encode(),
    "nsight.sqlite": _database(),
    "requests.jsonl": b'{"timestamp": 1, "input_length": 5, "output_length": 9}\n' * 20,
    "azure.csv": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n",
    "bench.json": b'{"mean_tpot_ms": 8.1, "median_ttft_ms": 90.0, "output_throughput": 99.0}',
}


def _trace(random: Random, originals: Originals) -> Invocation:
    foreign = {**FOREIGN, "timeline.pftrace": originals.pftrace, "page.html": originals.html}
    name = random.choice(sorted(foreign))
    data = foreign[name] if random.random() < 0.4 else random.choice(BYTES)(random, foreign[name])
    command = random.choice(TAKES_FILE).split()
    given = name if random.random() < 0.5 else "x.json"
    return Invocation(kind="traces and foreign files", arguments=[*command, given], files={given: data})


def _special(random: Random, originals: Originals) -> Invocation:
    what = random.choice(
        ("fifo", "folder", "/dev/zero", "/dev/urandom", "nowhere", ".", "/proc/self/mem", "/dev/tty", "x.json")
    )
    direct = what if what.startswith("/") and random.random() < 0.5 else "x.json"
    command = random.choice(TAKES_FILE).split()
    return Invocation(
        kind="no regular file", arguments=[*command, direct], files={} if direct == what else {"x.json": what}
    )


def _large(random: Random, originals: Originals) -> Invocation:
    piece = random.choice((b'"' + b"x" * 40, b"[],", b"0,", b"NaN,", b'{"":1},', b"1,2,3\n", b'"\xf0\x9f\x92\xa5",'))
    head = random.choice(
        (b"[", b"", b'{"step_us":1,"stages":[', b'{"values":{},"name":"', b'{"records":[', b'{"cases":[')
    )
    data = head + piece * (random.choice((1 << 20, 1 << 23, 1 << 26)) // len(piece))
    command = random.choice(TAKES_FILE).split()
    return Invocation(kind="large files", arguments=[*command, "x.json"], files={"x.json": data})


def _output(random: Random, originals: Originals) -> Invocation:
    out = random.choice(
        (
            "",
            " ",
            "f",
            "f/g",
            "link",
            "link/x",
            "\udcff",
            "é/\udcc3",
            "n" * 300,
            "n/" * 3000,
            "/proc/x",
            "/dev/null",
            "/dev/full/x",
            "/sys/x",
            "fifo",
            "\n",
            "~",
            "-",
            "--json",
        )
    )
    command = random.choice(
        (
            "timeline --out",
            "compare path=stock path=fused --out",
            "calibrate --from h200 --out",
            "report m.json --out",
            "compare m.json m.json --out",
            "validate gb300 --jobs 1 --draws 2 --html",
            "calibrate --from h200 --machine-out",
            "kernels bench --out",
            "decode --out",
        )
    ).split()
    files: dict[str, bytes | str] = {"f": b"mine", "link": "nowhere", "fifo": "fifo"}
    files["m.json"] = json.dumps({**originals.measured, "schema_version": 0}).encode()
    return Invocation(kind="output places", arguments=[*command, out], files=files)


def _stream(random: Random, originals: Originals) -> Invocation:
    command = random.choice(
        (
            "machines --json",
            "machines gb300",
            "paths",
            "paths fused --json",
            "timeline --tp 3",
            "--help",
            "--version",
            "nope",
            "timeline --help",
            "compare a.json b.json",
            "report m.json --json",
        )
    ).split()
    streams = random.choice(("full", "reader left", "no output", "no errors"))
    files = {"m.json": json.dumps(originals.measured).encode()}
    return Invocation(kind="streams", arguments=command, files=files, streams=streams, alone=random.random() < 0.5)


def _drawn(random: Random, *weighted: tuple[str, int]) -> list[str]:
    return random.choices([one for one, _ in weighted], [weight for _, weight in weighted])[0].split()


Draw = Callable[[Random, Originals], Invocation]
#: With their shares.
KINDS: tuple[tuple[Draw, int], ...] = (
    (_options, 22),
    (_config, 12),
    (_profile, 14),
    (_samples, 9),
    (_table, 4),
    (_evidence, 8),
    (_scenario, 7),
    (_measured, 8),
    (_predicted, 8),
    (_trace, 6),
    (_special, 4),
    (_large, 1),
    (_output, 4),
    (_stream, 3),
)


def drawn(seed: int, number: int, originals: Originals) -> Invocation:
    """The invocation of a number: the same whatever ran before it."""
    random = Random(f"{seed}/{number}")
    draw = random.choices([one for one, _ in KINDS], [share for _, share in KINDS])[0]
    return draw(random, originals)
