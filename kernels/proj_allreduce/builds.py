"""Builds of ``proj_allreduce``: both halves by ranks, and the consume of a gathered row."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True
PRODUCE_SHAPES = ((1536, 8), (768, 16), (4224, 8), (2112, 16))  # depth and ranks: attention, dense layer


def kernels() -> Kernels:
    def produce(depth: int, ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ProduceConfiguration, compile_produce

            return compile_produce(
                ProduceConfiguration(rows=1, depth=depth, hidden=7168, ranks=ranks, max_rows=16)
            )

        return compile_one

    def consume(ranks: int, snapshots: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ConsumeConfiguration, compile_consume

            return compile_consume(
                ConsumeConfiguration(
                    rows=1, hidden=7168, ranks=ranks, max_rows=16, residual=True, snapshots=snapshots, release_next=True
                )
            )

        return compile_one

    def gathered(ranks: int, snapshots: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.proj_allreduce.kernel import ConsumeConfiguration, compile_consume_gathered

            return compile_consume_gathered(
                ConsumeConfiguration(
                    rows=1, hidden=7168, ranks=ranks, max_rows=0, residual=snapshots, snapshots=snapshots,
                    release_next=True, gathered=True, empties=snapshots,
                )
            )  # fmt: skip

        return compile_one

    return {
        **{f"produce_depth{depth}_ranks{ranks}": produce(depth, ranks) for depth, ranks in PRODUCE_SHAPES},
        **{
            f"consume_ranks{ranks}{'_snapshots' if snapshots else ''}": consume(ranks, snapshots)
            for ranks in (8, 16)
            for snapshots in (False, True)
        },
        **{f"gathered_ranks{ranks}": gathered(ranks, True) for ranks in (8, 16)},
        "gathered_embedding": gathered(16, False),
    }
