"""The documentation is true: its commands and examples run, its keys and words are those of the program.

Every ``k3sim`` command of a ``bash`` or ``console`` block runs, in the order of its page and in an empty folder, and
after them the Python blocks of the page as one program. A command that ends in ``# exit status 2`` must be refused
with the line below it. What stands below a command is what it writes to standard error, such as a warning; what it
prints may not stand on a page, since predicted numbers change. Commands of other
programs are not run: ``make`` and ``pip`` install, which is the job of the continuous integration.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
from command_line import Capture, run

from k3sim.calibrate.compare import shipped_steps
from k3sim.calibrate.compare.check import check as check_stored
from k3sim.calibrate.fit.calibration import check_document
from k3sim.kernels.harness.bench import Timing
from k3sim.kernels.harness.cases import Case, Timed
from k3sim.kernels.harness.check import Checked
from k3sim.kernels.harness.measure import measure_cases
from k3sim.kernels.toolchain.machine_code import KernelCode
from k3sim.model.paths import PARTS, PATH_NAMES, SWITCHES
from k3sim.sim.profile import load_machine
from k3sim.sim.timeline.critical_path import Part
from k3sim.sim.timeline.timeline import Phase

ROOT = Path(__file__).parents[1]
USER_PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
JOURNAL = sorted((ROOT / "docs" / "journal").glob("*.md"))
PAGES = [*USER_PAGES, *JOURNAL, ROOT / "CHANGELOG.md", ROOT / "tools" / "README.md"]
BIN = Path(sys.executable).parent
MEASURED = str(ROOT / "calibrate" / "data" / "h200-decode-fused.json")
REFUSED = "# exit status 2"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Step:
    """One thing a reader would do: a shell command or a Python block, and what is shown under it."""

    language: str
    text: str
    shown: str = ""


def fenced(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block."""
    yield from re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def steps(page: Path) -> list[Step]:
    """Everything on a page that runs, in order."""
    found: list[Step] = []
    for language, text in fenced(page):
        if language == "python":
            found.append(Step("python", text))
        elif language == "bash":
            found += [Step("bash", line) for line in text.replace("\\\n", " ").splitlines() if runs(line)]
        elif language == "console":
            for block in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, _, shown = block.partition("\n")
                assert runs(command), f"{page.name}: {command!r} cannot be checked"
                found.append(Step("bash", command, shown))
    return found


def runs(command: str) -> bool:
    return command.startswith("k3sim ")


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1"}


#: How far long work is, a line every ten seconds: on a busy machine even where a page shows nothing.
PROGRESS = re.compile(r"^(?!k3sim: )[^:\n]+: (?:\d+(?: of \d+)?, )?\d+ s(?:, [^\n]*)?\n", re.MULTILINE)


def run_command(step: Step, folder: Path) -> None:
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", step.text], cwd=folder, env=environment(), capture_output=True, text=True
    )
    if step.text.rstrip().endswith(REFUSED):
        assert (done.returncode, done.stdout) == (2, ""), step.text
        assert done.stderr == step.shown, step.text
    else:
        assert done.returncode == 0, f"{step.text}\n{done.stderr}"
        assert PROGRESS.sub("", done.stderr) == step.shown, step.text


# One page for everybody; the others take minutes. CONTRIBUTING.md changes the tree, and test_contributing.py a copy.
RUNS = [
    pytest.param(page, id=name_of(page), marks=[] if page.name == "json.md" else pytest.mark.slow)
    for page in PAGES
    if steps(page) and page.name != "CONTRIBUTING.md"
]


@pytest.mark.parametrize("page", RUNS)
def test_what_a_page_tells_to_do_works(page: Path, tmp_path: Path) -> None:
    (tmp_path / "calibrate").symlink_to(ROOT / "calibrate")  # pages are read in a checkout
    for step in steps(page):
        if step.language == "bash":
            run_command(step, tmp_path)
    # Blocks of a page share their names, as when they are pasted one after the other.
    program = "".join(step.text for step in steps(page) if step.language == "python")
    if program:
        done = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", program],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout, "an example shows nothing"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("folder", ["docs", "docs/journal"])
