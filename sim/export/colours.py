"""Words and colours of the page: one word for one meaning, and one colour for one word, in tables, legends and charts.

The words are those of the waits (``Part``). A phase of a kernel is shown under the word of the part that it counts as;
one more word says that a kernel waits for another, whose own parts count. So a colour means the same in a timeline and
in the table above it. Kernels and layers are places, not parts of the time, and are drawn without a colour.

Blue is work, yellow launching, green memory below its speed, slate, olive and orange to red latency on the chip, purple
the network and grey what is outside the GPU or unknown. A search chose the colours to keep every two apart in CIELAB
for readers with usual vision, deuteranopia and protanopia (``tests/sim/export/test_colours.py`` measures it).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from k3sim.sim.timeline.critical_path import PART_OF_PHASE, Part
from k3sim.sim.timeline.timeline import Phase

#: Of a kernel that was launched early, or has no room on the SMs yet. The critical path is in another one meanwhile.
WAITING = "waits for a kernel"
_WAITING_MEANING = "launched before its input or its SMs are there: what counts is the kernel that it waits for"

COLOURS = {
    "weights": "#1d71f8",
    "KV and state": "#239ffc",
    "L2": "#80d1f4",
    "compute": "#394877",
    "launch": "#e1cc26",
    "ramp and drain": "#caecbb",
    "bytes in flight": "#006c4e",
    "instruction issue": "#3c5a66",
    "L2 round trips": "#e79542",
    "tensor-core set-up": "#626f23",
    "block reduction": "#ba8a6c",
    "selection rounds": "#d2ba78",
    "barrier": "#6d0a11",
    "NVLink flight": "#b669b7",
    "slower peer": "#540183",
    "exchange": "#9a42b8",
    "host": "#81858b",
    "kernel": "#b9b6af",
    WAITING: "#e4ecf2",
}
UNKNOWN_COLOUR = "#b9b6af"  # of a word that the table lacks
MEANINGS = {**{part.word: part.meaning for part in Part}, WAITING: _WAITING_MEANING}


@cache
def word_of_phase(phase: Phase) -> str:
    """The word under which a phase of a kernel is shown."""
    if phase in (Phase.DEPENDENCY, Phase.SM_SLOTS):
        return WAITING
    if phase is Phase.PEERS:
        return Part.SLOWER_PEER.word
    return PART_OF_PHASE[phase].word


def colour_of(word: str) -> str:
    """The colour of a word of the table, and one grey for all others."""
    return COLOURS.get(word, UNKNOWN_COLOUR)


def ink_on(background: str) -> str:
    """Black or white, whichever reads better on the background (relative luminance, WCAG 2)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


def in_order(words: Iterable[str]) -> list[str]:
    """The words, each once, in the order of the table: work before waits, and words that it lacks last."""
    place = {word: number for number, word in enumerate(COLOURS)}
    return sorted(dict.fromkeys(words), key=lambda word: place.get(word, len(place)))


def word_class(word: str) -> str:
    """The class of elements that show a word: ``w3`` of the fourth of the table, ``unknown`` of one that it lacks."""
    return f"w{list(COLOURS).index(word)}" if word in COLOURS else "unknown"


def style_sheet() -> str:
    """CSS of the words: the colour as fill and as background, and text that reads on it.

    The colour of ``WAITING`` is the page's, since a reader is not to look at it: near the paper, dark or light.
    """
    rules = []
    for number, (word, colour) in enumerate((*COLOURS.items(), ("", UNKNOWN_COLOUR))):
        shown, ink = ("var(--waiting)", "var(--waiting-ink)") if word == WAITING else (colour, ink_on(colour))
        name, text = (f"w{number}", f"t{number}") if word else ("unknown", "unknown-text")
        rules.append(
            f".{name} {{ fill: {shown}; background: {shown}; color: {ink}; }}\n"
            f".timeline .{text} {{ fill: {ink}; stroke: {shown}; }}\n"
        )
    return "".join(rules)
