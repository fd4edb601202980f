"""What the page's figures are drawn from: the card of a path, and the waterfall of switches."""

from __future__ import annotations

from typing import Any

from k3sim.sim.predict import Prediction, difference_us
from k3sim.sim.timeline.critical_path import Part
from k3sim.sim.timeline.timeline import PS_PER_US


def card(prediction: Prediction, stock: Prediction) -> dict[str, Any]:
    """Figures of one path."""
    return {
        "step_us": prediction.step_us,
        "tokens_per_s_per_user": prediction.tokens_per_second_per_user,
        "tokens_per_s_per_gpu": prediction.tokens_per_second_per_gpu,
        "speedup": stock.step_us / prediction.step_us,
        "floor_us": prediction.floor_us,
        "floor_fraction": prediction.floor_us / prediction.step_us,
        "hbm_busy_fraction": prediction.hbm_busy_fraction,
        "waits_us": {part.word: duration_ps / PS_PER_US for part, duration_ps in prediction.waits_ps.items()},
    }


def waterfall(ladder: tuple[tuple[str, Prediction], ...], megakernel: Prediction | None) -> list[dict[str, Any]]:
    """From the stock path switch by switch to the fused one, and on to the megakernel where there is one."""
    first_label, before = ladder[0]
    steps = [bar(first_label, "total", before, None)]
    for label, prediction in ladder[1:]:
        steps.append(bar(label, "relative", prediction, before))
        before = prediction
    if megakernel is None:
        return steps
    steps.append(bar("fused", "total", before, None))
    steps.append(bar("+ megakernel", "relative", megakernel, before))
    steps.append(bar("megakernel", "total", megakernel, None))
    return steps


def bar(label: str, kind: str, prediction: Prediction, before: Prediction | None) -> dict[str, Any]:
    """One bar of a waterfall, with what it changes part by part."""
    words = {part.value: part.word for part in Part}
    deltas = difference_us(before, prediction) if before else {}
    return {
        "label": label,
        "kind": kind,
        "step_us": prediction.step_us,
        "delta_us": prediction.step_us - before.step_us if before else 0.0,
        "waits_delta_us": {words[part]: value for part, value in deltas.items()},
    }
