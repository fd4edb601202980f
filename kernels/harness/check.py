"""Every kernel against its reference on the GPU at hand: poisoned outputs, fresh random inputs, repeated replays.

    for one in check(["router_topk"], seed=0):
        print(one.line)

A case that raises counts as failed with the reason, and the others still run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.errors import UserError
from k3sim.kernels.harness.cases import Case, Problem, cases_of
from k3sim.kernels.toolchain.compile_cache import get_cutlass

if TYPE_CHECKING:
    from k3sim.kernels.harness.tolerance import Verdict

NUM_REPLAYS = 1000


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a case gave. ``error`` and ``bound``: of the output nearest to its bound; ``reason``: empty when it passed.

    ``replays``: how many replays of the captured call gave the same bits.
    """

    operator: str
    case: str
    error: float
    bound: float
    replays: int
    ok: bool
    reason: str

    @property
    def line(self) -> str:
        verdict = "ok" if self.ok else f"FAILED: {self.reason}"
        return f"{self.operator}  {self.case}  {self.error:.2e}  {self.bound:.0e}  {self.replays} replays  {verdict}"


def require_gpu(what: str) -> None:
    """Raise UserError, with the extra to install, unless kernels can be compiled and run here. ``what`` needs it."""
    try:
        import torch
    except ImportError as missing:
        raise UserError(f"{what} needs torch: pip install 'k3sim[gpu]'") from missing
    if not torch.cuda.is_available():
        raise UserError(
            f"{what} needs a CUDA GPU and sees none; it runs on compute capability 9.0, 10.0 and 10.3 with the gpu "
            "extra (pip install 'k3sim[gpu]')"
        )
    get_cutlass()


def check(
    operators: Sequence[str] = (),
    *,
    seed: int = 0,
    num_replays: int = NUM_REPLAYS,
    on_case: Callable[[Checked], None] = lambda _: None,
) -> list[Checked]:
    """Check all cases of ``operators`` (all when empty); ``on_case`` gets each as it is done.

    ``num_replays``: of each call in a graph, 0 for none. Raises UserError for an unknown operator, a bad number, or
    where no GPU or toolkit is.
    """
    cases = cases_of(operators)
    if num_replays < 0:
        raise UserError(f"replays: got {num_replays}, accepted: 0 or more")
    require_gpu("checking kernels")
    found = []
    for one in check_cases(cases, "cuda", seed=seed, num_replays=num_replays):
        found.append(one)
        on_case(one)
    return found


def check_cases(cases: Sequence[Case], device: str, *, seed: int, num_replays: int) -> Iterator[Checked]:
    """One result a case that has something to check."""
    for case in cases:
        if case.problem is None:
            continue
        try:
            yield _check_case(case, case.problem(device, seed), num_replays)
        except Exception as error:  # whatever it was, the next case is tried
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            yield _checked(case, [], 0, reason)


def _check_case(case: Case, problem: Problem, num_replays: int) -> Checked:
    problem.reset()
    problem.expected()  # before the launch, which may change what the reference reads
    problem.launch()
    verdicts = problem.judge()
    wrong = [str(one) for one in verdicts if not one]
    replays = 0
    if not wrong and num_replays and problem.repeatable:
        equal = _replay(problem, num_replays)
        if equal < num_replays:
            wrong.append(f"{num_replays - equal} of {num_replays} replays differ from the first launch in bits")
        replays = equal
    return _checked(case, verdicts, replays, "; ".join(wrong))


def _checked(case: Case, verdicts: Sequence[Verdict], replays: int, reason: str) -> Checked:
    def of_bound(one: Verdict) -> float:
        if math.isnan(one.error):
            return math.inf
        return one.error / one.bound if one.bound else math.inf if one.error else 0.0

    worst = max(verdicts, key=of_bound, default=None)
    return Checked(
        operator=case.operator,
        case=case.name,
        error=worst.error if worst is not None else math.nan,
        bound=worst.bound if worst is not None else math.nan,
        replays=replays,
        ok=not reason,
        reason=reason,
    )


def _replay(problem: Problem, num_replays: int) -> int:
    """How many of ``num_replays`` replays of the captured call leave the bits that the first launch left."""
    import torch

    def bits() -> list[torch.Tensor]:
        return [one.tensor.contiguous().view(torch.uint8) for one in problem.outputs]

    first = [one.clone() for one in bits()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        problem.launch()
    # Counted on the device, so that replays follow one another closely.
    unequal = torch.zeros((), dtype=torch.int64, device=first[0].device)
    for _ in range(num_replays):
        problem.reset()
        graph.replay()
        differ = torch.stack([(now != then).any() for now, then in zip(bits(), first, strict=True)]).any()
        unequal += differ
    return num_replays - int(unequal)
