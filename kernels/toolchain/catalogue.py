"""Every kernel that ``build`` compiles: operator -> name -> function that compiles it for this process's architecture.

The kernels of an operator stand in its folder (``<operator>/builds.py``, a function ``kernels()``) and are only
collected here; ``RECORDS_TIMESTAMPS`` there says that they record block timestamps (``device/timestamps.py``). The
shapes are those of Kimi K3 at TP8 and TP16; a form that differs by rows, heads or state type has an entry of its own.
Calling an entry imports CUTLASS, so the lists themselves can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from k3sim.kernels.folders import operators_with, part_of

Compile = Callable[[], Any]
Kernels = dict[str, Compile]



def _kernels_of(operator: str) -> Kernels:
    builds = part_of(operator, "builds")
    assert builds is not None, operator
    found: Kernels = builds.kernels()
    return found


BUILDS: Mapping[str, Callable[[], Kernels]] = {
    operator: partial(_kernels_of, operator) for operator in operators_with("builds")
}
