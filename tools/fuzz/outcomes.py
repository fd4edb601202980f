"""One invocation: run in a forked process or as a command of its own, and judged by what it says, takes and leaves."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 60.0
MOST_BYTES = 1 << 30
LONGEST_LINE = 850
STATUSES = (0, 1, 2, 130, 141)
_CEILING_BYTES = 6 << 30  # of address space: above what is a fault already, and below what would hurt the machine


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``faults`` are words of ``FAULTS``; none where the invocation ended as it should."""

    status: int
    faults: tuple[str, ...]
    said: str  # the end of standard error
    cpu_s: float
    peak_bytes: int


FAULTS = ("traceback", "status", "hang", "memory", "left", "lines", "output")


def run_forked(arguments: Sequence[str], work: Path, streams: str = "") -> Outcome:
    """The command in a copy of this process, which has everything imported already."""
    return _run(lambda: _command(arguments), work, streams)


def run_alone(arguments: Sequence[str], work: Path, streams: str = "") -> Outcome:
    """The command as a process of its own, started as a user starts it. ``streams``: what a shell does to them."""
    command = [sys.executable, "-m", "k3sim", *arguments]
    return _run(lambda: os.execv(sys.executable, [os.fsencode(one) for one in command]), work, streams)


def _command(arguments: Sequence[str]) -> None:
    from k3sim.cli import main

    status: object = 0
    try:
        sys.argv = ["k3sim", *arguments]
        main()
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 71)


def _run(body: object, work: Path, streams: str) -> Outcome:
    before = _listing(work)
    out, err = work.parent / "stdout", work.parent / "stderr"
    temporary = work.parent / "tmp"
    temporary.mkdir(exist_ok=True)
    started_s = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(work, out, err, temporary, streams)
        body()  # type: ignore[operator]
        os._exit(72)
    status, used, hung = _wait(pid, started_s)
    said = err.read_text(errors="replace") if err.exists() else ""
    faults = ["hang"] if hung else []
    if "Traceback" in said or "Exception ignored" in said:
        faults.append("traceback")
    elif status not in STATUSES and not hung:
        faults.append("status")
    peak_bytes = used.ru_maxrss * 1024
    if peak_bytes > MOST_BYTES:
        faults.append("memory")
    left = _listing(work) - before
    refused = status in (2, 130) and not streams  # an answer that cannot be printed has written its files
    if any(temporary.iterdir()) or any(".partial" in one for one in left) or (refused and left):
        faults.append("left")
    if _outlived(pid):
        faults.append("left")
    if status == 2 and not faults:
        faults += _judged_refusal(said, out, streams)
    elif status == 0 and not faults and not streams:
        faults += _judged_answer(out)
    return Outcome(
        status=status,
        faults=tuple(faults),
        said=said[-2000:],
        cpu_s=used.ru_utime + used.ru_stime,
        peak_bytes=peak_bytes,
    )


def _become(work: Path, out: Path, err: Path, temporary: Path, streams: str) -> None:
    """In the child: a group, a folder, streams and limits of its own."""
    os.setpgid(0, 0)
    os.chdir(work)
    os.environ["TMPDIR"] = str(temporary)
    resource.setrlimit(resource.RLIMIT_AS, (_CEILING_BYTES, _CEILING_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for path, descriptor in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    if streams == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    elif streams == "reader left":
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    elif streams == "no output":
        os.close(1)
    elif streams == "no errors":
        os.close(2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _wait(pid: int, started_s: float) -> tuple[int, resource.struct_rusage, bool]:
    """Status, use, and whether it took 60 s: of the processor, or of waiting for something that does not come."""
    pause_s = 0.002
    while True:
        done, status, used = os.wait4(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), used, False
        if time.monotonic() - started_s > MOST_SECONDS:
            cpu_s = _cpu_s(pid)
            # On a machine that others use, an hour of the clock is no fault of the program.
            if cpu_s > MOST_SECONDS or cpu_s < (time.monotonic() - started_s) / 20:
                os.killpg(pid, signal.SIGKILL)
                _, status, used = os.wait4(pid, 0)
                return os.waitstatus_to_exitcode(status), used, True
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.3, 0.1)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _outlived(group: int) -> bool:
    """Whether a process that the command started is still there, a second later at most."""
    for _ in range(50):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.02)
    os.killpg(group, signal.SIGKILL)
    return True


def _judged_refusal(said: str, out: Path, streams: str) -> list[str]:
    if streams == "no errors":
        return []
    lines = [one for one in said.splitlines() if not one.startswith("k3sim: warning: ")]
    faults = []
    if len(lines) != 1 or not lines[0].startswith("k3sim: ") or len(lines[0]) > LONGEST_LINE:
        faults.append("lines")
    if not streams and out.stat().st_size:
        faults.append("output")
    return faults


def _judged_answer(out: Path) -> list[str]:
    text = out.read_text(errors="replace")
    if not text.startswith("{"):
        return []
    try:
        json.loads(text, parse_constant=_refuse_constant)
    except ValueError:
        return ["output"]
    return []


def _refuse_constant(word: str) -> float:
    raise ValueError(word)


def _listing(folder: Path) -> set[str]:
    return {str(one.relative_to(folder)) for one in folder.rglob("*")}
