"""What a check reports: a pass, a wrong value, an output that is not written, an error; what a GPU run gives."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness import check as checking  # noqa: E402
from k3sim.kernels.harness.cases import OPERATORS, Case, Output, Problem  # noqa: E402
from k3sim.kernels.harness.check import Checked, check, check_cases  # noqa: E402
from k3sim.kernels.harness.judges import exactly, within  # noqa: E402


def case(launch, name="case", in_place=False) -> Case:  # type: ignore[no-untyped-def]
    """Two outputs: ``twice`` of 1 .. 4 in bf16, and the integers themselves. ``launch`` gets both."""

    def problem(device: str, seed: int) -> Problem:
        values = torch.arange(1, 5, dtype=torch.float32, device=device)
        twice = torch.empty(4, dtype=torch.bfloat16, device=device)
        same = torch.zeros(4, dtype=torch.int32, device=device)
        return Problem(
            outputs=[
                Output(name="twice", tensor=twice, judge=within("bf16_sum")),
                Output(name="same", tensor=same, judge=exactly(), in_place=in_place),
            ],
            launch=lambda: launch(values, twice, same),
            reference=lambda: (2 * values, values.int()),
        )

    return Case(operator="some", name=name, rows=1, works=(), num_bytes=64, problem=problem)


def right(values, twice, same):  # type: ignore[no-untyped-def]
    twice.copy_(2 * values)
    same.copy_(values.int())


def only(one: Case) -> Checked:
    (found,) = check_cases([one], "cpu", seed=0, num_replays=0)
    return found


def test_right_kernels_pass_with_error_and_bound() -> None:
    found = only(case(right))
    assert (found.ok, found.error, found.bound, found.reason) == (True, 0.0, 3e-3, "")
    assert found.line == "some  case  0.00e+00  3e-03  0 replays  ok"


def test_an_unwritten_output_fails_after_right_launches() -> None:
    calls = []

    def forgets(values, twice, same):  # type: ignore[no-untyped-def]
        calls.append(twice.isnan().all() and (same == -7).all())
        same.copy_(values.int())

    found = only(case(forgets))
    assert calls == [True]
    assert not found.ok and math.isnan(found.error) and "twice: " in found.reason
    assert "FAILED: twice: " in found.line


def test_a_wrong_integer_is_counted() -> None:
    def wrong(values, twice, same):  # type: ignore[no-untyped-def]
        right(values, twice, same)
        same[2] += 1

    found = only(case(wrong))
    assert not found.ok and found.reason == "same: 1 of 4 differ" and (found.error, found.bound) == (1.0, 0.0)


def test_in_place_outputs_keep_their_input() -> None:
    def adds(values, twice, same):  # type: ignore[no-untyped-def]
        twice.copy_(2 * values)
        same += values.int()

    assert only(case(adds, in_place=True)).ok
    assert not only(case(adds)).ok


def test_a_raising_case_fails_and_the_next_runs() -> None:
    def raises(values, twice, same):  # type: ignore[no-untyped-def]
        raise RuntimeError("an illegal\n  memory access")

    timed_only = Case(operator="some", name="timed", rows=1, works=(), num_bytes=0)
    found = list(check_cases([case(raises, "a"), timed_only, case(right, "b")], "cpu", seed=0, num_replays=0))
    assert [(one.case, one.ok) for one in found] == [("a", False), ("b", True)]
    assert found[0].reason == "RuntimeError: an illegal memory access"


def test_without_a_gpu_the_extra_is_named() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is present")
    with pytest.raises(UserError, match=r"needs a CUDA GPU and sees none.*pip install 'k3sim\[gpu\]'"):
        check()
    with pytest.raises(UserError, match="replays: got -1"):
        check(num_replays=-1)


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(UserError, match=r"needs torch: pip install 'k3sim\[gpu\]'"):
        checking.require_gpu("checking kernels")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_every_case_passes(operator: str) -> None:
    found = check([operator], seed=1, num_replays=100)
    assert found and [one.line for one in found if not one.ok] == []


@pytest.mark.gpu
def test_a_replay_that_changes_the_bits_is_found() -> None:
    counter = torch.zeros(1, device="cuda")

    def drifts(values, twice, same):  # type: ignore[no-untyped-def]
        counter.add_(1)
        twice.copy_(2 * values)
        same.copy_(values.int() + (counter > 5).int())

    (found,) = check_cases([case(drifts)], "cuda", seed=0, num_replays=10)
    assert not found.ok and "replays differ from the first launch in bits" in found.reason
    assert 0 < found.replays < 10
