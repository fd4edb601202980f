"""Edges between the kernels of a graph, on one stream and between two."""

from __future__ import annotations

import ctypes
from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Args, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL empty() {}
KERNEL empty_pdl() { pdl_wait(); pdl_trigger(); }
KERNEL write_rows(uint4* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = make_uint4(1, 2, 3, 4); }

KERNEL node(u64* timestamps, const uint4* in, uint4* out, int spin, int wait) {
  u64 t0 = clk(), t1 = t0;
  if (wait) { pdl_wait(); t1 = clk(); pdl_trigger(); }
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  uint4 v = load4(in + i);
  depend(v.x);
  u64 t2 = clk();
  while (clk() - t2 < spin);
  if (out) out[i] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 *s = timestamps + 16 * blockIdx.x, t3 = clk();
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = gtime();
  }
}
"""



def node_periods(gpu: Gpu, recorder: Recorder) -> None:
    """Period of graph nodes that do nothing, by grid size, with and without PDL: what a block adds to a launch.

    Isolates: the time of 600 nodes less that of 200, so a replay's own cost falls out. Could mislead: an empty kernel
    has nothing to drain and the next launch overlaps it, so a period is less than a boundary between kernels that work;
    with PDL the slots of waiting blocks add, which is not their dispatch.
    """
    out = gpu.zeros(1 << 20)
    for name, block, pdl in (("empty", 32, False), ("empty_pdl", 32, True), ("write_rows", 256, False)):
        for blocks in (1, 8, 132, 528):
            args: Args = (out,) if name == "write_rows" else ()

            def body(
                n: int,
                name: str = name,
                blocks: int = blocks,
                block: int = block,
                pdl: bool = pdl,
                args: Args = args,
            ) -> None:
                for _ in range(n):
                    gpu.launch(name, blocks, block, args, pdl=pdl)

            short, long = gpu.graph(lambda: body(200)), gpu.graph(lambda: body(600))

            def sampler(short: Any = short, long: Any = long) -> dict[str, tuple[str, Any]]:
                import numpy

                gpu.event_us(short, 5)
                base = numpy.median(gpu.event_us(short, recorder.replays))
                return {
                    "node_period": ("us", (numpy.array(gpu.event_us(long, recorder.replays)) - base) / 400)
                }

            recorder.record("graph_node_period", {"kernel": name, "blocks": blocks, "pdl": pdl}, sampler)


def boundaries(gpu: Gpu, recorder: Recorder) -> None:
    """From the last timestamp of a producer to the first of its consumer; the producer reads, waits, writes.

    Isolates: launch and release of a graph edge, by the last block's end and the first block's entry (with PDL: the
    end of its wait), for grids of 1 to 1,056 blocks, with room for both kernels on an SM and without. Could mislead:
    timestamps of two SMs are compared on a timer that steps by 32 ns (averaged over the graph's nodes); the producer's
    stores are in the way between its last timestamp and its end; grids of several H200 differ by up to 0.06 us.
    """
    nodes, most = 24, 8 * gpu.num_sms
    width = 16 * most
    timestamps, buffers = gpu.zeros(nodes * width), [gpu.zeros(1 << 20) for _ in range(2)]

    def case(
        blocks: tuple[int, int], pdl: bool, threads: int, writes: bool, smem: tuple[int, int] = (0, 0)
    ) -> None:
        spin = 8000 if pdl else 2000

        def body() -> None:
            for i in range(nodes):
                target = buffers[1 - i % 2] if writes else ctypes.c_uint64(0)
                args = (timestamps[i * width :], buffers[i % 2], target, spin, int(pdl))
                gpu.launch("node", blocks[i % 2], threads, args, smem=smem[i % 2], pdl=pdl and i > 0)

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            entered, resumed, spread, load = [], [], [], []
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps.cpu().numpy().reshape(nodes, most, 16)
                before, after = rows[2:-1:2, : blocks[0]], rows[3::2, : blocks[1]]
                end = clocks.us(before[..., 3], before[..., 3], before[..., 4]).max(1)
                entry = clocks.us(after[..., 0], after[..., 3], after[..., 4])
                resume = clocks.us(after[..., 1], after[..., 3], after[..., 4])
                entered.append((entry.min(1) - end).mean())
                resumed.append((resume.min(1) - end).mean())
                spread.append((resume.max(1) - resume.min(1)).mean())
                load.append((after[..., 2] - after[..., 1]).mean())
            found: dict[str, tuple[str, Any]] = {
                "end_to_entry": ("us", entered),
                "first_to_last_block": ("us", spread),
                "first_load": ("cycle", load),
            }
            if pdl:
                found["end_to_resume"] = ("us", resumed)
            return found

        parameters = {
            "producer_blocks": blocks[0],
            "consumer_blocks": blocks[1],
            "threads": threads,
            "pdl": pdl,
            "bytes_written_per_block": 16 * threads * writes,
            "shared_memory": list(smem),
        }
        recorder.record("graph_boundary", parameters, sampler)

    for pdl in (False, True):
        for blocks in ((1, 1), (1, 132), (132, 1), (132, 132), (8, 8)):
            case(blocks, pdl, 256, True)
        case((1, 1), pdl, 256, False)
        case((132, 132), pdl, 256, False)
        case((most, 132), pdl, 256, True)
        # Another division of the SM's memory into shared memory and L1.
        case((132, 132), pdl, 256, True, (BLOCK_BYTES, 0))
        case((132, 8), pdl, 256, True, (BLOCK_BYTES, 0))
    fork_and_join(gpu, recorder)


def fork_and_join(gpu: Gpu, recorder: Recorder) -> None:
    """Edges between streams: P, then C1 and C2 on two streams, then J that waits for both."""
    _fork_and_join(gpu, recorder, "graph_fork_join", {"blocks": 8, "threads": 256}, 8, (2000, 3000))


def joins(gpu: Gpu, recorder: Recorder) -> None:
    """The edge behind a join of two streams, by the grid and by which of the two branches ends last.

    Isolates: kernels that read 4 KB a block, spin and write; ``join`` is from the later end of both branches to the
    first instruction behind them. Could mislead: as ``boundaries``, timestamps of two SMs are compared on a timer of 32
    ns; both branches begin together, and no branch streams; an edge into a kernel of two predecessors is a full one, so
    nothing here starts early.
    """
    sms = gpu.num_sms
    for blocks in (1, 8, sms):
        for spins in ((2000, 10_000), (10_000, 2000), (4000, 4000)):
            parameters = {"blocks": blocks, "threads": 256, "cycles_of_branches": list(spins)}
            _fork_and_join(gpu, recorder, "graph_join", parameters, blocks, spins)


def _fork_and_join(
    gpu: Gpu, recorder: Recorder, probe: str, parameters: dict[str, Any], blocks: int, spins: tuple[int, int]
) -> None:
    rounds, most = 8, gpu.num_sms
    width = 16 * most
    side = gpu.torch.cuda.Stream()
    timestamps, buffers = gpu.zeros(3 * rounds * width), [gpu.zeros(1 << 17) for _ in range(3)]

    def body() -> None:
        driver, main = gpu.driver, gpu.stream.cuda_stream
        disable_timing = 2
        for r in range(rounds):
            begun, ended = (gpu.call(driver.cuEventCreate(disable_timing)) for _ in range(2))
            slots = [timestamps[(3 * r + i) * width :] for i in range(3)]
            gpu.launch("node", blocks, 256, (slots[0], buffers[0], buffers[0], 2000, 0))
            gpu.call(driver.cuEventRecord(begun, main))
            gpu.call(driver.cuStreamWaitEvent(side.cuda_stream, begun, 0))
            gpu.launch("node", blocks, 256, (slots[1], buffers[1], buffers[1], spins[0], 0))
            gpu.launch("node", blocks, 256, (slots[2], buffers[2], buffers[2], spins[1], 0), stream=side)
            gpu.call(driver.cuEventRecord(ended, side.cuda_stream))
            gpu.call(driver.cuStreamWaitEvent(main, ended, 0))

    graph = gpu.graph(body)

    def sampler() -> dict[str, tuple[str, Any]]:
        clocks, same, other, join = Clocks(gpu), [], [], []
        for _ in range(recorder.replays):
            gpu.replay(graph)
            gpu.stream.synchronize()
            rows = timestamps.cpu().numpy().reshape(rounds, 3, most, 16)[:, :, :blocks]
            entry = clocks.us(rows[..., 0], rows[..., 3], rows[..., 4]).min(-1)
            end = clocks.us(rows[..., 3], rows[..., 3], rows[..., 4]).max(-1)
            same.append((entry[:, 1] - end[:, 0]).mean())
            other.append((entry[:, 2] - end[:, 0]).mean())
            join.append((entry[1:, 0] - end[:-1, 1:].max(1)).mean())
        return {"fork_same_stream": ("us", same), "fork_other_stream": ("us", other), "join": ("us", join)}

    recorder.record(probe, parameters, sampler)
