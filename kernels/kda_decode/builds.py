"""Builds of ``kda_decode``: by heads, type of state, and how a head is divided over blocks."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    from k3sim.kernels.kda_decode.launch import RING_BYTES

    def entry(heads: int, bf16_state: bool, cluster: int, threads: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.kda_decode.kernel import HEAD_DIM, KdaConfiguration, compile_kda

            state_bytes = HEAD_DIM * HEAD_DIM * (2 if bf16_state else 4)
            return compile_kda(
                KdaConfiguration(
                    heads=heads,
                    bf16_state=bf16_state,
                    cluster=cluster,
                    threads=threads,
                    stages=0 if cluster else RING_BYTES // state_bytes,
                    pdl=True,
                )
            )

        return compile_one

    return {
        f"heads{heads}_{'bf16' if bf16 else 'fp32'}_{f'cluster{cluster}' if cluster else 'stream'}": entry(
            heads, bf16, cluster, threads
        )
        for heads in (6, 12)
        for bf16 in (False, True)
        for cluster, threads in ((8 if bf16 else 4, 128), (2, 256), (0, 256))
    }
