"""The fuzzer of ``tools/fuzz``: a hundred of its invocations end well, and what does not end well is counted."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FUZZ = Path(__file__).parents[1] / "tools" / "fuzz"


@pytest.fixture
def outcomes() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FUZZ))
    try:
        yield importlib.import_module("outcomes")
    finally:
        sys.path.remove(str(FUZZ))


def test_a_hundred_fuzzed_invocations_end_well() -> None:
    command = [sys.executable, str(FUZZ), "--seed", "0", "--runs", "100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout
    assert "seed 0, 100 invocations, 0 faults" in done.stdout


def _say(text: str, status: int) -> Callable[[], None]:
    def body() -> None:
        os.write(2, text.encode())
        os._exit(status)

    return body


def _leave(name: str, status: int) -> Callable[[], None]:
    def body() -> None:
        Path(name).write_text("left")
        os.write(2, b"k3sim: refused\n")
        os._exit(status)

    return body


def _start_a_child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    os._exit(0)


def _fill_memory() -> None:
    held = bytearray(1 << 22)
    for at in range(0, len(held), 4096):
        held[at] = 1
    os._exit(0)


def _print(text: str) -> Callable[[], None]:
    def body() -> None:
        os.write(1, text.encode())
        os._exit(0)

    return body


@pytest.mark.parametrize(
    ("body", "faults"),
    [
        (_say("k3sim: refused\n", 2), ()),
        (_say("k3sim: warning: mind\nk3sim: refused\n", 2), ()),
        (_say("Traceback (most recent call last):\n", 1), ("traceback",)),
        (_say("", 70), ("status",)),
        (_say("k3sim: one\ntwo\n", 2), ("lines",)),
        (_say("k3sim: " + "x" * 900, 2), ("lines",)),
        (_say("", 2), ("lines",)),
        (_leave("out.json", 2), ("left",)),
        (_leave("out.json", 0), ()),
        (_leave(".out.json.7.partial", 0), ("left",)),
        (_leave("../tmp/x", 0), ("left",)),
        (_start_a_child, ("left",)),
        (_print('{"step_us": NaN}'), ("output",)),
        (_print('{"step_us": 1}'), ()),
        (lambda: time.sleep(60), ("hang",)),
        (_fill_memory, ("memory",)),
    ],
)
def test_what_ends_badly_is_a_fault(
    outcomes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Any, faults: tuple[str, ...]
) -> None:
    monkeypatch.setattr(outcomes, "MOST_SECONDS", 0.1 if faults == ("hang",) else 60.0)
    monkeypatch.setattr(outcomes, "MOST_BYTES", 1 << 20 if faults == ("memory",) else 1 << 40)
    work = tmp_path / "work"
    work.mkdir()
    assert outcomes._run(body, work, "").faults == faults
