"""Processes that the project starts are gone once their parent is, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import subprocess, sys, time
from k3sim.kernels.toolchain.child import end_with_parent
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], preexec_fn=end_with_parent)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")
def test_a_child_ends_with_a_killed_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    for _ in range(200):
        try:
            with open(f"/proc/{child}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":  # nobody is left to ask for its status
                    return
        except FileNotFoundError:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child outlived its parent")
