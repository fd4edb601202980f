"""Curves over users and contexts, sudden changes with the kernels behind them, and the inverse question."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import k3sim
from k3sim.commands.curve import sentence_of, time_of
from k3sim.commands.curve_page import page_of, published_gains
from k3sim.curve_report import Curve
from k3sim.errors import UserError
from k3sim.sim.curve import changed, cliffs, is_sudden, point, tasks
from k3sim.sim.largest import largest, largest_that_fits, with_value
from k3sim.sim.numbers import numbers_of
from k3sim.sim.options import Options
from k3sim.sim.predict import predict
from k3sim.sim.question import ask


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("8", (8,)),
        ("4,1,2,4", (1, 2, 4)),
        ("1:4", (1, 2, 3, 4)),
        ("8:30:8", (8, 16, 24)),
        ("1:1024:x4", (1, 4, 16, 64, 256, 1024)),
        ("1:2, 9", (1, 2, 9)),
    ],
)
def test_lists_and_ranges_of_numbers(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers_of("concurrency", text) == numbers


@pytest.mark.parametrize(
    "text",
    ["", ",", "1,", "1,0", "1,-2", "two", "1.5", "4:1", "1:9:0", "1:9:x1", "1:9:xx2", "1:99999", "9" * 13, "٣"],
)
def test_what_is_no_list_is_one_line(text: str) -> None:
    with pytest.raises(UserError) as caught:
        numbers_of("concurrency", text)
    assert "--concurrency" in str(caught.value) and "\n" not in str(caught.value)


def test_a_point_is_the_plain_timeline() -> None:
    options = Options(concurrency=4)
    assert point(options, "fused", 4, 8192).step_us == predict(ask(options)).step_us
    assert point(options, "stock", 4, 8192).step_us == predict(ask(Options(path="stock", concurrency=4))).step_us


def test_points_that_do_not_fit_are_kept() -> None:
    small = Options(memory=150.0)
    fits, too_many = (point(small, "stock", users, 8192) for users in (1, 512))
    assert fits.fits and not too_many.fits and 1 < too_many.users_that_fit < 512
    assert too_many.step_us is not None and too_many.total_bytes > too_many.capacity_bytes
    refused = point(Options(path="stock", tp=16, attn_dp=2), "fused", 4, 8192)
    assert refused.step_us is None and "attention groups" in refused.refused


def test_a_list_beyond_the_model_is_refused() -> None:
    for users, contexts in (((1, 5000), (8192,)), ((1,), (1, 2_000_000))):
        with pytest.raises(UserError, match="a whole number from 1 to"):
            tasks(Options(), users, contexts, ("stock",))
    with pytest.raises(UserError, match="points; accepted: up to 4096"):
        tasks(Options(), range(1, 100), range(1, 100), ("stock",))


def test_sudden_changes_name_their_kernels() -> None:
    found = {one.concurrency: one for one in cliffs(Options(), "fused", (1, 2, 4, 16), 8192)}
    assert {3, 9} <= found.keys()
    assert any("moe.experts ends" in one for one in found[9].kernels)
    assert any("kda.in_proj: skinny_gemv.ring to cublas" in one for one in found[3].kernels)
    assert all(is_sudden(one.before_us, one.after_us) and (one.kernels or one.grown) for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["stock", "fused", "megakernel"])
def test_no_change_goes_unexplained(path: str) -> None:
    """From 1 to 12 users every jump or fall is where a kernel changes, or is in what reads more experts."""
    listed = {one.concurrency for one in cliffs(Options(), path, range(1, 13), 8192)}
    steps = [predict(ask(with_value(Options(path=path), "concurrency", users))).step_us for users in range(1, 13)]
    large = {users + 1 for users in range(1, 12) if is_sudden(steps[users - 1], steps[users])}
    assert listed == large
    for one in cliffs(Options(), path, sorted({n for users in large for n in (users - 1, users)}), 8192):
        assert one.kernels or "moe.experts" in one.grown[0] + one.grown[1]


def test_a_fall_names_its_kernels() -> None:
    """Small ones too: from 129 users on exchanges are the libraries', and stock is 1.6 % faster."""
    (fall,) = (one for one in cliffs(Options(path="stock"), "stock", (128, 129), 8192) if one.change < 0)
    assert -0.05 < fall.change < -0.005
    assert "moe.tail_reduce ends" in fall.kernels and "moe.finalize begins" in fall.kernels


def test_changes_of_a_signature_in_words() -> None:
    before = {"a": "f.x (1)", "b": "f.y (1)", "c": "f.z (1)"}
    after = {"a": "f.x (2)", "b": "f.w (1)", "d": "f.z (1)"}
    assert changed(before, after) == ("a: another form", "b: f.y to f.w", "c ends", "d begins")
    assert changed(before, before) == ()


# -- the inverse ------------------------------------------------------------------------------------------------------


def test_the_largest_holds_and_the_next_does_not() -> None:
    found = largest(Options(), "concurrency", 12_000)
    steps = [
        predict(ask(with_value(Options(), "concurrency", users))).step_us for users in (found.value, found.value + 1)
    ]
    assert steps[0] == found.step_us <= 12_000 < steps[1]
    assert found.is_monotone and found.fits and found.fits > found.value
    said = sentence_of(found)
    assert said.startswith(f"up to {found.value} users keep 12.000 ms a token") and "memory holds" in said


