"""Builds of ``mla_decode``: attention by heads and type of cache, the merge over ranks, the lift to values."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def decode(heads: int, fp8: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.cost import chosen_clusters
            from k3sim.kernels.mla_decode.kernel import MlaDecodeConfiguration, compile_mla_decode

            return compile_mla_decode(
                MlaDecodeConfiguration(
                    heads=heads, fp8=fp8, clusters=chosen_clusters(1, heads), settled_cache=True
                )
            )

        return compile_one

    def merge(ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.kernel import LseMergeConfiguration, compile_lse_merge

            return compile_lse_merge(LseMergeConfiguration(ranks=ranks))

        return compile_one

    def lift(heads: int, row_tiles: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.mla_decode.lift import LiftConfiguration, compile_lift_gate

            return compile_lift_gate(LiftConfiguration(heads=heads, row_tiles=row_tiles, pdl=True))

        return compile_one

    return {
        **{
            f"heads{heads}_{'fp8' if fp8 else 'bf16'}": decode(heads, fp8)
            for heads in (6, 12, 96)
            for fp8 in (True, False)
        },
        **{f"lse_merge_ranks{ranks}": merge(ranks) for ranks in (8, 16)},
        **{f"lift_heads{heads}_rows{8 * tiles}": lift(heads, tiles) for heads in (6, 12) for tiles in (1, 2)},
    }
