"""Cases of ``mla_decode``: fp8 and bf16 caches, 1 to 131,072 tokens, 6 to 96 heads; the merge over ranks; the lift."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import within
from k3sim.kernels.mla_decode import cost, public
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

PAGE_TOKENS = 64
ROW, LATENT = 576, 512
SOFTMAX_SCALE = 192**-0.5
# heads, cached tokens of each row, fp8; the first ones are timed too.
TIMED = (
    (12, (8192,), True), (6, (8192,), True), (12, (131072,), True), (6, (131072,), True), (12, (8192,), False),
    (12, (131072,), False), (12, (8192,) * 8, True),
)  # fmt: skip
CHECKED = (
    (12, (1,), True), (12, (63,), True), (12, (64,), False), (12, (65,), True), (12, (0, 70, 5000), True),
    (12, (0, 70, 5000), False), (12, (9000,) * 5 + (3,) * 11, True), (24, (513, 8000), True), (48, (700, 1), True),
    (96, (700,), True), (96, (8192,), False),
)  # fmt: skip
MERGES = ((8, 1, 12), (16, 1, 6), (8, 16, 12))
VALUES = 128  # of a head, after W_UV
LIFTS = ((6, 1), (12, 1), (6, 16), (12, 16))  # heads, rows


def paged_inputs(
    heads: int,
    lengths: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    device: str = "cpu",
    pages_in_cache: int = 64,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query, cache, page table, lengths; what no row may read is NaN in the cache and far outside it in the table."""
    import torch

    dtype = dtype or torch.bfloat16
    generator = generator_on(device, seed)
    cache = torch.randn(pages_in_cache, PAGE_TOKENS, ROW, generator=generator, device=device).to(dtype)
    query = torch.randn(len(lengths), heads, ROW, generator=generator, device=device).bfloat16()
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    order = torch.randperm(pages_in_cache, generator=torch.Generator().manual_seed(seed))[: sum(counts)]
    pages = torch.full((len(lengths), max([*counts, 1]) + 1), 2**30, dtype=torch.int32)
    unused = torch.ones(pages_in_cache, PAGE_TOKENS, dtype=torch.bool)
    first = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        mine = order[first : first + count]
        pages[row, :count] = mine.int()
        unused[mine] = torch.arange(count * PAGE_TOKENS).reshape(count, PAGE_TOKENS) >= length
        first += count
    cache.view(torch.uint8)[unused.to(device)] = 0x7F if dtype == torch.float8_e4m3fn else 0xFF
    return query, cache, pages.to(device), torch.tensor(lengths, dtype=torch.int32, device=device)


def _dtype(fp8: bool) -> torch.dtype:
    import torch

    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def _num_pages(lengths: Sequence[int]) -> int:
    return sum(-(-length // PAGE_TOKENS) for length in lengths)


def _problem(heads: int, lengths: Sequence[int], fp8: bool) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.mla_decode import launch, reference

        given = paged_inputs(
            heads, lengths, _dtype(fp8), device=device, pages_in_cache=_num_pages(lengths) + 8, seed=seed
        )
        rows = len(lengths)
        out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=device)
        log_sum_exp = torch.empty(rows, heads, device=device)
        workspace = launch.make_workspace(heads=heads, max_rows=rows, device=device)

        def expected() -> Sequence[torch.Tensor]:
            return reference.mla_decode(*given)

        return Problem(
            outputs=[
                Output(name="out", tensor=out, judge=within("attention_fp8" if fp8 else "attention_bf16")),
                Output(name="log_sum_exp", tensor=log_sum_exp, judge=within("log_sum_exp")),
            ],
            launch=lambda: launch.mla_decode(*given, out, log_sum_exp, workspace, settled_cache=True),
            reference=expected,
        )

    return make


def _timed(heads: int, lengths: Sequence[int], fp8: bool) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.mla_decode import launch

        generator, dtype = generator_on(device, seed), _dtype(fp8)
        rows, pages = len(lengths), lengths[0] // PAGE_TOKENS
        copies = num_copies(rows * lengths[0] * ROW * dtype.itemsize, l2_bytes)
        cache = torch.empty(copies, rows * pages, PAGE_TOKENS, ROW, dtype=dtype, device=device)
        for one in cache:
            one.copy_(torch.randn(one.shape, generator=generator, device=device))
        flat = cache.view(-1, PAGE_TOKENS, ROW)
        order = torch.randperm(copies * rows * pages, generator=generator, device=device)
        tables = order.int().view(copies, rows, pages)
        query = normal((rows, heads, ROW), generator)
        num_tokens = torch.tensor(lengths, dtype=torch.int32, device=device)
        out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=device)
        log_sum_exp = torch.empty(rows, heads, device=device)
        workspace = launch.make_workspace(heads=heads, max_rows=rows, device=device)

        def call(table: torch.Tensor) -> Call:
            return lambda: launch.mla_decode(
                query, flat, table, num_tokens, out, log_sum_exp, workspace, settled_cache=True
            )

        peers = {}
        if not fp8:  # its kernels for Hopper take no fp8 cache
            peers["FlashInfer MLA"] = lambda: _flashinfer(query, cache, num_tokens)
        return Timed(calls=[call(one) for one in tables], peers=peers)

    return make


