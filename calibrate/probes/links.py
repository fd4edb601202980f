"""NVLink between the GPUs of one host, measured: ``python -m k3sim.calibrate.probes.links OUT.json --gpus 2``.

Starts one process a GPU (under torchrun it is one of them). Slots lie in torch's symmetric memory, which peers reach
by unicast loads and stores; multicast stays off. The first two GPUs take part in what has two sides, all of them in
all-reduces. Each case is taken twice, as in ``probes.py``, whose file format this is: every repetition, typed metadata,
a checksum, written after each case, and a run goes on from what the file holds.

Primitives of the link are small CUDA kernels; exchanges are the project's kernels, beside cuBLAS and NCCL in the same
run. ``link_fit.py`` says which machine value each primitive gives; times of kernels are shown and never fitted.

The cards are measured as they are found: no clock, power or mode setting is touched.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from k3sim.calibrate.probes import SOURCE
from k3sim.calibrate.probes.clocks import clock_report
from k3sim.calibrate.probes.gpu import Gpu, compile_probes
from k3sim.calibrate.probes.recorder import CannotResume, Recorder
from k3sim.errors import UserError

MODULE = "k3sim.calibrate.probes.links"
BLOCK_BYTES = 192 << 20  # of shared memory of the GPUs
MESSAGES = 64 << 20  # where in it messages land; small things lie before
HIDDEN = 7168
GRAPH_CALLS = 40  # of one kernel in a graph

LINK_SOURCE = r"""
DEV u32 link_load(const u32* p) {
  u32 v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV u32 link_load_acquire(const u32* p) {
  u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV void link_store(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEV void link_store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEV uint4 link_load4(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV void link_store4(uint4* p, u32 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%1,%1,%1};" :: "l"(p), "r"(v) : "memory");
}
DEV bool link_is(uint4 x, u32 v) { return x.x == v && x.y == v && x.z == v && x.w == v; }

// One thread a side. form 0: a word that is its own sign. 1: 16 bytes that are. 2: 16 bytes, then a flag stored with
// release and polled with acquire. 3: 16 bytes, a fence for the system, a plain flag.
DEV void link_send(u32* at, u32 v, int form) {
  if (form == 0) link_store(at, v);
  else if (form == 1) link_store4((uint4*)at, v);
  else {
    link_store4((uint4*)(at + 32), v);
    if (form == 2) link_store_release(at, v);
    else { __threadfence_system(); link_store(at, v); }
  }
}
DEV void link_await(const u32* at, u32 v, int form) {
  if (form == 0) while (link_load(at) != v);
  else if (form == 1) while (!link_is(link_load4((const uint4*)at), v));
  else {
    if (form == 2) while (link_load_acquire(at) != v);
    else { while (link_load(at) != v); __threadfence_system(); }
    depend(link_load4((const uint4*)(at + 32)).x);
  }
}
// Two blocks: both sides on this GPU. One: the other side is a peer's launch.
KERNEL link_ping(u32* mine, u32* theirs, u32* lat, int steps, int begins, int form, int base) {
  __shared__ u32 samples[1024];
  if (threadIdx.x) return;
  u32 *own = mine, *other = theirs;
  if (gridDim.x == 2) {
    begins = blockIdx.x == 0;
    own = mine + 256 * blockIdx.x;
    other = mine + 256 * (1 - blockIdx.x);
  }
  for (int i = 1; i <= steps; ++i) {
    u64 a = clk();
    if (begins) link_send(other, base + i, form);
    link_await(own, base + i, form);
    if (!begins) link_send(other, base + i, form);
    samples[i - 1] = (u32)(clk() - a);
  }
  if (begins) for (int i = 0; i < steps; ++i) lat[i] = samples[i];
}

// Loads whose addresses follow from the load before (the region holds zeros), mean of a chain. What is waited for at
// the end is the last load as it came: a value with bits that the compiler knows lets it drop the test and the chain.
KERNEL link_chase(const u32* region, u32* lat, int steps, u32 lines, u32 seed) {
  if (threadIdx.x) return;
  u32 r = seed, v = 0;
  for (int pass = 0; pass < 2; ++pass) {
    u64 a = clk();
    for (int i = 0; i < steps; ++i) {
      r = r * 1664525u + 1013904223u + v;
      v = link_load(region + (u64)((r >> 8) % lines) * 32);
    }
    depend(v);
    lat[pass] = (u32)((clk() - a) / steps);
  }
}

// Both sides push S slots a thread and poll as many, again and again; a block waits for its slowest thread.
template <int S> DEV void link_exchange(uint4* mine, uint4* theirs, u64* timestamps, int iters, u32 base) {
  u32 threads = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
  u64 a = 0;
  for (int i = 1; i <= iters + 1; ++i) {
    u32 v = base + i, buffer = (i & 1) * S * threads;
    if (i == 2) a = clk();
#pragma unroll
    for (int s = 0; s < S; ++s) link_store4(theirs + buffer + s * threads + at, v);
    bool missing = true;
    while (missing) {
      missing = false;
#pragma unroll
      for (int s = 0; s < S; ++s) missing |= !link_is(link_load4(mine + buffer + s * threads + at), v);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) timestamps[blockIdx.x] = (clk() - a) / iters;
}
#define EXCHANGE(S) \
  KERNEL link_exchange_##S(uint4* m, uint4* t, u64* s, int n, int b) { link_exchange<S>(m, t, s, n, b); }
EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(7)

// Stores to a peer; a block is done when all of its stores have been performed there.
KERNEL link_push(uint4* target, u64 count, int rounds, u64* timestamps) {
  u64 begin = gtime();
  for (int round = 0; round < rounds; ++round)
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
      link_store4(target + i, (u32)i);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
KERNEL link_pull(const uint4* source, u64 count, int rounds, u64* timestamps) {
  u64 begin = gtime();
  u32 acc = 0;
  u64 batch = (u64)blockDim.x * 4;
  for (int round = 0; round < rounds; ++round)
    for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) v[u] = link_load4(source + i + u * blockDim.x);
#pragma unroll
      for (int u = 0; u < 4; ++u) acc ^= fold(v[u]);
    }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
"""
FORMS = ("word", "16_bytes", "data_and_released_flag", "data_fence_flag")


class LinkGpu(Gpu):
    """This process's GPU with the probes of links, and a block of memory that all processes map."""

    def __init__(self) -> None:
        import torch
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

        from k3sim.kernels.multi_gpu.check import Group

        self.torch, self.driver = torch, driver
        self.group = Group()
        self.rank, self.num_gpus = self.group.rank, self.group.size
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.num_sms: int = properties.multi_processor_count
        self.name: str = properties.name
        self.l2_bytes: int = properties.L2_cache_size
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.zeros(1, device="cuda")  # makes the context
        cubin = compile_probes(properties.major, properties.minor, SOURCE + LINK_SOURCE)
        self._module = self.call(driver.cuModuleLoadData(cubin))
        self._functions: dict[str, Any] = {}
        self.block = self.group.block(BLOCK_BYTES)
        self.block.own.zero_()
        self.base = 0  # of the values that probes send: none is ever sent again
        self.group.meet()

    @property
    def peer(self) -> int:
        """The other of the first two; a GPU beyond them looks on."""
        return 1 - self.rank

    @property
    def takes_part(self) -> bool:
        return self.rank < 2

    def at(self, gpu: int, offset: int) -> ctypes.c_uint64:
        """Address in a GPU's block as this one sees it."""
        return ctypes.c_uint64(self.block.addresses[gpu] + offset)

    def next_base(self, count: int) -> int:
        """Values above this one have not been sent yet; the same in every process."""
        self.base += count
        return self.base - count

    def event_times_us(self, graph: Any, count: int) -> list[float]:
        """Time between events around each of ``count`` replays of a torch graph, all processes at once."""
        torch = self.torch
        self.group.meet()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count + 5)]
        for begin, end in pairs:
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs[5:]]

    def captured(self, calls: Sequence[Callable[[], object]], rounds: int = 1) -> Any:
        """A torch graph of the calls, which ran once before; all processes at once."""
        torch = self.torch
        self.group.meet()
        for call in calls[:2]:
            call()
        torch.cuda.synchronize()
        self.group.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for call in calls:
                    call()
        torch.cuda.synchronize()
        return graph


class LinkRecorder(Recorder):
    """A recorder in every process; the first one writes. A process that only looks on in a case has no readings."""

    def __init__(self, gpu: LinkGpu, path: Path, quick: bool, *, commit: str = "") -> None:
        from k3sim.kernels.harness.bench import environment

        super().__init__(gpu, path, quick, None if gpu.rank == 0 else lambda _: None)
        # One line a GPU; they are alike.
        self.head["driver_and_clocks"] = {
            name: value.splitlines()[0].strip() if value else ""
            for name, value in self.head["driver_and_clocks"].items()
        }
        nccl = ".".join(str(one) for one in gpu.torch.cuda.nccl.version())
        self.head |= {
            "source": "k3sim calibrate/probes/links.py",
            "gpus": gpu.num_gpus,
            "commit": commit,
            "versions": {**environment()["versions"], "nccl": nccl},
        }
        gpu.group.meet()  # all have read what is there before the first writes

    def write(self) -> None:
        if self.gpu.rank == 0:  # type: ignore[attr-defined]
            super().write()


Readings = dict[str, tuple[str, Any]]


def latencies(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """A value to the peer and back, halved, by what the value is; loads of the peer's memory; the same within a GPU.

    Isolates: one thread a side, nothing else on either GPU, so half a round is a store, its flight, and its being
    noticed by a thread that polls its own memory. Could mislead: both directions are taken to be alike; the SM of
    either side is where it happened to be; a kernel's many pollers wait for the slowest. Forms with a flag also hold
    the order between data and flag, those without need none. The chase is a round trip over the link and back of one
    load, its request included.
    """
    steps = 200
    lat = gpu.zeros(1024, "int32")

    def ping(form: int, local: bool) -> None:
        def sampler() -> Readings:
            halves = []
            for _ in range(max(4, recorder.replays // 10)):
                base = gpu.next_base(steps)
                if local or gpu.takes_part:
                    grid, target = (2, gpu.rank) if local else (1, gpu.peer)
                    args = (gpu.at(gpu.rank, 0), gpu.at(target, 0), lat, steps, int(gpu.rank == 0), form, base)
                    gpu.launch("link_ping", grid, 32, args, smem=180 * 1024)
                    gpu.torch.cuda.synchronize()
                halves.append(lat[20:steps].cpu().numpy() / 2)
            return {"one_way": ("cycle", halves)} if gpu.rank == 0 else {}

        recorder.record("link_hop", {"form": FORMS[form], "over": "l2" if local else "link"}, sampler)

    for local in (False, True):
        for form in range(len(FORMS)):
            ping(form, local)

    lines = (4 << 20) // 128
    # In the owner's L2 from here on: single loads took eighty chains to bring all of it in, each faster than the last.
    gpu.block.own[16 << 20 : 20 << 20].zero_()
    gpu.group.meet()
    for over in ("link", "l2"):

        def chase(over: str = over) -> Readings:
            target, found = gpu.rank if over == "l2" else gpu.peer, []
            for number in range(recorder.replays):
                if gpu.rank == 0:
                    gpu.launch("link_chase", 1, 32, (gpu.at(target, 16 << 20), lat, 400, lines, 977 * number + 13))
                    found.append(int(lat[1].item()))
            return {"round_trip": ("cycle", found)} if gpu.rank == 0 else {}

        recorder.record("link_load", {"over": over, "region_mib": 4}, chase)


def exchanges(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """Both GPUs push to each other and poll, round after round: a hop with many pollers, as an all-reduce has.

    Isolates: a round is the push, its flight and its being noticed by all threads of a block; launches are outside.
    Could mislead: rounds follow one another without work between, so both sides are always in step; blocks do not
    wait for one another; the slots are of one peer, where an all-reduce polls those of several.
    """
    # With the first round an even number: the next launch begins in the buffer that nobody polls any more.
    timestamps, iters = gpu.zeros(4096), 199

    def case(blocks: int, threads: int, slots: int) -> None:
        def sampler() -> Readings:
            found = []
            for _ in range(max(10, recorder.replays // 4)):
                base = gpu.next_base(iters + 1)
                if gpu.takes_part:
                    args = (gpu.at(gpu.rank, 1 << 20), gpu.at(gpu.peer, 1 << 20), timestamps, iters, base)
                    gpu.launch(f"link_exchange_{slots}", blocks, threads, args)
                    gpu.torch.cuda.synchronize()
                found.append(float(timestamps[:blocks].max().item()))
            return {"round": ("cycle", found)} if gpu.rank == 0 else {}

        parameters = {"blocks": blocks, "threads": threads, "slots": slots, "bytes": 16 * blocks * threads * slots}
        recorder.record("link_exchange", parameters, sampler)

    for blocks, threads in ((1, 1), (1, 32), (1, 128), (8, 128), (32, 128)):
        for slots in (1,) if blocks == 1 else (1, 2, 4, 7):
            case(blocks, threads, slots)


def bandwidth(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """Stores to the peer by message size and number of SMs, one way and both ways; loads from it; torch's copy to it.

    Isolates: from the first block's start until every store has been performed at the peer, as a fence for the system
    tells. Could mislead: small messages are mostly that fence's way to the peer and back; a message of 64 MiB does not
    stay in the peer's L2, so its HBM is written too; both ways, the two sides are only roughly together.
    """
    timestamps = gpu.zeros(4096)

    def move(kernel: str, num_bytes: int, blocks: int, both: bool, probe: str) -> None:
        rounds = 16 if both else 1  # long against what the two sides are apart
        target = gpu.at(gpu.peer if gpu.takes_part else gpu.rank, MESSAGES)
        args = (target, ctypes.c_uint64(num_bytes // 16), rounds, timestamps)
        acts = gpu.rank == 0 or (both and gpu.rank == 1)

        def sampler() -> Readings:
            times = []
            gpu.group.meet()
            for _ in range(recorder.replays // 2):
                if acts:
                    gpu.launch(kernel, blocks, 512, args)
                    gpu.torch.cuda.synchronize()
                    seen = timestamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
                    times.append(float(seen[:, 1].max() - seen[:, 0].min()) / rounds)
                if both:
                    gpu.group.meet()
            gpu.group.meet()
            if gpu.rank:
                return {}
            if num_bytes < 1 << 20:
                return {"time": ("us", [one / 1e3 for one in times])}
            return {"rate": ("B/s", [1e9 * num_bytes / one for one in times])}

        recorder.record(probe, {"bytes": num_bytes, "blocks": blocks, "both_ways": both}, sampler)

    sms = gpu.num_sms
    for kib in (4, 16, 64, 256, 1024, 4096, 16384, 65536):
        move("link_push", kib << 10, max(1, min(sms, kib // 8)), False, "link_push")
    for blocks in (1, 2, 4, 8, 16, 32, 64):
        move("link_push", 16 << 20, blocks, False, "link_push")
    move("link_push", 64 << 20, 2 * sms, False, "link_push")
    move("link_push", 64 << 20, sms, True, "link_push")
    for mib in (16, 64):
        move("link_pull", mib << 20, sms, False, "link_pull")
    move("link_pull", 64 << 20, 2 * sms, False, "link_pull")

    def copies() -> Readings:
        times = []
        if gpu.rank == 0:
            part = slice(MESSAGES, MESSAGES + (64 << 20))
            source, target = gpu.block.peers[0][part], gpu.block.peers[1][part]
            pairs = [
                [gpu.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(recorder.replays // 2)
            ]
            for begin, end in pairs:
                begin.record()
                target.copy_(source)
                end.record()
            gpu.torch.cuda.synchronize()
            times = [1e-3 * begin.elapsed_time(end) for begin, end in pairs]
        gpu.group.meet()
        return {"rate": ("B/s", [(64 << 20) / one for one in times])} if gpu.rank == 0 else {}

    recorder.record("link_copy", {"bytes": 64 << 20}, copies)


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
    from k3sim.kernels.unfused.launch import all_reduce

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
            gpu.group.meet()

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
    from k3sim.kernels.unfused.launch import all_reduce

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
        gpu.group.meet()

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


PROBES: dict[str, Callable[[LinkGpu, LinkRecorder], None]] = {
    "clocks": clock_report,  # type: ignore[dict-item]
    "latencies": latencies,
    "exchanges": exchanges,
    "bandwidth": bandwidth,
    "all_reduces": all_reduces,
    "projections": projections,
}


def measure(out: Path, *, quick: bool = False, only: Sequence[str] = (), commit: str = "") -> None:
    """What each of the processes does. Raises UserError for an unknown probe or a file that cannot be gone on from."""
    check_probes(only)
    gpu = LinkGpu()
    if gpu.num_gpus < 2:
        raise UserError("gpus: got 1, accepted: 2 or more, between which there is a link")
    try:
        recorder = LinkRecorder(gpu, out, quick, commit=commit)
    except CannotResume as refusal:
        raise UserError(str(refusal)) from None
    for name in only or PROBES:
        PROBES[name](gpu, recorder)
        gpu.group.meet()


def check_probes(only: Sequence[str]) -> None:
    for name in only:
        if name not in PROBES:
            raise UserError(f"unknown probe {name!r}; accepted: {', '.join(PROBES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    from k3sim.kernels.multi_gpu.processes import check_gpus, run_processes

    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=None, help="processes to start; under torchrun leave it out")
    parser.add_argument("--quick", action="store_true", help="a tenth of the replays, to see that all probes run")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(PROBES)}")
    parser.add_argument("--commit", default="", help="of the source, for the file's head")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of all processes together")
    given = parser.parse_args(arguments)
    only = [one for one in given.only.split(",") if one]
    try:
        check_probes(only)
        if given.gpus is not None and "RANK" not in os.environ:
            if given.gpus < 2:
                raise UserError(f"gpus: got {given.gpus}, accepted: 2 or more, between which there is a link")
            check_gpus(given.gpus)
            words = [str(given.out), "--only", given.only, "--commit", given.commit, *["--quick"] * given.quick]
            return run_processes(MODULE, words, given.gpus, timeout_s=given.timeout_s)
        measure(given.out, quick=given.quick, only=only, commit=given.commit)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"k3sim: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
