"""Programs: kernels a layer, exchanges, bytes of weights, and what each call waits for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from k3sim.model.config_file import load_architecture
from k3sim.model.layout import Layout, Workload
from k3sim.model.paths import SWITCHES, find_path
from k3sim.model.program import Call, Program, build_program, layer_kind
from k3sim.model.step import Path

K3 = load_architecture()
PATHS = ("stock", "fused", "megakernel")
GB = 1e9


def program(path: Path | str, layout: Layout | None = None, workload: Workload | None = None, **how: object) -> Program:
    return build_program(
        K3,
        layout or Layout(),
        workload or Workload(),
        find_path(path) if isinstance(path, str) else path,
        **how,  # type: ignore[arg-type]
    )


def weight_bytes(one: Program) -> int:
    """Bytes of weight matrices that one rank reads in the step; a prefetch is no second read."""
    return sum(w.num_bytes for call in one.calls if call.operator != "l2_prefetch.bulk" for w in call.weights)


def stages(one: Program, layer: int) -> list[str]:
    return [call.stage for call in one.calls if call.layer == layer]


# -- weights --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "tp", "pads", "expected_gb"),
    [
        # docs of the architecture: bytes a rank and token, up-projection sharded; experts padded to 256 at TP16.
        ("stock", 8, True, 23.04),
        ("stock", 16, True, 15.45),
        # latent down-projection and router divided too, experts as they are
        ("fused", 8, False, 17.87),
        ("fused", 16, False, 9.37),
        ("megakernel", 8, False, 17.87),
        ("megakernel", 16, False, 9.37),
    ],
)
def test_weight_bytes_of_a_rank_and_step(path: str, tp: int, pads: bool, expected_gb: float) -> None:
    layout = find_path(path).layout(Layout(tp=tp), Workload(), None)
    assert layout.pad_experts is (path == "stock")
    one = program(path, replace(layout, pad_experts=pads))
    assert weight_bytes(one) / GB == pytest.approx(expected_gb, rel=0.001)


def test_weight_bytes_of_stock_at_tp16_by_hand() -> None:
    kda = 46_104_576 + 196_608 + 11_010_048
    mla = 30_277_632 + 11_010_048 + 3_538_944 + 2 * 786_432 + 11_010_048
    moe = 12_845_056 + 51_380_224 + 15_597_568 + 7_798_784 + 11_010_048 + 5_505_024 + 3_211_264
    expected = 69 * kda + 24 * mla + 92 * moe + 60_555_264 + 30_277_632 + 146_800_640
    assert weight_bytes(program("stock", Layout(tp=16, pad_experts=True))) == expected


def test_each_weight_is_read_once_by_its_layer() -> None:
    for path in PATHS:
        seen: Counter[str] = Counter()
        for call in program(path).calls:
            if call.operator == "l2_prefetch.bulk":
                continue
            for weight in call.weights:
                seen[weight.region] += 1
                assert weight.region.split("/")[0] == str(call.layer)
        assert set(seen.values()) == {1}


def test_a_prefetch_fetches_what_a_later_kernel_reads() -> None:
    one = program("fused")
    readers = {w.region: call.index for call in one.calls if call.operator != "l2_prefetch.bulk" for w in call.weights}
    prefetched = [(call, w) for call in one.calls if call.operator == "l2_prefetch.bulk" for w in call.weights]
    assert prefetched
    for call, weight in prefetched:
        assert readers[weight.region] > call.index
        assert int(weight.region.split("/")[0]) - call.layer in (0, 1)
    last = [w.region for call, w in prefetched if call.layer == 92 and call.stage == "prefetch.next"]
    assert last == ["92/moe.latent_up_shard"]  # nothing follows the last layer


def test_rows_read_the_experts_that_they_pick() -> None:
    def experts(concurrency: int) -> int:
        one = program("fused", workload=Workload(concurrency=concurrency), only_layers=(1,))
        return sum(w.num_bytes for call in one.calls for w in call.weights if w.region.startswith("1/moe.expert_"))

    assert experts(1) == 11_698_176 + 5_849_088
    # Eight rows pick 896 (1 - (1 - 16/896)^8) = 120.3 experts.
    assert experts(8) / experts(1) == pytest.approx(896 * (1 - (1 - 16 / 896) ** 8) / 16, rel=1e-4)


# -- launches and exchanges -----------------------------------------------------------------------------------------


def test_launches_of_stock_at_tp8() -> None:
    one = program("stock", Layout(tp=8, pad_experts=True))
    kinds = Counter(layer_kind(K3, layer) for layer in range(93))
    assert kinds == {"kda+dense": 1, "kda+moe": 68, "mla+moe": 24}
    # vLLM's kernels as counted in public sources: 19 and 25 a layer, 11 in layer 0, 6 around the layers. Here the
    # public routing is three kernels (selection, packing, indices), hence two more in each of 92 layers, and what
    # the host launches before and after the graph counts as one call each. SGLang's graph was counted at 2,211
    # launches, with its context-parallel exchanges (xiaguan/kern-k3-pp-prefill, 2026-10).
    assert {len(stages(one, layer)) for layer in range(1, 93) if K3.mixer(layer) == "kda"} == {19 + 2}
    assert {len(stages(one, layer)) for layer in range(1, 93) if K3.mixer(layer) == "mla"} == {25 + 2}
    assert len(stages(one, 0)) == 11
    assert len(stages(one, -1)) + len(stages(one, 93)) == 6 + 2
    assert len(one.calls) == 68 * 19 + 24 * 25 + 11 + 6 + 2 * 92 + 2


def test_stock_at_tp16_runs_kda_unfused() -> None:
    # The public fused KDA kernel needs twelve heads a rank; six heads take three kernels in its place.
    assert len(stages(program("stock", Layout(tp=16)), 1)) == len(stages(program("stock", Layout(tp=8)), 1)) + 2


def test_the_optimised_paths_run_fewer_kernels() -> None:
    counts = [len(program(path, Layout(tp=8)).calls) for path in PATHS]
    assert counts == sorted(counts, reverse=True)
    assert counts[1] < 1500  # public low-latency builds: 1400 to 1500


@pytest.mark.parametrize(("path", "exchanges"), [("stock", 280), ("fused", 280 + 92), ("megakernel", 280 + 92)])
def test_exchanges_between_ranks(path: str, exchanges: int) -> None:
    # Embedding, attention of 93 layers, the dense FFN, two in each MoE layer, logits; shared routing adds one a layer.
    assert (
        sum(bool(call.sends) for call in program(path, Layout(tp=8)).calls)
        == exchanges
        == (1 + 93 + 1 + 2 * 92 + 1 + (92 if path != "stock" else 0))
    )


def test_one_rank_exchanges_nothing() -> None:
    for path in PATHS:
        assert not any(call.sends or call.receives for call in program(path, Layout(tp=1)).calls)


def test_context_parallel_adds_two_exchanges_a_full_layer() -> None:
    for path in PATHS:
        plain, spread = (program(path, Layout(tp=8, dcp=dcp)) for dcp in (1, 4))
        extra = Counter(call.sends for call in spread.calls) - Counter(call.sends for call in plain.calls)
        assert {name: extra[name] for name in ("query", "context")} == {"query": 24, "context": 24}
        assert {call.group_size for call in spread.calls if call.sends in ("query", "context")} == {4}
        (attention,) = {tuple(sorted(call.shape.items())) for call in spread.calls if call.stage == "mla.attention"}
        assert dict(attention)["heads"] == 12 * 4
        assert dict(attention)["context"] == 8192 // 4


# -- order ----------------------------------------------------------------------------------------------------------

SUBSETS = [tuple(s for s, on in zip(SWITCHES, bits, strict=True) if on) for bits in product((0, 1), repeat=4)]
LAYOUTS = [
    Layout(tp=1),
    Layout(tp=2, ep=2),
    Layout(tp=4, dcp=2),
    Layout(tp=8, ep=8, dp=2),
    Layout(tp=8, dcp=8),
    Layout(tp=16, pad_experts=True),
    Layout(tp=32, ep=4, dcp=2),
]


def check(one: Program) -> None:
    by_index = dict(enumerate(one.calls))
    for index, call in enumerate(one.calls):
        assert call.index == index
        assert all(earlier < index for earlier in call.after)
        for sender in call.receives:
            assert sender <= index
            assert by_index[sender].sends
        assert call.launch in ("graph", "pdl", "task", "host")
        assert call.trigger in ("start", "stream", "end")
        assert not call.sends or call.group_size > 1
        assert all(value >= 0 for value in call.shape.values())
    received = {sender for call in one.calls for sender in call.receives}
    unheard = [call.stage for call in one.calls if call.sends and call.index not in received]
    assert unheard == [], "an exchange that nobody waits for"
    # A side stream that nobody joins would run on its own for ever: each kernel is awaited by another stream or is
    # followed by one that is. The snapshot sums are ready a whole sublayer before they are needed.
    joined = {index for call in one.calls for index in call.after}
    awaited = False
    for call in reversed(one.calls):
        if call.stream == "aux" and call.stage != "attn_res.snapshots":
            awaited = awaited or call.index in joined
            assert awaited, call.stage


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.tag)
def test_every_path_builds_for_every_layout_and_concurrency(layout: Layout) -> None:
    paths = [
        find_path("stock"),
        find_path("megakernel"),
        find_path("fused"),
        find_path("fused", with_switches=("fused-allreduce",)),
    ]
    for path, concurrency in product(paths, (1, 4, 9, 64)):
        # A KDA layer of each ffn and a full-attention layer carry every row of the tables.
        check(program(path, layout, Workload(concurrency=concurrency), only_layers=(0, 1, 2, 3, 4)))


@pytest.mark.parametrize("switches", SUBSETS, ids=lambda switches: "+".join(switches) or "none")
def test_every_set_of_switches_builds(switches: tuple[str, ...]) -> None:
    path = find_path("fused", with_switches=switches) if switches else find_path("stock")
    for layout, concurrency in product(LAYOUTS[3:], (1, 64)):
        check(program(path, layout, Workload(concurrency=concurrency), only_layers=(0, 1, 2, 3, 4)))


def test_a_kernel_waits_for_another_streams_latest_call() -> None:
    one = program("stock", Layout(tp=8))
    for layer in (1, 50, 92):
        here: dict[str, Call] = {call.stage: call for call in one.calls if call.layer == layer}
        assert here["moe.latent_down"].after == (here["attn_res.ffn"].index,)
        assert here["moe.quantise"].after == (here["moe.latent_down"].index,)
        assert here["moe.tail_reduce"].after == (here["moe.shared_down"].index,)
        assert here["moe.tail_copy"].receives == (here["moe.latent_up"].index,)
    first, second = (next(c for c in one.calls if (c.layer, c.stage) == (n, "moe.tail_copy")) for n in (1, 2))
    assert first.receives != second.receives


def test_the_fused_path_receives_from_the_layer_before() -> None:
    one = program("fused", Layout(tp=8))
    at = {(call.layer, call.stage): call for call in one.calls}
    assert at[0, "attn_res.mixer"].receives == (at[-1, "embed.push"].index,)
    assert at[1, "attn_res.mixer"].receives == (at[0, "dense.down"].index,)
    assert at[5, "attn_res.mixer"].receives == (at[4, "moe.latent_up"].index,)
    assert at[93, "head.attn_res"].receives == (at[92, "moe.latent_up"].index,)
    assert at[5, "attn_res.ffn"].receives == (at[5, "kda.o_proj"].index,)


def test_data_parallel_replicas_share_the_requests() -> None:
    assert {
        c.shape["rows"]
        for c in program("fused", Layout(tp=8, dp=4), Workload(concurrency=9)).calls
        if "rows" in c.shape
    } == {3}
