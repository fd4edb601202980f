"""The selected MXFP4 experts on the current GPU.

    packed = pack_experts(experts)                              # once, offline
    workspace = ExpertWorkspace.allocate(packed, max_rows=16)   # once
    expert_gemv(x, ids, weights, packed, out, workspace)        # every step; can be captured

    expert_gate_up(x, ids, weights, packed, hidden)             # the same in two launches, without a workspace
    expert_down(hidden, ids, packed, out)

Shapes: R rows (1 to 16), L = 3584 latent, W = 192 or 384 width of the rank's slice, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from k3sim.kernels.expert_gemv.mxfp4 import pack_down, pack_gate_up
from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.expert_gemv.reference import Experts
    from k3sim.kernels.latent_tail.launch import TailPeers

LATENT = 3584
TOP_K = 16
WIDTHS = (192, 384)
MAX_ROWS = 16
NUM_BLOCKS = 128
GATE_UP_TILE_BYTES = 14 * (4 * 512 + 128)
DOWN_UNIT_BYTES = 3 * 512 + 128


@dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Weights of all resident experts in the kernel's order (mxfp4.py)."""

    gate_up: torch.Tensor  # [E, W / 8, 30464] uint8
    down: torch.Tensor  # [E, 112, W / 192 x 3328] uint8

    @property
    def width(self) -> int:
        return int(self.gate_up.shape[1]) * 8


