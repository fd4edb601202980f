"""The package that gets installed: version, public names, folders and data files."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import k3sim

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = ("k3sim", "model", "sim", "kernels", "calibrate")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a source tree")
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def tracked(pattern: str) -> list[Path]:
    """Files of the repository, so that a build's leftovers do not count."""
    done = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [Path(line) for line in done.stdout.splitlines() if (ROOT / line).exists()]


def test_version_is_one_number_everywhere(project: dict[str, Any]) -> None:
    assert k3sim.__version__ == project["project"]["version"] == version("k3sim")
    latest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest is not None
    assert latest.group(1) == k3sim.__version__


def test_the_public_names_are_all_and_only_these() -> None:
    assert sorted(k3sim.__all__) == list(k3sim.__all__)
    assert all(hasattr(k3sim, name) for name in k3sim.__all__)
    own = {
        name
        for name, value in vars(k3sim).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("k3sim")
    }
    assert own <= set(k3sim.__all__)


def test_every_folder_with_code_is_a_package() -> None:
    """setup.py finds packages by their ``__init__.py``; a folder without one would be left out of the wheel."""
    folders = {path.parent for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_data_file_matches_a_wheel_pattern(project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]
    assert list(patterns) == ["*"], "one list of patterns for all packages"
    data = [path for path in tracked("*") if path.parts[0] in FOLDERS and path.suffix not in (".py", ".md")]
    assert data, "no data file is tracked"
    unlisted = []
    for path in data:
        # the nearest folder that is a package, and the file's place under it
        package = next(parent for parent in (ROOT / path).parents if (parent / "__init__.py").exists())
        inside = (ROOT / path).relative_to(package)
        if not any(len(Path(one).parts) == len(inside.parts) and inside.match(one) for one in patterns["*"]):
            unlisted.append(str(path))
    assert unlisted == []


def test_a_checkouts_root_hides_nothing_of_a_package(tmp_path: Path) -> None:
    """From the root of a checkout the folder ``k3sim`` hides a package that is installed without ``--editable``."""
    (tmp_path / "sim" / "machines").mkdir(parents=True)
    (tmp_path / "sim" / "__init__.py").write_text("found = True")
    shutil.copytree(ROOT / "k3sim", tmp_path / "k3sim", ignore=shutil.ignore_patterns("__pycache__"))
    # -S: as if nothing were installed
    asked = "import k3sim.sim; print(k3sim.sim.found, k3sim.sim.__file__)"
    done = subprocess.run([sys.executable, "-S", "-c", asked], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["True", str(tmp_path / "sim" / "__init__.py")], done.stderr


def test_plain_requirements_bring_no_gpu_package(project: dict[str, Any]) -> None:
    plain = " ".join(project["project"]["dependencies"]).lower()
    assert "torch" not in plain
    assert "cutlass" not in plain
    assert "torch" in " ".join(project["project"]["optional-dependencies"]["gpu"])
