"""What the hand-over kernels do between GPUs, as calls that replay and references that know every GPU's inputs.

A ``HandOver`` is a few calls that follow one another, each on inputs of its own, so that what a buffer kept from the
call before, or from three calls ago, is not the right answer. Inputs are drawn from seeds, so each process also has
those of its peers and computes what all of them must get. Slots lie in one block of each GPU's memory; where there are
more ranks than GPUs, ``kernels/multi_gpu/symmetric.py`` says whose part a slot holds.

One file, because all are one thought: a call, and what each GPU must hold after it, kernel by kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.cases import Output, Problem, rows_in_words
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly, within
from k3sim.kernels.multi_gpu.symmetric import SharedBlock, landing, sender

if TYPE_CHECKING:
    import torch

    from k3sim.kernels.harness.judges import Judge
    from k3sim.kernels.harness.tolerance import Verdict

HIDDEN, LATENT, EXPERTS, TOP_K = 7168, 3584, 896, 16
HEADS, ATTENTION_LATENT, PAGE_TOKENS, CACHE_ROW = 12, 512, 64, 576
MAX_ROWS = 16
SETS = 3  # of slots that take turns, where a kernel has no rotating buffers of its own
BLOCK_BYTES = 64 << 20  # room for the slots of any hand-over
ALIGNMENT = 256


@dataclass
class Arena:
    """Parts of the block, at the same offsets in every process."""

    block: SharedBlock
    used: int = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Part:
        num_bytes = math.prod(shape) * dtype.itemsize
        part = Part(self.block, self.used, tuple(shape), dtype)
        self.used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        assert self.used <= BLOCK_BYTES, "the slots outgrew the block"
        return part


@dataclass(frozen=True)
class Part:
    """A tensor in every process's block."""

    block: SharedBlock
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def _in(self, owner: torch.Tensor) -> torch.Tensor:
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        return owner[self.offset : self.offset + num_bytes].view(self.dtype).view(self.shape)

    @property
    def own(self) -> torch.Tensor:
        return self._in(self.block.own)

    def of_gpu(self, gpu: int) -> torch.Tensor:
        return self._in(self.block.peers[gpu])

    def table(self, slot_bytes: int, num_ranks: int, **how: Any) -> torch.Tensor:
        return self.block.table(self.offset, slot_bytes, num_ranks, **how)


@dataclass(kw_only=True)
class HandOver:
    """Calls of one operator that are made in this order, again and again."""

    operator: str
    name: str
    calls: Sequence[Problem]
    keep: list[Any] = field(default_factory=list)


def _all_gpus(arena: Arena, shape: Sequence[int], seed: int, device: str, *, scale: float = 1.0) -> list[torch.Tensor]:
    """bf16 values, one tensor a GPU, the same in every process."""
    return [
        normal(shape, generator_on(device, 1009 * seed + gpu), scale=scale) for gpu in range(arena.block.num_gpus)
    ]


def _by_slot(of_gpus: Sequence[torch.Tensor], num_ranks: int) -> torch.Tensor:
    """[ranks, ...]: what the slots of every GPU hold once all have pushed."""
    import torch

    return torch.stack([of_gpus[sender(slot, len(of_gpus))] for slot in range(num_ranks)])


def _of_own_prefix(prefix: torch.Tensor, operands: Sequence[Any]) -> Judge:
    """Judges the normalised row from the prefix that the kernel made: that one may be a unit off, rightly."""
    from k3sim.kernels.proj_allreduce import reference

    def judge(found: torch.Tensor, ref: torch.Tensor, name: str) -> Verdict:
        if bool(prefix.isfinite().all()):
            ref = reference.consume(prefix[None], None, *operands).normalised_BD
        return within("bf16_activation")(found, ref, name)

    return judge


# ---- projection with all-reduce ------------------------------------------------------------------------------------


