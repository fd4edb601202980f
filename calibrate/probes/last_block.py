"""A barrier that only the last block to arrive goes through."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Each block stores 4 KB and takes a ticket; the last one reads 4 KB that lie among all blocks' stores.
KERNEL last_block(uint4* partial, u32* counter, u64* timestamps, int fence) {
  __shared__ u32 ticket;
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  u64 t0 = clk();
  partial[i] = make_uint4(i, i + 1, i + 2, i + 3);
  if (fence) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0)
    asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket) : "l"(counter), "r"(gridDim.x - 1) : "memory");
  __syncthreads();
  u32 mine = ticket;
  depend(mine);
  u64 t1 = clk(), t2 = t1;
  bool last = mine == gridDim.x - 1;
  if (last) {
    uint4 v = load4(partial + (threadIdx.x * 7919u) % (gridDim.x * blockDim.x));
    depend(fold(v));
    __syncthreads();
    t2 = clk();
  }
  if (threadIdx.x == 0) {
    u64* s = timestamps + 8 * blockIdx.x;
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = gtime(); s[4] = last;
  }
}
"""


def last_block(gpu: Gpu, recorder: Recorder) -> None:
    """From the last block's arrival to what it reads of all others, through one counter in L2.

    Isolates: each block stores, takes a ticket, and only the last reads; ``ticket`` is store to ticket in one block's
    own clock, ``arrival_to_loaded`` the whole barrier from the latest first timestamp of all blocks. Could mislead: all
    blocks arrive within the time that launching them takes, and their tickets queue at one address; in a kernel they
    are further apart; a fence of every thread (``fence``) waits for stores that the release of one thread covers, too;
    the barrier compares two SMs' clocks.
    """
    import numpy

    nodes, threads, most = 16, 256, 2 * gpu.num_sms
    width = 8 * most
    timestamps, partial, counter = gpu.zeros(nodes * width), gpu.zeros(most * threads * 2), gpu.zeros(4, "int32")

    def case(blocks: int, fence: bool) -> None:
        def body() -> None:
            for node in range(nodes):
                gpu.launch("last_block", blocks, threads, (partial, counter, timestamps[node * width :], int(fence)))

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            tickets, loads, others, whole = [], [], [], []
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = timestamps.cpu().numpy().reshape(nodes, most, 8)[1:, :blocks]
                last = rows[numpy.arange(nodes - 1), rows[..., 4].argmax(1)]
                tickets.append((last[:, 1] - last[:, 0]).mean())
                loads.append((last[:, 2] - last[:, 1]).mean())
                others.append((rows[..., 1] - rows[..., 0]).mean())
                arrived = clocks.us(rows[..., 0], rows[..., 2], rows[..., 3]).max(1)
                whole.append((clocks.us(last[:, 2], last[:, 2], last[:, 3]) - arrived).mean())
            return {
                "ticket": ("cycle", tickets),
                "load": ("cycle", loads),
                "ticket_of_any": ("cycle", others),
                "arrival_to_loaded": ("us", whole),
            }

        recorder.record("last_block_barrier", {"blocks": blocks, "threads": threads, "fence": fence}, sampler)

    for blocks in (1, 8, 32, 64, gpu.num_sms, 2 * gpu.num_sms):
        case(blocks, False)
    case(gpu.num_sms, True)
