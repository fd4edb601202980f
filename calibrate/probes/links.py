"""NVLink between the GPUs of one host, measured: ``python -m k3sim.calibrate.probes.links OUT.json --gpus 2``.

Starts one process a GPU (under torchrun it is one of them). Slots lie in torch's symmetric memory, which peers reach by
unicast loads and stores; multicast stays off. The first two GPUs take part in what has two sides, all of them in
all-reduces. Each case is taken twice, as by ``recorder.py``, whose file format this is: every repetition, typed
metadata, a checksum, written after each case, and a run resumes with what the file lacks.

Primitives of the link are small CUDA kernels (``link_source.py``); exchanges are the project's kernels, beside cuBLAS
and NCCL in the same run. ``fit/link_fit.py`` says which machine value each primitive gives; times of kernels are shown
and never fitted.

The cards are measured as they are found: no clock, power or mode setting is touched.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from k3sim.calibrate.probes.clocks import clock_report
from k3sim.calibrate.probes.link_exchanges import all_reduces, projections
from k3sim.calibrate.probes.link_gpu import MESSAGES, LinkGpu, LinkRecorder, Readings
from k3sim.calibrate.probes.recorder import CannotResume
from k3sim.errors import UserError

MODULE = "k3sim.calibrate.probes.links"
FORMS = ("word", "16_bytes", "data_and_released_flag", "data_fence_flag")


def latencies(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """A value to the peer and back, halved, by what the value is; loads of the peer's memory; the same within a GPU.

    Isolates: one thread a side, nothing else on either GPU, so half a round is a store, its flight, and its being
    noticed by a thread that polls its own memory. Could mislead: both directions are taken to be alike; the SM of
    either side is where it happened to be; a kernel's many pollers wait for the slowest. Forms with a flag also hold
    the order between data and flag, those without need none. The chase is a round trip over the link and back of one
    load, its request included.
    """
    steps = 200
    lat = gpu.zeros(1024, "int32")

    def ping(form: int, local: bool) -> None:
        def sampler() -> Readings:
            halves = []
            for _ in range(max(4, recorder.replays // 10)):
                base = gpu.next_base(steps)
                if local or gpu.takes_part:
                    grid, target = (2, gpu.rank) if local else (1, gpu.peer)
                    args = (gpu.at(gpu.rank, 0), gpu.at(target, 0), lat, steps, int(gpu.rank == 0), form, base)
                    gpu.launch("link_ping", grid, 32, args, smem=180 * 1024)
                    gpu.torch.cuda.synchronize()
                halves.append(lat[20:steps].cpu().numpy() / 2)
            return {"one_way": ("cycle", halves)} if gpu.rank == 0 else {}

        recorder.record("link_hop", {"form": FORMS[form], "over": "l2" if local else "link"}, sampler)

    for local in (False, True):
        for form in range(len(FORMS)):
            ping(form, local)

    lines = (4 << 20) // 128
    # In the owner's L2 from here on: single loads took eighty chains to bring all of it in, each faster than the last.
    gpu.block.own[16 << 20 : 20 << 20].zero_()
    gpu.group.barrier()
    for over in ("link", "l2"):

        def chase(over: str = over) -> Readings:
            target, found = gpu.rank if over == "l2" else gpu.peer, []
            for number in range(recorder.replays):
                if gpu.rank == 0:
                    gpu.launch("link_chase", 1, 32, (gpu.at(target, 16 << 20), lat, 400, lines, 977 * number + 13))
                    found.append(int(lat[1].item()))
            return {"round_trip": ("cycle", found)} if gpu.rank == 0 else {}

        recorder.record("link_load", {"over": over, "region_mib": 4}, chase)


def exchanges(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """Both GPUs push to each other and poll, round after round: a hop with many pollers, as an all-reduce has.

    Isolates: a round is the push, its flight and its being noticed by all threads of a block; launches are outside.
    Could mislead: rounds follow one another without work between, so both sides are always in step; blocks do not
    wait for one another; the slots are of one peer, where an all-reduce polls those of several.
    """
    # With the first round an even number: the next launch begins in the buffer that nobody polls any more.
    timestamps, iters = gpu.zeros(4096), 199

    def case(blocks: int, threads: int, slots: int) -> None:
        def sampler() -> Readings:
            found = []
            for _ in range(max(10, recorder.replays // 4)):
                base = gpu.next_base(iters + 1)
                if gpu.takes_part:
                    args = (gpu.at(gpu.rank, 1 << 20), gpu.at(gpu.peer, 1 << 20), timestamps, iters, base)
                    gpu.launch(f"link_exchange_{slots}", blocks, threads, args)
                    gpu.torch.cuda.synchronize()
                found.append(float(timestamps[:blocks].max().item()))
            return {"round": ("cycle", found)} if gpu.rank == 0 else {}

        parameters = {"blocks": blocks, "threads": threads, "slots": slots, "bytes": 16 * blocks * threads * slots}
        recorder.record("link_exchange", parameters, sampler)

    for blocks, threads in ((1, 1), (1, 32), (1, 128), (8, 128), (32, 128)):
        for slots in (1,) if blocks == 1 else (1, 2, 4, 7):
            case(blocks, threads, slots)


def bandwidth(gpu: LinkGpu, recorder: LinkRecorder) -> None:
    """Stores to the peer by message size and number of SMs, one way and both ways; loads from it; torch's copy to it.

    Isolates: from the first block's start until every store has been performed at the peer, as a fence for the system
    tells. Could mislead: small messages are mostly that fence's way to the peer and back; a message of 64 MiB does not
    stay in the peer's L2, so its HBM is written too; both ways, the two sides are only roughly together.
    """
    timestamps = gpu.zeros(4096)

    def move(kernel: str, num_bytes: int, blocks: int, both: bool, probe: str) -> None:
        rounds = 16 if both else 1  # long against what the two sides are apart
        target = gpu.at(gpu.peer if gpu.takes_part else gpu.rank, MESSAGES)
        args = (target, ctypes.c_uint64(num_bytes // 16), rounds, timestamps)
        acts = gpu.rank == 0 or (both and gpu.rank == 1)

        def sampler() -> Readings:
            times = []
            gpu.group.barrier()
            for _ in range(recorder.replays // 2):
                if acts:
                    gpu.launch(kernel, blocks, 512, args)
                    gpu.torch.cuda.synchronize()
                    seen = timestamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
                    times.append(float(seen[:, 1].max() - seen[:, 0].min()) / rounds)
                if both:
                    gpu.group.barrier()
            gpu.group.barrier()
            if gpu.rank:
                return {}
            if num_bytes < 1 << 20:
                return {"time": ("us", [one / 1e3 for one in times])}
            return {"rate": ("B/s", [1e9 * num_bytes / one for one in times])}

        recorder.record(probe, {"bytes": num_bytes, "blocks": blocks, "both_ways": both}, sampler)

    sms = gpu.num_sms
    for kib in (4, 16, 64, 256, 1024, 4096, 16384, 65536):
        move("link_push", kib << 10, max(1, min(sms, kib // 8)), False, "link_push")
    for blocks in (1, 2, 4, 8, 16, 32, 64):
        move("link_push", 16 << 20, blocks, False, "link_push")
    move("link_push", 64 << 20, 2 * sms, False, "link_push")
    move("link_push", 64 << 20, sms, True, "link_push")
    for mib in (16, 64):
        move("link_pull", mib << 20, sms, False, "link_pull")
    move("link_pull", 64 << 20, 2 * sms, False, "link_pull")

    def copies() -> Readings:
        times = []
        if gpu.rank == 0:
            part = slice(MESSAGES, MESSAGES + (64 << 20))
            source, target = gpu.block.peers[0][part], gpu.block.peers[1][part]
            pairs = [
                [gpu.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(recorder.replays // 2)
            ]
            for begin, end in pairs:
                begin.record()
                target.copy_(source)
                end.record()
            gpu.torch.cuda.synchronize()
            times = [1e-3 * begin.elapsed_time(end) for begin, end in pairs]
        gpu.group.barrier()
        return {"rate": ("B/s", [(64 << 20) / one for one in times])} if gpu.rank == 0 else {}

    recorder.record("link_copy", {"bytes": 64 << 20}, copies)


PROBES: dict[str, Callable[[LinkGpu, LinkRecorder], None]] = {
    "clocks": clock_report,  # type: ignore[dict-item]
    "latencies": latencies,
    "exchanges": exchanges,
    "bandwidth": bandwidth,
    "all_reduces": all_reduces,
    "projections": projections,
}


def measure(out: Path, *, quick: bool = False, only: Sequence[str] = (), commit: str = "") -> None:
    """What each of the processes does. Raises UserError for an unknown probe or a file that cannot be resumed from."""
    check_probes(only)
    gpu = LinkGpu()
    if gpu.num_gpus < 2:
        raise UserError("gpus: got 1, accepted: 2 or more, between which there is a link")
    try:
        recorder = LinkRecorder(gpu, out, quick, commit=commit)
    except CannotResume as refusal:
        raise UserError(str(refusal)) from None
    for name in only or PROBES:
        PROBES[name](gpu, recorder)
        gpu.group.barrier()


def check_probes(only: Sequence[str]) -> None:
    for name in only:
        if name not in PROBES:
            raise UserError(f"unknown probe {name!r}; accepted: {', '.join(PROBES)}")


def main(arguments: Sequence[str] | None = None) -> int:
    from k3sim.kernels.multi_gpu.processes import check_gpus, run_processes

    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=None, help="processes to start; under torchrun leave it out")
    parser.add_argument("--quick", action="store_true", help="a tenth of the replays, to see that all probes run")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(PROBES)}")
    parser.add_argument("--commit", default="", help="of the source, for the file's head")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of all processes together")
    given = parser.parse_args(arguments)
    only = [one for one in given.only.split(",") if one]
    try:
        check_probes(only)
        if given.gpus is not None and "RANK" not in os.environ:
            if given.gpus < 2:
                raise UserError(f"gpus: got {given.gpus}, accepted: 2 or more, between which there is a link")
            check_gpus(given.gpus)
            words = [str(given.out), "--only", given.only, "--commit", given.commit, *["--quick"] * given.quick]
            return run_processes(MODULE, words, given.gpus, timeout_s=given.timeout_s)
        measure(given.out, quick=given.quick, only=only, commit=given.commit)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"k3sim: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
