"""Instruction caches: warm and cold code, serial instructions, exits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tiny import PS, TINY, call, kernel, simulate, spans, stream, work

from k3sim.kernels.work import MachineCode, Pass
from k3sim.model.program import Call, Weight
from k3sim.sim.components import instruction_cache
from k3sim.sim.components.instruction_cache import InstructionCache
from k3sim.sim.machine import Machine

Patch = pytest.MonkeyPatch

PACED = replace(TINY, instruction_s=2 * PS, cold_instruction_s=5 * PS)
CODES = {
    "a": MachineCode(num_bytes=20_000, serial_instructions=100),
    "b": MachineCode(num_bytes=30_000, serial_instructions=200),
    "c": MachineCode(num_bytes=50_000, serial_instructions=400),
}
SMALL = {"a": MachineCode(num_bytes=1000, serial_instructions=100)}


def serial_ps(monkeypatch: Patch, calls: list[Call], codes: Mapping[str, MachineCode], machine: Machine) -> list[int]:
    """What the serial code of each kernel takes."""
    works = {name: stream(1000) for name in codes}
    timeline = simulate(monkeypatch, works, calls, machine, num_ranks=1, codes=codes)
    runs = sorted(timeline.kernels, key=lambda run: run.index)
    return [sum(end - start for phase, start, end in spans(run) if phase == "serial code") for run in runs]


def launches(names: str) -> list[Call]:
    return [replace(call(index, name), stage=f"{index}") for index, name in enumerate(names)]


def test_serial_code_is_a_span_behind_the_launch(monkeypatch: Patch) -> None:
    timeline = simulate(monkeypatch, {"a": stream(1000)}, launches("aa"), PACED, num_ranks=1, codes=SMALL)
    assert spans(kernel(timeline, "0")) == [
        ("launch", 0, 1000), ("serial code", 1000, 1500), ("ramp", 1500, 1600), ("weights", 1600, 2600)
    ]  # fmt: skip
    assert spans(kernel(timeline, "1")) == [
        ("release", 2600, 3100), ("launch", 3100, 4100), ("serial code", 4100, 4300), ("ramp", 4300, 4400),
        ("weights", 4400, 5400),
    ]  # fmt: skip


def test_serial_code_runs_warm_or_cold(monkeypatch: Patch) -> None:
    # Everything is fetched at first; then 20 and 30 KB are in the cache together, and 50 KB with none of them.
    assert serial_ps(monkeypatch, launches("aabab"), CODES, PACED) == [500, 200, 1000, 200, 400]
    assert serial_ps(monkeypatch, launches("acabc"), CODES, PACED) == [500, 2000, 500, 1000, 2000]
    # Where a drawn machine fetches as fast as it runs, fetching costs nothing.
    assert serial_ps(monkeypatch, launches("aa"), CODES, replace(PACED, cold_instruction_s=1 * PS)) == [200, 200]


def test_code_paced_elsewhere_counts_its_misses_only(monkeypatch: Patch) -> None:
    codes = {**CODES, "a": replace_misses(CODES["a"], 100)}
    assert serial_ps(monkeypatch, launches("aab"), codes, PACED) == [500, 0, 1000]
    # Another pace of warm code is another count's.
    assert serial_ps(monkeypatch, launches("aa"), codes, replace(PACED, instruction_s=4 * PS)) == [500, 0]


def replace_misses(code: MachineCode, count: int) -> MachineCode:
    return MachineCode(
        num_bytes=code.num_bytes, serial_instructions=code.serial_instructions, icache_miss_instructions=count
    )


@pytest.mark.parametrize(("others_bytes", "is_warm"), [(64 * 1024 - 1000, True), (64 * 1024 - 999, False)])
def test_code_is_warm_up_to_64_kb(monkeypatch: Patch, others_bytes: int, is_warm: bool) -> None:
    codes = {"a": MachineCode(num_bytes=1000), "b": MachineCode(num_bytes=others_bytes)}
    monkeypatch.setattr(instruction_cache, "code_of", lambda operator: codes[operator])
    cache = InstructionCache(TINY, counts_code=True)
    assert [cache.launch(one).is_warm for one in launches("aba")] == [False, False, is_warm]


def test_products_of_other_shapes_are_other_code(monkeypatch: Patch) -> None:
    shapes = ((64, 32), (64, 32), (32, 64), (64, 32))
    calls = [
        call(index, "a", stage=f"{index}", weights=(Weight(region="", num_outputs=n, depth=k, num_bytes=1),))
        for index, (n, k) in enumerate(shapes)
    ]
    assert serial_ps(monkeypatch, calls, SMALL, PACED) == [500, 200, 500, 200]


def test_a_warm_kernel_exits_sooner(monkeypatch: Patch) -> None:
    machine = replace(TINY, kernel_exit_cold_s=300 * PS, kernel_exit_warm_s=80 * PS)
    codes = {"a": MachineCode(num_bytes=1000), "b": MachineCode()}
    timeline = simulate(monkeypatch, {"a": stream(1000)}, launches("aa"), machine, num_ranks=1, codes=codes)
    assert [spans(kernel(timeline, stage))[-1] for stage in "01"] == [("drain", 2100, 2400), ("drain", 5000, 5080)]
    # Of one that pushes, the exit comes behind the push.
    works = {"a": replace(stream(1000), sent_bytes_per_peer=100), "b": work(Pass())}
    calls = [call(0, "a", sends="x"), call(1, "b", receives=(0,))]
    pushing = kernel(simulate(monkeypatch, works, calls, machine, codes=codes), "a")
    assert spans(pushing)[-3:] == [("drain", 2100, 2320), ("send", 2320, 2420), ("drain", 2420, 2500)]


def test_many_warps_of_an_sm_share_its_issue(monkeypatch: Patch) -> None:
    """Ten blocks of 320 threads on ten SMs: ten warps each, of which four issue in a clock of 10 ps."""
    machine = replace(PACED, sm_clock_hz=1e11)
    works = {"a": replace(stream(1000), threads_per_block=320)}
    timeline = simulate(monkeypatch, works, launches("a"), machine, num_ranks=1, codes=SMALL)
    assert spans(kernel(timeline, "0"))[1] == ("serial code", 1000, 3500)


def test_a_work_may_count_its_own_serial_code(monkeypatch: Patch) -> None:
    works = {"a": replace(stream(1000), serial_instructions=300)}
    timeline = simulate(monkeypatch, works, launches("a"), PACED, num_ranks=1, codes=SMALL)
    assert spans(kernel(timeline, "0"))[1] == ("serial code", 1000, 2500)


def test_code_of_public_kernels_does_not_count(monkeypatch: Patch) -> None:
    monkeypatch.setattr(instruction_cache, "code_of", lambda operator: SMALL[operator])
    timeline = simulate(monkeypatch, {"a": stream(1000)}, [call(0, "a")], PACED, num_ranks=1)
    assert [phase for phase, _, _ in spans(kernel(timeline, "a"))] == ["launch", "ramp", "weights"]
