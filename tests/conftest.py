"""Tests marked ``gpu`` are skipped where torch sees no CUDA device; the longest files come first."""

from __future__ import annotations

import pytest

# Builds of every kernel for three architectures, and all that the pages say: workers that take whole files would
# otherwise begin one of them when the others have nothing left.
LONGEST_FILES = ("test_build.py", "test_documentation.py")


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    items.sort(key=lambda item: item.path.name not in LONGEST_FILES)
