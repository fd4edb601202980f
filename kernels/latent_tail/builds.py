"""Builds of ``latent_tail``: by part, ranks and rows."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def entry(part: str, ranks: int, max_rows: int, release_late: bool = False) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.latent_tail import kernel

            configuration = kernel.TailConfiguration(ranks=ranks, max_rows=max_rows, release_late=release_late)
            return {"send": kernel.compile_send, "up": kernel.compile_up, "collect": kernel.compile_collect}[part](
                configuration
            )

        return compile_one

    def send_shared(ranks: int) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.latent_tail.kernel import TailConfiguration, compile_send

            return compile_send(TailConfiguration(ranks=ranks, shared_only=True))

        return compile_one

    return {
        **{
            f"{part}_ranks{ranks}_rows{rows}": entry(part, ranks, rows)
            for part in ("send", "up", "collect")
            for ranks in (8, 16)
            for rows in (1, 4)
        },
        **{f"up_ranks{ranks}_rows{rows}_late": entry("up", ranks, rows, True) for ranks in (8, 16) for rows in (1, 4)},
        **{f"send_shared_ranks{ranks}": send_shared(ranks) for ranks in (8, 16)},
    }
