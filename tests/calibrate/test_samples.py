"""Sample files: what is read, what is refused in one line, which samples no fit may use, runs that go on."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3sim.calibrate.fit.calibration import thinned
from k3sim.calibrate.fit.fit import labels_read
from k3sim.calibrate.probes import recorder
from k3sim.calibrate.samples import Run, Sample, read_samples
from k3sim.errors import UserError

DATA = Path(recorder.__file__).parents[1] / "data"
Document = dict[str, Any]


def sample(*medians: float, unit: str = "us", width: float = 0.0, count: int = 100, **how: Any) -> Sample:
    runs = tuple(
        Run(median=one, p10=one - width / 2, p90=one + width / 2, count=count, values=how.get("values", ()))
        for one in medians
    )
    return Sample(
        case="a", parameters={}, quantity="time", unit=unit, runs=runs, clock_hz=how.get("clock_hz", ())
    )


def stored(name: str = "h200-primitives.json") -> Document:
    document: Document = json.loads((DATA / name).read_text(encoding="utf-8"))
    return document


def small() -> Document:
    """A file of schema 2 with one case of two runs of four repetitions."""
    runs = [[1.0, 1.01, 1.02, 1.03], [1.0, 1.02, 1.03, 1.04]]
    head = {"schema_version": 2, "gpu": "NVIDIA H200", "num_sms": 132, "l2_bytes": 1, "date": "2026-11", "quick": False}
    case = {
        "probe": "fence",
        "parameters": {"scope": "gpu"},
        "sm_clock_hz": [1_980_000_000, 1_979_000_000],
        "readings": {"time": {"unit": "us", **recorder.summary(runs)}},
    }
    return signed({**head, "torch": "2.11", "cases": [case]})


def signed(document: Document) -> Document:
    return {**document, "checksum": recorder.checksum(document)}


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


# -- what is read ---------------------------------------------------------------------------------------------------


def test_stored_probes_and_kernels_are_read_whole() -> None:
    primitives, kernels = read_samples(DATA / "h200-primitives.json"), read_samples(DATA / "h200-kernels.json")
    assert (primitives.kind, kernels.kind) == ("primitives", "kernels")
    assert {one.gpu for one in (primitives, kernels)} == {"NVIDIA H200"}
    assert {one.date for one in (primitives, kernels)} == {"2026-11"}
    assert "checksum" in primitives.metadata
    readings = sum(len(case["readings"]) for case in stored()["cases"])
    assert len(primitives.samples) == readings - 1  # the step of a timer is none
    assert len(kernels.samples) > 36
    assert all(len(one.runs[0].values) in (50, 100) for one in kernels.samples)


def test_stored_loads_say_what_the_simulator_takes() -> None:
    """L1 bounds loads into registers, half lines do not, and an SM that is idle for an instant is divided anew."""
    file = read_samples(DATA / "h200-loads.json")

    def reading(case: str, quantity: str, **parameters: object) -> float:
        # Unstable ones are refused for a fit, not for a comparison by a factor of two.
        found = [*file.samples, *(one for one, _ in file.refused)]
        (value,) = {
            one.value for one in found
            if (one.case, one.quantity) == (case, quantity) and parameters.items() <= one.parameters.items()
        }  # fmt: skip
        return value

    for loads in ("rows", "fragments"):
        asked = [
            reading("issue_burst", "asked", loads=loads, bytes_per_sm=96 << 10, carve_out=one) for one in (60, 100)
        ]
        assert asked[0] < 0.8 < 1.9 < asked[1]
    there = [reading("issue_burst", "there", loads=one, bytes_per_sm=96 << 10, carve_out=60)
             for one in ("rows", "fragments")]  # fmt: skip
    assert there[1] < 1.1 * there[0]
    rates = {
        (wish, follows): reading("carve_out_persistence", "read_rate", carve_out=wish, held_kib=48, follows=follows)
        for wish in (60, 100)
        for follows in ("alone", "pdl")
    }
    assert rates[60, "pdl"] > 0.95 * rates[60, "alone"] and rates[60, "pdl"] > 1.8 * rates[100, "pdl"]
    late = [reading("hbm_contention", "last", burst_blocks=132, burst_bytes_in_flight_per_sm=1 << 17, burst_later_ns=ns)
            for ns in (0, 2000)]  # fmt: skip
    assert late[0] > 4.0 and late[1] < 2.3
    entries = {one.value > 5 for one in file.samples if one.case == "three_blocks"}
    assert entries == {True, False}


def test_every_repetition_of_schema_2_is_there(tmp_path: Path) -> None:
    (one,) = read_samples(write(tmp_path / "a.json", small())).samples
    assert [run.values for run in one.runs] == [(1.0, 1.01, 1.02, 1.03), (1.0, 1.02, 1.03, 1.04)]
    assert one.value == pytest.approx((1.015 + 1.025) / 2)
    assert one.clock_hz == (1_980_000_000, 1_979_000_000)
    assert one.instability == ""


def test_a_thinned_file_keeps_what_is_read(tmp_path: Path) -> None:
    path = DATA / "h200-primitives.json"
    document = stored()
    assert document["thinned"].startswith("Every repetition is kept of each quantity that a machine value is read from")
    file = read_samples(path)
    keep = labels_read(file) | {one.label for one, _ in file.refused}
    assert {one.label for one in file.samples if not one.runs[0].values} & keep <= {
        one.label for one in file.samples if one.case.endswith("other_gpu")  # of an earlier run, which kept none
    }
    assert thinned(path) == path.read_text(encoding="utf-8")  # nothing is left to thin
    whole = small()
    text = thinned(write(tmp_path / "a.json", whole))
    assert read_samples(write(tmp_path / "b.json", json.loads(text))).samples[0].runs[0].median == 1.015
    assert "samples" not in reading(json.loads(text))  # no value is read from a fence of one GPU


def test_percentiles_stand_for_many_single_loads(tmp_path: Path) -> None:
    document = small()
    loads = list(range(300, 300 + recorder.MOST_KEPT + 1))
    document["cases"][0]["readings"]["load"] = {"unit": "cycle", **recorder.summary([loads, loads])}
    found = read_samples(write(tmp_path / "a.json", signed(document))).samples[1]
    assert [len(run.values) for run in found.runs] == [101, 101]
    assert found.runs[0].count == len(loads)
    assert found.value == 300 + recorder.MOST_KEPT / 2


# -- what is unstable -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unstable", "reason"),
    [
        (sample(1.0, 1.05), "its runs are 0.05 us apart, accepted is 0.0205"),
        (sample(400.0, 420.0, unit="cycle"), "its runs are 20 cycle apart, accepted is 12"),
        (sample(4.60e12, 4.66e12, unit="B/s"), "its runs are 6e+10 B/s apart"),
        (sample(2.0, 2.0, width=0.3), "its middle 80 % are 0.3 us wide, accepted is 0.2"),
        (sample(2.0, 2.0, clock_hz=(1.98e9, 1.755e9)), "the SM clock went from 1980 to 1755 MHz, accepted is 0.8 %"),
        (
            sample(2.05, 2.05, width=0.1, values=tuple(2.0 + 0.001 * step for step in range(100))),
            "its last third is 0.067 us from its first",
        ),
    ],
)
def test_an_unstable_sample_says_why(unstable: Sample, reason: str) -> None:
    assert reason in unstable.instability


@pytest.mark.parametrize(
    "stable",
    [
        sample(1.0, 1.01),
        sample(400.0, 408.0, unit="cycle"),
        sample(0.05, 0.06),
        sample(700.0, 702.0, unit="cycle", width=400, count=31680),  # of single loads, not of repetitions
        sample(2.0, 2.0, clock_hz=(1.98e9, 1.979e9)),
        sample(2.0, 2.0, values=tuple(2.0 + 0.01 * (step % 3) for step in range(99))),
    ],
)
def test_a_sample_within_the_noise_is_stable(stable: Sample) -> None:
    assert stable.instability == ""


def test_some_stored_samples_are_for_no_fit() -> None:
    """On one SM of that GPU lines were near in some launches and far in others: two groups, no median."""
    refused = {one.label: reason for one, reason in read_samples(DATA / "h200-primitives.json").refused}
    assert 20 < len(refused) < 80
    assert "% are 350 cycle wide" in refused["l2_chase_written lines=32768 sm=0 first_read_far_decile"]


# -- what is refused ------------------------------------------------------------------------------------------------


def edited(change: Callable[[Document], object]) -> Document:
    document = copy.deepcopy(small())
    change(document)
    return document


def reading(document: Document) -> Document:
    found: Document = document["cases"][0]["readings"]["time"]
    return found


BAD: list[tuple[str, object, str]] = [
    ("an edited value", edited(lambda d: reading(d)["samples"][0].__setitem__(0, 1.005)), "checksum is"),
    ("an edited head", edited(lambda d: d.update(date="2026-12")), "which the content does not match"),
    (
        "a median that is not that of the samples",
        signed(edited(lambda d: reading(d)["runs"][0].__setitem__(0, 1.019))),
        "says median 1.019, that of its samples is 1.015",
    ),
    (
        "a repetition less",
        signed(edited(lambda d: reading(d)["samples"][1].pop())),
        "says 4 repetitions and has 3 samples, accepted: as many",
    ),
    ("no samples", signed(edited(lambda d: reading(d).pop("samples"))), "lacks its samples"),
    (
        "samples that a thinned file says it has",
        signed(edited(lambda d: (d.update(thinned="some"), reading(d).update(samples=[[], []])))),
        "lacks its samples",
    ),
    (
        "deciles in disorder",
        signed(edited(lambda d: reading(d)["runs"][0].__setitem__(1, 5.0))),
        "accepted: p10 <= median <= p90",
    ),
    ("another schema", signed(edited(lambda d: d.update(schema_version=3))), "schema_version is 3, accepted: 1 or 2"),
    ("no checksum", {k: v for k, v in small().items() if k != "checksum"}, "lacks checksum, which schema 2 requires"),
    ("an unknown unit", signed(edited(lambda d: reading(d).update(unit="furlong"))), 'is "furlong", accepted: B/s'),
    ("no number", signed(edited(lambda d: reading(d)["runs"][0].__setitem__(0, "x"))), "accepted: [median, p10, p90,"),
    ("no case", signed(edited(lambda d: d.update(cases=[]))), "cases is [], accepted: a list that is not empty"),
    ("whole steps", stored("h200-decode-steps.json"), "this is a list of whole decode steps"),
    ("another document", {"schema_version": 1}, "lacks cases of probes and timings of kernels"),
    ("a list", [], "holds [], which is no JSON object"),
]


@pytest.mark.parametrize(("document", "reason"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, document: object, reason: str) -> None:
    path = write(tmp_path / "bad.json", document)
    with pytest.raises(UserError) as caught:
        read_samples(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "accepted" in str(caught.value) or "checksum" in str(caught.value)


def test_all_faults_of_samples_are_one_line(tmp_path: Path) -> None:
    document = {**small(), "num_sms": 0, "gpu": None}
    document["cases"][0]["sm_clock_hz"] = [1.98e9, "fast"]
    readings = {"time": {"unit": "us", "runs": [[2, 3, 4, 1]]}}
    document["cases"].append({"probe": "fence", "parameters": {}, "readings": readings})
    path = tmp_path / "a.json"
    path.write_text(json.dumps(signed(document), indent=1))
    with pytest.raises(UserError) as caught:
        read_samples(path)
    assert str(caught.value) == (
        f"{path}: line 3: gpu is null, accepted: a text that is not empty; line 4: num_sms is 0, accepted: a whole "
        'number from 1 to 100000; line 17: cases[0].sm_clock_hz[1] is "fast", accepted: 1e+06 to 1e+12 Hz; line 60: '
        "cases[1].readings.time.runs[0] is [2, 3, 4, 1], accepted: p10 <= median <= p90"
    )


@pytest.mark.parametrize("value", [10**400, 1e308, float("nan"), float("inf")])
def test_numbers_beyond_reason_are_refused(tmp_path: Path, value: float) -> None:
    kernels = stored("h200-kernels.json")
    kernels["timings"] = kernels["timings"][:1]
    kernels["timings"][0]["samples_us"][0] = value
    with pytest.raises(UserError, match=r"timings\[0\]\.samples_us is \[.*accepted: a list of finite numbers"):
        read_samples(write(tmp_path / "a.json", signed(kernels)))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a document; of lists the first two entries."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    return ([at] if at else []) + [place for key, one in inner for place in places(one, (*at, key))]


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    kernels = stored("h200-kernels.json")
    kernels["timings"] = kernels["timings"][:1]
    path = tmp_path / "a.json"
    for whole in ({k: v for k, v in small().items() if k != "checksum"}, kernels):
        for place in places(whole):
            for value in (None, True, -1, "x", [], {}, [1], {"a": 1}, float("nan")):
                document = copy.deepcopy(whole)
                inner: Any = document
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                write(path, signed(document))
                try:
                    read_samples(path)
                except UserError as refusal:
                    assert "\n" not in str(refusal), (place, value)


def test_a_truncated_or_missing_file_is_refused(tmp_path: Path) -> None:
    whole = (DATA / "h200-primitives.json").read_text(encoding="utf-8")
    cut = tmp_path / "cut.json"
    cut.write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(UserError, match=r"not valid JSON: .*accepted: a sample file that 'k3sim calibrate'"):
        read_samples(cut)
    with pytest.raises(UserError, match=r"none\.json: cannot be read \(No such file"):
        read_samples(tmp_path / "none.json")


def test_the_stored_probes_cannot_be_edited_unseen(tmp_path: Path) -> None:
    """Where only a summary is kept there is nothing to compare a median with; the checksum is over all."""
    document = stored()
    reading = next(iter(document["cases"][100]["readings"].values()))
    reading["runs"][0][3] += 1
    with pytest.raises(UserError, match="which the content does not match"):
        read_samples(write(tmp_path / "a.json", document))


def test_kernel_times_cannot_be_edited_unseen(tmp_path: Path) -> None:
    document = stored("h200-kernels.json")
    document["timings"][0]["median_us"] *= 0.98
    with pytest.raises(UserError, match=r"timings\[0\]\.median_us is 19\.5\d+, that of the samples is 19\.9"):
        read_samples(write(tmp_path / "a.json", document))


# -- measuring goes on where it stopped -----------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(recorder, "Clocks", lambda gpu: SimpleNamespace(hz=1.98e9))
    monkeypatch.setattr(
        recorder, "metadata", lambda gpu, quick: {k: v for k, v in small().items() if k not in ("cases", "checksum")}
    )
    return SimpleNamespace(name="NVIDIA H200")


def test_a_stopped_run_takes_what_is_missing(tmp_path: Path, gpu: SimpleNamespace) -> None:
    path, taken, lines = tmp_path / "a.json", [], []

    def record(into: recorder.Recorder, name: str) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            taken.append(name)
            return {"time": ("us", [1.0, 1.1, 1.2])}

        into.record("fence", {"scope": name}, sampler)

    first: Any = recorder.Recorder(gpu, path, False, lines.append)  # type: ignore[arg-type]
    record(first, "gpu")
    record(first, "system")
    again: Any = recorder.Recorder(gpu, path, False, lines.append)  # type: ignore[arg-type]
    for name in ("gpu", "system", "none"):
        record(again, name)
    assert taken == ["gpu"] * 2 + ["system"] * 2 + ["none"] * 2  # two runs each, and none twice
    assert len(lines) == 3
    found = read_samples(path)
    assert [one.parameters["scope"] for one in found.samples] == ["gpu", "system", "none"]
    assert found.samples[0].runs[0].values == (1.0, 1.1, 1.2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"gpu": "NVIDIA B200"}, "its gpu is 'NVIDIA B200', this run's is 'NVIDIA H200'"),
        ({"quick": True}, "its quick is True"),
        ({"schema_version": 1}, "its schema_version is 1"),
    ],
)
def test_a_run_resumes_on_its_machine_only(
    tmp_path: Path, gpu: SimpleNamespace, change: Document, reason: str
) -> None:
    path = write(tmp_path / "a.json", signed({**small(), **change}))
    with pytest.raises(recorder.CannotResume, match=reason):
        recorder.Recorder(gpu, path, False)  # type: ignore[arg-type]


def test_a_run_resumes_no_edited_file(tmp_path: Path, gpu: SimpleNamespace) -> None:
    path = write(tmp_path / "a.json", edited(lambda d: d.update(date="2026-12")))
    with pytest.raises(recorder.CannotResume, match="does not match its checksum"):
        recorder.Recorder(gpu, path, False)  # type: ignore[arg-type]
    path.write_text("{", encoding="utf-8")
    with pytest.raises(recorder.CannotResume, match="no file of probes"):
        recorder.Recorder(gpu, path, False)  # type: ignore[arg-type]
