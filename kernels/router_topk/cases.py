"""Cases of ``router_topk``: whole rows and shards of 8 and 16 ranks. Logits were just written: they are in L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3sim.kernels.bench import MIN_COPIES
from k3sim.kernels.cases import Call, Case, Output, Problem, Timed, exactly, generator_on, normal, rows_in_words, within
from k3sim.kernels.router_topk.cost import gather_select

if TYPE_CHECKING:
    import torch

EXPERTS = 896
LATENT = 3584
TOP_K = 16
SHARDS = (1, 8, 16)
ROWS = (1, 16, 256)
TIMED_ROWS = (1, 16)


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


def cases() -> list[Case]:
    found = []
    for rows in ROWS:
        for num_shards in SHARDS:
            for form in ("buffer",) if num_shards == 1 else ("buffer", "table", "poll"):
                found.append(
                    Case(
                        operator="router_topk",
                        name=f"{num_shards} shards, {rows_in_words(rows)}" + ("" if form == "buffer" else f", {form}"),
                        rows=rows,
                        works=(gather_select((), rows=rows, experts=EXPERTS, latent=LATENT),),
                        num_bytes=40 * rows * EXPERTS,
                        problem=_problem(num_shards, rows, form),
                        timed=_timed(num_shards, rows) if rows in TIMED_ROWS and form == "buffer" else None,
                    )
                )
    return found
