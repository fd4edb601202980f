"""Cases of ``proj_allreduce``: all ranks on one GPU and stream; one rank that fills all its slots, timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res import cost as attn_res_cost
from k3sim.kernels.bench import num_copies
from k3sim.kernels.cases import Call, Case, Output, Problem, Timed, alike_within, generator_on, normal, rows_in_words
from k3sim.kernels.proj_allreduce.cost import produce
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.tolerance import Verdict

    Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HIDDEN = 7168
# ranks, this rank's slice of the mixer output, rows
SHAPES = ((8, 1536, 1), (16, 768, 1), (8, 768, 1), (8, 1536, 8), (8, 1536, 16), (8, 384, 2), (16, 384, 5))
TIMED = frozenset(SHAPES[:5])


def consumer_operands(
    rows: int, hidden: int, device: str = "cpu", seed: int = 0
) -> tuple[tuple[torch.Tensor, Part, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """residual, snapshot part of three random snapshots, query norm, query, norm weight; and the snapshots."""
    import torch

    from k3sim.kernels.attn_res import reference as attn_res

    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    snapshots = values(rows, 3, hidden)
    residual, query_norm, norm_weight = values(rows, hidden), values(hidden), values(hidden)
    query = (values(hidden) / math.sqrt(hidden)).bfloat16()
    largest, denominator, weighted = (one.to(device) for one in attn_res.snapshot_part(snapshots, query_norm, query))
    return (
        residual.to(device),
        (largest, denominator, weighted),
        query_norm.to(device),
        query.to(device),
        norm_weight.to(device),
    ), snapshots


def _problem(ranks: int, depth: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.proj_allreduce import launch, reference

        generator = generator_on(device, seed)
        buffers = [launch.make_receive_buffers(ranks=ranks, device=device) for _ in range(ranks)]
        peers = torch.tensor([one.received.data_ptr() for one in buffers], dtype=torch.int64, device=device)
        x = normal((ranks, rows, depth), generator)
        weight = normal((ranks, HIDDEN, depth), generator, scale=1 / math.sqrt(depth))
        weight[:, 9] = 0  # a partial of -0: a tiny negative product rounds to it
        weight[:, 9, 0] = -1e-38
        operands, _ = consumer_operands(rows, HIDDEN, device, seed)
        prefix = torch.empty(ranks, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def call() -> None:
            # On one stream everybody pushes before anybody waits.
            for rank in range(ranks):
                launch.produce(x[rank], weight[rank], peers, buffers[rank], rank=rank)
            for rank in range(ranks):
                launch.consume(buffers[rank], *operands, prefix[rank], out[rank], release_next=False)

        def expected() -> Sequence[torch.Tensor]:
            partials = torch.stack([reference.produce(*one) for one in zip(x, weight, strict=True)])
            return reference.consume(partials, *operands)

        def judge_out(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            # From the prefix that the kernel itself made: a partial next to a rounding boundary may be one unit off.
            if bool(prefix[0].isfinite().all()):
                ref = reference.consume(prefix[:1], None, *operands[1:]).normalised_BD
            return alike_within("bf16_activation")(found, ref, name)

        return Problem(
            outputs=[
                Output(name="prefix", tensor=prefix, judge=alike_within("reduced_bf16")),
                Output(name="out", tensor=out, judge=judge_out),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _timed(ranks: int, depth: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.proj_allreduce import launch
        from k3sim.kernels.skinny_gemv.cases import cublas_calls, weights

        generator = generator_on(device, seed)
        buffers = launch.make_receive_buffers(ranks=ranks, device=device)
        # The one rank pushes to as many addresses as there are ranks: its own slots.
        slot_bytes = buffers.received[0, 0].numel() * buffers.received.element_size()
        peers = torch.arange(ranks, dtype=torch.int64, device=device) * slot_bytes + buffers.received.data_ptr()
        copies = weights(num_copies(HIDDEN * depth * BF16_BYTES, l2_bytes), HIDDEN, depth, generator)
        x = normal((rows, depth), generator)
        operands, _ = consumer_operands(rows, HIDDEN, device, seed)
        prefix = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def call(weight: torch.Tensor) -> Call:
            def step() -> None:
                launch.produce(x, weight, peers, buffers, rank=0)
                launch.consume(buffers, *operands, prefix, out)

            return step

        return Timed(
            calls=[call(weight) for weight in copies],
            peers={"cuBLAS, product alone": lambda: cublas_calls(x, copies)},
        )

    return make


def cases() -> list[Case]:
    found = []
    for ranks, depth, rows in SHAPES:
        weight = Weight(region="w", num_outputs=HIDDEN, depth=depth, num_bytes=HIDDEN * depth * BF16_BYTES)
        found.append(
            Case(
                operator="proj_allreduce",
                name=f"produce and consume, {ranks} slots of this GPU, {HIDDEN}x{depth}, {rows_in_words(rows)}",
                rows=rows,
                works=(
                    produce([weight], rows=rows),
                    attn_res_cost.consume((), rows=rows, hidden=HIDDEN, slots=ranks),
                ),
                num_bytes=3 * ranks * HIDDEN * depth + 4 * ranks * ranks * 16 * HIDDEN,
                problem=_problem(ranks, depth, rows),
                timed=_timed(ranks, depth, rows) if (ranks, depth, rows) in TIMED else None,
            )
        )
    return found
