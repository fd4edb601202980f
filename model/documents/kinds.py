"""What a file is, by its first bytes or by the fields that stand in it, so that a refusal can name it.

Profilers, serving benchmarks and request traces write files that people give to the wrong command or hope are read.
"""

from __future__ import annotations

import gzip
import json
import os
import stat
import zlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_HEAD_BYTES = 1 << 16
_BENCHMARK = {
    "request_throughput", "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "mean_itl_ms", "median_itl_ms", "mean_e2e_latency_ms", "p99_ttft_ms",
}  # fmt: skip
_ARRIVALS = {"timestamp", "arrival_time", "arrived_at", "start_time"}
_LENGTHS = {
    "input_length", "output_length", "contexttokens", "generatedtokens", "prompt_len", "output_len", "input_tokens",
    "output_tokens", "num_prefill_tokens", "num_decode_tokens", "request tokens", "response tokens",
}  # fmt: skip


class Kind(Enum):
    """A kind of file: ``what`` it is, and what to do with it."""

    MEASURED_STEP = ("a measured step of 'k3sim decode'", "'k3sim report FILE' and 'k3sim compare FILE FILE' take it")
    PREDICTED_STEP = ("a predicted step of 'k3sim timeline'", "'k3sim compare FILE FILE' takes it")
    MEASURED_STEPS = (
        "a list of whole decode steps without their kernels",
        "'k3sim calibrate --check --steps FILE' puts them beside predictions, and no fit may use them",
    )
    COMPARISON = ("a comparison of 'k3sim compare'", "no command reads it")
    PROFILE = ("a machine profile", "'k3sim timeline --machine FILE' takes it")
    CONFIG = ("a model's config.json", "'k3sim timeline --model FILE' takes it")
    PROBES = ("a sample file of 'k3sim calibrate'", "'k3sim calibrate --from FILE' takes it")
    KERNEL_TIMES = (
        "a sample file of 'k3sim kernels bench'",
        "'k3sim kernels bench --resume' goes on with it, 'k3sim calibrate --check --kernels FILE' predicts it",
    )
    EVIDENCE = ("a table of published results", "'k3sim validate --evidence FILE' takes it")
    LADDERS = ("a table of optimisation ladders", "'k3sim validate' reads the shipped one")
    SCENARIO = ("a claim's scenario", "'k3sim claims FILE' takes it")
    KERNEL_TABLE = ("a CSV table of kernel times", "'k3sim calibrate --tables FILE' takes it")
    # What other programs write.
    TORCH_TRACE = ("a torch profiler (Chrome) trace", "'k3sim explain' reads it")
    PERFETTO = ("a Perfetto trace", "open it in ui.perfetto.dev; no command reads it")
    SQLITE = ("an SQLite database, as Nsight Systems exports", "'k3sim explain' reads it")
    NSYS_REPORT = ("a report of Nsight Systems", "'nsys export --type sqlite' makes what 'k3sim explain' reads")
    BENCHMARK = ("the result of a serving benchmark", "to compare it, write a record for 'k3sim validate --evidence'")
    REQUEST_TRACE = (
        "a trace of requests over time",
        "arrivals and prefill are not modelled; give one step's --concurrency and --context",
    )
    GZIP = ("a gzip archive", "unpack it first")
    GZIPPED_TRACE = ("a gzipped torch profiler (Chrome) trace", "'k3sim explain' reads it")
    ZIP = ("a zip archive", "unpack it first")
    SAFETENSORS = ("a safetensors file of weights", "weights are not read")
    HTML = ("an HTML page", "no command reads it")
    BINARY = ("binary data", "no command reads it")
    EMPTY = ("an empty file", "nothing can be read from it")
    FOLDER = ("a folder", "give a file")
    SPECIAL = ("not a regular file", "give a regular file")

    @property
    def what(self) -> str:
        return self.value[0]

    @property
    def advice(self) -> str:
        return self.value[1]


def recognise(path: str | Path) -> Kind | None:
    """The kind of a file, None where it is of no known kind. Raises OSError where there is no such file to read.

    A FIFO or a device is not opened. Of a text the whole is read, up to 32 MiB.
    """
    file = Path(path)
    mode = file.stat().st_mode
    if stat.S_ISDIR(mode):
        return Kind.FOLDER
    if not stat.S_ISREG(mode):
        return Kind.SPECIAL
    with file.open("rb") as opened:
        data = opened.read(32 << 20)
    return foreign_kind(data) or kind_of_text(data.decode("utf-8-sig", errors="replace"))


