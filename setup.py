"""The packages that install: every folder with code. ``pyproject.toml`` holds everything else.

The four rooms stand at the top level of the tree and install under ``k3sim``, because "model" and "kernels" are names
that other distributions own.
"""

from setuptools import find_packages, setup

ROOMS = ("model", "kernels", "sim", "calibrate")

inside = find_packages(include=[pattern for room in ROOMS for pattern in (room, f"{room}.*")])
setup(
    packages=[*find_packages(include=["k3sim", "k3sim.*"]), *(f"k3sim.{name}" for name in inside)],
    package_dir={"k3sim": "k3sim", **{f"k3sim.{room}": room for room in ROOMS}},
)
