"""Costs of the stock path's separate kernels.

All are small: their time is the boundary, one or two dependent loads and a reduction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from k3sim.kernels.footprints import built_code, footprint
from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.work import Block, MachineCode, Pass, Read, ReadKind, Work, block_work
from k3sim.model.program import Weight

BF16_BYTES = 2
ALL_REDUCE_ROW_BLOCKS, MOST_ALL_REDUCE_BLOCKS = 8, 32


def small(
    *,
    num_blocks: int,
    block: Block,
    addresses: int = 0,
    loads: int = 1,
    activation_bytes_per_block: int = 0,
    reads: tuple[Read, ...] = (),
    written_bytes: int = 0,
    reductions: int = 0,
    selection_rounds: int = 0,
    flops: float = 0.0,
    sent_bytes_per_peer: int = 0,
    then: tuple[Pass, ...] = (),
) -> Work:
    """Blocks with 16 KB on their way each: one pass, and ``then`` further ones."""
    return block_work(
        num_blocks,
        Pass(
            num_address_loads=addresses,
            num_dependent_loads=loads,
            activation_bytes_per_block=activation_bytes_per_block,
            reads=reads,
            written_bytes=written_bytes,
            flops=flops,
            num_block_reductions=reductions,
            num_selection_rounds=selection_rounds,
        ),
        *then,
        block=block,
        in_flight_kib=16,
        sent_bytes_per_peer=sent_bytes_per_peer,
    )


def _built(form: str) -> Block:
    return footprint("unfused", form).block()


def embedding(weights: Sequence[Weight], *, rows: int, hidden: int) -> Work:
    """Vocabulary-parallel lookup: token id, then its row."""
    row_bytes = rows * hidden * BF16_BYTES
    row = Read(region="", num_bytes=row_bytes)
    return small(
        block=_built("embedding_push16"),
        num_blocks=8 * rows,
        addresses=1,
        loads=0,
        reads=(row,),
        sent_bytes_per_peer=row_bytes,
    )


def all_reduce(weights: Sequence[Weight], *, rows: int, hidden: int, ranks: int) -> Work:
    """One-shot push all-reduce of ``[rows, hidden]``: load, push, poll, sum of every rank's slot.

    At the end a block's threads meet, and one takes the counter of the buffer, in whose order the last turns it.
    """
    blocks = min(ALL_REDUCE_ROW_BLOCKS * rows, MOST_ALL_REDUCE_BLOCKS)
    row_bytes = rows * hidden * BF16_BYTES
    return small(
        block=_built(f"all_reduce_rows{1 if rows == 1 else 16}_ranks{8 if ranks <= 8 else 16}"),
        num_blocks=blocks,
        activation_bytes_per_block=row_bytes // blocks,
        sent_bytes_per_peer=row_bytes,
        then=(
            Pass(
                num_dependent_loads=1,
                activation_bytes_per_block=ranks * row_bytes // blocks,
                num_block_reductions=1,
            ),
            Pass(num_dependent_loads=1),
        ),
    )


def conv_update(weights: Sequence[Weight], *, rows: int, conv_state_bytes: int, conv_weight_bytes: int) -> Work:
    """Causal convolution update with SiLU over q, k and v."""
    reads = (
        Read(region="", num_bytes=rows * conv_state_bytes, kind=ReadKind.KV_STATE),
        Read(region="", num_bytes=conv_weight_bytes),
    )
    return small(
        block=_built("conv_update_heads6"),
        num_blocks=-(-conv_state_bytes // 3072) * rows,
        addresses=1,
        reads=reads,
        written_bytes=rows * conv_state_bytes,
    )


def recurrent_update(
    weights: Sequence[Weight], *, rows: int, heads: int, state_bytes: int, value_bytes: int = 4
) -> Work:
    """Delta rule with gates inside; four blocks a head, each 32 value columns."""
    return small(
        block=_built("recurrent_update_heads6_fp32_logits_fp32"),
        num_blocks=4 * heads * rows,
        addresses=1,  # state slot
        reads=(Read(region="", num_bytes=rows * state_bytes, kind=ReadKind.KV_STATE),),
        written_bytes=rows * state_bytes,
        flops=8.0 * rows * state_bytes / value_bytes,  # in fp32, whatever the state is stored in
        reductions=2,  # L2 norms together, then k S and q S
    )


def gated_norm(weights: Sequence[Weight], *, rows: int, heads: int, head_dim: int) -> Work:
    """Per-head RMSNorm times the sigmoid of the output gate."""
    return small(
        block=_built("gated_norm_heads6"),
        num_blocks=rows * heads,
        activation_bytes_per_block=2 * head_dim * BF16_BYTES,
        reductions=1,
    )


def norm(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """RMSNorm of ``[rows, width]``, one block a row."""
    parameters = Read(region="", num_bytes=width * BF16_BYTES)
    return small(
        block=_built("norm_7168" if width > 2048 else "norm_1536_512"),
        num_blocks=rows,
        activation_bytes_per_block=width * BF16_BYTES,
        reads=(parameters,),
        reductions=1,
    )


def elementwise(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """One load and one store an element: SiTU, the sigmoid gate, a copy out of the receive buffer."""
    return small(
        block=_built("situ"), num_blocks=-(-rows * width // 2048), activation_bytes_per_block=2 * 2048 * BF16_BYTES
    )


def query_and_cache(weights: Sequence[Weight], *, rows: int, heads: int, kv_row_bytes: int) -> Work:
    """Builds and quantises the query and inserts the new row into the paged cache."""
    return small(
        block=_built("query_and_cache_heads6_fp8"),
        num_blocks=rows * heads,
        loads=2,
        activation_bytes_per_block=2 * 576,
        written_bytes=rows * kv_row_bytes,
    )


def sample(weights: Sequence[Weight], *, rows: int, ranks: int) -> Work:
    """Draws the token from every rank's candidates: one block a row, a selection and a prefix sum."""
    return small(
        block=_built("sample_greedy_ranks16"),
        num_blocks=rows,
        activation_bytes_per_block=ranks * 64 * 8,
        reductions=8 + 2,
        selection_rounds=8,
    )


