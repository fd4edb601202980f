"""What kernels written as classes share: the configuration they are traced for, and a thread's place in its block.

Imports cutlass, so only kernel modules import this one.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import cutlass.cute as cute
from cutlass import Int32

Configuration = TypeVar("Configuration")


class ConfiguredKernel(Generic[Configuration]):
    """A kernel for one configuration; tensors arrive as addresses, so that a call converts nothing."""

    def __init__(self, configuration: Configuration) -> None:
        self.config = configuration


def thread_place() -> tuple[Int32, Int32, Int32]:
    """Number of this thread in its block, its warp (the same value in all lanes, as the compiler is told), its lane."""
    tid, _, _ = cute.arch.thread_idx()
    return tid, cute.arch.make_warp_uniform(tid >> 5), tid & 31
