"""Cases of ``router_topk``: whole rows and shards of 8 and 16 ranks. Logits were just written: they are in L2.

``gather_topk`` is checked on blocks that a copy put into its slots. It empties them, so it is timed behind the push of
this rank's block to all of them, with that product's weights from HBM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.router_topk.cost import FP32_BYTES, gather_topk
from k3sim.kernels.router_topk.public import gather_select
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.kernels.skinny_gemv.public import ring_push
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

EXPERTS = 896
LATENT = 3584
HIDDEN = 7168
TOP_K = 16
SHARDS = (1, 8, 16)
ROWS = (1, 16, 256)
TIMED_ROWS = (1, 16)
FRONTS = ((8, 1), (16, 1), (8, 16), (16, 16))  # ranks, rows


def _logits(rows: int, generator: torch.Generator) -> torch.Tensor:
    """[rows, 896] whose choices are far enough apart that every correct sigmoid orders them alike."""
    import torch

    orders = [torch.randperm(EXPERTS, generator=generator, device=generator.device) for _ in range(rows)]
    return torch.stack(orders).float() / 128 - 4


def _sharded(logits: torch.Tensor, num_shards: int) -> torch.Tensor:
    """[shards, rows, 896 / shards], or the rows themselves for one."""
    if num_shards == 1:
        return logits
    return logits.unflatten(1, (num_shards, -1)).transpose(0, 1).contiguous()


def _problem(num_shards: int, rows: int, form: str) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.router_topk import reference
        from k3sim.kernels.router_topk.launch import router_topk

        generator = generator_on(device, seed)
        logits = _logits(rows, generator)
        logits[0, 100:140] = logits[0].max()  # ties go to the lower id
        bias = torch.zeros(EXPERTS, device=device)
        shards = _sharded(logits, num_shards)
        given: Any = shards
        if form == "table":
            given = torch.tensor([one.data_ptr() for one in shards], device=device)
        arrived = shards.clone()  # with ``poll`` the kernel empties what it read
        ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(rows, TOP_K, device=device)

        def call() -> None:
            if form == "poll":
                arrived.copy_(shards)
                router_topk(arrived, bias, ids, weights, poll=True)
            else:
                router_topk(given, bias, ids, weights)

        def expected() -> Sequence[torch.Tensor]:
            return reference.router_topk(logits, bias)

        return Problem(
            outputs=[
                Output(name="ids", tensor=ids, judge=exactly()),
                Output(name="weights", tensor=weights, judge=within("routing_weight")),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _timed(num_shards: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.router_topk.launch import router_topk

        generator = generator_on(device, seed)
        copies = normal((MIN_COPIES, rows, EXPERTS), generator, dtype=torch.float32)
        bias = normal((EXPERTS,), generator, scale=0.1, dtype=torch.float32)
        ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(rows, TOP_K, device=device)
        shards = [_sharded(one, num_shards) for one in copies]

        def call(own: torch.Tensor) -> Call:
            return lambda: router_topk(own, bias, ids, weights)

        def topk() -> list[Call]:
            values = torch.empty(rows, TOP_K, device=device)
            indices = torch.empty(rows, TOP_K, dtype=torch.int64, device=device)
            return [lambda x=x: torch.topk(x, TOP_K, out=(values, indices)) for x in copies]  # type: ignore[misc]

        return Timed(calls=[call(one) for one in shards], peers={"torch.topk alone": topk})

    return make


def _front_problem(ranks: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.router_topk import launch, reference

        generator = generator_on(device, seed)
        logits = _logits(rows, generator)
        logits[0, 100:140] = logits[0].max()  # ties go to the lower id
        latent = normal((rows, LATENT), generator, dtype=torch.float32)
        blocks = torch.cat((_sharded(logits, ranks), _sharded(latent, ranks)), dim=-1)
        bias = torch.zeros(EXPERTS, device=device)
        slots = launch.make_front_slots(ranks=ranks, max_rows=rows, device=device)
        ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(rows, TOP_K, device=device)
        out = torch.empty(rows, LATENT, dtype=torch.bfloat16, device=device)

        def call() -> None:
            slots.copy_(blocks)
            launch.gather_topk(slots, bias, ids, weights, out)

        def expected() -> Sequence[torch.Tensor]:
            gathered, rounded = reference.gather_front(blocks)
            return (*reference.router_topk(gathered, bias), rounded, torch.full_like(slots.view(torch.int32), -1))

        return Problem(
            outputs=[
                Output(name="ids", tensor=ids, judge=exactly()),
                Output(name="weights", tensor=weights, judge=within("routing_weight")),
                Output(name="latent", tensor=out, judge=exactly()),
                # Empty before and afterwards.
                Output(name="slots", tensor=slots.view(torch.int32), judge=exactly(), in_place=True),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _front_timed(ranks: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.router_topk import launch
        from k3sim.kernels.skinny_gemv.cases import weights as scaled_weights
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        generator, num_outputs = generator_on(device, seed), (EXPERTS + LATENT) // ranks
        copies = num_copies(num_outputs * HIDDEN * BF16_BYTES, l2_bytes)
        shards = scaled_weights(copies, num_outputs, HIDDEN, generator)
        x = normal((rows, HIDDEN), generator)
        bias = normal((EXPERTS,), generator, scale=0.1, dtype=torch.float32)
        slots = launch.make_front_slots(ranks=ranks, max_rows=rows, device=device)
        peers = launch.front_peers_looped(slots)
        ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
        weights = torch.empty(rows, TOP_K, device=device)
        out = torch.empty(rows, LATENT, dtype=torch.bfloat16, device=device)

        def call(shard: torch.Tensor) -> Call:
            def step() -> None:
                skinny_gemv_push(x, shard, peers, out_dtype=torch.float32, polled=True)
                # As ``early`` asks, the next push begins only after this: nothing else keeps two selections apart.
                launch.gather_topk(slots, bias, ids, weights, out, early=True, release_next=False)

            return step

        return Timed(calls=[call(shard) for shard in shards], keep=(slots, peers))

    return make


def _front_cases() -> list[Case]:
    found = []
    for ranks, rows in FRONTS:
        num_outputs = (EXPERTS + LATENT) // ranks
        front = Weight(
            region="w", num_outputs=num_outputs, depth=HIDDEN, num_bytes=num_outputs * HIDDEN * BF16_BYTES
        )
        selection = gather_topk((), rows=rows, latent=LATENT)
        found.append(
            Case(
                operator="router_topk", name=f"gather_topk, {ranks} shards, {rows_in_words(rows)}", rows=rows,
                works=(selection,), num_bytes=40 * rows * (EXPERTS + LATENT), problem=_front_problem(ranks, rows),
            )
        )
        push = ring_push([front], rows=rows, sent_bytes_per_row=num_outputs * FP32_BYTES)
        found.append(
            Case(
                operator="router_topk",
                name=f"push of {num_outputs}x{HIDDEN} and gather_topk, {ranks} shards looped back, "
                f"{rows_in_words(rows)}",
                rows=rows, works=(push, selection), num_bytes=0, timed=_front_timed(ranks, rows),
            )
        )
    return found


def cases() -> list[Case]:
    found = []
    for rows in ROWS:
        for num_shards in SHARDS:
            for form in ("buffer",) if num_shards == 1 else ("buffer", "table", "poll"):
                found.append(
                    Case(
                        operator="router_topk",
                        name=f"{num_shards} shards, {rows_in_words(rows)}" + ("" if form == "buffer" else f", {form}"),
                        rows=rows, works=(gather_select((), rows=rows, experts=EXPERTS, latent=LATENT),),
                        num_bytes=40 * rows * EXPERTS, problem=_problem(num_shards, rows, form),
                        timed=_timed(num_shards, rows) if rows in TIMED_ROWS and form == "buffer" else None,
                    )
                )
    return found + _front_cases()
