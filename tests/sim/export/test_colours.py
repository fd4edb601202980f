"""Colours of the charts: told apart by every reader, and text on them legible."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest

from k3sim.sim.export.colours import (
    COLOURS,
    MEANINGS,
    UNKNOWN_COLOUR,
    WAITING,
    colour_of,
    ink_on,
    style_sheet,
    word_class,
    word_of_phase,
)
from k3sim.sim.export.html import asset
from k3sim.sim.timeline.critical_path import Part
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


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    rgb = linear_rgb(colour)
    return cielab([sum(m * c for m, c in zip(row, rgb, strict=True)) for row in VISIONS[vision]])


def contrast(one: str, other: str) -> float:
    """WCAG 2: from 1 to 21; level AA asks for 4.5 of text."""
    dark, light = sorted(luminance(linear_rgb(colour)) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def themes() -> dict[str, dict[str, str]]:
    """The colours by name of the page: light, and dark with what it changes."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for block in re.findall(r":root[^{]*\{(.*?)\}", asset("page.css"), re.DOTALL)
    )
    return {"light": light, "dark": light | dark}


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_words_look_alike(vision: str, theme: str) -> None:
    shown = COLOURS | {WAITING: themes()[theme]["waiting"]}

    points = {word: seen(colour, vision) for word, colour in shown.items()}

    distance, *pair = min((math.dist(points[a], points[b]), a, b) for a, b in combinations(points, 2))
    assert distance > 18, pair  # CIELAB; 2 is just noticeable side by side


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_of_the_page_is_legible(theme: str) -> None:
    named = themes()[theme]

    pairs = [(ink, "paper") for ink in ("ink", "muted", "accent")]
    pairs += [("kernel-ink", bar) for bar in ("kernel", "kernel-odd", "hit")]
    pairs += [("waiting-ink", "waiting"), ("ink", "code"), ("muted", "code")]
    faint = {pair: contrast(named[pair[0]], named[pair[1]]) for pair in pairs}
    assert {pair: ratio for pair, ratio in faint.items() if ratio < 4.5} == {}


def test_text_on_every_colour_is_legible() -> None:
    assert min(contrast(colour, ink_on(colour)) for colour in (*COLOURS.values(), UNKNOWN_COLOUR)) >= 4.5


def test_every_phase_and_part_has_a_colour() -> None:
    words = {part.word for part in Part}
    words |= {word_of_phase(phase) for phase in Phase}

    assert words == set(COLOURS) == set(MEANINGS)


def test_an_unknown_word_is_grey() -> None:
    assert colour_of("something new") == UNKNOWN_COLOUR
    assert word_class("something new") == "unknown"


def test_a_word_has_one_colour() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS)
    sheet = style_sheet()
    for word, colour in COLOURS.items():
        shown = "var(--waiting)" if word == WAITING else colour
        assert f".{word_class(word)} {{ fill: {shown}; background: {shown};" in sheet
