"""One of several processes' GPUs: memory that all of them map, launches, and a recorder in each.

Slots lie in torch's symmetric memory, which peers reach by unicast loads and stores; multicast stays off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes import SOURCE
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.link_source import LINK_SOURCE
from k3sim.calibrate.probes.recorder import Recorder

BLOCK_BYTES = 192 << 20  # of shared memory of the GPUs
MESSAGES = 64 << 20  # where in it messages land; small things lie before
Readings = dict[str, tuple[str, Any]]


class LinkGpu(Gpu):
    """This process's GPU with the probes of links, and a block of memory that all processes map."""

    def __init__(self) -> None:
        from k3sim.kernels.multi_gpu.group import Group

        self.group = Group()
        self.rank, self.num_gpus = self.group.rank, self.group.size
        self._load(SOURCE + LINK_SOURCE)
        self.block = self.group.block(BLOCK_BYTES)
        self.block.own.zero_()
        self.base = 0  # of the values that probes send: none is ever sent again
        self.group.barrier()

    @property
    def peer(self) -> int:
        """The other of the first two; a GPU beyond them looks on."""
        return 1 - self.rank

    @property
    def takes_part(self) -> bool:
        return self.rank < 2

    def at(self, gpu: int, offset: int) -> ctypes.c_uint64:
        """Address in a GPU's block as this one sees it."""
        return ctypes.c_uint64(self.block.addresses[gpu] + offset)

    def next_base(self, count: int) -> int:
        """Values above this one have not been sent yet; the same in every process."""
        self.base += count
        return self.base - count

    def event_times_us(self, graph: Any, count: int) -> list[float]:
        """Time between events around each of ``count`` replays of a torch graph, all processes at once."""
        torch = self.torch
        self.group.barrier()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + 5)]
        for begin, end in pairs:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs[5:]]

    def captured(self, calls: Sequence[Callable[[], object]], rounds: int = 1) -> Any:
        """A torch graph of the calls, which ran once before; all processes at once."""
        torch = self.torch
        self.group.barrier()
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        self.group.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for call in calls:
                    call()
        torch.cuda.synchronize()
        return graph


class LinkRecorder(Recorder):
    """A recorder in every process; the first one writes. A process that only looks on in a case has no readings."""

    def __init__(self, gpu: LinkGpu, path: Path, quick: bool, *, commit: str = "") -> None:
        from k3sim.kernels.harness.bench import environment

        super().__init__(gpu, path, quick, None if gpu.rank == 0 else lambda _: None)
        # One line a GPU; they are alike.
        self.head["driver_and_clocks"] = {
            name: value.splitlines()[0].strip() if value else ""
            for name, value in self.head["driver_and_clocks"].items()
        }
        nccl = ".".join(str(one) for one in gpu.torch.cuda.nccl.version())
        self.head |= {
            "source": "k3sim calibrate/probes/links.py",
            "gpus": gpu.num_gpus,
            "commit": commit,
            "versions": {**environment()["versions"], "nccl": nccl},
        }
        gpu.group.barrier()  # all have read what is there before the first writes

    def write(self) -> None:
        if self.gpu.rank == 0:  # type: ignore[attr-defined]
            super().write()
