"""Builds of ``mla_prep``: by heads and type of cache."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def entry(heads: int, fp8: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_prep.kernel import MlaPrepConfiguration, compile_mla_prep

            return compile_mla_prep(MlaPrepConfiguration(rows=1, heads=heads, fp8=fp8))

        return compile_one

    return {f"heads{heads}_{'fp8' if fp8 else 'bf16'}": entry(heads, fp8) for heads in (6, 12) for fp8 in (True, False)}
