"""A made-up report to go with ``synthetic_timeline``, in the shape that ``html_report`` describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from synthetic_timeline import synthetic_timeline

from k3sim.sim.export.colours import word_of_phase
from k3sim.sim.timeline.timeline import PS_PER_US, Timeline


def synthetic_timelines(num_layers: int = 8) -> dict[str, Timeline]:
    """Three paths, each slower in everything but reading than the next."""
    slowness = {"stock": 1.6, "fused": 0.7, "megakernel": 0.3}
    return {
        label: synthetic_timeline(num_layers=num_layers, slowness=factor)
        for label, factor in slowness.items()
    }


def synthetic_report(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Made-up results in the shape of real ones; the parts add up to each step."""
    paths = {}
    stock_us = timelines["stock"].step_us
    for label, timeline in timelines.items():
        parts: dict[str, float] = {}
        for kernel in timeline.of_rank(0):
            for span in kernel.spans:
                us = (span.end_ps - span.start_ps) / PS_PER_US
                word = word_of_phase(span.phase)
                parts[word] = parts.get(word, 0.0) + us
        scale = timeline.step_us / sum(parts.values())
        floor_us = sum(k.hbm_bytes for k in timeline.of_rank(0)) / 7e6
        work = [part for part in ("weights", "KV and state", "L2", "compute") if part in parts]
        order = [*work, *(part for part in parts if part not in work)]
        paths[label] = {
            "step_us": timeline.step_us,
            "step_us_interval": [0.93 * timeline.step_us, 1.06 * timeline.step_us],
            "tokens_per_s_per_user": 1e6 / timeline.step_us,
            "speedup": stock_us / timeline.step_us,
            "floor_us": floor_us,
            "floor_fraction": floor_us / timeline.step_us,
            "hbm_busy_fraction": 0.61,
            "waits_us": {part: parts[part] * scale for part in order},
        }
    fused_us, megakernel_us = (timelines[label].step_us for label in ("fused", "megakernel"))
    switches = {
        "low-batch-kernels kernels": 0.45,
        "fused hand-over": 0.3,
        "shared routing": 0.15,
        "early preparation": 0.1,
    }
    waterfall = [{"label": "stock", "kind": "total", "step_us": stock_us, "delta_us": 0.0}]
    step_us = stock_us
    for switch, share in switches.items():
        delta_us = share * (fused_us - stock_us)
        step_us += delta_us
        waterfall.append(
            {
                "label": switch,
                "kind": "relative",
                "step_us": step_us,
                "delta_us": delta_us,
                "waits_delta_us": {
                    "launch": 0.6 * delta_us,
                    "L2 round trips": 0.5 * delta_us,
                    "slower peer": -0.1 * delta_us,
                },
            }
        )
    waterfall += [
        {"label": "fused", "kind": "total", "step_us": fused_us, "delta_us": 0.0},
        {
            "label": "one program a step",
            "kind": "relative",
            "step_us": megakernel_us,
            "delta_us": megakernel_us - fused_us,
            "waits_delta_us": {"launch": megakernel_us - fused_us},
        },
        {"label": "megakernel", "kind": "total", "step_us": megakernel_us, "delta_us": 0.0},
    ]
    return {
        "model": "Kimi K3",
        "machine": "gb300",
        "layout": "tp16ep1dcp1",
        "concurrency": 1,
        "context": 8192,
        "main_path": "fused",
        "paths": paths,
        "waterfall": waterfall,
        "leave_one_out": [
            {"without": switch, "step_us": fused_us + cost_us, "cost_us": cost_us}
            for switch, cost_us in zip(switches, (812.0, 655.0, -21.0, 240.0), strict=True)
        ],
        "example_layers": {"kda": 5, "mla": 7},
        "critical_path": [
            {"stage": "moe.latent_down", "part": "weights", "us": 611.2},
            {"stage": "kda.in_proj", "part": "weights", "us": 602.0},
            {"stage": "kda.o_proj", "part": "NVLink flight", "us": 188.4},
        ],
        "command": "k3sim timeline --model kimi-k3 --machine gb300 --layout tp16ep1dcp1 --concurrency 1",
        "versions": {"k3sim": "0.1.0", "python": "3.11.7", "machine profile": "gb300 of 2026-11"},
        "machine_values": [
            {
                "field": "hbm_bandwidth_bytes_per_s",
                "value": 7.1e12,
                "unit": "B/s",
                "kind": "measured",
                "source": "https://example.org/stream-on-gb300, read of 1 GiB",
                "us": 0.3 * fused_us,
            },
            {
                "field": "launch_latency_s",
                "value": 0.87e-6,
                "unit": "s",
                "kind": "fitted",
                "source": "k3opt kernel table",
                "us": 0.1 * fused_us,
            },
        ],
        "not_modelled": ["prefill", "clock changes under a power cap", "requests that end within the step"],
        "glossary": {"weights": "weights at HBM speed", "NVLink flight": "data on its way to peers"},
    }