def proj_allreduce(arena: Arena, num_ranks: int, device: str, seed: int) -> HandOver:
    """``produce`` and ``consume``, and the stock path's ``all_reduce`` by turns, on one set of three buffers.

    Five calls of 1, 16, 1, 3 and 16 rows: the buffer of a call is another one at each replay.
    """
    import torch

    from k3sim.kernels.proj_allreduce import launch, reference
    from k3sim.kernels.proj_allreduce.cases import consumer_operands
    from k3sim.kernels.unfused import exchange_launch

    num_gpus, rank = arena.block.num_gpus, arena.block.rank
    depth = 12288 // num_ranks if 12288 // num_ranks <= 1536 else 1536
    received = arena.take((launch.BUFFERS, num_ranks, MAX_ROWS, HIDDEN), torch.bfloat16)
    received.own.fill_(-0.0)
    buffers = launch.ReceiveBuffers(
        received=received.own, control=torch.zeros(launch.CONTROL_WORDS, dtype=torch.int32, device=device)
    )
    peers = received.table(MAX_ROWS * HIDDEN * 2, num_ranks)
    # A GPU that stands for several ranks adds the same part several times: smaller parts keep the sum of order one.
    scale = num_gpus / num_ranks
    weights = _all_gpus(arena, (HIDDEN, depth), seed, device, scale=scale / math.sqrt(depth))

    def fused(rows: int, number: int) -> Problem:
        xs = _all_gpus(arena, (rows, depth), seed + number, device)
        operands, _ = consumer_operands(rows, HIDDEN, device, seed + number)
        prefix = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        out = torch.empty_like(prefix)

        def call() -> None:
            launch.produce(xs[rank], weights[rank], peers, buffers, rank=rank)
            launch.consume(buffers, *operands, prefix, out)

        def expected() -> Sequence[torch.Tensor]:
            partials = [reference.produce(*one) for one in zip(xs, weights, strict=True)]
            return reference.consume(_by_slot(partials, num_ranks), *operands)

        return Problem(
            outputs=[
                Output(name=f"prefix {number}", tensor=prefix, judge=within("reduced_bf16")),
                Output(name=f"out {number}", tensor=out, judge=_of_own_prefix(prefix, operands[1:])),
            ],
            launch=call,
            reference=expected,
        )

    def stock(rows: int, number: int) -> Problem:
        xs = _all_gpus(arena, (rows, HIDDEN), seed + number, device, scale=scale)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)

        def expected() -> Sequence[torch.Tensor]:
            total = torch.zeros(rows, HIDDEN, device=device)
            for part in _by_slot(xs, num_ranks):
                total = total + part.float()
            return (total.bfloat16(),)

        return Problem(
            outputs=[Output(name=f"sum {number}", tensor=out, judge=exactly())],
            launch=lambda: exchange_launch.all_reduce(xs[rank], out, peers, buffers, rank=rank),
            reference=expected,
        )

    return HandOver(
        operator="proj_allreduce",
        name=f"produce and consume, all_reduce by turns, {num_ranks} ranks, K {depth}, 1 to {rows_in_words(16)}",
        calls=[fused(1, 1), fused(16, 2), stock(1, 3), fused(3, 4), stock(16, 5)],
        keep=[peers],
    )


# ---- front of the experts -------------------------------------------------------------------------------------------


