"""The cases of ``check`` and ``bench``: which shapes they cover, and that a check of them can fail and can pass."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace

import pytest

from k3sim.errors import UserError
from k3sim.kernels.harness.cases import OPERATORS, Case, cases_of
from k3sim.kernels.skinny_gemv.builds import GEMV_SHAPES
from k3sim.kernels.toolchain import compile_cache
from k3sim.kernels.toolchain.catalogue import BUILDS

MAX_BYTES = 100 << 20  # of a case that is built here
CASES = cases_of()


def name_of(case: Case) -> str:
    return f"{case.operator}, {case.name}"


def names(operator: str, *, timed: bool) -> set[str]:
    return {case.name for case in CASES if case.operator == operator and (case.timed is not None or not timed)}


def test_every_built_operator_has_timed_and_checked_cases() -> None:
    assert set(OPERATORS) == set(BUILDS) == {case.operator for case in CASES}
    assert set(OPERATORS) == {case.operator for case in CASES if case.timed}
    assert set(OPERATORS) == {case.operator for case in CASES if case.problem}


def test_no_two_cases_have_one_name() -> None:
    assert len({(case.operator, case.name) for case in CASES}) == len(CASES)


def test_listed_matrices_are_checked_in_both_forms() -> None:
    for num_outputs, depth in GEMV_SHAPES:
        for rows in ("1 row", "2 rows", "8 rows", "16 rows"):
            assert f"{num_outputs}x{depth}, {rows}" in names("skinny_gemv", timed=False)
        for rows in ("1 row", "8 rows"):
            assert f"{num_outputs}x{depth}, {rows}" in names("skinny_gemv", timed=True)


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        ("kda_decode", [f"{heads} heads, 1 row, fp32 state" for heads in (6, 12)]),
        ("kda_decode", [f"12 heads, {rows} rows, fp32 state" for rows in (8, 32, 128)]),
        (
            "expert_gemv",
            [f"16 experts a row of {width}, 1 row{form}" for width in (384, 192) for form in ("", ", two launches")],
        ),
        ("mla_decode", [f"{heads} heads, {n} tokens, 1 row, fp8" for heads in (6, 12) for n in (8192, 131072)]),
        ("mla_decode", [f"lift_gate, {heads} heads, {rows}" for heads in (6, 12) for rows in ("1 row", "16 rows")]),
        ("mla_prep", [f"{heads} heads, 1 row, fp8 cache" for heads in (6, 12)]),
        ("lm_head", [f"{n}x7168, 1 row, top 64" for n in (20480, 10240)]),
        ("skinny_gemv", [f"{n}x7168, 1 row" for n in (20480, 10240)]),
        ("latent_tail", [f"{part}, {ranks} ranks, 1 row" for part in ("up", "send") for ranks in (8, 16)]),
        (
            "proj_allreduce",
            [
                f"produce and consume, {ranks} slots of this GPU, 7168x{depth}, 1 row"
                for ranks, depth in ((8, 1536), (16, 768))
            ],
        ),
        ("proj_allreduce", [f"send, up and consume_gathered, {ranks} ranks looped back, 1 row" for ranks in (8, 16)]),
        ("router_topk", [f"{shards} shards, 1 row" for shards in (1, 8, 16)]),
        (
            "router_topk",
            [f"push of {n}x7168 and gather_topk, {t} shards looped back, 1 row" for n, t in ((560, 8), (280, 16))],
        ),
        ("unfused", [f"all_reduce, {ranks} slots of this GPU, 1 row" for ranks in (8, 16)]),
        (
            "unfused",
            [f"KDA step in three launches, {heads} heads, {n}" for heads in (6, 12) for n in ("1 row", "8 rows")],
        ),
        ("unfused", [f"norm of {widths}, 1 row" for widths in ("1536 and 512", "7168")]),
        ("unfused", [f"situ of {width}, 1 row" for width in (384, 768, 2112, 4224)]),
        ("unfused", [f"{kernel}, 1 row" for kernel in ("embedding", "gate_multiply of 768", "gate_multiply of 1536")]),
        ("unfused", [f"query_and_cache, {heads} heads, fp8, 1 row" for heads in (6, 12)]),
        ("unfused", [f"sample, {how}, {ranks} ranks, 1 row" for how in ("greedy", "drawn") for ranks in (8, 16)]),
        ("unfused", ["advance, 1 row"]),
        ("attn_res", ["combine of 9 sources, 1 row", "fold of the prefix, 1 row"]),
    ],
)
def test_the_shapes_of_tp8_and_tp16_are_timed(operator: str, shapes: list[str]) -> None:
    assert set(shapes) <= names(operator, timed=True)


@pytest.mark.parametrize(
    ("operator", "name", "moved_bytes"),
    [
        ("skinny_gemv", "6288x7168, 1 row", 2 * 6288 * 7168),
        # State and past samples read and written, taps in fp32 and the gate's second factor read.
        (
            "kda_decode",
            "12 heads, 1 row, fp32 state",
            2 * (12 * 128 * 128 * 4 + 3 * 3 * 12 * 128 * 2) + 3 * 12 * 128 * 4 * 4 + 12 * 128 * 128 * 2,
        ),
        ("expert_gemv", "16 experts a row of 384, 2 rows", 32 * 3 * 384 * 3584 * 17 // 32),
        ("mla_decode", "12 heads, 131072 tokens, 1 row, fp8", 131072 * 576),
        ("mla_prep", "12 heads, 1 row, fp8 cache", 2 * 12 * (192 * 1536 + 128 * 512) + 576),
        ("lm_head", "20480x7168, 1 row, top 64", 2 * 20480 * 7168),
        ("router_topk", "8 shards, 1 row", 0),
        ("router_topk", "push of 560x7168 and gather_topk, 8 shards looped back, 1 row", 2 * 560 * 7168),
        ("expert_gemv", "16 experts a row of 192, 1 row, two launches", 16 * 3 * 192 * 3584 * 17 // 32),
        ("mla_decode", "lift_gate, 12 heads, 16 rows", 2 * 12 * 128 * 512),
        # A sixteenth of the outputs, and three vectors of the consumer.
        (
            "proj_allreduce",
            "send, up and consume_gathered, 16 ranks looped back, 1 row",
            2 * 448 * 3584 + 3 * 2 * 7168,
        ),
        # As kda_decode, but the gate's second factor is multiplied before.
        (
            "unfused",
            "KDA step in three launches, 6 heads, 8 rows",
            2 * 8 * (6 * 128 * 128 * 4 + 3 * 3 * 6 * 128 * 2) + 3 * 6 * 128 * 4 * 4,
        ),
        ("unfused", "query_and_cache, 6 heads, bf16, 3 rows", 3 * 576 * 2),
    ],
)
def test_bytes_of_the_floor_by_hand(operator: str, name: str, moved_bytes: int) -> None:
    (case,) = (one for one in CASES if (one.operator, one.name) == (operator, name))
    assert case.moved_bytes == moved_bytes


def test_unknown_operators_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match=r"unknown operator 'skiny_gemv' \(did you mean skinny_gemv\?\); accepted: att"):
        cases_of(["router_topk", "skiny_gemv"])
    with pytest.raises(UserError, match="unknown operator 'x'; accepted"):
        cases_of(["x"])


CHECKED = [case for case in CASES if case.problem is not None]
SMALLEST = {
    operator: min((case for case in CHECKED if case.operator == operator), key=lambda case: case.num_bytes)
    for operator in OPERATORS
}
SMALL = [
    case
    for case in CHECKED
    if case is SMALLEST[case.operator]
    # The reference of the experts decodes every one of them for every row.
    or (case.num_bytes <= MAX_BYTES and not (case.operator == "expert_gemv" and case.rows > 2))
]


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_a_check_refuses_poison_and_accepts_the_reference(case: Case) -> None:
    torch = pytest.importorskip("torch")
    assert case.problem is not None
    problem = case.problem("cpu", 0)
    problem.reset()
    for output, verdict in zip(problem.outputs, problem.judge(), strict=True):
        assert not verdict or output.in_place, f"{output.name} was not written, and accepted: {verdict}"
    assert not all(problem.judge())
    for output, expected in zip(problem.outputs, problem.expected(), strict=True):
        # With its poison left where the reference says that nothing is written.
        value = torch.where(expected.isnan(), output.tensor.to(expected.dtype), expected)
        output.tensor.copy_(value.expand(output.tensor.shape).to(output.tensor.dtype))
    for verdict in problem.judge():
        assert verdict, str(verdict)


def test_a_written_slot_of_no_row_is_found() -> None:
    pytest.importorskip("torch")
    (case,) = (one for one in CASES if one.name == "6 heads, 1 row, fp32 state")
    assert case.problem is not None
    problem = case.problem("cpu", 0)
    state = problem.outputs[1]
    state.tensor.copy_(problem.expected()[1])
    assert state.judge(state.tensor, problem.expected()[1], "state")
    state.tensor[0, 0, 0, 0] += 1e-6  # the null slot, by less than any tolerance
    assert "a slot of no row was written" in str(state.judge(state.tensor, problem.expected()[1], "state"))


WRONG = ("skinny_gemv", "kda_decode", "attn_res", "expert_gemv", "router_topk", "mla_decode", "mla_prep", "unfused")


@pytest.mark.parametrize("operator", WRONG)
def test_a_check_refuses_one_wrong_element(operator: str) -> None:
    torch = pytest.importorskip("torch")
    case = SMALLEST[operator]
    assert case.problem is not None
    problem = case.problem("cpu", 1)
    expected = problem.expected()
    for output, ref in zip(problem.outputs, expected, strict=True):
        output.tensor.copy_(ref.expand(output.tensor.shape).to(output.tensor.dtype))
    written = expected[0].isfinite().nonzero()
    at = tuple(written[len(written) // 2].tolist())
    problem.outputs[0].tensor[at] += torch.tensor(1).to(problem.outputs[0].tensor.dtype)
    verdict = problem.judge()[0]
    assert not verdict, str(verdict)


def test_timed_calls_fill_l2_three_times() -> None:
    pytest.importorskip("torch")
    l2_bytes = 4 << 20
    for name in ("448x7168, 1 row", "1152x1536, 1 row"):
        (case,) = (one for one in CASES if one.name == name and one.timed)
        assert case.timed is not None
        timed = case.timed("cpu", 0, l2_bytes)
        assert len(timed.calls) >= 8 and len(timed.calls) * case.moved_bytes >= 3 * l2_bytes
        assert len(timed.peers["cuBLAS"]()) == len(timed.calls)
        assert timed.peers["cuBLAS"]()[0]().shape == (1, int(name.split("x")[0]))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Hashable]]:
    """Launch functions check their arguments and then launch nothing; configurations of the kernels they would have."""
    torch = pytest.importorskip("torch")
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    launched: list[Hashable] = []

    def compiled(configuration: Hashable, build: object, *, name: str = "") -> Callable[..., None]:
        launched.append(configuration)
        return lambda *_: None

    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    h200 = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132, L2_cache_size=60 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: h200)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    names = [*(f"{operator}.launch" for operator in OPERATORS), "unfused.exchange_launch", "unfused.recurrence_launch"]
    modules = [importlib.import_module(f"k3sim.kernels.{name}") for name in names]
    for module in modules:
        monkeypatch.setattr(module, "check_on_gpu", lambda *_: None)
    monkeypatch.setattr(compile_cache, "compiled", compiled)
    monkeypatch.setattr(importlib.import_module("k3sim.kernels.skinny_gemv.launch"), "compiled", compiled)
    compile_cache.compiled_kernel.cache_clear()
    yield launched
    compile_cache.compiled_kernel.cache_clear()
    for module in modules:
        for cached in vars(module).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()


@pytest.mark.parametrize("case", SMALL, ids=name_of)
def test_the_launch_functions_accept_what_is_checked(case: Case, launches: list[Hashable]) -> None:
    if case.operator == "l2_prefetch":
        pytest.skip("its check is a measurement")
    assert case.problem is not None
    case.problem("cpu", 0).launch()
    assert launches


@pytest.mark.parametrize(
    "case",
    [one for one in CASES if one.timed and 9 * one.moved_bytes <= MAX_BYTES and one.operator != "expert_gemv"],
    ids=name_of,
)
def test_the_launch_functions_accept_what_is_timed(case: Case, launches: list[Hashable]) -> None:
    assert case.timed is not None
    timed = case.timed("cpu", 0, 1)
    assert len(timed.calls) >= 8
    for call in (timed.calls[0], timed.calls[-1]):
        call()
    assert launches
