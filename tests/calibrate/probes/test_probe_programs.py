"""The probes' host code against their device code, without a GPU: every launch fits the kernel that it names."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from k3sim.calibrate.probes import PROBES, SOURCE
from k3sim.calibrate.probes.gpu import BLOCK_BYTES, Gpu, compile_probes
from k3sim.calibrate.probes.recorder import Recorder


@cache
def kinds(name: str) -> list[str]:
    """Of a kernel's parameters: pointer, u64 or int."""
    if re.fullmatch(r"chained(_\d){3}", name):
        text = re.search(r"chained_##L##_##S##_##M\(([^)]*)\)", SOURCE)
        assert text and f"CHAINED{tuple(map(int, name.split('_')[1:]))}" in SOURCE, name
        return [_kind(one) for one in text[1].split(",")]
    made = re.sub(r"_\d+$", "_##", name)
    for macro, of in (("large_##", "large_##ID"), ("tiny_##", "tiny_##ID"), ("stream_loads_##", "stream_loads_##U"),
                      ("push_rounds_##", "push_rounds_##N"), ("loads_and_trips_##", "loads_and_trips_##U"),
                      ("product_chain_##", "product_chain_##N"), ("asked_##", "asked_##F"),
                      ("carved_##", "carved_##W")):  # fmt: skip
        if made == macro:
            text = re.search(re.escape(of) + r"\(([^)]*)\)", SOURCE)
            assert text, name
            return [_kind(one) for one in text[1].replace("\\\n", "").split(",")]
    text = re.search(rf"(?:KERNEL|__global__ void[^\n]*) {name}\(([^)]*)\)", SOURCE)
    assert text, f"no kernel {name}"
    return [_kind(one) for one in text[1].split(",") if one.strip()]


def _kind(parameter: str) -> str:
    words = parameter.split()
    return "pointer" if "*" in parameter else words[0] if words[0] != "u32" else "int"


class OnPaper:
    """A GPU that checks each launch and fills what kernels would write with numbers."""

    num_sms, name, l2_bytes = 132, "NVIDIA H200", 60 << 20

    def __init__(self, torch: Any) -> None:
        self.launched: dict[str, int] = {}
        self.data = torch.empty(2**29, dtype=torch.int32)  # never touched, so it takes no memory
        self.torch = SimpleNamespace(
            **{name: getattr(torch, name) for name in ("int32", "int64", "bfloat16", "empty")},
            randint=lambda low, high, size, **_: torch.empty(size, dtype=torch.int32),
            randn=lambda *size, **_: torch.ones(*size),
            randperm=lambda count, **_: torch.arange(count),
            arange=lambda count, **_: torch.arange(count),
            cuda=SimpleNamespace(Stream=lambda: SimpleNamespace(cuda_stream=1)),
        )
        self._torch = torch
        self.torch.empty = lambda *size, dtype=None, **_: torch.empty(*size, dtype=dtype)
        self.stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=0)
        self.driver: Any = SimpleNamespace(
            cuEventCreate=lambda flags: (0, object()),
            cuEventRecord=lambda *_: (0,),
            cuStreamWaitEvent=lambda *_: (0,),
        )
        self._filled: dict[int, tuple[Any, int]] = {}  # by identity: the tensor, and its version when it was filled

    def call(self, result: tuple[Any, ...]) -> Any:
        return result[1] if len(result) > 1 else None

    def zeros(self, count: int, dtype: str = "int64") -> Any:
        return self._torch.zeros(count, dtype=getattr(self._torch, dtype))

    def launch(self, name: str, grid: int, block: int, args: Any, **how: Any) -> None:
        self.launched[name] = self.launched.get(name, 0) + 1
        assert 1 <= block <= 1024 and grid >= 1
        assert set(how) <= {"smem", "pdl", "cluster", "stream", "carve_out"}
        assert 0 <= how.get("smem", 0) <= BLOCK_BYTES
        given = [
            "pointer" if hasattr(one, "data_ptr") else "u64" if isinstance(one, ctypes.c_uint64) else "int"
            for one in args
        ]
        wanted = kinds(name)
        # A pointer may be null.
        assert len(given) == len(wanted), (name, wanted, given)
        for one, other, value in zip(wanted, given, args, strict=True):
            null = one == "pointer" and other == "u64" and value.value == 0
            assert one == other or null, (name, wanted, given)
            if other == "int":
                assert -(2**31) <= int(value) < 2**31
        for one in args:
            if hasattr(one, "data_ptr") and one.numel() < 2**21 and one.dtype.itemsize > 1:
                self._fill(one)

    def _fill(self, tensor: Any) -> None:
        """Unless nobody has written to it since: chains of a thousand launches share their buffers."""
        if self._filled.get(id(tensor), (None, -1))[1] != tensor._version:
            high = 100_000 if tensor.dtype.itemsize == 8 else 2000
            tensor.copy_(self._torch.randint(1, high, tensor.shape).to(tensor.dtype))
            self._filled[id(tensor)] = tensor, tensor._version

    def graph(self, body: Callable[[], None]) -> object:
        body()
        return object()

    def replay(self, graph: object) -> None:
        pass

    def event_us(self, graph: object, count: int) -> list[float]:
        return [100.0] * count