def advance(weights: Sequence[Weight], *, rows: int) -> Work:
    """The counters of the next step: one block, a thread a row. Length and slot together, then the page."""
    return small(block=_built("advance"), num_blocks=1, loads=2)


def copy(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """A row kept aside: one load and one store an element."""
    return small(
        block=PUBLIC["elementwise"], num_blocks=-(-rows * width // 2048), activation_bytes_per_block=2048 * BF16_BYTES
    )


def gather(weights: Sequence[Weight], *, rows: int, width: int, ranks: int) -> Work:
    """Every rank's logits (fp32) to every rank."""
    sent_bytes = rows * width // ranks * 4
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=-(-rows * width // 2048),
        activation_bytes_per_block=8192,
        sent_bytes_per_peer=sent_bytes,
    )


def argmax(weights: Sequence[Weight], *, rows: int, width: int) -> Work:
    """Largest of the whole vocabulary: partial maxima of many blocks, then their maximum."""
    blocks = 64 * rows
    return small(
        block=PUBLIC["elementwise"],
        num_blocks=blocks,
        activation_bytes_per_block=4 * rows * width // blocks,
        reductions=1,
        then=(Pass(num_dependent_loads=2, num_block_reductions=1),),
    )


CODE: Mapping[str, MachineCode] = {
    "advance": built_code("unfused", "advance"),
    "all_reduce": built_code("unfused", "all_reduce_rows1_ranks16", half_the_ranks="all_reduce_rows1_ranks8"),
    "conv_update": built_code("unfused", "conv_update_heads6"),
    "elementwise": built_code("unfused", "situ"),
    "embedding": built_code("unfused", "embedding_push16"),
    "gated_norm": built_code("unfused", "gated_norm_heads6"),
    "norm": built_code("unfused", "norm_7168"),
    "query_and_cache": built_code("unfused", "query_and_cache_heads6_fp8"),
    "recurrent_update": built_code("unfused", "recurrent_update_heads6_fp32_logits_fp32"),
    "sample": built_code("unfused", "sample_greedy_ranks16"),
}
