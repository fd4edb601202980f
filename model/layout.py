"""How a model is spread over GPUs, and what is decoded on them.

| Size | Ranks | What is cut or repeated |
| --- | --- | --- |
| ``tp`` | of a replica | the routed experts, with ``ep`` |
| ``attn_dp`` | groups inside ``tp`` | requests with their caches; ``tp / attn_dp`` ranks cut heads and the rest |
| ``dcp`` | inside an attention group | the tokens of the KV cache |
| ``ep`` | groups inside ``tp`` | whole experts; ``tp / ep`` ranks cut one |
| ``pp`` | stages | layers |
| ``dp`` | replicas | all of it; they share the concurrency and nothing else |

So ``tp * pp * dp`` GPUs. These are SGLang's sizes (``--tp-size``, ``--attn-dp-size``, ``--ep-size``, ``--pp-size``,
``--dp-size``). vLLM counts otherwise: its data-parallel ranks share the experts, and its tensor parallel size is that
of one of them; ``engine_sizes`` translates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from k3sim.errors import UserError
from k3sim.model.architecture import Architecture

KvDtype = Literal["fp8", "bf16"]
KV_DTYPE_BYTES: dict[KvDtype, int] = {"fp8": 1, "bf16": 2}

MAX_TP = 32
MAX_DP = 1024
MAX_CONCURRENCY = 4096
MAX_IMBALANCE = 64.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel layout; the sizes are those of the table above.

    ``dispatch``: tokens travel to the ranks of their experts and back (all-to-all); otherwise the attention groups
    gather all tokens. ``expert_imbalance``: tokens and experts of the busiest rank over the mean, None for what the
    routing gives. ``shard_all``: router and latent projections are divided too. ``pad_experts`` rounds each expert
    slice up to a multiple of 128, as vLLM's TRT-LLM MXFP4 backend does: nothing at TP8 (384), 192 to 256 at TP16.
    """

    tp: int = 16
    ep: int = 1
    dp: int = 1
    dcp: int = 1
    attn_dp: int = 1
    pp: int = 1
    dispatch: bool = False
    expert_imbalance: float | None = None
    shard_all: bool = False
    pad_experts: bool = False

    @property
    def attention_tp(self) -> int:
        """Ranks of an attention group."""
        return self.tp // self.attn_dp

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def num_groups(self) -> int:
        """Attention groups of all replicas, which share the requests."""
        return self.attn_dp * self.dp

    def rows(self, concurrency: int) -> int:
        """Requests of the fullest attention group."""
        return -(-concurrency // self.num_groups)

    @property
    def tag(self) -> str:
        """Short name such as ``tp16ep1dcp1``, ``tp8dp2ep1dcp1``, or ``tp16attndp2ep16dcp8``."""
        dp = f"dp{self.dp}" if self.dp > 1 else ""
        attn_dp = f"attndp{self.attn_dp}" if self.attn_dp > 1 else ""
        pp = f"pp{self.pp}" if self.pp > 1 else ""
        others = ("dispatch" if self.dispatch else "") + ("sharded" if self.shard_all else "")
        return f"tp{self.tp}{dp}{attn_dp}ep{self.ep}dcp{self.dcp}{pp}{others}"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is decoded: ``concurrency`` requests over all replicas, ``context`` cached tokens each."""

    concurrency: int = 1
    context: int = 8192
    kv_dtype: KvDtype = "fp8"

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of one value of the KV cache."""
        return KV_DTYPE_BYTES[self.kv_dtype]


def engine_sizes(flags: str, *, tp: int, dp: int, ep: int, attn_dp: int, dp_attention: bool) -> dict[str, int]:
    """The sizes of a ``Layout`` from an engine's flags.

    ``flags``: ``sglang``, whose sizes these are; or ``vllm``, where ``dp`` ranks of ``tp`` GPUs each share the experts
    and ``ep`` is 1 or all of them (``--enable-expert-parallel``). ``dp_attention``: SGLang's older spelling, in which
    ``dp`` counts attention groups inside ``tp`` (``--enable-dp-attention``).

    Raises UserError for flags that exclude one another.
    """
    if flags == "vllm":
        if attn_dp > 1 or dp_attention:
            raise UserError("attn-dp and dp-attention are SGLang's; vLLM's data parallel ranks are given by --dp")
        if ep not in (1, tp * dp):
            raise UserError(
                f"ep={ep}: in vLLM expert parallel spans all tp x dp = {tp * dp} GPUs; accepted: 1 or {tp * dp}"
            )
        return {"tp": tp * dp, "dp": 1, "ep": ep, "attn_dp": dp}
    if not dp_attention:
        return {"tp": tp, "dp": dp, "ep": ep, "attn_dp": attn_dp}
    if attn_dp > 1:
        raise UserError(f"dp-attention makes attention groups of dp={dp}, and attn-dp={attn_dp} does so too; give one")
    return {"tp": tp, "dp": 1, "ep": ep, "attn_dp": dp}


def accepted_tp(arch: Architecture, *, whole_experts: bool = False) -> tuple[int, ...]:
    """Sizes of an attention group that fit the model: powers of two up to 32 that divide every cut width.

    ``whole_experts``: no expert is cut over its ranks.
    """
    widths = _cut_widths(arch, whole_experts=whole_experts).values()
    return tuple(tp for tp in _divisors(MAX_TP) if all(width % tp == 0 for width in widths))


def check_layout(arch: Architecture, layout: Layout) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        UserError: a size is no whole number of at least 1; attn_dp does not divide tp; the ranks of an attention group
            are not a power of two up to 32 that divides heads, vocabulary and FFN widths; ep does not divide tp and the
            experts, or leaves ranks that do not divide an expert; dcp does not divide the attention group; there are
            more stages than layers; tokens are dispatched to ranks that do not hold whole experts.
    """
    for name in ("tp", "ep", "dp", "dcp", "attn_dp", "pp"):
        value = getattr(layout, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"{name.replace('_', '-')}={value!r} is not an integer; give a whole number of at least 1")
    _check_groups(arch, layout)
    _check_experts(arch, layout)
    if layout.dcp not in _divisors(layout.attention_tp):
        raise UserError(
            f"dcp={layout.dcp} at {_group_words(layout)}: the KV cache is cut over the ranks of one attention group; "
            f"accepted: {', '.join(map(str, _divisors(layout.attention_tp)))}"
        )
    if arch.gqa_layers and layout.dcp > 1:
        raise UserError(f"dcp={layout.dcp}: context parallel is not modelled for grouped-query attention; accepted: 1")
    ranks, key_heads = layout.attention_tp, arch.gqa.num_key_heads
    if arch.gqa_layers and max(key_heads, ranks) % min(key_heads, ranks):
        raise UserError(f"{_group_words(layout)}: {key_heads} key heads over {ranks} ranks; accepted: a multiple")
    if not 1 <= layout.dp <= MAX_DP:
        raise UserError(f"dp={layout.dp} replicas; 1 to {MAX_DP} are accepted")
    if not 1 <= layout.pp <= arch.num_layers:
        raise UserError(f"pp={layout.pp} stages of {arch.num_layers} layers; 1 to {arch.num_layers} are accepted")


def _group_words(layout: Layout) -> str:
    return f"tp={layout.tp}" + (f" in {layout.attn_dp} attention groups" if layout.attn_dp > 1 else "")


def _check_groups(arch: Architecture, layout: Layout) -> None:
    tp, attn_dp = layout.tp, layout.attn_dp
    if not 1 <= attn_dp <= MAX_DP or (attn_dp > 1 and (tp < attn_dp or tp % attn_dp)):
        raise UserError(f"attn-dp={attn_dp} at tp={tp}: attention groups lie inside tp; accepted: a divisor of tp")
    whole = attn_dp > 1 or layout.ep == tp
    accepted = accepted_tp(arch, whole_experts=whole)
    if attn_dp == 1 and tp not in accepted:
        raise UserError(
            f"tp={tp} on {arch.name}: {_why_not_tp(arch, tp, whole_experts=whole)}; accepted: "
            f"{', '.join(map(str, accepted))}"
        )
    if layout.attention_tp not in accepted:
        raise UserError(
            f"tp={tp} in {attn_dp} attention groups of {layout.attention_tp} on {arch.name}: "
            f"{_why_not_tp(arch, layout.attention_tp, whole_experts=True)}; accepted: groups of "
            f"{', '.join(map(str, accepted))}"
        )
    if tp > MAX_DP:
        raise UserError(f"tp={tp} ranks of a replica; 1 to {MAX_DP} are accepted")


def _check_experts(arch: Architecture, layout: Layout) -> None:
    tp, ep = layout.tp, layout.ep
    groups = _scale_groups(arch)
    fitting = [
        one for one in range(1, tp + 1)
        if tp % one == 0 and arch.moe.num_experts % one == 0 and groups % (tp // one) == 0
    ]  # fmt: skip
    if ep not in fitting:
        raise UserError(
            f"ep={ep} at tp={tp}: experts lie on the ranks of one replica, so ep divides tp and the "
            f"{arch.moe.num_experts} experts, and tp / ep the {groups} scale groups of one; accepted: "
            f"{', '.join(map(str, fitting)) or 'none at this tp'}"
        )
    if layout.dispatch and (ep != tp or layout.attn_dp == 1):
        raise UserError(
            f"expert-exchange dispatch at {_group_words(layout)}, ep={ep}: tokens are sent to ranks that hold whole "
            "experts, from attention groups that each have their own; accepted: ep equal to tp, and attn-dp above 1"
        )
    imbalance = layout.expert_imbalance
    if imbalance is not None:
        if ep == 1:
            raise UserError("expert-imbalance is of whole experts on ranks; it needs ep above 1")
        if not 1.0 <= imbalance <= MAX_IMBALANCE:
            raise UserError(f"expert-imbalance is {imbalance:g}; accepted: 1 to {MAX_IMBALANCE:g}, busiest over mean")


def check_workload(arch: Architecture, workload: Workload) -> None:
    """Refuse a workload outside the model or the simulator.

    Raises:
        UserError: concurrency outside 1..4096, context outside 1..max_position_embeddings, unknown kv_dtype.
    """
    for name, value, limit in (
        ("concurrency", workload.concurrency, MAX_CONCURRENCY),
        ("context", workload.context, arch.max_position_embeddings),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(
                f"{name}={value!r} is not an integer; a whole number from 1 to {limit} is accepted"
            )
        if not 1 <= value <= limit:
            raise UserError(f"{name}={value}; a whole number from 1 to {limit} is accepted")
    if workload.kv_dtype not in get_args(KvDtype):
        raise UserError(f"kv_dtype={workload.kv_dtype!r}; {' or '.join(get_args(KvDtype))} is accepted")


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Layers of each pipeline stage: as equal as can be, the longer ones in the middle, as vLLM divides them."""
    each, left = divmod(num_layers, num_stages)
    sizes = [each] * num_stages
    # vLLM ``get_pp_indices``: the last stage has the head, so what is left goes to those before it, from the back.
    for position in range(left):
        sizes[num_stages - 2 - position] += 1
    bounds = [sum(sizes[:position]) for position in range(num_stages + 1)]
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in range(num_stages))


