"""What is skipped, in a line a reason; what is slow, apart; and the longest files first."""

from __future__ import annotations

import pytest
from skips import skip_lines

# Workers take whole files, and would otherwise begin one of these when the others have nothing left: builds of every
# kernel for three architectures, all that the pages say, fits, whole steps. The longest first.
LONGEST_FILES = (
    "test_documentation.py", "test_build.py", "test_fit.py", "test_calibrate_command.py", "test_critical_path.py",
    "test_wiring.py", "test_fold.py", "test_shipped_steps.py", "test_predict.py", "test_cli.py", "test_published.py",
)  # fmt: skip


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def _mark_slow_but_one(items: list[pytest.Item]) -> None:
    seen = set[str]()
    for item in items:
        if item.get_closest_marker("slow_but_one"):
            function = item.nodeid.partition("[")[0]
            if function in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(function)


@pytest.hookimpl(tryfirst=True)  # before -m takes out the slow ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _mark_slow_but_one(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    place = {name: number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = terminalreporter.stats.get("skipped", ())
    skips = [(one.nodeid, one.longrepr[2].removeprefix("Skipped: ")) for one in reports]
    for line in skip_lines(skips):
        terminalreporter.write_line(line)


@pytest.fixture(autouse=True)
def quiet_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of progress in what a test reads of a command, however busy the machine is."""
    monkeypatch.setattr("k3sim.commands.progress.LINE_EVERY_S", 3600.0)
