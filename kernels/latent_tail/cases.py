"""Cases of ``latent_tail``: the three launches of all ranks on one GPU and stream; ``up`` and ``send`` of one timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import alike_within, exactly
from k3sim.kernels.latent_tail.cost import send
from k3sim.kernels.latent_tail.public import up_ring
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.latent_tail.launch import TailSlots

LATENT, HIDDEN = 3584, 7168
BF16_BYTES = 2
WEIGHT_SCALE = 1 / 180  # outputs of order one: the norm's weight is 1 to 2
SHAPES = ((8, 1), (16, 1), (8, 4), (16, 4), (8, 16), (16, 16))


def _inputs(ranks: int, rows: int, device: str, seed: int) -> tuple[torch.Tensor, ...]:
    """latent [ranks, rows, 3584], shared [ranks, rows, 7168], norm weight [3584], up [7168, 3584]."""
    import torch

    generator = generator_on(device, seed)
    return (
        normal((ranks, rows, LATENT), generator),
        normal((ranks, rows, HIDDEN), generator, scale=1 / (2 * ranks**0.5)),
        (1 + torch.rand(LATENT, generator=generator, device=device)).bfloat16(),
        normal((HIDDEN, LATENT), generator, scale=WEIGHT_SCALE),
    )


def _slots(ranks: int, rows: int, device: str) -> list[TailSlots]:
    from k3sim.kernels.latent_tail.launch import TailSlots

    return [TailSlots.allocate(ranks=ranks, max_rows=rows, device=device) for _ in range(ranks)]


def _problem(ranks: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.latent_tail import launch, reference

        latent, shared, norm, up_weight = _inputs(ranks, rows, device, seed)
        slots = _slots(ranks, rows, device)
        peers = launch.TailPeers.of(slots)
        outs = torch.empty(ranks, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        shards = up_weight.chunk(ranks)
        landing = {name: getattr(slots[0], name).view(torch.int16) for name in ("latent", "shared", "gathered")}

        def call() -> None:
            # One stream: nothing waits for what is queued behind it.
            for rank in reversed(range(ranks)):
                launch.send(latent[rank], shared[rank], peers, rank)
            for rank in reversed(range(ranks)):
                launch.up(slots[rank], norm, shards[rank], peers, rank, rows)
            for rank in reversed(range(ranks)):
                launch.collect(slots[rank], outs[rank])

        def expected() -> Sequence[torch.Tensor]:
            out = reference.latent_tail(latent.double(), shared.double(), norm.double(), up_weight.double())
            return (out, *(torch.full_like(one, launch.EMPTY) for one in landing.values()))

        return Problem(
            outputs=[
                Output(name="outs", tensor=outs, judge=alike_within("bf16_activation")),
                # Empty before and afterwards.
                *(Output(name=f"slots.{k}", tensor=v, judge=exactly(), in_place=True) for k, v in landing.items()),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _timed_up(ranks: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        from k3sim.kernels.latent_tail import launch
        from k3sim.kernels.skinny_gemv.cases import cublas_calls

        generator = generator_on(device, seed)
        latent, shared, norm, _ = _inputs(ranks, rows, device, seed)
        slots = _slots(ranks, rows, device)
        peers = launch.TailPeers.of(slots)
        outputs = HIDDEN // ranks
        # All parts have arrived; ``up`` leaves them there.
        slots[0].latent.copy_(latent)
        slots[0].shared.copy_(shared[..., :outputs])
        copies = num_copies(outputs * LATENT * BF16_BYTES, l2_bytes)
        weights = normal((copies, outputs, LATENT), generator, scale=WEIGHT_SCALE)
        return Timed(
            calls=[lambda w=w: launch.up(slots[0], norm, w, peers, 0, rows) for w in weights],  # type: ignore[misc]
            peers={"cuBLAS, product alone": lambda: cublas_calls(latent[0], weights)},
            keep=slots,
        )

    return make


def _timed_send(ranks: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        from k3sim.kernels.latent_tail import launch

        latent, shared, _, _ = _inputs(ranks, rows, device, seed)
        slots = _slots(ranks, rows, device)
        peers = launch.TailPeers.of(slots)
        return Timed(calls=[lambda: launch.send(latent[0], shared[0], peers, 0)] * MIN_COPIES, keep=slots)

    return make


def cases() -> list[Case]:
    found = []
    for ranks, rows in SHAPES:
        outputs = HIDDEN // ranks
        weight = Weight(region="w", num_outputs=outputs, depth=LATENT, num_bytes=outputs * LATENT * BF16_BYTES)
        found.append(
            Case(
                operator="latent_tail", name=f"up, {ranks} ranks, {rows_in_words(rows)}", rows=rows,
                works=(up_ring([weight], rows=rows),), num_bytes=10 * HIDDEN * LATENT, problem=_problem(ranks, rows),
                timed=_timed_up(ranks, rows),
            )
        )
        found.append(
            Case(
                operator="latent_tail", name=f"send, {ranks} ranks, {rows_in_words(rows)}", rows=rows,
                works=(send((), rows=rows, hidden=HIDDEN, latent=LATENT, ranks=ranks, expert_rows=1),), num_bytes=0,
                timed=_timed_send(ranks, rows),
            )
        )
    return found
