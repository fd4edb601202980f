"""Cases of ``unfused``: the stock path's separate kernels at the shapes of TP8 and TP16.

The three kernels of a KDA step are one case, on cold states and taps; FLA's chain stands beside it. ``all_reduce``
sends to as many slots of this GPU as there are ranks, so all of them hold the same row: what differs from rank to rank
is in the tests, on a stream a rank. ``embedding`` is timed on rows from HBM, which takes thousands of calls a round at
one row. All else is timed with its operands in L2: activations were just written, and norm weights of 4 to 14 KB would
take more calls still.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import (
    Call,
    Case,
    Output,
    Problem,
    Timed,
    exactly,
    generator_on,
    normal,
    rows_in_words,
    within,
)
from k3sim.kernels.kda_decode.cases import CONV_WIDTH, D, fla_calls, judge_state
from k3sim.kernels.kda_decode.cases import inputs as kda_decode_inputs
from k3sim.kernels.mla_prep.cases import MERGED_WIDTH
from k3sim.kernels.unfused import cost
from k3sim.kernels.work import Work

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict

    MakeProblem = Callable[[str, int], Problem]
    MakeTimed = Callable[[str, int, int], Timed]

HIDDEN = 7168
QUERY_LATENT, LATENT, EXTRA = 1536, 512, 64
ROW = LATENT + EXTRA
PAGE_TOKENS = 64
CANDIDATES = 64
RANKS = (8, 16)
HEADS = (6, 12)
SITU_WIDTHS = (384, 768, 2112, 4224)  # shared experts, then the dense layer, of TP16 and TP8
CHECKED_IDS = 1000
# Pages of a row while ``advance`` is timed, which moves on one token a call: for four million calls.
TIMED_PAGES = 1 << 16


# -- between ranks ------------------------------------------------------------------------------------------------


def _lookup(rows: int, first_id: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids at and beyond both ends of this rank's, padding among them; the table [1000, 7168]."""
    import torch

    table = normal((CHECKED_IDS, HIDDEN), generator_on(device, seed))
    last = first_id + CHECKED_IDS - 1
    ends = [last, first_id, first_id - 1, last + 1, -1, 2**31 - 1]
    ids = torch.tensor((ends + [first_id + 300] * rows)[:rows], dtype=torch.int32, device=device)
    return ids, table


def _embedding_problem(rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import launch, reference

        ids, table = _lookup(rows, 700, device, seed)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=exactly())],
            launch=lambda: launch.embedding(ids, table, out, first_id=700, pdl=True),
            reference=lambda: (reference.embedding(ids, table, first_id=700),),
        )

    return make


def _embedding_timed(rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.unfused import launch

        generator = generator_on(device, seed)
        copies = num_copies(rows * HIDDEN * 2, l2_bytes)
        table = normal((copies * rows, HIDDEN), generator)
        order = torch.randperm(copies * rows, generator=generator, device=device).int().view(copies, rows)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        return Timed(
            calls=[lambda ids=ids: launch.embedding(ids, table, out, pdl=True) for ids in order]  # type: ignore[misc]
        )

    return make


def _push_problem(ranks: int, rows: int) -> MakeProblem:
    """The rank that has all ids but those beyond the vocabulary, which nobody stores."""

    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import launch, reference

        table = normal((CHECKED_IDS, HIDDEN), generator_on(device, seed))
        ids = torch.tensor(([CHECKED_IDS - 1, -1, 0] + [300] * rows)[:rows], dtype=torch.int32, device=device)
        inboxes = torch.empty(ranks, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        peers = torch.tensor([one.data_ptr() for one in inboxes], dtype=torch.int64, device=device)
        return Problem(
            outputs=[Output(name="inboxes", tensor=inboxes, judge=exactly())],
            launch=lambda: launch.embedding_push(ids, table, peers, first_id=0, pdl=True),
            reference=lambda: (reference.embedding(ids, table, first_id=0).expand(ranks, -1, -1),),
        )

    return make


def _looped_all_reduce(ranks: int, rows: int, x: torch.Tensor, out: torch.Tensor) -> tuple[Call, Any]:
    """A call of rank 1 whose peers' slots are its own, and what must stay alive for it."""
    import torch

    from k3sim.kernels.proj_allreduce.launch import make_receive_buffers
    from k3sim.kernels.unfused import launch

    buffers = make_receive_buffers(ranks=ranks, device=x.device)
    slot_bytes = buffers.received[0, 0].numel() * buffers.received.element_size()
    # It stores at slot 1 of the address of peer p, which is to be slot p.
    offsets = torch.arange(ranks, dtype=torch.int64, device=x.device) - 1
    peers = buffers.received.data_ptr() + offsets * slot_bytes
    return lambda: launch.all_reduce(x, out, peers, buffers, rank=1, pdl=True), (buffers, peers)


def _all_reduce_problem(ranks: int, rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import reference

        x = normal((rows, HIDDEN), generator_on(device, seed))
        x[:, 5] = -0.0  # must travel as +0
        x[:, 6] = 1e-39  # and a subnormal as itself
        out = torch.empty_like(x)
        call, _ = _looped_all_reduce(ranks, rows, x, out)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=exactly())],
            launch=call,
            reference=lambda: (reference.all_reduce(x.expand(ranks, -1, -1)),),
        )

    return make


