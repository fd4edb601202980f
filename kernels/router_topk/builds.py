"""Builds of ``router_topk``: whole logits, shards that are polled, and the gather behind a divided front."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def entry(num_shards: int, poll: bool) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.router_topk.kernel import RouterConfiguration, compile_router

            return compile_router(RouterConfiguration(num_shards=num_shards, table=num_shards > 1, poll=poll))

        return compile_one

    def gather(num_shards: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.router_topk.kernel import GatherConfiguration, compile_gather

            return compile_gather(GatherConfiguration(num_shards=num_shards, early=True, release_next=True))

        return compile_one

    return {
        "whole": entry(1, False),
        "shards8": entry(8, True),
        "shards16": entry(16, True),
        "gather8": gather(8),
        "gather16": gather(16),
    }
