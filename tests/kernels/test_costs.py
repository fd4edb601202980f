"""Costs: HBM bytes of every operator, counted by hand from its shapes, at two sizes each.

The numbers are written out so that they do not come from the code under test: H = 7168 hidden, L = 3584 latent,
one KDA head's state 128 x 128 fp32 = 65536 B, one cached MLA token 576 B in fp8. bf16 is two bytes a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from k3sim.kernels.costs import all_costs, cost_functions, work_of
from k3sim.kernels.cublas import cost as cublas
from k3sim.kernels.expert_gemv import cost as expert_gemv
from k3sim.kernels.folders import COST_MODULES, operators_with, part_of
from k3sim.kernels.mla_decode import cost as mla_decode
from k3sim.kernels.proj_allreduce import cost as proj_allreduce
from k3sim.kernels.router_topk import cost as router_topk
from k3sim.kernels.skinny_gemv import cost as skinny_gemv
from k3sim.kernels.work import Barrier, ReadKind, Unit, Work
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.matrices import rank_matrices
from k3sim.model.paths import find_path
from k3sim.model.program import Weight, build_program

H, L = 7168, 3584
K3 = load_architecture()


def bf16(num_outputs: int, depth: int, region: str = "w") -> Weight:
    return Weight(region=region, num_outputs=num_outputs, depth=depth, num_bytes=num_outputs * depth * 2)


def mxfp4(num_outputs: int, depth: int, num_experts: int, region: str = "e") -> Weight:
    """A nibble a weight and a scale byte for each 32."""
    return Weight(
        region=region, num_outputs=num_outputs, depth=depth,
        num_bytes=num_experts * (num_outputs * depth // 2 + num_outputs * depth // 32),
    )  # fmt: skip


def stored(num_outputs: int, depth: int, bits: float, num_experts: int = 1) -> Weight:
    """So many bits a weight, scales included."""
    num_bytes = int(num_experts * num_outputs * depth * bits / 8)
    return Weight(region="q", num_outputs=num_outputs, depth=depth, num_bytes=num_bytes)


# DeepSeek-V3 at TP8: eight experts of 512 x 7168 and 7168 x 256 at one row, 30.5 at four.
CHOSEN1 = {"rows": 1, "top_k": 8, "distinct_milli": 8000}
CHOSEN4 = {"rows": 4, "top_k": 8, "distinct_milli": 30_500}


def grouped(bits: float) -> tuple[tuple[tuple[Weight, ...], Mapping[str, int], int], ...]:
    """Both products of DeepSeek-V3's experts; a matrix of all hit experts is read once."""
    return (
        ((stored(512, 7168, bits, 8),), CHOSEN1, int(29_360_128 * bits / 8)),
        ((stored(7168, 256, bits, 30),), CHOSEN4, int(55_050_240 * bits / 8)),
    )


MIX = {"hidden": H}
EXPERTS1 = {"rows": 1, "top_k": 16, "distinct_milli": 16_000}
EXPERTS8 = {"rows": 8, "top_k": 16, "distinct_milli": 120_300}
KDA8 = {"rows": 1, "heads": 12, "state_bytes": 786_432, "conv_state_bytes": 27_648, "conv_weight_bytes": 73_728}
KDA16 = {"rows": 4, "heads": 6, "state_bytes": 393_216, "conv_state_bytes": 13_824, "conv_weight_bytes": 36_864}
ATTENTION8 = {"rows": 1, "heads": 12, "context": 8192, "kv_row_bytes": 576, "kv_lora_rank": 512}
ATTENTION16 = {"rows": 4, "heads": 6, "context": 131_072, "kv_row_bytes": 1152, "kv_lora_rank": 512}
TAIL = {"hidden": H, "latent": L}

IN_PROJ8, IN_PROJ16 = bf16(6288, H), bf16(3216, H)
O_PROJ8, O_PROJ16 = bf16(H, 1536), bf16(H, 768)
UP8, UP16 = bf16(896, L), bf16(448, L)
W13_8, W13_16 = mxfp4(768, L, 16), mxfp4(384, L, 16)
W2_8, W2_16 = mxfp4(L, 384, 16), mxfp4(L, 192, 16)

KDA_CLUSTER = (
    ((bf16(1536, 128),), KDA8, 1_701_888 + 393_216),
    ((bf16(768, 128),), KDA16, 3_293_184 + 196_608),
)
# q_b and W_UK, and one new row a request into the cache
MLA_PREP = (
    (
        (bf16(2304, 1536), bf16(12 * 512, 128)),
        {"rows": 1, "heads": 12, "kv_row_bytes": 576},
        7_077_888 + 1_572_864 + 576,
    ),
    (
        (bf16(1152, 1536), bf16(6 * 512, 128)),
        {"rows": 4, "heads": 6, "kv_row_bytes": 1152},
        3_538_944 + 786_432 + 4608,
    ),
)

