"""Captured decode steps on several GPUs: the residual stream and the tokens are the same bits on all of them.

Five layers of K3 with few of their experts: the dense layer, KDA and MLA, two MLA layers at the end. A step of every
GPU begins at a random time; later each GPU is 100 ms late in turn. A second pass from the same state must repeat the
first bit by bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from k3sim.kernels.multi_gpu.compared import LATE_US, SKEW_US, Compared
from k3sim.kernels.multi_gpu.delay import Delay
from k3sim.kernels.multi_gpu.group import Group

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.rank.state import Rank
    from k3sim.kernels.rank.step import Step

NUM_STEPS = 200
ENGINE_RANKS = (8, 16)
RESIDENT_EXPERTS = 16


def check_engine(group: Group, num_ranks: int, *, seed: int) -> Iterator[Compared]:
    """Both paths. A layout of 8 ranks where the exchange has fewer than the engine's layouts."""
    ranks = num_ranks if num_ranks in ENGINE_RANKS else ENGINE_RANKS[0]
    for path in ("stock", "fused"):
        yield check_path(group, path, ranks, seed=seed)


def check_path(group: Group, path_name: str, num_ranks: int, *, seed: int) -> Compared:
    import torch

    started = time.perf_counter()
    rank, step = build(group, path_name, num_ranks)
    step.capture()
    delay = Delay(group.device, 99 * seed + 54321 * (group.rank + 1))
    delay(shortest_us=1.0)

    def decode(skewed: bool) -> torch.Tensor:
        from k3sim.kernels.rank.state import clear

        clear(rank, 1, torch.zeros(1, dtype=torch.int32))
        rows = []
        group.barrier()
        for number in range(NUM_STEPS):
            if skewed:
                delay(range_us=SKEW_US)
                if number % 20 == 10 and number // 20 % group.size == group.rank and group.size > 1:
                    delay(shortest_us=LATE_US)
            step.replay()
            rows.append(torch.cat((rank.buffers["prefix"].view(torch.int32).flatten(), rank.sequence.tokens)))
        torch.cuda.synchronize()
        return torch.stack(rows)

    first, second = decode(skewed=False), decode(skewed=True)
    finite = bool(rank.buffers["prefix"].isfinite().all())
    between = group.differing([first, second])
    unequal = group.total(int((first != second).any(-1).sum()))
    moved = int((first[1:] != first[:-1]).any(-1).sum())
    reasons = []
    if not finite:
        reasons.append("the residual stream is not finite")
    if between:
        reasons.append(f"{between} bytes of residual streams or tokens differ between GPUs")
    if unequal:
        reasons.append(f"{unequal} steps of the skewed pass differ from the first")
    if moved < NUM_STEPS // 2:
        reasons.append(f"only {moved} of {NUM_STEPS} steps changed anything")
    if group.total(bool(reasons)) and not reasons:
        reasons.append("another GPU's process found a difference")
    return Compared(
        operator="engine",
        case=f"{path_name}, {rank.architecture.num_layers} layers, TP{num_ranks}, one row",
        gpus=group.size,
        ranks=num_ranks,
        verdicts=(),
        between_gpus=between,
        replays={"close": NUM_STEPS, "skewed": NUM_STEPS},
        unequal={"close": 0, "skewed": unequal},
        seconds=time.perf_counter() - started,
        reason="; ".join(reasons),
    )


def build(group: Group, path_name: str, num_ranks: int) -> tuple[Rank, Step]:
    """This GPU's rank, exchanging with those of the other processes, and its step."""
    import torch

    from k3sim.kernels.rank.call_table import KERNEL_CALLS
    from k3sim.kernels.rank.exchange import connect_kernels, connect_symmetric
    from k3sim.kernels.rank.state import build_rank, clear
    from k3sim.kernels.rank.step import Step
    from k3sim.kernels.rank.weights import random_weights
    from k3sim.model.config_file import load_architecture
    from k3sim.model.layout import Layout, Workload
    from k3sim.model.paths import find_path
    from k3sim.model.program import build_program

    architecture = replace(
        load_architecture(), num_layers=5, kda_layers=(0, 1, 2), mla_layers=(3, 4), attn_res_block_size=3
    )
    layout, workload = Layout(tp=num_ranks), Workload(concurrency=1, context=NUM_STEPS + 56)
    program = build_program(architecture, layout, workload, find_path(path_name, kernel_set="own"))
    weights = random_weights(
        program, architecture, layout, index=group.rank, device=group.device, resident_experts=RESIDENT_EXPERTS
    )
    rank = build_rank(architecture, layout, workload, program, weights, index=group.rank, device=group.device)
    clear(rank, 1)
    connect_kernels([rank], loop_back=True)
    rank.sequence.tokens.fill_(rank.first_token)  # of its own share: alone, nobody else embeds it
    if group.size > 1:
        # A first step by itself compiles everything: a peer that waits for a push would lose patience meanwhile.
        Step([rank], KERNEL_CALLS).run()
        torch.cuda.synchronize()
        rank.sequence.tokens.zero_()
        connect_symmetric(rank, torch.distributed.group.WORLD)
    return rank, Step([rank], KERNEL_CALLS)
