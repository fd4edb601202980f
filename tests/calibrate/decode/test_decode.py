"""From a profiler's records to a timeline, and what is refused before a GPU is touched."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from k3sim.calibrate.decode.commandline import main
from k3sim.calibrate.decode.launches import Launch, ProfileError, assign, kernels_of, launches_by_call, timeline_from
from k3sim.calibrate.decode.measured import by_stage, idle_us, moved_bytes
from k3sim.calibrate.decode.options import DecodeOptions, case_of
from k3sim.calibrate.decode.tables import run_table, table_cases
from k3sim.errors import UserError
from k3sim.sim.timeline.file import stage_rows, timeline_of
from k3sim.sim.timeline.timeline import PS_PER_US


def kernel(name: str, ts: float, correlation: int = 0, **arguments: Any) -> dict[str, Any]:
    args = {"correlation": correlation, "grid": [1, 1, 1], "block": [32, 1, 1], **arguments}
    return {"cat": "kernel", "name": name, "ts": ts, "dur": 2.0, "args": args}


def launched(ts: float, correlation: int) -> dict[str, Any]:
    return {"cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": ts, "args": {"correlation": correlation}}


def called(number: int, ts: float) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": f"k3sim call {number}", "ts": ts, "dur": 10.0}


def form(name: str) -> tuple[str, str, str]:
    return name, "[1, 1, 1]", "[32, 1, 1]"


def test_launches_go_to_the_call_around_them() -> None:
    events = [called(0, 0), called(1, 20), launched(1, 7), launched(22, 8), launched(25, 9)]
    # Kernels run later than they are launched, and not in that order.
    events += [kernel("b", 100, 9), kernel("a", 90, 7), kernel("c", 95, 8)]
    assert launches_by_call(events, 3) == [[form("a")], [form("c"), form("b")], []]
    with pytest.raises(ProfileError, match="d was launched by no call"):
        launches_by_call([*events, kernel("d", 120, 10)], 3)


def small_case() -> Any:
    return case_of(DecodeOptions(layers=2, path="fused"))


def one_form_a_call(case: Any) -> list[list[tuple[str, str, str]]]:
    """Every call one launch, named by operator: many calls look alike."""
    return [[form(call.operator)] for call in case.program.calls]


def test_equal_launches_are_told_apart_by_stream() -> None:
    case = small_case()
    forms = one_form_a_call(case)
    # Side streams run behind the main one: by start their launches come late.
    late = {"main": 0.0, "aux": 7.5, "prefetch": 20.25}
    order = sorted(case.program.calls, key=lambda call: call.index * 5 + late[call.stream])
    launches = [Launch(form(call.operator), float(at), 1.0, None) for at, call in enumerate(order)]
    owner = assign(launches, forms, case.program)
    assert sorted(owner) == [call.index for call in case.program.calls]
    for stream in late:
        mine = [index for index in owner if case.program.calls[index].stream == stream]
        assert mine == sorted(mine)


def test_graph_nodes_decide_where_the_profiler_names_them() -> None:
    case = small_case()
    forms = one_form_a_call(case)
    indices = [call.index for call in case.program.calls]
    backwards = [Launch(forms[index][0], float(-index), 1.0, 1000 + index) for index in reversed(indices)]
    assert assign(backwards, forms, case.program) == indices[::-1]


def test_a_launch_that_no_stream_expects_is_reported() -> None:
    case = small_case()
    with pytest.raises(ProfileError, match=r"stranger at 0\.0 us"):
        assign([Launch(form("stranger"), 0.0, 1.0, None)], one_form_a_call(case), case.program)


def test_the_timeline_survives_its_file() -> None:
    case = small_case()
    count = len(case.program.calls)
    launches = [Launch(form("k"), 100.0 + 2 * index, 3.0, None) for index in range(count)]
    timeline = timeline_from(launches, list(range(count)), case)
    assert timeline.step_us == 2 * (count - 1) + 3
    first, second = timeline.kernels[:2]
    assert (first.start_ps, first.end_ps) == (0, 3 * PS_PER_US)
    assert second.launched_by == first.index
    again = timeline_of({"stages": stage_rows(timeline), "step_us": timeline.step_us})
    assert stage_rows(again) == stage_rows(timeline)
    rows = {row["stage"]: row for row in by_stage(timeline)}
    assert rows["embed.push"] == {"stage": "embed.push", "count": 1, "total_us": 3.0, "alone_us": 2.0}
    assert sum(row["count"] for row in rows.values()) == count
    assert idle_us(timeline) == 0.0


def test_idle_is_what_no_kernel_covers() -> None:
    case = small_case()
    count = len(case.program.calls)
    # Starts 4 us apart, 3 us long, but for the first, which covers the second whole and half of the gap behind it.
    launches = [Launch(form("k"), 4.0 * at, 7.5 if at == 0 else 3.0, None) for at in range(count)]
    assert idle_us(timeline_from(launches, list(range(count)), case)) == 0.5 + (count - 3) * 1.0


def test_only_kernels_count_as_launches() -> None:
    events = [kernel("late", 5.0), launched(1, 1), kernel("early", 1.0, **{"graph node id": 4})]
    found = kernels_of(events)
    assert [(one.form[0], one.node) for one in found] == [("early", 4), ("late", None)]


def test_bytes_of_a_step_leave_prefetches_out() -> None:
    with_prefetch = case_of(DecodeOptions())
    without = case_of(DecodeOptions(without=("l2-prefetch",)))
    assert moved_bytes(with_prefetch.program) == moved_bytes(without.program)
    # Weights of one token and rank with everything sharded, at TP16 (9.37 GB), states and a cache of 8k tokens.
    assert 9.4e9 < moved_bytes(without.program) < 9.7e9


def test_the_table_has_every_case_once() -> None:
    """Both paths at five concurrencies and three contexts, four switches alone and four left out: names resume it."""
    commands = [one.command() for one in table_cases(DecodeOptions())]
    assert len(commands) == len(set(commands)) == 2 * 5 * 3 + 8
    for one in table_cases(DecodeOptions(layers=4)):
        assert case_of(one).architecture.num_layers == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 4}, "tp=4: an expert's slice is 768 wide"),
        ({"layers": 94}, "layers: got 94, accepted: 1 to 93"),
        ({"concurrency": 17}, "own kernels take 1 to 16 rows a rank; got 17"),
        ({"path": "megakernel"}, "path 'megakernel' has no kernels of the project's own"),
        ({"replays": 3}, "replays=3; 20 to 100000 are accepted"),
        ({"kv_dtype": "int4"}, "unknown KV cache type 'int4'"),
    ],
)
def test_bad_input_is_refused_without_a_gpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        case_of(DecodeOptions(**options))
    assert message in str(error.value)


def test_no_gpu_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--path", "stock"]) == 2
    assert capsys.readouterr().err.startswith("k3sim: no CUDA GPU is visible")


def test_measuring_needs_no_package_of_the_simulator() -> None:
    refuse = (
        "import sys\n"
        "for name in ('simpy', 'plotly', 'perfetto', 'pydantic', 'typer', 'rich', 'pandas', 'scipy'):\n"
        "    sys.modules[name] = None\n"
        "import k3sim.calibrate.decode.commandline, k3sim.calibrate.decode.tables, k3sim.calibrate.probes.links\n"
        "import k3sim.kernels.multi_gpu"
    )
    done = subprocess.run([sys.executable, "-c", refuse], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("no/where.json", None, "table: the folder "),
        ("cut.json", '{"steps": [', "not valid JSON"),
        ("other.json", '{"values": {}, "name": "h200"}', "this is a machine profile"),
        ("rows.json", '{"steps": [{"step_us": 1}]}', "steps is no list of steps with their commands"),
    ],
)
def test_a_wrong_table_is_left_alone(tmp_path: Path, name: str, text: str | None, says: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=re.escape(says)):
        run_table(DecodeOptions(), file, budget_s=1.0)
    assert not file.exists() if text is None else file.read_text() == text


def test_a_table_is_asked_for_by_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("decode", "--table", str(tmp_path / "no" / "steps.json")) == 2
    assert "table: the folder " in capsys.readouterr().err
    assert run("decode", "--table", "steps.json", "--json") == 2
    assert "give it without --json" in capsys.readouterr().err
