"""Cases of ``unfused``: the stock path's separate kernels at the shapes of TP8 and TP16.

Those between ranks are in ``exchange_cases.py``, the KDA step in three in ``recurrence_cases.py``. All here are timed
with their operands in L2: activations were just written, and norm weights of 4 to 14 KB would take more calls still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.bench import MIN_COPIES
from k3sim.kernels.harness.cases import Call, Case, MakeProblem, MakeTimed, Output, Problem, Timed, case_of_rows
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.kda_decode.cases import D
from k3sim.kernels.mla_prep.cases import MERGED_WIDTH
from k3sim.kernels.unfused import cost
from k3sim.kernels.unfused.exchange_cases import HIDDEN, RANKS, exchange_cases
from k3sim.kernels.unfused.recurrence_cases import HEADS, recurrence_cases

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict


QUERY_LATENT, LATENT, EXTRA = 1536, 512, 64
ROW = LATENT + EXTRA
PAGE_TOKENS = 64
CANDIDATES = 64
SITU_WIDTHS = (384, 768, 2112, 4224)  # shared experts, then the dense layer, of TP16 and TP8
# Pages of a row while ``advance`` is timed, which moves on one token a call: for four million calls.
TIMED_PAGES = 1 << 16


# -- row by row ---------------------------------------------------------------------------------------------------


def _norm_parts(widths: Sequence[int], rows: int, device: str, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """x, weight, out of each width; two parts lie side by side in rows of one product, as latents do."""
    import torch

    generator = generator_on(device, seed)
    columns = widths[0] if len(widths) == 1 else MERGED_WIDTH[12]
    wide = normal((rows, columns), generator)
    weights = [1 + normal((width,), generator, scale=0.25) for width in widths]
    outs = [torch.empty(rows, width, dtype=torch.bfloat16, device=device) for width in widths]
    return list(zip(wide[:, : sum(widths)].split(list(widths), dim=-1), weights, outs, strict=True))


def _norm_problem(widths: Sequence[int], rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        from k3sim.kernels.unfused import launch, reference

        parts: Any = _norm_parts(widths, rows, device, seed)
        return Problem(
            outputs=[Output(name=f"out of {o.shape[1]}", tensor=o, judge=within("bf16_activation")) for *_, o in parts],
            launch=lambda: launch.norm(parts, pdl=True),
            reference=lambda: [reference.rms_norm(x, weight) for x, weight, _ in parts],
        )

    return make


def _norm_timed(widths: Sequence[int], rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        from k3sim.kernels.unfused import launch

        parts: Any = _norm_parts(widths, rows, device, seed)
        return Timed(calls=[lambda: launch.norm(parts, pdl=True)] * MIN_COPIES)

    return make


def _elementwise(kernel: str, width: int, rows: int, device: str, seed: int) -> tuple[Call, torch.Tensor, Call]:
    """The call, its output and the reference, on rows that are parts of wider ones."""
    import torch

    from k3sim.kernels.unfused import launch, reference

    generator = generator_on(device, seed)
    wide = normal((rows, 2 * width + 64), generator, scale=4.0)
    wide[0, :4] = torch.tensor([-200.0, 200.0, 3e38, -3e38])
    out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)
    if kernel == "situ":
        gate_up = wide[:, : 2 * width]
        return lambda: launch.situ(gate_up, out, pdl=True), out, lambda: reference.situ(gate_up)
    value, gate = normal((rows, width), generator), wide[:, :width]
    return (
        lambda: launch.gate_multiply(value, gate, out, pdl=True),
        out,
        lambda: reference.gate_multiply(value, gate),
    )


def _elementwise_problem(kernel: str, width: int, rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        call, out, expected = _elementwise(kernel, width, rows, device, seed)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=within("bf16_activation"))],
            launch=call,
            reference=lambda: (expected(),),  # type: ignore[arg-type, return-value]
        )

    return make


def _elementwise_timed(kernel: str, width: int, rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        return Timed(calls=[_elementwise(kernel, width, rows, device, seed)[0]] * MIN_COPIES)

    return make


def query_inputs(
    rows: int, heads: int, dtype: torch.dtype, num_pages: int, *, device: str = "cpu", seed: int = 0
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """absorbed, extra, latent and latent_extra; a cache of random rows; one latent value is beyond e4m3."""
    generator = generator_on(device, seed)
    absorbed = normal((heads, rows, LATENT), generator).transpose(0, 1)  # as a batched product leaves it
    extra = normal((rows, heads, 128 + EXTRA), generator)[..., 128:]
    latents = normal((rows, MERGED_WIDTH[12]), generator)
    latents[0, QUERY_LATENT + 4] = 1000.0
    cache = normal((num_pages, PAGE_TOKENS, ROW), generator).to(dtype)
    latent, latent_extra = latents[:, QUERY_LATENT : QUERY_LATENT + ROW].split([LATENT, EXTRA], dim=-1)
    return (absorbed, extra, latent, latent_extra), cache


def _cache_dtype(fp8: bool) -> torch.dtype:
    import torch

    return torch.float8_e4m3fn if fp8 else torch.bfloat16


def _query_problem(heads: int, rows: int, fp8: bool) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import launch, reference

        operands, cache = query_inputs(rows, heads, _cache_dtype(fp8), 4, device=device, seed=seed)
        start = cache.clone()
        slots = torch.randperm(4 * PAGE_TOKENS, generator=generator_on(device, seed), device=device)[:rows]
        if rows > 1:
            slots[1] = -1
        query = torch.empty(rows, heads, ROW, dtype=torch.bfloat16, device=device)

        def expected() -> Sequence[torch.Tensor]:
            after = start.clone()
            return reference.query_and_cache(*operands, slots, after), after.view(torch.uint8)

        return Problem(
            outputs=[
                Output(name="query", tensor=query, judge=exactly()),
                # As bytes: also that no other row was written.
                Output(name="cache", tensor=cache.view(torch.uint8), judge=exactly(), in_place=True),
            ],
            launch=lambda: launch.query_and_cache(*operands, slots, query, cache, pdl=True),
            reference=expected,
        )

    return make


def _query_timed(heads: int, rows: int, fp8: bool) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.unfused import launch

        num_pages = -(-MIN_COPIES * rows // PAGE_TOKENS)
        operands, cache = query_inputs(rows, heads, _cache_dtype(fp8), num_pages, device=device, seed=seed)
        order = torch.randperm(num_pages * PAGE_TOKENS, generator=generator_on(device, seed), device=device)
        query = torch.empty(rows, heads, ROW, dtype=torch.bfloat16, device=device)

        def call(slots: torch.Tensor) -> Call:
            return lambda: launch.query_and_cache(*operands, slots, query, cache, pdl=True)

        return Timed(calls=[call(one) for one in order[: MIN_COPIES * rows].view(MIN_COPIES, rows)])

    return make


# -- end of a step ------------------------------------------------------------------------------------------------


def candidates(ranks: int, rows: int, seed: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's 64 of 1000 in falling order, equal values by rising id, as ``lm_head`` leaves them; many are equal.

    Values fp32 and ids int32, both [ranks, rows, 64].
    """
    import torch

    drawn = normal((ranks, rows, 1000), generator_on("cpu", seed), scale=3.0, dtype=torch.float32)
    values = (drawn * 4).round() / 4
    order = values.sort(dim=-1, descending=True, stable=True).indices[..., :CANDIDATES]
    ids = order + 1000 * torch.arange(ranks)[:, None, None]
    return values.gather(-1, order).contiguous().to(device), ids.int().contiguous().to(device)


