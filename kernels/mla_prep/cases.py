"""Cases of ``mla_prep``: heads of TP8 and TP16 and beyond, both cache types, a padding row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import within
from k3sim.kernels.mla_prep.cost import BF16_BYTES, fused
from k3sim.kernels.work import Work
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

QUERY_LATENT, LATENT, EXTRA, NOPE = 1536, 512, 64, 128
ROW = LATENT + EXTRA
PAGE_TOKENS = 64
NUM_PAGES = 4
TIMED = ((12, 1, True), (6, 1, True), (12, 8, True), (12, 16, True))
CHECKED = ((12, 3, False), (12, 1, False), (6, 16, True), (24, 8, False), (96, 2, True))
MERGED_WIDTH = {6: 2880, 12: 3648}  # q_a, kv_a and the gate of TP16 and TP8 in one product


def inputs(
    rows: int, heads: int, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """latents (the output gate behind them, one product), query norm, kv norm, query up, key half of kv_b."""
    import torch

    generator = generator_on(device, seed)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    kv_up = (values(heads, 2 * NOPE, LATENT) / math.sqrt(NOPE)).bfloat16()
    return (
        values(rows, MERGED_WIDTH.get(heads, 2112)).bfloat16(),
        (1 + values(QUERY_LATENT) / 10).bfloat16(),
        (1 + values(LATENT) / 10).bfloat16(),
        (values(heads * (NOPE + EXTRA), QUERY_LATENT) / math.sqrt(QUERY_LATENT)).bfloat16(),
        kv_up[:, :NOPE],
    )


def work_of(heads: int, rows: int, *, fp8: bool) -> Work:
    q_b = heads * (NOPE + EXTRA)
    weights = [
        Weight(region="q_b", num_outputs=q_b, depth=QUERY_LATENT, num_bytes=q_b * QUERY_LATENT * BF16_BYTES),
        Weight(region="w_uk", num_outputs=heads * LATENT, depth=NOPE, num_bytes=heads * LATENT * NOPE * BF16_BYTES),
    ]
    return fused(weights, rows=rows, heads=heads, kv_row_bytes=ROW * (1 if fp8 else 2))


def _cache(fp8: bool, device: str) -> torch.Tensor:
    import torch

    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    return torch.zeros(NUM_PAGES, PAGE_TOKENS, ROW, device=device).to(dtype)


def _problem(heads: int, rows: int, fp8: bool) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.mla_prep import launch, reference

        given = inputs(rows, heads, device, seed)
        cache = _cache(fp8, device)
        slots = torch.randperm(NUM_PAGES * PAGE_TOKENS, generator=generator_on(device, seed), device=device)[:rows]
        if rows > 1:
            slots[1] = -1
        query = torch.empty(rows, heads, ROW, dtype=torch.bfloat16, device=device)

        def expected() -> Sequence[torch.Tensor]:
            ref = reference.mla_prep(given[0][:, : QUERY_LATENT + ROW], *given[1:], carry=torch.bfloat16)
            rows_of_cache = torch.full((NUM_PAGES * PAGE_TOKENS, ROW), math.nan, device=device)
            written = slots >= 0
            rows_of_cache[slots[written]] = ref.row_BD[written]
            return ref.query_BHD, rows_of_cache.view(cache.shape)

        return Problem(
            outputs=[
                Output(name="query", tensor=query, judge=within("bf16_activation")),
                Output(name="cache", tensor=cache, judge=within("cache_fp8" if fp8 else "cache_bf16")),
            ],
            launch=lambda: launch.mla_prep(*given, slots, query, cache),
            reference=expected,
        )

    return make


def _timed(heads: int, rows: int, fp8: bool) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.mla_prep import launch
        from k3sim.kernels.skinny_gemv.cases import cublas_calls, weights

        generator = generator_on(device, seed)
        latents, query_norm, kv_norm, _, _ = inputs(rows, heads, device, seed)
        copies = num_copies(work_of(heads, rows, fp8=fp8).read_bytes(), l2_bytes)
        query_up = weights(copies, heads * (NOPE + EXTRA), QUERY_LATENT, generator)
        key_up = normal((copies, heads, NOPE, LATENT), generator, scale=NOPE**-0.5)
        cache = _cache(fp8, device)
        slots = torch.arange(rows, device=device) * 16
        query = torch.empty(rows, heads, ROW, dtype=torch.bfloat16, device=device)

        def call(up: torch.Tensor, key: torch.Tensor) -> Call:
            return lambda: launch.mla_prep(latents, query_norm, kv_norm, up, key, slots, query, cache)

        return Timed(
            calls=[call(*one) for one in zip(query_up, key_up, strict=True)],
            peers={"cuBLAS, q_b alone": lambda: cublas_calls(latents[:, :QUERY_LATENT].contiguous(), query_up)},
        )

    return make


def cases() -> list[Case]:
    return [
        Case(
            operator="mla_prep", name=f"{heads} heads, {rows_in_words(rows)}, {'fp8' if fp8 else 'bf16'} cache",
            rows=rows, works=(work_of(heads, rows, fp8=fp8),), num_bytes=8 * heads * (NOPE + EXTRA) * QUERY_LATENT,
            problem=_problem(heads, rows, fp8),
            timed=_timed(heads, rows, fp8) if (heads, rows, fp8) in TIMED else None,
        )
        for heads, rows, fp8 in (*TIMED, *CHECKED)
    ]
