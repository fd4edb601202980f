"""Builds of ``l2_prefetch``: keeping what it fetches, or not."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels


def kernels() -> Kernels:
    def entry(keep: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.l2_prefetch.kernel import PrefetchConfiguration, compile_prefetch

            return compile_prefetch(PrefetchConfiguration(keep=keep))

        return compile_one

    return {"keep": entry(True), "plain": entry(False)}
