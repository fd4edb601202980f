"""Commands as tests run them: in this process, by their words."""

from __future__ import annotations

import pytest

from k3sim.cli import main

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """Exit status of a command that runs in this process."""
    with pytest.raises(SystemExit) as exit_info:
        main(list(arguments))
    status = exit_info.value.code
    assert isinstance(status, int)
    return status
