"""Footprints: the rule that counts serial code, launches read from host code, and what the files hold."""

from __future__ import annotations

import pytest

from k3sim.kernels.costs import all_costs, code_of
from k3sim.kernels.footprints import Footprint, footprint, footprints
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES
from k3sim.kernels.toolchain.launch_facts import launch_facts
from k3sim.kernels.toolchain.serial_code import Instruction, serial_instructions


def code(*lines: str) -> list[Instruction]:
    """``@`` first: guarded. A branch names the number of its target."""
    found = []
    for line in lines:
        opcode, _, target = line.lstrip("@").partition(" ")
        operands = f"0x{16 * int(target):x}" if opcode.startswith("BRA") else target
        found.append(Instruction(opcode, line.startswith("@"), operands))
    return found


def test_straight_code_counts_from_the_wait() -> None:
    assert serial_instructions(code("MOV", "LDG.E.128", "ACQBULK", "FADD", "NOP", "HMMA.16816.F32", "STG", "EXIT")) == 4
    assert serial_instructions(code("MOV", "FADD", "EXIT")) == 3  # nothing is waited for


def test_the_longest_way_to_an_exit_counts() -> None:
    assert serial_instructions(code("ACQBULK", "@EXIT", "@BRA 5", "FADD", "FADD", "STG", "EXIT")) == 7
    assert serial_instructions(code("ACQBULK", "@BRA 4", "FADD", "EXIT", "FADD", "FADD", "FADD", "EXIT")) == 6
    # A trap, a diverged warp's way and the code behind an exit are nobody's.
    assert serial_instructions(code("ACQBULK", "BRA.DIV 4", "FADD", "EXIT", "FADD", "FADD", "EXIT")) == 4
    assert serial_instructions(code("ACQBULK", "@BRA 3", "EXIT", "BPT.TRAP", "FADD", "FADD", "EXIT")) == 3


@pytest.mark.parametrize(
    ("body", "counted"), [("IADD3", 2), ("LDG.E.128", 0), ("SYNCS.PHASECHK.TRANS64.TRYWAIT", 0), ("HMMA.16816.F32", 0)]
)
def test_loops_count_once_unless_priced(body: str, counted: int) -> None:
    assert serial_instructions(code("ACQBULK", body, "@BRA 1", "STG", "EXIT")) == 3 + counted


def test_a_loop_around_another_counts_once() -> None:
    # 1..5 is a loop of rows around 2..3, which streams; with a product in its own instructions it is no serial code.
    assert serial_instructions(code("ACQBULK", "IADD3", "LDG.E", "@BRA 2", "FADD", "@BRA 1", "EXIT")) == 5
    assert serial_instructions(code("ACQBULK", "IADD3", "LDG.E", "@BRA 2", "HMMA.1", "@BRA 1", "EXIT")) == 2


def test_polled_input_begins_the_count() -> None:
    """A kernel that waits for its predecessor at its end, since what it polls comes from peers."""
    polling = code("MOV", "LDG.E.128.STRONG.SYS", "@BRA 1", "FADD", "FADD", "STG", "ACQBULK", "EXIT")
    assert serial_instructions(polling) == 5


CONFIG = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"


def host_code(fields: dict[str, str], launches: int = 1) -> str:
    lines = ["  llvm.func @cutlass_launch(%arg0: i32) -> i32 {"]
    lines += [f"    %c{value} = llvm.mlir.constant({value} : i32) : i32" for value in (1, 4, 224, 3712)]
    lines += [f"    %{9 - number} = llvm.alloca %c1 x {CONFIG} : (i32) -> !llvm.ptr" for number in range(launches)]
    for at, (place, value) in enumerate(fields.items(), start=20):
        lines.append(f"    %{at} = llvm.getelementptr %9[0, {place}] : (!llvm.ptr) -> !llvm.ptr, {CONFIG}")
        lines.append(f"    llvm.store {value}, %{at} : i32, !llvm.ptr")
    return "\n".join([*lines, "  }", ""])


def test_launches_are_read_from_host_code() -> None:
    block = {"1, 0": "%c224", "1, 1": "%c1", "1, 2": "%c1"}
    fields = {**block, "2": "%c3712", "0, 0": "%c4", "0, 1": "%arg0", "0, 2": "%c1"}
    read = launch_facts(host_code(fields))
    assert (read.grid, read.block, read.dynamic_smem_bytes) == ((4, 0, 1), (224, 1, 1), 3712)
    assert read.cluster == (1, 1, 1)
    with pytest.raises(ValueError, match="2 launches"):
        launch_facts(host_code(fields, launches=2))


def test_registers_are_given_out_in_eights() -> None:
    one = Footprint(
        registers=121, static_smem_bytes=576, dynamic_smem_bytes=1024, threads=128, grid=(1, 0, 1), cluster=1,
        code_bytes=160, serial_instructions=7,
    )  # fmt: skip
    assert (one.allocated_registers, one.smem_bytes) == (128, 1600)


def test_files_hold_the_same_forms() -> None:
    forms = [footprints(architecture).keys() for architecture in ARCHITECTURES]
    assert forms[0] == forms[1] == forms[2] and len(forms[0]) > 150


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_footprints_fit_an_sm(architecture: str) -> None:
    for form, one in footprints(architecture).items():
        warps = one.threads // 32
        assert one.threads % 32 == 0 and 0 < one.allocated_registers * 32 * warps <= 65_536, form
        assert one.smem_bytes <= 227 * 1024 and one.grid[0] % one.cluster == 0, form
        assert 0 < 16 * one.serial_instructions <= one.code_bytes, form


def test_code_of_own_kernels_is_as_built() -> None:
    assert code_of("router_topk.select").num_bytes == footprint("router_topk", "whole").code_bytes
    own = [name for name in all_costs() if code_of(name).num_bytes and not name.startswith("cublas.")]
    assert len(own) > 30
