"""The calls that ``check`` and ``bench`` make: one list an operator, all over this interface.

A ``Case`` is one shape of one operator. From a device and a seed it makes

* a ``Problem``: the call on fresh random inputs beside what the reference makes of them, for ``check``;
* a ``Timed``: the same call on enough copies of what it reads that each comes from HBM, and the same work by other
  packages, for ``bench``.

What a call moves is its ``Work``, from the operator's ``cost.py``: the floor is stated there and nowhere else. A new
operator is a folder with a module ``cases.py`` and in it a function ``cases()``.

    for case in cases_of(["kda_decode"]):
        problem = case.problem("cuda", 0)
        problem.reset(); problem.launch(); print(problem.judge())

Listing cases needs neither torch nor CUTLASS.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.folders import operators_with
from k3sim.kernels.harness.inputs import poison
from k3sim.kernels.work import Work

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.judges import Judge
    from k3sim.kernels.harness.tolerance import Verdict

OPERATORS = operators_with("cases")

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Output:
    """One tensor that a call writes, and how it is judged.

    ``judge`` takes the tensor, the reference's and a name. ``in_place``: what it holds before is an input of the call;
    any other output is poisoned before every launch.
    """

    name: str
    tensor: torch.Tensor
    judge: Judge
    in_place: bool = False


@dataclass(kw_only=True)
class Problem:
    """One call on fresh inputs. ``reference`` gives the tensors that ``outputs`` should hold, in that order.

    ``reference`` must work on inputs as they were made: it copies what the call changes. ``repeatable``: a replay of
    the call in a graph, after ``reset``, must give the same bits.
    """

    outputs: Sequence[Output]
    launch: Call
    reference: Callable[[], Sequence[torch.Tensor]]
    repeatable: bool = True
    _start: list[torch.Tensor | None] = field(init=False, default_factory=list)
    _expected: Sequence[torch.Tensor] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._start = [one.tensor.clone() if one.in_place else None for one in self.outputs]

    def reset(self) -> None:
        """Poison what the call must write and put back what it changes."""
        for one, start in zip(self.outputs, self._start, strict=True):
            if start is None:
                poison(one.tensor)
            else:
                one.tensor.copy_(start)

    def expected(self) -> Sequence[torch.Tensor]:
        """The reference's tensors, computed once."""
        if self._expected is None:
            self._expected = self.reference()
        return self._expected

    def judge(self) -> list[Verdict]:
        """One verdict an output, on what the tensors hold now."""
        return [
            one.judge(one.tensor, expected, one.name)
            for one, expected in zip(self.outputs, self.expected(), strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Calls that take turns, each on its own copy of what it reads.

    ``peers``: name of another implementation to a function that makes its calls, over the same copies; it raises
    ImportError where the package is missing. ``keep``: tensors that a call knows by address only.
    """

    calls: Sequence[Call]
    peers: Mapping[str, Callable[[], Sequence[Call]]] = field(default_factory=dict)
    keep: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one operator.

    ``works``: the launches of one call, as their cost functions count them. ``problem`` takes device and seed,
    ``timed`` also the bytes of L2. Without ``timed`` a case is only checked; without ``problem`` it is only timed, its
    launch being part of what another case checks. ``num_bytes``: memory that ``problem`` takes, roughly.
    """

    operator: str
    name: str
    rows: int
    works: Sequence[Work]
    num_bytes: int
    problem: Callable[[str, int], Problem] | None = None
    timed: Callable[[str, int, int], Timed] | None = None

    @property
    def moved_bytes(self) -> int:
        """HBM bytes read and written by one call when L2 holds nothing: the numerator of the floor."""
        return sum(one.moved_bytes() for one in self.works)


MakeProblem = Callable[[str, int], Problem]  # of device and seed
MakeTimed = Callable[[str, int, int], Timed]  # of device, seed and the bytes of L2


def case_of_rows(
    operator: str,
    name: str,
    rows: int,
    works: Sequence[Work],
    num_bytes: int,
    problem: MakeProblem | None,
    timed: MakeTimed | None,
) -> Case:
    """A ``Case`` whose name says the rows last."""
    return Case(
        operator=operator,
        name=f"{name}, {rows_in_words(rows)}",
        rows=rows,
        works=tuple(works),
        num_bytes=num_bytes,
        problem=problem,
        timed=timed,
    )


def cases_of(operators: Sequence[str] = ()) -> list[Case]:
    """Cases of ``operators`` (all when empty). Raises UserError for an unknown one, with the nearest name."""
    for operator in operators:
        if operator not in OPERATORS:
            near = difflib.get_close_matches(operator, OPERATORS, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"unknown operator {operator!r}{hint}; accepted: {', '.join(OPERATORS)}")
    return [case for operator in operators or OPERATORS for case in _module(operator).cases()]


def _module(operator: str) -> Any:
    return importlib.import_module(f"k3sim.kernels.{operator}.cases")


def rows_in_words(rows: int) -> str:
    """For the name of a case."""
    return f"{rows} row{'' if rows == 1 else 's'}"
