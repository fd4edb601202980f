"""One kernel: its phases in the order of time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import PS, TINY, call, counter_bytes, kernel, reads, simulate, spans, stream, work

from k3sim.kernels.work import Barrier, MachineCode, Pass, ReadKind
from k3sim.sim.timeline.critical_path import Part, critical_path, waits_ps

Patch = pytest.MonkeyPatch


def test_a_late_input_holds_the_arithmetic_up(monkeypatch: Patch) -> None:
    slow = work(Pass(reads=(reads(600),), num_dependent_loads=90, flops=500.0))
    timeline = simulate(monkeypatch, {"a": slow}, [call(0, "a")], num_ranks=1)
    # Both are asked for at 1000; the input is there at 1900, and 500 flops on ten SMs take 50.
    assert spans(kernel(timeline, "a"))[1:] == [
        ("ramp", 1000, 1100),
        ("weights", 1100, 1700),
        ("dependent loads", 1700, 1900),
        ("compute", 1900, 1950),
    ]


def test_address_loads_come_before_the_stream(monkeypatch: Patch) -> None:
    paged = work(Pass(reads=(reads(600),), num_address_loads=2))
    timeline = simulate(monkeypatch, {"a": paged}, [call(0, "a")], num_ranks=1)
    assert spans(kernel(timeline, "a"))[1:3] == [("dependent loads", 1000, 1020), ("ramp", 1020, 1120)]


def test_a_kernel_has_prologue_and_exit(monkeypatch: Patch) -> None:
    machine = replace(TINY, kernel_prologue_s=200 * PS, kernel_exit_cold_s=300 * PS)
    timeline = simulate(monkeypatch, {"a": stream(100)}, [call(0, "a")], machine, num_ranks=1)
    assert spans(kernel(timeline, "a")) == [
        ("launch", 0, 1200),
        ("ramp", 1200, 1300),
        ("weights", 1300, 1400),
        ("drain", 1400, 1700),
    ]
    assert waits_ps(critical_path(timeline))[Part.RAMP_DRAIN] == 400
    task = simulate(monkeypatch, {"a": stream(100)}, [call(0, "a", launch="task")], machine, num_ranks=1)
    assert spans(kernel(task, "a")) == [("ramp", 0, 100), ("weights", 100, 200)]


def test_stores_share_hbm_with_reads(monkeypatch: Patch) -> None:
    updating = work(Pass(reads=(reads(600, kind=ReadKind.KV_STATE),), written_bytes=200))
    timeline = simulate(monkeypatch, {"a": updating}, [call(0, "a")], num_ranks=1)
    # Half each until the 200 are written at 1500; the read's other 400 bytes follow alone.
    assert kernel(timeline, "a").end_ps == 1900
    assert kernel(timeline, "a").hbm_bytes == counter_bytes(timeline, "hbm") == 800


def test_the_next_pass_loads_during_the_barrier(monkeypatch: Patch) -> None:
    two = work(
        Pass(reads=(reads(1000),), barrier=Barrier.GRID, num_barriers=10),
        Pass(reads=(reads(400, early=True),), num_dependent_loads=3),
    )
    timeline = simulate(monkeypatch, {"a": two}, [call(0, "a")], num_ranks=1)
    # The second pass asks at 2100, its 400 bytes run from 2200 to 2600, of which 170 ps lie behind the loads.
    assert spans(kernel(timeline, "a"))[2:] == [
        ("weights", 1100, 2100),
        ("barrier", 2100, 2400),
        ("dependent loads", 2400, 2430),
        ("weights", 2430, 2600),
    ]


def test_phases_follow_in_the_order_of_time(monkeypatch: Patch) -> None:
    """A kernel of two passes behind a PDL edge, which reads early, runs cold code, reduces, and pushes."""
    machine = replace(
        TINY, kernel_prologue_s=50 * PS, kernel_exit_cold_s=300 * PS, kernel_exit_warm_s=80 * PS,
        instruction_s=2 * PS, cold_instruction_s=5 * PS,
    )  # fmt: skip
    first = Pass(
        reads=(reads(1000, early=True), reads(200)), num_dependent_loads=4, num_block_reductions=1,
        barrier=Barrier.CLUSTER, num_barriers=1,
    )  # fmt: skip
    state = reads(300, kind=ReadKind.KV_STATE)
    second = Pass(reads=(state,), num_address_loads=1, flops=4000.0, num_block_reductions=2)
    works = {"a": stream(3000), "b": work(first, second, sent_bytes_per_peer=100)}
    codes = {"a": MachineCode(), "b": MachineCode(num_bytes=1000, serial_instructions=20)}
    calls = [call(0, "a", trigger="start"), call(1, "b", launch="pdl", sends="x")]
    timeline = simulate(monkeypatch, works, calls, machine, codes=codes)
    # a's 3000 bytes and b's early 1000 are through 4000 ps after 1150 (and one, since rates are whole).
    assert spans(kernel(timeline, "a"))[-2:] == [("weights", 1150, 5151), ("drain", 5151, 5451)]
    assert spans(kernel(timeline, "b")) == [
        ("launch", 1050, 2100),  # PDL trigger to launch, prologue
        ("dependency", 2100, 5451),
        ("release", 5451, 5951),
        ("serial code", 5951, 6051),  # 20 instructions, 5 ps each
        ("dependent loads", 6051, 6091),  # four round trips to L2
        ("ramp", 6091, 6191),  # the load pipeline has drained
        ("weights", 6191, 6391),
        ("block reduction", 6391, 6398),
        ("barrier", 6398, 6418),
        ("dependent loads", 6418, 6428),  # the address of the state
        ("ramp", 6428, 6528),
        ("kv and state", 6528, 6828),
        ("compute", 6828, 6928),  # 4000 flops take 400 ps beside 300 bytes
        ("block reduction", 6928, 6942),
        ("drain", 6942, 7162),
        ("send", 7162, 7262),
        ("drain", 7262, 7342),  # of 300 ps, 80 behind the push
    ]
