"""Exchanges between GPUs as kernels make them: all-reduces and projections, beside cuBLAS and NCCL in the same run.

Their times are shown beside predictions and never fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from k3sim.calibrate.probes.link_gpu import LinkGpu, LinkRecorder, Readings

HIDDEN = 7168
GRAPH_CALLS = 40  # of one kernel in a graph


def all_reduces(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """All-reduce of 8 KiB to 1 MiB in captured graphs: the project's one-shot kernel, and NCCL's.

    Isolates: chains of equal calls, so a call holds launch, push, flight, poll and sum. Could mislead: in a chain all
    GPUs arrive in step; messages beyond 16 rows are several calls of the project's kernel, which is made for fewer.
    ``ranks`` above ``gpus``: each GPU stands for several, with their stores and slots.
    """
    import torch
    import torch.distributed as dist

    from k3sim.kernels.multi_gpu.hand_overs import Arena
    from k3sim.kernels.proj_allreduce.launch import BUFFERS, CONTROL_WORDS, ReceiveBuffers
    from k3sim.kernels.unfused.exchange_launch import all_reduce

    shapes = [(1, 4096), (1, 7168), (2, 7168), (4, 8192), (8, 8192), (16, 8192)]

    def timed(parameters: Mapping[str, Any], calls: Sequence[Callable[[], object]]) -> None:
        graphs: list[Any] = []

        def sampler() -> Readings:
            if not graphs:
                graphs.append(gpu.captured(calls, GRAPH_CALLS))
            times = gpu.event_times_us(graphs[0], recorder.replays)
            return {"time": ("us", [one / GRAPH_CALLS for one in times])} if gpu.rank == 0 else {}

        recorder.record("all_reduce", dict(parameters), sampler)

    for ranks in dict.fromkeys((gpu.num_gpus, 8)):
        if ranks % gpu.num_gpus:
            continue
        for rows, hidden in shapes:
            received = Arena(gpu.block).take((BUFFERS, ranks, rows, hidden), torch.bfloat16)
            received.own.fill_(-0.0)
            control = torch.zeros(CONTROL_WORDS, dtype=torch.int32, device=gpu.group.device)
            buffers = ReceiveBuffers(received=received.own, control=control)
            peers = received.table(rows * hidden * 2, ranks)
            x = torch.randn(rows, hidden, device=gpu.group.device).bfloat16()
            out = torch.empty_like(x)
            gpu.group.barrier()

            def one(
                x: Any = x, out: Any = out, peers: Any = peers, buffers: ReceiveBuffers = buffers
            ) -> None:
                all_reduce(x, out, peers, buffers, rank=gpu.rank)

            sizes = [rows * hidden * 2] if rows < 16 else [rows * hidden * 2 * pieces for pieces in (1, 2, 4)]
            for size in sizes:
                pieces = size // (rows * hidden * 2)
                where = {"bytes": size, "ranks": ranks, "gpus": gpu.num_gpus, "calls": pieces, "by": "one-shot"}
                timed(where, [one] * pieces)
    if gpu.num_gpus > 1:
        for size in [rows * hidden * 2 for rows, hidden in shapes] + [512 << 10, 1 << 20]:
            x = torch.zeros(size // 2, dtype=torch.bfloat16, device=gpu.group.device)
            where = {"bytes": size, "ranks": gpu.num_gpus, "gpus": gpu.num_gpus, "calls": 1, "by": "NCCL"}
            timed(where, [lambda x=x: dist.all_reduce(x)])  # type: ignore[misc]


def projections(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """Output projection, all-reduce, residual, mix and norm: the fused kernels, cuBLAS with NCCL, the stock kernels.

    Isolates: chains of one site on weights that take turns, three times the size of L2 together. Could mislead: with
    NCCL and on the stock path ``attn_res`` mixes three snapshots itself, where ``consume`` has their part prepared by a
    launch beside the stream; the sum is of as many GPUs as there are, the stores and slots of ``ranks``.
    """
    import torch
    import torch.distributed as dist

    from k3sim.kernels.attn_res.launch import attn_res
    from k3sim.kernels.harness.bench import num_copies
    from k3sim.kernels.multi_gpu.hand_overs import Arena
    from k3sim.kernels.proj_allreduce import launch
    from k3sim.kernels.proj_allreduce.cases import consumer_operands
    from k3sim.kernels.unfused.exchange_launch import all_reduce

    device = gpu.group.device

    def case(ranks: int, depth: int, rows: int) -> None:
        copies = num_copies(HIDDEN * depth * 2, gpu.l2_bytes)
        received = Arena(gpu.block).take((launch.BUFFERS, ranks, 16, HIDDEN), torch.bfloat16)
        received.own.fill_(-0.0)
        control = torch.zeros(launch.CONTROL_WORDS, dtype=torch.int32, device=device)
        buffers = launch.ReceiveBuffers(received=received.own, control=control)
        peers = received.table(16 * HIDDEN * 2, ranks)
        weights = torch.randn(copies, HIDDEN, depth, device=device, dtype=torch.bfloat16) / math.sqrt(depth)
        x = torch.randn(rows, depth, device=device).bfloat16()
        operands, snapshots = consumer_operands(rows, HIDDEN, device)
        snapshots = snapshots.to(device)
        vectors = operands[2:]
        prefix = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        delta, out = torch.empty_like(prefix), torch.empty_like(prefix)
        gpu.group.barrier()

        def fused_allreduce(weight: Any) -> None:
            launch.produce(x, weight, peers, buffers, rank=gpu.rank)
            launch.consume(buffers, *operands, prefix, out)

        def by_nccl(weight: Any) -> None:
            torch.mm(x, weight.t(), out=delta)
            dist.all_reduce(delta)
            attn_res(snapshots, prefix, delta, *vectors, out, num_snapshots=3)

        def stock(weight: Any) -> None:
            torch.mm(x, weight.t(), out=delta)
            all_reduce(delta, delta, peers, buffers, rank=gpu.rank)
            attn_res(snapshots, prefix, delta, *vectors, out, num_snapshots=3)

        forms: dict[str, Callable[[Any], None]] = {"fused-allreduce": fused_allreduce, "stock": stock}
        if gpu.num_gpus > 1:
            forms["cuBLAS, NCCL, attn_res"] = by_nccl
        for name, form in forms.items():
            graphs: list[Any] = []
            rounds = max(1, GRAPH_CALLS // copies)

            def sampler(form: Any = form, graphs: list[Any] = graphs, rounds: int = rounds) -> Readings:
                if not graphs:
                    prefix.zero_()
                    graphs.append(gpu.captured([lambda w=one: form(w) for one in weights], rounds))  # type: ignore[misc]
                times = gpu.event_times_us(graphs[0], recorder.replays)
                return {"time": ("us", [one / rounds / copies for one in times])} if gpu.rank == 0 else {}

            recorder.record(
                "projection",
                {"rows": rows, "depth": depth, "ranks": ranks, "gpus": gpu.num_gpus, "by": name},
                sampler,
            )

    for ranks in dict.fromkeys((8, gpu.num_gpus)):
        if ranks % gpu.num_gpus == 0:
            for depth, rows in ((1536, 1), (1536, 8), (1536, 16), (768, 1)):
                case(ranks, depth, rows)
