"""Cases of ``expert_gemv``: slices of TP8 (384) and TP16 (192), 16 experts a row, in one launch and in two."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from k3sim.kernels.expert_gemv.cost import BITS_PER_WEIGHT, down, gate_up
from k3sim.kernels.expert_gemv.public import block
from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import within
from k3sim.kernels.work import Work
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.expert_gemv.launch import PackedExperts
    from k3sim.kernels.expert_gemv.reference import Experts

LATENT = 3584
TOP_K = 16
NUM_EXPERTS = 896
CHECKED_EXPERTS = 24
WIDTHS = (384, 192)
ROWS = (1, 2, 5, 8, 16)
TIMED_ROWS = (1, 2, 8, 16)
TWO_LAUNCH_ROWS = (1, 2, 16)
TWO_LAUNCH_TIMED_ROWS = (1, 16)


def random_experts(
    count: int, width: int, device: str = "cpu", scale_low: int = 117, scale_high: int = 122, seed: int | None = None
) -> Experts:
    """Uniform codes; scales that keep sums over 3584 and over the width of order one."""
    import torch

    from k3sim.kernels.expert_gemv.reference import Experts

    generator = generator_on(device, count * width if seed is None else seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(scale_low, scale_high, shape, dtype=torch.uint8, device=device, generator=generator)

    return Experts.made_of(codes, scales, count=count, width=width, latent=LATENT)


def expert_bytes(width: int) -> int:
    """MXFP4 bytes of one expert's slice."""
    return int(3 * width * LATENT * BITS_PER_WEIGHT) // 8


def works_of(width: int, rows: int, *, two_launches: bool = False) -> tuple[Work, ...]:
    distinct = rows * TOP_K
    both = distinct * expert_bytes(width)
    w13 = Weight(region="w13", num_outputs=2 * width, depth=LATENT, num_bytes=both * 2 // 3)
    w2 = Weight(region="w2", num_outputs=LATENT, depth=width, num_bytes=both - both * 2 // 3)
    shape = {"rows": rows, "top_k": TOP_K, "distinct_milli": 1000 * distinct}
    if two_launches:
        return gate_up([w13], **shape), down([w2], **shape)
    return (block([w13, w2], **shape, width=width, experts=NUM_EXPERTS, latent=LATENT, selects=0),)


def _caller(
    x: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, out: torch.Tensor, two_launches: bool
) -> Callable[[torch.Tensor], Call]:
    """From the experts' ids to a call; all calls share what lies between the two products."""
    import torch

    from k3sim.kernels.expert_gemv import launch

    if not two_launches:
        workspace = launch.ExpertWorkspace.allocate(packed)
        return lambda ids: lambda: launch.expert_gemv(x, ids, weights, packed, out, workspace)
    hidden = torch.full((x.shape[0], TOP_K, packed.width), math.nan, dtype=torch.float16, device=x.device)

    def calling(ids: torch.Tensor) -> Call:
        def both() -> None:
            launch.expert_gate_up(x, ids, weights, packed, hidden)
            launch.expert_down(hidden, ids, packed, out)

        return both

    return calling


def _problem(width: int, rows: int, fp32_out: bool, two_launches: bool = False) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.expert_gemv import reference
        from k3sim.kernels.expert_gemv.launch import pack_experts

        generator = generator_on(device, seed)
        experts = random_experts(CHECKED_EXPERTS, width, device, seed=seed)
        x = normal((rows, LATENT), generator)
        ids = torch.stack(
            [torch.randperm(CHECKED_EXPERTS, generator=generator, device=device)[:TOP_K] for _ in range(rows)]
        ).int()
        ids[0, 3] = CHECKED_EXPERTS  # unknown ones contribute nothing
        weights = torch.rand(rows, TOP_K, generator=generator, device=device)
        dtype = torch.float32 if fp32_out else torch.bfloat16
        out = torch.empty(rows, LATENT, dtype=dtype, device=device)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=within("expert_bf16"))],
            launch=_caller(x, weights, pack_experts(experts), out, two_launches)(ids),
            reference=lambda: (reference.expert_gemv(x, ids, weights, experts),),
        )

    return make


def _timed(width: int, rows: int, two_launches: bool = False) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.expert_gemv.launch import pack_experts

        generator = generator_on(device, seed)
        packed = pack_experts(random_experts(NUM_EXPERTS, width, device, seed=seed))
        distinct = rows * TOP_K
        # Calls take disjoint experts while there are any, then all are dealt anew.
        copies = num_copies(distinct * expert_bytes(width), l2_bytes)
        dealt: list[torch.Tensor] = []
        while len(dealt) < copies:
            order = torch.randperm(NUM_EXPERTS, generator=generator, device=device).int()
            dealt += [one.view(rows, TOP_K) for one in order.split(distinct) if one.numel() == distinct]
        x = normal((rows, LATENT), generator)
        weights = torch.rand(rows, TOP_K, generator=generator, device=device)
        out = torch.empty(rows, LATENT, dtype=torch.bfloat16, device=device)

        calling = _caller(x, weights, packed, out, two_launches)
        return Timed(calls=[calling(ids.contiguous()) for ids in dealt[:copies]])

    return make


def cases() -> list[Case]:
    found = [
        Case(
            operator="expert_gemv",
            name=f"16 experts a row of {width}, {rows_in_words(rows)}{', fp32 out' if fp32 else ''}", rows=rows,
            works=works_of(width, rows), num_bytes=3 * CHECKED_EXPERTS * expert_bytes(width),
            problem=_problem(width, rows, fp32),
            timed=_timed(width, rows) if rows in TIMED_ROWS and not fp32 else None,
        )
        for rows in ROWS
        for width in WIDTHS
        for fp32 in ((False, True) if rows in (1, 5) else (False,))
    ]
    found += [
        Case(
            operator="expert_gemv", name=f"16 experts a row of {width}, {rows_in_words(rows)}, two launches",
            rows=rows, works=works_of(width, rows, two_launches=True),
            num_bytes=3 * CHECKED_EXPERTS * expert_bytes(width),
            problem=_problem(width, rows, False, two_launches=True),
            timed=_timed(width, rows, two_launches=True) if rows in TWO_LAUNCH_TIMED_ROWS else None,
        )
        for rows in TWO_LAUNCH_ROWS
        for width in WIDTHS
    ]
    return found
