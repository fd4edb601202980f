"""What a measured decode step is asked for, and the checked case that the options stand for.

Everything here is decided without a GPU, so that a wrong option is refused before minutes of building.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture
from k3sim.model.config_file import load_architecture
from k3sim.model.layout import KV_DTYPE_BYTES, Layout, Workload, check_layout, check_workload
from k3sim.model.paths import find_path
from k3sim.model.paths.own import check_own
from k3sim.model.program import Program, build_program
from k3sim.model.step import Path as ExecutionPath

MIN_REPLAYS = 20
WARM_UP_REPLAYS = 20


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """What is run; the names are those of the command line."""

    path: str = "fused"
    with_switches: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    tp: int = 16
    layers: int | None = None
    concurrency: int = 1
    context: int = 8192
    kv_dtype: str = "fp8"
    replays: int = 200
    seed: int = 0
    profile: bool = True
    loop_back: bool = False  # under torchrun, too, each rank by itself
    timestamps: bool = False  # kernels record when their blocks ran, which makes the step some per cent longer
    timestamps_of: tuple[str, ...] = ()  # only those of these families

    def command(self) -> str:
        """The command line that repeats it."""
        defaults, words = DecodeOptions(), ["k3sim", "decode"]
        for name in ("path", "tp", "layers", "concurrency", "context", "replays", "seed"):
            if getattr(self, name) != getattr(defaults, name):
                words += [f"--{name}", str(getattr(self, name))]
        if self.kv_dtype != defaults.kv_dtype:
            words += ["--kv-dtype", self.kv_dtype]
        words += [word for switch in self.with_switches for word in ("--with", switch)]
        words += [word for switch in self.without for word in ("--without", switch)]
        words += ["--loop-back"] * self.loop_back + ["--timestamps"] * self.timestamps
        for family in self.timestamps_of:
            words += ["--timestamps-of", family]
        return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checked question: what ``DecodeOptions`` stand for."""

    options: DecodeOptions
    architecture: Architecture
    layout: Layout
    workload: Workload
    path: ExecutionPath
    program: Program

    @property
    def max_tokens(self) -> int:
        """Rows of the cache: the replays grow the context around the one asked for."""
        return self.options.context + self.options.replays + 2 * WARM_UP_REPLAYS + 64

    @property
    def first_length(self) -> int:
        """Cached rows of the first timed replay, so that the mean over all of them is the context asked for."""
        return max(1, self.options.context - self.options.replays // 2)


def case_of(options: DecodeOptions) -> Case:
    """Check everything that needs no GPU. Raises UserError."""
    from k3sim.kernels.device.timestamps import checked
    from k3sim.kernels.multi_gpu.symmetric import check_standing
    from k3sim.model.subset import subset

    checked(options.timestamps_of)
    architecture = load_architecture()
    architecture = subset(architecture, architecture.num_layers if options.layers is None else options.layers)
    path = find_path(
        options.path, with_switches=options.with_switches, without=options.without, kernel_set="own"
    )
    layout = Layout(tp=options.tp)
    check_layout(architecture, layout)
    check_own(architecture, layout, options.concurrency)
    check_standing(options.tp, exchanging_gpus(options))
    if options.kv_dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV cache type {options.kv_dtype!r}; accepted: {', '.join(KV_DTYPE_BYTES)}")
    workload = Workload(concurrency=options.concurrency, context=options.context, kv_dtype=options.kv_dtype)  # type: ignore[arg-type]
    check_workload(architecture, workload)
    if not MIN_REPLAYS <= options.replays <= 100_000:
        raise UserError(f"replays={options.replays}; {MIN_REPLAYS} to 100000 are accepted")
    if not 0 <= options.seed < 2**31:
        raise UserError(f"seed is {options.seed}; accepted: 0 to {2**31 - 1}")
    return Case(
        options=options,
        architecture=architecture,
        layout=layout,
        workload=workload,
        path=path,
        program=build_program(architecture, layout, workload, path),
    )


def num_processes() -> int:
    """Processes that run together, one a GPU: what torchrun sets, else 1. Raises UserError for what is no number."""
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdigit() or int(given) < 1:
        raise UserError(f"WORLD_SIZE is {given!r}; accepted is a number of processes above 0")
    return int(given)


def exchanging_gpus(options: DecodeOptions) -> int:
    """GPUs whose ranks exchange with one another."""
    return 1 if options.loop_back else num_processes()
