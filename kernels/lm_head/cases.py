"""Cases of ``lm_head``: the vocabulary shards of TP8 and TP16 with the local top 64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.bench import num_copies
from k3sim.kernels.harness.cases import Call, Case, Output, Problem, Timed, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.lm_head import public
from k3sim.kernels.skinny_gemv.cost import BF16_BYTES
from k3sim.model.program import Weight

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict

DEPTH = 7168
K = 64
SHARDS = (10240, 20480)
ROWS = (1, 3, 16)
TIMED_ROWS = (1, 16)
WEIGHT_SCALE = 1 / 85  # logits of order one


def _problem(num_outputs: int, rows: int) -> Callable[[str, int], Problem]:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.lm_head import launch, reference

        generator = generator_on(device, seed)
        first_id = 5 * num_outputs
        x = normal((rows, DEPTH), generator)
        weight = normal((num_outputs, DEPTH), generator, scale=WEIGHT_SCALE)
        weight[3] *= 4
        weight[num_outputs - 1] = weight[3]  # equal logits at the ends of the shard
        weight[100:180] = weight[50]
        if rows > 2:
            x[1] = 0  # every logit equal: the survivors' list at its largest
        logits = torch.empty(rows, num_outputs, device=device)
        outputs = [Output(name="logits", tensor=logits, judge=within("fp32_sum"))]
        top = torch.empty(rows, K, device=device)
        ids = torch.empty(rows, K, dtype=torch.int32, device=device)

        def judge(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
            # Of the kernel's own logits the selection is exact.
            own = reference.top_k(logits, K, first_id=first_id)
            return exactly()(found, own.ids_BK if found is ids else own.logits_BK, name)

        outputs += [Output(name="top", tensor=top, judge=judge), Output(name="ids", tensor=ids, judge=judge)]

        def expected() -> Sequence[torch.Tensor]:
            ref = reference.logits(x, weight)
            return (ref, *reference.top_k(ref, K, first_id=first_id))

        return Problem(
            outputs=outputs,
            launch=lambda: launch.lm_head(x, weight, logits, top, ids, first_id=first_id),
            reference=expected,
        )

    return make


def _timed(num_outputs: int, rows: int) -> Callable[[str, int, int], Timed]:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.lm_head import launch

        generator = generator_on(device, seed)
        copies = num_copies(num_outputs * DEPTH * BF16_BYTES, l2_bytes)
        weights = normal((copies, num_outputs, DEPTH), generator, scale=WEIGHT_SCALE)
        x = normal((rows, DEPTH), generator)
        logits = torch.empty(rows, num_outputs, device=device)
        top = torch.empty(rows, K, device=device)
        ids = torch.empty(rows, K, dtype=torch.int32, device=device)

        def call(weight: torch.Tensor) -> Call:
            return lambda: launch.lm_head(x, weight, logits, top, ids)

        def cublas() -> list[Call]:
            out = torch.empty(rows, num_outputs, dtype=torch.bfloat16, device=device)
            values = torch.empty(rows, K, dtype=torch.bfloat16, device=device)
            indices = torch.empty(rows, K, dtype=torch.int64, device=device)

            def one(weight: torch.Tensor) -> Call:
                def step() -> None:
                    torch.mm(x, weight.T, out=out)
                    torch.topk(out, K, out=(values, indices))

                return step

            return [one(weight) for weight in weights]

        return Timed(
            calls=[call(weight) for weight in weights],
            peers={"cuBLAS and torch.topk": cublas},
        )

    return make


def cases() -> list[Case]:
    found = []
    for rows in ROWS:
        for num_outputs in SHARDS:
            weight = Weight(
                region="lm_head", num_outputs=num_outputs, depth=DEPTH, num_bytes=num_outputs * DEPTH * BF16_BYTES
            )
            found.append(
                Case(
                    operator="lm_head", name=f"{num_outputs}x{DEPTH}, {rows_in_words(rows)}, top {K}", rows=rows,
                    works=(public.top_k([weight], rows=rows),), num_bytes=6 * num_outputs * DEPTH,
                    problem=_problem(num_outputs, rows),
                    timed=_timed(num_outputs, rows) if rows in TIMED_ROWS else None,
                )
            )
    return found
