"""Short profiles: what is stated, what follows, and the command that writes one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3sim.cli import main
from k3sim.errors import UserError
from k3sim.sim.profile import load_machine


def short(tmp_path: Path, values: Any, like: Any = "h200") -> Path:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"schema_version": 2, "name": "mine", "like": like, "date": "2026-12", "values": values}, indent=1)
    )
    return file


def test_unnamed_values_are_those_of_like(tmp_path: Path) -> None:
    mine, like = load_machine(str(short(tmp_path, {"hbm_latency_s": 1e-6}))), load_machine("h200")
    assert mine.hbm_latency_s == 1e-6 and mine.provenance["hbm_latency_s"].kind == "user"
    assert mine.provenance["hbm_latency_s"].date == "2026-12"
    others = set(like.provenance) - {"hbm_latency_s"}
    assert all(getattr(mine, name) == getattr(like, name) for name in others)


def test_curve_goes_with_sms_and_read_rate(tmp_path: Path) -> None:
    like = load_machine("h200")
    mine = load_machine(str(short(tmp_path, {"num_sms": 66, "hbm_read_bytes_per_s": 1.5e12})))
    expected = [min(rate / 2, 1.5e12) for _, rate in like.hbm_in_flight_curve]
    assert [at for at, _ in mine.hbm_in_flight_curve] == [at for at, _ in like.hbm_in_flight_curve]
    assert [rate for _, rate in mine.hbm_in_flight_curve] == pytest.approx(expected)
    assert mine.hbm_copy_bytes_per_s == pytest.approx(like.hbm_copy_bytes_per_s * 1.5e12 / like.hbm_read_bytes_per_s)
    assert mine.provenance["hbm_in_flight_curve"].kind == "inferred"


def test_switch_may_be_off_without_an_interval(tmp_path: Path) -> None:
    assert load_machine(str(short(tmp_path, {"nvlink_multicast": False}))).nvlink_multicast is False


def test_short_profile_says_all_faults_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError) as refusal:
        load_machine(str(short(tmp_path, {"hbm_latency_s": -1, "foo": 3, "num_sms": 1.5}, like="h900")))
    text = str(refusal.value)
    assert 'like is "h900"' in text and text.count("hbm_latency_s") == 1
    assert "values.foo is unknown" in text and "values.num_sms.value is 1.5" in text


@pytest.mark.parametrize("values", [None, 3, [], {"num_sms": None}, {"num_sms": {}}, {"hbm_in_flight_curve": 3}])
@pytest.mark.parametrize("like", [None, 3, {}, "b200"])
def test_odd_short_profiles_are_refused(tmp_path: Path, values: Any, like: Any) -> None:
    with pytest.raises(UserError):
        load_machine(str(short(tmp_path, values, like)))


def test_written_profile_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["machines", "new", "h20", "--like", "h200", "--set", "num_sms=78", "--set", "nvlink_multicast=false"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path), "--json"])
    assert end.value.code == 0
    told = json.loads(capsys.readouterr().out)
    machine = load_machine(told["file"])
    assert (machine.name, machine.num_sms, machine.nvlink_multicast) == ("h20", 78, False)
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path)])
    assert end.value.code == 2 and "already" in capsys.readouterr().err


def test_command_says_all_faults_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["--set", "num_smss=1", "--set", "num_sms=-3", "--set", "hbm_latency_s=x", "--set", "num_sms=4"]
    with pytest.raises(SystemExit) as end:
        main(["machines", "new", "a/b", "--like", "zz", *settings, "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(said.splitlines()) == 1
    for part in ("name 'a/b'", "--like is 'zz'", "did you mean num_sms?", "num_sms stands twice", "is -3", "is 'x'"):
        assert part in said
    assert not (tmp_path / "out").exists()


def test_options_of_new_are_refused_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["machines", "h200", "--set", "num_sms=3"])
    assert end.value.code == 2 and "only with" in capsys.readouterr().err
