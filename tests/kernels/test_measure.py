"""The run of a benchmark with a timer that is not one: order, rows, peers, what is kept, resuming, the budget."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from k3sim.errors import UserError
from k3sim.kernels.harness import measure as measuring
from k3sim.kernels.harness.bench import Timing, write_samples
from k3sim.kernels.harness.cases import Call, Case, Timed, cases_of
from k3sim.kernels.harness.measure import Row, default_path, measure, measure_cases, row_line, rows_of
from k3sim.kernels.toolchain.compile_cache import ARCHITECTURES
from k3sim.kernels.toolchain.machine_code import disassembler
from k3sim.kernels.work import Pass, Read, Work

GPU = "NVIDIA H200"


def work(num_bytes: int) -> Work:
    return Work(
        num_blocks=1,
        threads_per_block=1,
        smem_bytes_per_block=0,
        bytes_in_flight_per_block=1,
        max_blocks_per_sm=1,
        registers_per_thread=16,
        passes=(Pass(reads=(Read(region="", num_bytes=num_bytes),)),),
    )


def case(name: str, rows: int = 1, num_bytes: int = 8_000_000) -> Case:
    return Case(
        operator="some", name=name, rows=rows, works=(work(num_bytes),), num_bytes=0, timed=lambda *_: Timed(calls=[])
    )


class Bench:
    """A fake GPU: 4 TB/s, every graph takes 4 us a call the first time and 4.1 the second."""

    def __init__(self, path: Path, peers: dict[str, Callable[[], Sequence[Call]]] | None = None) -> None:
        self.path, self.peers = path, peers or {}
        self.timed: list[str] = []
        self.rows: list[Row] = []
        self.seconds = 0.0

    def prepare(self, one: Case) -> Timed:
        if one.name == "broken":
            raise MemoryError("no room")
        return Timed(calls=[lambda: None] * 8, peers=self.peers)

    def timer(self, name: str, calls: Sequence[Call], replays: int) -> tuple[Timing, Timing]:
        self.timed.append(name)
        self.seconds += 10.0
        us = 6.0 if name in self.peers else 4.0
        return tuple(  # type: ignore[return-value]
            Timing(name=name, num_calls_per_replay=len(calls), samples_us=(us + again,) * replays)
            for again in (0.0, 0.1)
        )

    def run(
        self, cases: Sequence[Case], done: Sequence[Row] = (), budget_s: float = 1e9, num_replays: int = 3
    ) -> list[Row]:
        return measure_cases(
            cases,
            done=done,
            prepare=self.prepare,
            timer=self.timer,
            read_bytes_per_s=4e12,
            num_replays=num_replays,
            out_of_time=lambda: self.seconds > budget_s,
            on_rows=lambda rows: write_samples(self.path, rows, {"gpu": GPU}),
            on_row=self.rows.append,
        )

    def stored(self) -> list[Row]:
        rows: list[Row] = json.loads(self.path.read_text())["timings"]
        return rows


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "samples.json")


def test_a_row_holds_samples_noise_rate_and_fraction(bench: Bench) -> None:
    (row,) = bench.run([case("a")])
    assert row["samples_us"] == [4.0, 4.0, 4.0] and row["second_median_us"] == 4.1
    assert (row["moved_bytes"], row["tb_per_s"], row["floor_us"], row["of_floor"]) == (8_000_000, 2.0, 2.0, 0.5)
    assert bench.stored() == [row] == bench.rows
    assert row_line(row) == "some  a  4.00 us (4.00 to 4.00, again 0.10 apart)  8.0 MB  2.00 TB/s  50 % of floor"


def test_one_row_comes_first_and_is_stored(bench: Bench) -> None:
    sizes = []

    def timer(name: str, calls: Sequence[Call], replays: int) -> tuple[Timing, Timing]:
        sizes.append(len(bench.stored()) if bench.path.exists() else 0)
        return Bench.timer(bench, name, calls, replays)

    bench.timer = timer  # type: ignore[method-assign]
    bench.run([case("a", rows=8), case("b"), case("c", rows=16), case("d")])
    assert bench.timed == ["some b", "some d", "some a", "some c"]
    assert sizes == [0, 1, 2, 3]


def test_a_failing_peer_costs_a_line(tmp_path: Path) -> None:
    def missing() -> Sequence[Call]:
        raise ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")

    def fails() -> Sequence[Call]:
        raise ValueError("only on\nBlackwell")

    bench = Bench(tmp_path / "s.json", {"good": lambda: [lambda: None], "missing": missing, "fails": fails})
    (row,) = bench.run([case("a")])
    good, absent, failed = row["peers"]
    assert (good["name"], good["median_us"], good["ratio"], len(good["samples_us"])) == ("good", 6.0, 1.5, 2)
    assert absent == {"name": "missing", "error": "flashinfer is not installed"}
    assert failed == {"name": "fails", "error": "ValueError: only on Blackwell"}
    assert row_line(row).splitlines()[1:] == [
        "    good: 6.00 us, 1.50 x ours",
        "    missing: flashinfer is not installed",
        "    fails: ValueError: only on Blackwell",
    ]


def test_failed_cases_leave_no_row_and_are_retried(bench: Bench) -> None:
    rows = bench.run([case("broken"), case("b")])
    assert [row["case"] for row in rows] == ["b"]
    assert row_line(bench.rows[0]) == "some  broken  FAILED: MemoryError: no room"
    bench.run([case("broken"), case("b")], done=rows)
    assert [row.get("error") for row in bench.rows] == ["MemoryError: no room", None, "MemoryError: no room"]


def test_the_budget_stops_between_cases_and_resumes(bench: Bench) -> None:
    cases = [case(name) for name in "abcd"]
    first = bench.run(cases, budget_s=15.0)
    assert [row["case"] for row in first] == ["a", "b"]
    second = bench.run(cases, done=rows_of(bench.path, GPU))
    assert [row["case"] for row in second] == ["a", "b", "c", "d"]
    assert bench.timed == ["some a", "some b", "some c", "some d"]
    assert bench.stored() == second and second[:2] == first


def test_only_files_of_the_same_gpu_resume(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    assert rows_of(path, GPU) == []
    write_samples(path, [], {"gpu": "NVIDIA B200"})
    with pytest.raises(UserError, match="it was measured on NVIDIA B200, and this is NVIDIA H200"):
        rows_of(path, GPU)
    for text in ("{", "[]", '{"environment": {"gpu": "NVIDIA H200"}, "timings": [{}]}'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"cannot resume from .*samples\.json"):
            rows_of(path, GPU)


def test_the_file_is_named_after_the_gpu() -> None:
    assert default_path("NVIDIA H200") == Path("h200-kernels.json")
    assert default_path("NVIDIA GB300 NVL72") == Path("gb300-nvl72-kernels.json")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_replays": 1}, "replays: got 1, accepted: 2 or more"),
        ({"budget_s": 0.0}, "budget: got 0.0 seconds"),
        ({"out": Path("/no/such/folder/x.json")}, "the folder /no/such/folder does not exist"),
        ({"operators": ["lm_heat"]}, "did you mean lm_head"),
    ],
)
def test_what_cannot_be_honoured_is_named_first(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        measure(**options)


def test_all_samples_stay_below_half_a_megabyte(tmp_path: Path) -> None:
    """cuBLAS stands beside the products; the other cases have a peer where another package is installed."""
    bench = Bench(tmp_path / "samples.json", {"cuBLAS": lambda: [lambda: None]})

    def timer(name: str, calls: Sequence[Call], replays: int) -> tuple[Timing, Timing]:
        samples = tuple(4.1 + 0.0123456789 * at for at in range(200))
        return (Timing(name=name, num_calls_per_replay=512, samples_us=samples[:replays]),) * 2

    bench.timer = timer  # type: ignore[method-assign]
    rows = bench.run(cases_of(), num_replays=200)
    assert len(rows) > 100
    assert bench.path.stat().st_size < 500_000


def test_the_commit_is_that_of_the_checkout() -> None:
    commit = measuring._commit()
    assert commit is None or commit.removesuffix("-dirty").isalnum()


_BUILD = """
from k3sim.kernels.toolchain.compile_cache import architecture, get_cutlass
get_cutlass()
from k3sim.kernels.toolchain.machine_code import kernel_codes
from k3sim.kernels.harness.read_rate_kernel import LOADS, compile_read
((code,),) = kernel_codes([compile_read(528).__cubin__], architecture())
assert code.loads_16_byte == LOADS and code.loads_narrower == 0 and code.spills == 0 and code.registers <= 32, code
"""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_reading_kernel_fits_2048_threads(architecture: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    try:
        disassembler()
    except UserError as missing:
        pytest.skip(str(missing))
    kept = {"CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    environment = {**os.environ, "CUTE_DSL_ARCH": architecture, **kept}
    command = [sys.executable, "-c", _BUILD]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
def test_a_run_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    document = measure(["router_topk"], out=path, num_replays=5)
    assert document["left"] == 0
    assert 0.5e12 < document["environment"]["read_bytes_per_s"] < 20e12
    assert all(0.2 < row["median_us"] < 100 for row in document["timings"])
    assert measure(["router_topk"], out=path, num_replays=5, resume=True)["timings"] == document["timings"]
