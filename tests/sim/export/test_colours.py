"""Colours of the charts: told apart by every reader, and text on them legible."""

from __future__ import annotations

import math
from itertools import combinations

import pytest

from k3sim.sim.export.colours import GROUP_COLOURS, PART_COLOURS, part_colour
from k3sim.sim.export.figures import waits_figure
from k3sim.sim.timeline.timeline import Phase

# What a colour becomes for a reader without green or red cones, on linear RGB. Source: Machado, Oliveira and
# Fernandes, "A physiologically-based model for simulation of color vision deficiency", IEEE TVCG 15(6), 2009.
VISIONS = {
    "usual": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
}


def linear_rgb(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def luminance(rgb: list[float]) -> float:
    return 0.2126 * rgb[0] + 0.7152 * rgb[1] + 0.0722 * rgb[2]


def cielab(rgb: list[float]) -> tuple[float, float, float]:
    red, green, blue = (min(1.0, max(0.0, channel)) for channel in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, luminance([red, green, blue]), z)
    )
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_phases_look_alike(vision: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        rgb = linear_rgb(colour)
        return cielab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in VISIONS[vision]])

    phases = {phase.value: seen(PART_COLOURS[phase.value]) for phase in Phase}
    distance, *pair = min((math.dist(phases[a], phases[b]), a, b) for a, b in combinations(phases, 2))
    assert distance > 18, pair  # CIELAB; 2 is just noticeable side by side


def test_a_word_has_one_colour() -> None:
    assert part_colour("Weights") == PART_COLOURS["weights"]
    assert part_colour("something new") == part_colour("something new")
    assert set(PART_COLOURS.values()).isdisjoint(GROUP_COLOURS.values())


def test_text_on_a_bar_is_legible() -> None:
    for part in PART_COLOURS:
        (trace,) = waits_figure({"fused": {part: 1.0}})["data"]
        colours = (trace["marker"]["color"], trace["insidetextfont"]["color"])
        dark, light = sorted(luminance(linear_rgb(colour)) for colour in colours)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, part  # WCAG 2, level AA
