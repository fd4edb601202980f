"""A made-up decode step with the shape of a real one, for tests of what is drawn from a timeline.

Durations are invented: nothing here says how fast any machine is. Kernels of the main stream overlap by their
launch, as under programmatic dependent launch; shared experts run on a stream beside it; the counter adds up
to the kernels' bytes.
"""

from __future__ import annotations

from random import Random

from k3sim.sim.timeline.timeline import PS_PER_US, Counter, KernelRun, Phase, Span, Timeline

CAPACITY_BYTES_PER_US = 7_000_000
# stage, stream, HBM bytes, bytes sent, phase that reads
ATTENTION = {
    "kda": (
        ("attn_res", "main", 60_000, 0, Phase.WEIGHTS),
        ("kda.in_proj", "main", 46_104_576, 0, Phase.WEIGHTS),
        ("kda.f_b", "main", 196_608, 0, Phase.WEIGHTS),
        ("kda.decode", "main", 814_080, 0, Phase.KV_STATE),
        ("kda.o_proj", "main", 11_010_048, 215_040, Phase.WEIGHTS),
    ),
    "mla": (
        ("attn_res", "main", 60_000, 0, Phase.WEIGHTS),
        ("mla.qkv_a", "main", 30_277_632, 0, Phase.WEIGHTS),
        ("mla.gate", "aux", 11_010_048, 0, Phase.WEIGHTS),
        ("mla.q_b", "main", 3_538_944, 0, Phase.WEIGHTS),
        ("mla.decode", "main", 4_718_592, 0, Phase.KV_STATE),
        ("mla.o_proj", "main", 11_010_048, 215_040, Phase.WEIGHTS),
    ),
}
MOE = (
    ("attn_res", "main", 60_000, 0, Phase.WEIGHTS),
    ("moe.router", "main", 12_845_056, 0, Phase.WEIGHTS),
    ("moe.shared_gate_up", "shared", 11_010_048, 0, Phase.WEIGHTS),
    ("moe.latent_down", "main", 51_380_224, 0, Phase.WEIGHTS),
    ("moe.topk", "main", 3_584, 0, Phase.COMPUTE),
    ("moe.experts_up", "main", 11_698_176, 0, Phase.WEIGHTS),
    ("moe.shared_down", "shared", 5_505_024, 0, Phase.WEIGHTS),
    ("moe.experts_down", "main", 5_849_088, 0, Phase.WEIGHTS),
    ("moe.finalize", "main", 114_688, 0, Phase.COMPUTE),
    ("moe.tail_reduce", "main", 7_168, 107_520, Phase.COMPUTE),
    ("moe.latent_up", "main", 3_211_264, 26_880, Phase.WEIGHTS),
    ("moe.gather", "main", 14_336, 0, Phase.L2),
    ("prefetch.next", "prefetch", 2_000_000, 0, Phase.WEIGHTS),
    ("moe.residual", "main", 14_336, 0, Phase.COMPUTE),
)


def synthetic_timeline(*, num_ranks: int = 1, num_layers: int = 93, slowness: float = 1.0) -> Timeline:
    """``slowness`` scales every duration except reading."""
    kernels: list[KernelRun] = []
    counters: list[Counter] = []
    step_ps = 0
    for rank in range(num_ranks):
        random = Random(rank)  # another rank, another skew
        free_ps = {"main": 0, "aux": 0, "shared": 0, "prefetch": 0}
        last: dict[str, int] = {}
        for layer in range(num_layers):
            attention = "mla" if layer % 4 == 3 else "kda"
            for stage, stream, hbm_bytes, sent_bytes, reading in (*ATTENTION[attention], *MOE):
                start_ps = free_ps[stream] if stream == "main" else max(free_ps[stream], free_ps["main"])
                causes = tuple(dict.fromkeys(last[name] for name in (stream, "main") if name in last))
                kernel = KernelRun(
                    len(kernels), rank, stream, layer, f"{attention}+moe", stage, start_ps, causes=causes
                )
                share = 0.7 if stream == "main" else 0.15  # of the HBM rate
                read_ps = int(hbm_bytes / (share * CAPACITY_BYTES_PER_US) * PS_PER_US)
                now_ps = start_ps
                for phase, us in (
                    (Phase.RELEASE, 0.3),
                    (Phase.LAUNCH, 0.7),
                    (Phase.RAMP, 0.2),
                    (Phase.DEPENDENCY, 0.4),
                    (Phase.RAMP, 0.6),
                    (reading, -1.0),
                    (Phase.DEPENDENT_LOADS, 0.5),
                    (Phase.BARRIER, 0.3),
                    *([(Phase.SEND, 0.4), (Phase.PEERS, 1.6)] if sent_bytes else []),
                ):
                    duration_ps = (
                        read_ps if us < 0 else int(us * slowness * PS_PER_US * random.uniform(0.8, 1.2))
                    )
                    kernel.spans.append(Span(phase, now_ps, now_ps + duration_ps))
                    now_ps += duration_ps
                kernel.end_ps = now_ps
                kernel.hbm_bytes = hbm_bytes
                kernel.sent_bytes = sent_bytes
                # The next kernel of the stream starts while this one reduces.
                free_ps[stream] = now_ps - int(0.5 * slowness * PS_PER_US)
                last[stream] = kernel.index
                kernels.append(kernel)
        step_ps = max(step_ps, max(kernel.end_ps for kernel in kernels if kernel.rank == rank))
        counters.append(Counter(rank, "hbm", CAPACITY_BYTES_PER_US, _steps(kernels, rank)))
    return Timeline("gb300", num_ranks, tuple(range(num_ranks)), num_layers, kernels, counters, step_ps)


def _steps(kernels: list[KernelRun], rank: int) -> tuple[tuple[int, int], ...]:
    """The rate of one rank's HBM: each kernel reads evenly over its reading span, the sixth."""
    change_at_ps: dict[int, int] = {}
    for kernel in kernels:
        span = kernel.spans[5]
        if kernel.rank == rank and span.end_ps > span.start_ps:
            rate = kernel.hbm_bytes * PS_PER_US // (span.end_ps - span.start_ps)
            change_at_ps[span.start_ps] = change_at_ps.get(span.start_ps, 0) + rate
            change_at_ps[span.end_ps] = change_at_ps.get(span.end_ps, 0) - rate
    steps: list[tuple[int, int]] = []
    rate = 0
    for time_ps in sorted(change_at_ps):
        rate += change_at_ps[time_ps]
        steps.append((time_ps, rate))
    return tuple(steps)
