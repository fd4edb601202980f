"""What tests of several kernels share: a build in a process of its own, two chains of replays, slots far apart."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest


@pytest.fixture
def compiles() -> Callable[[str, str], None]:
    """Run a source that compiles kernels, for an architecture, in a process of its own: CUTLASS fixes its target."""

    def run(source: str, architecture: str) -> None:
        if importlib.util.find_spec("cutlass") is None:
            pytest.skip("nvidia-cutlass-dsl is not installed")
        environment = {**os.environ, "CUTE_DSL_ARCH": architecture}
        command = [sys.executable, "-c", source]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    return run


@pytest.fixture
def chain_ends() -> Callable[[Callable[[], object], dict[str, Any], dict[str, Any], Sequence[Any]], list[Any]]:
    """Two chains of 1,000 replays of a captured step from the same start: copies of ``results`` after each."""

    def run(
        step: Callable[[], object], start: dict[str, Any], arguments: dict[str, Any], results: Sequence[Any]
    ) -> list[Any]:
        import torch

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        ends = []
        for _ in range(2):
            for name, tensor in start.items():
                arguments[name].copy_(tensor)
            for _ in range(1000):
                graph.replay()
            torch.cuda.synchronize()
            ends.append([one.clone() for one in results])
        for first, second in zip(*ends, strict=True):
            assert torch.equal(first, second)
        return ends

    return run


@pytest.fixture
def far_slots() -> Callable[[int, int], Any]:
    """Cache slots of rows on the GPU: the first in the last page, the second a padding row, the others far apart."""

    def make(rows: int, num_pages: int) -> Any:
        import torch

        slots = torch.arange(rows, device="cuda") * 6400 + 17
        slots[0] = num_pages * 64 - 1
        if rows > 1:
            slots[1] = -1
        return slots

    return make
