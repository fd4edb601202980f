"""Builds of ``lm_head``: by vocabulary shard and number of candidates."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels


def kernels() -> Kernels:
    def entry(num_outputs: int, k: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.lm_head.kernel import TopKConfiguration, compile_top_k

            return compile_top_k(TopKConfiguration(num_outputs=num_outputs, k=k))

        return compile_one

    return {f"top{k}_of_{num_outputs}": entry(num_outputs, k) for num_outputs in (20480, 10240) for k in (1, 64)}
