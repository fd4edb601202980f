"""Hardware primitives of one GPU, measured with small CUDA kernels: ``python -m k3sim.calibrate.probes OUT.json``.

Needs torch and numpy alone (torch brings ``cuda.bindings``, which compiles and launches), so that it runs from a
checkout on a machine on which nothing else is installed. One module a family of probes, each with its device code;
``gpu.py`` has what they share, ``recorder.py`` the file. Each case is taken twice, one complete run after the other;
the difference of their medians is the noise floor. Inside a block times are ``clock64`` of its SM; across SMs they are
``%globaltimer``, since the clocks of different GPCs drift.

The file is written anew after each case, with a checksum, and a run resumes with what it lacks. ``samples.py`` reads
it and ``fit.py`` says which machine value each case gives.

The card is measured as it is found: no clock, power or mode setting is touched.
"""

from __future__ import annotations

from collections.abc import Callable

from k3sim.calibrate.probes import (
    boundaries,
    chained,
    clocks,
    cold_code,
    copies,
    hbm,
    l2,
    last_block,
    latencies,
    loopback,
    mxfp4,
    prefetches,
    product_chains,
    register_loads,
    residency,
    sharing,
    split_products,
    synchronisation,
    tiny,
    uneven,
)
from k3sim.calibrate.probes.clocks import clock_report
from k3sim.calibrate.probes.gpu import PRELUDE, Gpu, compile_probes
from k3sim.calibrate.probes.recorder import MOST_KEPT, CannotResume, Recorder, checksum

__all__ = [
    "MOST_KEPT", "PROBES", "SOURCE", "CannotResume", "Gpu", "Recorder", "checksum", "clock_report", "compile_probes",
]  # fmt: skip

_FAMILIES = (
    hbm, latencies, l2, clocks, boundaries, chained, synchronisation, tiny,
    copies, residency, last_block, prefetches, sharing, mxfp4, loopback, split_products,
    register_loads, product_chains, cold_code, uneven,
)  # fmt: skip
#: The program of all probes.
SOURCE = PRELUDE + "".join(one.SOURCE for one in _FAMILIES)

PROBES: dict[str, Callable[[Gpu, Recorder], None]] = {
    "clocks": clocks.clock_report,
    "tiny": tiny.tiny_kernels,
    "boundaries": boundaries.boundaries,
    "joins": boundaries.joins,
    "periods": boundaries.node_periods,
    "chained": chained.chained,
    "same_input": chained.same_input,
    "residency": residency.residency,
    "three_blocks": residency.three_blocks,
    "carve_out_inheritance": residency.carve_out_inheritance,
    "sync": synchronisation.synchronisation,
    "last_block": last_block.last_block,
    "latencies": latencies.latencies,
    "beside_stream": latencies.beside_stream,
    "hbm": hbm.hbm_streams,
    "copies": copies.copies,
    "sharing": sharing.sharing,
    "l2": l2.l2,
    "prefetches": prefetches.prefetches,
    "prefetch_gain": prefetches.prefetch_gain,
    "loopback": loopback.loopback,
    "mxfp4": mxfp4.mxfp4,
    "split_products": split_products.split_products,
    "register_loads": register_loads.register_loads,
    "issue_burst": register_loads.issue_burst,
    "carve_out_persistence": register_loads.carve_out_persistence,
    "uneven_ends": uneven.uneven_ends,
    "hbm_contention": uneven.hbm_contention,
    "product_chains": product_chains.product_chains,
    "cold_code": cold_code.cold_code,
}
