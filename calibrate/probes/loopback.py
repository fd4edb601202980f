"""A push into slots of the own memory, until a poller has seen all of it."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
DEV void push4(char* p, u32 v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1,%1,%1,%1};" :: "l"(p), "r"(v) : "memory");
}
// Whole warps poll: their 16 bytes of every slot, until all words of all lanes are `v`.
template <int SLOTS> DEV void await_push(const char* p, u64 slot_bytes, u32 v) {
  bool missing = true;
  while (missing) {
    bool old = false;
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) {
      uint4 w;
      asm volatile("ld.relaxed.sys.global.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(p + slot * slot_bytes) : "memory");
      old |= w.x != v | w.y != v | w.z != v | w.w != v;
    }
    missing = __any_sync(~0u, old);
  }
}
// ping[slot][16 bytes of each thread], pong alike. own: a block polls what it pushed. Otherwise the second half of the
// blocks polls ping and answers in pong, thread by thread, so that a round is two pushes.
template <int SLOTS> DEV void push_rounds(char* ping, char* pong, u64* timestamps, int rounds, int own, u32 base) {
  u32 half = own ? gridDim.x : gridDim.x / 2;
  bool answers = blockIdx.x >= half;
  u64 slot_bytes = (u64)half * blockDim.x * 16, mine = ((blockIdx.x % half) * blockDim.x + threadIdx.x) * 16ull;
  char *out = (answers ? pong : ping) + mine, *in = (answers || own ? ping : pong) + mine;
  u64 from = clk();
#pragma unroll 1
  for (u32 i = base + 1; i <= base + rounds; ++i) {
    if (answers) await_push<SLOTS>(in, slot_bytes, i);
#pragma unroll
    for (int slot = 0; slot < SLOTS; ++slot) push4(out + slot * slot_bytes, i);
    if (!answers) await_push<SLOTS>(in, slot_bytes, i);
  }
  __syncthreads();
  if (threadIdx.x == 0) timestamps[blockIdx.x] = clk() - from;
}
#define PUSHES(N) KERNEL push_rounds_##N(char* ping, char* pong, u64* s, int rounds, int own, u32 base) \
  { push_rounds<N>(ping, pong, s, rounds, own, base); }
PUSHES(1) PUSHES(8) PUSHES(16)
"""

ROUNDS = 100


def loopback(gpu: Gpu, recorder: Recorder) -> None:
    """Time from a push of one row to all slots of the own memory until a poller of all slots has it.

    Isolates: relaxed stores of 16 bytes at system scope, one into each slot, and polling loads of the same 16 bytes
    in each, as the exchange kernels push and poll, with one thread's worth of work and no sum; between two blocks a
    round is two pushes (``one_way`` is half of it), within a block it is one. Could mislead: one rank's time, so no
    peer is late and no link is crossed; thread answers thread, so no block waits for its slowest warp; the poller is
    already polling when the push begins and its loads share the way with the stores, which in a step are polled for
    longer or not yet; the kernels alternate between buffers, here lines are written again.
    """
    timestamps, rounds = gpu.zeros(4096), ROUNDS
    ping, pong = gpu.zeros(1 << 18), gpu.zeros(1 << 18)  # 2 MiB each

    def case(slots: int, blocks: int, threads: int, own: bool) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            readings = []
            grid = blocks if own else 2 * blocks
            ping.zero_()
            pong.zero_()
            base = 0
            for _ in range(recorder.replays // 4):
                args = (ping, pong, timestamps, rounds, int(own), base)
                gpu.launch(f"push_rounds_{slots}", grid, threads, args, smem=BLOCK_BYTES)
                base += rounds
                cycles = float(timestamps[:grid].float().mean().item())
                readings.append(cycles / rounds / (1 if own else 2))
            hz = Clocks(gpu).hz
            return {"one_way": ("us", [1e6 * one / hz for one in readings])}

        parameters = {"slots": slots, "blocks": blocks, "threads": threads, "same_block": own}
        recorder.record("looped_back_push", parameters, sampler)

    for own in (True, False):
        for slots in (1, 8, 16):
            case(slots, 8, 128, own)
    for own in (True, False):
        case(16, 56, 32, own)
        case(16, 8, 32, own)