@pytest.mark.parametrize("probe", [name for name in PROBES if name != "split_products"])
def test_every_launch_fits_its_kernel(probe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Number and kind of arguments, memory within what a block may have, and samplers that run on what comes back."""
    torch = pytest.importorskip("torch")
    gpu = OnPaper(torch)
    names: list[str] = []

    class Clock:
        hz, origin_ns, step_ns, rates = 1.98e9, 0, 32, (1.98e9,)

        def __init__(self, gpu: Any) -> None:
            pass

        def us(self, clock: Any, end_clock: Any, end_ns: Any) -> Any:
            return (end_ns - self.origin_ns) / 1e3 - (end_clock - clock) / self.hz * 1e6

    class Once:
        """A recorder that takes each case once."""

        quick, replays = True, 12

        def record(self, name: str, parameters: dict[str, Any], sampler: Callable[[], dict[str, Any]]) -> None:
            names.append(repr((name, parameters)))
            for quantity, (unit, readings) in sampler().items():
                assert unit in ("us", "cycle", "B/s", "1", "Hz", "ns"), quantity
                assert len(readings) > 0

    from k3sim.calibrate import probes

    for module in (probes.clocks, probes.boundaries, probes.synchronisation, probes.tiny, probes.residency,
                   probes.last_block, probes.loopback, probes.sharing, probes.register_loads):  # fmt: skip
        monkeypatch.setattr(module, "Clocks", Clock)
    PROBES[probe](gpu, Once())  # type: ignore[arg-type]
    assert len(names) == len(set(names)) > 0, "two cases of one name: the second would not be taken"
    assert gpu.launched or probe == "clocks"


def test_the_program_compiles_for_every_architecture() -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except Exception as missing:  # the binding is there and the library is not
        pytest.skip(str(missing).splitlines()[0])
    for capability in ((9, 0), (10, 0), (10, 3)):
        assert compile_probes(*capability, SOURCE)[:4] == b"\x7fELF"


def test_every_probe_says_what_it_isolates() -> None:
    for name, probe in PROBES.items():
        text = " ".join((probe.__doc__ or "").split())
        assert "Isolates: " in text and "Could mislead: " in text, name


def test_gpu_and_recorder_take_what_the_test_replaces() -> None:
    """The stand-ins above have the signatures of the real ones."""
    import inspect

    assert list(inspect.signature(Gpu.launch).parameters)[1:5] == ["name", "grid", "block", "args"]
    assert list(inspect.signature(Recorder.record).parameters)[1:] == ["probe", "parameters", "sampler"]
