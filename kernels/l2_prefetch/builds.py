"""The build of ``l2_prefetch``."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Kernels


def kernels() -> Kernels:
    def compile_one() -> Any:
        from k3sim.kernels.l2_prefetch.kernel import PrefetchConfiguration, compile_prefetch
        from k3sim.kernels.l2_prefetch.launch import ISSUING_BLOCKS
        from k3sim.kernels.toolchain.compile_cache import architecture

        return compile_prefetch(PrefetchConfiguration(blocks=ISSUING_BLOCKS[architecture()]))

    return {"plain": compile_one}