def foreign_kind(data: bytes) -> Kind | None:
    """What its bytes say a file is, where that is no text."""
    if not data.strip():
        return Kind.EMPTY
    for magic, kind in (
        (b"SQLite format 3\0", Kind.SQLITE),
        (b"PK\x03\x04", Kind.ZIP),
        (b"NVTXREP", Kind.NSYS_REPORT),
        (b"\x1f\x8b", Kind.GZIP),
    ):
        if data.startswith(magic):
            return _inside_gzip(data) if kind is Kind.GZIP else kind
    if data[8:9] == b"{" and 2 < int.from_bytes(data[:8], "little") < 100 << 20:
        return Kind.SAFETENSORS
    if data[:1] == b"\n" and _is_packet(data):
        return Kind.PERFETTO
    try:
        data[:_HEAD_BYTES].decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The head of a long file may end within a character.
        return Kind.BINARY if len(data) <= _HEAD_BYTES or error.start < _HEAD_BYTES - 4 else None
    return Kind.BINARY if b"\0" in data[:_HEAD_BYTES] else None


def _is_packet(data: bytes) -> bool:
    """Whether a length-delimited first field of a protobuf message is followed by another one."""
    length, shift, at = 0, 0, 1
    while at < min(len(data), 6):
        length |= (data[at] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 0x80:
            break
    inner = data[at : at + 1]
    return 0 < length <= len(data) - at and data[at + length : at + length + 1] in (b"", b"\n") and inner not in b'{["'


def _inside_gzip(data: bytes) -> Kind:
    try:
        head = zlib.decompressobj(wbits=31).decompress(data, _HEAD_BYTES)
    except (zlib.error, EOFError, gzip.BadGzipFile):
        return Kind.GZIP
    return Kind.GZIPPED_TRACE if b'"traceEvents"' in head else Kind.GZIP


def kind_of_text(text: str) -> Kind | None:
    """What a text is: JSON of a known kind, lines of JSON, a table, HTML."""
    start = text.lstrip()[:200].lower()
    if start.startswith(("<!doctype", "<html", "<?xml")):
        return Kind.HTML
    if not holds_too_much(text):
        try:
            return kind_of_document(json.loads(text))
        except (ValueError, RecursionError):
            pass
    return kind_of_lines(text)


def holds_too_much(text: str) -> bool:
    """Whether a JSON text would need half a gigabyte or more once it is parsed: an empty list takes 20 times its text.

    A step of 93 layers on 32 ranks has 60,000 kernels of eight fields.
    """
    return text.count(",") > 2_000_000 or text.count("{") + text.count("[") > 500_000


def kind_of_lines(text: str) -> Kind | None:
    """What a text that is no JSON document is, by its first line: an object a line, or a table's head."""
    first = next((line for line in text[:_HEAD_BYTES].splitlines() if line.strip()), "")
    try:
        return kind_of_document(json.loads(first))
    except (ValueError, RecursionError):
        pass
    cells = {cell.strip().strip('"').lower() for cell in first.split(",")}
    if {"hardware", "op", "time_us"} <= cells:
        return Kind.KERNEL_TABLE
    if cells & _LENGTHS and cells & _ARRIVALS:
        return Kind.REQUEST_TRACE
    return Kind.TORCH_TRACE if '"traceEvents"' in text[:_HEAD_BYTES] else None


def kind_of_document(value: Any) -> Kind | None:
    """What a JSON document is, by fields that no other kind has."""
    if isinstance(value, list):
        first = value[0] if value else None
        if isinstance(first, Mapping):
            return Kind.TORCH_TRACE if {"ph", "ts"} <= first.keys() else kind_of_document(first)
        return None
    if not isinstance(value, Mapping):
        return None
    keys = value.keys()
    if "step_us" in keys and ("measured" in keys or "stages" in keys):
        return Kind.MEASURED_STEP if value.get("measured", False) is not False else Kind.PREDICTED_STEP
    for kind, all_of in _FIELDS:
        if all_of <= keys:
            return kind
    if len(_BENCHMARK & keys) >= 2:
        return Kind.BENCHMARK
    lower = {str(key).lower() for key in keys}
    return Kind.REQUEST_TRACE if lower & _ARRIVALS and lower & _LENGTHS else None


_FIELDS: tuple[tuple[Kind, set[str]], ...] = (
    (Kind.TORCH_TRACE, {"traceEvents"}),
    (Kind.COMPARISON, {"before", "after"}),
    (Kind.MEASURED_STEPS, {"steps"}),
    (Kind.PROFILE, {"values", "name"}),
    (Kind.PROFILE, {"values", "title"}),
    (Kind.SCENARIO, {"claim", "figures"}),
    (Kind.EVIDENCE, {"records"}),
    (Kind.LADDERS, {"ladders"}),
    (Kind.PROBES, {"cases", "gpu"}),
    (Kind.PROBES, {"cases", "checksum"}),
    (Kind.KERNEL_TIMES, {"timings", "environment"}),
    (Kind.CONFIG, {"model_type"}),
    (Kind.CONFIG, {"text_config"}),
    (Kind.CONFIG, {"hidden_size"}),
    (Kind.CONFIG, {"architectures"}),
)


def is_regular(path: str | Path) -> bool:
    """Whether there is a regular file, or a link to one; False also for what is no path."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False
