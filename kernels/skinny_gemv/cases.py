"""Cases of ``skinny_gemv``: every matrix of a TP8 and TP16 rank, each epilogue, the push; matrices of other models."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import alike_within, within
from k3sim.kernels.skinny_gemv.builds import GEMV_SHAPES, OTHER_SHAPES
from k3sim.kernels.skinny_gemv.configuration import Epilogue
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.kernels.skinny_gemv.public import ring, ring_push
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

ROWS = (1, 2, 8, 16)
TIMED_ROWS = (1, 8)
OTHER_ROWS = (1, 3, 5, 8, 12, 16)
OTHER_TIMED_ROWS = (1, 3, 8, 12)  # each form; h200.json has them all
NUM_PEERS = 8
EPILOGUE_FAMILY = {
    Epilogue.NONE: "bf16_sum",
    Epilogue.ADD: "bf16_sum",
    Epilogue.SIGMOID_GATE: "bf16_activation",
    Epilogue.SITU_GLU: "bf16_activation",
}


def weight_of(num_outputs: int, depth: int) -> Weight:
    return Weight(region="w", num_outputs=num_outputs, depth=depth, num_bytes=num_outputs * depth * BF16_BYTES)


def weights(copies: int, num_outputs: int, depth: int, generator: torch.Generator) -> torch.Tensor:
    """[copies, num_outputs, depth], scaled so that products with normal rows are of order one."""
    return normal((copies, num_outputs, depth), generator, scale=1 / math.sqrt(depth))


def _width(num_outputs: int, epilogue: Epilogue) -> int:
    return num_outputs // 2 if epilogue is Epilogue.SITU_GLU else num_outputs


def _operand(rows: int, width: int, epilogue: Epilogue, generator: torch.Generator) -> torch.Tensor | None:
    return normal((rows, width), generator) if epilogue in (Epilogue.ADD, Epilogue.SIGMOID_GATE) else None


def _problem(num_outputs: int, depth: int, rows: int, epilogue: Epilogue) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.skinny_gemv import reference
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv

        generator = generator_on(device, seed)
        x, w = normal((rows, depth), generator), weights(1, num_outputs, depth, generator)[0]
        width = _width(num_outputs, epilogue)
        operand = _operand(rows, width, epilogue, generator)
        # A row before and one behind must keep their poison.
        guarded = torch.empty(rows + 2, width, dtype=torch.bfloat16, device=device)

        def expected() -> Sequence[torch.Tensor]:
            ref = torch.full((rows + 2, width), math.nan, device=device)
            ref[1:-1] = reference.skinny_gemv(x, w, epilogue=epilogue, operand_MO=operand)
            return (ref,)

        return Problem(
            outputs=[Output(name="out", tensor=guarded, judge=within(EPILOGUE_FAMILY[epilogue]))],
            launch=lambda: skinny_gemv(x, w, guarded[1:-1], epilogue=epilogue, operand=operand),
            reference=expected,
        )

    return make


def _timed(num_outputs: int, depth: int, rows: int, epilogue: Epilogue) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.skinny_gemv.launch import skinny_gemv

        generator = generator_on(device, seed)
        copies = weights(num_copies(num_outputs * depth * BF16_BYTES, l2_bytes), num_outputs, depth, generator)
        x, width = normal((rows, depth), generator), _width(num_outputs, epilogue)
        operand = _operand(rows, width, epilogue, generator)
        out = torch.empty(rows, width, dtype=torch.bfloat16, device=device)

        def call(w: torch.Tensor) -> Call:
            return lambda: skinny_gemv(x, w, out, epilogue=epilogue, operand=operand)

        peers = {}
        if epilogue is Epilogue.NONE:
            peers["cuBLAS"] = lambda: cublas_calls(x, copies)
            if num_outputs % 16 == 0 and depth % 64 == 0:
                peers["FlashInfer tinygemm"] = lambda: tinygemm_calls(x, copies)
        elif epilogue is Epilogue.ADD:
            peers["cuBLAS"] = lambda: [
                lambda w=w: torch.addmm(operand, x, w.T, out=out) for w in copies  # type: ignore[misc, arg-type]
            ]
        return Timed(calls=[call(w) for w in copies], peers=peers)

    return make


def cublas_calls(x: torch.Tensor, copies: torch.Tensor) -> list[Call]:
    """``torch.mm`` of ``x`` [rows, K] with each of ``copies`` [copies, N, K]."""
    import torch

    out = torch.empty(x.shape[0], copies.shape[1], dtype=x.dtype, device=x.device)
    return [lambda w=w: torch.mm(x, w.T, out=out) for w in copies]  # type: ignore[misc]


def tinygemm_calls(x: torch.Tensor, copies: torch.Tensor) -> list[Call]:
    """FlashInfer's small GEMM with programmatic dependent launch. Raises ImportError where it is not installed."""
    import torch
    from flashinfer.gemm import tinygemm_bf16

    out = torch.empty(x.shape[0], copies.shape[1], dtype=x.dtype, device=x.device)
    return [lambda w=w: tinygemm_bf16(x, w, out, use_pdl=True) for w in copies]  # type: ignore[misc]


