"""Builds of ``skinny_gemv``: the matrices of K3 at TP8 and TP16 as they are run, at one row and at eight."""

from __future__ import annotations

from typing import Any

from k3sim.kernels.toolchain.catalogue import Compile, Kernels

RECORDS_TIMESTAMPS = True
NUM_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}
# Outputs and depth of the matrices at TP8 and TP16 (model/layout.py, rank_matrices).
GEMV_SHAPES = (
    (6288, 7168), (3216, 7168), (2112, 7168), (3648, 7168), (2880, 7168), (3584, 7168), (896, 7168), (448, 7168),
    (112, 7168), (56, 7168),
    (1536, 7168), (768, 7168), (8448, 7168), (4224, 7168), (7168, 1536), (7168, 768), (7168, 384), (7168, 4224),
    (7168, 2112), (7168, 3584), (896, 3584), (448, 3584), (2304, 1536), (1152, 1536), (1536, 128), (768, 128),
    (20480, 7168), (10240, 7168),
)  # fmt: skip
# Matrices of other models, one rank's: q and kv of DeepSeek V3, and what Llama 3 8B and 70B, gpt-oss 120B and Qwen3 30B
# read at TP1 to TP8. No table lists them.
OTHER_SHAPES = (
    (2048, 7168), (4096, 4096), (6144, 4096), (1280, 8192), (8192, 1024), (7168, 8192), (5120, 2880), (2048, 512),
)  # fmt: skip
GEMV_ROWS = (1, 8)  # the FMA and the tensor-core form


def kernels() -> Kernels:
    from k3sim.kernels.skinny_gemv.configuration import Epilogue, GemvConfiguration, choose_tiling
    from k3sim.kernels.toolchain.compile_cache import architecture

    def entry(
        num_outputs: int, depth: int, rows: int, epilogue: Epilogue, num_peers: int, polled: bool = False
    ) -> Compile:
        def compile_one() -> Any:
            from k3sim.kernels.skinny_gemv.kernel import compile_gemv

            paired = epilogue is Epilogue.SITU_GLU
            tiling = choose_tiling(
                num_outputs=num_outputs,
                depth=depth,
                rows=rows,
                paired=paired,
                num_sms=NUM_SMS[architecture()],
                measured=architecture() == "sm_90a",
            )
            assert tiling is not None, "every matrix of K3 has a form"
            return compile_gemv(
                GemvConfiguration(
                    num_outputs=num_outputs,
                    depth=depth,
                    rows=rows,
                    fp32_out=polled,
                    epilogue=epilogue,
                    num_peers=num_peers,
                    polled=polled,
                    tiling=tiling,
                ).check()
            )

        return compile_one

    found = {
        f"{outputs}x{depth}_rows{rows}": entry(outputs, depth, rows, Epilogue.NONE, 0)
        for outputs, depth in GEMV_SHAPES
        for rows in GEMV_ROWS
    }
    for epilogue in Epilogue:
        if epilogue is not Epilogue.NONE:
            found[f"1536x7168_rows1_{epilogue.name.lower()}"] = entry(1536, 7168, 1, epilogue, 0)
    found["7168x768_rows1_push8"] = entry(7168, 768, 1, Epilogue.NONE, 8)
    for outputs, ranks in ((560, 8), (280, 16)):  # router and latent down shard, TP8 and TP16
        for rows in GEMV_ROWS:
            found[f"{outputs}x7168_rows{rows}_front{ranks}"] = entry(outputs, 7168, rows, Epilogue.NONE, ranks, True)
    return found
