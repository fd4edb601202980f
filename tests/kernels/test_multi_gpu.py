"""Hand-over kernels between GPUs: which GPU stands for which rank, the processes; on GPUs, the check itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from k3sim.errors import UserError
from k3sim.kernels.multi_gpu import processes
from k3sim.kernels.multi_gpu.__main__ import main
from k3sim.kernels.multi_gpu.check import check_options, write_rows
from k3sim.kernels.multi_gpu.compared import Compared
from k3sim.kernels.multi_gpu.symmetric import check_standing, landing, sender

STANDING = [(ranks, gpus) for ranks in (1, 2, 4, 8, 16) for gpus in (1, 2, 4, 8, 16) if ranks % gpus == 0]


@pytest.mark.parametrize(("num_ranks", "num_gpus"), STANDING)
def test_every_slot_of_every_gpu_is_filled_once(num_ranks: int, num_gpus: int) -> None:
    filled: dict[tuple[int, int], int] = {}
    for rank in range(num_gpus):
        over_links = 0
        for peer in range(num_ranks):
            gpu, slot = landing(peer, rank=rank, num_gpus=num_gpus)
            assert gpu == peer % num_gpus
            assert sender(slot, num_gpus) == rank
            assert (gpu, slot) not in filled
            filled[gpu, slot] = rank
            over_links += gpu != rank
        assert over_links == num_ranks - num_ranks // num_gpus
    assert len(filled) == num_ranks * num_gpus


def test_all_gpus_exchange_plainly_and_one_loops_back() -> None:
    assert [landing(peer, rank=3, num_gpus=8) for peer in range(8)] == [(peer, 3) for peer in range(8)]
    assert [landing(peer, rank=0, num_gpus=1) for peer in range(8)] == [(0, peer) for peer in range(8)]


def test_gpus_must_divide_the_ranks() -> None:
    with pytest.raises(UserError, match="processes: got 3, accepted with tp=8: 1, 2, 4, 8"):
        check_standing(8, 3)
    with pytest.raises(UserError, match="processes: got 16, accepted with ranks=8"):
        check_standing(8, 16, "ranks")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(operators=["skinny_gemv"]), "unknown operator 'skinny_gemv'"),
        (dict(ranks=3), "ranks: got 3, accepted: 1, 2, 4, 8, 16"),
        (dict(ranks=8, num_gpus=3), "processes: got 3"),
        (dict(num_replays=0), "replays: got 0, accepted: 1 or more"),
    ],
)
def test_what_cannot_be_checked_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_options(**{"operators": [], "ranks": None, "num_gpus": 2, "num_replays": 10, **given})  # type: ignore[arg-type]


def test_more_gpus_than_there_are_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["--gpus", "64"]) == 2
    written = capsys.readouterr().err
    assert written.startswith("k3sim: gpus: got 64, accepted: up to ")
    assert written.count("\n") == 1


def child(tmp_path, monkeypatch: pytest.MonkeyPatch, text: str) -> str:  # type: ignore[no-untyped-def]
    (tmp_path / "child_of_a_test.py").write_text(text)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return "child_of_a_test"


def test_each_process_knows_its_place(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    module = child(
        tmp_path,
        monkeypatch,
        "import os, sys, pathlib\n"
        "one = os.environ\n"
        "assert one['TORCH_SYMM_MEM_DISABLE_MULTICAST'] == '1' and one['NCCL_NVLS_ENABLE'] == '0'\n"
        "pathlib.Path(sys.argv[1], one['RANK']).write_text(one['WORLD_SIZE'] + one['LOCAL_RANK'])\n",
    )
    assert processes.run_processes(module, [str(tmp_path)], 3, timeout_s=60) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["30", "31", "32"]


def test_a_hanging_process_is_stopped(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    wakes = "import pathlib, sys, time\ntime.sleep(60)\npathlib.Path(sys.argv[1], 'woke').touch()\n"
    module = child(tmp_path, monkeypatch, wakes)
    assert processes.run_processes(module, [str(tmp_path)], 2, timeout_s=1.0) == processes.TIMED_OUT
    assert not (tmp_path / "woke").exists()


def test_a_process_that_fails_ends_the_others(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    module = child(
        tmp_path, monkeypatch, "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)\n"
    )
    assert processes.run_processes(module, [], 2, timeout_s=50) == 3


def test_rows_are_written_whole(tmp_path) -> None:  # type: ignore[no-untyped-def]
    import json

    row = Compared(
        operator="lse_merge", case="a case", gpus=2, ranks=8, verdicts=("fine",), between_gpus=0,
        replays={"close": 10}, unequal={"close": 1}, seconds=1.0, reason="close: 1 results differ",
    )  # fmt: skip
    write_rows([row], tmp_path / "checks.json", {"gpu": "none"})
    (found,) = json.loads((tmp_path / "checks.json").read_text())["checks"]
    assert found["ok"] is False
    assert found["unequal"] == {"close": 1}
    assert "unequal: close 1 of 10 replays" in row.line
    assert "FAILED" in row.line


def num_gpus() -> int:
    torch = pytest.importorskip("torch")
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("operator", ["proj_allreduce", "router_topk", "latent_tail", "lse_merge", "engine"])
def test_two_gpus_agree(operator: str, ranks: int) -> None:
    if num_gpus() < 2:
        pytest.skip("needs two GPUs")
    command = [
        sys.executable, "-m", "k3sim.kernels.multi_gpu", operator, "--gpus", "2", "--ranks", str(ranks), "--replays",
        "200", "--timeout-s", "120",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["proj_allreduce", "router_topk", "latent_tail", "lse_merge", "engine"])
def test_one_gpu_that_stands_for_eight_ranks(operator: str) -> None:
    command = [
        sys.executable, "-m", "k3sim.kernels.multi_gpu", operator, "--gpus", "1", "--ranks", "8", "--replays", "200",
        "--timeout-s", "120",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
