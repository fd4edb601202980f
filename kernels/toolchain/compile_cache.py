"""Compiled kernels, one a configuration and architecture, and the toolchain they need.

CUTLASS decides its target when it is first imported, so the architecture is settled here before that: the environment
variable ``CUTE_DSL_ARCH`` where it is set (a build without a GPU), else the current device. One process compiles for
one architecture.

    run = compiled_kernel("lm_head.kernel", "compile_top_k", num_outputs=20480, k=64)     # in launch.py
    run(logits.data_ptr(), ..., current_stream(logits))
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.work import REGISTER_LOAD_CARVE_OUT as REGISTER_LOAD_CARVE_OUT

if TYPE_CHECKING:
    import torch

# Carve-out, in per cent. An SM divides its memory between L1 and shared memory for the blocks it runs, and a kernel
# that wants more shared memory than that finds no room until they have left: a block of 200 KB enters beside one of
# 8 KB where that one's kernel asked for all (H200, ``k3sim calibrate``, probe ``residency``).
ALL_SHARED = 100
NO_CUTLASS = "nvidia-cutlass-dsl is not installed: pip install 'k3sim[gpu]'"
ARCHITECTURES = ("sm_90a", "sm_100a", "sm_103a")
_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}

_compiled: dict[tuple[Hashable, ...], Any] = {}


def architecture() -> str:
    """Target of this process: one of ``ARCHITECTURES``. Raises UserError where none can be told or it has no build."""
    named = os.environ.get("CUTE_DSL_ARCH")
    if named is not None:
        if named not in ARCHITECTURES:
            raise UserError(f"CUTE_DSL_ARCH: got {named}, accepted: {', '.join(ARCHITECTURES)}")
        return named
    try:
        import torch
    except ImportError as missing:
        raise UserError("torch is not installed: pip install 'k3sim[gpu]'") from missing
    if not torch.cuda.is_available():
        raise UserError(f"no CUDA GPU is visible: set CUTE_DSL_ARCH to build for one of {', '.join(ARCHITECTURES)}")
    capability = torch.cuda.get_device_capability()
    if capability not in _OF_CAPABILITY:
        raise UserError(f"GPU of compute capability {capability}: kernels exist for 9.0, 10.0 and 10.3")
    return _OF_CAPABILITY[capability]


def require_cutlass() -> None:
    """Raise UserError where ``cutlass`` is not installed; imports nothing."""
    if find_spec("cutlass") is None:
        raise UserError(NO_CUTLASS)


def get_cutlass() -> ModuleType:
    """The ``cutlass`` module, imported for this process's architecture. Raises UserError if it is not installed."""
    os.environ.setdefault("CUTE_DSL_ARCH", architecture())
    try:
        import cutlass
    except ImportError as missing:
        raise UserError(NO_CUTLASS) from missing
    return cutlass  # type: ignore[no-any-return]


def current_stream(like: torch.Tensor) -> Any:
    """torch's current stream on the device of ``like``, as a compiled function takes it."""
    import torch
    from cuda.bindings.driver import CUstream

    return CUstream(torch.cuda.current_stream(like.device).cuda_stream)


def strided(rows: torch.Tensor) -> tuple[int, int]:
    """Address, and bytes from row to row, as a compiled function takes rows of any stride."""
    return rows.data_ptr(), rows.stride(0) * rows.element_size()


def any_compiled() -> bool:
    """Whether this process holds a compiled kernel."""
    return bool(_compiled)


def compile_kernel(module: str, function: str, **fields: Any) -> Any:
    """``function`` of ``k3sim.kernels.<module>`` on the configuration that it takes, made of ``fields``; built anew."""
    build, configuration = _configured(module, function, fields)
    return build(configuration)


@cache
def compiled_kernel(module: str, function: str, **fields: Hashable) -> Any:
    """As ``compile_kernel``, but built once a process: what ``launch.py`` calls on the hot path."""
    build, configuration = _configured(module, function, fields)
    return compiled(configuration, lambda: build(configuration), name=function)


def _configured(module: str, function: str, fields: Mapping[str, Any]) -> tuple[Callable[[Any], Any], Any]:
    """The compile function and its argument, a frozen dataclass of the same module by the function's annotation."""
    get_cutlass()
    found = import_module(f"k3sim.kernels.{module}")
    build = getattr(found, function)
    (annotation,) = (one for name, one in build.__annotations__.items() if name != "return")
    return build, getattr(found, annotation)(**fields)


def compiled(configuration: Hashable, build: Callable[[], Any], *, name: str = "") -> Any:
    """The function for ``configuration`` (a frozen dataclass; its type is part of the key), built on first use.

    ``name`` tells apart kernels that share a type of configuration. Everything that changes the machine code belongs in
    ``configuration``. One that has a ``carve_out_percent`` says what its kernels ask for of an SM's shared memory at
    its largest; the others ask for all of it. Build before a graph capture begins.
    """
    key = (architecture(), name, type(configuration), configuration)
    if key not in _compiled:
        get_cutlass()
        function = build()
        _carve_out(function, getattr(configuration, "carve_out_percent", ALL_SHARED))
        _compiled[key] = function
    return _compiled[key]


def _carve_out(function: Any, percent: int) -> None:
    """Ask the driver for a carve-out for the kernels of a compiled function, where there is a GPU.

    A launch of CUTLASS's takes ``preferred_smem_carveout``, and its loader (nvidia-cutlass-dsl 4.8) does not hand it
    on. Without it the driver divides an SM's memory by what the kernel itself can use, and a launch that needs more
    finds no room there until that kernel's blocks have left (H200, ``k3sim calibrate``, probe ``residency``).
    """
    import torch

    if not torch.cuda.is_available():
        return
    from cuda.bindings import runtime

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"carve-out of {function.function_name}: {result[0]}")
        return result[1] if len(result) > 1 else None

    function.to(None)  # loads it
    if function.jit_module is None:
        return
    attribute = runtime.cudaFuncAttribute.cudaFuncAttributePreferredSharedMemoryCarveout
    for library in function.jit_module.cuda_library:
        count = checked(runtime.cudaLibraryGetKernelCount(library))
        for kernel in checked(runtime.cudaLibraryEnumerateKernels(count, library)):
            for device in range(torch.cuda.device_count()):
                checked(runtime.cudaKernelSetAttributeForDevice(kernel, attribute, percent, device))
