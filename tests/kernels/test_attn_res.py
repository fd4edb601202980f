"""AttnRes: the reference against an independent float64 form (CPU), the kernels against the reference (GPU)."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.attn_res import launch, reference  # noqa: E402
from k3sim.kernels.attn_res.cases import inputs  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402

HIDDEN = 7168


def one_row(sources, query_norm, query, norm_weight):
    """The definition for one row in float64 with Python scalars where sums are taken."""
    logits = []
    for v in sources:
        rms = math.sqrt(float(v @ v) / v.numel() + 1e-5)
        logits.append(float((v / rms * query_norm) @ query))
    exponentials = [math.exp(one - max(logits)) for one in logits]
    mix = sum(e / math.fsum(exponentials) * v for e, v in zip(exponentials, sources, strict=True))
    return mix / math.sqrt(float(mix @ mix) / mix.numel() + 1e-5) * norm_weight


@pytest.mark.parametrize("num_snapshots", [0, 1, 8])
def test_reference_is_the_definition(num_snapshots):
    a = {name: tensor.double() for name, tensor in inputs(rows=2, num_snapshots=num_snapshots, hidden=64).items()}
    snapshots = a["snapshots"][:, :num_snapshots]
    out = reference.attn_res(snapshots, a["prefix"], a["query_norm"], a["query"], a["norm_weight"], dtype=torch.float64)
    for row in range(2):
        expected = one_row([*snapshots[row], a["prefix"][row]], a["query_norm"], a["query"], a["norm_weight"])
        torch.testing.assert_close(out[row], expected, rtol=1e-12, atol=1e-12)


def test_snapshot_part_and_prefix_merge_to_the_whole():
    """Online softmax: with m = max(part, prefix), both parts scaled by exp(own - m) give the softmax over all."""
    a = {name: tensor.double() for name, tensor in inputs(rows=3, num_snapshots=4, hidden=64).items()}
    weights = (a["query_norm"], a["query"])
    part = reference.snapshot_part(a["snapshots"][:, :4], *weights, dtype=torch.float64)
    logit = reference.rms_norm(a["prefix"], a["query_norm"]) @ a["query"]
    maximum = torch.maximum(part.maximum_B, logit)
    old, new = (part.maximum_B - maximum).exp(), (logit - maximum).exp()
    mix = (old[:, None] * part.weighted_BD + new[:, None] * a["prefix"]) / (old * part.denominator_B + new)[:, None]
    expected = reference.attn_res(a["snapshots"][:, :4], a["prefix"], *weights, a["norm_weight"], dtype=torch.float64)
    torch.testing.assert_close(reference.rms_norm(mix, a["norm_weight"]), expected, rtol=1e-12, atol=1e-12)


def test_add_delta_rounds_once():
    prefix, delta = torch.tensor([[1.0, 256.0]]).bfloat16(), torch.tensor([[2**-9, 1.0]]).bfloat16()
    reference.add_delta(prefix, delta)
    assert prefix.tolist() == [[1.0, 256.0]]  # half a unit in the last place: to even, both times


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(prefix=torch.zeros(2, 7168)), "prefix: got torch.float32"),
        (dict(prefix=torch.zeros(2, 7000, dtype=torch.bfloat16)), "prefix.shape"),
        (dict(delta=torch.zeros(1, 7168, dtype=torch.bfloat16)), "delta.shape"),
        (dict(num_snapshots=9), "num_snapshots: got 9"),
        (dict(num_snapshots=5), "snapshots.shape"),
        (dict(query=torch.zeros(7169, dtype=torch.bfloat16)[1:]), "query.data_ptr"),
    ],
)
def test_a_bad_argument_is_named_before_any_launch(changed, named):
    arguments = inputs(rows=2, num_snapshots=3)
    arguments |= dict(out=torch.zeros(2, HIDDEN, dtype=torch.bfloat16), num_snapshots=3)
    with pytest.raises(UserError, match=named):
        launch.attn_res(**(arguments | changed))


# ---- on a GPU -----------------------------------------------------------------------------------------------------


def expected_of(arguments, num_snapshots, *, with_delta):
    """Expected prefix and output in fp32 on the CPU."""
    a = {name: tensor.cpu().clone() for name, tensor in arguments.items()}
    if with_delta:
        reference.add_delta(a["prefix"], a["delta"])
    out = reference.attn_res(
        a["snapshots"][:, :num_snapshots], a["prefix"], a["query_norm"], a["query"], a["norm_weight"]
    )
    return a["prefix"], out


@pytest.mark.gpu
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 256])
@pytest.mark.parametrize("num_snapshots", range(9))
def test_combine_matches_the_reference(num_snapshots, rows, with_delta):
    arguments = inputs(rows=rows, num_snapshots=num_snapshots, device="cuda", seed=num_snapshots)
    arguments["snapshots"][:, num_snapshots:] = math.nan
    prefix, expected = expected_of(arguments, num_snapshots, with_delta=with_delta)
    out = torch.full((rows, HIDDEN), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.attn_res(**(arguments | ({} if with_delta else dict(delta=None))), out=out, num_snapshots=num_snapshots)
    assert (verdict := compare(out, expected, "bf16_activation")), str(verdict)
    assert torch.equal(arguments["prefix"].cpu(), prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 256])
@pytest.mark.parametrize("num_snapshots", range(1, 9))
def test_part_and_prefix_match_the_reference(num_snapshots, rows):
    arguments = inputs(rows=rows, num_snapshots=num_snapshots, device="cuda", seed=num_snapshots)
    prefix, expected = expected_of(arguments, num_snapshots, with_delta=True)
    out = torch.full((rows, HIDDEN), math.nan, dtype=torch.bfloat16, device="cuda")
    stats = torch.full((rows, 2), math.nan, device="cuda")
    weighted = torch.full((rows, HIDDEN), math.nan, device="cuda")
    weights = dict(query_norm=arguments["query_norm"], query=arguments["query"])
    launch.snapshot_part(arguments["snapshots"], **weights, stats=stats, weighted=weighted, num_snapshots=num_snapshots)
    part = reference.snapshot_part(
        arguments["snapshots"][:, :num_snapshots].cpu(), *(one.cpu() for one in weights.values())
    )
    assert (verdict := compare(weighted, part.weighted_BD, "fp32_sum")), str(verdict)
    launch.fold_prefix(
        stats, weighted, arguments["prefix"], arguments["delta"], **weights,
        norm_weight=arguments["norm_weight"], out=out,
    )  # fmt: skip
    assert (verdict := compare(out, expected, "bf16_activation")), str(verdict)
    assert torch.equal(arguments["prefix"].cpu(), prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_thousand_replays_end_alike(pdl, chain_ends):
    """A chain that feeds its output back as the next delta: two runs of 1,000 replays end bit-equal."""
    arguments = inputs(rows=2, num_snapshots=3, device="cuda")
    out = arguments["delta"]
    start = {name: arguments[name].clone() for name in ("prefix", "delta")}
    stats, weighted = torch.empty(2, 2, device="cuda"), torch.empty(2, HIDDEN, device="cuda")
    weights = dict(query_norm=arguments["query_norm"], query=arguments["query"])

    def step():
        launch.attn_res(**arguments, out=out, num_snapshots=3, pdl=pdl)
        launch.fold_prefix(
            stats, weighted, arguments["prefix"], arguments["delta"], **weights,
            norm_weight=arguments["norm_weight"], out=out, pdl=pdl,
        )  # fmt: skip

    launch.snapshot_part(arguments["snapshots"], **weights, stats=stats, weighted=weighted, num_snapshots=3)
    chain_ends(step, start, arguments, (out, arguments["prefix"]))
