"""Cases of ``kda_decode``: heads of TP16 to TP1, both state types, 1 to 256 rows; FlashInfer and FLA beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.kda_decode.cost import cluster
from k3sim.kernels.work import Work
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.judges import Judge
    from k3sim.kernels.harness.tolerance import Verdict

D = 128
CONV_WIDTH = 4
CHECKED = (
    (6, 1, False), (12, 1, False), (12, 8, False), (12, 32, False), (12, 128, False), (6, 128, False),
    (12, 1, True), (12, 8, True), (12, 128, True), (6, 1, True),
    (24, 3, False), (48, 2, False), (96, 1, False), (6, 256, False), (96, 2, True),
)  # fmt: skip
TIMED = frozenset(CHECKED[:10])


def inputs(
    *,
    rows: int,
    heads: int,
    num_slots: int,
    state_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
    slots: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Random arguments of one step, in the order of the call; slots distinct, none of them the null slot."""
    import torch

    generator = generator_on(device, seed)

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return normal(shape, generator, scale=scale, dtype=torch.float32)

    width = heads * D
    padded = (4 * width + D + heads + 7) // 8 * 8
    if slots is None:
        slots = torch.randperm(num_slots - 1, generator=generator, device=device)[:rows] + 1
    return dict(
        projected=values(rows, padded).bfloat16(),
        gate_weight=values(width, D, scale=D**-0.5).bfloat16(),
        conv_weight=values(3 * width, CONV_WIDTH, scale=0.5),
        dt_bias=values(width),
        a_log=values(D, scale=0.5),
        norm_weight=1 + values(D, scale=0.2),
        slots=slots.int(),
        conv_state=values(num_slots, 3, 3 * width).bfloat16(),
        state=values(num_slots, heads, D, D, scale=0.3).to(state_dtype or torch.float32),
    )


def work_of(heads: int, rows: int, *, bf16_state: bool) -> Work:
    width = heads * D
    return cluster(
        [Weight(region="kda.f_b", num_outputs=width, depth=D, num_bytes=width * D * 2)],
        rows=rows,
        heads=heads,
        state_bytes=heads * D * D * (2 if bf16_state else 4),
        conv_state_bytes=3 * 3 * width * 2,
        conv_weight_bytes=3 * width * CONV_WIDTH * 4,
    )


def judge_state(family: str, slots: torch.Tensor, start: torch.Tensor) -> Judge:
    """Within ``family``, and slots that no row uses hold what they held in ``start``, bit for bit."""
    used = slots.tolist()
    unused = [slot for slot in range(start.shape[0]) if slot not in used]

    def judge(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        import torch

        from k3sim.kernels.harness.tolerance import Verdict

        verdict = within(family)(found, ref, name)
        if torch.equal(found[unused], start[unused]):
            return verdict
        line = f"{verdict.line}; a slot of no row was written"
        return Verdict(accepted=False, line=line, error=verdict.error, bound=verdict.bound)

    return judge


def _problem(heads: int, rows: int, bf16_state: bool) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.kda_decode import launch, reference

        dtype = torch.bfloat16 if bf16_state else torch.float32
        # Two slots beyond those in use, and the null slot, must stay as they are.
        arguments = inputs(rows=rows, heads=heads, num_slots=rows + 3, state_dtype=dtype, device=device, seed=seed)
        start = {name: arguments[name].clone() for name in ("conv_state", "state")}
        out = torch.empty(rows, heads * D, dtype=torch.bfloat16, device=device)

        family = "kda_state_bf16" if bf16_state else "kda_state_fp32"

        def expected() -> Sequence[torch.Tensor]:
            copies = {**arguments, **{name: tensor.clone() for name, tensor in start.items()}}
            return (reference.kda_decode(*copies.values(), heads=heads), copies["state"], copies["conv_state"])

        return Problem(
            outputs=[
                Output(name="out", tensor=out, judge=within("kda_output")),
                Output(
                    name="state",
                    tensor=arguments["state"],
                    judge=judge_state(family, arguments["slots"], start["state"]),
                    in_place=True,
                ),
                Output(name="conv_state", tensor=arguments["conv_state"], judge=exactly(), in_place=True),
            ],
            launch=lambda: launch.kda_decode(**arguments, out=out, heads=heads),
            reference=expected,
        )

    return make


def _timed(heads: int, rows: int, bf16_state: bool) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.kda_decode import launch

        dtype = torch.bfloat16 if bf16_state else torch.float32
        generator, width = generator_on(device, seed), heads * D
        copies = num_copies(rows * width * D * dtype.itemsize, l2_bytes)
        arguments = inputs(
            rows=rows, heads=heads, num_slots=copies * rows + 1, state_dtype=dtype, device=device, seed=seed
        )
        order = torch.randperm(copies * rows, generator=generator, device=device) + 1
        slots = order.int().view(copies, rows)
        # Everything that a layer has for itself is cold: states, and the two weights.
        gate_weights = normal((copies, width, D), generator, scale=D**-0.5)
        conv_weights = normal((copies, 3 * width, CONV_WIDTH), generator, scale=0.5, dtype=torch.float32)
        out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)

        def call(copy: int) -> Call:
            own = {
                **arguments,
                "gate_weight": gate_weights[copy],
                "conv_weight": conv_weights[copy],
                "slots": slots[copy],
            }
            return lambda: launch.kda_decode(**own, out=out, heads=heads, pdl=True)

        return Timed(
            calls=[call(copy) for copy in range(copies)],
            peers={
                "FlashInfer fused (gate projected before)": lambda: _flashinfer(arguments, conv_weights, slots, heads),
                "FLA chain (gate projected before)": lambda: fla_calls(arguments, conv_weights, slots, heads),
            },
        )

    return make


