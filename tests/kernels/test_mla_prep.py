"""MLA preparation: absorbed scores against plain keys in float64, refusals, the kernel on a GPU."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from k3sim.errors import UserError  # noqa: E402
from k3sim.kernels.harness.tolerance import compare  # noqa: E402
from k3sim.kernels.mla_prep import launch, reference  # noqa: E402
from k3sim.kernels.mla_prep.cases import inputs as _case  # noqa: E402

E4M3 = torch.float8_e4m3fn


def test_absorbed_query_gives_the_scores_of_plain_keys() -> None:
    latents, query_norm, kv_norm, query_up, key_up = _case(2, 6)
    query, row = reference.mla_prep(latents[:, :2112], query_norm, kv_norm, query_up, key_up)

    def norm(x, weight):  # type: ignore[no-untyped-def]
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight.double()

    q_latent, kv, extra = (part.double() for part in latents[:, :2112].split((1536, 512, 64), dim=-1))
    plain_query = (norm(q_latent, query_norm) @ query_up.double().T).view(2, 6, 192)
    latent_key = norm(kv, kv_norm)
    for head in range(6):
        keys = torch.cat([latent_key @ key_up[head].double().T, extra], dim=-1)  # as if keys were formed
        assert torch.allclose(query[:, head].double() @ row.double().T, plain_query[:, head] @ keys.T, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"latents": torch.zeros(1, 2048, dtype=torch.bfloat16)}, r"latents.shape\[1\]: got 2048"),
        (
            {"latents": torch.zeros(2, 2884, dtype=torch.bfloat16), "query": torch.zeros(2, 6, 576).bfloat16()},
            "latents.stride",
        ),
        ({"query_up": torch.zeros(6 * 128, 1536, dtype=torch.bfloat16)}, "query_up.shape"),
        ({"key_up": torch.zeros(6, 512, 128, dtype=torch.bfloat16).transpose(1, 2)}, "key_up.stride"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, "slots: got torch.int32"),
        ({"cache": torch.zeros(2, 64, 576, dtype=torch.float16)}, "cache: got torch.float16"),
        ({"query": torch.zeros(17, 6, 576, dtype=torch.bfloat16)}, r"query.shape\[0\]: got 17"),
    ],
)
def test_what_cannot_be_honoured_is_named(change, named) -> None:  # type: ignore[no-untyped-def]
    latents, query_norm, kv_norm, query_up, key_up = _case(1, 6)
    arguments = {
        "latents": latents,
        "query_norm": query_norm,
        "kv_norm": kv_norm,
        "query_up": query_up,
        "key_up": key_up,
        "slots": torch.zeros(1, dtype=torch.int64),
        "query": torch.zeros(1, 6, 576, dtype=torch.bfloat16),
        "cache": torch.zeros(2, 64, 576, dtype=torch.bfloat16),
    }
    with pytest.raises(UserError, match=named):
        launch.mla_prep(**{**arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads"), [(1, 6), (1, 12), (3, 12), (8, 24), (16, 6), (2, 96)])
def test_kernel_against_reference(rows, heads, dtype, far_slots) -> None:  # type: ignore[no-untyped-def]
    case = _case(rows, heads, "cuda")
    num_pages = 60000  # the last page begins beyond 2^31 bytes
    cache = torch.zeros(num_pages, 64, 576, dtype=dtype, device="cuda")
    slots = far_slots(rows, num_pages)
    query = torch.full((rows, heads, 576), math.nan, dtype=torch.bfloat16, device="cuda")
    launch.mla_prep(*case, slots, query, cache)
    expected = reference.mla_prep(case[0][:, :2112], *case[1:], carry=torch.bfloat16)
    assert (verdict := compare(query, expected.query_BHD, "bf16_activation")), verdict
    flat = cache.view(-1, 576)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            want = expected.row_BD[row]
            bound = want.abs() * (2**-3.9 if dtype == E4M3 else 2**-8) + (2e-3 if dtype == E4M3 else 1e-4)
            assert ((flat[slot].float() - want).abs() <= bound).all()
            flat[slot] = torch.zeros(576, device="cuda").to(dtype)
    assert not cache.view(torch.uint8).any()  # nothing else was written
