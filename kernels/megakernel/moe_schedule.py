"""Instructions of a latent mixture of experts at one row: what each call of the fused path becomes.

======================================  ==========================================================================
``moe.front``                           rows of router and latent down-projection dealt to all SMs, pushed to every rank
``moe.shared_gate_up``                  as any product of the residual; it fills the time until the fronts are there
``moe.shared_down``, ``send_shared``    one instruction: a column goes to the rank that owns it
``moe.routing``                         on the last SM, whose products are the shortest; ids and weights to all SMs
``moe.experts``                         gate and up of the selected experts dealt to all SMs by expert and row; then the
                                        columns of the latent, each SM those of all selected experts, to every rank
``moe.latent_up``                       columns of the latent summed over ranks; then rows of the rank's shard, with the
                                        shared experts' parts, to every rank: the columns of the next residual
======================================  ==========================================================================

Every output is a word that is its own flag (``list_builder.OUTPUT_BYTES``), also between ranks: nobody empties it. A
buffer is written again a layer later, by ranks that have received all of this rank's last outputs of the layer, which
its SMs sent behind their reads. An fp32 value takes two words. The slots of all ranks are shown as this rank's own,
since a loopback fabric fills them.

Which experts are read is known in the launch alone, so their weights do not come through the ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from k3sim.kernels.megakernel.instructions import Access, Instruction, Opcode
from k3sim.kernels.megakernel.list_builder import HALVES, PACKETS, ListBuilder, site_of
from k3sim.model.program import Call

ROUTE_WORDS = 1 + HALVES  # of a selected expert: id, weight
GATE_UP, LATENT = "moe.experts_1", "moe.latent"  # outputs that are no call's own


def _front(builder: ListBuilder, call: Call) -> None:
    router, latent_down = call.weights
    num_rows, ranks = router.num_outputs + latent_down.num_outputs, builder.program.num_ranks
    slot = HALVES * router.num_outputs + latent_down.num_outputs
    dealt, reads, waits = list(builder.dealt(num_rows)), (builder.residual_read(),), builder.residual_wait()
    made = builder.makes(call, call.stage, ranks * slot, len(dealt))

    def word(row: int) -> int:
        return row + min(row, router.num_outputs)

    for sm, first, last in dealt:
        written = [
            builder.words(call.stage, rank * slot + word(first), word(last) - word(first)) for rank in range(ranks)
        ]
        builder.add(
            Instruction(
                opcode=Opcode.FRONT_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=router.depth, site=site_of(call), packet=builder.version % PACKETS,
                waits=waits, signals=(made.wait.counter,),
                streams=tuple(builder.rows_of_all(call.weights, first, last)), reads=reads,
                writes=tuple(Access(region=one, version=made.version) for one in written),
            )
        )  # fmt: skip


def _shared_down(builder: ListBuilder, call: Call) -> None:
    """The product, whose outputs leave at once; ``moe.send_shared`` adds nothing."""
    (weight,) = call.weights
    source, dealt = builder.made["moe.shared_gate_up"], list(builder.dealt(weight.num_outputs))
    reads = (builder.reads("moe.shared_gate_up"),)
    made = builder.makes(call, call.stage, weight.num_outputs, len(dealt))
    for sm, first, last in dealt:
        write = Access(region=builder.words(call.stage, first, last - first), version=made.version)
        builder.add(
            Instruction(
                opcode=Opcode.SHARED_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=weight.depth, waits=(source.wait,), signals=(made.wait.counter,),
                streams=(builder.rows(weight, first, last - first),), reads=reads, writes=(write,),
            )
        )  # fmt: skip


def _nothing(builder: ListBuilder, call: Call) -> None:
    """Part of the instruction before."""


def _routing(builder: ListBuilder, call: Call) -> None:
    front, reads = builder.made["moe.front"], (builder.reads("moe.front"),)
    num_words = ROUTE_WORDS * builder.architecture.moe.top_k
    made = builder.makes(call, call.stage, num_words, 1)
    builder.add(
        Instruction(
            opcode=Opcode.ROUTE, stage=call.stage, layer=call.layer, sm=builder.num_sms - 1,
            count=builder.architecture.moe.top_k, depth=builder.architecture.moe.num_experts,
            waits=(front.wait,), signals=(made.wait.counter,), reads=reads,
            writes=(Access(region=builder.words(call.stage, 0, num_words), version=made.version),),
        )
    )  # fmt: skip


def _experts(builder: ListBuilder, call: Call) -> None:
    """Two instructions an SM: rows of gate and up, then columns of the latent."""
    width, latent, top_k = call.shape["width"], call.shape["latent"], call.shape["top_k"]
    ranks = builder.program.num_ranks
    matrices = [Access(region=builder.whole(weight.region, weight.num_bytes)) for weight in call.weights]
    route, front = builder.made["moe.routing"], builder.made["moe.front"]
    inputs, dealt = (builder.reads("moe.routing"), builder.reads("moe.front")), list(builder.dealt(top_k * width))
    middle = builder.makes(call, GATE_UP, top_k * width, len(dealt))
    for sm, first, last in dealt:
        builder.add(
            Instruction(
                opcode=Opcode.EXPERT_GATE_UP, stage=GATE_UP, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=latent, waits=(route.wait, front.wait), signals=(middle.wait.counter,),
                reads=(*inputs, matrices[0]),
                writes=(Access(region=builder.words(GATE_UP, first, last - first), version=middle.version),),
            )
        )  # fmt: skip
    inputs, dealt = (builder.reads("moe.routing"), builder.reads(GATE_UP)), list(builder.dealt(latent))
    made = builder.makes(call, call.stage, ranks * latent, len(dealt))
    for sm, first, last in dealt:
        written = [builder.words(call.stage, rank * latent + first, last - first) for rank in range(ranks)]
        builder.add(
            Instruction(
                opcode=Opcode.EXPERT_DOWN_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first,
                count=last - first, depth=width, waits=(route.wait, middle.wait), signals=(made.wait.counter,),
                reads=(*inputs, matrices[1]),
                writes=tuple(Access(region=one, version=made.version) for one in written),
            )
        )  # fmt: skip


def _latent_up(builder: ListBuilder, call: Call) -> None:
    """The sum over ranks on all SMs, then rows of this rank's shard of the up-projection."""
    (weight,), latent, ranks = call.weights, call.shape["latent"], builder.program.num_ranks
    partial, dealt = builder.made["moe.experts"], list(builder.dealt(latent))
    total = builder.makes(call, LATENT, latent + HALVES * len(dealt), len(dealt))
    for part, (sm, first, last) in enumerate(dealt):
        read = [builder.words("moe.experts", rank * latent + first, last - first) for rank in range(ranks)]
        written = [builder.words(LATENT, first, last - first), builder.words(LATENT, latent + HALVES * part, HALVES)]
        builder.add(
            Instruction(
                opcode=Opcode.LATENT_REDUCE, stage=LATENT, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=part, waits=(partial.wait,), signals=(total.wait.counter,),
                reads=tuple(Access(region=one, version=partial.version) for one in read),
                writes=tuple(Access(region=one, version=total.version) for one in written),
            )
        )  # fmt: skip
    shared, inputs = builder.made["moe.shared_down"], (builder.reads(LATENT), builder.reads("moe.shared_down"))
    dealt, num_outputs = list(builder.dealt(weight.num_outputs)), weight.num_outputs
    made = builder.makes(call, call.stage, ranks * num_outputs, len(dealt))
    for sm, first, last in dealt:
        written = [builder.words(call.stage, rank * num_outputs + first, last - first) for rank in range(ranks)]
        builder.add(
            Instruction(
                opcode=Opcode.TAIL_PUSH, stage=call.stage, layer=call.layer, sm=sm, first=first, count=last - first,
                depth=latent, waits=(total.wait, shared.wait), signals=(made.wait.counter,),
                streams=(builder.rows(weight, first, last - first),), reads=inputs,
                writes=tuple(Access(region=one, version=made.version) for one in written),
            )
        )  # fmt: skip
    builder.gathered = call.stage


#: stage -> the operator that is meant, and what it becomes
MOE_CALLS: Mapping[str, tuple[str, Callable[[ListBuilder, Call], None]]] = {
    "moe.front": ("skinny_gemv.tiled_push", _front),
    "moe.shared_down": ("skinny_gemv.tiled", _shared_down),
    "moe.send_shared": ("latent_tail.send_shared", _nothing),
    "moe.routing": ("router_topk.gather_topk", _routing),
    "moe.experts": ("expert_gemv.persistent_push", _experts),
    "moe.latent_up": ("latent_tail.up_cluster", _latent_up),
}