def _all_reduce_timed(ranks: int, rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        x = normal((rows, HIDDEN), generator_on(device, seed))
        call, keep = _looped_all_reduce(ranks, rows, x, torch.empty_like(x))
        return Timed(calls=[call] * MIN_COPIES, keep=keep)

    return make


# -- a KDA step in three ------------------------------------------------------------------------------------------


def kda_inputs(
    *,
    rows: int,
    heads: int,
    num_slots: int,
    state_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    slots: Sequence[int] | None = None,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of ``kda_decode`` and the logits of its decay gate, fp32 [rows, heads 128]."""
    import torch

    arguments = kda_decode_inputs(
        rows=rows,
        heads=heads,
        num_slots=num_slots,
        state_dtype=state_dtype,
        device=device,
        seed=seed,
        slots=None if slots is None else torch.tensor(slots, device=device),
    )
    low_rank = arguments["projected"][:, 4 * heads * D : 4 * heads * D + D].float()
    return arguments, low_rank @ arguments["gate_weight"].float().T


def chain_call(
    a: dict[str, torch.Tensor],
    decay_logits: torch.Tensor,
    convolved: torch.Tensor,
    read_out: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: int,
    pdl: bool = True,
) -> Call:
    """``conv_update``, ``recurrent_update``, ``gated_norm`` on ``a``, the arguments of ``kda_decode``."""
    from k3sim.kernels.unfused import launch

    def step() -> None:
        launch.conv_update(
            a["projected"], a["conv_weight"], a["slots"], a["conv_state"], convolved, heads=heads, pdl=pdl
        )
        launch.recurrent_update(
            convolved, decay_logits, a["projected"], a["dt_bias"], a["a_log"], a["slots"], a["state"], read_out, pdl=pdl
        )
        launch.gated_norm(read_out, a["projected"], a["norm_weight"], out, heads=heads, pdl=pdl)

    return step


def _chain_outputs(rows: int, heads: int, device: str) -> list[torch.Tensor]:
    """convolved, read_out, out."""
    import torch

    widths = (3 * heads * D, heads * D, heads * D)
    return [torch.empty(rows, width, dtype=torch.bfloat16, device=device) for width in widths]


def _chain_problem(heads: int, rows: int) -> MakeProblem:
    """Every kernel is judged on what the kernel before it really gave.

    A bf16 value next to a rounding boundary may land one unit away, which a chain of references would take for an error
    of the state.
    """

    def make(device: str, seed: int) -> Problem:

        from k3sim.kernels.unfused import reference

        arguments, logits = kda_inputs(rows=rows, heads=heads, num_slots=rows + 3, device=device, seed=seed)
        logits = logits.bfloat16()
        start = {name: arguments[name].clone() for name in ("conv_state", "state")}
        convolved, read_out, out = _chain_outputs(rows, heads, device)
        projected, slots = arguments["projected"], arguments["slots"]

        def recurrence(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            state = start["state"].clone()
            read = reference.recurrent_update(
                given, logits, projected, arguments["dt_bias"], arguments["a_log"], slots, state
            )
            return read, state

        def expected() -> Sequence[torch.Tensor]:
            conv_state = start["conv_state"].clone()
            first = reference.conv_update(projected, arguments["conv_weight"], slots, conv_state)
            read, state = recurrence(first.bfloat16())
            last = reference.gated_norm(read.bfloat16(), projected, arguments["norm_weight"])
            return first, read, last, state, conv_state

        def judge_read(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            if bool(convolved.isfinite().all()):
                ref = recurrence(convolved)[0]
            return within("bf16_activation")(found, ref, name)

        def judge_out(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            if bool(read_out.isfinite().all()):
                ref = reference.gated_norm(read_out, projected, arguments["norm_weight"])
            return within("bf16_activation")(found, ref, name)

        judge_states = judge_state("kda_state_fp32", slots, start["state"])

        def judge_new_state(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            if bool(convolved.isfinite().all()):
                ref = recurrence(convolved)[1]
            return judge_states(found, ref, name)

        return Problem(
            outputs=[
                Output(name="convolved", tensor=convolved, judge=within("bf16_activation")),
                Output(name="read_out", tensor=read_out, judge=judge_read),
                Output(name="out", tensor=out, judge=judge_out),
                Output(name="state", tensor=arguments["state"], judge=judge_new_state, in_place=True),
                Output(name="conv_state", tensor=arguments["conv_state"], judge=exactly(), in_place=True),
            ],
            launch=chain_call(arguments, logits, convolved, read_out, out, heads=heads),
            reference=expected,
        )

    return make


def _chain_timed(heads: int, rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        generator, width = generator_on(device, seed), heads * D
        copies = num_copies(rows * width * D * 4, l2_bytes)
        arguments, logits = kda_inputs(rows=rows, heads=heads, num_slots=copies * rows + 1, device=device, seed=seed)
        logits = logits.bfloat16()
        order = torch.randperm(copies * rows, generator=generator, device=device) + 1
        slots = order.int().view(copies, rows)
        conv_weights = normal((copies, 3 * width, CONV_WIDTH), generator, scale=0.5, dtype=torch.float32)
        outputs = _chain_outputs(rows, heads, device)
        return Timed(
            calls=[
                chain_call({**arguments, "conv_weight": taps, "slots": own}, logits, *outputs, heads=heads)
                for taps, own in zip(conv_weights, slots, strict=True)
            ],
            peers={"FLA chain": lambda: fla_calls(arguments, conv_weights, slots, heads)},
        )

    return make


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


def _case(
    name: str, rows: int, works: Sequence[Work], num_bytes: int, problem: MakeProblem, timed: MakeTimed | None
) -> Case:
    return Case(
        operator="unfused",
        name=f"{name}, {rows_in_words(rows)}",
        rows=rows,
        works=tuple(works),
        num_bytes=num_bytes,
        problem=problem,
        timed=timed,
    )


def _exchange_cases() -> list[Case]:
    found = []
    for rows in (1, 8):
        work = cost.embedding((), rows=rows, hidden=HIDDEN)
        timed = _embedding_timed(rows) if rows == 1 else None
        table_bytes = 2 * CHECKED_IDS * HIDDEN
        found.append(_case("embedding", rows, [work], table_bytes, _embedding_problem(rows), timed))
        for ranks in RANKS:
            name = f"embedding_push to {ranks} buffers of this GPU"
            found.append(_case(name, rows, [work], table_bytes, _push_problem(ranks, rows), None))
    for ranks in RANKS:
        for rows in (1, 16):
            work = cost.all_reduce((), rows=rows, hidden=HIDDEN, ranks=ranks)
            name, buffer_bytes = f"all_reduce, {ranks} slots of this GPU", 6 * ranks * 16 * HIDDEN
            checked, timed = _all_reduce_problem(ranks, rows), _all_reduce_timed(ranks, rows)
            found.append(_case(name, rows, [work], buffer_bytes, checked, timed))
    return found


def _chain_cases() -> list[Case]:
    found = []
    for heads in HEADS:
        for rows in (1, 8):
            width = heads * D
            works = (
                cost.conv_update(
                    (), rows=rows, conv_state_bytes=3 * 3 * width * 2, conv_weight_bytes=3 * width * CONV_WIDTH * 4
                ),
                cost.recurrent_update((), rows=rows, heads=heads, state_bytes=width * D * 4),
                cost.gated_norm((), rows=rows, heads=heads, head_dim=D),
            )
            name, state_bytes = f"KDA step in three launches, {heads} heads", 3 * (rows + 3) * width * D * 4
            checked, timed = _chain_problem(heads, rows), _chain_timed(heads, rows)
            found.append(_case(name, rows, works, state_bytes, checked, timed))
    return found


def _row_cases() -> list[Case]:
    found = []
    for widths in ((QUERY_LATENT, LATENT), (HIDDEN,)):
        for rows in (1, 16):
            work = cost.norm((), rows=rows, width=sum(widths))
            name = f"norm of {' and '.join(str(one) for one in widths)}"
            checked, timed = _norm_problem(widths, rows), _norm_timed(widths, rows)
            found.append(_case(name, rows, [work], 8 * rows * HIDDEN, checked, timed))
    for kernel, columns in (("situ", SITU_WIDTHS), ("gate_multiply", tuple(heads * D for heads in HEADS))):
        for width in columns:
            for rows in (1, 8):
                work = cost.elementwise((), rows=rows, width=width)
                checked, timed = _elementwise_problem(kernel, width, rows), _elementwise_timed(kernel, width, rows)
                found.append(_case(f"{kernel} of {width}", rows, [work], 10 * rows * width, checked, timed))
    for heads in HEADS:
        for rows, fp8 in ((1, True), (8, True), (3, False)):
            work = cost.query_and_cache((), rows=rows, heads=heads, kv_row_bytes=ROW * (1 if fp8 else 2))
            name = f"query_and_cache, {heads} heads, {'fp8' if fp8 else 'bf16'}"
            num_bytes = 16 * PAGE_TOKENS * ROW + 8 * rows * heads * ROW
            fp8_only = _query_timed(heads, rows, fp8) if fp8 else None
            found.append(_case(name, rows, [work], num_bytes, _query_problem(heads, rows, fp8), fp8_only))
    return found


def _step_cases() -> list[Case]:
    found = []
    for rows in (1, 16):
        for ranks in RANKS:
            for draw in (False, True):
                work = cost.sample((), rows=rows, ranks=ranks)
                name = f"sample, {'drawn' if draw else 'greedy'}, {ranks} ranks"
                checked, timed = _sample_problem(ranks, rows, draw), _sample_timed(ranks, rows, draw)
                found.append(_case(name, rows, [work], 16_000 * ranks * rows, checked, timed))
        work = cost.advance((), rows=rows)
        found.append(_case("advance", rows, [work], 100 * rows, _advance_problem(rows), _advance_timed(rows)))
    return found


def cases() -> list[Case]:
    return [*_exchange_cases(), *_chain_cases(), *_row_cases(), *_step_cases()]
