"""A page as chromium sees it, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tools.picture import CHROMIUM_OPTIONS

CHROMIUM = shutil.which("chromium")


def open_in_browser(path: Path, tmp_path: Path, width: int = 1280) -> tuple[str, list[str]]:
    """The document after its scripts ran, and the lines of the console. No host name resolves."""
    if CHROMIUM is None:
        if os.environ.get("K3SIM_REQUIRE_CHROMIUM") == "1":
            pytest.fail("K3SIM_REQUIRE_CHROMIUM=1, but there is no chromium on the path")
        pytest.skip("no chromium on the path")
    done = subprocess.run(
        [
            CHROMIUM,
            *CHROMIUM_OPTIONS,
            f"--user-data-dir={tmp_path / 'browser'}",
            "--enable-logging=stderr",
            "--v=0",
            f"--window-size={width},4200",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
