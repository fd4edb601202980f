"""What CONTRIBUTING.md shows, done in a copy of the tree: its files and lines are taken from the page itself.

A block belongs to the file that the sentence before it names last; a ``diff`` takes lines of that file out and puts
others in their place; ``bash`` is run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3sim.kernels.costs import all_costs

ROOT = Path(__file__).parents[1]
ROOMS = ("model", "kernels", "sim", "calibrate")


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(language, file named before it, text) of every fenced block of a section, in order."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S)
    found = []
    before = ""
    for prose, language, block in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        named = re.findall(r"`([\w/]+\.py)`", prose)
        before = named[-1] if named else before
        found.append((language, before, block))
    return found


class Copy:
    """The installed layout of the tree in a folder of its own: rooms under ``k3sim``, and where a reader sees them."""

    def __init__(self, folder: Path) -> None:
        self.folder, package = folder, folder / "k3sim"
        leave = shutil.ignore_patterns("__pycache__", "data")
        shutil.copytree(ROOT / "k3sim", package, ignore=leave)
        for room in ROOMS:
            shutil.copytree(ROOT / room, package / room, ignore=leave)
            (folder / room).symlink_to(package / room)
        shutil.copytree(ROOT / "model" / "data", package / "model" / "data")
        (folder / "tests" / "kernels").mkdir(parents=True)

    def run(self, *command: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, *command], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def step_us(self, options: str) -> float:
        return float(self.run("-c", f"import k3sim; print(k3sim.predict({options}).main.step_us)"))

    def apply(self, language: str, name: str, text: str) -> None:
        path = self.folder / name
        if language == "diff":
            removed, added = (
                "".join(line[1:] for line in text.splitlines(keepends=True) if line.startswith(sign)) for sign in "-+"
            )
            content = path.read_text()
            assert content.count(removed) == 1, f"CONTRIBUTING.md takes lines out of {name} that it has not"
            path.write_text(content.replace(removed, added))
        elif language == "bash":
            for line in text.splitlines():
                self.run("-m", *line.split())
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_the_operator_shown_is_found_and_predicted(copy: Copy) -> None:
    shown = blocks("Add an operator")
    assert [name for _, name, _ in shown] == [
        "kernels/rms_norm/cost.py",
        "kernels/rms_norm/reference.py",
        "model/paths/public.py",
        "tests/kernels/test_rms_norm.py",
    ]
    before_us = copy.step_us('path="stock", concurrency=4')
    for one in shown:
        copy.apply(*one)
    (copy.folder / "kernels" / "rms_norm" / "__init__.py").touch()
    copy.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/test_rms_norm.py")
    # An early launch, whose weight is read before the wait, in each MLA layer; with fewer rows the gate, which has the
    # SMs beside it, is what the layer waits for.
    assert 0.98 * before_us < copy.step_us('path="stock", concurrency=4') < before_us
    listed = copy.run("-c", "from k3sim.kernels.costs import all_costs; print(*all_costs())").split()
    assert "rms_norm.norm" in listed
    assert "rms_norm.norm" not in all_costs()


def test_the_reference_shown_is_an_rms_norm(copy: Copy) -> None:
    torch = pytest.importorskip("torch")
    (source,) = [text for _, name, text in blocks("Add an operator") if name.endswith("reference.py")]
    names: dict[str, object] = {}
    exec(compile(source, "reference.py", "exec"), names)
    norm = names["norm"]
    assert callable(norm)
    found = norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), epsilon=0.0)
    assert found.tolist() == [pytest.approx([3 / 12.5**0.5, 8 / 12.5**0.5])]


@pytest.mark.slow
def test_the_machine_shown_predicts_a_slower_step(copy: Copy) -> None:
    shown = blocks("Add a machine")
    assert [language for language, *_ in shown] == ["python", "bash"]
    copy.apply(*shown[0])
    copy.run("make_profile.py")
    copy.apply(*shown[1])
    assert copy.step_us('machine="my.json", tp=16') > 1.05 * copy.step_us('machine="h200", tp=16')


@pytest.mark.slow
def test_the_parts_of_a_switch_shown_work(copy: Copy) -> None:
    before_us = copy.step_us('without=("low-batch-kernels.shared-experts",)')
    for one in blocks("Add a path or a switch"):
        copy.apply(*one)
    up, down = "low-batch-kernels.shared-up", "low-batch-kernels.shared-down"
    assert copy.step_us(f"without={(up, down)}") == before_us
    assert copy.step_us(f"without={(down,)}") != before_us
