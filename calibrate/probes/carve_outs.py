"""When an SM divides its memory anew between L1 and shared memory."""

from __future__ import annotations

from typing import Any

from k3sim.calibrate.probes.clocks import Clocks
from k3sim.calibrate.probes.gpu import Gpu
from k3sim.calibrate.probes.recorder import Recorder

SOURCE = r"""
// Block b holds its SM for `spin` cycles and b times `step` more; the dependent kernel is let in when block 0 ends.
DEV void hold_for(u64* stamps, int spin, int step, int last) {
  u64 t0 = clk(), cycles = spin + (u64)step * blockIdx.x;
  if (blockIdx.x) pdl_trigger();
  else cycles = last ? last : spin;
  while (clk() - t0 < cycles);
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 *s = stamps + 4 * blockIdx.x;
    s[0] = t0; s[1] = clk(); s[2] = smid();
  }
  pdl_trigger();
}
// Copies: what share of an SM's memory a kernel wants as shared memory is a setting of the kernel.
KERNEL hold_first(u64* s, int spin, int step, int last) { hold_for(s, spin, step, last); }
KERNEL hold_second(u64* s, int spin, int step, int last) { pdl_trigger(); hold_for(s, spin, step, last); }
KERNEL hold_third(u64* s, int spin, int step, int last) { hold_for(s, spin, step, last); }
"""

SPIN, STEP = 10_000, 40  # cycles: the first block ends after 5 us, the last one 2.6 us later
LET_IN = SPIN + 60 * STEP  # with the launch after it, more than half of the SMs are idle by then
BESIDE = 30_000
SHORT_US, LONG_US = 0.4, 1.2


def carve_outs(gpu: Gpu, recorder: Recorder) -> None:
    """Whether an SM's memory is divided anew for a kernel that wants another share of it, by how long it was idle.

    A first kernel with one carve-out ends on one SM after the other; a second one with another comes to all of them at
    once and stays; a third one finds room beside it only with the one division. ``hold``: the idle time that parts the
    SMs that were divided anew from those that were not, where ``sorted`` is the share of SMs that it sorts rightly;
    ``anew_short``, ``anew_long``: the share divided anew of those idle below 0.4 us and above 1.2 us;
    ``entry_after_end``: from the first kernel's end to the second's entry where it was awaited (median).

    Isolates: nothing is read; blocks are one an SM, by shared memory; idle time is on the SM's own clock. Could
    mislead: that the second comes to all SMs at once leaves open whether its launch or its block's arrival counts;
    what sizes the driver makes of percentages is inferred from what fits (60 becomes 164 KB).
    """
    import numpy

    sms = gpu.num_sms
    first, second, third = (gpu.zeros(4 * sms) for _ in range(3))

    def case(before: int, after: int, smem_kb: tuple[int, int, int], *, fits_only_if_anew: bool) -> None:
        def body() -> None:
            a, b, c = (one << 10 for one in smem_kb)
            gpu.launch("hold_first", sms, 256, (first, SPIN, STEP, LET_IN), smem=a, carve_out=before)
            gpu.launch("hold_second", sms, 256, (second, BESIDE, 0, 0), smem=b, pdl=True, carve_out=after)
            gpu.launch("hold_third", sms, 256, (third, SPIN // 4, 0, 0), smem=c, pdl=True, carve_out=after)

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            hz = Clocks(gpu).hz
            found: dict[str, list[float]] = {
                name: [] for name in ("hold", "sorted", "anew_short", "anew_long", "entry_after_end")
            }
            gpu.replay(graph)
            for _ in range(recorder.replays // 4):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = [one.cpu().numpy().reshape(sms, 4) for one in (first, second, third)]
                of_sm = [{int(row[2]): row for row in one} for one in rows]
                shared = sorted(set(of_sm[0]) & set(of_sm[1]))
                idle = numpy.array([float(of_sm[1][sm][0] - of_sm[0][sm][1]) for sm in shared]) / hz * 1e6
                beside = numpy.zeros(len(shared), dtype=bool)
                for at, sm in enumerate(shared):
                    begun = rows[2][rows[2][:, 2] == sm, 0]
                    beside[at] = bool((begun < of_sm[1][sm][1]).any())
                anew = beside == fits_only_if_anew
                edges = numpy.concatenate(([0.0], numpy.sort(idle)))
                right = [float(((idle > edge) == anew).mean()) for edge in edges]
                best = int(numpy.argmax(right))
                above = edges[best + 1] if best + 1 < len(edges) else edges[best]
                found["hold"].append(float(edges[best] + above) / 2)
                found["sorted"].append(right[best])
                short = idle < SHORT_US
                for name, those in (("anew_short", short), ("anew_long", idle > LONG_US)):
                    found[name].append(float(anew[those].mean()) if those.any() else 0.0)
                found["entry_after_end"].append(float(numpy.median(idle[short])) if short.any() else 0.0)
            units = {"hold": "us", "entry_after_end": "us"}
            return {name: (units.get(name, "1"), values) for name, values in found.items()}

        recorder.record(
            "carve_outs", {"before": before, "after": after, "shared_memory": [kb << 10 for kb in smem_kb]}, sampler
        )

    case(60, 100, (120, 142, 74), fits_only_if_anew=True)
    case(60, 100, (120, 100, 74), fits_only_if_anew=True)
    case(100, 60, (180, 60, 120), fits_only_if_anew=False)
    # The second block does not fit into what the first one left.
    case(60, 100, (120, 168, 50), fits_only_if_anew=True)
