"""Cases of a KDA step in three kernels: one case, on cold states and taps; FLA's chain stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, MakeProblem, MakeTimed, Output, Problem, Timed, case_of_rows
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.kda_decode.cases import CONV_WIDTH, D, fla_calls, judge_state
from k3sim.kernels.kda_decode.cases import inputs as kda_decode_inputs
from k3sim.kernels.unfused import cost

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict

HEADS = (6, 12)


def kda_inputs(
    *, heads: int, slots: Sequence[int] | None = None, device: str = "cpu", **options: Any
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of ``kda_decode``, of which ``options`` are, and its decay gate's logits, fp32 [rows, heads 128]."""
    import torch

    chosen = None if slots is None else torch.tensor(slots, device=device)
    arguments = kda_decode_inputs(heads=heads, slots=chosen, device=device, **options)
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
    from k3sim.kernels.unfused import recurrence_launch

    def step() -> None:
        recurrence_launch.conv_update(
            a["projected"], a["conv_weight"], a["slots"], a["conv_state"], convolved, heads=heads, pdl=pdl
        )
        recurrence_launch.recurrent_update(
            convolved, decay_logits, a["projected"], a["dt_bias"], a["a_log"], a["slots"], a["state"], read_out, pdl=pdl
        )
        recurrence_launch.gated_norm(read_out, a["projected"], a["norm_weight"], out, heads=heads, pdl=pdl)

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


def recurrence_cases() -> list[Case]:
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
            found.append(case_of_rows("unfused", name, rows, works, state_bytes, checked, timed))
    return found
