"""Instructions of MLA at one row: what each call of the fused path becomes.

========================  ========================================================================================
``mla.qkv_a_gate``        as any product of the residual
``mla.prep``              rows of the query's up-projection, each SM with the norm of the query's latent; then rows of
                          the absorption, ``w_uk`` by outputs, a row for each of a head's 512
``mla.attention``         a page of 64 tokens an instruction, for all heads, since they share the rows; pages dealt to
                          all SMs, their rows through the ring
``mla.lift_gate``         parts of all pages merged, columns dealt to all SMs; then rows of ``w_uv`` and the gate
========================  ========================================================================================

The row of the newest token does not come from the cache: the instruction of its page makes it from the latents and
writes it there, where the ring reads nothing ahead. So a list is one of a length of context, and its pages lie one
behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from k3sim.kernels.megakernel.instructions import Access, Instruction, Opcode, Stream
from k3sim.kernels.megakernel.list_builder import HALVES, STAGE_BYTES, ListBuilder
from k3sim.kernels.mla_decode.cache import LATENT, PAGE_TOKENS, ROW
from k3sim.model.program import Call

ROW_BYTES = 2 * ROW
PAGE_BYTES = PAGE_TOKENS * ROW_BYTES
PART_WORDS = LATENT + HALVES  # of a page and a head: output, log-sum-exp
LATENTS, QUERY, ABSORBED, MERGED = "mla.qkv_a_gate", "mla.query", "mla.absorbed", "mla.merged"


def _prep(builder: ListBuilder, call: Call) -> None:
    """Two products, one behind the other."""
    query_up, key_up = call.weights
    for opcode, source, stage, weight in (
        (Opcode.MLA_QUERY, LATENTS, QUERY, query_up),
        (Opcode.MLA_ABSORB, QUERY, ABSORBED, key_up),
    ):
        dealt, wait, reads = list(builder.dealt(weight.num_outputs)), builder.made[source].wait, builder.reads(source)
        made = builder.makes(call, stage, weight.num_outputs, len(dealt))
        for sm, first, last in dealt:
            builder.add(
                Instruction(
                    opcode=opcode, stage=stage, layer=call.layer, sm=sm, first=first, count=last - first,
                    depth=weight.depth, waits=(wait,), signals=(made.wait.counter,),
                    streams=(builder.rows(weight, first, last - first, STAGE_BYTES // (2 * weight.depth)),),
                    reads=(reads,),
                    writes=(Access(region=builder.words(stage, first, last - first), version=made.version),),
                )
            )  # fmt: skip


def _attention(builder: ListBuilder, call: Call) -> None:
    """``first``: the page; ``count``: its tokens, the newest included."""
    context, heads = call.shape["context"], call.shape["heads"]
    num_pages, words = -(-context // PAGE_TOKENS), heads * PART_WORDS
    cache = f"{call.layer}/mla.cache"
    builder.whole(cache, num_pages * PAGE_BYTES)
    wait = builder.made[ABSORBED].wait
    inputs = (builder.reads(ABSORBED), builder.reads(QUERY))
    made = builder.makes(call, call.stage, num_pages * words, num_pages)
    for page in range(num_pages):
        count = min(PAGE_TOKENS, context - page * PAGE_TOKENS)
        is_newest = page == num_pages - 1
        cached = builder.part(cache, page * PAGE_BYTES, (count - is_newest) * ROW_BYTES)
        row = builder.part(cache, (context - 1) * ROW_BYTES, ROW_BYTES)
        writes = [Access(region=builder.words(call.stage, page * words, words), version=made.version)]
        writes += [Access(region=row, version=made.version)] if is_newest else []
        stage_bytes = STAGE_BYTES // ROW_BYTES * ROW_BYTES
        builder.add(
            Instruction(
                opcode=Opcode.MLA_ATTEND, stage=call.stage, layer=call.layer, sm=page % builder.num_sms, first=page,
                count=count, depth=ROW, waits=(wait,), signals=(made.wait.counter,),
                streams=(Stream(region=cached, stage_bytes=stage_bytes),) if count > is_newest else (),
                reads=(*inputs, builder.reads(LATENTS)) if is_newest else inputs, writes=tuple(writes),
            )
        )  # fmt: skip


def _lift_gate(builder: ListBuilder, call: Call) -> None:
    """Columns of the merge, then rows of the product."""
    (value_up,) = call.weights
    parts, reads = builder.made["mla.attention"], builder.reads("mla.attention")
    num_columns = parts_columns(builder)
    dealt = list(builder.dealt(num_columns))
    merged = builder.makes(call, MERGED, num_columns, len(dealt))
    for sm, first, last in dealt:
        builder.add(
            Instruction(
                opcode=Opcode.MLA_MERGE, stage=MERGED, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=LATENT, waits=(parts.wait,), signals=(merged.wait.counter,), reads=(reads,),
                writes=(Access(region=builder.words(MERGED, first, last - first), version=merged.version),),
            )
        )  # fmt: skip
    dealt, inputs = list(builder.dealt(value_up.num_outputs)), (builder.reads(MERGED), builder.reads(LATENTS))
    made = builder.makes(call, call.stage, value_up.num_outputs, len(dealt))
    for sm, first, last in dealt:
        rows = builder.rows(value_up, first, last - first, STAGE_BYTES // (2 * value_up.depth))
        builder.add(
            Instruction(
                opcode=Opcode.MLA_LIFT, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=value_up.depth, waits=(merged.wait,), signals=(made.wait.counter,), streams=(rows,),
                reads=inputs,
                writes=(Access(region=builder.words(call.stage, first, last - first), version=made.version),),
            )
        )  # fmt: skip


def parts_columns(builder: ListBuilder) -> int:
    """Values of the latent of all heads on this rank."""
    return LATENT * (builder.architecture.mla.num_heads // builder.program.num_ranks)


#: operator -> what it becomes
MLA_CALLS: Mapping[str, Callable[[ListBuilder, Call], None]] = {
    "mla_prep.fused": _prep,
    "mla_decode.clusters_early": _attention,
    "mla_decode.lift_gate": _lift_gate,
}
