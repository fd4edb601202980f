"""Times from inside the kernels, one record a block: a second source beside CUPTI for launches that overlap.

    buffer = timestamps.collect()          # before any kernel of the process is compiled
    ...                                # build and capture as always
    buffer.clear(); step.replay(); launches = buffer.launches()

A block's record says when it began, when its dependency wait was over (of a kernel that polls: when what it polls for
was there) and when it ended, on the GPU's timer, and on which SM. First and last block bound a launch; one that was let
in early is seen as it is: its blocks come when SMs have room, and wait. What could mislead: the timer steps by 32 ns on
an H200; an end is that of the block's first thread; recording costs (13 layers of the fused path on an H200,
2026-11-29: 697 us with, 675 without), so times of a step come from another run. Kernels without a record (cuBLAS,
torch, the smaller ones of the project) are not seen.

Records of all families put 35 us on 605, and blocks then become resident in another order; those of experts and tail,
or of MLA's kernels, none, those of GEMVs and experts 9, of projection and selection 14 (H200, 2026-11-30, two a time).
So what a step with all of them shows is to be looked at once more with few.

It is a switch of the compiler's: machine code without it has no trace of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.folders import operators_with, part_of

if TYPE_CHECKING:
    import torch
    from cutlass import Int32, Int64

CAPACITY = 1 << 18  # records; a fused step of 93 layers makes some 110,000
HEAD_BYTES = 64  # the count, then nothing, so that records stay aligned
RECORD_WORDS = 10  # of 4 bytes: kind, block, SM, unused; three times of two words

_address = 0
_families: frozenset[str] = frozenset()
_kinds: dict[str, int] = {}


@dataclass(frozen=True, kw_only=True)
class BlockTimestamps:
    """One block. Times in ns of the GPU's timer; ``released_ns`` is 0 where the kernel does not record it."""

    kernel: str
    block: int
    sm: int
    began_ns: int
    released_ns: int
    ended_ns: int


@dataclass(frozen=True, kw_only=True)
class RecordedLaunch:
    """One launch: its first and its last block, in us from the first block of all.

    ``released_us`` is None where the kernel does not record it. ``num_sms``: on which its blocks ran.
    """

    kernel: str
    num_blocks: int
    began_us: tuple[float, float]
    released_us: tuple[float, float] | None
    ended_us: tuple[float, float]
    num_sms: int


@dataclass(frozen=True)
class TimestampBuffer:
    """Where the kernels of this process record."""

    memory: torch.Tensor

    def clear(self) -> None:
        self.memory[:HEAD_BYTES].zero_()

    def timestamps(self) -> list[BlockTimestamps]:
        """Records since ``clear``, in no order. Raises UserError where there were more than it holds."""
        import torch

        torch.cuda.synchronize()
        count = int(self.memory[:4].view(torch.int32))
        if count > CAPACITY:
            raise UserError(f"timestamps: {count} records, {CAPACITY} fit; take fewer layers")
        end = HEAD_BYTES + 4 * RECORD_WORDS * count
        words = self.memory[HEAD_BYTES:end].cpu().view(torch.int32).view(count, RECORD_WORDS)
        times = words[:, 4:].contiguous().view(torch.int64).tolist()
        names = {number: name for name, number in _kinds.items()}
        return [
            BlockTimestamps(
                kernel=names[kind], block=block, sm=sm, began_ns=began, released_ns=released, ended_ns=ended
            )
            for (kind, block, sm), (began, released, ended) in zip(words[:, :3].tolist(), times, strict=True)
        ]

    def launches(self) -> list[RecordedLaunch]:
        """What was recorded since ``clear``, launch by launch."""
        return launches_of(self.timestamps())


