"""Instructions as the kernel reads them: 32 words of 4 bytes each, one a lane.

=======  =====================================================================================
word     holds
=======  =====================================================================================
0        opcode
1, 2     byte offset of the counter to wait for (-1: none), its target in the first launch, or else the version of
         the outputs that are read, or which packet of residual and sums is the newest
3        byte offset of the counter to signal (-1: none)
4, 5     first and count of outputs, columns or heads
6 to 11  of both streams: stages, bytes of a stage, bytes of the last one
12 to 15 addresses of both streams
16 to 29 seven addresses, by opcode (``addresses``)
30       whether the residual restarts; of a pushed product which of the depths; or the version of what is written
31       running number of the instruction
=======  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from k3sim.errors import UserError
from k3sim.kernels.megakernel.instructions import Instruction, InstructionList, Opcode, outputs_version
from k3sim.kernels.megakernel.list_builder import BUFFERS

RECORD_WORDS = 32
RECORD_BYTES = 4 * RECORD_WORDS
COUNTER_BYTES = 128  # a line each, so that polls of one do not meet signals of another
OPCODE, WAIT, TARGET, SIGNAL, FIRST, COUNT, STAGES_OF, STREAM, ADDRESSES = 0, 1, 2, 3, 4, 5, 6, 12, 16
PACKET = TARGET  # of what waits for no counter
NUMBER = 31
RESTARTS = VARIANT = VERSION = 30


def pushed_depths(program: InstructionList) -> tuple[int, ...]:
    """Depths of the pushed products; a record's variant counts through them."""
    return tuple(sorted({one.depth for one in program if one.opcode is Opcode.GEMV_PUSH}))


def addresses(one: Instruction, memory: Mapping[str, torch.Tensor], hidden: int, ranks: int) -> list[int]:
    """The addresses of an instruction, in the order in which the kernel takes them; 0 stands for none."""

    def of(name: str) -> int:
        return int(memory[name].data_ptr())

    site = f"{one.layer}/{one.site}"
    if one.opcode in (Opcode.FOLD_GEMV, Opcode.FOLD_GEMV_SITU):
        operands = (of(f"{site}.{name}") for name in ("weighted", "stats", "norm"))
        return [of(f"packets {one.packet}"), *operands, of(f"{one.stage} out")]
    if one.opcode is Opcode.KDA_HEAD:
        vectors = (of(f"{one.layer}/kda.{name}") for name in ("conv", "past", "dt_bias", "a_log", "norm"))
        return [of("kda.in_proj out"), of("kda.decode out"), *vectors]
    if one.opcode is Opcode.GEMV_PUSH:
        (source,) = {read.region.buffer for read in one.reads if read.region.buffer.endswith(" out")}
        return [of(source), one.buffer * ranks * hidden * 2]
    if one.opcode is Opcode.REDUCE:
        operands = (of(f"{site}.{name}") for name in ("query_norm", "query", "weighted"))
        before = f"received {(one.buffer - 1) % BUFFERS}"
        empties = any(write.region.buffer == before for write in one.writes)
        # Of the packets the base: the newest is that of word PACKET.
        return [of(f"received {one.buffer}"), of("residual"), of("packets 0"), *operands, of(before) if empties else 0]
    return [of(f"received {one.buffer}"), of("packets 0")]


def pack(
    program: InstructionList, memory: Mapping[str, torch.Tensor], *, hidden: int, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Records ``[queues, capacity, 32]`` and lengths ``[queues]``, int32 on the CPU; each queue has a record to spare.

    Raises UserError for an instruction that waits for, signals or streams more than a record has room for.
    """
    places = {counter: COUNTER_BYTES * number for number, counter in enumerate(program.counters)}
    depths = pushed_depths(program)
    capacity = max(map(len, program.queues)) + 1
    words = torch.zeros(len(program.queues), capacity, RECORD_WORDS, dtype=torch.int64)
    numbers = {id(one): number for number, one in enumerate(program)}
    for sm, queue in enumerate(program.queues):
        for place, one in enumerate(queue):
            waits = [wait for wait in one.waits if wait.counter not in program.flags]
            signals = [counter for counter in one.signals if counter not in program.flags]
            if len(waits) > 1 or len(signals) > 1 or len(one.streams) > 2:
                raise UserError(f"{one.name}: a record has one wait, one signal and two streams")
            record = [0] * RECORD_WORDS
            record[OPCODE], record[FIRST], record[COUNT] = one.opcode.value, one.first, one.count
            record[WAIT], record[TARGET] = (places[waits[0].counter], waits[0].target) if waits else (-1, 0)
            record[SIGNAL] = places[signals[0]] if signals else -1
            for part, stream in enumerate(one.streams):
                start = STAGES_OF + 3 * part
                record[start : start + 3] = [stream.num_stages, stream.stage_bytes, stream.last_bytes]
                _put_long(record, STREAM + 2 * part, memory[stream.region.buffer].data_ptr() + stream.region.first)
            for index, address in enumerate(addresses(one, memory, hidden, ranks)):
                _put_long(record, ADDRESSES + 2 * index, address)
            record[VARIANT] = depths.index(one.depth) if one.opcode is Opcode.GEMV_PUSH else int(one.restarts)
            record[NUMBER] = numbers[id(one)]
            if not waits:
                record[PACKET] = outputs_version(one.reads) or one.packet
            record[VERSION] = record[VERSION] or outputs_version(one.writes)
            words[sm, place] = torch.tensor(record)
    lengths = torch.tensor([len(queue) for queue in program.queues], dtype=torch.int32)
    return _as_int32(words), lengths


def _put_long(record: list[int], index: int, value: int) -> None:
    record[index], record[index + 1] = value & 0xFFFFFFFF, value >> 32


def _as_int32(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def instruction(program: InstructionList, number: int) -> Instruction:
    """The instruction with a running number, as a record names it."""
    return next(one for count, one in enumerate(program) if count == number)


def counter_name(program: InstructionList, offset: int) -> str:
    """The counter at a byte offset; a negative one stands for words that are flags."""
    counters: Sequence[str] = program.counters
    return "words that it reads" if offset < 0 else counters[offset // COUNTER_BYTES]
