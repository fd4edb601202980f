"""Cost functions by name: ``folder.function`` stands in ``kernels/<folder>/cost.py``, or else in its ``public.py``.

``cost.py`` counts the project's own kernels, ``public.py`` those of public engines; a name stands in one of the two. A
cost function takes ``(weights, **shape)``, the shape as a path's row gives it, and returns ``Work``: by that it is told
from the other functions of its module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from inspect import isfunction
from types import ModuleType

from k3sim.kernels.folders import COST_MODULES, operators_with, part_of
from k3sim.kernels.work import MachineCode, Work
from k3sim.model.program import Weight

CostFunction = Callable[..., Work]


def cost_functions(module: ModuleType) -> dict[str, CostFunction]:
    """The cost functions that a module defines, by name."""
    return {
        name: found
        for name, found in vars(module).items()
        if isfunction(found)
        and not name.startswith("_")
        and found.__module__ == module.__name__
        and found.__code__.co_varnames[:1] == ("weights",)
        and found.__annotations__.get("return") in ("Work", Work)
    }


@cache
def cost_of(operator: str) -> CostFunction | None:
    """The cost function ``folder.function``, None where there is none."""
    folder, _, name = operator.partition(".")
    for part in COST_MODULES:
        module = part_of(folder, part)
        if module is not None and (found := cost_functions(module).get(name)) is not None:
            return found
    return None


@cache
def all_costs() -> tuple[str, ...]:
    """Names of all cost functions, sorted, read from the folders."""
    found = []
    for part in COST_MODULES:
        for folder in operators_with(part):
            module = part_of(folder, part)
            assert module is not None
            found += [f"{folder}.{name}" for name in cost_functions(module)]
    return tuple(sorted(found))


def work_of(operator: str, weights: Sequence[Weight], shape: Mapping[str, int], *, draw: int = 0) -> Work:
    """Work of one call, with registers as drawn (``Work.drawn``). An unknown operator is a programmer's mistake."""
    call = operator, tuple(weights), tuple(shape.items())
    return _drawn_work_of(*call, draw) if draw else _work_of(*call)


@lru_cache(maxsize=4096)
def _drawn_work_of(operator: str, weights: tuple[Weight, ...], shape: tuple[tuple[str, int], ...], draw: int) -> Work:
    return _work_of(operator, weights, shape).drawn(draw, operator)


@lru_cache(maxsize=4096)
def _work_of(operator: str, weights: tuple[Weight, ...], shape: tuple[tuple[str, int], ...]) -> Work:
    """Kept, as the paths of one question and the draws of its machine have most calls in common."""
    cost = cost_of(operator)
    assert cost is not None, f"no cost function named {operator}"
    return cost(weights, **dict(shape))


@cache
def code_of(operator: str) -> MachineCode:
    """Machine code of one of the project's own kernels, from ``CODE`` of its cost.py; zeros where none is counted."""
    folder, _, name = operator.partition(".")
    module = part_of(folder, "cost")
    found: MachineCode = getattr(module, "CODE", {}).get(name, MachineCode())
    return found
