"""Which operators there are. The folders of ``kernels`` are the list: a new operator is a new folder, and no entry."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

COST_MODULES = ("cost", "public")  # a folder that holds one of these modules is an operator's


def _places() -> list[Path]:
    return [Path(place) for place in import_module("k3sim.kernels").__path__]


@cache
def operators() -> tuple[str, ...]:
    """Names of all operators, sorted. Imports none of them."""
    return tuple(
        sorted(
            one.name
            for place in _places()
            for one in pkgutil.iter_modules([str(place)])
            if one.ispkg and any((place / one.name / f"{part}.py").exists() for part in COST_MODULES)
        )
    )


@cache
def operators_with(part: str) -> tuple[str, ...]:
    """Those whose folder holds ``part.py``: "cost", "public", "cases", "builds". Imports none of them."""
    return tuple(one for one in operators() if any((place / one / f"{part}.py").exists() for place in _places()))


def part_of(operator: str, part: str) -> ModuleType | None:
    """The module ``part.py`` of an operator's folder, None where it has none."""
    return import_module(f"k3sim.kernels.{operator}.{part}") if operator in operators_with(part) else None
