"""Every path of the engine, call by call in torch, against the whole model in torch: same tokens, same logits.

Activations are fp32 here, so an agreement to 1e-4 leaves no room for a mistake of order, cutting or exchange. Each
step runs its calls in another legal order of its streams: a missing ``after`` in the tables shows as a wrong value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from small_model import small_architecture  # noqa: E402

from k3sim.kernels.expert_gemv import reference as expert_gemv_reference  # noqa: E402
from k3sim.kernels.expert_gemv.reference import Experts  # noqa: E402
from k3sim.kernels.rank import reference as rank_reference  # noqa: E402
from k3sim.kernels.rank.bindings import functions_of  # noqa: E402
from k3sim.kernels.rank.call_table import REFERENCE_CALLS  # noqa: E402
from k3sim.kernels.rank.exchange import connect_reference  # noqa: E402
from k3sim.kernels.rank.reference import WholeModelDecoder  # noqa: E402
from k3sim.kernels.rank.state import Rank, build_rank, clear  # noqa: E402
from k3sim.kernels.rank.step import legal_order, run_in_order  # noqa: E402
from k3sim.kernels.rank.weights import random_weights  # noqa: E402
from k3sim.kernels.rank.whole_model import LoopedModel, WholeModel, looped  # noqa: E402
from k3sim.model.layout import Layout, Workload  # noqa: E402
from k3sim.model.paths import SWITCHES, find_path  # noqa: E402
from k3sim.model.paths.own import OWN_TABLES  # noqa: E402
from k3sim.model.program import Program, build_program  # noqa: E402
from k3sim.model.step import Path  # noqa: E402

ARCHITECTURE = small_architecture()
ROWS = 2
NUM_STEPS = 64
FIRST_TOKENS = (3, 77)
FIRST_LENGTH = 1
MAX_TOKENS = 128


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The matrices are small: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def once_each(decode: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Weights of experts stay as they are: each is decoded once, and not by every call of every step."""
    # By address, which stays a tensor's own as long as it is kept.
    decoded: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def decode_once(codes: torch.Tensor, scales: torch.Tensor, *dtype: torch.dtype) -> torch.Tensor:
        key = codes.data_ptr(), codes.shape, dtype
        if key not in decoded:
            decoded[key] = codes, decode(codes, scales, *dtype)
        return decoded[key][1]

    return decode_once


@pytest.fixture(autouse=True)
def experts_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_gemv_reference, "decode", once_each(expert_gemv_reference.decode))


@pytest.fixture(scope="module")
def whole_model() -> Iterator[WholeModel]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_reference, "mxfp4", once_each(rank_reference.mxfp4))
        yield WholeModel(ARCHITECTURE, seed=1)


@dataclass
class Decoded:
    tokens: list[torch.Tensor]  # sampled, one [B] a step
    logits: list[torch.Tensor]  # [B, vocabulary]


@pytest.fixture(scope="module")
def expected(whole_model: WholeModel) -> Decoded:
    decoder = WholeModelDecoder(whole_model, rows=ROWS)
    result = Decoded([], [])
    tokens = torch.tensor(FIRST_TOKENS)
    for _ in range(NUM_STEPS):
        logits = decoder.step(tokens)
        tokens = logits.argmax(-1)
        result.logits.append(logits)
        result.tokens.append(tokens)
    return result


def program_of(path: Path, tp: int, concurrency: int = ROWS) -> tuple[Layout, Workload, Program]:
    layout, workload = Layout(tp=tp), Workload(concurrency=concurrency, context=MAX_TOKENS)
    return layout, workload, build_program(ARCHITECTURE, layout, workload, path)


def ranks_of(model: WholeModel, path: Path, tp: int, dtype: torch.dtype, cache: torch.dtype) -> list[Rank]:
    layout, workload, program = program_of(path, tp)
    ranks = [
        build_rank(
            ARCHITECTURE, layout, workload, program, model.cut(program, layout, index, dtype),
            index=index, dtype=dtype, cache_dtype=cache, device="cpu",
        )
        for index in range(tp)
    ]  # fmt: skip
    connect_reference(ranks)
    for rank in ranks:
        clear(rank, FIRST_LENGTH, torch.tensor(FIRST_TOKENS, dtype=torch.int32))
    return ranks


def own_path(name: str, **switches: tuple[str, ...]) -> Path:
    return find_path(name, kernel_set="own", **switches)


def assert_same_decode(ranks: list[Rank], expected: Decoded, num_steps: int) -> None:
    for step in range(num_steps):
        run_in_order(ranks, REFERENCE_CALLS, legal_order(ranks[0].program, seed=step))
        logits = torch.cat([rank.buffers["head.logits"] for rank in ranks], dim=1)
        torch.testing.assert_close(logits, expected.logits[step], rtol=0, atol=1e-4)
        for rank in ranks:
            assert rank.sequence.tokens.tolist() == expected.tokens[step].tolist()


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("path", ["stock", "fused"])
def test_a_path_decodes_the_whole_models_tokens(
    whole_model: WholeModel, expected: Decoded, path: str, tp: int
) -> None:
    ranks = ranks_of(whole_model, own_path(path), tp, torch.float32, torch.float32)
    assert_same_decode(ranks, expected, NUM_STEPS)
    for rank in ranks[1:]:
        assert torch.equal(rank.buffers["prefix"], ranks[0].buffers["prefix"]), "residual streams are bit-equal"