def _scale_groups(arch: Architecture) -> int:
    """Groups of the expert's width that share a scale, which no cut may divide."""
    stored = arch.weight_format("moe.expert_w2")
    return arch.moe.expert_intermediate // (stored.group or max(1, stored.block[1]))


def _cut_widths(arch: Architecture, *, whole_experts: bool) -> dict[str, int]:
    """Everything that tensor parallelism divides, by the name that an error shows."""
    return {
        "KDA heads": arch.kda.num_heads,
        "attention heads": arch.mla.num_heads or arch.gqa.num_heads,
        "vocabulary": arch.vocab_size,
        "hidden size": arch.hidden_size,
        "latent size": arch.moe.latent_size,
        "experts (router rows)": arch.moe.num_experts,
        "dense intermediate": arch.dense_intermediate,
        "shared-expert intermediate": arch.moe.shared_intermediate,
        **({} if whole_experts else {"scale groups of the expert intermediate": _scale_groups(arch)}),
    }


def _why_not_tp(arch: Architecture, tp: int, *, whole_experts: bool) -> str:
    if not 1 <= tp <= MAX_TP or tp & (tp - 1):
        return f"not a power of two from 1 to {MAX_TP}"
    widths = _cut_widths(arch, whole_experts=whole_experts)
    return "it does not divide " + ", ".join(f"{width} {name}" for name, width in widths.items() if width % tp)


def _divisors(tp: int) -> list[int]:
    """Divisors of a power of two."""
    return [2**power for power in range(tp.bit_length())]
