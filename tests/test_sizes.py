"""Sizes, as a feel kept honest: a file that fits one purpose, a host function that fits a screen.

What is above a limit stands in a table here with its reason; who splits it takes the entry out.
"""

from __future__ import annotations

from pathlib import Path

from project_sources import ROOT, functions, sources

MAX_FILE_LINES = 400
MAX_HOST_FUNCTION_LINES = 80
MAX_DEVICE_FUNCTION_LINES = 120

#: Kernels are not here: a kernel.py holds one thought, device code and what compiles it.
MEASURED_FOLDERS = ("model", "sim", "calibrate", "k3sim")

#: "file function" -> why it is one thought.
LONG_FUNCTIONS: dict[str, str] = {
    "kernels/kda_decode/kernel.py stream_kernel": "one pass over the state",
    "kernels/latent_tail/kernel.py device": "one hand-over",
    "kernels/mla_decode/kernel.py _mla_decode": "one pass over the cache",
    "kernels/mla_prep/kernel.py _prepare_head": "one head",
    "kernels/proj_allreduce/kernel.py _consume_row": "one row",
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_no_file_of_the_model_is_long() -> None:
    lines = {
        relative(path): len(path.read_text().splitlines())
        for path in sources().values()
        if path.relative_to(ROOT).parts[0] in MEASURED_FOLDERS
    }
    too_long = {name: count for name, count in lines.items() if count > MAX_FILE_LINES}
    assert too_long == {}, f"at most {MAX_FILE_LINES} lines a file"


def test_no_function_is_long() -> None:
    too_long = {
        f"{relative(path)} {name}": lines
        for path in sources().values()
        for name, lines, device in functions(path)
        if lines > (MAX_DEVICE_FUNCTION_LINES if device else MAX_HOST_FUNCTION_LINES)
    }
    unknown = {name: lines for name, lines in too_long.items() if name not in LONG_FUNCTIONS}
    assert unknown == {}, f"at most {MAX_HOST_FUNCTION_LINES} lines, of device code {MAX_DEVICE_FUNCTION_LINES}"
