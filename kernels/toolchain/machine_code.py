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
from dataclasses import dataclass
from pathlib import Path

from k3sim.errors import UserError

_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, alignment, entry size
_NOBITS = 8
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F  # attributes of .nv.info: function index, then bytes of stack or registers


@dataclass(frozen=True, kw_only=True)
class KernelCode:
    """One entry function of a cubin.

    ``loads_16_byte`` counts global and asynchronous loads of 16 bytes a lane, ``loads_narrower`` those of less;
    ``spills`` counts loads and stores of local memory.
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


def kernel_codes(cubin: bytes) -> list[KernelCode]:
    """Facts of every entry function of a cubin."""
    found = sections(cubin)
    listing = disassemble(cubin)
    codes = []
    info = found.get(".nv.info", (b"", 0, 0))[0]
    for name, (_, size, _) in found.items():
        if not name.startswith(".text."):
            continue
        function = name.removeprefix(".text.")
        instructions = Counter(listing.get(function, []))
        codes.append(
            KernelCode(
                function=function,
                registers=_largest(info, _REGISTERS),
                stack_bytes=_largest(info, _FRAME_SIZE),
                static_smem_bytes=found.get(f".nv.shared.{function}", (b"", 0, 0))[1],
                code_bytes=size,
                instructions=sum(instructions.values()),
                loads_16_byte=_count(instructions, r"(LDG|LDGSTS)\b.*\.128"),
                loads_narrower=_count(instructions, r"(LDG|LDGSTS)\b(?!.*\.(128|ENL2|256))"),
                bulk_copies=_count(instructions, r"(UBLKCP|UTMALDG|UBLKPF)\b"),
                tensor_core_instructions=_count(instructions, r"(HMMA|HGMMA|QGMMA|UTC\w*MMA)\b"),
                spills=_count(instructions, r"(LDL|STL)\b"),
            )
        )
    return codes


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


def disassemble(cubin: bytes) -> dict[str, list[str]]:
    """Function -> its instructions in order, opcode with modifiers, operands left out."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [disassembler(), "--print-code", file.name], capture_output=True, text=True, check=True
        )
    functions: dict[str, list[str]] = {}
    current: list[str] = []
    for line in done.stdout.splitlines():
        section = re.match(r"\s*\.section\s+\.text\.([^,\s]+)", line) or re.match(r"//-+ \.text\.(\S+) -+", line)
        if section:
            current = functions.setdefault(section.group(1), [])
            continue
        instruction = re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line)
        if instruction:
            current.append(instruction.group(1))
    return functions