@pytest.mark.slow
@pytest.mark.parametrize(("path", "most_us"), [("fused", 42_000), ("stock", 23_400)])
def test_the_largest_lies_beyond_a_fall(path: str, most_us: float) -> None:
    """Where a kernel changes (fused, 129 users), and where streams only hide each other better (stock, 33)."""
    found = largest(Options(path=path), "concurrency", most_us)
    around = range(found.value - 6, found.value + 12)
    steps = {n: predict(ask(with_value(Options(path=path), "concurrency", n))).step_us for n in around}
    assert found.value == max(users for users, step in steps.items() if step <= most_us)
    assert any(step > most_us for users, step in steps.items() if users < found.value)
    assert not found.is_monotone and "does not grow throughout" in sentence_of(found)


def test_memory_holds_what_the_point_says() -> None:
    """With the experts that the path pads from nine users on."""
    for options in (Options(), Options(memory=150.0), Options(memory=112.0)):
        most = largest_that_fits(options, "concurrency", 4096)
        assert most
        assert ask(with_value(options, "concurrency", most)).room().users >= most
        room = ask(with_value(options, "concurrency", most + 1)).room()
        assert room.resident.total > room.capacity
    assert largest_that_fits(Options(memory=60.0), "concurrency", 4096) == 0
    # Memory holds more rows than the project's own kernels take.
    assert (largest_that_fits(Options(kernels="own"), "concurrency", 4096) or 0) > 16


def test_a_path_without_kernels_is_refused() -> None:
    with pytest.raises(UserError, match="plain residual"):
        largest(Options(model="deepseek-r1", tp=8, path="megakernel"), "concurrency", 20_000)


def test_the_largest_context_is_found_too() -> None:
    found = largest(Options(concurrency=4), "context", 8_000)
    assert 8192 < found.value < 1_048_576
    one = with_value(Options(concurrency=4), "context", found.value + 1)
    assert predict(ask(one)).step_us > 8_000


def test_a_time_that_nothing_holds() -> None:
    with pytest.raises(UserError, match=r"no concurrency keeps 2 ms: 1 user gets a step of 4\.\d+ ms \(2\d"):
        largest(Options(), "concurrency", 2_000)


@pytest.mark.parametrize(
    ("tpot", "per_second", "us"),
    [("20ms", None, 20_000.0), ("500 us", None, 500.0), ("0.02s", None, 20_000.0), (None, 50.0, 20_000.0), (None,) * 3],
)
def test_times_have_their_units(tpot: str | None, per_second: float | None, us: float | None) -> None:
    assert time_of(tpot, per_second) == us


@pytest.mark.parametrize(
    ("tpot", "per_second"),
    [("20", None), ("0ms", None), ("-1ms", None), ("ms", None), ("nan ms", None), ("20ms", 50.0), (None, 0.0),
     (None, -1.0), (None, float("nan")), (None, float("inf"))],
)  # fmt: skip
def test_times_that_say_nothing_are_refused(tpot: str | None, per_second: float | None) -> None:
    with pytest.raises(UserError, match="--for-t"):
        time_of(tpot, per_second)


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_hold_every_point(tmp_path: Path) -> None:
    options = Options(machine="gb200")
    paths, users = ("stock", "fused"), (1, 4)
    points = tuple(point(options, path, count, 8192, 2) for path in paths for count in users)
    curve = Curve(options=options, points=points, cliffs=tuple(cliffs(options, "fused", users, 8192)))
    files = curve.write(tmp_path, page_of(curve))
    document = json.loads(Path(files["json"]).read_text())
    rows = document["points"]
    assert [row["step_us"] for row in rows] == [one.step_us for one in points]
    assert rows[2]["gain"] == rows[0]["step_us"] / rows[2]["step_us"]
    assert rows[2]["gain_low"] <= rows[2]["gain"] <= rows[2]["gain_high"]
    assert rows[3]["low_us"] <= rows[3]["step_us"] <= rows[3]["high_us"]
    assert Path(files["csv"]).read_text().count("\n") == 5
    pandas = pytest.importorskip("pandas")
    assert list(pandas.read_parquet(files["parquet"])["concurrency"]) == [1, 4, 1, 4]
    assert list(curve.frame()["path"]) == ["stock", "stock", "fused", "fused"]
    page = Path(files["html"]).read_text()
    assert "id='gain'" in page and "fused from 2 to 3 users" in page


def test_python_has_the_same_curve() -> None:
    found = k3sim.curve(concurrency=(2, 1), path="stock")
    assert [(one.path, one.concurrency) for one in found.points][:2] == [("stock", 1), ("stock", 2)]
    assert found.gain("fused", (1, 8192)) == found.points[0].step_us / found.by_place["fused"][1, 8192].step_us
    assert {one.path for one in found.cliffs} <= {"stock", "fused", "megakernel"}


def test_published_gains_are_of_the_layout() -> None:
    found = published_gains(Options(machine="gb200"))
    assert {one.concurrency for one in found} >= {1, 2, 4, 8, 16}
    assert all(1.0 < one.gain < 3.0 for one in found)
    assert published_gains(Options(tp=32)) == ()
