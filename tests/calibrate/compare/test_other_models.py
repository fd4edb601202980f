"""Published decode of other models than Kimi K3, predicted with the machine values of Kimi K3's steps."""

from __future__ import annotations

import statistics

import pytest

from k3sim.calibrate.evidence import load_evidence
from k3sim.sim.predict import predict
from k3sim.sim.question import question_of

RECORDS = [one for one in load_evidence() if one.kind == "step" and "--model" in one.command]


def error(command: str, value: float, unit: str) -> float:
    """Predicted over published time of a token, less one."""
    published_us = 1e3 * value if unit == "ms" else 1e6 / value
    return predict(question_of(command)).step_us / published_us - 1


@pytest.mark.parametrize(("model", "median", "worst"), [("deepseek-r1", 0.15, 0.30), ("kimi-k2.5", 0.15, 0.30)])
def test_few_users_are_predicted_within_limits(model: str, median: float, worst: float) -> None:
    judged = [one for one in RECORDS if one.judged and f"--model {model} " in one.command]
    assert len(judged) >= 6
    errors = [abs(error(one.command, one.value, one.unit)) for one in judged]
    assert statistics.median(errors) <= median and max(errors) <= worst


def test_every_gpu_and_precision_of_r1_is_there() -> None:
    found = {(one.hardware, "nvfp4" in one.command) for one in RECORDS if "deepseek-r1" in one.command and one.judged}
    assert found == {("h200", False), ("b200", False), ("b200", True), ("b300", False), ("b300", True)}


def test_nvfp4_is_faster_than_fp8() -> None:
    fp8, nvfp4 = (
        predict(question_of(f"k3sim timeline --model deepseek-r1 --machine b300 --tp 8 --path stock{weights}")).step_us
        for weights in ("", " --weights experts=nvfp4 --weights shared=nvfp4 --weights dense=nvfp4")
    )
    assert 0.75 < nvfp4 / fp8 < 0.97
