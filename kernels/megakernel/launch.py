"""Runs an instruction list on the current GPU.

    run = Megakernel(schedule(program, architecture, num_sms=132), memory, hidden=7168, ranks=16)
    run()                                      # one launch; captures like any kernel
    run.check()                                # UserError where a wait was given up

``memory`` holds the list's tensors by name (``operands.random_operands``, ``reference.fill``), all on the GPU and at
their addresses for as long as the object is used. A launch leaves receive buffers empty and counters at their targets,
so the next one may follow at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import Instruction, InstructionList, Opcode
from k3sim.kernels.megakernel.mla_reference import MLA_EXECUTE
from k3sim.kernels.megakernel.moe_reference import MOE_EXECUTE
from k3sim.kernels.megakernel.record import COUNTER_BYTES, counter_name, instruction, pack, pushed_depths
from k3sim.kernels.megakernel.validator import check
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream

if TYPE_CHECKING:
    import torch

WINDOW, NARROW_WINDOW, NARROW_ROWS = 8, 2, 8
NUM_STAMPS = 6
WITHOUT_BODY = frozenset((*MLA_EXECUTE, *MOE_EXECUTE))  # instructions that the interpreter runs and the kernel does not
CONTROL_WORDS = 8  # launches so far; a wait was given up: instruction, counter, signals missing


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An instruction as it ran: fetched, let go by its wait, done; ns of the GPU's timer from the first of all.

    ``ready_ns``: of a product its input folded, of a head or a reduction its output stored, in front of the signal;
    ``sixteen_ns``: of a product of the residual 16 rows done. None where the instruction has no such point.
    """

    instruction: Instruction
    began_ns: int
    released_ns: int
    ready_ns: int | None
    sixteen_ns: int | None
    ended_ns: int


class Megakernel:
    """A list, its operands and the kernel. Building it checks the list, compiles and uploads.

    ``window``: stages of the ring that may be under way while a product reads it; ``narrow_window``: at other times,
    and in the last ``narrow_rows`` rows of a product of the residual. ``timestamps``: have every instruction record its
    times. ``watchdog_s``: how long a wait may take, at most a second. Raises UserError for an instruction that the
    kernel has no body for, a list that could hang or race, a GPU with fewer SMs than queues, and receive buffers that
    do not lie one behind the other.
    """

    def __init__(
        self,
        program: InstructionList,
        memory: dict[str, torch.Tensor],
        *,
        hidden: int,
        ranks: int,
        window: int = WINDOW,
        narrow_window: int = NARROW_WINDOW,
        narrow_rows: int = NARROW_ROWS,
        timestamps: bool = False,
        watchdog_s: float = 1.0,
    ) -> None:
        import torch

        lacking = next((one for one in program if one.opcode in WITHOUT_BODY), None)
        if lacking is not None:
            raise UserError(f"megakernel: {lacking.name}: the kernel has no body for it; reference.run runs the list")
        device = memory["residual"].device
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        if len(program.queues) > num_sms:
            raise UserError(f"megakernel: {len(program.queues)} queues, and the GPU has {num_sms} SMs")
        if not 0 < watchdog_s <= 1:
            raise UserError(f"megakernel: watchdog_s: got {watchdog_s}, accepted: more than 0, at most 1")
        self.program, self.memory = check(program), memory
        records, lengths = pack(program, memory, hidden=hidden, ranks=ranks)
        self._records, self._lengths = records.to(device), lengths.to(device)
        counters = max(1, len(program.counters)) * COUNTER_BYTES // 4
        self._counters = torch.zeros(counters, dtype=torch.int32, device=device)
        self._control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=device)
        slots = [memory["received 0"].data_ptr() + rank * hidden * 2 for rank in range(ranks)]
        span = hidden * ranks * 2
        for number in (1, 2):  # a push adds the buffer's offset to the address of a rank's first slot
            if memory[f"received {number}"].data_ptr() != memory["received 0"].data_ptr() + number * span:
                raise UserError("megakernel: the receive buffers must lie one behind the other")
        self._peers = torch.tensor(slots, dtype=torch.int64, device=device)
        self._stamps = torch.zeros((*records.shape[:2], NUM_STAMPS), dtype=torch.int64, device=device)
        heads = {one.first for one in program if one.opcode is Opcode.KDA_HEAD}
        self._run = compiled_kernel(
            "megakernel.kernel",
            "compile_megakernel",
            num_sms=len(program.queues),
            ranks=ranks,
            heads=len(heads),
            depths=pushed_depths(program),
            window=window,
            narrow_window=narrow_window,
            narrow_rows=narrow_rows,
            timestamps=timestamps,
            watchdog_ns=round(watchdog_s * 1e9),
        )

    def __call__(self) -> None:
        """Launch on the current stream."""
        self._run(
            self._records.data_ptr(),
            self._lengths.data_ptr(),
            self._counters.data_ptr(),
            self._control.data_ptr(),
            self._peers.data_ptr(),
            self._stamps.data_ptr(),
            self._records.shape[1],
            current_stream(self._control),
        )

    @property
    def launches(self) -> int:
        """Launches that have ended."""
        return int(self._control[0])

    def check(self) -> None:
        """Raise UserError with instruction and counter where a wait was given up; waits for the GPU."""
        _, gave_up, number, offset, missing, *_ = self._control.tolist()
        if gave_up:
            one = instruction(self.program, number)
            counter = counter_name(self.program, offset)
            raise UserError(f"megakernel: {one.name} waited in vain for {counter}: {missing} signals missing")

    def times(self) -> list[Timed]:
        """Times of the newest launch, queue by queue; of a kernel built with ``timestamps``."""
        stamps = self._stamps.tolist()
        found = [
            (one, *stamps[sm][place])
            for sm, queue in enumerate(self.program.queues)
            for place, one in enumerate(queue)
        ]
        origin = min(began for _, began, *_ in found)
        return [
            Timed(
                instruction=one,
                began_ns=began - origin,
                released_ns=max(released, began) - origin,
                ready_ns=ready - origin if ready else None,
                sixteen_ns=sixteen - origin if sixteen else None,
                ended_ns=ended - origin,
            )
            for one, began, released, ended, ready, sixteen, _ in found
        ]
