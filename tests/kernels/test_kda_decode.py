"""KDA decode: the reference against independent formulas (CPU), the kernel against the reference (GPU)."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.kda_decode import launch, reference  # noqa: E402
from k3sim.kernels.kda_decode.cases import inputs  # noqa: E402

D = reference.HEAD_DIM


def step_by_step(arguments, heads):
    """One row at a time, one head at a time, float64, element by element where that is readable."""
    a = {name: tensor.double() for name, tensor in arguments.items()}
    outputs = []
    for row, slot in enumerate(arguments["slots"].tolist()):
        result = []
        for h in range(heads):

            def channel(part, d, h=h, row=row, slot=slot):
                c = (part * heads + h) * D + d
                past = [float(a["conv_state"][slot, s, c]) for s in range(3)] + [float(a["projected"][row, c])]
                x = sum(float(a["conv_weight"][c, s]) * past[s] for s in range(4))
                return x / (1 + math.exp(-x))

            q, k, v = (torch.tensor([channel(part, d) for d in range(D)], dtype=torch.float64) for part in range(3))
            q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(D)
            k = k / math.sqrt(float(k @ k) + 1e-6)
            base = 4 * heads * D
            low_rank = a["projected"][row, base : base + D]
            beta = 1 / (1 + math.exp(-float(a["projected"][row, base + D + h])))
            state = a["state"][slot, h].clone()
            rate = math.exp(float(a["a_log"][h]))
            for d in range(D):
                f = float(a["gate_weight"][h * D + d] @ low_rank) + float(a["dt_bias"][h * D + d])
                state[d] *= math.exp(-5 / (1 + math.exp(-rate * f)))
            state -= beta * torch.outer(k, k @ state)
            state += beta * torch.outer(k, v)
            a["state"][slot, h] = state
            o = q @ state
            o = o / math.sqrt(float(o @ o) / D + 1e-5) * a["norm_weight"]
            gate = a["projected"][row, 3 * heads * D + h * D : 3 * heads * D + (h + 1) * D]
            result.append(o / (1 + torch.exp(-gate)))
        outputs.append(torch.cat(result))
    return torch.stack(outputs), a["state"]


def test_reference_is_the_step_by_step_recurrence():
    arguments = inputs(rows=2, heads=2, num_slots=4)
    expected_out, expected_state = step_by_step(arguments, heads=2)
    double = {**arguments, "state": arguments["state"].double()}
    out = reference.kda_decode(*double.values(), heads=2, dtype=torch.float64)
    torch.testing.assert_close(out, expected_out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(double["state"], expected_state, rtol=1e-10, atol=1e-10)


def flas_naive_kda():
    """fla-core's naive module by itself: its package imports Triton, which needs a GPU's driver."""
    package = importlib.util.find_spec("fla")
    if package is None:
        pytest.skip("fla-core is not installed")
    path = Path(package.submodule_search_locations[0]) / "ops" / "kda" / "naive.py"
    spec = importlib.util.spec_from_file_location("flas_naive_kda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_state_is_flas_naive_recurrence():
    """fla-core states the delta rule on its own: same state from the same q, k, v, decay and beta."""
    naive = flas_naive_kda()
    heads = 3
    arguments = inputs(rows=1, heads=heads, num_slots=2)
    slot = int(arguments["slots"][0])
    before = arguments["state"][slot].clone()
    past = torch.cat([arguments["conv_state"][slot], arguments["projected"][:1, : 3 * heads * D]]).float()
    x = (past * arguments["conv_weight"].T).sum(0)
    q, k, v = (x * x.sigmoid()).view(3, 1, 1, heads, D)
    k = torch.nn.functional.normalize(k, dim=-1)
    q = torch.nn.functional.normalize(q, dim=-1)
    base = 4 * heads * D
    low_rank = arguments["projected"][0, base : base + D].float()
    f = (arguments["gate_weight"].float() @ low_rank + arguments["dt_bias"]).view(heads, D)
    log_decay = -5 * (f * arguments["a_log"][:heads, None].exp()).sigmoid()
    beta = arguments["projected"][0, base + D : base + D + heads].float().sigmoid()
    o, state = naive.naive_recurrent_kda(
        q, k, v, log_decay[None, None], beta[None, None], initial_state=before[None], output_final_state=True
    )
    o = o[0, 0] * (o[0, 0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * arguments["norm_weight"]
    expected = (o * arguments["projected"][0, 3 * heads * D : base].view(heads, D).float().sigmoid()).flatten()
    out = reference.kda_decode(*arguments.values(), heads=heads)
    torch.testing.assert_close(out[0], expected, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(arguments["state"][slot], state[0], rtol=1e-4, atol=1e-5)


def test_reference_keeps_three_samples_and_leaves_padding_alone():
    arguments = inputs(rows=2, heads=1, num_slots=3, slots=torch.tensor([2, 0]))
    before = {name: tensor.clone() for name, tensor in arguments.items()}
    out = reference.kda_decode(*arguments.values(), heads=1)
    conv_state = arguments["conv_state"]
    assert torch.equal(conv_state[2, :2], before["conv_state"][2, 1:])
    assert torch.equal(conv_state[2, 2], before["projected"][0, : 3 * D])
    assert torch.equal(out[1], torch.zeros(D))
    for untouched in (0, 1):
        assert torch.equal(conv_state[untouched], before["conv_state"][untouched])
        assert torch.equal(arguments["state"][untouched], before["state"][untouched])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (dict(heads=8), "heads: got 8"),
        (dict(projected=torch.zeros(2, 3224)), "projected: got torch.float32"),
        (dict(projected=torch.zeros(2, 3200, dtype=torch.bfloat16)), "projected.shape"),
        (dict(slots=torch.ones(2, dtype=torch.int64)), "slots: got torch.int64"),
        (dict(state=torch.zeros(3, 6, D, D, dtype=torch.float16)), "state: got torch.float16"),
        (dict(state=torch.zeros(3, 6, D, D).transpose(2, 3)), "state.stride"),
        (dict(conv_state=torch.zeros(2, 3, 3 * 6 * D, dtype=torch.bfloat16)), "conv_state.shape"),
        (dict(out=torch.zeros(2, 5 * D, dtype=torch.bfloat16)), "out.shape"),
        (dict(cluster=3), "cluster: got 3"),
    ],
)
def test_a_bad_argument_is_named_before_any_launch(changed, named):
    arguments = inputs(rows=2, heads=6, num_slots=3)
    arguments |= dict(out=torch.zeros(2, 6 * D, dtype=torch.bfloat16), heads=6)
    with pytest.raises(UserError, match=named.replace("[", r"\[")):
        launch.kda_decode(**(arguments | changed))


# ---- on a GPU -----------------------------------------------------------------------------------------------------


def check_step(arguments, heads, cluster, family):
    """Kernel against reference on the same inputs: output, state, past samples, everything else untouched."""
    rows = arguments["projected"].shape[0]
    expected = {name: tensor.cpu().clone() for name, tensor in arguments.items()}
    expected_out = reference.kda_decode(*expected.values(), heads=heads)
    out = torch.full((rows, heads * D), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.kda_decode(**arguments, out=out, heads=heads, cluster=cluster)
    torch.cuda.synchronize()
    for verdict in (
        compare(out, expected_out, "kda_output", name="out"),
        compare(arguments["state"], expected["state"], family, name="state"),
    ):
        assert verdict, str(verdict)
    assert torch.equal(arguments["conv_state"].cpu(), expected["conv_state"])


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cluster", [None, 0, 2, 4, 8])
@pytest.mark.parametrize(("heads", "rows"), [(6, 1), (12, 1), (12, 8), (24, 3), (48, 2), (96, 1), (12, 33), (6, 256)])
def test_every_form_matches_the_reference(heads, rows, cluster, state_dtype):
    arguments = inputs(rows=rows, heads=heads, num_slots=rows + 3, state_dtype=state_dtype, device="cuda", seed=rows)
    check_step(arguments, heads, cluster, "kda_state_fp32" if state_dtype == torch.float32 else "kda_state_bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [0, 2, 4, 8])
def test_padding_rows_write_nothing(cluster):
    slots = torch.tensor([3, 0, 1, -1, 0], device="cuda")
    arguments = inputs(rows=5, heads=12, num_slots=5, device="cuda", slots=slots)
    arguments["state"][0] = math.nan  # and what the null slot holds must not reach any output
    check_state, check_conv = arguments["state"].clone(), arguments["conv_state"].clone()
    out = torch.full((5, 12 * D), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.kda_decode(**arguments, out=out, heads=12, cluster=cluster)
    torch.cuda.synchronize()
    assert torch.equal(out[[1, 3, 4]], torch.zeros_like(out[[1, 3, 4]]))
    assert out.isfinite().all()
    for slot in (0, 2, 4):
        assert torch.equal(arguments["state"][slot].nan_to_num(7), check_state[slot].nan_to_num(7))
        assert torch.equal(arguments["conv_state"][slot], check_conv[slot])


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [0, 2, 4, 8])
def test_slots_beyond_2_to_the_31_bytes(cluster):
    """12 heads fp32 are 786,432 B a slot: slot 3000 starts at 2.36 GB, and 32-bit offsets would wrap."""
    num_slots, heads = 3001, 12
    arguments = inputs(rows=2, heads=heads, num_slots=4, device="cuda", slots=torch.tensor([3000, 1], device="cuda"))
    few_state, few_conv = arguments["state"], arguments["conv_state"]
    state = torch.zeros(num_slots, heads, D, D, device="cuda")
    conv_state = torch.zeros(num_slots, 3, 3 * heads * D, dtype=torch.bfloat16, device="cuda")
    state[[3000, 1]], conv_state[[3000, 1]] = few_state[[3, 1]], few_conv[[3, 1]]
    small = {name: tensor.cpu().clone() for name, tensor in arguments.items()} | dict(slots=torch.tensor([3, 1]))
    expected_out = reference.kda_decode(*small.values(), heads=heads)
    out = torch.full((2, heads * D), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.kda_decode(**(arguments | dict(state=state, conv_state=conv_state)), out=out, heads=heads, cluster=cluster)
    assert (verdict := compare(out, expected_out, "kda_output")), str(verdict)
    verdict = compare(state[[3000, 1]], small["state"][[3, 1]], "kda_state_fp32")
    assert verdict, str(verdict)
    assert int(state.flatten(1).any(1).sum()) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("cluster", [0, 8])
def test_a_thousand_replays_end_alike(cluster, pdl, chain_ends):
    """Two chains of 1,000 steps from the same state, each a replayed graph, end bit-equal."""
    heads = 12
    arguments = inputs(rows=4, heads=heads, num_slots=6, device="cuda")
    start = {name: arguments[name].clone() for name in ("state", "conv_state")}
    out = torch.empty(4, heads * D, dtype=torch.bfloat16, device="cuda")

    def step():
        launch.kda_decode(**arguments, out=out, heads=heads, cluster=cluster, pdl=pdl)

    ends = chain_ends(step, start, arguments, (out, arguments["state"], arguments["conv_state"]))
    assert ends[0][0].isfinite().all()
