"""The same question and seed give the same bytes, in any process; another seed of sampled skew another result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("timeline.json", "stages.csv", "timeline.pftrace", "timeline.html")


@pytest.fixture
def small(tmp_path: Path) -> str:
    """The model's first six layers: all ranks of a whole step take a fraction of a second."""
    config = json.loads((ROOT / "model" / "data" / "kimi-k3.json").read_text())
    text = config["text_config"]
    text["num_hidden_layers"] = 6
    for name in ("kda_layers", "full_attn_layers"):
        text["linear_attn_config"][name] = [layer for layer in text["linear_attn_config"][name] if layer <= 6]
    path = tmp_path / "small.json"
    path.write_text(json.dumps(config))
    return str(path)


def run(folder: Path, hash_seed: str, *options: str) -> dict[str, bytes]:
    """Files and standard output of a fresh process, which sees the same relative path in every folder."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "k3sim", "timeline", "--json", "--out", "out", *options],
        cwd=folder, capture_output=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return {"stdout": done.stdout, **{name: (folder / "out" / name).read_bytes() for name in NAMES}}


@pytest.mark.parametrize("options", ["", "--tp 4 --skew --seed 7 --concurrency 3 --path megakernel"])
def test_two_runs_give_the_same_bytes(tmp_path: Path, small: str, options: str) -> None:
    first = run(tmp_path / "a", "1", *options.split(), *(["--model", small] if options else []))
    second = run(tmp_path / "b", "2", *options.split(), *(["--model", small] if options else []))
    for name, content in first.items():
        assert content == second[name], name
    assert first["stdout"] == first["timeline.json"]


def test_the_seed_matters_only_to_sampled_skew(tmp_path: Path, small: str) -> None:
    def step_us(name: str, *options: str) -> float:
        value = json.loads(run(tmp_path / name, "0", "--model", small, "--tp", "4", *options)["stdout"])["step_us"]
        assert isinstance(value, float)
        return value

    assert step_us("a", "--skew", "--seed", "1") != step_us("b", "--skew", "--seed", "2")
    assert step_us("c", "--seed", "1") == step_us("d", "--seed", "2")


def other_python() -> str | None:
    """Another accepted version of Python on this machine."""
    versions = [f"3.{minor}" for minor in (10, 13, 12, 11) if minor != sys.version_info.minor]
    installed = [path for version in versions if (path := shutil.which(f"python{version}"))]
    kept = [str(path) for version in versions for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/python")]
    found = [*installed, *kept]
    return next((path for path in found if subprocess.run([path, "-c", "import ensurepip"]).returncode == 0), None)


@pytest.mark.slow
def test_another_python_gives_the_same_bytes() -> None:
    other, command = other_python(), Path(sys.executable).with_name("k3sim")
    if other is None or not command.exists():
        pytest.skip("needs another Python, 3.10 to 3.13, and k3sim installed beside this one")
    tool = ROOT / "tools" / "same_bytes.py"
    done = subprocess.run(
        [sys.executable, str(tool), str(command), other, "--only", "timeline --concurrency 1"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
