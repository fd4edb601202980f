"""Cases of ``attn_res``: the combine of 1 to 9 sources, the snapshots' part, the fold of the prefix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.attn_res.public import consume, single_block, snapshot_sums
from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import within

if TYPE_CHECKING:
    import torch

HIDDEN = 7168
PARAMETER_BYTES = 3 * HIDDEN * 2
SNAPSHOTS = 8
ROWS = (1, 5, 256)
SNAPSHOT_COUNTS = (0, 1, 4, 8)
TIMED_ROWS = (1, 32)


def inputs(
    *, rows: int, num_snapshots: int, device: str = "cpu", seed: int = 0, hidden: int = HIDDEN
) -> dict[str, torch.Tensor]:
    """Snapshots (one more than used), prefix, delta and weights; logits spread over a few units."""
    generator = generator_on(device, seed)
    return dict(
        snapshots=normal((rows, num_snapshots + 1, hidden), generator, scale=2.0),
        prefix=normal((rows, hidden), generator),
        delta=normal((rows, hidden), generator, scale=0.5),
        query_norm=1 + normal((hidden,), generator, scale=0.2),
        query=normal((hidden,), generator, scale=2 / math.sqrt(hidden)),
        norm_weight=1 + normal((hidden,), generator, scale=0.2),
    )


def _reference(
    arguments: dict[str, torch.Tensor], start: torch.Tensor, num_snapshots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expected output and prefix, from the prefix before the call."""
    from k3sim.kernels.attn_res import reference

    a, prefix = arguments, start.clone()
    reference.add_delta(prefix, a["delta"])
    out = reference.attn_res(a["snapshots"][:, :num_snapshots], prefix, a["query_norm"], a["query"], a["norm_weight"])
    return out, prefix


def _combine_problem(num_snapshots: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.attn_res import launch

        arguments = inputs(rows=rows, num_snapshots=num_snapshots, device=device, seed=seed)
        arguments["snapshots"][:, num_snapshots:] = math.nan  # beyond those in use: must not be read
        start = arguments["prefix"].clone()
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        return Problem(
            outputs=[
                Output(name="out", tensor=out, judge=within("bf16_activation")),
                Output(name="prefix", tensor=arguments["prefix"], judge=within("bf16_sum"), in_place=True),
            ],
            launch=lambda: launch.attn_res(**arguments, out=out, num_snapshots=num_snapshots),
            reference=lambda: _reference(arguments, start, num_snapshots),
        )

    return make


def _part_problem(num_snapshots: int, rows: int) -> Callable[[str, int], Problem]:
    """``snapshot_part`` and then ``fold_prefix`` on what it left."""

    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.attn_res import launch, reference

        arguments = inputs(rows=rows, num_snapshots=num_snapshots, device=device, seed=seed)
        start = arguments["prefix"].clone()
        query = dict(query_norm=arguments["query_norm"], query=arguments["query"])
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        stats = torch.empty(rows, 2, device=device)
        weighted = torch.empty(rows, HIDDEN, device=device)

        def call() -> None:
            launch.snapshot_part(
                arguments["snapshots"], **query, stats=stats, weighted=weighted, num_snapshots=num_snapshots
            )
            launch.fold_prefix(
                stats, weighted, arguments["prefix"], arguments["delta"], **query,
                norm_weight=arguments["norm_weight"], out=out,
            )  # fmt: skip

        def expected() -> Sequence[torch.Tensor]:
            part = reference.snapshot_part(arguments["snapshots"][:, :num_snapshots], *query.values())
            return (part.weighted_BD, *_reference(arguments, start, num_snapshots))

        return Problem(
            outputs=[
                Output(name="weighted", tensor=weighted, judge=within("fp32_sum")),
                Output(name="out", tensor=out, judge=within("bf16_activation")),
                Output(name="prefix", tensor=arguments["prefix"], judge=within("bf16_sum"), in_place=True),
            ],
            launch=call,
            reference=expected,
        )

    return make


def _copies(
    copies: int, rows: int, generator: torch.Generator
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Snapshots and the three parameter vectors, ``copies`` of each."""
    snapshots = normal((copies, rows, SNAPSHOTS, HIDDEN), generator, scale=2.0)
    parameters = 1 + normal((copies, 3, HIDDEN), generator, scale=0.2)
    parameters[:, 1] *= 2 / math.sqrt(HIDDEN)
    return list(snapshots), list(parameters)


def _timed(kernel: str, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.attn_res import launch

        generator = generator_on(device, seed)
        cold = PARAMETER_BYTES + (0 if kernel == "fold" else rows * SNAPSHOTS * HIDDEN * 2)
        copies = num_copies(cold, l2_bytes)
        snapshots, parameters = _copies(copies if kernel != "fold" else 1, rows, generator)
        if kernel == "fold":
            snapshots = snapshots * copies
            parameters = list(1 + normal((copies, 3, HIDDEN), generator, scale=0.02))
        prefix, delta = normal((rows, HIDDEN), generator), torch.zeros(rows, HIDDEN, device=device).bfloat16()
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        stats, weighted = torch.ones(rows, 2, device=device), torch.ones(rows, HIDDEN, device=device)

        def call(own: torch.Tensor, vectors: torch.Tensor) -> Call:
            query_norm, query, norm_weight = vectors
            if kernel == "combine":
                return lambda: launch.attn_res(
                    own, prefix, delta, query_norm, query, norm_weight, out, num_snapshots=SNAPSHOTS, pdl=True
                )
            if kernel == "part":
                return lambda: launch.snapshot_part(
                    own, query_norm, query, stats, weighted, num_snapshots=SNAPSHOTS, pdl=True
                )
            return lambda: launch.fold_prefix(
                stats, weighted, prefix, delta, query_norm, query, norm_weight, out, pdl=True
            )

        return Timed(calls=[call(*one) for one in zip(snapshots, parameters, strict=True)])

    return make


def cases() -> list[Case]:
    found = []
    for number in sorted(SNAPSHOT_COUNTS, reverse=True):
        for rows in (*ROWS, *(TIMED_ROWS[1:] if number == SNAPSHOTS else ())):
            timed = number == SNAPSHOTS and rows in TIMED_ROWS
            shape = {"rows": rows, "hidden": HIDDEN}
            found.append(
                Case(
                    operator="attn_res", name=f"combine of {number + 1} sources, {rows_in_words(rows)}", rows=rows,
                    works=(single_block((), **shape, sources=number + 1),),
                    num_bytes=(number + 8) * 4 * rows * HIDDEN, problem=_combine_problem(number, rows),
                    timed=_timed("combine", rows) if timed else None,
                )
            )
            if number:
                # The part and the fold are checked together and timed apart.
                part, fold = snapshot_sums((), **shape, sources=number + 1), consume((), **shape, slots=1)
                found.append(
                    Case(
                        operator="attn_res", name=f"part of {number} snapshots, {rows_in_words(rows)}", rows=rows,
                        works=(part,), num_bytes=(number + 8) * 4 * rows * HIDDEN,
                        problem=_part_problem(number, rows), timed=_timed("part", rows) if timed else None,
                    )
                )
                if timed:
                    found.append(
                        Case(
                            operator="attn_res", name=f"fold of the prefix, {rows_in_words(rows)}", rows=rows,
                            works=(fold,), num_bytes=0, timed=_timed("fold", rows),
                        )
                    )
    return found