def _push_problem(num_outputs: int, depth: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.skinny_gemv import reference
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        generator = generator_on(device, seed)
        x, w = normal((rows, depth), generator), weights(1, num_outputs, depth, generator)[0]
        inboxes = torch.empty(NUM_PEERS, rows, num_outputs, dtype=torch.bfloat16, device=device)
        peers = torch.tensor([one.data_ptr() for one in inboxes], device=device)
        return Problem(
            outputs=[Output(name="inboxes", tensor=inboxes, judge=alike_within("bf16_sum"))],
            launch=lambda: skinny_gemv_push(x, w, peers),
            reference=lambda: (reference.skinny_gemv(x, w),),
        )

    return make


def _polled_push_problem(num_outputs: int, depth: int, rows: int, num_peers: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.skinny_gemv import reference
        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        generator = generator_on(device, seed)
        x, w = normal((rows, depth), generator), weights(1, num_outputs, depth, generator)[0]
        inboxes = torch.empty(num_peers, rows, num_outputs, device=device)
        peers = torch.tensor([one.data_ptr() for one in inboxes], device=device)
        return Problem(
            outputs=[Output(name="inboxes", tensor=inboxes, judge=alike_within("fp32_sum"))],
            launch=lambda: skinny_gemv_push(x, w, peers, out_dtype=torch.float32, polled=True),
            reference=lambda: (reference.skinny_gemv(x, w),),
        )

    return make


def _push_timed(num_outputs: int, depth: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

        generator = generator_on(device, seed)
        copies = weights(num_copies(num_outputs * depth * BF16_BYTES, l2_bytes), num_outputs, depth, generator)
        x = normal((rows, depth), generator)
        inboxes = torch.empty(NUM_PEERS, rows, num_outputs, dtype=torch.bfloat16, device=device)
        peers = torch.tensor([one.data_ptr() for one in inboxes], device=device)
        return Timed(
            calls=[lambda w=w: skinny_gemv_push(x, w, peers) for w in copies],  # type: ignore[misc]
            peers={"cuBLAS, no push": lambda: cublas_calls(x, copies)},
            keep=(inboxes,),
        )

    return make


def cases() -> list[Case]:
    found = []
    products = [(shape, rows, rows in TIMED_ROWS) for rows in ROWS for shape in GEMV_SHAPES]
    products += [(shape, rows, rows in OTHER_TIMED_ROWS) for rows in OTHER_ROWS for shape in OTHER_SHAPES]
    for (num_outputs, depth), rows, timed in products:  # what matters most comes first, should time run out
        found.append(
            Case(
                operator="skinny_gemv", name=f"{num_outputs}x{depth}, {rows_in_words(rows)}", rows=rows,
                works=(ring([weight_of(num_outputs, depth)], rows=rows),), num_bytes=6 * num_outputs * depth,
                problem=_problem(num_outputs, depth, rows, Epilogue.NONE),
                timed=_timed(num_outputs, depth, rows, Epilogue.NONE) if timed else None,
            )
        )
    for epilogue in (Epilogue.ADD, Epilogue.SIGMOID_GATE, Epilogue.SITU_GLU):
        for rows in (1, 5):
            found.append(
                Case(
                    operator="skinny_gemv", name=f"1536x7168, {rows_in_words(rows)}, {epilogue.name.lower()}",
                    rows=rows, works=(ring([weight_of(1536, 7168)], rows=rows),), num_bytes=6 * 1536 * 7168,
                    problem=_problem(1536, 7168, rows, epilogue),
                    timed=_timed(1536, 7168, rows, epilogue) if rows == 1 else None,
                )
            )
    for rows in (1, 8):
        work = ring_push([weight_of(7168, 768)], rows=rows, sent_bytes_per_row=7168 * BF16_BYTES)
        found.append(
            Case(
                operator="skinny_gemv",
                name=f"7168x768, {rows_in_words(rows)}, pushed to {NUM_PEERS} buffers of this GPU", rows=rows,
                works=(work,), num_bytes=6 * 7168 * 768, problem=_push_problem(7168, 768, rows),
                timed=_push_timed(7168, 768, rows) if rows == 1 else None,
            )
        )
    # A rank's part of router and latent; timed with ``gather_topk``, which empties the buffers (router_topk).
    for num_outputs, num_peers in ((560, 8), (280, 16)):
        for rows in (1, 8):
            work = ring_push([weight_of(num_outputs, 7168)], rows=rows, sent_bytes_per_row=num_outputs * 4)
            found.append(
                Case(
                    operator="skinny_gemv",
                    name=f"{num_outputs}x7168, {rows_in_words(rows)}, fp32 pushed to {num_peers} polled buffers",
                    rows=rows, works=(work,), num_bytes=6 * num_outputs * 7168,
                    problem=_polled_push_problem(num_outputs, 7168, rows, num_peers),
                )
            )
    return found
