"""Cases of ``proj_allreduce``: all ranks on one GPU and stream; one rank that fills all its slots, timed.

``consume_gathered`` is checked on rows that a copy put into its slots. It empties them, so it is timed behind what
fills them in a step: the tail of a layer, whose rank is its own peers, or the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res.public import consume as public_consume
from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import alike_within, exactly, within
from k3sim.kernels.latent_tail import cost as latent_tail_cost
from k3sim.kernels.latent_tail import public as latent_tail_public
from k3sim.kernels.proj_allreduce.cost import consume_gathered
from k3sim.kernels.proj_allreduce.public import produce
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.kernels.unfused import cost as unfused_cost
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict

    Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

HIDDEN = 7168
LATENT = 3584
# ranks, this rank's slice of the mixer output, rows
SHAPES = ((8, 1536, 1), (16, 768, 1), (8, 768, 1), (8, 1536, 8), (8, 1536, 16), (8, 384, 2), (16, 384, 5))
TIMED = frozenset(SHAPES[:5])
GATHERED = ((8, 1), (16, 1), (8, 16), (16, 16))  # ranks, rows


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


def _gathered_operands(
    rows: int, device: str, seed: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], Part]:
    """residual; both statistics in one and the weighted sum, as ``snapshot_part`` writes them; the three vectors."""
    import torch

    (residual, (largest, denominator, weighted), query_norm, query, norm_weight), _ = consumer_operands(
        rows, HIDDEN, device, seed
    )
    vectors = (query_norm, query, norm_weight)
    return residual, (torch.stack((largest, denominator), dim=-1).contiguous(), weighted), vectors


def _gathered_problem(ranks: int, rows: int, snapshots: bool) -> Callable[[str, int], Problem]:
    """With ``snapshots`` behind the tail of a layer, without behind the embedding."""

    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.latent_tail.launch import EMPTY, TailSlots
        from k3sim.kernels.proj_allreduce import launch, reference

        generator = generator_on(device, seed)
        slots = TailSlots.allocate(ranks=ranks, max_rows=rows, device=device)
        names = ("gathered", "latent", "shared") if snapshots else ("gathered",)
        landing = {name: getattr(slots, name) for name in names}
        arrived = {name: normal(tensor.shape, generator) for name, tensor in landing.items()}
        residual, part, vectors = _gathered_operands(rows, device, seed)
        prefix = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def call() -> None:
            for name, tensor in landing.items():
                tensor.copy_(arrived[name])
            launch.consume_gathered(
                slots,
                residual if snapshots else None,
                part if snapshots else None,
                *vectors,
                prefix,
                out,
                empty_parts=snapshots,
            )

        def expected() -> Sequence[torch.Tensor]:
            stats, weighted = part
            apart = (stats[:, 0], stats[:, 1], weighted)
            consumed = reference.consume(
                arrived["gathered"][None], residual if snapshots else None, apart if snapshots else None, *vectors
            )
            emptied = (torch.full_like(one.view(torch.int16), EMPTY) for one in landing.values())
            return (*consumed, *emptied)

        return Problem(
            outputs=[
                Output(name="prefix", tensor=prefix, judge=exactly()),
                Output(name="out", tensor=out, judge=within("bf16_activation")),
                # Empty before and afterwards.
                *(
                    Output(name=f"slots.{name}", tensor=tensor.view(torch.int16), judge=exactly(), in_place=True)
                    for name, tensor in landing.items()
                ),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _tail_timed(ranks: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.latent_tail import launch as tail
        from k3sim.kernels.proj_allreduce import launch

        generator, outputs = generator_on(device, seed), HIDDEN // ranks
        slots = tail.TailSlots.allocate(ranks=ranks, max_rows=rows, device=device)
        peers = tail.TailPeers.loopback_fabric(slots, rank=0, rows=rows)
        latent, shared = normal((rows, LATENT), generator), normal((rows, HIDDEN), generator, scale=1 / ranks)
        norm = 1 + normal((LATENT,), generator, scale=0.125)
        copies = num_copies(outputs * LATENT * BF16_BYTES, l2_bytes)
        weights = normal((copies, outputs, LATENT), generator, scale=1 / math.sqrt(LATENT))
        residual, part, vectors = _gathered_operands(rows, device, seed)
        prefix = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def call(weight: torch.Tensor) -> Call:
            def step() -> None:
                tail.send(latent, shared, peers, 0)
                tail.up(slots, norm, weight, peers, 0, rows, release_late=True)
                launch.consume_gathered(slots, residual, part, *vectors, prefix, out)

            return step

        return Timed(calls=[call(weight) for weight in weights], keep=(slots, peers))

    return make


def _start_timed(ranks: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.latent_tail.launch import TailSlots
        from k3sim.kernels.proj_allreduce import launch
        from k3sim.kernels.unfused.exchange_launch import embedding_push

        slots = TailSlots.allocate(ranks=ranks, max_rows=rows, device=device)
        address = torch.tensor([slots.gathered.data_ptr()], dtype=torch.int64, device=device)
        ids = torch.arange(rows, dtype=torch.int32, device=device)
        table = normal((rows, HIDDEN), generator_on(device, seed))
        _, _, vectors = _gathered_operands(rows, device, seed)
        prefix = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def step() -> None:
            # Without ``pdl``: it lets its successor start at once, which must find all before it ended.
            embedding_push(ids, table, address, first_id=0)
            launch.consume_gathered(slots, None, None, *vectors, prefix, out, empty_parts=False)

        return Timed(calls=[step] * MIN_COPIES, keep=(slots, address))

    return make


def _gathered_cases() -> list[Case]:
    found = []
    for ranks, rows in GATHERED:
        outputs = HIDDEN // ranks
        up = Weight(region="w", num_outputs=outputs, depth=LATENT, num_bytes=outputs * LATENT * BF16_BYTES)
        consumer = consume_gathered((), rows=rows, hidden=HIDDEN)
        shape = {"rows": rows, "hidden": HIDDEN}
        for snapshots in (True, False):
            found.append(
                Case(
                    operator="proj_allreduce",
                    name=f"consume_gathered{'' if snapshots else ' without snapshots'}, slots of {ranks} ranks, "
                    f"{rows_in_words(rows)}",
                    rows=rows, works=(consumer,), num_bytes=16 * rows * (ranks * LATENT + 2 * HIDDEN),
                    problem=_gathered_problem(ranks, rows, snapshots),
                )
            )
        before = (
            latent_tail_cost.send((), **shape, latent=LATENT, ranks=ranks, expert_rows=1),
            latent_tail_public.up_ring([up], rows=rows),
        )
        found.append(
            Case(
                operator="proj_allreduce",
                name=f"send, up and consume_gathered, {ranks} ranks looped back, {rows_in_words(rows)}", rows=rows,
                works=(*before, consumer), num_bytes=0, timed=_tail_timed(ranks, rows),
            )
        )
    for rows in (1, 16):
        found.append(
            Case(
                operator="proj_allreduce",
                name=f"embedding_push and consume_gathered without snapshots, operands in L2, {rows_in_words(rows)}",
                rows=rows,
                works=tuple(cost((), rows=rows, hidden=HIDDEN) for cost in (unfused_cost.embedding, consume_gathered)),
                num_bytes=0, timed=_start_timed(8, rows),
            )
        )
    return found


def cases() -> list[Case]:
    found = []
    for ranks, depth, rows in SHAPES:
        weight = Weight(region="w", num_outputs=HIDDEN, depth=depth, num_bytes=HIDDEN * depth * BF16_BYTES)
        found.append(
            Case(
                operator="proj_allreduce",
                name=f"produce and consume, {ranks} slots of this GPU, {HIDDEN}x{depth}, {rows_in_words(rows)}",
                rows=rows,
                works=(produce([weight], rows=rows), public_consume((), rows=rows, hidden=HIDDEN, slots=ranks)),
                num_bytes=3 * ranks * HIDDEN * depth + 4 * ranks * ranks * 16 * HIDDEN,
                problem=_problem(ranks, depth, rows),
                timed=_timed(ranks, depth, rows) if (ranks, depth, rows) in TIMED else None,
            )
        )
    return found + _gathered_cases()