def pack_experts(experts: Experts) -> PackedExperts:
    """``experts`` (reference.py) in the kernel's order, on the same device. Raises UserError on a wrong shape."""
    import torch

    count, width = experts.gate.shape[:2]
    check_one_of("experts.gate.shape[1]", width, WIDTHS)
    byte = (torch.uint8,)
    for name in ("gate", "up"):
        check_tensor(name, getattr(experts, name), dtypes=byte, shape=(count, width, LATENT // 2))
        scales = f"{name}_scales"
        check_tensor(scales, getattr(experts, scales), dtypes=byte, shape=(count, width, LATENT // 32))
    check_tensor("down", experts.down, dtypes=byte, shape=(count, LATENT, width // 2))
    check_tensor("down_scales", experts.down_scales, dtypes=byte, shape=(count, LATENT, width // 32))
    return PackedExperts(
        gate_up=pack_gate_up(experts.gate, experts.gate_scales, experts.up, experts.up_scales),
        down=pack_down(experts.down, experts.down_scales),
    )


@dataclass(frozen=True, kw_only=True)
class ExpertWorkspace:
    """What one launch keeps in memory between its two products. Not shared by launches that may overlap."""

    hidden: torch.Tensor  # [2, max rows, 16, W] fp16; all ones bits, until written and once read
    phase: torch.Tensor  # [1] int32: the vector that the next launch writes

    @classmethod
    def allocate(cls, packed: PackedExperts, *, max_rows: int = MAX_ROWS) -> ExpertWorkspace:
        """Workspace for up to ``max_rows`` rows on the device of ``packed``."""
        import torch

        check_one_of("max_rows", max_rows, range(1, MAX_ROWS + 1))
        device = packed.gate_up.device
        return cls(
            hidden=torch.full((2, max_rows, TOP_K, packed.width), -1, dtype=torch.int16, device=device).view(
                torch.float16
            ),
            phase=torch.zeros(1, dtype=torch.int32, device=device),
        )


def _check_operands(ids: torch.Tensor, packed: PackedExperts, rows: int, like: torch.Tensor) -> tuple[int, int]:
    """Width and number of the experts."""
    import torch

    check_one_of("rows", rows, range(1, MAX_ROWS + 1))
    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(rows, TOP_K), like=like)
    byte = (torch.uint8,)
    check_tensor("packed.gate_up", packed.gate_up, dtypes=byte, shape=(None, None, GATE_UP_TILE_BYTES), like=like)
    width, count = packed.width, packed.gate_up.shape[0]
    check_one_of("width of packed", width, WIDTHS)
    down_shape = (count, LATENT // 32, width // 192 * 2 * DOWN_UNIT_BYTES)
    check_tensor("packed.down", packed.down, dtypes=byte, shape=down_shape, like=like)
    return width, count


def _function(width: int, fp32_out: bool, part: str, num_peers: int = 0) -> Any:
    fields = {"width": width, "fp32_out": fp32_out, "part": part, "num_peers": num_peers}
    return compiled_kernel("expert_gemv.kernel", "compile_experts", **fields)


def expert_gemv(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, out: torch.Tensor,
    workspace: ExpertWorkspace,
) -> None:
    """Write this rank's partial latent to ``out`` [R, L] (bf16 or fp32), on the current stream.

    ``x`` [R, L] bf16, magnitudes up to 65504; ``ids`` [R, 16] int32, outside 0 .. E - 1 contributing nothing;
    ``weights`` [R, 16] fp32, magnitudes up to 1. The first call for a width and output type compiles; make it before
    a graph capture. Raises UserError before any launch.
    """
    import torch

    width, count = _check_call(x, ids, weights, packed, workspace)
    check_tensor("out", out, dtypes=(torch.bfloat16, torch.float32), shape=(x.shape[0], LATENT), like=x)
    _check_gpu(x)
    run = _function(width, out.dtype == torch.float32, "both")
    run(*_addresses(x, ids, weights, packed, out, workspace), count, 0, current_stream(x))


def expert_gemv_push(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, peers: TailPeers, rank: int,
    workspace: ExpertWorkspace,
) -> None:
    """As ``expert_gemv``, but the partial latent goes, in bf16, into slot ``rank`` of every peer's ``latent`` slots.

    It replaces the latent half of ``latent_tail.send``: ``latent_tail.up`` polls the slots, which must be empty. Raises
    UserError before any launch.
    """
    from k3sim.kernels.latent_tail.launch import check_peers

    width, count = _check_call(x, ids, weights, packed, workspace)
    check_peers(peers, rank, x.shape[0], x)
    _check_gpu(x)
    run = _function(width, False, "both", peers.ranks)
    run(*_addresses(x, ids, weights, packed, peers.latent, workspace), count, rank, current_stream(x))


def _check_call(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, workspace: ExpertWorkspace
) -> tuple[int, int]:
    """Check the operands of both products in one launch; width of the slice and number of experts."""
    import torch

    check_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, LATENT))
    rows = x.shape[0]
    check_one_of("rows of x", rows, range(1, MAX_ROWS + 1))
    width, count = _check_operands(ids, packed, rows, x)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(rows, TOP_K), like=x)
    check_tensor("workspace.hidden", workspace.hidden, dtypes=(torch.float16,), shape=(2, None, TOP_K, width), like=x)
    if workspace.hidden.shape[1] < rows:
        raise refuse("rows of workspace", workspace.hidden.shape[1], f"at least {rows}, the rows of x")
    check_tensor("workspace.phase", workspace.phase, dtypes=(torch.int32,), shape=(1,), like=x)
    return width, count


def _check_gpu(x: torch.Tensor) -> None:
    import torch

    check_on_gpu("x", x)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    if num_sms < NUM_BLOCKS:
        raise refuse("multiprocessors of the GPU", num_sms, f"at least {NUM_BLOCKS}, all blocks being resident")


def _addresses(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, out: torch.Tensor,
    workspace: ExpertWorkspace,
) -> tuple[int, ...]:
    tensors = (x, ids, weights, packed.gate_up, packed.down, out, workspace.hidden, workspace.phase)
    return *(one.data_ptr() for one in tensors), x.shape[0], workspace.hidden.shape[1]


def expert_gate_up(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, packed: PackedExperts, hidden: torch.Tensor
) -> None:
    """First half of ``expert_gemv`` as a launch of its own: ``hidden`` [R, 16, W] f16 for ``expert_down``.

    Holds 256 times the router weight times SiTU-GLU of gate and up. Operands as in ``expert_gemv``. Raises UserError
    before any launch.
    """
    import torch

    check_tensor("x", x, dtypes=(torch.bfloat16,), shape=(None, LATENT))
    rows = x.shape[0]
    width, count = _check_operands(ids, packed, rows, x)
    check_tensor("weights", weights, dtypes=(torch.float32,), shape=(rows, TOP_K), like=x)
    check_tensor("hidden", hidden, dtypes=(torch.float16,), shape=(rows, TOP_K, width), like=x)
    check_on_gpu("x", x)
    _function(width, False, "gate_up")(
        x.data_ptr(), ids.data_ptr(), weights.data_ptr(), packed.gate_up.data_ptr(), 0, 0, hidden.data_ptr(), 0, rows,
        rows, count, 0, current_stream(x),
    )  # fmt: skip


def expert_down(hidden: torch.Tensor, ids: torch.Tensor, packed: PackedExperts, out: torch.Tensor) -> None:
    """Second half of ``expert_gemv``: ``out`` [R, L] (bf16 or fp32), the weighted sum over the experts of ``hidden``.

    Raises UserError before any launch.
    """
    import torch

    check_tensor("out", out, dtypes=(torch.bfloat16, torch.float32), shape=(None, LATENT))
    rows = out.shape[0]
    width, count = _check_operands(ids, packed, rows, out)
    check_tensor("hidden", hidden, dtypes=(torch.float16,), shape=(rows, TOP_K, width), like=out)
    check_on_gpu("out", out)
    _function(width, out.dtype == torch.float32, "down")(
        0, ids.data_ptr(), 0, 0, packed.down.data_ptr(), out.data_ptr(), hidden.data_ptr(), 0, rows, rows, count, 0,
        current_stream(out),
    )  # fmt: skip