def _flashinfer(query: torch.Tensor, cache: torch.Tensor, num_tokens: torch.Tensor) -> list[Call]:
    """FlashInfer's paged MLA wrapper on each of ``cache`` [copies, pages, 64, 576], pages in random order."""
    import torch
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    rows, heads, _ = query.shape
    pages, device = cache.shape[1], cache.device
    workspace = torch.empty(128 << 20, dtype=torch.int8, device=device)
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    rows_up_to = torch.arange(rows + 1, dtype=torch.int32, device=device)
    wrapper.plan(
        rows_up_to,
        rows_up_to * (pages // rows),
        torch.randperm(pages, device=device).int(),
        num_tokens,
        heads,
        LATENT,
        ROW - LATENT,
        PAGE_TOKENS,
        False,
        SOFTMAX_SCALE,
        query.dtype,
        cache.dtype,
    )
    q_latent, q_extra = query[..., :LATENT].contiguous(), query[..., LATENT:].contiguous()
    out = torch.empty(rows, heads, LATENT, dtype=query.dtype, device=device)

    def call(own: torch.Tensor) -> Call:
        return lambda: wrapper.run(q_latent, q_extra, own[..., :LATENT], own[..., LATENT:], out=out)

    return [call(one) for one in cache]


def _merge_inputs(ranks: int, rows: int, heads: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs and their log-sum-exps; the last rank has no token for the first head, and NaN there."""
    import torch

    generator = generator_on(device, seed)
    outputs = normal((ranks, rows, heads, LATENT), generator)
    sums = normal((ranks, rows, heads), generator, scale=2.0, dtype=torch.float32)
    sums[-1, :, 0], outputs[-1, :, 0] = -math.inf, math.nan
    return outputs, sums


def _merge_problem(ranks: int, rows: int, heads: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.mla_decode import launch, reference

        outputs, sums = _merge_inputs(ranks, rows, heads, device, seed)
        out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=device)
        log_sum_exp = torch.empty(rows, heads, device=device)
        return Problem(
            outputs=[
                Output(name="out", tensor=out, judge=within("bf16_activation")),
                Output(name="log_sum_exp", tensor=log_sum_exp, judge=within("log_sum_exp")),
            ],
            launch=lambda: launch.lse_merge(outputs, sums, out, log_sum_exp),
            reference=lambda: reference.lse_merge(outputs, sums),
        )

    return make


def _merge_timed(ranks: int, rows: int, heads: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.mla_decode import launch

        outputs, sums = _merge_inputs(ranks, rows, heads, device, seed)
        out = torch.empty(rows, heads, LATENT, dtype=torch.bfloat16, device=device)
        return Timed(calls=[lambda: launch.lse_merge(outputs, sums, out)] * MIN_COPIES)

    return make


def _lift_inputs(rows: int, heads: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """latent [rows, heads, 512], and the output gate [rows, heads 128] as the last columns of a wider product."""
    generator = generator_on(device, seed)
    return (
        normal((rows, heads, LATENT), generator),
        normal((rows, 64 + heads * VALUES), generator)[:, 64:],
    )


def _lift_problem(heads: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.mla_decode import launch, reference

        latent, gate = _lift_inputs(rows, heads, device, seed)
        kv_up = normal((heads, 2 * VALUES, LATENT), generator_on(device, seed + 1), scale=LATENT**-0.5)
        value_up = kv_up[:, VALUES:]  # the value half
        out = torch.empty(rows, heads * VALUES, dtype=torch.bfloat16, device=device)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=within("bf16_activation"))],
            launch=lambda: launch.lift_gate(latent, value_up, gate, out, pdl=True),
            reference=lambda: (reference.lift_gate(latent, value_up, gate),),
        )

    return make


def _lift_timed(heads: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.mla_decode import launch

        latent, gate = _lift_inputs(rows, heads, device, seed)
        copies = num_copies(heads * VALUES * LATENT * 2, l2_bytes)
        weights = normal((copies, heads, VALUES, LATENT), generator_on(device, seed + 1), scale=LATENT**-0.5)
        out = torch.empty(rows, heads * VALUES, dtype=torch.bfloat16, device=device)

        def cublas() -> list[Call]:
            lifted = torch.empty(heads, rows, VALUES, dtype=torch.bfloat16, device=device)
            opened = torch.empty(rows, heads, VALUES, dtype=torch.bfloat16, device=device)
            by_head = latent.transpose(0, 1)

            def one(value_up: torch.Tensor) -> Call:
                def step() -> None:
                    torch.bmm(by_head, value_up.transpose(1, 2), out=lifted)
                    torch.sigmoid(gate.unflatten(1, (heads, VALUES)), out=opened)
                    torch.mul(lifted.transpose(0, 1), opened, out=out.view(rows, heads, VALUES))

                return step

            return [one(value_up) for value_up in weights]

        return Timed(
            calls=[lambda w=w: launch.lift_gate(latent, w, gate, out, pdl=True) for w in weights],  # type: ignore[misc]
            peers={"cuBLAS bmm, sigmoid and multiply of torch": cublas},
        )

    return make


def _name(heads: int, lengths: Sequence[int], fp8: bool) -> str:
    kind = "fp8" if fp8 else "bf16"
    alike = len(set(lengths)) == 1
    tokens = f"{lengths[0]}" if alike else "/".join(str(one) for one in sorted(set(lengths)))
    return f"{heads} heads, {tokens} tokens, {rows_in_words(len(lengths))}, {kind}"


def cases() -> list[Case]:
    found = []
    for heads, lengths, fp8 in (*TIMED, *CHECKED):
        # Rows of unequal length count with their mean.
        work = public.split_kv(
            (),
            rows=len(lengths),
            heads=heads,
            context=max(1, sum(lengths) // len(lengths)),
            kv_row_bytes=ROW * (1 if fp8 else 2),
            kv_lora_rank=LATENT,
        )
        found.append(
            Case(
                operator="mla_decode", name=_name(heads, lengths, fp8), rows=len(lengths), works=(work,),
                num_bytes=12 * PAGE_TOKENS * ROW * (_num_pages(lengths) + 8), problem=_problem(heads, lengths, fp8),
                timed=_timed(heads, lengths, fp8) if (heads, lengths, fp8) in TIMED else None,
            )
        )
    for ranks, rows, heads in MERGES:
        found.append(
            Case(
                operator="mla_decode", name=f"merge of {ranks} ranks, {heads} heads, {rows_in_words(rows)}",
                rows=rows, works=(cost.lse_merge((), rows=rows, heads=heads, ranks=ranks, kv_lora_rank=LATENT),),
                num_bytes=8 * ranks * rows * heads * LATENT, problem=_merge_problem(ranks, rows, heads),
                timed=_merge_timed(ranks, rows, heads),
            )
        )
    for heads, rows in LIFTS:
        num_outputs = heads * VALUES
        w_uv = Weight(region="w_uv", num_outputs=num_outputs, depth=LATENT, num_bytes=num_outputs * LATENT * 2)
        found.append(
            Case(
                operator="mla_decode", name=f"lift_gate, {heads} heads, {rows_in_words(rows)}", rows=rows,
                works=(cost.lift_gate([w_uv], rows=rows, kv_lora_rank=LATENT),), num_bytes=6 * w_uv.num_bytes,
                problem=_lift_problem(heads, rows), timed=_lift_timed(heads, rows),
            )
        )
    return found
