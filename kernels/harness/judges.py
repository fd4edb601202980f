"""How an output of a case is judged against the reference's tensor: a function of the two and a name to a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.tolerance import Verdict

    Judge = Callable[[torch.Tensor, torch.Tensor, str], Verdict]


def within(family: str) -> Judge:
    """Within the tolerance of ``family``. Where the reference holds NaN, the poison must be untouched."""

    def judge(out: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        from k3sim.kernels.harness.tolerance import Verdict, compare

        out, ref = out.float() if out.element_size() == 1 else out, ref.to(out.device)
        untouched = ref.isnan()
        if bool(untouched.any()):
            written = int((~out[untouched].isnan()).sum())
            if written:
                return Verdict(accepted=False, line=f"{name}: {written} elements written that are not the call's")
            out, ref = out[~untouched], ref[~untouched]
        return compare(out, ref, family, name=name)

    return judge


def exactly() -> Judge:
    """Every element equal."""

    def judge(out: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        from k3sim.kernels.harness.tolerance import Verdict

        wrong = int((out != ref.to(out.device, out.dtype)).sum())
        line = f"{name}: {wrong} of {out.numel()} differ"
        return Verdict(accepted=wrong == 0, line=line, error=float(wrong), bound=0.0)

    return judge


def at_least() -> Judge:
    """No element below the reference's; the error is by how much the worst falls short."""

    def judge(out: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        from k3sim.kernels.harness.tolerance import Verdict

        shortfall = max(0.0, float((ref.cpu() - out.cpu()).max()))
        accepted = bool((out.cpu() >= ref.cpu()).all())  # NaN is refused
        line = f"{name}: least {float(out.min()):.3g}, {float(ref.min()):.3g} is due"
        return Verdict(accepted=accepted, line=line, error=shortfall, bound=0.0)

    return judge


def alike_within(family: str) -> Judge:
    """[ranks, ...] against the reference of one rank: the first within ``family``, all others equal to it in bits."""

    def judge(out: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        import torch

        from k3sim.kernels.harness.tolerance import Verdict

        verdict = within(family)(out[0], ref, name)
        bits = out.contiguous().view(torch.uint8)
        unequal = [rank for rank in range(1, out.shape[0]) if not torch.equal(bits[rank], bits[0])]
        if unequal:
            line = f"{verdict.line}; ranks {unequal} differ from rank 0 in bits"
            return Verdict(accepted=False, line=line, error=verdict.error, bound=verdict.bound)
        return verdict

    return judge
