"""How a compiled function launches its kernel: grid, block, cluster and dynamic shared memory, without a GPU.

None of it stands in a cubin. The compiler leaves the host's side in LLVM's words, where a ``cudaLaunchConfig_t`` is
filled in field by field; constants are read from there, and so stay true when a kernel's Python changes. A dimension
that is no constant is an argument of the call (a number of rows), and reads as 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Grid, block, bytes of dynamic shared memory, stream, attributes and their number.
_CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
_CLUSTER = "!llvm.struct<(i32, i32, i32)>"
_CONSTANT = re.compile(r"(%\w+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)")
_ALLOCATED = re.compile(r"(%\w+) = llvm\.alloca %\w+ x " + re.escape(_CONFIG))
_FIELD = re.compile(r"(%\w+) = llvm\.getelementptr (%\w+)\[0, ([\d, ]+)\] : .*, " + re.escape(_CONFIG))
_CLUSTER_FIELD = re.compile(r"(%\w+) = llvm\.getelementptr %\w+\[0, (\d)\] : .*, " + re.escape(_CLUSTER))
_STORED = re.compile(r"llvm\.store (%\w+), (%\w+) : ")


@dataclass(frozen=True, kw_only=True)
class LaunchFacts:
    """One launch. Dimensions are 0 where they are arguments of the call."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_smem_bytes: int


def launch_facts(host_code: str) -> LaunchFacts:
    """The launch in a function's lowered host code. Raises ValueError where there is not exactly one."""
    begins = host_code.find("llvm.func @cutlass_")
    body = host_code[begins : host_code.find("\n  }", begins)]
    configs = _ALLOCATED.findall(body)
    if begins < 0 or len(configs) != 1:
        raise ValueError(f"host code with {len(configs)} launches, expected one")
    constants = {name: int(value) for name, value in _CONSTANT.findall(body)}
    fields = {name: place for name, config, place in _FIELD.findall(body) if config == configs[0]}
    clusters = dict(_CLUSTER_FIELD.findall(body))
    stored: dict[str, int] = {}
    for value, address in _STORED.findall(body):
        if address in fields:
            stored.setdefault(fields[address], constants.get(value, 0))
        elif address in clusters:
            stored["cluster " + clusters[address]] = constants.get(value, 0)

    def three(prefix: str, missing: int) -> tuple[int, int, int]:
        x, y, z = (stored.get(f"{prefix}{axis}", missing) for axis in range(3))
        return x, y, z

    return LaunchFacts(
        grid=three("0, ", 0), block=three("1, ", 0), cluster=three("cluster ", 1), dynamic_smem_bytes=stored["2"]
    )
