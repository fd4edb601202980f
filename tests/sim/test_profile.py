"""Machine profiles of users: every fault in one line, names of schema 1, and what divides by zero later."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.documents.document import Document
from k3sim.model.names import RENAMED
from k3sim.sim.machine import PROFILE_FIELDS, Machine
from k3sim.sim.profile import load_machine, machine_names, profile_path
from k3sim.sim.profile_rules import RANGES, check_profile

Profile = dict[str, Any]
Change = Callable[[Profile], object]


def gb300() -> Profile:
    loaded: Profile = json.loads(profile_path("gb300").read_text())
    return loaded


def line(name: str, below: int = 0, profile: Profile | None = None) -> int:
    """The line on which a value's entry begins in gb300's file or that of ``profile``, and so many below it."""
    text = json.dumps(profile or gb300(), indent=2).splitlines()
    return text.index(next(one for one in text if one.startswith(f'    "{name}": '))) + 1 + below


def load(directory: Path, profile: object) -> Machine:
    path = directory / "mine.json"
    path.write_text(json.dumps(profile, indent=2))
    return load_machine(str(path))


def refusal(directory: Path, change: Change) -> str:
    """The line for gb300's profile with ``change`` made to it, without the file's name."""
    profile = gb300()
    change(profile)
    with pytest.raises(UserError) as caught:
        load(directory, profile)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    assert message.startswith(f"{directory / 'mine.json'}: ")
    return message.removeprefix(f"{directory / 'mine.json'}: ")


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", machine_names())
def test_shipped_profiles_pass_the_check(name: str) -> None:
    document = Document(name=name, value=json.loads(profile_path(name).read_text()))
    check_profile(document)
    assert document.faults == []


def test_unknown_name_lists_nearest_and_all() -> None:
    with pytest.raises(UserError) as caught:
        load_machine("GB30")
    assert str(caught.value) == (
        "unknown machine 'GB30': did you mean gb300 or b300 or gb200? Shipped machines: b200, b300, gb200, "
        "gb300, h100, h200; or give the path of a profile that ends in .json"
    )


def test_unknown_name_without_near_ones() -> None:
    with pytest.raises(UserError, match=r"^unknown machine 'tpu': Shipped machines: b200, .*"):
        load_machine("tpu")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"", "this is an empty file; nothing can be read from it"),
        (b'{"name": ', "line 1: not valid JSON: Expecting value, column 10 (cut short?)"),
        (b"\xff\xfe\x00\x01", "this is binary data; no command reads it"),
        (b"[" * 200_000, "nested more than 40 levels"),
        (b"[1]", "holds [1], which is no JSON object"),
        (b"SQLite format 3\0", "this is an SQLite database, as Nsight Systems exports; 'k3sim explain' reads it"),
        (
            b'{"measured": true, "step_us": 1}',
            "this is a measured step of 'k3sim decode'; 'k3sim report FILE' and 'k3sim compare FILE FILE' take it",
        ),
    ],
)
def test_what_is_no_profile_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_machine(str(path))
    assert str(caught.value) == f"{path}: {says}; accepted: a machine profile (docs/machines.md)"


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "link.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    for name, what in (("fifo", "not a regular file"), ("link", "not a regular file"), ("folder", "a folder")):
        with pytest.raises(UserError, match=f"this is {what}"):
            load_machine(str(tmp_path / f"{name}.json"))


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(gb300(), indent=1).replace('"name": "gb300",', '"name": "gb300",\n "name": "gb300",'))
    with pytest.raises(UserError) as caught:
        load_machine(str(path))
    assert str(caught.value) == f"{path}: line 3: name stands twice in one object, accepted: once"


# -- fields -----------------------------------------------------------------------------------------------------------


def values(**changes: Any) -> Change:
    """Changes of whole entries."""
    return lambda profile: profile["values"].update(changes)


def entry(name: str, **changes: Any) -> Change:
    """Changes within one entry."""
    return lambda profile: profile["values"][name].update(changes)


CURVE = "hbm_in_flight_curve"
LATENCY = line("hbm_latency_s")
CASES: list[tuple[Change, str]] = [
    (lambda p: p.update(schema_version=True), "line 2: schema_version is true, accepted: 2"),
    (lambda p: p.update(name=""), 'line 3: name is "", accepted: a text that is not empty'),
    (lambda p: p.pop("title"), "line 1: the file lacks title (a text that is not empty)"),
    (lambda p: p["values"].pop("num_sms"), "line 5: values lacks num_sms"),
    (values(hbm_latencys=1), "values.hbm_latencys is unknown (did you mean hbm_latency_s?)"),
    (values(num_sms=152), "line 6: values.num_sms is 152, accepted: an object"),
    (lambda p: p["values"]["num_sms"].pop("kind"), "line 6: values.num_sms lacks kind"),
    (entry("num_sms", units="SM"), "line 15: values.num_sms.units is unknown (did you mean unit?)"),
    (entry("hbm_latency_s", unit="us"), f'line {LATENCY + 2}: values.hbm_latency_s.unit is "us", accepted: "s"'),
    (
        entry("num_sms", kind="guess"),
        'line 9: values.num_sms.kind is "guess", accepted: datasheet, measured, fitted, inferred, user',
    ),
    (
        entry("num_sms", date=None),
        'line 11: values.num_sms.date is null, accepted: "YYYY-MM", since the value is measured',
    ),
    (entry("num_sms", date="2026-13"), 'line 11: values.num_sms.date is "2026-13", accepted: "YYYY-MM" or null'),
    (entry("num_sms", source=" "), 'line 10: values.num_sms.source is " ", accepted: a text that is not empty'),
    (entry("num_sms", value=0), "line 7: values.num_sms.value is 0, accepted: a whole number from 1 to 100000 SM"),
    (
        entry("num_sms", value=15.5),
        "line 7: values.num_sms.value is 15.5, accepted: a whole number from 1 to 100000 SM",
    ),
    (
        entry("num_sms", value=True),
        "line 7: values.num_sms.value is true, accepted: a whole number from 1 to 100000 SM",
    ),
    (
        entry("hbm_latency_s", value=math.nan),
        f"line {LATENCY + 1}: values.hbm_latency_s.value is NaN, accepted: 0 or 1e-15 to 1 s",
    ),
    (
        entry("hbm_latency_s", high=math.inf),
        f"line {LATENCY + 7}: values.hbm_latency_s.high is Infinity, accepted: 0 or 1e-15 to 1 s",
    ),
    (
        entry("hbm_latency_s", low=-1e-9),
        f"line {LATENCY + 6}: values.hbm_latency_s.low is -1e-09, accepted: 0 or 1e-15 to 1 s",
    ),
    (
        entry("bf16_flops", value=10**400),
        f"line {line('bf16_flops', 1)}: values.bf16_flops.value is 1{'0' * 56}..., accepted: 1e+09 to 1e+21 FLOP/s",
    ),
    (
        entry("hbm_latency_s", low=1.0),
        f"line {LATENCY}: values.hbm_latency_s has low 1.0, value 4.2e-07, high 4.42e-07, accepted: low <= value <= "
        "high",
    ),
    (entry("nvlink_multicast", value=1), "values.nvlink_multicast.value is 1, accepted: true or false"),
    # What came out as a division by zero, or as a time beyond 64 bits.
    (
        entry("nvlink_egress_bytes_per_s", value=4e5, low=4e5, high=4e5),
        "values.nvlink_egress_bytes_per_s.low is 400000.0, accepted: 1e+08 to 1e+18 B/s; ",
    ),
    (entry("sm_clock_hz", value=2e-3), "line 17: values.sm_clock_hz.value is 0.002, accepted: 1e+08 to 1e+12 Hz"),
    (entry(CURVE, value=[]), f"values.{CURVE}.value is [], accepted: a list of [bytes in flight per SM, bytes/s]"),
    (entry(CURVE, value=[[1, 2, 3]]), ".value has point 0 [1, 2, 3], accepted: [bytes in flight per SM, bytes/s]"),
    (
        entry(CURVE, value=[[1, 1e9], [1, 2e9]]),
        ".value has point 1 [1, 2000000000.0] after [1, 1000000000.0], accepted: bytes in flight that increase and",
    ),
    (
        entry(CURVE, value=[[1, 2e9], [2, 1e9]]),
        ".value has point 1 [2, 1000000000.0] after [1, 2000000000.0], accepted",
    ),
    (entry(CURVE, interval=[1.1, 1.2]), ".interval is [1.1, 1.2], accepted: [low factor, high factor] around 1"),
    (entry(CURVE, interval=0.1), ".interval is 0.1, accepted: [low factor, high factor] around 1"),
    (
        lambda p: p["values"][CURVE]["value"].append([200000, 7.5e12]),
        ".value reaches 7500000000000.0 B/s, accepted: at most 7000000000000.0 (hbm_read_bytes_per_s)",
    ),
    (
        entry("max_smem_bytes_per_block", value=300000, high=300000),
        "values.max_smem_bytes_per_block.value is 300000, accepted: at most 233472 (smem_bytes_per_sm)",
    ),
    (
        entry("hbm_copy_bytes_per_s", value=9e12, high=9e12),
        ".value is 9000000000000.0, accepted: at most 7000000000000.0 (hbm_read_bytes_per_s)",
    ),
    (values(fp8_flops={}), "line 5: values has fields that no prediction depends on: fp8_flops; take them out"),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message[:60] for _, message in CASES])
def test_a_fault_says_what_is_accepted(tmp_path: Path, change: Change, message: str) -> None:
    found = refusal(tmp_path, change)
    assert message in found
    assert not message.startswith("line") or found == message


def test_all_faults_of_a_profile_are_one_line(tmp_path: Path) -> None:
    def edit(profile: Profile) -> Profile:
        at = profile["values"]
        at["num_sms"]["value"] = 0
        at["sm_clock_hz"]["value"] = 2e-3
        at["l2_far_latency_s"]["unit"] = "us"
        at["hbm_copy_bytes_per_s"] |= {"value": 1e17, "high": 1e17}
        at["hbm_latencys"] = at.pop("hbm_latency_s")
        del at["grid_completion_s"]["source"]
        return profile

    at = partial(line, profile=edit(gb300()))
    assert refusal(tmp_path, edit) == (
        "line 5: values lacks hbm_latency_s; line 7: values.num_sms.value is 0, accepted: a whole number from 1 to "
        f"100000 SM; line 17: values.sm_clock_hz.value is 0.002, accepted: 1e+08 to 1e+12 Hz; line "
        f"{at('hbm_copy_bytes_per_s', 1)}: "
        "values.hbm_copy_bytes_per_s.value is 1e+17, accepted: at most 7000000000000.0 (hbm_read_bytes_per_s); "
        f'line {at("l2_far_latency_s", 2)}: values.l2_far_latency_s.unit is "us", accepted: "s"; '
        f"line {at('grid_completion_s')}: values.grid_completion_s lacks source (a text "
        f"that is not empty); line {at('hbm_latencys')}: values.hbm_latencys is unknown (did you mean hbm_latency_s?)"
    )


def test_names_of_schema_1_are_one_fault(tmp_path: Path) -> None:
    def edit(profile: Profile) -> None:
        profile["schema_version"] = 1
        for before, now in RENAMED["machine value"].items():
            profile["values"][before] = profile["values"].pop(now)

    found = refusal(tmp_path, edit)
    assert found.startswith(
        "line 2: schema_version is 1, accepted: 2; line 5: values has fields that have other names now: "
        "hbm_uneven_loss -> hbm_partial_grid_loss, block_tail_s -> kernel_exit_cold_s, "
    )
    assert found.endswith(f" and {len(RENAMED['machine value']) - found.count(' -> ')} more") and "lacks" not in found


@pytest.mark.parametrize("name", ["\ud800", "x" * 10])
def test_a_strange_name_hides_no_other_fault(tmp_path: Path, name: str) -> None:
    def edit(profile: Profile) -> None:
        profile["values"][name] = 0
        profile["values"]["num_sms"] = [profile["values"]["num_sms"]]
        profile["values"]["hbm_latency_s"]["value"] = -1

    found = refusal(tmp_path, edit)
    assert "values.num_sms is [{" in found and "values.hbm_latency_s.value is -1" in found


def test_a_switch_of_the_link_can_be_off(tmp_path: Path) -> None:
    """docs/machines.md tells to switch multicast off in a copy, whose interval says that it is on."""
    profile = gb300()
    profile["values"]["nvlink_multicast"]["value"] = False
    machine = load(tmp_path, profile)
    assert machine.nvlink_multicast is False
    assert (machine.provenance["nvlink_multicast"].low, machine.provenance["nvlink_multicast"].high) == (False, False)


@pytest.mark.parametrize(
    "field", [name for name, one in PROFILE_FIELDS.items() if not one.metadata["zero"] and one.type != "bool"]
)
def test_sizes_and_rates_cannot_be_zero(tmp_path: Path, field: str) -> None:
    if field == CURVE:
        assert "has point 0 [1, 0]" in refusal(tmp_path, entry(field, value=[[1, 0]]))
        return
    least = RANGES[PROFILE_FIELDS[field].metadata["unit"]][0]
    assert f"values.{field}.value is 0, accepted: " in refusal(tmp_path, entry(field, value=0, low=0))
    assert f"values.{field}.value is {json.dumps(least / 2)}, accepted" in refusal(
        tmp_path, entry(field, value=least / 2)
    )


def test_costs_can_be_zero(tmp_path: Path) -> None:
    profile = gb300()
    for field, spec in PROFILE_FIELDS.items():
        if spec.metadata["unit"] == "s":
            profile["values"][field].update(value=0, low=0)
    machine = load(tmp_path, profile)
    assert (machine.launch_latency_s, machine.l2_far_latency_s, machine.nvlink_one_way_s) == (0, 0, 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    field=st.sampled_from(sorted(PROFILE_FIELDS)),
    part=st.sampled_from(["value", "low", "high"]),
    bad=st.one_of(
        st.just(math.nan),
        st.floats(max_value=-1e-300, allow_nan=False),
        st.integers(max_value=-1),
        st.text(),
        st.none(),
        st.just({}),
    ),
)
def test_any_number_replaced_by_nonsense_is_refused(tmp_path: Path, field: str, part: str, bad: object) -> None:
    def spoil(profile: Profile) -> None:
        one = profile["values"][field]
        if field != CURVE:
            one[part] = bad
        elif part == "value":
            one["value"][3][1] = bad
        else:
            one["interval"][part == "high"] = bad

    assert f"values.{field}." in refusal(tmp_path, spoil)