def test_an_index_lists_every_page(folder: str) -> None:
    index = (ROOT / folder / "README.md").read_text()
    pages = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert {name for name in pages if f"]({name})" not in index} == set()


def test_tools_readme_lists_every_script() -> None:
    index = (ROOT / "tools" / "README.md").read_text()
    assert {path.name for path in (ROOT / "tools").glob("*.py") if f"`{path.name}`" not in index} == set()


@pytest.mark.parametrize(("page", "most"), [("README.md", 180), ("docs/accuracy.md", 120)])
def test_a_page_keeps_to_its_length(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


# Words of earlier versions, and words of our own where the field has one.
RETIRED = (
    r"size-matched|\bwelded\b|shared-routing|\bpersistent\b|with(out)? prefetch\b|\bfused_allreduce\b",
    r"hbm_uneven_loss|even_share|block_tail|completion_flush|early_launch|kernel_entry|l2_free_queue|l2_queue_share",
    r"product_chain_s|looped[_ -]back|standing_in|BARRIERS_BEHIND|WITH_L1|all_resident|triggers_behind|asks_first",
    r"straight[_ ]instructions|\bcopies form\b|later_input|finds? room|found room|later_blocks|\bwish(es)?\b",
    r"stood still|has more in flight than|asked_at_once|met_by_burst|taken_over|kept_carve_out",
    r"(?<!time)\bstamps?\b|\bmeetings?\b|carried over|carries over|goes on (from|with)|went on from",
)


WITHOUT_LABELS = [one for one in [*USER_PAGES, *JOURNAL] if one.name != "measured.md"]


# Not measured.md: its labels are those of stored samples and of sources.
@pytest.mark.parametrize("page", WITHOUT_LABELS, ids=name_of)
def test_pages_use_words_of_the_field(page: Path) -> None:
    text = page.read_text()
    found = [match[0] for words in RETIRED for match in re.finditer(words, text, re.IGNORECASE)]
    assert found == []


def test_the_front_page_shows_what_the_program_prints() -> None:
    readme_output = script("readme_output")
    readme = (ROOT / "README.md").read_text()
    assert readme == readme_output.rewritten(readme), "out of date: run 'make readme' and commit what it changed"


@pytest.mark.slow
def test_measured_pages_show_what_is_predicted() -> None:
    tables = script("measurements_tables")
    found = tables.validate()
    measured = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    assert measured == tables.page(found), "out of date: run 'make readme' and commit what it changed"
    accuracy = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert accuracy == tables.accuracy_tables.rewritten(accuracy, found), "out of date: run 'make readme'"


def script(name: str) -> Any:
    """A script of ``tools`` as a module; it finds its neighbours as when it is run."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_picture_is_small_enough() -> None:
    picture = (ROOT / "docs" / "picture.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) < 300_000


# -- the glossary -----------------------------------------------------------------------------------------------------


def table(page: str, heading: str) -> list[list[str]]:
    """Rows of the table under a heading, without its head; cells stripped of spaces and code marks."""
    text = (ROOT / "docs" / page).read_text()
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, f"{page} has no section {heading!r}"
    rows = re.findall(r"^\|(.+)\|$", section.group(1), re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows[2:]]


def test_the_glossary_has_every_part_in_order() -> None:
    assert [row[:2] for row in table("glossary.md", "Parts of the step")] == [[one.word, one.value] for one in Part]


def test_the_glossary_has_every_phase_in_order() -> None:
    assert [row[0] for row in table("glossary.md", "Phases of a kernel")] == [phase.value for phase in Phase]


def test_the_glossary_has_every_path_and_switch() -> None:
    assert [row[0] for row in table("glossary.md", "Paths and switches")] == [*PATH_NAMES, *SWITCHES]
    assert [row[0] for row in table("glossary.md", "Parts of the switches")] == list(PARTS)


def test_the_machines_page_has_every_value() -> None:
    named = [name for row in table("machines.md", "Values") for name in re.findall(r"\w+", row[0])]
    assert sorted(named) == sorted(load_machine("h200").provenance)


# -- JSON -------------------------------------------------------------------------------------------------------------


COMMANDS = {
    "timeline": ("timeline", "--without", "l2-prefetch"),
    "compare": ("compare", "path=stock", "path=fused"),
    "paths": ("paths",),
    "paths stock": ("paths", "stock"),
    "models": ("models",),
    "machines": ("machines",),
    "validate": ("validate", "gb200-k3opt", "--draws", "2"),
    "claims": ("claims", "gb300-one-user", "gain-falls-with-concurrency", "tpu-v7", "--draws", "2"),
    "sensitivity": ("sensitivity", "tpu-v7", "--values", "2", "--draws", "2"),
    "kernels list": ("kernels", "list"),
    "calibrate": ("calibrate", "--from", "h200", "--machine-out", "mine.json"),
    "report": ("report", MEASURED),
    "explain": ("explain", MEASURED, "--against", MEASURED),
    "compare of files": ("compare", MEASURED, "timeline.json"),
}


class Documents(dict[str, Any]):
    """One real document of each command, made when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, name: str) -> Any:
        if name == "compare of files":
            (self.folder / "timeline.json").write_text(json.dumps(self["timeline"]))
        done = subprocess.run(
            [BIN / "k3sim", *COMMANDS[name], "--json"], cwd=self.folder, check=True, capture_output=True, text=True
        )
        self[name] = json.loads(done.stdout)
        return self[name]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Documents:
    return Documents(tmp_path_factory.mktemp("json"))