def launches_of(timestamps: Sequence[BlockTimestamps]) -> list[RecordedLaunch]:
    """Launches in the order in which they began.

    Launches of one kernel follow one another on their stream, so the k-th record of each of its blocks is of its k-th
    launch.
    """
    of_block: dict[tuple[str, int], list[BlockTimestamps]] = defaultdict(list)
    for one in sorted(timestamps, key=lambda one: one.began_ns):
        of_block[one.kernel, one.block].append(one)
    found: dict[tuple[str, int], list[BlockTimestamps]] = defaultdict(list)
    for (kernel, _), records in of_block.items():
        for number, one in enumerate(records):
            found[kernel, number].append(one)
    origin_ns = min((one.began_ns for one in timestamps), default=0)

    def span(values: Sequence[int]) -> tuple[float, float]:
        return (min(values) - origin_ns) / 1e3, (max(values) - origin_ns) / 1e3

    launches = [
        RecordedLaunch(
            kernel=kernel,
            num_blocks=len(records),
            began_us=span([one.began_ns for one in records]),
            released_us=span([one.released_ns for one in records]) if all(one.released_ns for one in records) else None,
            ended_us=span([one.ended_ns for one in records]),
            num_sms=len({one.sm for one in records}),
        )
        for (kernel, _), records in found.items()
    ]
    return sorted(launches, key=lambda one: (one.began_us, one.kernel))


def collect(device: torch.device | str = "cuda", families: Sequence[str] = ()) -> TimestampBuffer:
    """Have kernels that are compiled from now on record into a new buffer: those of ``families``, or all.

    Raises UserError where some are compiled already, and for a family that there is not.
    """
    global _address, _families
    import torch

    from k3sim.kernels.toolchain.compile_cache import any_compiled

    if any_compiled():
        raise UserError(
            "timestamps: kernels of this process are compiled without them; ask for timestamps before any runs"
        )
    _families = frozenset(checked(families))
    memory = torch.zeros(HEAD_BYTES + 4 * RECORD_WORDS * CAPACITY, dtype=torch.uint8, device=device)
    _address = memory.data_ptr()
    return TimestampBuffer(memory)


@cache
def recording_families() -> tuple[str, ...]:
    """Kernels that record, by the folder that they lie in: those whose ``builds.py`` says so."""
    found = ((operator, part_of(operator, "builds")) for operator in operators_with("builds"))
    return tuple(operator for operator, builds in found if getattr(builds, "RECORDS_TIMESTAMPS", False))


def checked(families: Sequence[str]) -> Sequence[str]:
    """``families``. Raises UserError for one that there is not."""
    for one in families:
        if one not in recording_families():
            raise UserError(f"timestamps: got {one!r}, accepted: {', '.join(recording_families())}")
    return families


# ---- in kernels -----------------------------------------------------------------------------------------------------


def on(family: str) -> bool:
    """Whether kernels of a family that are being compiled record."""
    return _address != 0 and (not _families or family in _families)


def now(family: str) -> Int64:
    """The GPU's timer; the constant 0 where nothing is recorded."""
    from cutlass import Int64
    from cutlass.cute.arch import globaltimer

    return globaltimer() if on(family) else Int64(0)


def record(kernel: str, block: Int32, began: Int64, released: Int64 | None = None) -> None:
    """This block's record, ending now; for one thread, where ``on()``."""
    from cutlass import Int32, Int64
    from cutlass._mlir.dialects import nvvm
    from cutlass.cute.arch import globaltimer
    from cutlass.cutlass_dsl import T

    from k3sim.kernels.device import ptx

    ended = globaltimer()  # before the trip for a place in the buffer
    kind = _kinds.setdefault(kernel, len(_kinds))
    # As a register: a constant address is none that the assembler takes.
    base: Any = ptx.inline_ptx("mov.b64 {$w0}, {$r0};", write_only_types=[Int64], read_only_args=[Int64(_address)])
    at: Any = ptx.inline_ptx(
        "atom.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[base]
    )
    # Beyond the last place records are counted, and overwrite that one.
    place = base + HEAD_BYTES + _at_most(at, CAPACITY - 1).to(Int64) * (4 * RECORD_WORDS)
    for number, value in enumerate((Int32(kind), block, Int32(nvvm.read_ptx_sreg_smid(T.i32())))):
        ptx.store_int(place + 4 * number, value)
    for number, time in enumerate((began, Int64(0) if released is None else released, ended)):
        ptx.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[place + 16 + 8 * number, time])


def _at_most(value: Int32, limit: int) -> Any:
    import cutlass

    return cutlass.min(value, cutlass.Int32(limit))
