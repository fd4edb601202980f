"""Costs of public engines' products with quantised weights, and of the kernels that quantise their input.

| Form | Weights | Kernel | Tile |
| --- | --- | --- | --- |
| ``fp8_block`` | e4m3, a scale per 128 x 128 | DeepGEMM (vLLM, SGLang, TRT-LLM) | 64 rows, 128 deep |
| ``mxfp8`` | e4m3, a scale per 32 | CuTe DSL with split K (FlashInfer, 2026-09) | 128 outputs, 128 deep |
| ``nvfp4`` | e2m1, a scale per 16 | CuTe DSL and trtllm-gen (FlashInfer, 2026-08) | 128 outputs, 256 deep |

Blocks, bytes and flops are counted from those tiles. What no source says is inferred from public tables of the kernels
alone (AIConfigurator 2026-08, 512 to 7,168 outputs by 256 to 7,168 deep, H200, B200 and B300; FlashInfer's of MXFP8):
how long a scale block of ``fp8_block`` takes beside its four MMAs, and how many fills a block-scaled product has. The
tables of ``fp8_block`` time a linear layer: quantisation of the input and product.

No unit of the model has the rate of FP8. Tensor cores run it at twice that of bf16 (datasheets of H200, B200 and B300),
so that an FP8 product counts half its flops at that of bf16.
"""

from __future__ import annotations

from collections.abc import Sequence

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Barrier, Pass, Read, Unit, Work
from k3sim.model.program import Weight

FP8_FLOPS = 1.0  # of a multiply and add at the rate of bf16: half of two
KIB = 1024

# DeepGEMM (deepseek-ai/DeepGEMM, jit_kernels/heuristics): a block an SM, tiles of 64 rows by a multiple of 8 outputs
# that leaves one wave, up to 128, a ring of up to eight stages of 128 deep. No split over K.
DEEP_ROWS, DEEP_UNIT, DEEP_BLOCKS = 64, 8, 132
DEEP_LEAST_OUTPUTS, DEEP_MOST_OUTPUTS = 16, 128
DEEP_STAGES, DEEP_STAGE_DEPTH = 8, 128
# Of a scale block: four MMAs of 32 deep, and until their sums are added to the fp32 ones with their scales (the wait
# for the last MMA, two scales, a multiply and add each) as long again: 11.9 us for 512 x 7168 and 4.9 for 7168 x 256
# on H200, 10.4 and 5.9 on B200 (tables above).
DEEP_MMAS_OF_A_BLOCK = 8

FP4_OUTPUTS, FP4_STAGE_DEPTH, FP4_STAGES = 128, 256, 8
# In series before the first product: scales through tensor memory, and the pipeline's fill (4.6 us for 7168 x 256 on
# B200, 3.9 on B300). MXFP8 has a scale for 32 weights where NVFP4 has two, and its table shows the fill alone (3.2 us
# for 6144 x 768, FlashInfer's timing of the kernel without its launch).
NVFP4_SETUPS, MXFP8_SETUPS = 2, 1
MXFP8_OUTPUTS, MXFP8_STAGE_DEPTH, MXFP8_STAGES = 128, 128, 8
MXFP8_TARGET_BLOCKS, MXFP8_LEAST_DEPTH = 148, 1024


def _read(weights: Sequence[Weight]) -> tuple[Read, ...]:
    return tuple(Read(region=one.region, num_bytes=one.num_bytes) for one in weights)


