"""What a file is, on which line a value stands, and how many faults become one line."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3sim.errors import UserError
from k3sim.model.documents.document import Accepted, Document, join, parse_json, read_bytes, read_json, shown, where
from k3sim.model.documents.fields import TEXT, Record, checked, choice, number, whole
from k3sim.model.documents.kinds import Kind, recognise
from k3sim.model.documents.lines import lines_of, places, repeated

ANY = Accepted(what="a document", kinds=(), most_bytes=1 << 20)
TRACE = {"traceEvents": [{"ph": "X", "cat": "kernel", "name": "gemv", "ts": 150.0, "dur": 12.0}]}
BENCHMARK = {"backend": "vllm", "request_throughput": 1.5, "mean_ttft_ms": 7279.5, "mean_tpot_ms": 70.1}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (json.dumps(TRACE).encode(), Kind.TORCH_TRACE),
        (json.dumps(TRACE["traceEvents"]).encode(), Kind.TORCH_TRACE),
        (gzip.compress(json.dumps(TRACE).encode(), mtime=0), Kind.GZIPPED_TRACE),
        (gzip.compress(b"a,b\n1,2\n", mtime=0), Kind.GZIP),
        (b"\x1f\x8b\x08broken", Kind.GZIP),
        (b"PK\x03\x04....", Kind.ZIP),
        (b"\n\x0e\x08\x01\x12\x05start\n\x02\x08\x02", None),
        (b"\n\x08\x08\x01\x12\x04name\n\x02\x08\x02", Kind.PERFETTO),
        (json.dumps(BENCHMARK).encode(), Kind.BENCHMARK),
        (b"\n".join([json.dumps(BENCHMARK).encode()] * 2), Kind.BENCHMARK),
        (b'{"timestamp": 0, "input_length": 6755, "output_length": 500}\n' * 2, Kind.REQUEST_TRACE),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n", Kind.REQUEST_TRACE),
        (b"hardware,op,shape,dtype,condition,time_us,notes,source_url\n", Kind.KERNEL_TABLE),
        ((32).to_bytes(8, "little") + b'{"w": {"dtype": "BF16"}}' + b" " * 100, Kind.SAFETENSORS),
        (b"<!DOCTYPE html><html></html>", Kind.HTML),
        (b"", Kind.EMPTY),
        (b" \n", Kind.EMPTY),
        (bytes(range(256)), Kind.BINARY),
        (b'{"measured": true, "step_us": 1.0, "stages": []}', Kind.MEASURED_STEP),
        (b'{"step_us": 1.0, "stages": []}', Kind.PREDICTED_STEP),
        (b'{"before": {}, "after": {}}', Kind.COMPARISON),
        (b'{"values": {}, "name": "mine"}', Kind.PROFILE),
        (b'{"cases": [], "gpu": "NVIDIA H200"}', Kind.PROBES),
        (b'{"timings": [], "environment": {}}', Kind.KERNEL_TIMES),
        (b'{"records": []}', Kind.EVIDENCE),
        (b'{"ladders": []}', Kind.LADDERS),
        (b'{"claim": "c", "figures": []}', Kind.SCENARIO),
        (b'{"model_type": "kimi_k3"}', Kind.CONFIG),
        (b'{"a": 1}', None),
        (b"plain text", None),
    ],
)
def test_a_file_is_recognised_by_content(tmp_path: Path, content: bytes, kind: Kind | None) -> None:
    path = tmp_path / "given.json"
    path.write_bytes(content)
    assert recognise(path) is kind


def test_a_database_of_nsight_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "step.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table CUPTI_ACTIVITY_KIND_KERNEL(start integer, end integer)")
    database.close()
    assert recognise(path) is Kind.SQLITE


def test_devices_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    assert recognise(tmp_path) is Kind.FOLDER
    for path in (tmp_path / "fifo", tmp_path / "link", "/dev/zero"):
        assert recognise(path) is Kind.SPECIAL
        with pytest.raises(UserError, match="this is not a regular file; give a regular file; accepted: a document"):
            read_bytes(path, ANY)


def test_files_of_the_project_are_recognised() -> None:
    root = Path(__file__).parents[2]
    for pattern, kind in (
        ("sim/machines/*.json", Kind.PROFILE),
        ("model/data/*.json", Kind.CONFIG),
        ("calibrate/evidence/steps.json", Kind.EVIDENCE),
        ("calibrate/evidence/ladders.json", Kind.LADDERS),
        ("calibrate/evidence/claims/*.json", Kind.SCENARIO),
        ("calibrate/data/h200-decode-fused.json", Kind.MEASURED_STEP),
        ("calibrate/data/h200-primitives.json", Kind.PROBES),
        ("calibrate/data/h200-kernels.json", Kind.KERNEL_TIMES),
    ):
        paths = list(root.glob(pattern))
        assert paths and {recognise(path) for path in paths} == {kind}, pattern


def test_size_is_limited_and_long_names_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(b'"' + b"x" * (2 << 20))
    with pytest.raises(UserError, match=r"large\.json: 2097153 bytes, at most 1048576 are read; accepted: a document"):
        read_bytes(path, ANY)
    path.write_bytes(json.dumps(TRACE).encode() + b" " * (2 << 20))
    with pytest.raises(UserError, match=r"this is a torch profiler \(Chrome\) trace"):
        read_bytes(path, ANY)
    with pytest.raises(UserError, match="File name too long") as caught:
        read_bytes("n" * 5000, ANY)
    assert str(caught.value).startswith("...nnn") and len(str(caught.value)) < 200


# -- lines ------------------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(JSON)
def test_every_value_is_found_on_its_line(value: Any) -> None:
    text = json.dumps(value, indent=1)
    found = dict(places(text))
    lines = text.splitlines()

    def check(one: Any, keys: tuple[str | int, ...]) -> None:
        start = json.dumps(one)[0] if isinstance(one, dict | list) else json.dumps(one)
        assert start in lines[found.pop(keys) - 1]
        for key, inner in one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ():
            check(inner, (*keys, key))

    check(value, ())
    assert found == {}


def test_a_missing_value_has_its_container_line() -> None:
    text = '{"a": {\n "b": [1,\n 2]}}'
    assert lines_of(text, [("a", "b", 1), ("a", "c"), ("x",)]) == {("a", "b", 1): 3, ("a", "c"): 1, ("x",): 1}
    assert repeated('{"a": 1,\n "b": {"c": 1, "c": {"d": 2}}}') == [(("b", "c"), 2)]


# -- faults -----------------------------------------------------------------------------------------------------------


class Part(Record):
    renamed = "switch"

    name: Annotated[str, choice(("kda", "mla"))]
    count: Annotated[int, whole(1, 9)]
    share: Annotated[float, number(0, 1)] = 0.5


class Whole(Record):
    title: Annotated[str, TEXT]
    parts: list[Part]


def faults(text: str) -> str:
    document = parse_json("file.json", text, ANY)
    checked(document, Whole)
    with pytest.raises(UserError) as caught:
        document.settle()
    return str(caught.value)


def test_all_faults_name_field_value_and_line() -> None:
    text = """{"titel": "x", "parts": [
 {"name": "kdaa", "count": 10, "share": NaN},
 {"count": true, "welded": 1, "cuont": 2},
 7]}"""
    assert faults(text).split("; ") == [
        "file.json: line 1: the file lacks title (a text that is not empty)",
        "line 1: titel is unknown (did you mean title?)",
        'line 2: parts[0].name is "kdaa" (did you mean kda?), accepted: kda, mla',
        "line 2: parts[0].count is 10, accepted: a whole number from 1 to 9",
        "line 2: parts[0].share is NaN, accepted: 0 to 1",
        "line 3: parts[1] has fields that have other names now: welded -> fused-allreduce",
        "line 3: parts[1] lacks name (kda, mla)",
        "line 3: parts[1].count is true, accepted: a whole number from 1 to 9",
        "line 3: parts[1].cuont is unknown (did you mean count?)",
        "and 1 more",
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"title": "\\ud800", "parts": []}', 'title is "\\ud800", half a surrogate pair'),
        ('{"title": "x", "parts": [], "title": "y"}', "title stands twice in one object, accepted: once"),
        ('{"title": 1e999, "parts": []}', "title is Infinity, accepted: a text that is not empty"),
        ('{"title": "x", "parts": ' + "[" * 60 + "]" * 60 + "}", "parts is nested deeper than the 40 levels"),
    ],
)
def test_what_no_document_may_hold_is_a_fault(text: str, says: str) -> None:
    assert says in faults(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 01}', "line 1: not valid JSON: Expecting ',' delimiter, column 8"),
        ("[1,\n2,\n]", "line 3: not valid JSON"),
        ('{"a": 1\n"b": 2}', "line 2: not valid JSON: Expecting ',' delimiter, column 1"),
        ('{"a": 1}\n\n x', "line 3: not valid JSON: Extra data, column 2"),
        ('{"a": [1, 2', "line 1: not valid JSON: Expecting ',' delimiter, column 12 (cut short?)"),
        ('{"a": "b\nc"}', "line 1: not valid JSON: Invalid control character at"),
        ("1" * 5000, "holds a number of thousands of digits"),
        ("[" * 100_000, "nested more than 40 levels"),
        ("'a'", "line 1: not valid JSON"),
    ],
)
def test_what_is_no_json_says_where(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        read_json(path, ANY)
    assert str(caught.value).startswith(f"{path}: {says}")
    assert str(caught.value).endswith("; accepted: a document")


def test_an_answer_is_short_and_counts_the_rest() -> None:
    document = Document(name="d", value={})
    for index in range(1000):
        document.fault(("a", index), "is 0, accepted: 1")
    with pytest.raises(UserError) as caught:
        document.settle()
    assert str(caught.value).startswith("d: a[0] is 0, accepted: 1; a[1] is 0")
    assert str(caught.value).endswith("more") and len(str(caught.value)) < 600
    assert join("d", ["x" * 900]) == f"d: {'x' * 197}..."


def test_a_million_faults_are_not_all_found() -> None:
    document = parse_json("d", '{"title": "x", "parts": [' + "NaN," * 100_000 + "1]}", ANY)
    assert len(document.oddities) == 1001
    with pytest.raises(UserError, match=r"; and at least \d+ more$"):
        for index in range(2000):
            document.fault(("a", index), "is 0, accepted: 1")
    assert len(document.faults) == 1001


def test_lists_beyond_any_file_are_one_fault() -> None:
    long = ", ".join(["{}"] * 5000)
    assert faults(f'{{"title": "x", "parts": [{long}]}}').endswith("has 5000 entries in parts, accepted: at most 4096")


@pytest.mark.parametrize("one", ["0,", "[],"])
def test_a_text_that_would_fill_memory_is_unparsed(tmp_path: Path, one: str) -> None:
    path = tmp_path / "large.json"
    path.write_text("[" + one * 2_000_001 + "0]")
    with pytest.raises(UserError, match="holds more than 2,000,000 values, or 500,000 lists"):
        read_json(path, replace(ANY, most_bytes=1 << 25))


def test_values_are_shown_as_json_and_cut() -> None:
    assert [shown(one) for one in (None, True, "a", 1.5, [1, {"a": 2}])] == [
        "null",
        "true",
        '"a"',
        "1.5",
        '[1, {"a": 2}]',
    ]
    deep: Any = 0
    for _ in range(5000):
        deep = [deep]
    for long in ("x" * 10**6, [0] * 10**6, 10**400, deep):
        assert len(shown(long)) <= 60
    assert where(("a", 0, "b c", "x" * 99)) == f'a[0]."b c"."{"x" * 56}...'