def _flashinfer(
    arguments: dict[str, torch.Tensor], conv_weights: torch.Tensor, slots: torch.Tensor, heads: int
) -> list[Call]:
    """``flashinfer.kda_decode.fused_kda_decode``: its state is [slot, head, v, k], of the same bytes."""
    import torch
    from flashinfer.kda_decode import fused_kda_decode

    projected, width = arguments["projected"], heads * D
    rows, device = projected.shape[0], projected.device
    raw_gate = torch.randn(1, rows, heads, D, device=device).bfloat16()
    raw_beta = projected[None, :, 4 * width + D : 4 * width + D + heads].contiguous()
    out = torch.empty(1, rows, heads, D, dtype=torch.bfloat16, device=device)
    # [3, 4, width] a copy
    taps = conv_weights.view(-1, 3, width, CONV_WIDTH).transpose(2, 3).contiguous()
    conv_state = arguments["conv_state"].transpose(1, 2)

    def call(weight: torch.Tensor, rows_slots: torch.Tensor) -> Call:
        return lambda: fused_kda_decode(
            x=projected[:, : 3 * width],
            weight=weight,
            conv_state=conv_state,
            raw_gate=raw_gate,
            raw_beta=raw_beta,
            A_log=arguments["a_log"][:heads],
            dt_bias=arguments["dt_bias"],
            state_indices=rows_slots,
            state=arguments["state"],
            output_gate=projected[:, 3 * width : 4 * width].view(rows, heads, D),
            norm_weight=arguments["norm_weight"],
            output=out,
        )

    return [call(weight, one) for weight, one in zip(taps, slots, strict=True)]


def fla_calls(
    arguments: dict[str, torch.Tensor], conv_weights: torch.Tensor, slots: torch.Tensor, heads: int
) -> list[Call]:
    """fla-core's decode step: convolution, recurrence with the gates inside on states by slot, gated RMSNorm.

    One convolution for q, k and v at one row; above, one each as in FLA's layer, whose outputs need no copy.
    """
    import torch
    from fla.modules.causal_conv1d import causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    projected, width = arguments["projected"], heads * D
    rows, device = projected.shape[0], projected.device
    convolutions = 1 if rows == 1 else 3
    channels = 3 * width // convolutions
    mixed = projected[:, : 3 * width].split(channels, dim=-1)
    raw_gate = torch.randn(rows, 1, heads, D, device=device).bfloat16()
    raw_beta = projected[:, 4 * width + D : 4 * width + D + heads].reshape(rows, 1, heads).contiguous()
    output_gate = projected[:, 3 * width : 4 * width].reshape(rows, 1, heads, D).contiguous()
    caches = torch.randn(len(slots), convolutions, rows, channels, CONV_WIDTH, device=device).bfloat16()
    a_log = arguments["a_log"][:heads].contiguous()
    out = torch.empty(rows, 1, heads, D, dtype=torch.bfloat16, device=device)

    def call(weight: torch.Tensor, cache: torch.Tensor, rows_slots: torch.Tensor) -> Call:
        weights = weight.split(channels)

        def step() -> object:
            convolved = [
                causal_conv1d_update(x, own, weight=taps, activation="silu")[0]
                for x, own, taps in zip(mixed, cache, weights, strict=True)
            ]
            q, k, v = convolved if convolutions == 3 else convolved[0].split(width, dim=-1)
            fused_recurrent_kda_fwd(
                q=q.view(rows, 1, heads, D),
                k=k.view(rows, 1, heads, D),
                v=v.view(rows, 1, heads, D),
                g=raw_gate,
                beta=raw_beta,
                A_log=a_log,
                dt_bias=arguments["dt_bias"],
                initial_state=arguments["state"],
                ssm_state_indices=rows_slots,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0,
                out=out,
            )
            return rms_norm_gated(out, output_gate, arguments["norm_weight"], None, activation="sigmoid", eps=1e-5)

        return step

    return [call(*one) for one in zip(conv_weights, caches, slots, strict=True)]


def cases() -> list[Case]:
    return [
        Case(
            operator="kda_decode", name=f"{heads} heads, {rows_in_words(rows)}, {'bf16' if bf16 else 'fp32'} state",
            rows=rows, works=(work_of(heads, rows, bf16_state=bf16),), num_bytes=3 * (rows + 3) * heads * D * D * 4,
            problem=_problem(heads, rows, bf16),
            timed=_timed(heads, rows, bf16) if (heads, rows, bf16) in TIMED else None,
        )
        for heads, rows, bf16 in CHECKED
    ]
