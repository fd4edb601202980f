"""MLA decode: the reference against plain attention in float64, the merge's corner cases, the kernel on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.mla_decode import launch, reference  # noqa: E402
from k3sim.kernels.mla_decode.cases import paged_inputs as _case  # noqa: E402

E4M3 = torch.float8_e4m3fn


def test_reference_is_softmax_attention_over_unpaged_keys() -> None:
    query, cache, pages, lengths = _case(6, [1, 64, 130, 200])
    found = reference.mla_decode(query, cache, pages, lengths)
    for row, length in enumerate(lengths.tolist()):
        keys = torch.stack([cache[pages[row, token // 64], token % 64] for token in range(length)]).double()
        for head in range(6):
            scores = [float(query[row, head].double() @ key) / math.sqrt(192) for key in keys]
            largest = max(scores)
            weights = [math.exp(score - largest) for score in scores]
            values = sum(weight * key[:512] for weight, key in zip(weights, keys, strict=True)) / sum(weights)
            assert torch.allclose(found.output_BHV[row, head].double(), values, atol=2e-5)
            expected = largest + math.log(sum(weights))
            assert found.log_sum_exp_BH[row, head].item() == pytest.approx(expected, abs=2e-5)


def test_a_row_without_tokens_is_neutral() -> None:
    query, cache, pages, lengths = _case(6, [0, 10])
    output, log_sum = reference.mla_decode(query, cache, pages, lengths)
    assert (output[0] == 0).all() and (log_sum[0] == -math.inf).all()


def test_merge_of_shards_is_attention_over_all_tokens() -> None:
    query, cache, pages, lengths = _case(6, [300])
    whole = reference.mla_decode(query, cache, pages, lengths)
    shards = [[0, 2], [], [1, 3], [4]]  # pages of each rank: one rank has none
    parts = []
    for shard in shards:
        tokens = sum(min(64, 300 - 64 * page) for page in shard)
        mine = torch.tensor([[int(pages[0, page]) for page in shard] or [0]], dtype=torch.int32)
        parts.append(reference.mla_decode(query, cache, mine, torch.tensor([tokens])))
    merged = reference.lse_merge(
        torch.stack([one.output_BHV for one in parts]), torch.stack([one.log_sum_exp_BH for one in parts])
    )
    assert torch.allclose(merged.output_BHV, whole.output_BHV, atol=1e-5)
    assert torch.allclose(merged.log_sum_exp_BH, whole.log_sum_exp_BH, atol=1e-5)


def _merge_case(device="cpu"):  # type: ignore[no-untyped-def]
    """Three ranks, heads: equal sums; a gap of 1000; one empty shard whose output is NaN; all empty."""
    outputs = torch.randn(3, 1, 4, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    sums = torch.zeros(3, 1, 4)
    sums[1, 0, 1] = 1000.0
    sums[2, 0, 2], outputs[2, 0, 2] = -math.inf, math.nan
    sums[:, 0, 3], outputs[:, 0, 3] = -math.inf, math.nan
    return outputs.to(device), sums.to(device)


def test_merge_corner_cases() -> None:
    outputs, sums = _merge_case()
    merged = reference.lse_merge(outputs, sums)
    assert torch.allclose(merged.output_BHV[0, 0], outputs[:, 0, 0].float().mean(0), atol=1e-6)
    assert torch.equal(merged.output_BHV[0, 1], outputs[1, 0, 1].float())
    assert torch.allclose(merged.output_BHV[0, 2], outputs[:2, 0, 2].float().mean(0), atol=1e-6)
    assert (merged.output_BHV[0, 3] == 0).all()
    expected = [math.log(3), 1000.0, math.log(2), -math.inf]
    assert merged.log_sum_exp_BH[0].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"query": torch.zeros(1, 12, 512, dtype=torch.bfloat16)}, "query.shape"),
        ({"query": torch.zeros(1, 7, 576, dtype=torch.bfloat16)}, r"query.shape\[1\]: got 7"),
        ({"cache": torch.zeros(2, 64, 576)}, "cache: got torch.float32"),
        ({"cache": torch.zeros(2, 128, 576, dtype=torch.bfloat16)[:, ::2]}, "cache.stride"),
        ({"pages": torch.zeros(1, 2, dtype=torch.int64)}, "pages: got torch.int64"),
        ({"clusters": 16}, "clusters: got 16, accepted: 1 to 15"),
        (
            {"workspace": launch.MlaWorkspace(slices=torch.zeros(4), counters=torch.zeros(8, dtype=torch.int32))},
            "slices",
        ),
    ],
)
def test_what_cannot_be_honoured_is_named(change, named) -> None:  # type: ignore[no-untyped-def]
    query, cache, pages, lengths = _case(12, [100])
    arguments = {
        "query": query,
        "cache": cache,
        "pages": pages,
        "num_tokens": lengths,
        "out": torch.zeros(1, 12, 512, dtype=torch.bfloat16),
        "log_sum_exp": torch.zeros(1, 12),
        "workspace": launch.make_workspace(heads=12, max_rows=1, device="cpu"),
    }
    with pytest.raises(UserError, match=named):
        launch.mla_decode(**{**arguments, **change})


def test_split_fills_the_gpu_once() -> None:
    assert [launch.chosen_clusters(rows, 12) for rows in (1, 2, 3, 16, 200)] == [
        launch.MAX_CLUSTERS, launch.MAX_CLUSTERS // 2, launch.MAX_CLUSTERS // 3, 1, 1
    ]  # fmt: skip
    assert launch.chosen_clusters(1, 96) == launch.MAX_CLUSTERS // 6


def test_short_contexts_take_fewer_clusters() -> None:
    assert [launch.chosen_clusters(1, 12, pages) for pages in (0, 1, 23, 24, 128, 129, 2048)] == [
        1, 1, 1, 2, 8, 8, launch.MAX_CLUSTERS
    ]  # fmt: skip
    assert launch.chosen_clusters(4, 12, 2048) == launch.chosen_clusters(4, 12)


def _run(query, cache, pages, lengths, **options):  # type: ignore[no-untyped-def]
    rows, heads, _ = query.shape
    out = torch.full((rows, heads, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    log_sum = torch.full((rows, heads), math.nan, device="cuda")
    workspace = launch.make_workspace(heads=heads, max_rows=rows)
    launch.mla_decode(query, cache, pages, lengths, out, log_sum, workspace, **options)
    return out, log_sum, workspace


def _check_run(case, dtype, **options) -> None:  # type: ignore[no-untyped-def]
    out, log_sum, workspace = _run(*case, **options)
    expected = reference.mla_decode(*case)
    assert (verdict := compare(out, expected.output_BHV, "attention_fp8" if dtype == E4M3 else "attention_bf16")), (
        verdict
    )
    assert (verdict := compare(log_sum, expected.log_sum_exp_BH, "log_sum_exp")), verdict
    assert not workspace.counters.any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "lengths"),
    [
        (6, [8192]), (12, [1]), (12, [63]), (12, [64]), (12, [65]), (12, [8191]), (12, [131072]), (12, [0, 70, 5000]),
        (12, [9000] * 5 + [3] * 11), (24, [513, 8000]), (48, [700, 1]), (96, [700]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("settled_cache", [False, True])
def test_kernel_against_reference(heads, lengths, dtype, settled_cache) -> None:  # type: ignore[no-untyped-def]
    case = _case(heads, lengths, dtype, device="cuda", pages_in_cache=2200)
    _check_run(case, dtype, settled_cache=settled_cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
def test_many_tiles_a_block_and_maxima_that_grow(dtype) -> None:  # type: ignore[no-untyped-def]
    """256 tiles a block, so page numbers are fetched several times; scores wide enough that sums are rescaled."""
    query, *rest = _case(12, [131067, 100], dtype, device="cuda", pages_in_cache=2200)
    case = (query * 6, *rest)
    _check_run(case, dtype, clusters=1)


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31_bytes() -> None:
    cache = torch.zeros(60000, 64, 576, dtype=torch.uint8, device="cuda").view(E4M3)
    query, small, _, lengths = _case(12, [128], E4M3, device="cuda", pages_in_cache=2)
    cache[[59999, 58300]] = small
    pages = torch.tensor([[59999, 58300]], dtype=torch.int32, device="cuda")
    out, _, _ = _run(query, cache, pages, lengths)
    expected = reference.mla_decode(query, cache, pages, lengths)
    assert (verdict := compare(out, expected.output_BHV, "attention_fp8")), verdict


@pytest.mark.gpu
def test_a_thousand_replays_give_the_same_bits() -> None:
    case = _case(12, [5000, 0, 77], E4M3, device="cuda", pages_in_cache=200)
    out, log_sum, workspace = _run(*case)
    first = out.clone(), log_sum.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.mla_decode(*case, out, log_sum, workspace)
    for _ in range(10):
        out.fill_(math.nan)
        log_sum.fill_(math.nan)
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, first[0]) and torch.equal(log_sum, first[1])


@pytest.mark.gpu
def test_lse_merge_kernel() -> None:
    outputs, sums = _merge_case("cuda")
    out = torch.full((1, 4, 512), math.nan, dtype=torch.bfloat16, device="cuda")
    log_sum = torch.full((1, 4), math.nan, device="cuda")
    launch.lse_merge(outputs, sums, out, log_sum)
    expected = reference.lse_merge(outputs, sums)
    assert (verdict := compare(out, expected.output_BHV, "bf16_activation")), verdict
    assert (verdict := compare(log_sum, expected.log_sum_exp_BH, "log_sum_exp")), verdict
