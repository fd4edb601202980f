"""Costs of public engines' exchanges around the experts, where attention is data parallel or a step has stages.

| Exchange | What leaves a rank |
| --- | --- |
| ``all_gather`` | its group's tokens, to one rank of every other group |
| ``reduce_scatter`` | partial sums of the other groups' tokens, to their group |
| ``dispatch`` | a token in FP8 with scales, once for each of its experts, to the expert's rank |
| ``combine`` | an expert's result in bf16 for each of its tokens, back to the token's rank |

The first two are vLLM's ``allgather_reducescatter`` and SGLang's without a backend, the others DeepEP's low-latency
form.

DeepEP (deepseek-ai/DeepEP ``internode_ll.cu``, whose NVLink form stores to peers directly) is one cooperative launch
over all SMs each way. Dispatch: a token's indices and then the token are loaded, cast with a maximum over each 128
values, and stored to the slots of its experts; a counter in memory says when a block's tokens are out, and the last
sends the number of tokens behind a fence; after a barrier of the grid the receivers poll these numbers, take places
with an atomic, and copy the tokens together. Combine loads, stores, counts and fences in the same way; after a barrier
of the grid a token's ``top_k`` results are loaded and added up.

The busiest rank is the one counted: what it receives and sends back decides (``received_rows`` tokens with all their
experts on it), so that imbalance lengthens the exchanges as it does the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from k3sim.kernels.footprints.engines import PUBLIC
from k3sim.kernels.unfused.cost import BF16_BYTES, small
from k3sim.kernels.work import Barrier, Pass, Work
from k3sim.model.program import Weight

ROW_BLOCKS, MOST_BLOCKS = 8, 128
# FP8, and a scale in fp32 for each 128 values.
FP8_GROUP, SCALE_BYTES = 128, 4
# Before the fence: a token's addition to its expert's counter, and the look of who waits for the last.
FINISH_TRIPS = 2


def _blocks(rows: int) -> int:
    return min(ROW_BLOCKS * rows, MOST_BLOCKS)


def all_gather(weights: Sequence[Weight], *, rows: int, row_bytes: int, ranks: int) -> Work:
    """``rows`` of ``row_bytes`` to each of ``ranks``: load, push, poll, and a copy to where all rows lie together."""
    blocks, num_bytes = _blocks(rows), rows * row_bytes
    return small(
        block=PUBLIC["all_reduce"],
        num_blocks=blocks,
        activation_bytes_per_block=num_bytes // blocks,
        sent_bytes_per_peer=num_bytes,
        then=(Pass(num_dependent_loads=1, activation_bytes_per_block=ranks * num_bytes // blocks),),
    )


def reduce_scatter(
    weights: Sequence[Weight], *, rows: int, row_bytes: int, ranks: int, summed_rows: int
) -> Work:
    """Sums over ``ranks`` of each rank's ``rows``: what its experts left for every rank's rows is added up and pushed.

    ``summed_rows``: of the experts' results that the rank has to add up first.
    """
    blocks, num_bytes = _blocks(rows), rows * row_bytes
    return small(
        block=PUBLIC["all_reduce"],
        num_blocks=blocks,
        activation_bytes_per_block=summed_rows * row_bytes // blocks,
        sent_bytes_per_peer=num_bytes,
        then=(Pass(num_dependent_loads=1, activation_bytes_per_block=ranks * num_bytes // blocks),),
    )


def _cooperative(work: Work) -> Work:
    return replace(work, co_resident=True)


def dispatched_bytes(depth: int) -> int:
    """Bytes of one token on its way to an expert."""
    return depth + -(-depth // FP8_GROUP) * SCALE_BYTES


def dispatch(
    weights: Sequence[Weight], *, rows: int, received_rows: int, top_k: int, depth: int, ranks: int
) -> Work:
    """Tokens to their experts: of ``rows`` own ones, and ``received_rows * top_k`` that come in."""
    arriving = received_rows * top_k
    received_bytes = arriving * dispatched_bytes(depth)
    return _cooperative(
        small(
            block=PUBLIC["dispatch"],
            num_blocks=MOST_BLOCKS,
            addresses=1,
            loads=1 + FINISH_TRIPS,
            activation_bytes_per_block=-(-rows // MOST_BLOCKS) * depth * BF16_BYTES,
            reductions=2,  # the maxima, and the block's counter
            sent_bytes_per_peer=-(-received_bytes // ranks),
            then=(
                Pass(barrier=Barrier.GRID, num_barriers=1),
                Pass(
                    num_address_loads=1,  # places, by an atomic
                    num_dependent_loads=1,
                    num_block_reductions=1,
                    activation_bytes_per_block=received_bytes // MOST_BLOCKS,
                    written_bytes=received_bytes,
                ),
            ),
        )
    )


def combine(weights: Sequence[Weight], *, rows: int, received_rows: int, top_k: int, depth: int, ranks: int) -> Work:
    """Experts' results back: of the ``received_rows * top_k`` tokens that came in, and the sum of each own row's."""
    returned_bytes = received_rows * top_k * depth * BF16_BYTES
    return _cooperative(
        small(
            block=PUBLIC["dispatch"],
            num_blocks=MOST_BLOCKS,
            addresses=1,
            loads=1 + FINISH_TRIPS,
            activation_bytes_per_block=returned_bytes // MOST_BLOCKS,
            reductions=1,
            sent_bytes_per_peer=-(-returned_bytes // ranks),
            then=(
                Pass(barrier=Barrier.GRID, num_barriers=1),
                Pass(
                    num_address_loads=1,
                    num_dependent_loads=1,
                    activation_bytes_per_block=rows * top_k * depth * BF16_BYTES // MOST_BLOCKS,
                ),
            ),
        )
    )


def hand_over(weights: Sequence[Weight], *, rows: int, row_bytes: int, sources: int) -> Work:
    """The residual, and what attention residuals keep beside it, from one pipeline stage to the next.

    NCCL's send and the receive that waits for it count as one launch: load, push, poll, copy.
    """
    num_bytes = rows * row_bytes * max(1, sources)
    blocks = _blocks(rows)
    return small(
        block=PUBLIC["all_reduce"],
        num_blocks=blocks,
        activation_bytes_per_block=num_bytes // blocks,
        sent_bytes_per_peer=num_bytes,
        then=(Pass(num_dependent_loads=1, activation_bytes_per_block=num_bytes // blocks),),
    )