# Bytes of both sizes: TP8 at one row and TP16 at four unless the shapes say otherwise.
CASES: Mapping[str, tuple[tuple[tuple[Weight, ...], Mapping[str, int], int], ...]] = {
    # three [H] vectors of parameters, and the snapshots: sources less the prefix
    "attn_res.single_block": (
        ((), {**MIX, "rows": 1, "sources": 9}, 3 * 14_336 + 8 * 14_336),
        ((), {**MIX, "rows": 4, "sources": 2}, 3 * 14_336 + 4 * 14_336),
    ),
    "attn_res.snapshot_sums": (
        ((), {**MIX, "rows": 1, "sources": 9}, 43_008 + 114_688),
        ((), {**MIX, "rows": 4, "sources": 1}, 43_008),
    ),
    "attn_res.combine": (
        ((), {**MIX, "rows": 1, "sources": 9}, 43_008 + 114_688),
        ((), {**MIX, "rows": 4, "sources": 2}, 43_008 + 4 * 14_336),
    ),
    "attn_res.snapshot_part": (
        ((), {**MIX, "rows": 1, "sources": 9}, 43_008 + 114_688),
        ((), {**MIX, "rows": 4, "sources": 2}, 43_008 + 4 * 14_336),
    ),
    "skinny_gemv.low_latency": (((IN_PROJ8,), {"rows": 1}, 90_144_768), ((O_PROJ16,), {"rows": 4}, 11_010_048)),
    "cublas.gemm": (((IN_PROJ8,), {"rows": 1}, 90_144_768), ((O_PROJ16,), {"rows": 4}, 11_010_048)),
    "cublas.public_gemm": (
        ((IN_PROJ8,), {"rows": 1}, 90_144_768),
        ((bf16(2112, H), bf16(768, H)), {"rows": 4}, 30_277_632 + 11_010_048),
    ),
    "cublas.batched_gemm": (
        ((bf16(12 * 512, 128),), {"rows": 1}, 1_572_864),
        ((bf16(6 * 128, 512),), {"rows": 4}, 786_432),
    ),
    "expert_gemv.gate_up": (((W13_8,), EXPERTS1, 23_396_352), ((W13_16,), EXPERTS1, 11_698_176)),
    "expert_gemv.down": (((W2_8,), EXPERTS1, 11_698_176), ((W2_16,), EXPERTS1, 5_849_088)),
    "proj_allreduce.consume_gathered": (
        ((), {"rows": 1, "hidden": H}, 43_008),
        ((), {"rows": 4, "hidden": H}, 43_008),
    ),
    "router_topk.gather_topk": (((), {"rows": 1, "latent": L}, 0), ((), {"rows": 4, "latent": L}, 0)),
    "latent_tail.collect": (((), {"rows": 1, "width": H}, 0), ((), {"rows": 4, "width": H}, 0)),
    "lm_head.select": (((), {"rows": 1}, 0), ((), {"rows": 4}, 0)),
    "mla_decode.clusters": (((), ATTENTION8, 4_718_592), ((), ATTENTION16, 603_979_776)),
    "mla_decode.clusters_early": (((), ATTENTION8, 4_718_592), ((), ATTENTION16, 603_979_776)),
    "expert_gemv.persistent_push": (
        ((W13_8, W2_8), {**EXPERTS1, "width": 384, "latent": L}, 35_094_528),
        ((W13_16, W2_16), {**EXPERTS1, "width": 192, "latent": L}, 17_547_264),
    ),
    # 16 experts a row, whatever rows share: at four rows 61 distinct ones
    "expert_gemv.persistent": (
        ((W13_8, W2_8), {**EXPERTS1, "width": 384}, 35_094_528),
        (
            (mxfp4(384, L, 61), mxfp4(L, 192, 61)),
            {"rows": 4, "top_k": 16, "distinct_milli": 61_000, "width": 192},
            4 * (11_698_176 + 5_849_088),
        ),
    ),
    "latent_tail.up_cluster": (
        ((UP8,), {**TAIL, "rows": 1, "ranks": 8}, 6_422_528),
        ((UP16,), {**TAIL, "rows": 4, "ranks": 16}, 3_211_264),
    ),
    "proj_allreduce.consume": (
        ((), {"rows": 1, "hidden": H, "slots": 8}, 43_008),
        ((), {"rows": 4, "hidden": H, "slots": 16}, 43_008),
    ),
    "proj_allreduce.produce_whole": (((O_PROJ8,), {"rows": 1}, 22_020_096), ((O_PROJ16,), {"rows": 4}, 11_010_048)),
    "skinny_gemv.tinygemm": (((IN_PROJ8,), {"rows": 1}, 90_144_768), ((bf16(896, H),), {"rows": 12}, 12_845_056)),
    "skinny_gemv.tiled": (
        ((IN_PROJ8,), {"rows": 1}, 90_144_768),
        ((bf16(2112, H), bf16(768, H)), {"rows": 4}, 30_277_632 + 11_010_048),
    ),
    "skinny_gemv.tiled_situ": (((bf16(1536, H),), {"rows": 1}, 22_020_096), ((bf16(768, H),), {"rows": 4}, 11_010_048)),
    "skinny_gemv.tiled_push": (
        ((bf16(112, H), bf16(448, H)), {"rows": 1, "sent_bytes_per_row": 2240}, 1_605_632 + 6_422_528),
        ((bf16(56, H), bf16(224, H)), {"rows": 4, "sent_bytes_per_row": 1120}, 802_816 + 3_211_264),
    ),
    "router_topk.select": (
        ((), {"rows": 1, "experts": 896, "latent": L}, 0),
        ((), {"rows": 4, "experts": 896, "latent": L}, 0),
    ),
    "unfused.advance": (((), {"rows": 1}, 0), ((), {"rows": 4}, 0)),
    "unfused.argmax": (((), {"rows": 1, "width": 163_840}, 0), ((), {"rows": 4, "width": 163_840}, 0)),
    "unfused.copy": (((), {"rows": 1, "width": H}, 0), ((), {"rows": 4, "width": H}, 0)),
    "unfused.gather": (
        ((), {"rows": 1, "width": 163_840, "ranks": 8}, 0),
        ((), {"rows": 4, "width": 163_840, "ranks": 16}, 0),
    ),
    "attn_res.consume": (
        ((), {**MIX, "rows": 1, "slots": 8}, 43_008),
        ((), {**MIX, "rows": 4, "slots": 1}, 43_008),
    ),
    "expert_gemv.gemm1": (
        ((W13_8,), {**EXPERTS1, "width": 384}, 23_396_352),
        ((W13_16,), {**EXPERTS1, "width": 192}, 11_698_176),
    ),
    "expert_gemv.gemm2": (
        ((W2_8,), {**EXPERTS1, "latent": L}, 11_698_176),
        ((W2_16,), {**EXPERTS1, "latent": L}, 5_849_088),
    ),
    "expert_gemv.block": (
        ((W13_8, W2_8), {**EXPERTS1, "width": 384, "experts": 896, "latent": L}, 35_094_528),
        (
            (mxfp4(384, L, 120), mxfp4(L, 192, 120)),
            {**EXPERTS8, "width": 192, "experts": 896, "latent": L},
            87_736_320 + 43_868_160,
        ),
    ),
    "expert_gemv.route": (
        ((), {"rows": 2, "experts": 896, "latent": L}, 0),
        ((), {"rows": 8, "experts": 896, "latent": L}, 0),
    ),
    "expert_gemv.task1": (
        ((W13_8,), {**EXPERTS1, "width": 384, "experts": 896, "latent": L}, 23_396_352),
        ((W13_16,), {**EXPERTS1, "width": 192, "experts": 896, "latent": L}, 11_698_176),
    ),
    "expert_gemv.task2": (
        ((W2_8,), {**EXPERTS1, "latent": L}, 11_698_176),
        ((W2_16,), {**EXPERTS1, "latent": L}, 5_849_088),
    ),
    # state and conv state both ways, conv weights once
    "kda_decode.per_head": (
        ((), KDA8, 2 * 786_432 + 2 * 27_648 + 73_728),
        ((), KDA16, 2 * 1_572_864 + 2 * 55_296 + 36_864),
    ),
    "kda_decode.cluster": KDA_CLUSTER,
    "kda_decode.public_cluster": KDA_CLUSTER,
    "l2_prefetch.bulk": (
        ((O_PROJ8,), {"budget_bytes": 16 << 20}, 16_777_216),
        ((O_PROJ16, UP8, UP16), {"budget_bytes": 16 << 20}, 16_777_216),  # the second is cut, the third left out
    ),
    "latent_tail.reduce_pull": (
        ((), {**TAIL, "rows": 1, "ranks": 8, "expert_rows": 16}, 0),
        ((), {**TAIL, "rows": 4, "ranks": 16, "expert_rows": 16}, 0),
    ),
    "latent_tail.reduce_push": (
        ((), {**TAIL, "rows": 1, "ranks": 8, "expert_rows": 16}, 0),
        ((), {**TAIL, "rows": 4, "ranks": 16, "expert_rows": 16}, 0),
    ),
    "latent_tail.send_shared": (
        ((), {"rows": 1, "hidden": H, "ranks": 8}, 0),
        ((), {"rows": 4, "hidden": H, "ranks": 16}, 0),
    ),
    "latent_tail.send": (
        ((), {**TAIL, "rows": 1, "ranks": 8, "expert_rows": 16}, 0),
        ((), {**TAIL, "rows": 4, "ranks": 16, "expert_rows": 16}, 0),
    ),
    "latent_tail.up": (((UP8,), {"rows": 1}, 6_422_528), ((UP16,), {"rows": 4}, 3_211_264)),
    "latent_tail.up_ring": (((UP8,), {"rows": 1}, 6_422_528), ((UP16,), {"rows": 4}, 3_211_264)),
    "latent_tail.up_after_sum": (
        ((UP8,), {**TAIL, "rows": 1, "ranks": 8}, 6_422_528),
        ((UP16,), {**TAIL, "rows": 4, "ranks": 16}, 3_211_264),
    ),
    "lm_head.logits": (
        ((bf16(20_480, H),), {"rows": 1}, 293_601_280),
        ((bf16(10_240, H),), {"rows": 4}, 146_800_640),
    ),
    "lm_head.top_k": (
        ((bf16(20_480, H),), {"rows": 1}, 293_601_280),
        ((bf16(10_240, H),), {"rows": 4}, 146_800_640),
    ),
    "mla_decode.split_kv": (((), ATTENTION8, 4_718_592), ((), ATTENTION16, 603_979_776)),
    "mla_decode.partial": (
        ((), {**ATTENTION8, "heads": 96, "context": 1024, "context_ranks": 8}, 589_824),
        ((), {**ATTENTION16, "heads": 24, "context": 32_768, "context_ranks": 4}, 150_994_944),
    ),
    "mla_decode.fused": (
        ((bf16(12 * 128, 512),), ATTENTION8, 4_718_592 + 1_572_864),
        ((bf16(6 * 128, 512),), ATTENTION16, 603_979_776 + 786_432),
    ),
    "mla_decode.lift_gate": (
        ((bf16(12 * 128, 512),), {"rows": 1, "kv_lora_rank": 512}, 1_572_864),
        ((bf16(6 * 128, 512),), {"rows": 4, "kv_lora_rank": 512}, 786_432),
    ),
    "mla_decode.lse_merge": (
        ((), {"rows": 1, "heads": 12, "ranks": 8, "kv_lora_rank": 512}, 0),
        ((), {"rows": 4, "heads": 6, "ranks": 4, "kv_lora_rank": 512}, 0),
    ),
    "mla_prep.fused": MLA_PREP,
    "mla_prep.public_fused": MLA_PREP,
    "proj_allreduce.produce": (((O_PROJ8,), {"rows": 1}, 22_020_096), ((O_PROJ16,), {"rows": 4}, 11_010_048)),
    "router_topk.gather_select": (
        ((), {"rows": 1, "experts": 896, "latent": L}, 0),
        ((), {"rows": 4, "experts": 896, "latent": L}, 0),
    ),
    "skinny_gemv.column_pair": (((IN_PROJ8,), {"rows": 1}, 90_144_768), ((IN_PROJ16,), {"rows": 4}, 46_104_576)),
    "skinny_gemv.ring": (
        ((IN_PROJ8,), {"rows": 1}, 90_144_768),
        ((bf16(2112, H), bf16(768, H)), {"rows": 64}, 30_277_632 + 11_010_048),
    ),
    "skinny_gemv.ring_push": (
        ((bf16(112, H), bf16(448, H)), {"rows": 1, "sent_bytes_per_row": 1344}, 1_605_632 + 6_422_528),
        ((bf16(56, H), bf16(224, H)), {"rows": 4, "sent_bytes_per_row": 672}, 802_816 + 3_211_264),
    ),
    "skinny_gemv.resident": (((IN_PROJ8,), {"rows": 1}, 90_144_768), ((IN_PROJ16,), {"rows": 64}, 46_104_576)),
    "skinny_gemv.resident_after_combine": (
        ((IN_PROJ8,), {**MIX, "rows": 1}, 90_144_768),
        ((IN_PROJ16,), {**MIX, "rows": 64}, 46_104_576),
    ),
    "unfused.all_reduce": (
        ((), {"rows": 1, "hidden": H, "ranks": 8}, 0),
        ((), {"rows": 4, "hidden": H, "ranks": 16}, 0),
    ),
    "unfused.library_all_reduce": (
        ((), {"rows": 1, "hidden": H, "ranks": 8, "form": 0}, 0),
        ((), {"rows": 128, "hidden": H, "ranks": 8, "form": 1}, 0),
    ),
    "unfused.all_reduce_norm": (
        ((), {"rows": 1, "hidden": H, "ranks": 8, "form": 0}, 0),
        ((), {"rows": 128, "hidden": H, "ranks": 8, "form": 1}, 0),
    ),
    "grouped_experts.trtllm_fp8": grouped(8),
    "grouped_experts.trtllm_fp4": grouped(4.5),
    "grouped_experts.trtllm_int4": grouped(4.5),
    "grouped_experts.trtllm_bf16": grouped(16),
    "grouped_experts.triton_fp8": grouped(8),
    "grouped_experts.triton_bf16": grouped(16),
    "grouped_experts.marlin": grouped(4.5),
    "grouped_experts.activate": (
        ((), {"rows": 1, "top_k": 8, "width": 256}, 0), ((), {"rows": 16, "top_k": 8, "width": 256}, 0),
    ),
    "grouped_experts.activate_and_quantise": (
        ((), {"rows": 1, "top_k": 8, "width": 256}, 0), ((), {"rows": 16, "top_k": 8, "width": 256}, 0),
    ),
    "grouped_experts.quantise": (
        ((), {"rows": 1, "top_k": 8, "width": 256}, 0), ((), {"rows": 16, "top_k": 8, "width": 256}, 0),
    ),
    "grouped_experts.finalize": (
        ((), {"rows": 1, "top_k": 8, "hidden": H}, 0), ((), {"rows": 16, "top_k": 8, "hidden": H}, 0),
    ),
    "grouped_experts.align": (
        ((), {"rows": 1, "top_k": 8, "experts": 256}, 0), ((), {"rows": 16, "top_k": 8, "experts": 384}, 0),
    ),
    "grouped_experts.place": (((), {"rows": 1, "top_k": 8}, 0), ((), {"rows": 16, "top_k": 8}, 0)),
    "grouped_experts.select": (
        ((), {"rows": 1, "experts": 256, "top_k": 8, "groups": 4}, 0),
        ((), {"rows": 16, "experts": 384, "top_k": 8, "groups": 1}, 0),
    ),
    "grouped_experts.route": (
        ((), {"rows": 1, "experts": 256, "top_k": 8, "groups": 4}, 0),
        ((), {"rows": 16, "experts": 384, "top_k": 8, "groups": 1}, 0),
    ),
    "expert_exchange.all_gather": (
        ((), {"rows": 1, "row_bytes": 2 * H, "ranks": 2}, 0), ((), {"rows": 16, "row_bytes": 2 * H, "ranks": 16}, 0),
    ),
    "expert_exchange.reduce_scatter": (
        ((), {"rows": 1, "row_bytes": 2 * H, "ranks": 2, "summed_rows": 2}, 0),
        ((), {"rows": 16, "row_bytes": 2 * H, "ranks": 16, "summed_rows": 256}, 0),
    ),
    # What arrives is stored to where all tokens of an expert lie: FP8, and 4 bytes for each 128 values.
    "expert_exchange.dispatch": (
        ((), {"rows": 1, "received_rows": 1, "top_k": 8, "depth": H, "ranks": 8}, 8 * (H + 56 * 4)),
        ((), {"rows": 4, "received_rows": 6, "top_k": 16, "depth": L, "ranks": 16}, 96 * (L + 28 * 4)),
    ),
    "expert_exchange.combine": (
        ((), {"rows": 1, "received_rows": 1, "top_k": 8, "depth": H, "ranks": 8}, 0),
        ((), {"rows": 4, "received_rows": 6, "top_k": 16, "depth": L, "ranks": 16}, 0),
    ),
    "expert_exchange.hand_over": (
        ((), {"rows": 1, "row_bytes": 2 * H, "sources": 1}, 0), ((), {"rows": 16, "row_bytes": 2 * H, "sources": 9}, 0),
    ),
    "gqa_decode.head_norm": (
        ((), {"rows": 1, "heads": 8, "head_dim": 128}, 0), ((), {"rows": 16, "heads": 1, "head_dim": 128}, 0),
    ),
    "gqa_decode.rope": (
        ((), {"rows": 1, "heads": 8, "key_heads": 1, "head_dim": 128}, 0),
        ((), {"rows": 16, "heads": 64, "key_heads": 8, "head_dim": 128}, 0),
    ),
    # A key and a value of 128 for each key head of the rank: fp8, then bf16.
    "gqa_decode.cache_write": (
        ((), {"rows": 1, "row_bytes": 2 * 1 * 128}, 256), ((), {"rows": 16, "row_bytes": 2 * 8 * 128 * 2}, 65_536),
    ),
    "gqa_decode.split_kv": (
        ((), {"rows": 1, "heads": 8, "key_heads": 1, "head_dim": 128, "context": 8192, "row_bytes": 256}, 2_097_152),
        ((), {"rows": 4, "heads": 64, "key_heads": 8, "head_dim": 128, "context": 1000, "row_bytes": 4096}, 16_384_000),
    ),
    "indexer.key_and_query": (
        ((), {"rows": 1, "heads": 64, "head_dim": 128, "index_row_bytes": 132}, 132),
        ((), {"rows": 4, "heads": 32, "head_dim": 128, "index_row_bytes": 132}, 528),
    ),
    "indexer.scores": (
        ((), {"rows": 1, "heads": 64, "head_dim": 128, "cached": 8192, "index_row_bytes": 132}, 1_081_344),
        ((), {"rows": 4, "heads": 32, "head_dim": 128, "cached": 262_144, "index_row_bytes": 132}, 138_412_032),
    ),
    "indexer.top_k": (((), {"rows": 1, "cached": 8192}, 0), ((), {"rows": 4, "cached": 262_144}, 0)),
    "quantised_gemm.fp8_block": (
        ((stored(2112, H, 8),), {"rows": 1}, 15_138_816), ((stored(3072, 1536, 8),), {"rows": 64}, 4_718_592),
    ),
    "quantised_gemm.nvfp4": (
        ((stored(H, 2048, 4.5),), {"rows": 1}, 8_257_536), ((stored(512, H, 4.5),), {"rows": 64}, 2_064_384),
    ),
    "quantised_gemm.mxfp8": (
        ((stored(6144, 1536, 8.25),), {"rows": 1}, 9_732_096), ((stored(512, H, 8.25),), {"rows": 64}, 3_784_704),
    ),
    "quantised_gemm.quantise": (((), {"rows": 1, "width": H}, 0), ((), {"rows": 16, "width": 1536}, 0)),
    "unfused.batched_gemm": (
        ((bf16(12 * 512, 128),), {"rows": 1}, 1_572_864),
        ((bf16(6 * 128, 512),), {"rows": 4}, 786_432),
    ),
    "unfused.conv_update": (
        ((), {"rows": 1, "conv_state_bytes": 27_648, "conv_weight_bytes": 73_728}, 2 * 27_648 + 73_728),
        ((), {"rows": 4, "conv_state_bytes": 13_824, "conv_weight_bytes": 36_864}, 8 * 13_824 + 36_864),
    ),
    "unfused.elementwise": (((), {"rows": 1, "width": 768}, 0), ((), {"rows": 4, "width": 384}, 0)),
    "unfused.embedding": (((), {"rows": 1, "hidden": H}, 14_336), ((), {"rows": 4, "hidden": H}, 57_344)),
    "unfused.gated_norm": (
        ((), {"rows": 1, "heads": 12, "head_dim": 128}, 0),
        ((), {"rows": 4, "heads": 6, "head_dim": 128}, 0),
    ),
    "unfused.norm": (((), {"rows": 1, "width": H}, 14_336), ((), {"rows": 4, "width": 2048}, 4096)),
    "unfused.pack": (((), {"rows": 1}, 0), ((), {"rows": 64}, 0)),
    "unfused.permutation": (((), {"rows": 1, "experts": 896}, 0), ((), {"rows": 64, "experts": 896}, 0)),
    "unfused.poll": (((), {"rows": 1, "width": H}, 0), ((), {"rows": 4, "width": 163_840}, 0)),
    "unfused.quantise": (((), {"rows": 1, "width": L}, 0), ((), {"rows": 4, "width": L}, 0)),
    "unfused.query_and_cache": (
        ((), {"rows": 1, "heads": 12, "kv_row_bytes": 576}, 576),
        ((), {"rows": 4, "heads": 6, "kv_row_bytes": 1152}, 4608),
    ),
    "unfused.query_gather": (
        ((), {"rows": 1, "heads": 12, "kv_row_bytes": 576}, 0),
        ((), {"rows": 4, "heads": 6, "kv_row_bytes": 1152}, 0),
    ),
    "unfused.recurrent_update": (
        ((), {"rows": 1, "heads": 12, "state_bytes": 786_432}, 1_572_864),
        ((), {"rows": 4, "heads": 6, "state_bytes": 393_216}, 3_145_728),
    ),
    "unfused.routing": (((), {"rows": 1, "experts": 896}, 0), ((), {"rows": 4, "experts": 896}, 0)),
    "unfused.conv_update_verified": (
        ((), {"users": 1, "positions": 8, "conv_state_bytes": 27_648, "conv_weight_bytes": 36_864}, 285_696),
        ((), {"users": 4, "positions": 2, "conv_state_bytes": 13_824, "conv_weight_bytes": 36_864}, 202_752),
    ),
    "unfused.recurrent_update_verified": (
        ((), {"users": 1, "positions": 8, "heads": 12, "state_bytes": 786_432}, 9 * 786_432),
        ((), {"users": 4, "positions": 2, "heads": 6, "state_bytes": 393_216}, 12 * 393_216),
    ),
    "unfused.sample": (((), {"rows": 1, "ranks": 8}, 0), ((), {"rows": 4, "ranks": 16}, 0)),
}


