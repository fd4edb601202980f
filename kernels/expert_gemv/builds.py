"""Builds of ``expert_gemv``: by width of an expert's slice, part, and peers."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True


def kernels() -> Kernels:
    def entry(width: int, fp32_out: bool, part: str = "both", num_peers: int = 0) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.expert_gemv.kernel import ExpertConfiguration, compile_experts

            return compile_experts(ExpertConfiguration(width=width, fp32_out=fp32_out, part=part, num_peers=num_peers))

        return compile_one

    return {
        **{
            f"width{width}_{'fp32' if fp32 else 'bf16'}": entry(width, fp32)
            for width in (384, 192)
            for fp32 in (False, True)
        },
        **{f"width{width}_{part}": entry(width, False, part) for width in (384, 192) for part in ("gate_up", "down")},
        **{f"width{3072 // ranks}_push{ranks}": entry(3072 // ranks, False, "both", ranks) for ranks in (8, 16)},
    }
