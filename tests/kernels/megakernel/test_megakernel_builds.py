"""The kernel is built for every architecture, without a GPU and without spills."""

from __future__ import annotations

from collections.abc import Callable

import pytest

NUM_SMS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 152}
SOURCE = """
import os, tempfile
os.environ["CUTE_DSL_KEEP"] = "cubin"
with tempfile.TemporaryDirectory() as folder:
    os.environ["CUTE_DSL_DUMP_DIR"] = folder
    from k3sim.kernels.megakernel.kernel import SMEM_BYTES, MegakernelConfiguration, compile_megakernel
    from k3sim.kernels.toolchain.machine_code import kernel_codes
    built = compile_megakernel(MegakernelConfiguration(
        num_sms={num_sms}, ranks=16, heads=6, depths=(768, 2112), window=8, narrow_window=2, narrow_rows=8,
        timestamps={timestamps},
    ))
    (codes,) = kernel_codes([built.__cubin__], "{architecture}")
    for code in codes:
        assert code.spills == 0 and code.stack_bytes == 0, code
        assert SMEM_BYTES + code.static_smem_bytes <= 232448, code
    assert len(codes) == 1
"""


@pytest.mark.slow_but_one
@pytest.mark.parametrize("architecture", NUM_SMS)
def test_it_builds_without_spills(compiles: Callable[[str, str], None], architecture: str) -> None:
    for timestamps in (False, True)[: 1 if architecture == "sm_90a" else 2]:
        source = SOURCE.format(num_sms=NUM_SMS[architecture], timestamps=timestamps, architecture=architecture)
        compiles(source, architecture)
