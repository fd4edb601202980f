"""The stock path's separate kernels: references against independent formulas, refusals, kernels against references."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import TOLERANCES, compare  # noqa: E402
from k3sim.kernels.kda_decode import reference as kda  # noqa: E402
from k3sim.kernels.latent_tail.launch import TailPeers, TailSlots, collect  # noqa: E402
from k3sim.kernels.mla_decode import launch as mla_decode  # noqa: E402
from k3sim.kernels.mla_decode import reference as mla_decode_reference  # noqa: E402
from k3sim.kernels.mla_prep import reference as mla_prep  # noqa: E402
from k3sim.kernels.proj_allreduce.launch import make_receive_buffers  # noqa: E402
from k3sim.kernels.unfused import exchange_launch, launch, recurrence_launch, reference  # noqa: E402
from k3sim.kernels.unfused.cases import candidates  # noqa: E402
from k3sim.kernels.unfused.recurrence_cases import chain_call, kda_inputs  # noqa: E402

HIDDEN = 7168
D = 128
E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16
NAN = math.nan


def normal(*shape, seed=0, device="cpu", scale=1.0):  # type: ignore[no-untyped-def]
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device) * scale


# ---- a KDA step in three ------------------------------------------------------------------------------------------


def chain(a, logits, heads, carry):  # type: ignore[no-untyped-def]
    convolved = reference.conv_update(a["projected"], a["conv_weight"], a["slots"], a["conv_state"], carry=carry)
    read = reference.recurrent_update(
        convolved, logits, a["projected"], a["dt_bias"], a["a_log"], a["slots"], a["state"], carry=carry
    )
    return reference.gated_norm(read, a["projected"], a["norm_weight"])


def copied(arguments, device=None):  # type: ignore[no-untyped-def]
    return {name: tensor.clone().to(device or tensor.device) for name, tensor in arguments.items()}


@pytest.mark.parametrize("carry", [torch.float32, BF16])
def test_the_chain_of_three_is_a_kda_step(carry) -> None:  # type: ignore[no-untyped-def]
    arguments, logits = kda_inputs(rows=3, heads=6, num_slots=5, slots=[4, 0, 2])
    whole, parts = copied(arguments), copied(arguments)
    expected = kda.kda_decode(*whole.values(), heads=6)
    out = chain(parts, logits, 6, carry)
    assert torch.equal(parts["conv_state"], whole["conv_state"])
    if carry == torch.float32:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(parts["state"], whole["state"], rtol=1e-5, atol=1e-6)
    assert (verdict := compare(out, expected, "kda_output")), verdict
    # A convolved value in bf16 moves single elements of the state by half a unit of bf16, and the whole by little.
    family = "kda_state_fp32" if carry == torch.float32 else "kda_state_bf16"
    assert (verdict := compare(parts["state"], whole["state"], family)), verdict
    assert verdict.error <= TOLERANCES["kda_state_fp32"].error_ratio
    assert not out[1].any() and torch.equal(parts["state"][[0, 1, 3]], arguments["state"][[0, 1, 3]])


def test_decay_goes_by_key_and_delta_by_value() -> None:
    """One head of the recurrence by hand, in float64 loops over single elements of a sparse case."""
    state = torch.zeros(2, 1, D, D)
    state[1, 0, 3, 7] = 2.0
    convolved = torch.zeros(1, 3 * D)
    convolved[0, 3], convolved[0, D + 3], convolved[0, 2 * D + 7] = 5.0, -3.0, 1.5  # q, k, v
    projected = torch.full((1, 5 * D + 8), 0.25)
    dt_bias = torch.zeros(D)
    dt_bias[3] = 0.5
    read = reference.recurrent_update(
        convolved, torch.zeros(1, D), projected, dt_bias, torch.full((1,), 0.7), torch.tensor([1]), state
    )
    alpha = math.exp(-5 / (1 + math.exp(-0.5 * math.exp(0.7))))
    beta = 1 / (1 + math.exp(-0.25))
    decayed = 2.0 * alpha
    fresh = decayed - beta * (1.5 + decayed)  # k is -1 at 3: S'^T k = -decayed
    assert state[1, 0, 3, 7].item() == pytest.approx(fresh, rel=1e-5)
    assert read[0, 7].item() == pytest.approx(fresh / math.sqrt(D), rel=1e-5)
    assert int((state != 0).sum()) == 1 and int((read != 0).sum()) == 1


# ---- lookups, sums, rows ------------------------------------------------------------------------------------------


def test_vocabulary_parts_add_up_to_the_lookup() -> None:
    table = normal(40, 64).bfloat16()
    ids = torch.tensor([0, 9, 10, 39, 25, -1], dtype=torch.int32)
    parts = [reference.embedding(ids, table[10 * rank : 10 * rank + 10], first_id=10 * rank) for rank in range(4)]
    assert torch.equal(torch.stack(parts).sum(0)[:5], table[ids[:5].long()])
    assert not torch.stack(parts)[:, 5].any()


def test_rank_sums_are_rounded_once_in_order() -> None:
    partials = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24), 2.0**-7]).view(5, 1, 1).bfloat16()
    # In fp32 and rank order each 1 is lost against 2^24 (ties to even); exactly the sum would be 2 + 2^-7.
    assert reference.all_reduce(partials).item() == 2.0**-7
    many = normal(8, 2, 64).bfloat16()
    exact = many.double().sum(0)
    assert ((reference.all_reduce(many).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-5).all()


def test_row_wise_references_by_other_formulas() -> None:
    x, weight = normal(3, 64).bfloat16(), normal(64, seed=1).bfloat16()
    expected = torch.nn.functional.rms_norm(x.double(), (64,), weight.double(), eps=1e-5)
    torch.testing.assert_close(reference.rms_norm(x, weight).double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(reference.gate_multiply(x, x), torch.nn.functional.silu(x.float()))
    out = reference.situ(torch.tensor([[0.5, -30.0, 2.0, 60.0]]))  # gates 0.5 and -30, ups 2 and 60

    def by_hand(gate: float, up: float) -> float:
        return 4 * math.tanh(gate / 4) / (1 + math.exp(-gate)) * 25 * math.tanh(up / 25)

    assert out[0].tolist() == pytest.approx([by_hand(0.5, 2.0), by_hand(-30.0, 60.0)], rel=1e-5)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_query_and_cache_are_those_of_mla_prep(dtype) -> None:  # type: ignore[no-untyped-def]
    query_up, key_up = normal(6 * 192, 1536, scale=0.03).bfloat16(), normal(6, D, 512, scale=0.1).bfloat16()
    latents, ones = normal(2, 2112, scale=3.0, seed=3).bfloat16(), torch.ones(1536).bfloat16()
    prepared = mla_prep.mla_prep(latents, ones, ones[:512], query_up, key_up, carry=BF16)
    cache = torch.zeros(3, 64, 576).to(dtype)
    query = reference.query_and_cache(
        prepared.query_BHD[..., :512].bfloat16(),
        prepared.query_BHD[..., 512:].bfloat16(),
        reference.rms_norm(latents[:, 1536:2048], ones[:512]).bfloat16(),
        latents[:, 2048:],
        torch.tensor([2 * 64 + 5, -1]),
        cache,
    )
    assert torch.equal(query, prepared.query_BHD.bfloat16())
    want = prepared.row_BD[0].bfloat16().float().clamp(-448, 448).to(dtype)
    assert torch.equal(cache[2, 5].float(), want.float())
    cache[2, 5] = torch.zeros(576).to(dtype)
    assert not cache.float().any()


def test_lift_and_gate_by_batched_products() -> None:
    latent, value_up = normal(2, 6, 512).bfloat16(), normal(6, D, 512, seed=1, scale=0.05).bfloat16()
    gate = normal(2, 6 * D, seed=2).bfloat16()
    lifted = torch.bmm(latent.double().transpose(0, 1), value_up.double().transpose(1, 2)).transpose(0, 1).flatten(1)
    expected = lifted / (1 + (-gate.double()).exp())
    out = mla_decode_reference.lift_gate(latent, value_up, gate)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


# ---- end of a step ------------------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_then_lowest_id() -> None:
    values, ids = candidates(8, 5)
    values[3, 1, 0] = NAN
    values[:, 4] = -math.inf
    tokens = reference.greedy(values, ids)
    for row in range(5):
        pairs = [
            (-value if value == value else math.inf, token)
            for rank in range(8)
            for value, token in zip(values[rank, row].tolist(), ids[rank, row].tolist(), strict=True)
        ]
        assert tokens[row].item() == min(pairs)[1]


def test_distribution_is_softmax_cut_to_the_nucleus() -> None:
    values, ids = candidates(4, 3)
    temperature, top_p = torch.tensor([0.7, 1.5, 0.0]), torch.tensor([0.6, 1.0, 0.9])
    found_ids, found = reference.distribution(values, ids, temperature, top_p)
    for row in range(3):
        pairs = sorted(
            (-values[rank, row, i].item(), ids[rank, row, i].item()) for rank in range(4) for i in range(64)
        )[:64]
        assert found_ids[row].tolist() == [token for _, token in pairs]
        if temperature[row] == 0:
            assert found[row].tolist() == [1.0] + [0.0] * 63
            continue
        weights = [math.exp((pairs[0][0] - value) / temperature[row].item()) for value, _ in pairs]
        kept: list[float] = []
        for weight in weights:
            kept.append(weight if sum(kept) < top_p[row].item() * sum(weights) else 0.0)
        assert found[row].tolist() == pytest.approx([weight / sum(kept) for weight in kept], abs=1e-9)


def test_draws_have_the_frequencies_of_the_distribution() -> None:
    ids, probabilities = torch.tensor([[5, 2, 9]]), torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    drawn = [reference.draw(ids, probabilities, torch.tensor([i / 100])).item() for i in range(100)]
    assert [drawn.count(token) for token in (5, 2, 9)] == [50, 25, 25]
    assert reference.draw(ids, torch.tensor([[1.0, 0.0, 0.0]]).double(), torch.tensor([1.0])).item() == 5


def test_steps_walk_through_the_pages() -> None:
    pages = torch.tensor([[7, 3, 5], [4, 9, 1], [0, 0, 0]], dtype=torch.int32)
    lengths, slots = torch.tensor([1, 63, 0], dtype=torch.int32), torch.tensor([7 * 64, 4 * 64 + 62, -1])
    seen = []
    for _ in range(140):
        reference.advance(lengths, pages, slots)
        seen.append(slots.tolist())
    assert [row for row, _, _ in seen] == [p * 64 + i for p in (7, 3, 5) for i in range(64)][1:141]
    assert [row for _, row, _ in seen] == [p * 64 + i for p in (4, 9, 1) for i in range(64)][63:192] + [-1] * 11
    assert lengths.tolist() == [141, 192, 0] and all(row == -1 for _, _, row in seen)


# ---- refusals -----------------------------------------------------------------------------------------------------


def zeros(*shape, dtype=BF16):  # type: ignore[no-untyped-def]
    return torch.zeros(*shape, dtype=dtype)


REFUSALS = {
    "embedding": (
        dict(ids=zeros(2, dtype=torch.int32), table=zeros(10, 128), out=zeros(2, 128)),
        {"ids": (zeros(2, dtype=torch.int64), "ids: got torch.int64"), "out": (zeros(2, 64), "out.shape"),
         "table": (zeros(10, 100), r"table.shape\[1\]: got 100"), "first_id": (-1, "first_id: got -1")},
    ),
    "embedding_push": (
        dict(ids=zeros(2, dtype=torch.int32), table=zeros(10, 128), peers=zeros(4, dtype=torch.int64), first_id=0),
        {"ids": (zeros(17, dtype=torch.int32), r"ids.shape\[0\]: got 17"),
         "peers": (zeros(17, dtype=torch.int64), r"peers.shape\[0\]: got 17")},
    ),
    "all_reduce": (
        dict(x=zeros(2, 7168), out=zeros(2, 7168), peers=zeros(4, dtype=torch.int64),
             buffers=make_receive_buffers(ranks=4, max_rows=8, device="cpu"), rank=0),
        {"x": (zeros(9, 7168), "out.shape"), "peers": (zeros(3, dtype=torch.int64), "peers.shape"),
         "rank": (4, "rank: got 4, accepted: 0 to 3"), "out": (zeros(2, 7168, dtype=torch.float32), "out: got")},
    ),
    "conv_update": (
        dict(projected=zeros(2, 3224), conv_weight=zeros(2304, 4, dtype=torch.float32),
             slots=zeros(2, dtype=torch.int32), conv_state=zeros(3, 3, 2304), convolved=zeros(2, 2304), heads=6),
        {"heads": (5, "heads: got 5"), "projected": (zeros(2, 2296), r"projected.shape\[1\]"),
         "conv_state": (zeros(3, 2304, 3).transpose(1, 2), "conv_state.stride"),
         "convolved": (zeros(2, 2304, dtype=torch.float32), "convolved: got torch.float32")},
    ),
    "recurrent_update": (
        dict(convolved=zeros(2, 2304), decay_logits=zeros(2, 768), projected=zeros(2, 3208),
             dt_bias=zeros(768, dtype=torch.float32), a_log=zeros(6, dtype=torch.float32),
             slots=zeros(2, dtype=torch.int32), state=zeros(3, 6, D, D), read_out=zeros(2, 768)),
        {"state": (zeros(3, 5, D, D), r"state.shape\[1\]: got 5"), "a_log": (zeros(5, dtype=torch.float32), "a_log"),
         "decay_logits": (zeros(2, 768, dtype=torch.float16), "decay_logits: got torch.float16"),
         "projected": (zeros(2, 3200), r"projected.shape\[1\]: got 3200")},
    ),
    "gated_norm": (
        dict(read_out=zeros(2, 768), projected=zeros(2, 3072), norm_weight=zeros(D, dtype=torch.float32),
             out=zeros(2, 768), heads=6),
        {"projected": (zeros(2, 3064), r"projected.shape\[1\]"), "norm_weight": (zeros(D), "norm_weight: got")},
    ),
    "norm": (
        dict(parts=[(zeros(2, 64), zeros(64), zeros(2, 64))]),
        {"parts": ([(zeros(2, 60), zeros(60), zeros(2, 60))], r"parts\[0\] x.s"),},
    ),
    "situ": (
        dict(gate_up=zeros(2, 128), out=zeros(2, 64)),
        {"gate_up": (zeros(2, 64), "gate_up.shape"), "out": (zeros(2, 60), r"out.shape\[1\]: got 60")},
    ),
    "gate_multiply": (
        dict(value=zeros(2, 64), gate=zeros(2, 64), out=zeros(2, 64)),
        {"gate": (zeros(2, 65)[:, 1:], "gate"), "value": (zeros(1, 64), "value.shape")},
    ),
    "query_and_cache": (
        dict(absorbed=zeros(2, 6, 512), extra=zeros(2, 6, 64), latent=zeros(2, 512), latent_extra=zeros(2, 64),
             slots=zeros(2, dtype=torch.int64), query=zeros(2, 6, 576), cache=zeros(2, 64, 576)),
        {"slots": (zeros(2, dtype=torch.int32), "slots: got torch.int32"), "extra": (zeros(2, 6, 60), "extra.shape"),
         "cache": (zeros(2, 64, 576, dtype=torch.float16), "cache: got torch.float16"),
         "query": (zeros(2, 7, 576), r"query.shape\[1\]: got 7")},
    ),
    "sample": (
        dict(values=zeros(8, 2, 64, dtype=torch.float32), ids=zeros(8, 2, 64, dtype=torch.int32),
             tokens=zeros(2, dtype=torch.int32)),
        {"values": (zeros(3, 2, 64, dtype=torch.float32), r"values.shape\[0\]: got 3"),
         "top_p": (zeros(2, dtype=torch.float32), "temperature: got None"),
         "tokens": (zeros(2, dtype=torch.int64), "tokens: got torch.int64")},
    ),
    "advance": (
        dict(num_tokens=zeros(2, dtype=torch.int32), pages=zeros(2, 4, dtype=torch.int32),
             slots=zeros(2, dtype=torch.int64)),
        {"num_tokens": (zeros(17, dtype=torch.int32), r"num_tokens.shape\[0\]: got 17"),
         "pages": (zeros(2, 0, dtype=torch.int32), r"pages.shape\[1\]: got 0"),
         "slots": (zeros(2, dtype=torch.int32), "slots: got torch.int32")},
    ),
    "lift_gate": (
        dict(latent=zeros(2, 6, 512), value_up=zeros(6, D, 512), gate=zeros(2, 768), out=zeros(2, 768)),
        {"latent": (zeros(17, 6, 512), r"latent.shape\[0\]: got 17"), "gate": (zeros(2, 760), "gate.shape"),
         "value_up": (zeros(6, 512, D).transpose(1, 2), "value_up.stride")},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "changed"), [(kernel, name) for kernel, (_, changes) in REFUSALS.items() for name in changes]
)
def test_faults_are_named_before_any_launch(kernel: str, changed: str) -> None:
    arguments, changes = REFUSALS[kernel]
    rooms = (mla_decode, launch, exchange_launch, recurrence_launch)
    function = next(getattr(room, kernel) for room in rooms if hasattr(room, kernel))
    value, named = changes[changed]
    with pytest.raises(UserError, match=named):
        function(**{**arguments, changed: value})


@pytest.mark.parametrize("kernel", sorted(REFUSALS))
def test_good_arguments_lack_only_a_gpu(kernel: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is visible")
    arguments, _ = REFUSALS[kernel]
    extra = {"first_id": 0} if kernel == "embedding" else {}
    rooms = (mla_decode, launch, exchange_launch, recurrence_launch)
    function = next(getattr(room, kernel) for room in rooms if hasattr(room, kernel))
    with pytest.raises(UserError, match="no CUDA GPU is visible"):
        function(**arguments, **extra)


# ---- on a GPU -----------------------------------------------------------------------------------------------------


def poisoned(*shape, dtype=BF16):  # type: ignore[no-untyped-def]
    return torch.full(shape, NAN, dtype=dtype, device="cuda")


def replay(call, times=1000):  # type: ignore[no-untyped-def]
    """``call`` captured twice in one graph, replayed; it has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    for _ in range(times // 2):
        graph.replay()
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "hidden", "pdl"), [(1, 7168, False), (5, 7168, True), (16, 192, False)])
def test_embedding_kernel(rows, hidden, pdl) -> None:  # type: ignore[no-untyped-def]
    table = normal(1000, hidden, device="cuda").bfloat16()
    ids = torch.tensor([700, 1699, 699, 1700, -1, 2**31 - 1] + [1000] * 10, dtype=torch.int32, device="cuda")[:rows]
    out = poisoned(rows, hidden)
    exchange_launch.embedding(ids, table, out, first_id=700, pdl=pdl)
    assert torch.equal(out, reference.embedding(ids, table, first_id=700))
    out.fill_(NAN)
    replay(lambda: exchange_launch.embedding(ids, table, out, first_id=700, pdl=pdl), 100)
    assert torch.equal(out, reference.embedding(ids, table, first_id=700))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_pushed_rows_are_what_the_tail_collects(ranks) -> None:  # type: ignore[no-untyped-def]
    """Also a table row whose bits are the sign for "not arrived", and padding."""
    rows, each = 5, 40
    table = normal(ranks * each, HIDDEN, device="cuda").bfloat16()
    table.view(torch.int16)[3, :64] = -1
    slots = [TailSlots.allocate(ranks=ranks, max_rows=16, device="cuda") for _ in range(ranks)]
    peers = TailPeers.of(slots)
    for turn in range(3):
        ids = torch.tensor([3, ranks * each - 1, -1, turn, 11 * turn], dtype=torch.int32, device="cuda")
        for rank in range(ranks):
            part = table[rank * each : (rank + 1) * each]
            exchange_launch.embedding_push(ids, part, peers.gathered, first_id=rank * each)
        expected = reference.embedding(ids, table, first_id=0)
        for one in slots:
            # The pushes are complete: rows beyond these are untouched, and no word of these is missing.
            torch.cuda.synchronize()
            words = one.gathered.view(torch.int32)
            assert (words[rows:] == -1).all() and (words[:rows] != -1).all()
            out = torch.zeros(rows, HIDDEN, dtype=BF16, device="cuda")
            collect(one, out)
            assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))
            assert (one.gathered.view(torch.int16) == -1).all()


