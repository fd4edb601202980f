"""Facts of a compiled kernel, read from its cubin: registers, stack, shared memory, and what its SASS holds.

The ELF container answers the first three without any tool, in its ``.nv.info`` section; the instructions need
``nvdisasm``, which the ``gpu`` extra brings as a wheel.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from k3sim.errors import UserError
from k3sim.kernels.toolchain.serial_code import INSTRUCTION_BYTES, Instruction, serial_instructions

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_NOBITS = 8
_TEXT = ".text."  # and the function's name: a section of code
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)[ \t]*([^;\n]*)", re.MULTILINE)
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of .nv.info: function index, then bytes of stack or registers


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """One entry function of a cubin.

    ``loads_16_byte`` counts global and asynchronous loads of 16 bytes a lane, ``loads_narrower`` those of less;
    ``spills`` counts loads and stores of local memory. ``serial_instructions`` is by the rule of ``serial_code``.
    """

    function: str
    registers: int
    stack_bytes: int
    static_smem_bytes: int
    code_bytes: int
    instructions: int
    loads_16_byte: int
    loads_narrower: int
    bulk_copies: int
    tensor_core_instructions: int
    spills: int
    serial_instructions: int


def sections(cubin: bytes) -> dict[str, tuple[bytes, int, int]]:
    """Name -> (content, size, info) of every section. Raises ValueError for what is no 64-bit ELF file."""
    if cubin[:4] != b"\x7fELF" or cubin[4] != 2:
        raise ValueError("not a 64-bit ELF file")
    table_offset, = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, table_offset + number * entry_size) for number in range(count)]
    names = headers[names_index]
    found: dict[str, tuple[bytes, int, int]] = {}
    for name_offset, kind, _, _, offset, size, _, info, _, _ in headers:
        start = names[4] + name_offset
        name = cubin[start : cubin.index(b"\0", start)].decode()
        found[name] = (b"" if kind == _NOBITS else cubin[offset : offset + size], size, info)
    return found


def kernel_codes(cubins: Sequence[bytes], architecture: str) -> list[list[KernelCode]]:
    """Of each cubin, built for ``architecture``: facts of every entry function."""
    listings = instructions_of(cubins, architecture)
    return [
        [_kernel_code(function, sections(cubin), code) for function, code in listing.items()]
        for cubin, listing in zip(cubins, listings, strict=True)
    ]


def _kernel_code(function: str, found: dict[str, tuple[bytes, int, int]], code: list[Instruction]) -> KernelCode:
    instructions = Counter(one.opcode for one in code)
    info = found.get(".nv.info", (b"", 0, 0))[0]
    return KernelCode(
        function=function,
        registers=_largest(info, _REGISTERS),
        stack_bytes=_largest(info, _FRAME_SIZE),
        static_smem_bytes=found.get(f".nv.shared.{function}", (b"", 0, 0))[1],
        code_bytes=found[_TEXT + function][1],
        instructions=len(code),
        loads_16_byte=_count(instructions, r"(LDG|LDGSTS)\b.*\.128"),
        loads_narrower=_count(instructions, r"(LDG|LDGSTS)\b(?!.*\.(128|ENL2|256))"),
        bulk_copies=_count(instructions, r"(UBLKCP|UTMALDG|UBLKPF)\b"),
        tensor_core_instructions=_count(instructions, r"(HMMA|HGMMA|QGMMA|UTC\w*MMA)\b"),
        spills=_count(instructions, r"(LDL|STL)\b"),
        serial_instructions=serial_instructions(code),
    )


def _count(instructions: Counter[str], pattern: str) -> int:
    return sum(number for name, number in instructions.items() if re.match(pattern, name))


def _largest(info: bytes, wanted: int) -> int:
    """Largest value of a per-function attribute of ``.nv.info``."""
    largest, at = 0, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # only form 4 carries a payload of ``size`` bytes; the others hold their value in ``size``
            continue
        if attribute == wanted and size == 8:
            largest = max(largest, struct.unpack_from("<II", info, at)[1])
        at += size
    return largest


def disassembler() -> str:
    """Path of ``nvdisasm``: the wheel's, else one on the path. Raises UserError when there is none."""
    for folder in map(Path, sys.path):
        for candidate in folder.glob("nvidia/*/bin/nvdisasm"):
            return str(candidate)
    found = shutil.which("nvdisasm")
    if found is None:
        raise UserError("nvdisasm is not installed: pip install 'k3sim[gpu]'")
    return found


def disassemble(cubins: Sequence[bytes], architecture: str) -> list[dict[str, list[str]]]:
    """Of each cubin: function -> its instructions in order, opcode with modifiers, operands left out."""
    return [
        {name: [one.opcode for one in code] for name, code in listing.items()}
        for listing in instructions_of(cubins, architecture)
    ]


def instructions_of(cubins: Sequence[bytes], architecture: str) -> list[dict[str, list[Instruction]]]:
    """Of each cubin: function -> its instructions in order.

    The code of all goes through ``nvdisasm`` at once, as bare instructions: its start takes as much CPU as the
    compilation of a kernel. Raises ValueError where it does not read every instruction, as of another architecture.
    """
    found = [
        {name.removeprefix(_TEXT): content for name, (content, *_) in sections(cubin).items() if name.startswith(_TEXT)}
        for cubin in cubins
    ]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        for functions in found:
            file.writelines(functions.values())
        file.flush()
        target = "SM" + architecture.removeprefix("sm_")
        command = [disassembler(), "--binary", target, "--no-dataflow", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = enumerate(_INSTRUCTION.findall(done.stdout))
    listings = []
    for functions in found:
        listing = {}
        for name, content in functions.items():
            read = list(islice(lines, len(content) // INSTRUCTION_BYTES))
            first = read[0][0] if read else 0
            listing[name] = [
                Instruction(opcode, bool(guard), _from_start(opcode, operands, first))
                for _, (guard, opcode, operands) in read
            ]
        listings.append(listing)
    given = sum(len(content) for functions in found for content in functions.values())
    if given != INSTRUCTION_BYTES * sum(len(code) for listing in listings for code in listing.values()) or any(lines):
        raise ValueError(f"nvdisasm does not read {given} bytes as instructions of {architecture}, one in 16 bytes")
    return listings


def _from_start(opcode: str, operands: str, first: int) -> str:
    """A branch's operands, with its target counted from the start of its function: its last operand is an address in
    the file of all."""
    if not opcode.startswith("BRA"):
        return operands
    before, _, address = operands.strip().rpartition("0x")
    return f"{before}0x{int(address, 16) - first * INSTRUCTION_BYTES:x}"
