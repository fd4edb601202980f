"""Cases of the stock path's kernels between ranks.

``all_reduce`` sends to as many slots of this GPU as there are ranks, so all of them hold the same row: what differs
from rank to rank is in the tests, on a stream a rank. ``embedding`` is timed on rows from HBM, which takes thousands of
calls a round at one row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.bench import MIN_COPIES, num_copies
from k3sim.kernels.harness.cases import Call, Case, MakeProblem, MakeTimed, Output, Problem, Timed, case_of_rows
from k3sim.kernels.harness.inputs import generator_on, normal
from k3sim.kernels.harness.judges import exactly
from k3sim.kernels.unfused import cost

if TYPE_CHECKING:
    import torch

HIDDEN = 7168
RANKS = (8, 16)
CHECKED_IDS = 1000


def _lookup(rows: int, first_id: int, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids at and beyond both ends of this rank's, padding among them; the table [1000, 7168]."""
    import torch

    table = normal((CHECKED_IDS, HIDDEN), generator_on(device, seed))
    last = first_id + CHECKED_IDS - 1
    ends = [last, first_id, first_id - 1, last + 1, -1, 2**31 - 1]
    ids = torch.tensor((ends + [first_id + 300] * rows)[:rows], dtype=torch.int32, device=device)
    return ids, table


def _embedding_problem(rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import exchange_launch, reference

        ids, table = _lookup(rows, 700, device, seed)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=exactly())],
            launch=lambda: exchange_launch.embedding(ids, table, out, first_id=700, pdl=True),
            reference=lambda: (reference.embedding(ids, table, first_id=700),),
        )

    return make


def _embedding_timed(rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        from k3sim.kernels.unfused import exchange_launch

        generator = generator_on(device, seed)
        copies = num_copies(rows * HIDDEN * 2, l2_bytes)
        table = normal((copies * rows, HIDDEN), generator)
        order = torch.randperm(copies * rows, generator=generator, device=device).int().view(copies, rows)
        out = torch.empty(rows, HIDDEN, dtype=torch.bfloat16, device=device)
        return Timed(
            calls=[lambda ids=ids: exchange_launch.embedding(ids, table, out, pdl=True) for ids in order]  # type: ignore[misc]
        )

    return make


def _push_problem(ranks: int, rows: int) -> MakeProblem:
    """The rank that has all ids but those beyond the vocabulary, which nobody stores."""

    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import exchange_launch, reference

        table = normal((CHECKED_IDS, HIDDEN), generator_on(device, seed))
        ids = torch.tensor(([CHECKED_IDS - 1, -1, 0] + [300] * rows)[:rows], dtype=torch.int32, device=device)
        inboxes = torch.empty(ranks, rows, HIDDEN, dtype=torch.bfloat16, device=device)
        peers = torch.tensor([one.data_ptr() for one in inboxes], dtype=torch.int64, device=device)
        return Problem(
            outputs=[Output(name="inboxes", tensor=inboxes, judge=exactly())],
            launch=lambda: exchange_launch.embedding_push(ids, table, peers, first_id=0, pdl=True),
            reference=lambda: (reference.embedding(ids, table, first_id=0).expand(ranks, -1, -1),),
        )

    return make


def _looped_all_reduce(ranks: int, rows: int, x: torch.Tensor, out: torch.Tensor) -> tuple[Call, Any]:
    """A call of rank 1 whose peers' slots are its own, and what must stay alive for it."""
    import torch

    from k3sim.kernels.proj_allreduce.launch import make_receive_buffers
    from k3sim.kernels.unfused import exchange_launch

    buffers = make_receive_buffers(ranks=ranks, device=x.device)
    slot_bytes = buffers.received[0, 0].numel() * buffers.received.element_size()
    # It stores at slot 1 of the address of peer p, which is to be slot p.
    offsets = torch.arange(ranks, dtype=torch.int64, device=x.device) - 1
    peers = buffers.received.data_ptr() + offsets * slot_bytes
    return lambda: exchange_launch.all_reduce(x, out, peers, buffers, rank=1, pdl=True), (buffers, peers)


def _all_reduce_problem(ranks: int, rows: int) -> MakeProblem:
    def make(device: str, seed: int) -> Problem:
        import torch

        from k3sim.kernels.unfused import reference

        x = normal((rows, HIDDEN), generator_on(device, seed))
        x[:, 5] = -0.0  # must travel as +0
        x[:, 6] = 1e-39  # and a subnormal as itself
        out = torch.empty_like(x)
        call, _ = _looped_all_reduce(ranks, rows, x, out)
        return Problem(
            outputs=[Output(name="out", tensor=out, judge=exactly())],
            launch=call,
            reference=lambda: (reference.all_reduce(x.expand(ranks, -1, -1)),),
        )

    return make


def _all_reduce_timed(ranks: int, rows: int) -> MakeTimed:
    def make(device: str, seed: int, l2_bytes: int) -> Timed:
        import torch

        x = normal((rows, HIDDEN), generator_on(device, seed))
        call, keep = _looped_all_reduce(ranks, rows, x, torch.empty_like(x))
        return Timed(calls=[call] * MIN_COPIES, keep=keep)

    return make


def exchange_cases() -> list[Case]:
    found = []
    for rows in (1, 8):
        work = cost.embedding((), rows=rows, hidden=HIDDEN)
        timed = _embedding_timed(rows) if rows == 1 else None
        table_bytes = 2 * CHECKED_IDS * HIDDEN
        found.append(case_of_rows("unfused", "embedding", rows, [work], table_bytes, _embedding_problem(rows), timed))
        for ranks in RANKS:
            name = f"embedding_push to {ranks} buffers of this GPU"
            found.append(case_of_rows("unfused", name, rows, [work], table_bytes, _push_problem(ranks, rows), None))
    for ranks in RANKS:
        for rows in (1, 16):
            work = cost.all_reduce((), rows=rows, hidden=HIDDEN, ranks=ranks)
            name, buffer_bytes = f"all_reduce, {ranks} slots of this GPU", 6 * ranks * 16 * HIDDEN
            checked, timed = _all_reduce_problem(ranks, rows), _all_reduce_timed(ranks, rows)
            found.append(case_of_rows("unfused", name, rows, [work], buffer_bytes, checked, timed))
    return found