class Ranks:
    """Ranks on one GPU: each has its buffers, its stream and its output."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.buffers = [make_receive_buffers(ranks=ranks) for _ in range(ranks)]
        addresses = [one.received.data_ptr() for one in self.buffers]
        self.peers = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def prepare(self, rows: int, seed: int) -> None:
        self.x = normal(self.ranks, rows, HIDDEN, seed=seed, device="cuda").bfloat16()
        self.x[:, :, 5] = -0.0  # must travel as +0
        self.x[:, :, 6] = 1e-39  # and a subnormal as itself
        self.out = poisoned(self.ranks, rows, HIDDEN)
        self.expected = reference.all_reduce(self.x)
        torch.cuda.synchronize()

    def step(self, rank: int) -> None:
        exchange_launch.all_reduce(
            self.x[rank], self.out[rank], self.peers, self.buffers[rank], rank=rank, release_next=False
        )

    def step_and_check(self) -> None:
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                self.step(rank)
        self.check()

    def check(self) -> None:
        torch.cuda.synchronize()
        for rank in range(self.ranks):  # as bits: also the sign of zero
            assert torch.equal(self.out[rank].view(torch.int16), self.expected.view(torch.int16))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_all_reduce_over_calls_of_changing_rows(ranks) -> None:  # type: ignore[no-untyped-def]
    together = Ranks(ranks)
    for seed, rows in enumerate([1, 16, 2, 1, 9, 1, 1, 16]):
        together.prepare(rows, seed)
        together.step_and_check()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_replays_of_all_reduce_give_the_same_bits(ranks) -> None:  # type: ignore[no-untyped-def]
    together = Ranks(ranks)
    together.prepare(3, 0)
    together.step_and_check()
    graphs = []
    for rank in range(ranks):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=together.streams[rank]):
            for _ in range(2):
                together.step(rank)
        graphs.append(graph)
    for _ in range(10):
        together.out.fill_(NAN)
        torch.cuda.synchronize()
        for _ in range(50):
            for rank in range(ranks):
                with torch.cuda.stream(together.streams[rank]):
                    graphs[rank].replay()
        together.check()


def run_chain(a, logits, heads, pdl=False):  # type: ignore[no-untyped-def]
    rows, width = a["projected"].shape[0], heads * D
    convolved, read, out = poisoned(rows, 3 * width), poisoned(rows, width), poisoned(rows, width)
    call = chain_call(a, logits, convolved, read, out, heads=heads, pdl=pdl)
    call()
    torch.cuda.synchronize()
    return convolved, read, out, call


def check_each(a, logits, convolved, read, out):  # type: ignore[no-untyped-def]
    """Each kernel against its reference, on what the kernel before it really gave; ``a`` takes the new states.

    A bf16 value next to a rounding boundary may land one unit away, and a whole chain of references would take that
    for an error of the state.
    """
    expected = reference.conv_update(a["projected"], a["conv_weight"], a["slots"], a["conv_state"])
    assert (verdict := compare(convolved, expected, "bf16_activation", name="convolved")), verdict
    rest = (a["projected"], a["dt_bias"], a["a_log"], a["slots"], a["state"])
    expected = reference.recurrent_update(convolved.cpu(), logits.cpu(), *rest)
    assert (verdict := compare(read, expected, "bf16_activation", name="read out")), verdict
    expected = reference.gated_norm(read.cpu(), a["projected"], a["norm_weight"])
    assert (verdict := compare(out, expected, "bf16_activation", name="out")), verdict


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, BF16])
@pytest.mark.parametrize("logits_dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("heads", "rows", "pdl"), [(6, 1, False), (12, 3, True), (6, 16, True), (96, 1, False)])
def test_kda_kernels_in_a_chain(heads, rows, pdl, logits_dtype, state_dtype) -> None:  # type: ignore[no-untyped-def]
    arguments, logits = kda_inputs(
        rows=rows, heads=heads, num_slots=rows + 3, state_dtype=state_dtype, device="cuda", seed=rows
    )
    logits = logits.to(logits_dtype)
    expected, whole = copied(arguments, "cpu"), copied(arguments, "cpu")
    whole_out = kda.kda_decode(*whole.values(), heads=heads)
    convolved, read, out, _ = run_chain(arguments, logits, heads, pdl)
    check_each(expected, logits, convolved, read, out)
    family = "kda_state_fp32" if state_dtype == torch.float32 else "kda_state_bf16"
    assert (verdict := compare(arguments["state"], expected["state"], family, name="state")), verdict
    assert torch.equal(arguments["conv_state"].cpu(), whole["conv_state"])
    if logits_dtype == torch.float32:  # and what one launch of kda_decode should give
        assert (verdict := compare(out, whole_out, "kda_output", name="out of kda_decode")), verdict


@pytest.mark.gpu
def test_kda_padding_rows_write_nothing() -> None:
    arguments, logits = kda_inputs(rows=5, heads=12, num_slots=5, device="cuda", slots=[3, 0, 1, -1, 0])
    arguments["state"][0] = NAN  # and what the null slot holds must not reach any output
    before = copied(arguments)
    convolved, read, out, _ = run_chain(arguments, logits, 12)
    for tensor in (convolved, read, out):
        assert not tensor[[1, 3, 4]].any() and tensor.isfinite().all()
    for slot in (0, 2, 4):
        assert torch.equal(arguments["state"][slot].nan_to_num(7), before["state"][slot].nan_to_num(7))
        assert torch.equal(arguments["conv_state"][slot], before["conv_state"][slot])


@pytest.mark.gpu
def test_kda_slots_beyond_2_to_the_31_bytes() -> None:
    """12 heads fp32 are 786,432 B a slot: slot 3000 starts at 2.36 GB, and 32-bit offsets would wrap."""
    arguments, logits = kda_inputs(rows=2, heads=12, num_slots=4, device="cuda", slots=[3000, 1])
    few = {name: arguments[name] for name in ("state", "conv_state")}
    for name, tensor in few.items():
        arguments[name] = torch.zeros(3001, *tensor.shape[1:], dtype=tensor.dtype, device="cuda")
        arguments[name][[3000, 1]] = tensor[[3, 1]]
    small = copied(arguments | few, "cpu") | dict(slots=torch.tensor([3, 1]))
    convolved, read, out, _ = run_chain(arguments, logits, 12)
    check_each(small, logits, convolved, read, out)
    assert (verdict := compare(arguments["state"][[3000, 1]], small["state"][[3, 1]], "kda_state_fp32")), verdict
    assert torch.equal(arguments["conv_state"][[3000, 1]].cpu(), small["conv_state"][[3, 1]])
    assert int(arguments["state"].flatten(1).any(1).sum()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_replays_of_the_kda_chain_end_alike(pdl) -> None:  # type: ignore[no-untyped-def]
    arguments, logits = kda_inputs(rows=4, heads=12, num_slots=6, device="cuda")
    start = {name: arguments[name].clone() for name in ("state", "conv_state")}
    *_, out, call = run_chain(arguments, logits, 12, pdl)
    ends = []
    for _ in range(2):
        for name, tensor in start.items():
            arguments[name].copy_(tensor)
        replay(call)
        ends.append((out.clone(), arguments["state"].clone(), arguments["conv_state"].clone()))
    for first, second in zip(*ends, strict=True):
        assert torch.equal(first, second)
    assert ends[0][0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_norm_kernel(rows, pdl) -> None:  # type: ignore[no-untyped-def]
    wide = normal(rows, 3648, device="cuda").bfloat16()
    weights = [(1 + normal(width, seed=width, device="cuda") / 4).bfloat16() for width in (1536, 512, 7168, 200)]
    first, second = poisoned(rows, 1536), poisoned(rows, 640)
    launch.norm(
        [(wide[:, :1536], weights[0], first), (wide[:, 1536:2048], weights[1], second[:, 64:576])], pdl=pdl
    )
    assert (verdict := compare(first, reference.rms_norm(wide[:, :1536], weights[0]), "bf16_activation")), verdict
    expected = reference.rms_norm(wide[:, 1536:2048], weights[1])
    assert (verdict := compare(second[:, 64:576], expected, "bf16_activation")), verdict
    assert second[:, :64].isnan().all() and second[:, 576:].isnan().all()
    for weight in weights[2:]:
        x, out = normal(rows, len(weight), seed=9, device="cuda").bfloat16(), poisoned(rows, len(weight))
        launch.norm([(x, weight, out)], pdl=pdl)
        assert (verdict := compare(out, reference.rms_norm(x, weight), "bf16_activation")), verdict
        replay(lambda x=x, weight=weight, out=out: launch.norm([(x, weight, out)], pdl=pdl), 100)
        assert (verdict := compare(out, reference.rms_norm(x, weight), "bf16_activation")), verdict


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 384), (3, 768), (16, 4224), (2, 8)])
def test_situ_and_gate_kernels(rows, width, pdl) -> None:  # type: ignore[no-untyped-def]
    wide = normal(rows, 2 * width + 64, device="cuda", scale=4.0).bfloat16()
    wide[0, :4] = torch.tensor([-200.0, 200.0, 3e38, -3e38])
    out = poisoned(rows, width)
    launch.situ(wide[:, : 2 * width], out, pdl=pdl)
    assert (verdict := compare(out, reference.situ(wide[:, : 2 * width]), "bf16_activation", name="situ")), verdict
    value, gate = normal(rows, width, seed=2, device="cuda").bfloat16(), wide[:, width : 2 * width]
    out.fill_(NAN)
    launch.gate_multiply(value, gate, out, pdl=pdl)
    assert (verdict := compare(out, reference.gate_multiply(value, gate), "bf16_activation", name="gate")), verdict


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, BF16])
@pytest.mark.parametrize(("rows", "heads", "pdl"), [(1, 6, False), (3, 12, True), (16, 6, True)])
def test_query_and_cache_kernel(rows, heads, pdl, dtype, far_slots) -> None:  # type: ignore[no-untyped-def]
    absorbed = normal(heads, rows, 512, device="cuda").bfloat16().transpose(0, 1)  # as a batched product leaves it
    extra = normal(rows, heads * 192, seed=1, device="cuda").bfloat16().view(rows, heads, 192)[..., 128:]
    latents = normal(rows, 3648, seed=2, device="cuda").bfloat16()
    latents[0, 1540] = 1000.0  # beyond e4m3
    latent, latent_extra = latents[:, 1536:2048], latents[:, 2048:2112]
    num_pages = 60000  # the last page begins beyond 2^31 bytes
    cache = torch.zeros(num_pages, 64, 576, dtype=dtype, device="cuda")
    slots = far_slots(rows, num_pages)
    query = poisoned(rows, heads, 576)
    launch.query_and_cache(absorbed, extra, latent, latent_extra, slots, query, cache, pdl=pdl)
    few = torch.zeros(rows, 64, 576, dtype=dtype, device="cuda")
    few_slots = torch.where(slots >= 0, torch.arange(rows, device="cuda") * 64, -1)
    expected = reference.query_and_cache(absorbed, extra, latent, latent_extra, few_slots, few)
    assert torch.equal(query, expected)
    flat = cache.view(-1, 576)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(flat[slot].view(torch.uint8), few[row, 0].view(torch.uint8))
            flat[slot].view(torch.uint8).zero_()
    assert not cache.view(torch.uint8).any()  # nothing else was written


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize(("rows", "heads"), [(1, 6), (1, 12), (5, 12), (8, 6), (9, 24), (16, 6), (2, 96)])
def test_lift_gate_kernel(rows, heads, pdl) -> None:  # type: ignore[no-untyped-def]
    latent = normal(rows, heads, 512, device="cuda").bfloat16()
    value_up = normal(heads, 256, 512, seed=1, device="cuda", scale=512**-0.5).bfloat16()[:, 128:]
    gate = normal(rows, heads * D + 64, seed=2, device="cuda").bfloat16()[:, 64:]
    out = poisoned(rows, heads * D)
    mla_decode.lift_gate(latent, value_up, gate, out, pdl=pdl)
    expected = mla_decode_reference.lift_gate(latent, value_up, gate)
    assert (verdict := compare(out, expected, "bf16_activation")), verdict
    first = out.clone()
    out.fill_(NAN)
    replay(lambda: mla_decode.lift_gate(latent, value_up, gate, out, pdl=pdl))
    assert torch.equal(out, first)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_greedy_kernel(ranks) -> None:  # type: ignore[no-untyped-def]
    rows = 16
    values, ids = candidates(ranks, rows, device="cuda")
    values[0, 1, 0] = NAN
    values[:, 2] = -math.inf
    values[ranks - 1, 3, 63] = math.inf  # need not be in order
    values[:, 4] = 0.0
    values[0, 4, 0] = -0.0  # equal to the others
    tokens = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    launch.sample(values, ids, tokens)
    assert torch.equal(tokens, reference.greedy(values, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_drawing_kernel(ranks) -> None:  # type: ignore[no-untyped-def]
    rows = 256
    values, ids = candidates(ranks, rows, device="cuda")
    values[:, 3] = -math.inf
    values[:, 4, 1:] = -math.inf
    ids[:, 3:5] = ids[:, 3:5].sort(-1).values
    generator = torch.Generator(device="cuda").manual_seed(1)
    uniform = torch.rand(rows, generator=generator, device="cuda")
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    temperature = torch.rand(rows, generator=generator, device="cuda") * 2
    temperature[5:8] = 0.0
    top_p = torch.rand(rows, generator=generator, device="cuda")
    top_p[8:12], top_p[12:16] = 1.0, 0.0
    tokens = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    launch.sample(values, ids, tokens, temperature=temperature, top_p=top_p, uniform=uniform)
    best, probabilities = reference.distribution(values, ids, temperature, top_p)
    sums = probabilities.cumsum(-1)
    for row, token in enumerate(tokens.tolist()):
        if row == 3:  # nothing has a probability there: the first of all
            assert token == ids[0, 3, 0]
            continue
        (at,) = (best[row] == token).nonzero().flatten().tolist()
        # Where u or top_p falls within rounding of a boundary, either side is right.
        low = sums[row, at - 1].item() if at else 0.0
        assert low - 1e-5 <= uniform[row].item() <= sums[row, at].item() + 1e-5, row
    greedy = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    launch.sample(values, ids, greedy)
    assert torch.equal(tokens[5:8], greedy[5:8]) and torch.equal(tokens[12:16], greedy[12:16])


@pytest.mark.gpu
def test_advance_kernel_over_many_replays() -> None:
    rows = 16
    pages = torch.randperm(rows * 9, generator=torch.Generator().manual_seed(0)).int().view(rows, 9).cuda()
    lengths = torch.arange(rows, dtype=torch.int32, device="cuda") * 20 + 1
    slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
    slots[2] = -1
    expected = [lengths.cpu().clone(), slots.cpu().clone()]
    launch.advance(lengths, pages[:, :8], slots)
    replay(lambda: launch.advance(lengths, pages[:, :8], slots), 400)
    for _ in range(401):
        reference.advance(expected[0], pages[:, :8].cpu(), expected[1])
    assert torch.equal(lengths.cpu(), expected[0]) and torch.equal(slots.cpu(), expected[1])
    assert (slots[-1] == -1) and (lengths[-1] == 512)  # the last row used up its table