@pytest.mark.parametrize("operator", sorted(CASES))
def test_bytes_counted_by_hand(operator: str) -> None:
    for weights, shape, expected in CASES[operator]:
        assert work_of(operator, weights, shape).moved_bytes() == expected


def test_one_shot_runs_a_cluster_a_row() -> None:
    blocks = [
        work_of("unfused.library_all_reduce", (), {"rows": rows, "hidden": H, "ranks": 8, "form": 0}).num_blocks
        for rows in (1, 4, 16, 36)
    ]
    assert blocks == [8, 32, 128, 128]


def test_every_operator_is_counted() -> None:
    assert set(CASES) == set(all_costs())
    assert all(len(cases) == 2 for cases in CASES.values())


def test_shapes_used_here_are_the_models() -> None:
    for tp, weights in ((8, (IN_PROJ8, O_PROJ8, UP8)), (16, (IN_PROJ16, O_PROJ16, UP16))):
        matrices = rank_matrices(K3, Layout(tp=tp))
        for name, one in zip(("kda.in_proj", "kda.o_proj", "moe.latent_up_shard"), weights, strict=True):
            assert (matrices[name].num_outputs, matrices[name].depth, matrices[name].num_bytes) == (
                one.num_outputs, one.depth, one.num_bytes,
            )  # fmt: skip
        assert matrices["moe.expert_w13"].num_bytes * 16 == (W13_8 if tp == 8 else W13_16).num_bytes
        assert matrices["moe.expert_w2"].num_bytes * 16 == (W2_8 if tp == 8 else W2_16).num_bytes