def _drawing(rows: int, device: str, seed: int) -> dict[str, torch.Tensor]:
    """Temperatures to 2, shares and uniform numbers; of more than two rows the second is greedy by temperature."""
    import torch

    generator = generator_on(device, seed)
    temperature, top_p, uniform = (torch.rand(rows, generator=generator, device=device) for _ in range(3))
    temperature *= 2
    if rows > 2:
        temperature[1] = 0
    return dict(temperature=temperature, top_p=top_p, uniform=uniform)


def _sample_problem(ranks: int, rows: int, draw: bool) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.harness.tolerance import Verdict
        from k3sim.kernels.unfused import launch, reference

        values, ids = candidates(ranks, rows, seed, device)
        tokens = torch.empty(rows, dtype=torch.int32, device=device)
        drawing = _drawing(rows, device, seed) if draw else {}

        def expected() -> Sequence[torch.Tensor]:
            if not draw:
                return (reference.greedy(values, ids),)
            best = reference.distribution(values, ids, drawing["temperature"], drawing["top_p"])
            return (reference.draw(*best, drawing["uniform"]),)

        def judge(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            # Where the uniform number falls within rounding of a boundary, either side is right.
            best, probabilities = reference.distribution(values, ids, drawing["temperature"], drawing["top_p"])
            sums = probabilities.cumsum(-1)
            at = best == found[:, None]
            low = torch.where(at, sums - probabilities, 2.0).amin(-1) - 1e-5
            high = torch.where(at, sums, -1.0).amax(-1) + 1e-5
            wrong = int((~((low <= drawing["uniform"]) & (drawing["uniform"] <= high))).sum())
            line = f"{name}: {wrong} of {rows} drawn outside their share"
            return Verdict(accepted=wrong == 0, line=line, error=float(wrong), bound=0.0)

        return Problem(
            outputs=[Output(name="tokens", tensor=tokens, judge=judge if draw else exactly())],
            launch=lambda: launch.sample(values, ids, tokens, **drawing, pdl=True),
            reference=expected,
        )

    return make


def _sample_timed(ranks: int, rows: int, draw: bool) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.unfused import launch

        values, ids = candidates(ranks, rows, seed, device)
        tokens = torch.empty(rows, dtype=torch.int32, device=device)
        drawing = _drawing(rows, device, seed) if draw else {}
        return Timed(calls=[lambda: launch.sample(values, ids, tokens, **drawing, pdl=True)] * MIN_COPIES)

    return make


def _advance_problem(rows: int) -> MakeProblem:
    """Lengths at the end of a page and before it; of several rows one is padding and the last has used up its pages."""

    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import launch, reference

        generator = generator_on(device, seed)
        pages = torch.randperm(9 * rows, generator=generator, device=device).int().view(rows, 9)[:, :8]
        lengths = torch.arange(rows, dtype=torch.int32, device=device) * 21 + PAGE_TOKENS - 1
        slots = torch.arange(rows, device=device)
        if rows > 2:
            slots[2] = -1
            lengths[1] = PAGE_TOKENS
            lengths[-1] = 8 * PAGE_TOKENS
        start = lengths.clone(), slots.clone()

        def expected() -> Sequence[torch.Tensor]:
            new_lengths, new_slots = (one.clone() for one in start)
            reference.advance(new_lengths, pages, new_slots)
            return new_lengths, new_slots

        return Problem(
            outputs=[
                Output(name="num_tokens", tensor=lengths, judge=exactly(), in_place=True),
                Output(name="slots", tensor=slots, judge=exactly(), in_place=True),
            ],
            launch=lambda: launch.advance(lengths, pages, slots, pdl=True),
            reference=expected,
        )

    return make


def _advance_timed(rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.unfused import launch

        pages = torch.arange(TIMED_PAGES, dtype=torch.int32, device=device).repeat(rows, 1)
        lengths = torch.ones(rows, dtype=torch.int32, device=device)
        slots = torch.zeros(rows, dtype=torch.int64, device=device)
        return Timed(calls=[lambda: launch.advance(lengths, pages, slots, pdl=True)] * MIN_COPIES)

    return make


# -- all of them --------------------------------------------------------------------------------------------------


def _row_cases() -> list[Case]:
    found = []
    for widths in ((QUERY_LATENT, LATENT), (HIDDEN,)):
        for rows in (1, 16):
            work = cost.norm((), rows=rows, width=sum(widths))
            name = f"norm of {' and '.join(str(one) for one in widths)}"
            checked, timed = _norm_problem(widths, rows), _norm_timed(widths, rows)
            found.append(case_of_rows("unfused", name, rows, [work], 8 * rows * HIDDEN, checked, timed))
    for kernel, columns in (("situ", SITU_WIDTHS), ("gate_multiply", tuple(heads * D for heads in HEADS))):
        for width in columns:
            for rows in (1, 8):
                work = cost.elementwise((), rows=rows, width=width)
                checked, timed = _elementwise_problem(kernel, width, rows), _elementwise_timed(kernel, width, rows)
                found.append(
                    case_of_rows("unfused", f"{kernel} of {width}", rows, [work], 10 * rows * width, checked, timed)
                )
    for heads in HEADS:
        for rows, fp8 in ((1, True), (8, True), (3, False)):
            work = cost.query_and_cache((), rows=rows, heads=heads, kv_row_bytes=ROW * (1 if fp8 else 2))
            name = f"query_and_cache, {heads} heads, {'fp8' if fp8 else 'bf16'}"
            num_bytes = 16 * PAGE_TOKENS * ROW + 8 * rows * heads * ROW
            fp8_only = _query_timed(heads, rows, fp8) if fp8 else None
            found.append(
                case_of_rows("unfused", name, rows, [work], num_bytes, _query_problem(heads, rows, fp8), fp8_only)
            )
    return found


def _step_cases() -> list[Case]:
    found = []
    for rows in (1, 16):
        for ranks in RANKS:
            for draw in (False, True):
                work = cost.sample((), rows=rows, ranks=ranks)
                name = f"sample, {'drawn' if draw else 'greedy'}, {ranks} ranks"
                checked, timed = _sample_problem(ranks, rows, draw), _sample_timed(ranks, rows, draw)
                found.append(case_of_rows("unfused", name, rows, [work], 16_000 * ranks * rows, checked, timed))
        work = cost.advance((), rows=rows)
        found.append(
            case_of_rows("unfused", "advance", rows, [work], 100 * rows, _advance_problem(rows), _advance_timed(rows))
        )
    return found


def cases() -> list[Case]:
    return [*exchange_cases(), *recurrence_cases(), *_row_cases(), *_step_cases()]