def router_topk(arena: Arena, num_ranks: int, device: str, seed: int) -> HandOver:
    """``skinny_gemv_push`` of a router and latent shard, and ``gather_topk``; three sets of slots take turns."""
    import torch

    from k3sim.kernels.router_topk import launch
    from k3sim.kernels.skinny_gemv.launch import skinny_gemv_push

    num_gpus, rank = arena.block.num_gpus, arena.block.rank
    width = (EXPERTS + LATENT) // num_ranks
    slots = [arena.take((num_ranks, MAX_ROWS, width), torch.float32) for _ in range(SETS)]
    for one in slots:
        one.own.view(torch.int32).fill_(-1)
    peers = [one.table(MAX_ROWS * width * 4, num_ranks, kernel_adds_rank=False) for one in slots]
    weights = _all_gpus(arena, (width, HIDDEN), seed, device, scale=1 / math.sqrt(HIDDEN))
    bias = normal((EXPERTS,), generator_on(device, seed), scale=0.1, dtype=torch.float32)

    def one_call(rows: int, number: int) -> Problem:
        x = normal((rows, HIDDEN), generator_on(device, seed + number))
        ids = torch.empty(rows, TOP_K, dtype=torch.int32, device=device)
        chosen = torch.empty(rows, TOP_K, device=device)
        latent = torch.empty(rows, LATENT, dtype=torch.bfloat16, device=device)
        at = number % SETS

        def call() -> None:
            skinny_gemv_push(x, weights[rank], peers[at], out_dtype=torch.float32, polled=True)
            launch.gather_topk(slots[at].own, bias, ids, chosen, latent)

        def expected() -> Sequence[torch.Tensor]:
            from k3sim.kernels.router_topk import reference

            fronts = [(x.double() @ weight.double().T).float() for weight in weights]
            blocks = _by_slot(fronts, num_ranks)
            logits, _ = reference.gather_front(blocks)
            # Not rounded: a sum next to a rounding boundary may land on its other side.
            return logits, logits, blocks[..., EXPERTS // num_ranks :].transpose(0, 1).flatten(1)

        def judge_ids(found: torch.Tensor, logits: torch.Tensor, name: str) -> Verdict:
            # Choices a rounding apart may change places: what is chosen must be as good as the reference's.
            from k3sim.kernels.harness.tolerance import Verdict

            order = found.sort(-1).values
            if bool((found < 0).any()) or bool((found >= EXPERTS).any()) or bool((order.diff(dim=-1) == 0).any()):
                return Verdict(accepted=False, line=f"{name}: not {TOP_K} different experts in every row")
            choice = logits.sigmoid() + bias
            error = float((choice.gather(-1, found.long()) - choice.topk(TOP_K).values).abs().max())
            line = f"{name}: choices up to {error:.2e} from the best ones"
            return Verdict(accepted=error < 1e-5, line=line, error=error, bound=1e-5)

        def judge_weights(found: torch.Tensor, logits: torch.Tensor, name: str) -> Verdict:
            scores = logits.sigmoid().gather(-1, ids.long().clamp(0, EXPERTS - 1))
            return within("fp32_sum")(found, scores / scores.sum(-1, keepdim=True), name)

        return Problem(
            outputs=[
                Output(name=f"ids {number}", tensor=ids, judge=judge_ids),
                Output(name=f"weights {number}", tensor=chosen, judge=judge_weights),
                Output(name=f"latent {number}", tensor=latent, judge=within("bf16_sum")),
            ],
            launch=call,
            reference=expected,
        )

    assert num_gpus == len(weights)
    return HandOver(
        operator="router_topk",
        name=f"skinny_gemv_push and gather_topk, {num_ranks} ranks, 1 to {rows_in_words(16)}",
        calls=[one_call(rows, number) for number, rows in enumerate((1, 16, 4, 1, 8, 2), 1)],
        keep=[peers],
    )


# ---- tail of the experts --------------------------------------------------------------------------------------------


def _gathered_row(
    latents: Sequence[torch.Tensor],
    shareds: Sequence[torch.Tensor],
    norm: torch.Tensor,
    ups: Sequence[torch.Tensor],
    num_ranks: int,
) -> torch.Tensor:
    """What every rank gathers from the tails of all, in fp64: the normalised sum's product, and the shared columns."""
    import torch

    from k3sim.kernels.latent_tail.reference import EPS

    num_gpus, outputs = len(ups), HIDDEN // num_ranks
    total = _by_slot(latents, num_ranks).double().sum(0)
    normalised = total * (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()
    columns = []
    for gpu in range(num_gpus):
        row = normalised @ ups[gpu].double().T
        for slot in range(num_ranks):
            # The slot holds columns of the rank that this GPU stood for when its sender's turn came.
            owner = slot // num_gpus * num_gpus + gpu
            row = row + shareds[sender(slot, num_gpus)][:, owner * outputs : (owner + 1) * outputs].double()
        columns.append(row)
    return torch.cat([columns[sender(block, num_gpus)] for block in range(num_ranks)], -1)


def latent_tail(arena: Arena, num_ranks: int, device: str, seed: int) -> HandOver:
    """``send``, ``up``, and ``collect`` and ``consume_gathered`` by turns; three sets of slots take turns."""
    import torch

    from k3sim.kernels.latent_tail import launch
    from k3sim.kernels.proj_allreduce import reference as mixer
    from k3sim.kernels.proj_allreduce.cases import consumer_operands
    from k3sim.kernels.proj_allreduce.launch import consume_gathered

    num_gpus, rank = arena.block.num_gpus, arena.block.rank
    outputs = HIDDEN // num_ranks
    places = [
        {
            "latent": arena.take((num_ranks, MAX_ROWS, LATENT), torch.bfloat16),
            "shared": arena.take((num_ranks, MAX_ROWS, outputs), torch.bfloat16),
            "gathered": arena.take((MAX_ROWS, HIDDEN), torch.bfloat16),
        }
        for _ in range(SETS)
    ]
    for one in places:
        for part in one.values():
            part.own.view(torch.int16).fill_(launch.EMPTY)
    slots = [launch.TailSlots(**{name: part.own for name, part in one.items()}) for one in places]
    scale = num_gpus / num_ranks
    norm = (1 + torch.rand(LATENT, generator=generator_on(device, seed), device=device)).bfloat16()
    ups = _all_gpus(arena, (outputs, LATENT), seed, device, scale=1 / 180)

    def one_call(rows: int, number: int) -> Problem:
        at, gathers = number % SETS, number % 2 == 0
        latents = _all_gpus(arena, (rows, LATENT), seed + 10 * number, device)
        shareds = _all_gpus(arena, (rows, HIDDEN), seed + 10 * number + 1, device, scale=scale / 2)
        peers = launch.TailPeers(
            latent=places[at]["latent"].table(rows * LATENT * 2, num_ranks),
            shared=places[at]["shared"].table(rows * outputs * 2, num_ranks),
            gathered=places[at]["gathered"].table(outputs * 2, num_ranks),
            max_rows=rows,
        )
        operands, _ = consumer_operands(rows, HIDDEN, device, seed + number)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        prefix = torch.empty_like(out)

        def call() -> None:
            launch.send(latents[rank], shareds[rank], peers, rank)
            launch.up(slots[at], norm, ups[rank], peers, rank, rows, release_late=gathers)
            if gathers:
                consume_gathered(slots[at], *operands, prefix, out)
            else:
                launch.collect(slots[at], out)

        def expected() -> Sequence[torch.Tensor]:
            row = _gathered_row(latents, shareds, norm, ups, num_ranks)
            if not gathers:
                return (row,)
            return mixer.consume(row.bfloat16()[None], *operands)

        finished = [Output(name=f"out {number}", tensor=out, judge=within("bf16_activation"))]
        if gathers:
            finished = [
                Output(name=f"prefix {number}", tensor=prefix, judge=within("reduced_bf16")),
                Output(name=f"out {number}", tensor=out, judge=_of_own_prefix(prefix, operands[1:])),
            ]
        return Problem(outputs=finished, launch=call, reference=expected)

    return HandOver(
        operator="latent_tail",
        name=f"send, up, collect or consume_gathered, {num_ranks} ranks, 1 to {rows_in_words(16)}",
        calls=[one_call(rows, number) for number, rows in enumerate((1, 16, 4, 1, 8, 2), 1)],
    )


# ---- attention over several ranks' tokens ---------------------------------------------------------------------------


def _lengths(rows: int, number: int, num_gpus: int, device: str) -> list[torch.Tensor]:
    """Tokens of every row on each GPU; the second row has none on every other one."""
    import torch

    found = (
        [0 if row == 1 and gpu % 2 else 37 + (131 * (gpu + row + number)) % 340 for row in range(rows)]
        for gpu in range(num_gpus)
    )
    return [torch.tensor(one, dtype=torch.int32, device=device) for one in found]


def lse_merge(arena: Arena, num_ranks: int, device: str, seed: int) -> HandOver:
    """``mla_decode`` over each GPU's own tokens, partial outputs stored to all, a barrier, ``lse_merge``.

    One row has no token on some GPUs. The stores are elementwise kernels of torch, and the barrier is symmetric
    memory's: no kernel of the project pushes partial attention yet.
    """
    import torch

    from k3sim.kernels.mla_decode import launch, reference

    num_gpus, rank = arena.block.num_gpus, arena.block.rank
    slots = [
        (
            arena.take((num_ranks, 4, HEADS, ATTENTION_LATENT), torch.bfloat16),
            arena.take((num_ranks, 4, HEADS), torch.float32),
        )
        for _ in range(SETS)
    ]
    num_pages = 24
    caches = _all_gpus(arena, (num_pages, PAGE_TOKENS, CACHE_ROW), seed, device)
    workspace = launch.make_workspace(heads=HEADS, max_rows=4, device=device)

    def one_call(rows: int, number: int) -> Problem:
        query = normal((rows, HEADS, CACHE_ROW), generator_on(device, seed + number), scale=0.3)
        pages = torch.arange(rows * 6, dtype=torch.int32, device=device).view(rows, 6).flip(1).contiguous()
        lengths = _lengths(rows, number, num_gpus, device)
        partial = torch.empty(rows, HEADS, ATTENTION_LATENT, dtype=torch.bfloat16, device=device)
        partial_sum = torch.empty(rows, HEADS, device=device)
        merged, merged_sum = torch.empty_like(partial), torch.empty_like(partial_sum)
        outputs, sums = slots[number % SETS]
        # Rows of a call are packed at the front of the part, as lse_merge takes them.
        shapes = ((num_ranks, rows, HEADS, ATTENTION_LATENT), (num_ranks, rows, HEADS))

        def packed(part: Part, gpu: int | None, shape: tuple[int, ...]) -> torch.Tensor:
            whole = part.own if gpu is None else part.of_gpu(gpu)
            return whole.flatten()[: math.prod(shape)].view(shape)

        places = [landing(peer, rank=rank, num_gpus=num_gpus) for peer in range(num_ranks)]
        targets = [
            (packed(outputs, gpu, shapes[0])[slot], packed(sums, gpu, shapes[1])[slot]) for gpu, slot in places
        ]
        arrived = packed(outputs, None, shapes[0]), packed(sums, None, shapes[1])

        def call() -> None:
            launch.mla_decode(query, caches[rank], pages, lengths[rank], partial, partial_sum, workspace)
            for to_output, to_sum in targets:
                torch.mul(partial, 1, out=to_output)
                torch.mul(partial_sum, 1, out=to_sum)
            arena.block.barrier()
            launch.lse_merge(*arrived, merged, merged_sum)

        def expected() -> Sequence[torch.Tensor]:
            partials = [
                reference.mla_decode(query, cache, pages, length)
                for cache, length in zip(caches, lengths, strict=True)
            ]
            return reference.lse_merge(
                _by_slot([one.output_BHV for one in partials], num_ranks),
                _by_slot([one.log_sum_exp_BH for one in partials], num_ranks),
            )

        return Problem(
            outputs=[
                Output(name=f"attention {number}", tensor=merged, judge=within("attention_bf16")),
                Output(name=f"log-sum-exp {number}", tensor=merged_sum, judge=within("log_sum_exp")),
            ],
            launch=call,
            reference=expected,
        )

    return HandOver(
        operator="lse_merge",
        name=f"mla_decode, partial outputs to all, lse_merge, {num_ranks} ranks, 1 to {rows_in_words(4)}",
        # As many calls as sets, or twice as many: neighbours never share one, across replays too.
        calls=[one_call(rows, number) for number, rows in enumerate((1, 4, 2, 1, 3, 4), 1)],
    )


HAND_OVERS: dict[str, Callable[[Arena, int, str, int], HandOver]] = {
    "proj_allreduce": proj_allreduce,
    "router_topk": router_topk,
    "latent_tail": latent_tail,
    "lse_merge": lse_merge,
}