DISPATCHED = {"rows": 4, "top_k": 16, "depth": L, "ranks": 16}

# -- what is sent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "weights", "shape", "expected"),
    [
        ("unfused.all_reduce", (), {"rows": 4, "hidden": H, "ranks": 8}, 4 * 14_336),
        ("unfused.library_all_reduce", (), {"rows": 128, "hidden": H, "ranks": 8, "form": 1}, 128 * 14_336),
        ("unfused.embedding", (), {"rows": 1, "hidden": H}, 14_336),
        ("proj_allreduce.produce", (O_PROJ8,), {"rows": 4}, 4 * 14_336),
        ("proj_allreduce.produce_whole", (O_PROJ16,), {"rows": 4}, 4 * 14_336),
        ("latent_tail.up_cluster", (UP16,), {**TAIL, "rows": 1, "ranks": 16}, 896),
        ("skinny_gemv.tiled_push", (bf16(280, H),), {"rows": 4, "sent_bytes_per_row": 1120}, 4480),
        # A latent partial row to everybody, and to each owner its slice of the shared expert's row.
        ("latent_tail.reduce_push", (), {**TAIL, "rows": 1, "ranks": 8, "expert_rows": 16}, 7168 + 1792),
        ("latent_tail.reduce_pull", (), {**TAIL, "rows": 1, "ranks": 16, "expert_rows": 16}, 7168 + 896),
        ("latent_tail.send_shared", (), {"rows": 4, "hidden": H, "ranks": 16}, 4 * 896),
        ("expert_gemv.persistent_push", (W13_16, W2_16), {**EXPERTS1, "width": 192, "latent": L}, 7168),
        ("latent_tail.send", (), {**TAIL, "rows": 4, "ranks": 16, "expert_rows": 16}, 4 * (7168 + 896)),
        ("latent_tail.up", (UP8,), {"rows": 1}, 1792),
        ("latent_tail.up_ring", (UP16,), {"rows": 4}, 4 * 896),
        ("latent_tail.up_after_sum", (UP16,), {**TAIL, "rows": 1, "ranks": 16}, 896),
        ("lm_head.logits", (bf16(20_480, H),), {"rows": 1}, 40_960),
        ("lm_head.top_k", (bf16(20_480, H),), {"rows": 1}, 512),
        ("skinny_gemv.ring_push", (bf16(112, H),), {"rows": 4, "sent_bytes_per_row": 1344}, 5376),
        ("unfused.query_gather", (), {"rows": 1, "heads": 12, "kv_row_bytes": 576}, 6912),
        # All tokens that arrive come from each of 16 ranks alike: FP8 with scales there, bf16 back.
        ("expert_exchange.dispatch", (), {**DISPATCHED, "received_rows": 6}, 6 * 16 * (L + 28 * 4) // 16),
        ("expert_exchange.combine", (), {**DISPATCHED, "received_rows": 6}, 6 * 16 * 2 * L // 16),
        ("expert_exchange.all_gather", (), {"rows": 4, "row_bytes": 2 * H, "ranks": 8}, 4 * 14_336),
        ("expert_exchange.hand_over", (), {"rows": 4, "row_bytes": 2 * H, "sources": 9}, 9 * 4 * 14_336),
        # own heads of 512 values in bf16 and one log-sum-exp in fp32
        ("mla_decode.partial", (), {**ATTENTION8, "heads": 96, "context": 1024, "context_ranks": 8}, 12 * 1028),
    ],
)
def test_bytes_that_each_peer_receives(
    operator: str, weights: tuple[Weight, ...], shape: Mapping[str, int], expected: int
) -> None:
    assert work_of(operator, weights, shape).sent_bytes_per_peer == expected


def test_sharded_routers_send_fp32_logits_and_bf16_latents() -> None:
    program = build_program(K3, Layout(tp=8), Workload(), find_path("fused"), only_layers=(1,))
    (front,) = (call for call in program.calls if call.stage == "moe.front")
    assert work_of(front.operator, front.weights, front.shape).sent_bytes_per_peer == 112 * 4 + 448 * 2


# -- what any work keeps --------------------------------------------------------------------------------------------


def every_work() -> list[tuple[str, Work]]:
    found = [
        (operator, work_of(operator, weights, shape))
        for operator, cases in CASES.items()
        for weights, shape, _ in cases
    ]
    program = build_program(
        K3, Layout(), Workload(concurrency=16), find_path("fused", kernel_set="own"), only_layers=(0, 1, 2, 3)
    )
    found += [(call.operator, work_of(call.operator, call.weights, call.shape)) for call in program.calls]
    for name in ("stock", "fused", "megakernel"):
        for layout, workload in (
            (Layout(tp=1), Workload(concurrency=64, context=131_072)),
            (Layout(tp=32, ep=32), Workload(concurrency=256)),
            (Layout(tp=8, dcp=8), Workload(context=1)),
        ):
            program = build_program(K3, layout, workload, find_path(name), only_layers=(0, 1, 2, 3))
            found += [
                (call.operator, work_of(call.operator, call.weights, call.shape))
                for call in program.calls
                if call.operator != "host"
            ]
    return found


def test_gathered_consumers_run_emptying_blocks_beside_polling_ones() -> None:
    one, four = (proj_allreduce.consume_gathered((), rows=rows, hidden=H) for rows in (1, 4))
    assert (one.num_blocks, four.num_blocks) == (16, 64)
    # An eighth of the gathered row; residual and the prepared part were loaded before the polling.
    assert one.passes[0].activation_bytes_per_block == 14_336 // 8
    assert [read.num_bytes for part in one.passes for read in part.reads] == [43_008]
    assert [part.num_barriers for part in one.passes] == [1]


def test_selection_runs_beside_two_collecting_blocks() -> None:
    work = router_topk.gather_topk((), rows=2, latent=L)
    assert work.num_blocks == 6
    assert work.passes[0].activation_bytes_per_block == 7168  # half of 3584 fp32 values


def test_gemv_counts_are_of_its_measured_tiling() -> None:
    one = skinny_gemv.tiled((IN_PROJ16,), rows=1)
    assert (one.num_blocks, one.threads_per_block) == (132, 448)
    assert one.bytes_in_flight_per_block == 5 * 2 * 14_336  # five stages of two rows
    eight = skinny_gemv.tiled((IN_PROJ16,), rows=8)
    assert (eight.num_blocks, eight.threads_per_block) == (101, 256)
    # Ten stages of four 16-byte slots of weights a thread; a fifth holds x.
    assert eight.bytes_in_flight_per_block == 10 * 4 * 16 * 256
    paired = skinny_gemv.tiled_situ((bf16(768, H),), rows=1)
    assert paired.passes[0].reads[0].num_bytes == 11_010_048 and paired.num_blocks == 132


def test_experts_go_row_by_row_through_both_products() -> None:
    two = expert_gemv.persistent(
        (mxfp4(384, L, 31), mxfp4(L, 192, 31)), rows=2, top_k=16, distinct_milli=31_000, width=192
    )
    assert [one.reads[0].num_bytes for one in two.passes] == [11_698_176] * 2 + [5_849_088] * 2
    assert [one.reads[0].early for one in two.passes] == [False, True, True, True]  # one stream behind the ids
    assert [one.num_blocks for one in two.passes] == [128, 128, 112, 112]


def test_attention_clusters_follow_the_pages() -> None:
    short, long = (
        mla_decode.clusters((), rows=1, heads=6, context=context, kv_row_bytes=576, kv_lora_rank=512)
        for context in (8192, 131_072)
    )
    assert (short.num_blocks, long.num_blocks) == (64, 120)
    assert short.passes[0].num_tile_epilogues * 9 == long.passes[0].num_tile_epilogues  # 2 and 18 pages a block
    assert (short.max_blocks_per_sm, short.threads_per_block) == (1, 384)


def test_cublas_adds_split_products_in_another_launch() -> None:
    deep, flat = (cublas.gemm((one,), rows=1) for one in (bf16(2112, H), O_PROJ16))
    assert [one.barrier for one in deep.passes] == [Barrier.LAUNCH, Barrier.NONE]
    assert [one.barrier for one in flat.passes] == [Barrier.NONE]


def test_two_expert_launches_read_as_much_as_one() -> None:
    first = expert_gemv.gate_up((W13_16,), **EXPERTS1)
    second = expert_gemv.down((W2_16,), **EXPERTS1)
    assert (first.num_blocks, second.num_blocks) == (128, 112)
    read = [one.num_bytes for work in (first, second) for part in work.passes for one in part.reads]
    assert read == [11_698_176, 5_849_088]
    assert not any(one.early for work in (first, second) for part in work.passes for one in part.reads)


def test_counts_are_such_as_a_gpu_can_run() -> None:
    for operator, work in every_work():
        assert work.num_blocks >= 1, operator
        assert work.threads_per_block % 32 == 0 and 32 <= work.threads_per_block <= 1024, operator
        assert 0 <= work.smem_bytes_per_block <= 227 * 1024, operator
        assert work.bytes_in_flight_per_block > 0 and work.max_blocks_per_sm >= 1, operator
        known = (work.registers_per_thread, work.registers_per_thread)
        low, high = known if work.unpublished is None else work.unpublished.registers
        assert 8 <= low <= work.registers_per_thread <= high <= 255, operator
        warps_of_a_partition = -(-work.threads_per_block // 128)
        assert high * 32 * warps_of_a_partition <= 65_536 // 4 and work.registers_per_thread % 8 == 0, operator
        for one in work.passes:
            assert 0 <= one.num_blocks <= work.num_blocks, operator
            assert (one.num_barriers > 0) == (one.barrier is not Barrier.NONE), operator
            assert one.flops >= 0 and one.written_bytes >= 0, operator
            assert one.decoded_weights == 0 or one.unit is Unit.FP4, operator
            assert all(read.num_bytes >= 0 for read in one.reads), operator


def test_only_state_and_cache_count_as_such() -> None:
    for operator, work in every_work():
        kinds = {read.kind for one in work.passes for read in one.reads}
        folder = operator.split(".")[0]
        has_state = folder in ("kda_decode", "mla_decode", "gqa_decode", "attn_res", "indexer") or "update" in operator
        assert ReadKind.KV_STATE not in kinds or has_state, operator


def test_more_rows_never_cost_less() -> None:
    for name in ("stock", "fused", "megakernel"):
        before: dict[str, tuple[int, float]] = {}
        for concurrency in (1, 2, 4, 8, 16, 64):
            totals: dict[str, tuple[int, float]] = {}
            program = build_program(
                K3, Layout(), Workload(concurrency=concurrency), find_path(name), only_layers=(0, 1, 3)
            )
            for call in program.calls:
                if call.operator != "host":
                    work = work_of(call.operator, call.weights, call.shape)
                    group = call.stage.split(".")[0]
                    moved, sent = totals.get(group, (0, 0))
                    totals[group] = (moved + work.moved_bytes(), sent + work.sent_bytes_per_peer)
            for group, (moved, sent) in before.items():
                assert totals[group][0] >= moved and totals[group][1] >= sent, (name, group, concurrency)
            before = totals


def test_no_name_is_in_cost_and_in_public() -> None:
    for folder in operators_with("public"):
        own, public = (part_of(folder, part) for part in COST_MODULES)
        if own is not None:
            assert cost_functions(own).keys().isdisjoint(cost_functions(public)), folder


def test_an_unknown_operator_is_a_programmers_mistake() -> None:
    with pytest.raises(AssertionError, match="no cost function named nothing"):
        work_of("nothing", (), {})