def deep_outputs(num_outputs: int) -> int:
    """Outputs of a tile of DeepGEMM: the fewest that leave one wave, or its largest in several."""
    each = -(-num_outputs // DEEP_BLOCKS)
    return min(DEEP_MOST_OUTPUTS, max(DEEP_LEAST_OUTPUTS, -(-each // DEEP_UNIT) * DEEP_UNIT))


def fp8_block(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in FP8 with scales per block, outputs in bf16; the input is quantised before."""
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    tile = deep_outputs(num_outputs)
    row_tiles = -(-rows // DEEP_ROWS)
    slot_bytes = tile * DEEP_STAGE_DEPTH
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=min(rows, DEEP_ROWS) * DEEP_STAGE_DEPTH,
        streamed_activation_bytes_per_block=min(rows, DEEP_ROWS) * max(0, depth - DEEP_STAGE_DEPTH),
        reads=_read(weights),
        flops=FP8_FLOPS * DEEP_ROWS * row_tiles * num_outputs * depth,
        unit=Unit.BF16,
        num_tensor_core_setups=1,
        num_dependent_mmas=-(-depth // DEEP_STAGE_DEPTH) * DEEP_MMAS_OF_A_BLOCK,
        num_block_reductions=1,  # outputs through shared memory
    )
    stages = min(DEEP_STAGES, -(-depth // DEEP_STAGE_DEPTH))
    block = PUBLIC["deep_gemm"]
    return Work(
        num_blocks=-(-num_outputs // tile) * row_tiles,
        threads_per_block=block.threads,
        smem_bytes_per_block=DEEP_STAGES * (slot_bytes + DEEP_ROWS * DEEP_STAGE_DEPTH) + 16 * KIB,
        bytes_in_flight_per_block=stages * slot_bytes,
        max_blocks_per_sm=1,
        registers_per_thread=block.registers,
        carve_out_percent=None,
        unpublished=block.unpublished,
        passes=(multiply,),
    )


def nvfp4(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in NVFP4, outputs in bf16; the input is quantised before."""
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    slot_bytes = FP4_OUTPUTS * FP4_STAGE_DEPTH * 9 // 16  # codes, and a scale for each 16
    stages = min(FP4_STAGES, -(-depth // FP4_STAGE_DEPTH))
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * FP4_STAGE_DEPTH * 9 // 16,
        streamed_activation_bytes_per_block=rows * max(0, depth - FP4_STAGE_DEPTH) * 9 // 16,
        reads=_read(weights),
        flops=2.0 * max(16, rows) * num_outputs * depth,
        unit=Unit.FP4,
        decoded_weights=num_outputs * depth,
        num_tensor_core_setups=NVFP4_SETUPS,
        num_block_reductions=2,
    )
    block = PUBLIC["block_scaled_gemm"]
    return Work(
        num_blocks=-(-num_outputs // FP4_OUTPUTS),
        threads_per_block=block.threads,
        smem_bytes_per_block=block.smem_bytes,
        bytes_in_flight_per_block=stages * slot_bytes,
        max_blocks_per_sm=1,
        registers_per_thread=block.registers,
        carve_out_percent=None,
        unpublished=block.unpublished,
        passes=(multiply,),
    )


def mxfp8(weights: Sequence[Weight], *, rows: int) -> Work:
    """``[rows, K] x [N, K]`` in MXFP8, split over K within a cluster until the SMs are occupied."""
    num_outputs, depth = sum(one.num_outputs for one in weights), weights[0].depth
    tiles = -(-num_outputs // MXFP8_OUTPUTS)
    split = max(1, min(MXFP8_TARGET_BLOCKS // tiles, depth // MXFP8_LEAST_DEPTH))
    slot_bytes = MXFP8_OUTPUTS * MXFP8_STAGE_DEPTH * 33 // 32  # codes, and a scale for each 32
    part = depth // split
    stages = min(MXFP8_STAGES, -(-part // MXFP8_STAGE_DEPTH))
    multiply = Pass(
        num_dependent_loads=1,
        activation_bytes_per_block=rows * MXFP8_STAGE_DEPTH,
        streamed_activation_bytes_per_block=rows * max(0, part - MXFP8_STAGE_DEPTH),
        reads=_read(weights),
        flops=FP8_FLOPS * max(16, rows) * num_outputs * depth,
        unit=Unit.BF16,
        num_tensor_core_setups=MXFP8_SETUPS,
        num_block_reductions=2,
        # A cluster barrier before and after the parts of a tile are added up.
        barrier=Barrier.CLUSTER if split > 1 else Barrier.NONE,
        num_barriers=2 if split > 1 else 0,
    )
    block = PUBLIC["block_scaled_gemm"]
    return Work(
        num_blocks=tiles * split,
        threads_per_block=block.threads,
        smem_bytes_per_block=block.smem_bytes,
        bytes_in_flight_per_block=stages * slot_bytes,
        max_blocks_per_sm=1,
        registers_per_thread=block.registers,
        carve_out_percent=None,
        unpublished=block.unpublished,
        passes=(multiply,),
    )


def quantise(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """``[rows, width]`` in bf16 to FP8 or FP4 with a scale per group: a maximum over each, within a warp."""
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=-(-rows * width // 2048),
        activation_bytes_per_block=2048 * BF16_BYTES,
        reductions=1,
    )
