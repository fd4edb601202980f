"""Check and time the megakernel on the current GPU, beside the fused path on the same layers and weights.

    python tools/megakernel.py --out megakernel.json
    python tools/megakernel.py --only-check --layers 1              # under compute-sanitizer

The layers are K3's KDA mixer and dense FFN at TP16, one row, one rank with a loopback fabric; every layer has weights
of its own. Results are written after each case. The megakernel's time is that of a captured launch, the fused path's
that of a captured step, which holds embedding, head, snapshots' parts and bookkeeping too: compare what a layer adds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from k3sim.kernels.megakernel import reference
from k3sim.kernels.megakernel.launch import Megakernel
from k3sim.kernels.megakernel.operands import random_operands
from k3sim.kernels.megakernel.schedule import schedule, streamed_bytes
from k3sim.kernels.megakernel.whole_layers import run_layers
from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import find_path
from k3sim.model.program import Program, build_program

RANKS = 16
LAYOUT, WORKLOAD = Layout(tp=RANKS), Workload(concurrency=1, context=8192)
REPLAYS = 300


def dense_architecture(num_layers: int) -> Architecture:
    k3 = load_architecture()
    moe = replace(k3.moe, first_moe_layer=num_layers)
    return replace(k3, num_layers=num_layers, kda_layers=tuple(range(num_layers)), mla_layers=(), moe=moe)


def program_of(architecture: Architecture) -> Program:
    return build_program(architecture, LAYOUT, WORKLOAD, find_path("fused", kernel_set="own"))


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    torch.cuda.synchronize()
    return graph


def replay_us(replay: Callable[[], object], num: int = REPLAYS) -> list[float]:
    """Microseconds of each replay between two events, after a warm-up."""
    for _ in range(20):
        replay()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(num)]
    for start, end in pairs:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def built(num_layers: int, **how: Any) -> tuple[Megakernel, reference.Memory]:
    architecture = dense_architecture(num_layers)
    program = program_of(architecture)
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    listed = schedule(program, architecture, num_sms=num_sms)
    memory = random_operands(program, architecture, tp=RANKS, device="cuda")
    reference.fill(memory, listed, hidden=architecture.hidden_size, ranks=RANKS)
    return Megakernel(listed, memory, hidden=architecture.hidden_size, ranks=RANKS, **how), memory


def changing(memory: reference.Memory) -> dict[str, torch.Tensor]:
    """What a launch changes for the next."""
    kinds = ("residual", "packets 0", "kda.state", "kda.past")
    return {name: one for name, one in memory.items() if name.split("/")[-1] in kinds}


def check(num_layers: int, replays: int) -> dict[str, Any]:
    """One launch against layers written out, then chains of replays against each other."""
    run, memory = built(num_layers)
    start = {name: one.clone() for name, one in changing(memory).items()}
    expected = dict(memory)
    expected.update({name: one.clone() for name, one in start.items()})
    run_layers(expected, num_layers, RANKS)
    run()
    torch.cuda.synchronize()
    run.check()
    errors = {
        kind: max(
            float((memory[name].float() - expected[name].float()).norm() / expected[name].float().norm())
            for name in start
            if name.endswith(kind)
        )
        for kind in ("residual", "kda.state", "kda.past")
    }
    empty = all(bool(((memory[f"received {n}"] == 0) & memory[f"received {n}"].signbit()).all()) for n in range(3))
    ends = []
    for _ in range(2 if replays else 0):
        for name, one in start.items():
            memory[name].copy_(one)
        for _ in range(replays):
            run()
        torch.cuda.synchronize()
        run.check()
        ends.append({name: memory[name].clone() for name in start})
    equal = all(torch.equal(ends[0][name], ends[1][name]) for name in start) if ends else None
    return {"layers": num_layers, "errors": errors, "receive_buffers_empty": empty, "replays": replays,
            "bit_equal": equal}  # fmt: skip


def timed(num_layers: int, **how: Any) -> dict[str, Any]:
    run, _ = built(num_layers, **how)
    graph = captured(run)
    samples = replay_us(graph.replay)
    run.check()
    return {"layers": num_layers, "us": samples, "median_us": statistics.median(samples),
            "streamed_bytes": streamed_bytes(run.program), "launches": run.launches}  # fmt: skip


def fused(num_layers: int) -> dict[str, Any]:
    from k3sim.kernels.rank.call_table import KERNEL_CALLS
    from k3sim.kernels.rank.exchange import connect_kernels
    from k3sim.kernels.rank.state import build_rank, clear
    from k3sim.kernels.rank.step import Step
    from k3sim.kernels.rank.weights import random_weights

    architecture = dense_architecture(num_layers)
    program = program_of(architecture)
    weights = random_weights(program, architecture, LAYOUT)
    rank = build_rank(architecture, LAYOUT, WORKLOAD, program, weights, max_tokens=9000)
    connect_kernels([rank], loop_back=True)
    clear(rank, 8192)
    step = Step([rank], KERNEL_CALLS)
    step.capture()
    samples = replay_us(step.replay)
    return {"layers": num_layers, "us": samples, "median_us": statistics.median(samples)}


def stamped(num_layers: int) -> dict[str, Any]:
    """Medians over SMs of what instructions of a kind did, layer by layer, on one launch of a warm chain."""
    run, _ = built(num_layers, timestamps=True)
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    run.check()
    groups = defaultdict(list)
    for one in run.times():
        groups[one.instruction.layer, one.instruction.stage, one.instruction.opcode.name].append(one)
    rows = []
    for (layer, stage, opcode), ones in groups.items():
        row: dict[str, Any] = {"layer": layer, "stage": stage, "opcode": opcode, "sms": len(ones)}
        for name in ("began", "released", "ready", "sixteen", "ended"):
            times = sorted(time for one in ones if (time := getattr(one, f"{name}_ns")) is not None)
            if times:
                row[f"{name}_us"] = [round(time / 1e3, 2) for time in (times[0], times[len(times) // 2], times[-1])]
        rows.append(row)
    return {"layers": num_layers, "rows": sorted(rows, key=lambda row: (row["layer"], row["ended_us"][1]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("megakernel.json"))
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--windows", nargs="*", default=[], help="wide,narrow,narrow rows")
    parser.add_argument("--only-check", action="store_true")
    parser.add_argument("--replays", type=int, default=1000)
    options = parser.parse_args()
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d")}

    def case(name: str, run: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            results[name] = run()
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        shown = {key: one for key, one in results[name].items() if key not in ("us", "rows")}
        print(f"{name}: {shown} ({time.monotonic() - began:.1f} s)", flush=True)
        for row in results[name].get("rows", ()):
            if row["layer"] == 1:
                print(*row.items(), flush=True)

    if options.only_check:
        case("check", lambda: check(options.layers[0], 0))
        return
    for layers in (1, 3):
        case(f"check {layers}", lambda layers=layers: check(layers, options.replays))
    for layers in options.layers:
        case(f"megakernel {layers}", lambda layers=layers: timed(layers))
    for given in options.windows:
        how = dict(zip(("window", "narrow_window", "narrow_rows"), map(int, given.split(",")), strict=True))
        case(f"megakernel {options.layers[0]} {how}", lambda how=how: timed(options.layers[0], **how))
    case("stamped 3", lambda: stamped(3))
    for layers in options.layers:
        case(f"fused {layers}", lambda layers=layers: fused(layers))


if __name__ == "__main__":
    main()