def json_type(value: Any) -> set[str]:
    """Every word of the type column that describes a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    if isinstance(value, list):
        inner = set.intersection(*(json_type(one) for one in value)) if value else set[str]()
        return {"array", *(f"array of {name}" for name in inner)} | ({"array of string"} if not value else set())
    inner = set.intersection(*(json_type(one) for one in value.values()))
    return {"object", *(f"map of {name}" for name in inner)}


def check(heading: str, objects: list[dict[str, Any]]) -> None:
    """The keys under a heading, and their types, are those of every one of the real objects."""
    rows = table("json.md", heading)
    assert objects, f"no example of {heading}"
    for one in objects:
        assert [row[0] for row in rows] == list(one), heading
        for key, types, *_ in rows:
            assert set(types.split(" or ")) & json_type(one[key]), f"{heading}: {key} is {one[key]!r:.60}"


def test_documented_keys_of_the_list_of_kernels(documents: Documents) -> None:
    check("kernels list", [documents["kernels list"]])


def test_documented_keys_of_a_build() -> None:
    code = [row[0] for row in table("json.md", "entry function")]
    assert code == [field.name for field in fields(KernelCode)]


def test_documented_keys_of_a_check() -> None:
    keys = [row[0] for row in table("json.md", "checked case")]
    assert keys == [field.name for field in fields(Checked)]


def test_documented_keys_of_a_benchmark() -> None:
    def timer(name: str, calls: Any, replays: int) -> tuple[Timing, Timing]:
        return (Timing(name=name, num_calls_per_replay=8, samples_us=(1.0,) * replays),) * 2

    rows = measure_cases(
        [Case(operator="some", name="a", rows=1, works=(), num_bytes=0, timed=lambda *_: Timed(calls=()))],
        done=(),
        prepare=lambda _: Timed(calls=(), peers={"other": lambda: ()}),
        timer=timer,
        read_bytes_per_s=4e12,
        num_replays=4,
        out_of_time=lambda: False,
        on_rows=lambda _: None,
        on_row=lambda _: None,
    )
    check("timed case", rows)
    check("timed peer", rows[0]["peers"])


def test_documented_keys_of_timeline(documents: Documents) -> None:
    document = documents["timeline"]
    check("timeline", [document])
    check("summary", [document[path] for path in PATH_NAMES])
    for name in ("switches_added", "switches_removed", "critical_path", "stages", "machine_values"):
        check(name, document[name])
    assert {one["stream"] for one in document["stages"]} == {"main", "aux", "host"}
    assert set(document["waits_us"]) <= {part.value for part in Part}


def test_documented_keys_of_compare(documents: Documents) -> None:
    document = documents["compare"]
    check("compare", [document])
    check("side", [document["before"], document["after"]])


def test_documented_keys_of_paths(documents: Documents) -> None:
    check("paths", [documents["paths"]])
    check("switch", documents["paths"]["switches"])
    check("path kernel by kernel", [documents["paths stock"]])
    check("kernel of a path", [row for rows in documents["paths stock"]["kinds"].values() for row in rows])


@pytest.mark.slow
def test_documented_keys_of_calibrate(documents: Documents) -> None:
    document = documents["calibrate"]
    check("calibrate", [document])
    check("calibrated value", document["values"])
    check("calibrated case", [case for one in document["values"] for case in one["cases"]])
    check("kernels fit", document["from_kernels"])
    check("value from kernels", [one for group in document["from_kernels"] for one in group["found"]])


@pytest.mark.slow
def test_documented_keys_of_a_calibration_check() -> None:
    machine = load_machine("h200")
    document = check_document([machine], check_stored(machine, num_draws=2, most=2), 2, 0)
    check("calibrate --check", [{**document, "files": {"html": "page.html"}}])
    check("compared case", document["cases"])
    check("summary of a check", list(document["summary"].values()))
    check("family of a check", document["families"])


def test_documented_keys_of_a_comparison_of_files(documents: Documents) -> None:
    document = documents["compare of files"]
    check("compare of files", [document])
    check("side of files", [document["before"], document["after"]])
    check("compared stage", document["stages"])


def test_documented_keys_of_a_measured_step(documents: Documents) -> None:
    check("report", [documents["report"]])
    common = [row[0] for row in table("json.md", "stages")]
    rows = json.loads(Path(MEASURED).read_text())["stages"]
    check("measured stage", [{key: value for key, value in row.items() if key not in common} for row in rows])
    assert all(set(common) <= set(row) for row in rows)


def test_documented_keys_of_an_explained_trace(documents: Documents) -> None:
    document = documents["explain"]
    check("explain", [document])
    check("rank of a trace", document["ranks"])
    check("kernel class of a trace", document["classes"])
    check("change between traces", [row for rows in document["comparison"].values() for row in rows])


def test_documented_keys_of_models(documents: Documents) -> None:
    document = documents["models"]
    check("models", [document])
    check("model", document["models"])


def test_documented_keys_of_machines(documents: Documents) -> None:
    document = documents["machines"]
    check("machines", [document])
    check("machine", document["machines"])
    check("machine_values", [row for one in document["machines"] for row in one["values"]])


@pytest.mark.slow
def test_documented_keys_of_validate(documents: Documents, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    check("validate", [documents["validate"]])
    check("coverage", [documents["validate"]["coverage"]["step"]])
    check("compared case", documents["validate"]["cases"])
    some = shipped_steps.measured_steps()[:1]  # all of them are in test_shipped_steps.py
    monkeypatch.setattr(shipped_steps, "measured_steps", lambda: some)
    assert run("validate", "--own", "--json") == 0
    own = json.loads(capsys.readouterr().out)
    check("validate --own", [own])
    stages = own.pop("own_stages_us")
    check("stage_reading", stages)
    check("compared case", [row for rows in own.values() if isinstance(rows, list) for row in rows])


@pytest.mark.slow
def test_documented_keys_of_claims(documents: Documents) -> None:
    document = documents["claims"]
    check("claims", [document])
    check("claim", document["claims"])
    check("figure", [figure for one in document["claims"] for figure in one["figures"]])


@pytest.mark.slow
def test_documented_keys_of_a_sensitivity(documents: Documents) -> None:
    document = documents["sensitivity"]
    check("sensitivity", [document])
    check("sensitive figure", document["figures"])
    check("sensitive value", [value for one in document["figures"] for value in one["values"]])


def test_what_is_said_to_add_up_does(documents: Documents) -> None:
    document = documents["timeline"]
    assert sum(document["waits_us"].values()) == pytest.approx(document["step_us"], abs=1e-6)
    assert sum(one["us"] for one in document["critical_path"]) == pytest.approx(document["step_us"], abs=1e-6)
    for one in document["switches_removed"]:
        assert sum(one["waits_delta_us"].values()) == pytest.approx(one["cost_us"], abs=1e-6)
        assert one["step_us"] - document["fused"]["step_us"] == pytest.approx(one["cost_us"], abs=1e-6)
    assert document["switches_added"][0]["step_us"] == document["stock"]["step_us"]
    assert document["switches_added"][-1]["step_us"] == document["fused"]["step_us"]
