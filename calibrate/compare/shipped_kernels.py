"""Readings of the shipped kernels on one H200 (``k3sim kernels bench``) beside what their costs say.

A reading is a chain of calls on rotated copies in one CUDA graph, with programmatic dependent launch between them;
pairs that push and poll are looped back. ``data/h200-kernels*.json`` hold the samples. cuBLAS's are those of its peers
there, in the same chain on plain graph edges. No time of a kernel enters a machine value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from k3sim.calibrate.compare.case import ComparedCase, with_bounds
from k3sim.calibrate.compare.chain import ChainedKernel, chain_us, chain_with_errors
from k3sim.calibrate.compare.jobs import run_jobs
from k3sim.calibrate.compare.shipped_chains import chain_of, kda
from k3sim.sim.components.skew import Skew
from k3sim.sim.machine import Machine
from k3sim.sim.profile import load_machine
from k3sim.sim.progress import OnDone, ignore_progress
from k3sim.sim.whatif import emulated_ranks, loopback_fabric, of_card

MEASURED = "h200"  # the machine of all readings
DATA = Path(__file__).parents[1] / "data"
# Kernels that were changed after the first was measured, on another H200; those whose loads have L1 since, on a third.
# The later reading counts.
READINGS = tuple(DATA / f"h200-kernels{name}.json" for name in ("", "-changed", "-l1"))
KDA_READINGS = DATA / "h200-kda-attn-res.json"
#: Rows that only that file has, and the name of their timing.
MANY_ROWS = ((32, "kda h12 b32 c0/256 fp32 weights hot pdl1"), (128, "kda h12 b128 c0/256 fp32 weights hot pdl1"))


@dataclass(frozen=True, kw_only=True)
class MeasuredChain:
    """A chain as it was measured, on the card and among the peers that it had."""

    label: str
    measured_us: float  # of a round
    kernels: tuple[ChainedKernel, ...]
    source: str
    read_bytes_per_s: float | None = None  # of the card in the same run
    gpus: int = 1  # that exchange; one is looped back
    ranks: int = 16  # of an exchange, which the GPUs stand for

    def predicted_us(self, machine: Machine) -> float:
        """A round on ``machine``; several GPUs are late by chance, as in a step."""
        if self.gpus > 1:
            over = emulated_ranks(machine, self.gpus, self.ranks)
            return chain_us(self.kernels, over, group_size=self.ranks, skew=Skew.EXPECTED)
        card = machine if self.read_bytes_per_s is None else of_card(machine, self.read_bytes_per_s)
        return chain_us(self.kernels, loopback_fabric(card))

    def compared(self, machines: Sequence[Machine], seed: int = 0) -> ComparedCase:
        """In microseconds, on a profile's machine, which is followed by machines drawn from it or by none.

        ``seed``: of the errors of kernels that go with drawn machines.
        """
        values = [self.predicted_us(one) for one in machines]
        predicted, low, high = with_bounds(chain_with_errors(self.kernels, values, machines[0].title, seed))
        return ComparedCase(
            kind="kernel",
            label=self.label,
            measured=self.measured_us,
            predicted=predicted,
            low=low,
            high=high,
            unit="us",
            source=self.source,
            hardware=MEASURED,
        )


def compare_chains(
    chains: Sequence[MeasuredChain], *, jobs: int | None = None, on_done: OnDone = ignore_progress
) -> list[ComparedCase]:
    """``MeasuredChain.compared`` of each, by the shipped profile, in several processes."""
    machines = (load_machine(MEASURED),)
    return list(run_jobs([partial(one.compared, machines) for one in chains], jobs=jobs, on_done=on_done))


@cache
def readings() -> tuple[dict[str, Any], ...]:
    """Timings, each with its ``source`` and the read rate of its card.

    Of two of one case the later file's.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for file in READINGS:
        document = json.loads(file.read_text(encoding="utf-8"))
        rate = document["environment"]["read_bytes_per_s"]
        for timing in document["timings"]:
            source = f"calibrate/data/{file.name}"
            found[timing["operator"], timing["case"]] = {**timing, "source": source, "read_bytes_per_s": rate}
    return tuple(found.values())


def measured_chains() -> list[MeasuredChain]:
    """Every stored chain that has costs, and behind it cuBLAS on the same shape where it was measured."""
    return [one for timing in readings() for one in chains_of(timing)]


def chains_of(timing: dict[str, Any]) -> list[MeasuredChain]:
    """What a timing of ``k3sim kernels bench`` measured, with its ``source`` and ``read_bytes_per_s``; none without
    costs.
    """
    return [*_shipped(timing), *_cublas(timing)]


def _shipped(timing: dict[str, Any]) -> Iterator[MeasuredChain]:
    kernels = chain_of(timing["operator"], timing["case"])
    if kernels is not None:
        yield MeasuredChain(
            label=f"{timing['operator']} {timing['case']}",
            measured_us=timing["median_us"],
            kernels=kernels,
            source=f"{timing['source']}, {timing['date'][:10]}",
            read_bytes_per_s=timing["read_bytes_per_s"],
        )


def _cublas(timing: dict[str, Any]) -> Iterator[MeasuredChain]:
    if timing["operator"] != "skinny_gemv":
        return
    for one in _shipped(timing):
        for peer in timing["peers"]:
            if peer["name"] == "cuBLAS" and "median_us" in peer:
                yield replace(
                    one,
                    label=f"cuBLAS {timing['case']}",
                    measured_us=peer["median_us"],
                    kernels=(replace(one.kernels[0], operator="cublas.gemm", launch="graph", trigger="end"),),
                )


def all_chains() -> list[MeasuredChain]:
    """Every chain that ``k3sim validate --own`` compares: shipped kernels, then cuBLAS."""
    return [*shipped_chains(), *_cublas_chains()]


def shipped_chains() -> list[MeasuredChain]:
    """Every reading of the shipped kernels whose calls the simulator has a cost for."""
    return [*(one for timing in readings() for one in _shipped(timing)), *kda_of_many_rows()]


def kda_of_many_rows() -> list[MeasuredChain]:
    """KDA at the rows that only its own file has."""
    return [
        MeasuredChain(
            label=f"kda_decode 12 heads, {num_rows} rows",
            measured_us=_kda_median_us(name),
            kernels=(kda(12, num_rows),),
            source=f"calibrate/data/{KDA_READINGS.name}, 2026-11-29",
        )
        for num_rows, name in MANY_ROWS
    ]


def _cublas_chains() -> list[MeasuredChain]:
    return [one for timing in readings() for one in _cublas(timing)]


def shipped_kernel_cases(*, jobs: int | None = None, on_done: OnDone = ignore_progress) -> list[ComparedCase]:
    """``shipped_chains`` as compared, in microseconds a round of the chain, no intervals."""
    return compare_chains(shipped_chains(), jobs=jobs, on_done=on_done)


def _kda_median_us(name: str) -> float:
    timings = json.loads(KDA_READINGS.read_text(encoding="utf-8"))["timings"]
    return float(next(timing["median_us"] for timing in timings if timing["name"] == name))


def cublas_cases(*, jobs: int | None = None, on_done: OnDone = ignore_progress) -> list[ComparedCase]:
    """cuBLAS on the same shapes, on plain graph edges."""
    return compare_chains(_cublas_chains(), jobs=jobs, on_done=on_done)
