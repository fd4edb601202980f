"""Published results: tables that load, say what predicts them, and are refused with file and line when wrong."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from browser import open_in_browser
from published_records import scenario, step, write

from k3sim.calibrate import evidence
from k3sim.calibrate.compare import claims, ladders, sensitivity, validate
from k3sim.calibrate.compare.validation_page import page
from k3sim.calibrate.evidence import scenarios
from k3sim.cli import main
from k3sim.errors import UserError
from k3sim.model.layout import Workload
from k3sim.model.paths import find_path
from k3sim.sim.options import has_option, read_command
from k3sim.sim.predict import predict
from k3sim.sim.question import question_of

ROOT = Path(__file__).parents[3]
RECORDS = evidence.load_evidence()


# -- the tables of the project ----------------------------------------------------------------------------------------


def test_every_record_says_what_predicts_it() -> None:
    assert len(RECORDS) > 80
    for one in RECORDS:
        if one.kind == "kernel":
            assert one.command == f"k3sim validate {one.id}"
        else:
            assert question_of(one.command).machine.name == one.hardware
            if one.layout.startswith("TP"):
                layout = question_of(one.command).layout
                assert one.layout.startswith(f"TP{layout.tp}") and layout.num_gpus == one.num_gpus, one.id


def test_commands_are_written_as_they_are_read() -> None:
    for command in {one.command for one in RECORDS if one.kind == "step"}:
        options = read_command(command)
        assert read_command(options.command()) == options


def test_no_prediction_reads_the_evidence() -> None:
    for folder in ("model", "sim", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "kinds.py":  # names the kinds of file that there are
                continue
            assert "evidence" not in path.read_text(encoding="utf-8"), path


# -- validate ---------------------------------------------------------------------------------------------------------


def test_rates_and_times_are_one_step(tmp_path: Path) -> None:
    command = "k3sim timeline --tp 8 --path stock --concurrency 4"
    table = [
        step(id=f"r{number}", unit=unit, value=value, command=command)
        for number, (unit, value) in enumerate((("ms", 10.0), ("us", 10_000), ("tok/s/user", 100), ("tok/s", 400)))
    ]
    records = evidence.load_evidence([write(tmp_path / "mine.json", *table)])
    ms, us, user, everyone = validate.validate(records=records, num_draws=2).rows
    step_us = predict(question_of(command)).step_us
    assert ms.predicted == pytest.approx(step_us / 1e3)
    assert us.predicted == pytest.approx(step_us)
    assert user.predicted == pytest.approx(1e6 / step_us)
    assert everyone.predicted == pytest.approx(4e6 / step_us)
    for row in (ms, us, user, everyone):
        low, high = row.interval
        assert low <= row.predicted <= high and low < high
    assert ms.error == pytest.approx(1 / (1 + user.error) - 1)


def test_the_same_seed_gives_the_same_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        main_ok(["validate", "gb300-vllm", "gb200-q-b-tp16", "--draws", "3", "--json"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    rows = json.loads(texts[0])["cases"]
    assert [row["id"] for row in rows] == ["gb200-q-b-tp16", "gb300-vllm-53525-c1"]
    for row in rows:
        assert list(row)[:7] == ["id", "kind", "label", "measured", "predicted", "low", "high"]
        assert row["inside_interval"] == (row["low"] <= row["measured"] <= row["high"])


def main_ok(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate", "nothing-like-it"], "no evidence begins with 'nothing-like-it'; accepted"),
        (["validate", "--draws", "1"], "draws is 1; accepted: 2 to 1000"),
        (["validate", "--html", "page.txt"], "accepted: a path that ends in .html"),
        (["validate", "--html", "/no/such/folder/a.html"], "does not exist"),
        (["validate", "--own", "gb200"], "give it without ids"),
        (["validate", "--evidence", "/no/such.json"], "/no/such.json: cannot be read (No such file"),
        (["claims", "nonsense"], "unknown claim 'nonsense'; accepted: ascend"),
        (["claims", "/no/such.json"], "/no/such.json: cannot be read (No such file"),
        (["sensitivity", "nonsense"], "no claim 'nonsense'; accepted: ascend"),
        (["sensitivity", "ascend"], "has no figure that is judged: needs an Ascend profile"),
    ],
)
def test_mistakes_are_one_line_with_exit_status_2(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_rows_that_are_not_judged_are_not_counted() -> None:
    rows = validate.validate(["gb200-sglang-dev-c1", "gb200-k3opt-stock-c1"], num_draws=2).rows
    assert len(rows) == 3 and validate.summary(rows)["step"]["rows"] == 2  # c1 and c16 of the stock path
    assert max(abs(row.error) for row in rows) > 0.5 > validate.summary(rows)["step"]["worst_error"]


# -- ladders ----------------------------------------------------------------------------------------------------------


def test_all_parts_are_fused_and_none_stock() -> None:
    for command in ("k3sim timeline --machine gb200", "k3sim timeline --tp 8 --dcp 8 --concurrency 12"):
        question = question_of(command)
        for parts, name in ((ladders.PARTS, "fused"), ((), "stock")):
            step_us = predict(replace(question, path=find_path(name))).step_us
            assert ladders.step_ms(command, parts) == pytest.approx(step_us / 1e3)


def test_each_part_changes_the_step() -> None:
    command = "k3sim timeline --machine gb200 --context 512"
    stock = ladders.step_ms(command, ())
    for part in ladders.PARTS:
        assert ladders.step_ms(command, (part,)) != stock, part


def test_public_ladders_have_the_steps_that_were_published() -> None:
    loaded = {one.id: one for one in evidence.load_ladders()}
    assert len(loaded["gb200-k3opt-c1"].steps) == 18
    assert len(loaded["gb300-sglang-day0-c1"].steps) == 16
    assert len(loaded["gb300-kern-16-layers"].steps) - 1 == 18
    first = validate.validate(["gb200-k3opt-c1"], num_draws=2).ladders[0][1]
    judged = [one for one in first if one.predicted_saving_ms is not None and one.verdict not in ("start", "noise")]
    assert len(judged) >= 5
    # Savings that count together are not counted twice, and all of them make the whole ladder.
    total = sum(one.published_saving_ms for one in first if one.predicted_saving_ms is not None)
    alone = sum(one.published_saving_ms for one in first if one.verdict == "no switch")
    assert total + alone == pytest.approx(7.86 - 5.168)


@pytest.mark.parametrize(
    ("predicted", "published", "verdict"),
    [(0.5, 0.5, "direction and size"), (0.24, 0.5, "direction"), (1.1, 0.5, "direction"), (-0.5, 0.5, "wrong"),
     (0.0, 0.5, "wrong"), (-0.3, -0.5, "direction and size"), (0.1, 0.15, "noise"), (-0.1, -0.15, "noise")],
)  # fmt: skip
def test_a_step_is_judged_on_direction_and_size(predicted: float, published: float, verdict: str) -> None:
    assert ladders.verdict_of(predicted, published, 0.16) == verdict


@pytest.mark.parametrize("published", [0.001, 0.05, 0.159, -0.1])
@pytest.mark.parametrize("ratio", [-3.0, -1.0, 0.0, 0.1, 0.49, 2.01, 5.0, 100.0])
def test_disagreement_is_never_noise(published: float, ratio: float) -> None:
    verdict = ladders.verdict_of(ratio * published, published, 0.16)
    assert verdict == ("wrong" if ratio <= 0 else "direction")


def test_noise_is_what_the_source_says() -> None:
    loaded = {one.id: one for one in evidence.load_ladders()}
    assert {name: one.noise for name, one in loaded.items() if one.noise} == {
        "gb200-k3opt-c1": 0.02, "gb200-k3opt-c8": 0.02,
    }  # fmt: skip
    ladder = loaded["gb200-k3opt-c8"]
    assert "restarts" in ladder.noise_source
    sets = ladders.part_sets(ladder)
    # The steps that are predicted save nothing but the third, TAILATTN, which saves 0.47 ms where 0.188 were published.
    tail = next(index for index, step in enumerate(ladder.steps) if step.title.startswith("TAILATTN"))
    predicted = {on: 12.0 - (0.47 if index >= tail else 0.0) for index, on in enumerate(sets)}
    judged = ladders.judge(ladder, predicted)
    assert judged[tail].ratio == pytest.approx(0.47 / 0.188)
    assert judged[tail].noise_ms == pytest.approx(0.02 * 11.441) and judged[tail].noise_ms > 0.188
    assert judged[tail].verdict == "direction"
    close = ladders.judge(ladder, {on: 12.0 - (0.2 if index >= tail else 0.0) for index, on in enumerate(sets)})
    assert close[tail].verdict == "noise"
    assert judged[0].ratio is None
    silent = ladders.judge(replace(ladder, noise=0.0, noise_source=""), predicted)
    assert {one.verdict for one in silent}.isdisjoint({"noise"}) and silent[tail].noise_ms == 0


# -- claims -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_claim_has_a_verdict_or_need() -> None:
    loaded = [scenarios.load_scenario(path) for path in scenarios.shipped_scenarios()]
    assert len(loaded) == 9
    for one in claims.judge_claims(loaded, num_draws=2):
        for figure in one.figures:
            words = ("inside", "outside", "cannot be judged: ", "needs ")
            assert figure.verdict.startswith(words)
            assert (figure.answer is None) == figure.verdict.startswith("needs ")


def test_a_claim_is_inside_its_interval(tmp_path: Path) -> None:
    (free,) = claims.judge_claims([scenarios.load_scenario(scenario(tmp_path))], num_draws=6)
    answer = free.figures[0].answer
    assert answer is not None and answer.low < answer.predicted <= answer.high
    for value, about, verdict in (
        (answer.low, None, "inside"),
        (answer.high, None, "inside"),
        (answer.high * 1.01, None, "outside"),
        (answer.high * 1.01, 0.02, "inside"),
        (answer.low * 0.97, 0.02, "outside"),
    ):
        path = scenario(tmp_path, value=value, about=about)
        (one,) = claims.judge_claims([scenarios.load_scenario(path)], num_draws=6)
        assert one.verdict == verdict


def test_time_outside_decode_dilutes_a_gain(tmp_path: Path) -> None:
    (plain,) = claims.judge_claims([scenarios.load_scenario(scenario(tmp_path))], num_draws=2)
    mixed = scenario(tmp_path, outside_ms=500, output_tokens=100)
    (diluted,) = claims.judge_claims([scenarios.load_scenario(mixed)], num_draws=2)
    assert plain.figures[0].answer is not None and diluted.figures[0].answer is not None
    after, before = (
        predict(question_of(command)).step_us
        for command in ("k3sim timeline", "k3sim timeline --path stock")
    )
    assert plain.figures[0].answer.predicted == pytest.approx(before / after)
    assert diluted.figures[0].answer.predicted == pytest.approx((5e5 + 100 * before) / (5e5 + 100 * after))


def test_a_need_is_checked_and_not_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "k3sim timeline --machine tpu-v7"
    path = scenario(tmp_path, command=command, against=None, unit="ms", value=4.0, needs=["a TPU v7 profile"])
    (one,) = claims.judge_claims([scenarios.load_scenario(path)], num_draws=2)
    assert one.verdict == "needs a TPU v7 profile" and one.figures[0].answer is None
    # The same file with a machine that exists, and a check that succeeds: the row is real.
    path.write_text(path.read_text().replace("tpu-v7", "b300"), encoding="utf-8")
    monkeypatch.setattr(scenarios, "CAPABILITIES", {"a TPU v7 profile": lambda: True})
    (one,) = claims.judge_claims([scenarios.load_scenario(path)], num_draws=2)
    assert one.verdict in ("inside", "outside") and one.figures[0].answer is not None


def test_speculation_counts_once_the_workload_has_it() -> None:
    assert has_option("drafted-tokens") == ("drafted_tokens" in Workload.__dataclass_fields__)
    assert scenarios.CAPABILITIES["speculation"]() == has_option("drafted-tokens")
    options = read_command("k3sim timeline --tp 8 --drafted-tokens 7 --accepted-tokens 6", not_yet=True)
    assert options.tp == 8
    with pytest.raises(UserError, match="--drafted-tokens is 'many'; accepted: a whole number"):
        read_command("k3sim timeline --drafted-tokens many", not_yet=True)


# -- sensitivity ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_found_factor_moves_the_verdict() -> None:
    (found,) = sensitivity.sensitivity("coding-agents", num_values=4, num_draws=3)
    assert [one.swing for one in found.values] == sorted((one.swing for one in found.values), reverse=True)
    figure = scenarios.load_scenario(scenarios.SCENARIOS / "coding-agents.json").figures[0]
    moved = [one for one in found.values if one.factor_to_move is not None]
    assert moved
    for one in moved:
        assert one.factor_to_move is not None
        sides = (figure.sides[0].command, figure.sides[0].against)
        steps = [sensitivity._step_us(command, one.field, one.factor_to_move) for command in sides]
        # Inside before: the interval around the moved prediction no longer holds the claim, or only just.
        ratio = steps[1] / steps[0] / found.predicted
        assert not found.low * ratio * 1.002 < found.claimed < found.high * ratio * 0.998


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_holds_every_row_and_verdict() -> None:
    found = validate.validate(["gb300-vllm", "gb300-kern-16"], num_draws=2)
    loaded = [scenarios.load_scenario(scenarios.SCENARIOS / "ascend.json")]
    text = page(found, claims.judge_claims(loaded, num_draws=2))
    assert "KDA chain with early PDL" in text and "needs an Ascend profile" in text
    data = json.loads(text.split('id="figures">')[1].split("</script>")[0])
    assert set(data) == {"parity", "errors", "ladder0"}
    assert "http://" not in text.split("</script>")[-1]
    judged = [row for row in found.rows if row.judged]
    shown = [x for trace in data["errors"]["data"] for x in trace["x"]]
    assert sorted(shown) == pytest.approx(sorted(100 * row.error for row in judged))
    for row in found.rows:
        if row.source.startswith("https://"):
            assert f"href='{row.source.split(' ')[0].rstrip(',')}'" in text, row.source


SORT_AND_FILTER = """
<script>
addEventListener("load", () => setTimeout(() => {
  const table = document.getElementById("results"), column = name =>
    [...table.tHead.rows[0].cells].findIndex(one => one.textContent.trim() === name);
  const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden);
  const cells = name => rows().map(row => row.cells[column(name)].textContent);
  const click = name => table.tHead.rows[0].cells[column(name)].querySelector("button").click();
  const found = {all: cells("error").length};
  click("error");
  found.ascending = cells("error");
  click("error");
  found.descending = cells("error");
  const filter = document.querySelector("input[data-filters=results]");
  filter.value = "2EC6F0D71E step";
  filter.dispatchEvent(new Event("input"));
  found.filtered = cells("what");
  found.count = filter.parentElement.querySelector("output").textContent;
  document.body.dataset.found = JSON.stringify(found);
}, 1500));
</script>
"""


@pytest.mark.slow
def test_the_page_sorts_and_filters(tmp_path: Path) -> None:
    found = validate.validate(["gb300-vllm", "gb300-kern"], num_draws=2)
    path = tmp_path / "page.html"
    path.write_text(page(found, []).replace("</body>", f"{SORT_AND_FILTER}</body>"))
    document, console = open_in_browser(path, tmp_path)
    assert not console and 'data-errors="0"' in document
    match = re.search(r'data-found="([^"]*)"', document)
    assert match is not None
    seen = json.loads(unescape(match[1]))
    sizes = [abs(float(one.removesuffix(" %"))) for one in seen["ascending"]]
    assert seen["all"] == len(sizes) == len(found.rows)
    assert sizes == sorted(sizes) and seen["descending"] == seen["ascending"][::-1]
    assert len(seen["filtered"]) == 1 and "KDA chain with early PDL" in seen["filtered"][0]
    assert seen["count"] == f"1 of {len(sizes)}"


def test_every_case_is_told_when_predicted() -> None:
    told: list[str] = []
    found = validate.validate(("gb300-",), num_draws=2, jobs=1, on_case=lambda one: told.append(one.id))
    assert sorted(told) == sorted(one.id for one in found.rows) and told
