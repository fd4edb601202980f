"""Cases of ``expert_gemv``: slices of TP8 (384) and TP16 (192), every row with 16 experts of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from k3sim.kernels.bench import num_copies
from k3sim.kernels.cases import Call, Case, Output, Problem, Timed, generator_on, normal, rows_in_words, within
from k3sim.kernels.expert_gemv.cost import BITS_PER_WEIGHT, block
from k3sim.kernels.work import Work
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.expert_gemv.reference import Experts

LATENT = 3584
TOP_K = 16
NUM_EXPERTS = 896
CHECKED_EXPERTS = 24
WIDTHS = (384, 192)
ROWS = (1, 2, 5, 8, 16)
TIMED_ROWS = (1, 2, 8, 16)


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

    return Experts(
        gate=codes(count, width, LATENT // 2),
        gate_scales=scales(count, width, LATENT // 32),
        up=codes(count, width, LATENT // 2),
        up_scales=scales(count, width, LATENT // 32),
        down=codes(count, LATENT, width // 2),
        down_scales=scales(count, LATENT, width // 32),
    )


def expert_bytes(width: int) -> int:
    """MXFP4 bytes of one expert's slice."""
    return int(3 * width * LATENT * BITS_PER_WEIGHT) // 8


def work_of(width: int, rows: int) -> Work:
    distinct = rows * TOP_K
    both = distinct * expert_bytes(width)
    w13 = Weight(region="w13", num_outputs=2 * width, depth=LATENT, num_bytes=both * 2 // 3)
    w2 = Weight(region="w2", num_outputs=LATENT, depth=width, num_bytes=both - both * 2 // 3)
    return block(
        [w13, w2],
        rows=rows,
        top_k=TOP_K,
        distinct_milli=1000 * distinct,
        width=width,
        experts=NUM_EXPERTS,
        latent=LATENT,
        selects=0,
    )


def _problem(width: int, rows: int, fp32_out: bool) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.expert_gemv import reference
        from k3sim.kernels.expert_gemv.launch import ExpertWorkspace, expert_gemv, pack_experts

        generator = generator_on(device, seed)
        experts = random_experts(CHECKED_EXPERTS, width, device, seed=seed)
        x = normal((rows, LATENT), generator)
        ids = torch.stack(
            [torch.randperm(CHECKED_EXPERTS, generator=generator, device=device)[:TOP_K] for _ in range(rows)]
        ).int()
        ids[0, 3] = CHECKED_EXPERTS  # unknown ones contribute nothing
        weights = torch.rand(rows, TOP_K, generator=generator, device=device)
        packed = pack_experts(experts)
        workspace = ExpertWorkspace.allocate(packed)
        dtype = torch.float32 if fp32_out else torch.bfloat16
        out = torch.empty(rows, LATENT, dtype=dtype, device=device)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=within("expert_bf16"))],
            launch=lambda: expert_gemv(x, ids, weights, packed, out, workspace),
            reference=lambda: (reference.expert_gemv(x, ids, weights, experts),),
        )

    return make


def _timed(width: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.expert_gemv.launch import ExpertWorkspace, expert_gemv, pack_experts

        generator = generator_on(device, seed)
        packed = pack_experts(random_experts(NUM_EXPERTS, width, device, seed=seed))
        workspace = ExpertWorkspace.allocate(packed)
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

        def call(ids: torch.Tensor) -> Call:
            return lambda: expert_gemv(x, ids, weights, packed, out, workspace)

        return Timed(calls=[call(ids.contiguous()) for ids in dealt[:copies]])

    return make


def cases() -> list[Case]:
    return [
        Case(
            operator="expert_gemv",
            name=f"16 experts a row of {width}, {rows_in_words(rows)}{', fp32 out' if fp32 else ''}",
            rows=rows,
            works=(work_of(width, rows),),
            num_bytes=3 * CHECKED_EXPERTS * expert_bytes(width),
            problem=_problem(width, rows, fp32),
            timed=_timed(width, rows) if rows in TIMED_ROWS and not fp32 else None,
        )
        for rows in ROWS
        for width in WIDTHS
        for fp32 in ((False, True) if rows in (1, 5) else (False,))
    ]
