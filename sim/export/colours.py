"""Colours of the charts: one word has one colour in all of them.

They come in five families: blue for work, gold for launching, green for memory below its speed, orange for latency on
the chip, purple for the network; grey is the host. A search chose them to keep every two apart for readers with and
without a colour-vision deficiency.
"""

from __future__ import annotations

INK, MUTED, RULE, ACCENT = "#1c232b", "#5b6672", "#dfe4ea", "#1f5fa8"
TOTAL, SLOWER, FASTER = "#3b4450", "#b0605a", "#6f9fb3"  # muted: no part of the time has these

PART_COLOURS = {
    "weights": "#0253a2",
    "kv and state": "#6595ff",
    "l2": "#57c2fc",
    "compute": "#011d33",
    "release": "#f8f4a3",
    "launch": "#fdcf03",
    "sm slots": "#f0b35c",
    "ramp": "#acf4cb",
    "bytes in flight": "#4a9083",
    "starved": "#19854a",
    "dependency": "#fb9c87",
    "drain": "#815602",
    "latency": "#e76e03",
    "reduce": "#741717",
    "send": "#fed6ff",
    "peers": "#d46dc1",
    "nvlink flight": "#d46dc1",  # the waits split waiting for peers in two
    "slower peer": "#380161",
    "poll": "#6e4477",
    "host": "#525252",
    "run": "#b1b7bd",
    "exchange": "#963cf0",
    # Parts of the waits that gather several phases, or name one by what it means.
    "ramp and drain": "#acf4cb",
    "dependency latency": "#e76e03",
    "reduction and barrier": "#741717",
    "side stream": "#19854a",
    "kernel": "#b1b7bd",
}
# Groups of stages are places, not parts of time: paler colours of their own (Paul Tol's light scheme).
GROUP_COLOURS = {
    "host": "#bbbbbb",
    "embed": "#aaaa00",
    "attn_res": "#eedd88",
    "kda": "#77aadd",
    "mla": "#ee8866",
    "dense": "#bbcc33",
    "moe": "#44bb99",
    "head": "#ffaabb",
    "prefetch": "#99ddff",
}
OTHER_COLOURS = ("#6c8ebf", "#d79b00", "#9673a6", "#82b366", "#b85450")


def part_colour(part: str) -> str:
    """The colour of a phase, a part of the waits or a group of stages; by its letters for an unknown word."""
    word = part.lower()
    return (
        PART_COLOURS.get(word)
        or GROUP_COLOURS.get(word)
        or OTHER_COLOURS[sum(word.encode()) % len(OTHER_COLOURS)]
    )


def stage_group(stage: str) -> str:
    """The part of a stage's name before the dot, such as ``kda`` of ``kda.in_proj``."""
    return stage.partition(".")[0]


def ink_on(background: str) -> str:
    """Black or white, whichever reads better on the background (relative luminance, WCAG 2)."""
    channels = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"
