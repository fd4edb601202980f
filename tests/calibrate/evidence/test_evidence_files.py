"""Tables and scenarios that users write: every fault in one line, old names with the new ones, and what docs say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published_records import scenario, step, write

from k3sim.calibrate.evidence import load_evidence, load_ladders
from k3sim.calibrate.evidence.rules import Published
from k3sim.calibrate.evidence.scenarios import load_scenario
from k3sim.cli import main
from k3sim.errors import UserError
from k3sim.model.names import RENAMED

ROOT = Path(__file__).parents[3]
EVIDENCE = ROOT / "calibrate" / "evidence"
LOOP: dict[str, Any] = {
    "machine": "b200",
    "launch": "pdl",
    "calls": [{"operator": "unfused.residual", "weights": [], "shape": {"rows": 1}}],
}


def refusal(path: Path, load: Any = lambda path: load_evidence([path])) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 700
    return message.removeprefix(f"{path}: ")


# -- tables of published results --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": 0.001}, "line 16: records[0].value is 0.001, accepted: 0.3 to 10000 ms"),
        ({"value": -3}, "line 16: records[0].value is -3, accepted: 0.3 to 10000 ms"),
        ({"value": True}, "line 16: records[0].value is true, accepted: a number within the range of its unit"),
        ({"value": "8"}, 'line 16: records[0].value is "8", accepted: a number within the range of its unit'),
        ({"unit": "s"}, 'line 17: records[0].unit is "s" (did you mean us?), accepted: ms, us, tok/s/user, tok/s'),
        ({"hardware": "gb400"}, 'line 10: records[0].hardware is "gb400" (did you mean gb300?), accepted: gb300'),
        ({"date": "October"}, 'line 9: records[0].date is "October", accepted: YYYY, YYYY-MM or YYYY-MM-DD'),
        ({"date": "2026-13"}, 'line 9: records[0].date is "2026-13", accepted'),
        ({"num_gpus": 0}, "line 11: records[0].num_gpus is 0, accepted: a whole number from 1 to 576"),
        ({"id": "My Row"}, 'line 5: records[0].id is "My Row", accepted: small letters, digits'),
        ({"unknown": " "}, 'line 18: records[0].unknown is " ", accepted: a text that is not empty'),
        ({"command": "k3sim timeline --tp 7"}, "line 19: records[0].command is refused: tp=7"),
        ({"command": "k3sim timeline --machine gb400"}, "line 19: records[0].command is refused: unknown machine"),
        ({"command": "k3sim timeline --tp eight"}, "line 19: records[0].command is refused: "),
        ({"command": "rm -rf /"}, "line 19: records[0].command is refused: "),
        ({"extra": 1}, "line 20: records[0].extra is unknown, accepted: id, kind, title"),
        ({"titel": "t"}, "line 20: records[0].titel is unknown (did you mean title?)"),
        ({"judged": False}, "line 4: records[0] has why or judged false without the other, accepted: both or neither"),
        ({"why": "because"}, "line 4: records[0] has why or judged false without the other"),
        ({"kind": "kernal"}, 'line 6: records[0].kind is "kernal" (did you mean kernel?), accepted: step, stage'),
        ({"kind": "stage", "unit": "us"}, "line 4: records[0] lacks stage (a text that is not empty), layer"),
        ({"kind": "kernel", "unit": "us", "command": None}, "line 4: records[0] lacks loop"),
        (
            {"kind": "stage", "unit": "us", "stage": "moe.tail", "origin": "moe.latent_up", "layer": 3},
            'line 20: records[0].stage is "moe.tail" (did you mean moe.tail_copy?), accepted: ',
        ),
    ],
)  # fmt: skip
def test_a_wrong_record_is_refused_with_its_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert refusal(write(tmp_path / "mine.json", step(**changes))).startswith(says)


def test_all_faults_of_a_table_are_one_line(tmp_path: Path) -> None:
    records = [step(value="8", unit="parsec", hardware="gb400"), step(id="other", date=None, titel="x"), 7]
    assert refusal(write(tmp_path / "mine.json", *records)) == (
        'line 10: records[0].hardware is "gb400" (did you mean gb300?), accepted: gb300, gb200, b300, b200, h200, '
        "h100; "
        'line 16: records[0].value is "8", accepted: a number within the range of its unit; '
        'line 17: records[0].unit is "parsec", accepted: ms, us, tok/s/user, tok/s; '
        "line 21: records[1] lacks date (YYYY, YYYY-MM or YYYY-MM-DD); "
        "line 36: records[1].titel is unknown (did you mean title?); "
        "line 38: records[2] is 7, accepted: an object"
    )


def test_each_missing_field_is_named(tmp_path: Path) -> None:
    for name, field in Published.model_fields.items():
        if field.is_required() and name != "kind":
            found = refusal(write(tmp_path / "mine.json", step(**{name: None})))
            assert found.startswith(f"line 4: records[0] lacks {name}")


def test_ids_are_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.json", step(), step())
    assert refusal(path) == "line 22: records[1].id 'mine' stands twice, accepted: an id of its own"
    one, other = write(tmp_path / "one.json", step()), write(tmp_path / "other.json", step())
    with pytest.raises(UserError, match=r"other\.json: line 5: records\[0\]\.id 'mine' stands twice"):
        load_evidence([one, other])


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ({"machine": "b400"}, 'loop.machine is "b400" (did you mean b300?), accepted: b200, b300, gb200'),
        ({"calls": []}, "loop.calls is [], accepted: a list that is not empty"),
        ({"calls": [{"operator": "magic", "weights": [], "shape": {"rows": -1}}]}, 'calls[0].operator is "magic"'),
        ({"calls": [{"operator": "unfused.residual", "weights": [[1, 2]], "shape": {}}]}, ".weights[0] is [1, 2]"),
        ({"trigger": "never"}, 'loop.trigger is "never", accepted: start, wait, stream, end'),
    ],
)
def test_a_wrong_loop_is_refused(tmp_path: Path, loop: dict[str, Any], says: str) -> None:
    record = step(kind="kernel", unit="us", command=None, loop={**LOOP, **loop})
    assert says in refusal(write(tmp_path / "mine.json", record))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"schema_version": 2, "records": []}', "line 1: schema_version is 2, accepted: 1; line 1: records is []"),
        ('{"records": 7}', "line 1: the file lacks schema_version (1); line 1: records is 7, accepted: a list"),
        ('{"a": 1}', "line 1: the file lacks schema_version (1), records; line 1: a is unknown, accepted"),
        ('{"schema_version": 1,\n "schema_version": 1, "records": [1]}', "line 1: schema_version stands twice"),
        ("hardware,op,time_us\n", "this is a CSV table of kernel times; 'k3sim calibrate --tables"),
        ('{"mean_ttft_ms": 1, "mean_tpot_ms": 2}', "this is the result of a serving benchmark"),
        ('{"timestamp": 0, "input_length": 6755, "output_length": 500}\n', "this is a trace of requests over time"),
        ('{"ladders": []}', "this is a table of optimisation ladders"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    assert refusal(path).startswith(says)


def test_the_command_line_refuses_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "mine.json", step(unit="parsec"))
    with pytest.raises(SystemExit) as stopped:
        main(["validate", "--evidence", str(path)])
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert f'{path}: line 17: records[0].unit is "parsec", accepted: ms' in captured.err


def test_the_page_has_every_field(tmp_path: Path) -> None:
    from tools.evidence_fields import PAGE, rewritten

    page = PAGE.read_text(encoding="utf-8")
    assert rewritten(page) == page, "python tools/evidence_fields.py"
    path = tmp_path / "mine.json"
    path.write_text(page.split("```json")[1].split("```")[0])
    (record,) = load_evidence([path])
    assert (record.id, record.value, record.tokens) == ("gb300-mine-c1", 140.0, 1)


# -- ladders ----------------------------------------------------------------------------------------------------------


def ladder(tmp_path: Path, **changes: Any) -> Path:
    document = json.loads((EVIDENCE / "ladders.json").read_text())
    document["ladders"] = document["ladders"][:1]
    document["ladders"][0] |= changes
    path = tmp_path / "ladders.json"
    path.write_text(json.dumps(document, indent=1))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": []}, "steps is [], accepted: a list of 2 or more"),
        ({"layers": 94}, "layers is 94, accepted: at most 93"),
        ({"unit": "us"}, 'unit is "us", accepted: ms, tok/s/user'),
        ({"noise": 2}, "noise is 2, accepted: a share of a step, 0 to 0.5"),
        ({"noise": 0.0}, "has noise or noise_source without the other, accepted: both or neither"),
        ({"steps": [{"title": "a", "value": 8}, {"title": "b", "value": 7}]}, "steps[1] has neither parts nor why"),
        (
            {"steps": [{"title": "a", "value": 8}, {"title": "b", "value": 7, "why": "w", "also": [1]}]},
            "steps[1].also is [1], accepted: later steps by number",
        ),
        (
            {"steps": [{"title": "a", "value": 8}, {"title": "b", "value": 0.1, "parts": ["l2-prefetch.weights"]}]},
            "steps[1].value is 0.1, accepted: 0.3 to 10000 ms",
        ),
    ],
)
def test_a_wrong_ladder_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    assert says in refusal(ladder(tmp_path, **changes), load_ladders)


def test_old_parts_are_named_with_the_new(tmp_path: Path) -> None:
    steps = [{"title": "a", "value": 8}, {"title": "b", "value": 7, "parts": list(RENAMED["part"])[:3]}]
    assert refusal(ladder(tmp_path, steps=steps), load_ladders) == "; ".join(
        f"line {line}: ladders[0].steps[1].parts[{index}] is \"{before}\", which is called '{now}' now"
        for line, (index, (before, now)) in enumerate(list(enumerate(RENAMED["part"].items()))[:3], 26)
    )


# -- scenarios --------------------------------------------------------------------------------------------------------

SIDE = {"label": "a", "command": "k3sim timeline", "against": "k3sim timeline --path stock"}


@pytest.mark.parametrize(
    ("figure", "says"),
    [
        ({"unit": "furlong"}, 'line 15: figures[0].unit is "furlong", accepted: tok/s/user, ms, x, falls'),
        ({"value": 0}, "line 14: figures[0].value is 0, accepted: 0.01 to 100 x"),
        ({"value": None}, "line 12: figures[0] lacks value"),
        ({"against": None}, "line 12: figures[0] lacks against"),
        ({"command": "k3sim timeline --drafted-tokens 7"}, "line 16: figures[0].command is refused: option"),
        ({"needs": ["luck"]}, 'line 19: figures[0].needs[0] is "luck", accepted: speculation'),
        ({"outside_ms": 5}, "line 12: figures[0] has outside_ms and output_tokens not together"),
        (
            {"unit": "falls", "value": None, "command": None, "against": None, "series": []},
            "line 15: figures[0].series is [], accepted: a list of 2 or more",
        ),
        ({"unit": "falls", "series": [SIDE, SIDE]}, "line 14: figures[0].value stands beside a series"),
        ({"series": [SIDE, SIDE]}, "line 18: figures[0].series belongs to the unit 'falls'"),
        ({"about": 3}, "line 18: figures[0].about is 3, accepted: 0.001 to 0.2 of the value"),
        ({"label": ""}, 'line 13: figures[0].label is "", accepted: a text that is not empty'),
        (
            {"value": "1", "unti": "x", "label": None, "against": 7},
            'line 12: figures[0] lacks label (a text that is not empty); line 13: figures[0].value is "1", accepted: '
            "a number; line 16: figures[0].against is 7, accepted: a text that is not empty; line 17: figures[0].unti "
            "is unknown (did you mean unit?)",
        ),
    ],
)  # fmt: skip
def test_a_wrong_scenario_is_refused_with_its_line(tmp_path: Path, figure: dict[str, Any], says: str) -> None:
    assert refusal(scenario(tmp_path, **figure), load_scenario).startswith(says)


# -- all of them ------------------------------------------------------------------------------------------------------

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(2**64), st.just(10**400), st.floats(), st.just(1e308),
    st.text(max_size=4), st.just("\ud800"), st.builds(list), st.builds(dict), st.builds(lambda: [[1]]),
)  # fmt: skip


def mutated(document: Any, data: st.DataObject) -> Any:
    """The document with something that stands in it replaced, removed or doubled."""
    while isinstance(document, (dict, list)) and document:
        keys = list(document) if isinstance(document, dict) else range(len(document))
        key = data.draw(st.sampled_from(keys))
        inner = document[key]
        if isinstance(inner, (dict, list)) and inner and data.draw(st.integers(0, 3)):
            document = inner
            continue
        if data.draw(st.booleans()):
            document[key] = data.draw(VALUES)
        else:
            del document[key]
        return


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    name, load = data.draw(
        st.sampled_from(
            [
                ("kernels.json", lambda path: load_evidence([path])),
                ("stages.json", lambda path: load_evidence([path])),
                ("ladders.json", load_ladders),
                ("claims/coding-agents.json", load_scenario),
                ("claims/gain-falls-with-concurrency.json", load_scenario),
            ]
        )
    )
    document = json.loads((EVIDENCE / name).read_text())
    for part in ("records", "ladders"):
        if part in document:
            document[part] = document[part][:2]
    for _ in range(data.draw(st.integers(1, 3))):
        mutated(document, data)
    path = tmp_path / "given.json"
    path.write_text(json.dumps(document))
    try:
        load(path)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 700


def test_steps_that_gave_an_input_are_unjudged(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.json", step(read_inside=["rank_skew_relative_sd", "host launches"]))
    (one,) = load_evidence([path])
    assert not one.judged
    assert one.why == "read inside this step: rank_skew_relative_sd, host launches"
    wrong = write(tmp_path / "wrong.json", step(read_inside=["luck"]))
    with pytest.raises(UserError, match=r"read_inside\[0\] is \"luck\", accepted: num_sms"):
        load_evidence([wrong])
