"""Builds of ``attn_res``: by number of snapshots."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def entry(kernel: str, num_snapshots: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.attn_res.kernel import AttnResConfiguration, compile_attn_res

            return compile_attn_res(
                AttnResConfiguration(kernel=kernel, num_snapshots=num_snapshots, has_delta=True, cluster=4, pdl=True)
            )

        return compile_one

    return {
        **{f"combine_snapshots{number}": entry("combine", number) for number in range(9)},
        **{f"snapshot_part_snapshots{number}": entry("snapshot_part", number) for number in range(1, 9)},
        "fold_prefix": entry("fold_prefix", 0),
    }
