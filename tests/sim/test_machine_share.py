"""Which machine values a step hangs on, against what changing them does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from k3sim.sim.machine_share import described_shares, machine_shares
from k3sim.sim.options import Options
from k3sim.sim.predict import Prediction, predict
from k3sim.sim.question import ask


@pytest.fixture(scope="module")
def fused() -> Prediction:
    return predict(ask(Options()))


@pytest.mark.parametrize("asked", [{}, {"path": "stock"}, {"path": "megakernel"}, {"kernels": "own"}])
def test_shares_add_up_to_the_step(asked: dict[str, str]) -> None:
    prediction = predict(ask(Options(**asked)))

    shares = machine_shares(prediction)

    assert sum(shares.values()) == pytest.approx(prediction.step_us, rel=1e-12)
    assert "" not in shares, "every stretch of a predicted path has a price"
    assert list(shares.values()) == sorted(shares.values(), reverse=True)


@pytest.mark.parametrize(
    "name",
    ["tensor_core_setup_s", "nvlink_visibility_s", "grid_completion_s", "cluster_sync_s", "nvlink_one_way_s",
     "hbm_latency_s", "block_reduction_s"],
)  # fmt: skip
def test_a_latency_share_is_what_less_saves(fused: Prediction, name: str) -> None:
    question, less = fused.question, 0.01  # further on, other kernels come to share HBM at one time
    machine = replace(question.machine, **{name: (1 - less) * getattr(question.machine, name)})

    saved_us = (fused.step_us - predict(replace(question, machine=machine)).step_us) / less

    assert machine_shares(fused)[name] == pytest.approx(saved_us, rel=0.25)


def test_rows_carry_unit_and_source(fused: Prediction) -> None:
    first = described_shares(fused)[0]

    assert set(first) == {"field", "value", "unit", "kind", "low", "high", "source", "us"}
    assert first["us"] == next(iter(machine_shares(fused).values()))
