"""The engine: runs a program on a machine and returns the timeline.

It builds the GPU of every simulated rank and the fabric between them, and gives each stream of each rank a launch
queue, which starts a process for every kernel (``kernel_process.py``). What a kernel takes is the components' to say.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from k3sim.kernels.costs import work_of
from k3sim.kernels.work import Work
from k3sim.model.program import Call, Program
from k3sim.sim.clock import Clock, Moment, without_collection
from k3sim.sim.components.fabric import Fabric
from k3sim.sim.components.launch_queue import Admission, KernelState
from k3sim.sim.components.skew import Paces, Skew
from k3sim.sim.gpu import Gpu
from k3sim.sim.kernel_process import KernelProcess
from k3sim.sim.machine import Machine
from k3sim.sim.timeline.timeline import KernelRun, Timeline


@without_collection()
def simulate(
    program: Program, machine: Machine, *, all_ranks: bool = False, skew: Skew = Skew.OFF, seed: int = 0, draw: int = 0
) -> Timeline:
    """Run ``program`` on every rank (``all_ranks``) or on one that stands for all; same input, same timeline.

    ``draw``: of the footprints that are not published (``Work.drawn``).
    Raises UserError when a block of a kernel does not fit on an SM of the machine.
    """
    if skew is Skew.SAMPLED:
        all_ranks = True
    env = Clock()
    ranks = tuple(range(program.num_ranks)) if all_ranks else (0,)
    fabric = Fabric(env, machine, ranks)
    how = {"counts_code": program.path.kernel_set == "own", "averages_skew": skew is Skew.EXPECTED}
    gpus = {rank: Gpu(env, machine, fabric, rank, **how) for rank in ranks}
    works = [
        None if call.launch == "host" else work_of(call.operator, call.weights, call.shape, draw=draw)
        for call in program.calls
    ]
    paces = Paces(machine.rank_skew_relative_sd, seed) if skew is Skew.SAMPLED else None
    states = _states(env, program, ranks)

    def start(gpu: Gpu, call: Call, previous: KernelState | None, admission: Admission) -> None:
        work: Work | None = works[call.index]
        if work is None:
            env.start(gpu.launches.run_host(env, call, states[gpu.rank][call.index], admission))
            return
        process = KernelProcess(
            env=env,
            gpu=gpu,
            calls=program.calls,
            states=states[gpu.rank],
            call=call,
            state=states[gpu.rank][call.index],
            work=work,
            previous=previous,
            admission=admission,
            pace=1.0 if paces is None else paces.pace(gpu.rank, call.index),
        )
        env.start(process.run())

    for rank, gpu in gpus.items():
        streams: dict[str, list[Call]] = defaultdict(list)
        for call in program.calls:
            streams[call.stream].append(call)
        for calls in streams.values():
            env.start(gpu.launches.run_stream(calls, states[rank], partial(start, gpu)))
    env.run_all()
    return _timeline(program, machine, gpus, fabric, [state.run for rank in ranks for state in states[rank].values()])


def _states(env: Clock, program: Program, ranks: tuple[int, ...]) -> dict[int, dict[int, KernelState]]:
    """State of every kernel, by rank and index of the call; indices of records count through all ranks."""
    num_calls = len(program.calls)
    return {
        rank: {
            call.index: KernelState(
                KernelRun(
                    index=position * num_calls + call.index,
                    rank=rank,
                    stream=call.stream,
                    layer=call.layer,
                    kind=call.kind,
                    stage=call.stage,
                ),
                Moment(env),
                Moment(env),
            )
            for call in program.calls
        }
        for position, rank in enumerate(ranks)
    }


def _timeline(
    program: Program, machine: Machine, gpus: dict[int, Gpu], fabric: Fabric, runs: list[KernelRun]
) -> Timeline:
    stuck = [run.stage for run in runs if run.end_ps < 0]
    assert not stuck, f"kernels never finished: {stuck[:5]}"
    counters = [counter for rank, gpu in gpus.items() for counter in gpu.memory.counters(rank)]
    return Timeline(
        machine=machine.name,
        num_ranks=program.num_ranks,
        ranks=tuple(gpus),
        num_layers=len(program.layers),
        kernels=runs,
        counters=counters + fabric.counters(),
        step_ps=max(run.end_ps for run in runs),
    )
