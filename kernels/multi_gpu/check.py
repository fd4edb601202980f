"""The hand-over kernels between GPUs: right, and the same bits on all of them at every replay.

    run_processes("k3sim.kernels.multi_gpu", ["--out", "checked.json"], 2, timeout_s=300)

Each process makes the calls of a hand-over (``hand_overs.py``) on its GPU. The first run is held against the fp32
reference and, bit by bit, against the other GPUs' results. Then one graph of all calls is replayed, and every result is
compared with the first run's on the device, so that replays follow one another closely and all GPUs are equal
throughout if each equals its first run:

* ``close``: calls back to back;
* ``skewed``: before each call each GPU waits a random time of its own;
* ``late``: one GPU after another comes 100 ms late, the others wait for it inside their kernels.

A mistake in the rotation of buffers shows as a difference, one in the protocol as a process that does not come back:
run it under a limit of time, as ``run_processes`` does. ``engine`` does the same with captured decode steps.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3sim.errors import UserError
from k3sim.kernels.multi_gpu.compared import LATE_US, SKEW_US, Compared
from k3sim.kernels.multi_gpu.delay import Delay
from k3sim.kernels.multi_gpu.group import Group
from k3sim.kernels.multi_gpu.hand_overs import BLOCK_BYTES, HAND_OVERS, Arena, HandOver
from k3sim.kernels.multi_gpu.symmetric import check_standing, local_block

if TYPE_CHECKING:
    import torch

NUM_REPLAYS = 10_000
LATE_REPLAYS = 5  # of each GPU being late
OPERATORS = (*HAND_OVERS, "engine")
RANK_COUNTS = (1, 2, 4, 8, 16)


def check_options(operators: Sequence[str], ranks: int | None, num_gpus: int, num_replays: int) -> int:
    """Number of ranks. Raises UserError for what cannot be honoured; needs no GPU."""
    for one in operators:
        if one not in OPERATORS:
            raise UserError(f"unknown operator {one!r}; accepted between GPUs: {', '.join(OPERATORS)}")
    num_ranks = num_gpus if ranks is None else ranks
    if num_ranks not in RANK_COUNTS:
        raise UserError(f"ranks: got {num_ranks}, accepted: {', '.join(map(str, RANK_COUNTS))}")
    check_standing(num_ranks, num_gpus, "ranks")
    if num_replays < 1:
        raise UserError(f"replays: got {num_replays}, accepted: 1 or more")
    return num_ranks


def check_hand_overs(
    operators: Sequence[str] = (),
    *,
    ranks: int | None = None,
    num_replays: int = NUM_REPLAYS,
    seed: int = 0,
    on_case: Callable[[Compared], None] = lambda _: None,
) -> list[Compared]:
    """Check ``operators`` (all when empty) between the GPUs of this group's processes, each of which calls it.

    ``ranks``: of the exchange, as many as GPUs by default, or a multiple. Raises UserError before any launch.
    """
    num_gpus = int(os.environ.get("WORLD_SIZE", "1"))
    num_ranks = check_options(operators, ranks, num_gpus, num_replays)
    group = Group()
    block, alone = group.block(BLOCK_BYTES), local_block(BLOCK_BYTES, group.device)
    found = []
    for operator in operators or OPERATORS:
        if operator == "engine":
            from k3sim.kernels.multi_gpu.decode_steps import check_engine

            results = check_engine(group, num_ranks, seed=seed)
        else:
            # First by itself, with its pushes looped back: everything is compiled before a peer waits for it.
            run_once(HAND_OVERS[operator](Arena(alone), num_ranks, group.device, seed))
            hand_over = HAND_OVERS[operator](Arena(block), num_ranks, group.device, seed)
            results = iter([compare(hand_over, group, num_ranks, num_replays=num_replays, seed=seed)])
        for one in results:
            found.append(one)
            on_case(one)
        group.barrier()
    return found


def run_once(hand_over: HandOver) -> None:
    import torch

    for call in hand_over.calls:
        call.launch()
    torch.cuda.synchronize()


def compare(hand_over: HandOver, group: Group, num_ranks: int, *, num_replays: int, seed: int) -> Compared:
    """The first run against the reference and the other GPUs, then replays against the first run."""
    import torch

    started = time.perf_counter()
    calls = hand_over.calls
    for call in calls:
        call.reset()
        call.expected()
    group.barrier()
    for call in calls:
        call.launch()
    torch.cuda.synchronize()
    verdicts = [verdict for call in calls for verdict in call.judge()]
    first = [one.tensor.clone() for call in calls for one in call.outputs]
    reasons = [str(one) for one in verdicts if not one]
    between = group.differing(first)
    if between:
        reasons.append(f"{between} bytes of the first run differ between GPUs")

    delay = Delay(group.device, 77 * seed + 12345 * (group.rank + 1))
    delay(shortest_us=1.0)
    torch.cuda.synchronize()
    replays: dict[str, int] = {}
    unequal: dict[str, int] = {}

    def replay(name: str, count: int, before_call: Callable[[int], None]) -> None:
        differ = torch.zeros((), dtype=torch.int64, device=group.device)
        graph = graph_of(hand_over, first, differ, before_call)
        differ.zero_()
        group.barrier()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        replays[name] = replays.get(name, 0) + count
        unequal[name] = unequal.get(name, 0) + group.total(int(differ))
        if unequal[name]:
            reasons.append(f"{name}: {unequal[name]} results in {replays[name]} replays differ from the first run")
        group.barrier()

    replay("close", num_replays, lambda _: None)
    replay("skewed", num_replays, lambda _: delay(range_us=SKEW_US))
    for late in range(group.size if group.size > 1 else 0):

        def come_late(number: int, late: int = late) -> None:
            if group.rank == late and number == late % len(calls):
                delay(shortest_us=LATE_US)

        replay("late", LATE_REPLAYS, come_late)
    failed_elsewhere = group.total(bool(reasons))
    if failed_elsewhere and not reasons:
        reasons.append("another GPU's process found a difference")
    return Compared(
        operator=hand_over.operator,
        case=hand_over.name,
        gpus=group.size,
        ranks=num_ranks,
        verdicts=tuple(str(one) for one in verdicts),
        between_gpus=between,
        replays=replays,
        unequal=unequal,
        seconds=time.perf_counter() - started,
        reason="; ".join(reasons),
    )


def graph_of(
    hand_over: HandOver,
    first: Sequence[torch.Tensor],
    differ: torch.Tensor,
    before_call: Callable[[int], None],
) -> torch.cuda.CUDAGraph:
    """All calls on poisoned outputs, then the number of outputs that differ from ``first`` added to ``differ``."""
    import torch

    outputs = [one.tensor for call in hand_over.calls for one in call.outputs]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Thread-local: the watchdog of the process group may ask for its events meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in hand_over.calls:
            call.reset()
        for number, call in enumerate(hand_over.calls):
            before_call(number)
            call.launch()
        for now, then in zip(outputs, first, strict=True):
            bits = now.contiguous().view(torch.uint8) != then.contiguous().view(torch.uint8)
            differ += bits.any()
    return graph


def write_rows(rows: Sequence[Compared], path: Path, where: dict[str, Any]) -> None:
    """All results so far, whole or not at all."""
    document = {"environment": where, "checks": [{**asdict(one), "ok": one.ok} for one in rows]}
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(path)
