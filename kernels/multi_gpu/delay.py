"""Delays of a rank, of random or fixed length, on its stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3sim.kernels.toolchain.compile_cache import compiled, current_stream, get_cutlass

if TYPE_CHECKING:
    import torch


def _compile() -> Any:
    from k3sim.kernels.multi_gpu.kernel import compile_delay

    return compile_delay()


class Delay:
    """Delays of one rank; ``seed`` sets their lengths apart from another's."""

    def __init__(self, device: torch.device | str, seed: int) -> None:
        import torch

        self._state = torch.full((1,), seed, dtype=torch.int32, device=device)

    def __call__(self, *, shortest_us: float = 0.0, range_us: float = 0.0) -> None:
        """Keep the current stream busy for ``shortest_us`` and a random part of ``range_us``."""
        get_cutlass()
        run = compiled("delay", _compile)
        run(self._state.data_ptr(), round(shortest_us * 1e3), round(range_us * 1e3), current_stream(self._state))
