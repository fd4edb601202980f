"""What a reader is told of skipped tests."""

from __future__ import annotations

from skips import skip_lines


def test_a_reason_says_what_to_do() -> None:
    reports = [
        ("tests/kernels/test_a.py", "could not import 'torch': No module named 'torch'"),
        ("tests/kernels/test_b.py::test_x", "nvidia-cutlass-dsl is not installed"),
        ("tests/kernels/test_b.py::test_y", "fla-core is not installed"),
        ("tests/kernels/test_c.py::test_z", "no CUDA GPU"),
        ("tests/sim/test_d.py::test_w", "no chromium on the path"),
        ("tests/sim/test_d.py::test_v", "something else"),
    ]
    assert skip_lines(reports) == [
        "skipped: 1 test: need a CUDA GPU: on such a machine, pip install -e '.[test,gpu]', then pytest -m gpu",
        "skipped: 1 test: need a browser: install chromium, so that it is on the path (apt-get install chromium)",
        "skipped: 1 file and 2 tests: need torch and CUTLASS, but no GPU: make kernel-tools, then make test",
        "skipped: 1 test: something else",
    ]