@pytest.mark.parametrize(
    "switches", [one for count in range(1, 4) for one in itertools.combinations(SWITCHES, count)], ids="+".join
)
def test_switches_are_independent(whole_model: WholeModel, expected: Decoded, switches: tuple[str, ...]) -> None:
    ranks = ranks_of(whole_model, own_path("fused", with_switches=switches), 2, torch.float32, torch.float32)
    assert_same_decode(ranks, expected, 3)


@pytest.mark.parametrize("path", ["stock", "fused"])
def test_bf16_activations_and_an_fp8_cache_stay_close(whole_model: WholeModel, path: str) -> None:
    decoder = WholeModelDecoder(whole_model, rows=ROWS, cache_dtype=torch.float8_e4m3fn)
    ranks = ranks_of(whole_model, own_path(path), 2, torch.bfloat16, torch.float8_e4m3fn)
    tokens = torch.tensor(FIRST_TOKENS)
    for _ in range(8):
        wanted = decoder.step(tokens)
        for rank in ranks:
            rank.sequence.tokens.copy_(tokens)
        run_in_order(ranks, REFERENCE_CALLS)
        got = torch.cat([rank.buffers["head.logits"] for rank in ranks], dim=1)
        # Rounding of six layers, and now and then another sixteenth expert; unrelated logits would differ by 1.4.
        assert float((got - wanted).norm() / wanted.norm()) < 0.2
        tokens = wanted.argmax(-1)


def test_one_looped_rank_speaks_for_its_peers() -> None:
    """Each exchange completes with one rank's pushes alone, and tokens stay within the rank's own vocabulary."""
    layout, workload, program = program_of(own_path("fused"), 4)
    weights = random_weights(program, ARCHITECTURE, layout, device="cpu", packed=False)
    rank = build_rank(ARCHITECTURE, layout, workload, program, weights, device="cpu")
    connect_reference([rank], loop_back=True)
    clear(rank, FIRST_LENGTH)
    for step in range(3):
        run_in_order([rank], REFERENCE_CALLS, legal_order(program, step))
        assert rank.sequence.num_tokens.tolist() == [FIRST_LENGTH + step + 1] * ROWS
        assert all(0 <= token < ARCHITECTURE.vocab_size // 4 for token in rank.sequence.tokens.tolist())
        assert bool(rank.buffers["prefix"].isfinite().all())
        assert 0.1 < float(rank.buffers["prefix"].float().std()) < 100


@pytest.mark.parametrize("name", ["stock", "fused"])
def test_loop_back_is_a_model_of_equal_ranks(name: str) -> None:
    """The whole model whose ranks all hold the same gives the tokens and logits of the one rank that runs."""
    layout, workload, fused = program_of(own_path("fused"), 4)
    stock = build_program(ARCHITECTURE, layout, workload, own_path("stock"))
    weights = random_weights([stock, fused], ARCHITECTURE, layout, device="cpu", packed=False)
    for key, tensor in weights.tensors.items():
        weights.tensors[key] = tensor.float()
    experts = {layer: one for layer, one in weights.experts.items() if isinstance(one, Experts)}
    decoder = WholeModelDecoder(LoopedModel(ARCHITECTURE, layout, weights, experts), rows=ROWS)
    program = stock if name == "stock" else fused
    rank = build_rank(
        ARCHITECTURE, layout, workload, program, looped(weights, program, layout),
        dtype=torch.float32, cache_dtype=torch.float32, device="cpu",
    )  # fmt: skip
    connect_reference([rank], loop_back=True)
    clear(rank, FIRST_LENGTH, torch.tensor([1, 2], dtype=torch.int32))
    tokens = torch.tensor([1, 2])
    for _ in range(4):
        run_in_order([rank], REFERENCE_CALLS)
        wanted = decoder.step(tokens)
        got = rank.buffers["head.logits"]
        torch.testing.assert_close(got, wanted[:, : got.shape[1]], rtol=0, atol=2e-4)
        tokens = wanted.argmax(-1)
        assert rank.sequence.tokens.tolist() == tokens.tolist()


def test_every_row_of_the_tables_can_run() -> None:
    rows = {f"{row.stage}/{row.operator}" for table in OWN_TABLES.values() for row in table}
    assert rows == REFERENCE_CALLS.keys()


def test_a_call_without_a_binding_is_an_error() -> None:
    _, _, program = program_of(own_path("stock"), 1)
    table = {name: function for name, function in REFERENCE_CALLS.items() if name != "moe.routing/router_topk.select"}
    with pytest.raises(AssertionError, match=r"no binding for moe\.routing/router_topk\.select"):
        functions_of(program, table, "reference")


def test_a_poll_before_the_push_is_found(whole_model: WholeModel) -> None:
    ranks = ranks_of(whole_model, own_path("fused"), 2, torch.float32, torch.float32)
    push = next(call.index for call in ranks[0].program.calls if call.stage == "embed.push")
    order = [index for index in range(len(ranks[0].program.calls)) if index != push]
    with pytest.raises(AssertionError, match="gathered: polled before"):
        run_in_order(ranks, REFERENCE_CALLS, order)
