"""What L2 holds: least recently used replacement, inverted over what traffic left of regions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from k3sim.calibrate.fit.fitted import Fitted
from k3sim.calibrate.fit.statements import MIB, Case, Reader, Undetermined
from k3sim.sim.intervals import quantiles

L2_NOTE = (
    "Of regions of 8 to 40 MiB that all SMs had read, what was left after other traffic, by least-recently-used "
    "replacement (least squares over all cases, whole MiB). Low: one region size left out at a time; high: the largest "
    "region that is read at L2 speed when each SM returns to its own part."
)
Survival = tuple[str, float, float, float]  # case, region and traffic in bytes, share that was left


def survivals(read: Reader) -> list[Survival]:
    return [
        (one.label, one.parameters["region_mib"] * MIB, one.parameters["streamed_mib"] * MIB, value)
        for one, value in read.all("l2_survival", "kept", evict_first=False)
    ]


def kept_share(capacity: float, region: float, traffic: float) -> float:
    """What least-recently-used replacement leaves of a region (sim/components/memory.py)."""
    return min(1.0, max(0.0, (capacity - traffic) / region))


def fit_capacity(cases: Sequence[Survival]) -> float:
    """Capacity in bytes, by least squares over the shares that were left."""
    from scipy.optimize import least_squares

    def residuals(capacity_mib: Any) -> list[float]:
        return [kept_share(float(capacity_mib[0]) * MIB, region, traffic) - kept for _, region, traffic, kept in cases]

    # The sum of squares has kinks: begin from the best of a coarse sweep.
    start = min(range(4, 257, 2), key=lambda mib: sum(one * one for one in residuals([mib])))
    found = least_squares(residuals, [float(start)], bounds=([1.0], [1024.0]), diff_step=1e-3)
    return float(found.x[0]) * MIB


def l2_size(read: Reader, readers: Sequence[Reader], l2_bytes_per_s: float) -> Fitted:
    cases = survivals(read)
    partly = [one for one in cases if 0.1 < one[3] < 0.9]
    if len(partly) < 3:
        # Shares of all or nothing bound the capacity and do not fix it.
        raise Undetermined(f"{len(partly)} stable cases of l2_survival keep part of a region; accepted are 3 or more")
    capacity = fit_capacity(cases)
    regions = sorted({one[1] for one in cases})
    subsets = [[one for one in cases if one[1] != region] for region in regions] if len(regions) > 1 else []
    others = [fit_capacity(subset) for subset in subsets]
    draws = sorted(fit_capacity(survivals(one)) for one in readers[:40])
    statistical = quantiles(draws)
    whole = round(capacity / MIB) * MIB
    shown = [Case(label=f"{label} ({share:.2f} left)", value=capacity, central=True) for label, _, _, share in partly]
    errors = [
        abs(kept_share(other, region, traffic) - kept)
        for size, other in zip(regions, others, strict=False)
        for _, region, traffic, kept in cases
        if region == size
    ]
    own_parts = [
        one.parameters["region_bytes"]
        for one, value in read.all("l2_read", "read_rate", tiles_change_sm=False)
        if value > 0.95 * l2_bytes_per_s
    ]
    bounds = [whole, *statistical, *others]
    return Fitted(
        field="l2_effective_bytes",
        value=whole,
        low=math.floor(min(bounds) / MIB) * MIB,
        high=max([math.ceil(max(bounds) / MIB) * MIB, *own_parts]),
        statistical=statistical,
        cases=tuple(shown),
        note=L2_NOTE,
        how="joint",
        left_out_error=max(errors, default=None),
    )
