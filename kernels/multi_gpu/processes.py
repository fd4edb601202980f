"""One process a GPU of this host: ``python -m k3sim.kernels.multi_gpu.processes --gpus 2 MODULE ARGUMENTS...``.

Does what ``torchrun --standalone --nproc-per-node`` does with these few lines, and bounds the time: a kernel that
waits for a peer in vain would otherwise hold the GPUs. When one process ends with an error the others have a few
seconds left.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from k3sim.errors import UserError
from k3sim.kernels.toolchain.child import end_with_parent

GRACE_S = 15.0
TIMED_OUT = 124  # exit status, as of timeout(1)


def check_gpus(count: int) -> None:
    """Raise UserError unless this host has so many GPUs that torch can use."""
    if count < 1:
        raise UserError(f"gpus: got {count}, accepted: 1 or more")
    try:
        import torch
    except ImportError:
        raise UserError("kernels on several GPUs need torch: pip install 'k3sim[gpu]'") from None
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > found:
        raise UserError(f"gpus: got {count}, accepted: up to {found}, which are what torch sees here")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torch.distributed reads, and what keeps NVLink multicast off."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
    }


def run_processes(module: str, arguments: Sequence[str], count: int, *, timeout_s: float) -> int:
    """Run ``python -m module`` ``count`` times at once; the first exit status that is not 0, ``TIMED_OUT``, or 0."""
    port = free_port()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **environment_of(rank, count, port)},
            preexec_fn=end_with_parent,
        )
        for rank in range(count)
    ]

    def stop(number: int, _: object) -> None:
        for one in running:
            one.kill()
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    ends = time.monotonic() + timeout_s
    status = 0
    try:
        while None in [one.poll() for one in running]:  # asks every one: returncode is set by it
            failed = [one.returncode for one in running if one.returncode]
            if failed and not status:
                status = failed[0]
                ends = min(ends, time.monotonic() + GRACE_S)
            if time.monotonic() > ends:
                status = status or TIMED_OUT
                break
            time.sleep(0.05)
    finally:
        for one in running:
            if one.poll() is None:
                one.kill()
        for one in running:
            one.wait()
        signal.signal(signal.SIGTERM, before)
    return status or next((one.returncode for one in running if one.returncode), 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k3sim.kernels.multi_gpu.processes", description=__doc__)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    try:
        check_gpus(given.gpus)
    except UserError as error:
        sys.stderr.write(f"k3sim: {error}\n")
        return 2
    return run_processes(given.module, given.arguments, given.gpus, timeout_s=given.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
