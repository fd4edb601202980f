"""Stamps of blocks: launches told apart, the switch off without a trace, and what an H200 recorded."""

from __future__ import annotations

import json
import random
import re
import statistics
import struct
from collections import Counter
from pathlib import Path

import pytest

from k3sim.calibrate.decode import commandline
from k3sim.calibrate.decode.lines import timestamp_lines
from k3sim.calibrate.decode.options import DecodeOptions
from k3sim.errors import UserError
from k3sim.kernels.device import timestamps
from k3sim.kernels.device.timestamps import BlockTimestamps, RecordedLaunch, TimestampBuffer, launches_of
from k3sim.kernels.toolchain import compile_cache

STORED = Path(__file__).parents[2] / "calibrate" / "data" / "h200-block-timestamps.json"


def planted(kernel: str, launch: int, num_blocks: int, at_ns: int) -> list[BlockTimestamps]:
    return [
        BlockTimestamps(kernel=kernel, block=block, sm=block % 3, began_ns=at_ns + block, released_ns=at_ns + 50,
              ended_ns=at_ns + 100 + 10 * block + launch)
        for block in range(num_blocks)
    ]  # fmt: skip


def test_launches_are_told_apart_in_any_order() -> None:
    records = [*planted("up", 0, 4, 1000), *planted("up", 1, 4, 3000), *planted("send", 0, 1, 2000)]
    random.Random(0).shuffle(records)
    first, second, third = launches_of(records)
    assert [one.kernel for one in (first, second, third)] == ["up", "send", "up"]
    assert (first.num_blocks, first.num_sms, second.num_blocks) == (4, 3, 1)
    assert first.began_us == (0.0, 0.003) and first.ended_us == (0.1, 0.13) and first.released_us == (0.05, 0.05)
    assert third.began_us == (2.0, 2.003) and third.ended_us == (2.101, 2.131)


def test_overlapping_late_blocks_stay_with_their_launch() -> None:
    late = planted("in_proj", 0, 2, 0)
    late[1] = BlockTimestamps(kernel="in_proj", block=1, sm=1, began_ns=5000, released_ns=5000, ended_ns=9000)
    found = launches_of([*late, *planted("decode", 0, 2, 4000), *planted("in_proj", 1, 2, 20_000)])
    assert [(one.kernel, one.num_blocks) for one in found] == [("in_proj", 2), ("decode", 2), ("in_proj", 2)]
    assert found[0].ended_us[1] == 9.0


def test_an_unrecorded_release_is_none() -> None:
    one = BlockTimestamps(kernel="gather", block=0, sm=0, began_ns=10, released_ns=0, ended_ns=30)
    (launch,) = launches_of([one])
    assert launch.released_us is None and launch.ended_us == (0.02, 0.02)
    assert launches_of([]) == []


