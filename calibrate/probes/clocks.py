"""The SM clock against the timer that all SMs share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu

if TYPE_CHECKING:
    from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
KERNEL clock_edges(u64* out, int edges) {  // per block: SM, then (globaltimer, clock64) at its steps
  u64* mine = out + (u64)blockIdx.x * (2 * edges + 1);
  mine[0] = smid();
  for (int i = 0; i < edges; ++i) {
    u64 now, c = clk();
    while (clk() - c < 4000);  // apart, so that the steps also give the rate of the clock
    u64 before = gtime();
    do { c = clk(); now = gtime(); } while (now == before);
    mine[1 + 2 * i] = now;
    mine[2 + 2 * i] = c;
  }
}
"""



class Clocks:
    """Rate of the SM clock against %globaltimer, and the step of that timer.

    Clocks of different GPCs run apart by 1e-4, so a kernel timestamps its own SM's clock, and once, at its end, both
    timers. Steps of 32 ns are taken as if they were exact; readings are averaged over a graph's nodes.
    """

    def __init__(self, gpu: Gpu) -> None:
        import numpy

        edges, sms = 64, gpu.num_sms
        out = gpu.zeros(sms * (2 * edges + 1))
        for _ in range(3):  # the first ones bring the clock up
            gpu.launch("clock_edges", sms, 32, (out, edges), smem=BLOCK_BYTES)
        rows = out.cpu().numpy().reshape(sms, -1)
        times, clocks = rows[:, 1::2], rows[:, 2::2]
        self.origin_ns = int(times.min())
        self.step_ns = int(numpy.gcd.reduce(numpy.diff(times, axis=1).ravel()))
        self.rates = (clocks[:, -1] - clocks[:, 0]) / (times[:, -1] - times[:, 0]) * 1e9
        self.hz = float(numpy.median(self.rates))

    def us(self, clock: Any, end_clock: Any, end_ns: Any) -> Any:
        """Time of a clock timestamp on %globaltimer, from a later timestamp of both."""
        # Nanoseconds since 1970 leave a float 0.25 us: take off the origin before.
        return (end_ns - self.origin_ns) / 1e3 - (end_clock - clock) / self.hz * 1e6


def clock_report(gpu: Gpu, recorder: Recorder) -> None:
    """SM clock against %globaltimer, on every SM.

    Isolates: two pairs of timestamps far apart, nothing between. Could mislead: an idle card has not raised its clock
    (the first launches are thrown away), and a loaded one may lower it, which shows in each case's ``sm_clock_hz``.
    """
    def sampler() -> dict[str, tuple[str, Any]]:
        found = [Clocks(gpu) for _ in range(5)]
        return {
            "sm_clock": ("Hz", [c.rates for c in found]),
            "globaltimer_step": ("ns", [c.step_ns for c in found]),
        }

    recorder.record("clocks", {}, sampler)