def test_the_buffer_is_read_as_kernels_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timestamps, "_kinds", {"produce": 0, "consume": 1})
    memory = torch.zeros(timestamps.HEAD_BYTES + 3 * 4 * timestamps.RECORD_WORDS, dtype=torch.uint8)
    record = struct.Struct("<iiiiqqq")
    assert record.size == 4 * timestamps.RECORD_WORDS
    raw = struct.pack("<i", 2) + bytes(timestamps.HEAD_BYTES - 4)
    raw += record.pack(1, 7, 131, 0, 2**60, 2**60 + 5, 2**60 + 9) + record.pack(0, 3, 2, 0, 2**60 + 1, 0, 2**60 + 2)
    memory[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    buffer = TimestampBuffer(memory)
    one, other = buffer.timestamps()
    assert (one.kernel, one.block, one.sm, one.ended_ns - one.began_ns) == ("consume", 7, 131, 9)
    assert (other.kernel, other.released_ns) == ("produce", 0)
    memory[:4] = torch.tensor([timestamps.CAPACITY + 1], dtype=torch.int32).view(torch.uint8)
    with pytest.raises(UserError, match=f"timestamps: {timestamps.CAPACITY + 1} records, {timestamps.CAPACITY} fit"):
        buffer.timestamps()
    buffer.clear()
    assert buffer.timestamps() == []


def test_stamps_are_asked_for_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(compile_cache, "_compiled", {("sm_90a",): object()})
    with pytest.raises(UserError, match="timestamps: kernels of this process are compiled without them"):
        timestamps.collect("cpu")
    assert not timestamps.on("skinny_gemv")


def test_a_table_takes_no_stamps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert commandline.main(["--timestamps", "--table", str(tmp_path / "steps.json")]) == 2
    assert capsys.readouterr().err.startswith("k3sim: --timestamps makes steps longer")
    assert list(tmp_path.iterdir()) == []


def test_the_command_repeats_the_switch() -> None:
    assert DecodeOptions(timestamps=True).command() == "k3sim decode --timestamps"
    of = DecodeOptions(timestamps_of=("mla_prep", "mla_decode"))
    assert of.command() == "k3sim decode --timestamps-of mla_prep --timestamps-of mla_decode"


def test_an_unknown_family_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert commandline.main(["--timestamps-of", "gemv"]) == 2
    accepted = ", ".join(timestamps.recording_families())
    assert capsys.readouterr().err == f"k3sim: timestamps: got 'gemv', accepted: {accepted}\n"


def test_every_family_is_a_folder_that_records() -> None:
    """And no kernel asks for another's."""
    folder = Path(timestamps.__file__).parents[1]
    asked = {
        (path.parent.name, name)
        for path in folder.glob("*/*.py")
        for name in re.findall(r'timestamps\.(?:on|now)\("(\w+)"\)', path.read_text(encoding="utf-8"))
    }
    assert asked == {(family, family) for family in timestamps.recording_families()}


@pytest.mark.parametrize("operator", ["skinny_gemv", "latent_tail", "proj_allreduce", "router_topk"])
def test_timestamps_change_machine_code_only_where_on(
    operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("cutlass")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setattr(timestamps, "_kinds", {})
    name = {"skinny_gemv": "448x7168_rows1", "latent_tail": "up_ranks16_rows1_late",
            "proj_allreduce": "consume_ranks16", "router_topk": "gather16"}[operator]  # fmt: skip
    from k3sim.kernels.toolchain.catalogue import BUILDS

    monkeypatch.setattr(timestamps, "_address", 1 << 40)
    monkeypatch.setattr(timestamps, "_families", frozenset({"kda_decode"}))
    BUILDS[operator]()[name]()
    assert timestamps._kinds == {}
    monkeypatch.setattr(timestamps, "_families", frozenset({operator}))
    BUILDS[operator]()[name]()
    assert len(timestamps._kinds) == 1
    monkeypatch.setattr(timestamps, "_address", 0)
    monkeypatch.setattr(timestamps, "_kinds", {})
    BUILDS[operator]()[name]()
    assert timestamps._kinds == {}


def test_recorded_launches_say_what_the_page_says() -> None:
    launches = [RecordedLaunch(**one) for one in json.loads(STORED.read_text(encoding="utf-8"))["launches"]]
    count = Counter(one.kernel for one in launches)
    # 13 layers: 10 with KDA; the tail and the experts in 12.
    assert count["skinny_gemv 3216x7168"] == 10 and count["latent_tail.up"] == count["expert_gemv both 192"] == 12
    projections = [one for one in launches if one.kernel == "skinny_gemv 3216x7168"]
    assert all(one.num_blocks == 132 == one.num_sms for one in projections)
    # Its last blocks begin when the residual in front of it has left their SMs, 4 us after the first ones.
    assert 3.5 < statistics.median(one.began_us[1] - one.began_us[0] for one in projections) < 7.0
    ups = [one for one in launches if one.kernel == "latent_tail.up"]
    assert 4.0 < statistics.median(one.ended_us[1] - one.released_us[1] for one in ups if one.released_us) < 7.0
    assert len(timestamp_lines(launches)) == 1 + len(count)
