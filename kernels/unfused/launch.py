"""Public calls of the stock path's separate kernels: checks, then one launch on the current stream. They allocate
nothing; the first call of a configuration compiles, so make it before a graph capture.

    embedding(ids, table, rows, first_id=rank * table.shape[0])
    all_reduce(partial, out, peers, buffers, rank=rank)         # buffers and peers as for proj_allreduce

    conv_update(projected, conv_weight, slots, conv_state, convolved, heads=12)
    recurrent_update(convolved, decay_logits, projected, dt_bias, a_log, slots, state, read_out)
    gated_norm(read_out, projected, norm_weight, out, heads=12)

    norm([(latents[:, :1536], query_norm, query_latent), (latents[:, 1536:2048], kv_norm, latent)])
    query_and_cache(absorbed, extra, latent, latent_extra, slots, query, cache)

    sample(values, ids, tokens)                                 # the next token of each row
    advance(num_tokens, pages, slots)                           # and where it will go

``pdl`` lets a kernel start before its predecessor on the stream has ended. Early it reads only weights (and the table
of peers), which no kernel that may still run on the stream may write; all else waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.proj_allreduce.launch import ReceiveBuffers, check_buffers
from k3sim.kernels.toolchain.compile_cache import compiled, current_stream, get_cutlass

if TYPE_CHECKING:
    import torch

HEADS = (6, 12, 24, 48, 96)
HEAD_DIM = 128
MAX_ROWS = 256
MAX_EXCHANGED_ROWS = 16
MAX_HIDDEN = 8192
MAX_RANKS = 16
RANK_COUNTS = (1, 2, 4, 8, 16)
CANDIDATES = 64
PAGE_TOKENS = 64
LATENT = 512
EXTRA = 64
ROW = LATENT + EXTRA
ELEMENTWISE_COLUMNS = 8 * 128  # of a block

Norm = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


@cache
def _embedding(hidden: int, peers: int, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.exchange import EmbeddingConfiguration, compile_embedding

    configuration = EmbeddingConfiguration(hidden=hidden, peers=peers, pdl=pdl)
    return compiled(configuration, lambda: compile_embedding(configuration))


@cache
def _all_reduce(rows: int, hidden: int, ranks: int, max_rows: int, release_next: bool, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.exchange import AllReduceConfiguration, compile_all_reduce

    configuration = AllReduceConfiguration(
        rows=rows, hidden=hidden, ranks=ranks, max_rows=max_rows, release_next=release_next, pdl=pdl
    )
    return compiled(configuration, lambda: compile_all_reduce(configuration))


@cache
def _conv_update(heads: int, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.recurrence import ConvConfiguration, compile_conv_update

    configuration = ConvConfiguration(heads=heads, pdl=pdl)
    return compiled(configuration, lambda: compile_conv_update(configuration))


@cache
def _recurrent_update(heads: int, bf16_state: bool, fp32_logits: bool, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.recurrence import RecurrentConfiguration, compile_recurrent_update

    configuration = RecurrentConfiguration(heads=heads, bf16_state=bf16_state, fp32_logits=fp32_logits, pdl=pdl)
    return compiled(configuration, lambda: compile_recurrent_update(configuration))


@cache
def _gated_norm(heads: int, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.recurrence import GatedNormConfiguration, compile_gated_norm

    configuration = GatedNormConfiguration(heads=heads, pdl=pdl)
    return compiled(configuration, lambda: compile_gated_norm(configuration))


@cache
def _norm(widths: tuple[int, ...], pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.rowwise import NormConfiguration, compile_norm

    configuration = NormConfiguration(widths=widths, pdl=pdl)
    return compiled(configuration, lambda: compile_norm(configuration))


@cache
def _elementwise(kernel: str, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.rowwise import ElementwiseConfiguration, compile_elementwise

    configuration = ElementwiseConfiguration(kernel=kernel, pdl=pdl)
    return compiled(configuration, lambda: compile_elementwise(configuration))


@cache
def _query_and_cache(heads: int, fp8: bool, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.rowwise import QueryCacheConfiguration, compile_query_and_cache

    configuration = QueryCacheConfiguration(heads=heads, fp8=fp8, pdl=pdl)
    return compiled(configuration, lambda: compile_query_and_cache(configuration))


@cache
def _sample(ranks: int, draw: bool, pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.stepping import SampleConfiguration, compile_sample

    configuration = SampleConfiguration(ranks=ranks, draw=draw, pdl=pdl)
    return compiled(configuration, lambda: compile_sample(configuration))


@cache
def _advance(pdl: bool) -> Any:
    get_cutlass()
    from k3sim.kernels.unfused.stepping import AdvanceConfiguration, compile_advance

    configuration = AdvanceConfiguration(pdl=pdl)
    return compiled(configuration, lambda: compile_advance(configuration))


# ---- between ranks ------------------------------------------------------------------------------------------------


def _check_lookup(ids: torch.Tensor, table: torch.Tensor, first_id: int) -> tuple[int, int, int]:
    """Rows, ids of this rank, hidden width."""
    import torch

    check_tensor("table", table, dtypes=(torch.bfloat16,), shape=(None, None))
    num_ids, hidden = table.shape
    check_one_of("table.shape[1]", hidden, range(64, MAX_HIDDEN + 1, 64))
    if num_ids < 1:
        raise refuse("table.shape[0]", num_ids, "1 or more")
    if not 0 <= first_id < 2**31 - num_ids:
        raise refuse("first_id", first_id, f"0 to {2**31 - num_ids - 1}")
    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(None,), like=table, alignment_bytes=4)
    return int(ids.shape[0]), int(num_ids), int(hidden)


def embedding(
    ids: torch.Tensor, table: torch.Tensor, out: torch.Tensor, *, first_id: int = 0, pdl: bool = False
) -> torch.Tensor:
    """``out [B, D]`` bf16: rows of ``table [N, D]`` bf16 at ``ids [B]`` int32 less ``first_id``, 0 where outside it.

    1 <= B <= 256, D a multiple of 64 up to 8192. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    rows, num_ids, hidden = _check_lookup(ids, table, first_id)
    check_one_of("ids.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(rows, hidden), like=table)
    check_on_gpu("table", table)
    _embedding(hidden, 0, pdl)(
        ids.data_ptr(), table.data_ptr(), out.data_ptr(), first_id, num_ids, rows, current_stream(table)
    )
    return out


def embedding_push(
    ids: torch.Tensor, table: torch.Tensor, peers: torch.Tensor, *, first_id: int, pdl: bool = False
) -> None:
    """As ``embedding``, but the rank that owns an id stores its row to row b of every peer's ``[max rows, D]`` slots.

    ``peers [T]`` int64: base addresses of all ranks' slots, such as ``TailPeers.gathered`` of ``latent_tail``, whose
    ``collect`` then waits for the rows. Every row comes from one rank, if the ranks' tables are the vocabulary between
    them: ids below 0 are rows of 0 from the rank with ``first_id`` 0. An id beyond the vocabulary is stored by nobody.
    1 <= B <= 16. The rule for two uses of the same slots is that of ``latent_tail``. Raises UserError before any
    launch.
    """
    import torch

    rows, num_ids, hidden = _check_lookup(ids, table, first_id)
    check_one_of("ids.shape[0]", rows, range(1, MAX_EXCHANGED_ROWS + 1))
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(None,), like=table, alignment_bytes=8)
    check_one_of("peers.shape[0]", peers.shape[0], range(1, MAX_RANKS + 1))
    check_on_gpu("table", table)
    _embedding(hidden, int(peers.shape[0]), pdl)(
        ids.data_ptr(), table.data_ptr(), peers.data_ptr(), first_id, num_ids, rows, current_stream(table)
    )


def all_reduce(
    x: torch.Tensor,
    out: torch.Tensor,
    peers: torch.Tensor,
    buffers: ReceiveBuffers,
    *,
    rank: int,
    release_next: bool = True,
    pdl: bool = False,
) -> torch.Tensor:
    """``out [B, D]`` bf16: the sum of all ranks' ``x [B, D]`` bf16 in rank order; the same bits on every rank.

    1 <= B <= 16, D a multiple of 64 up to 8192; ``out`` may be ``x``. ``buffers`` and ``peers [ranks]`` int64, the
    addresses of all ranks' ``received``, this rank's own among them, as for ``proj_allreduce``; every rank makes the
    same calls with the same number of rows. ``release_next`` lets the next launch on the stream start while this one
    waits; it must be False where several ranks share a GPU, as such a launch could fill the SMs that a peer needs in
    order to push. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("x", x, dtypes=bf16, shape=(None, None))
    rows, hidden = x.shape
    check_tensor("out", out, dtypes=bf16, shape=(rows, hidden), like=x)
    ranks, max_rows = check_buffers(buffers, rows, hidden, x)
    check_tensor("peers", peers, dtypes=(torch.int64,), shape=(ranks,), like=x, alignment_bytes=8)
    check_one_of("rank", rank, range(ranks))
    check_on_gpu("x", x)
    _all_reduce(rows, hidden, ranks, max_rows, release_next, pdl)(
        x.data_ptr(),
        peers.data_ptr(),
        buffers.received.data_ptr(),
        buffers.control.data_ptr(),
        out.data_ptr(),
        rank,
        current_stream(x),
    )
    return out


# ---- a KDA step in three ------------------------------------------------------------------------------------------


def _check_projected(projected: torch.Tensor, heads: int, columns: int) -> int:
    """Rows; ``columns``: how many of a projected row are read."""
    import torch

    check_one_of("heads", heads, HEADS)
    check_tensor("projected", projected, dtypes=(torch.bfloat16,), shape=(None, None), contiguous=False)
    check_one_of("projected.shape[0]", projected.shape[0], range(1, MAX_ROWS + 1))
    if projected.shape[1] < columns:
        raise refuse("projected.shape[1]", projected.shape[1], f"{columns} or more for {heads} heads")
    return int(projected.shape[0])


def _check_state(name: str, state: torch.Tensor) -> None:
    if state.shape[0] < 1 or not state[0].is_contiguous():
        raise refuse(f"{name}.stride", state.stride(), "at least one slot, contiguous within a slot")


def conv_update(
    projected: torch.Tensor,
    conv_weight: torch.Tensor,
    slots: torch.Tensor,
    conv_state: torch.Tensor,
    convolved: torch.Tensor,
    *,
    heads: int,
    pdl: bool = False,
) -> torch.Tensor:
    """``convolved [B, C]`` bf16, C = 3 heads 128: silu of the width-4 convolution; ``conv_state`` moves on in place.

    ``projected``, ``conv_weight``, ``slots`` and ``conv_state`` as in ``kda_decode``; only the first C columns of
    ``projected`` are read. Padding rows (slot 0 or less) give 0. Returns ``convolved``. Raises UserError before any
    launch.
    """
    import torch

    channels = 3 * heads * HEAD_DIM
    rows = _check_projected(projected, heads, channels)
    check_tensor("conv_weight", conv_weight, dtypes=(torch.float32,), shape=(channels, 4), like=projected)
    check_tensor("slots", slots, dtypes=(torch.int32,), shape=(rows,), like=projected, alignment_bytes=4)
    bf16 = (torch.bfloat16,)
    check_tensor("conv_state", conv_state, dtypes=bf16, shape=(None, 3, channels), like=projected, contiguous=False)
    _check_state("conv_state", conv_state)
    check_tensor("convolved", convolved, dtypes=bf16, shape=(rows, channels), like=projected)
    check_on_gpu("projected", projected)
    _conv_update(heads, pdl)(
        projected.data_ptr(),
        projected.stride(0) * 2,
        conv_weight.data_ptr(),
        slots.data_ptr(),
        conv_state.data_ptr(),
        conv_state.stride(0) * 2,
        convolved.data_ptr(),
        rows,
        current_stream(projected),
    )
    return convolved


def recurrent_update(
    convolved: torch.Tensor,
    decay_logits: torch.Tensor,
    projected: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    slots: torch.Tensor,
    state: torch.Tensor,
    read_out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """One step of the gated delta rule: ``state`` in place, ``read_out [B, heads 128]`` bf16, not yet normalised.

    ``convolved [B, 3 heads 128]`` bf16 from ``conv_update``; ``decay_logits [B, heads 128]`` bf16 or fp32, the low-rank
    gate before its bias; ``projected`` (for beta), ``dt_bias``, ``a_log``, ``slots`` and ``state`` as in
    ``kda_decode``. Padding rows (slot 0 or less) give 0. Returns ``read_out``. Raises UserError before any launch.
    """
    import torch

    bf16, fp32 = (torch.bfloat16,), (torch.float32,)
    check_tensor(
        "state",
        state,
        dtypes=(torch.float32, torch.bfloat16),
        shape=(None, None, HEAD_DIM, HEAD_DIM),
        contiguous=False,
    )
    heads = int(state.shape[1])
    check_one_of("state.shape[1]", heads, HEADS)
    _check_state("state", state)
    width = heads * HEAD_DIM
    rows = _check_projected(projected, heads, 4 * width + HEAD_DIM + heads)
    check_tensor("projected", projected, dtypes=bf16, shape=(rows, None), like=state, contiguous=False)
    check_tensor("convolved", convolved, dtypes=bf16, shape=(rows, 3 * width), like=state)
    check_tensor(
        "decay_logits", decay_logits, dtypes=(torch.bfloat16, torch.float32), shape=(rows, width), like=state
    )
    check_tensor("dt_bias", dt_bias, dtypes=fp32, shape=(width,), like=state, alignment_bytes=4)
    check_tensor("a_log", a_log, dtypes=fp32, shape=(None,), like=state, alignment_bytes=4)
    if a_log.shape[0] < heads:
        raise refuse("a_log.shape[0]", a_log.shape[0], f"{heads} or more")
    check_tensor("slots", slots, dtypes=(torch.int32,), shape=(rows,), like=state, alignment_bytes=4)
    check_tensor("read_out", read_out, dtypes=bf16, shape=(rows, width), like=state)
    check_on_gpu("state", state)
    _recurrent_update(heads, state.dtype == torch.bfloat16, decay_logits.dtype == torch.float32, pdl)(
        convolved.data_ptr(),
        decay_logits.data_ptr(),
        projected.data_ptr(),
        projected.stride(0) * 2,
        dt_bias.data_ptr(),
        a_log.data_ptr(),
        slots.data_ptr(),
        state.data_ptr(),
        state.stride(0) * state.element_size(),
        read_out.data_ptr(),
        rows,
        current_stream(state),
    )
    return read_out


def gated_norm(
    read_out: torch.Tensor,
    projected: torch.Tensor,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
    *,
    heads: int,
    pdl: bool = False,
) -> torch.Tensor:
    """``out [B, heads 128]`` bf16: RMSNorm of every head of ``read_out``, times weight, times sigmoid of the gate.

    The gate is columns [3 heads 128, 4 heads 128) of ``projected``; ``norm_weight [128]`` fp32; ``out`` may be
    ``read_out``. Returns ``out``. Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    width = heads * HEAD_DIM
    rows = _check_projected(projected, heads, 4 * width)
    check_tensor("read_out", read_out, dtypes=bf16, shape=(rows, width), like=projected)
    fp32 = (torch.float32,)
    check_tensor("norm_weight", norm_weight, dtypes=fp32, shape=(HEAD_DIM,), like=projected, alignment_bytes=4)
    check_tensor("out", out, dtypes=bf16, shape=(rows, width), like=projected)
    check_on_gpu("projected", projected)
    _gated_norm(heads, pdl)(
        read_out.data_ptr(),
        projected.data_ptr(),
        projected.stride(0) * 2,
        norm_weight.data_ptr(),
        out.data_ptr(),
        rows,
        current_stream(projected),
    )
    return out


# ---- row by row ---------------------------------------------------------------------------------------------------


def norm(parts: Sequence[Norm], *, pdl: bool = False) -> None:
    """RMSNorm of one or two ``(x [B, W], weight [W], out [B, W])``, all bf16, in one launch; epsilon 1e-5.

    W a multiple of 8 up to 8192, its own for each part; ``x`` and ``out`` with any row stride of 16 bytes, and ``out``
    may be ``x``. 1 <= B <= 256, the same for both. Raises UserError before any launch.
    """
    import torch

    check_one_of("len(parts)", len(parts), (1, 2))
    bf16 = (torch.bfloat16,)
    arguments: list[int] = []
    widths: list[int] = []
    like = parts[0][0]
    for number, (x, weight, out) in enumerate(parts):
        name = f"parts[{number}]"
        check_tensor(f"{name} x", x, dtypes=bf16, shape=(None, None), like=like if number else None, contiguous=False)
        rows, width = x.shape
        check_one_of(f"{name} x.shape[0]", rows, range(1, MAX_ROWS + 1) if number == 0 else (like.shape[0],))
        check_one_of(f"{name} x.shape[1]", width, range(8, MAX_HIDDEN + 1, 8))
        check_tensor(f"{name} weight", weight, dtypes=bf16, shape=(width,), like=like)
        check_tensor(f"{name} out", out, dtypes=bf16, shape=(rows, width), like=like, contiguous=False)
        widths.append(int(width))
        arguments += [x.data_ptr(), x.stride(0) * 2, weight.data_ptr(), out.data_ptr(), out.stride(0) * 2]
    check_on_gpu("parts[0] x", like)
    _norm(tuple(widths), pdl)(*arguments, *[0] * (10 - len(arguments)), like.shape[0], current_stream(like))


def _check_elementwise(out: torch.Tensor) -> tuple[int, int]:
    import torch

    check_tensor("out", out, dtypes=(torch.bfloat16,), shape=(None, None))
    rows, width = out.shape
    check_one_of("out.shape[0]", rows, range(1, MAX_ROWS + 1))
    if width < 8 or width % 8:
        raise refuse("out.shape[1]", width, "multiples of 8")
    return int(rows), int(width)


def situ(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """``out [B, W]`` bf16 = 4 tanh(g / 4) sigmoid(g) 25 tanh(u / 25) of ``gate_up [B, 2 W]`` bf16, gate columns first.

    W a multiple of 8, rows of ``gate_up`` with any stride of 16 bytes, 1 <= B <= 256. Returns ``out``. Raises UserError
    before any launch.
    """
    import torch

    rows, width = _check_elementwise(out)
    check_tensor(
        "gate_up", gate_up, dtypes=(torch.bfloat16,), shape=(rows, 2 * width), like=out, contiguous=False
    )
    check_on_gpu("out", out)
    stride = gate_up.stride(0) * 2
    _elementwise("situ", pdl)(
        gate_up.data_ptr(),
        stride,
        gate_up.data_ptr() + width * 2,
        stride,
        out.data_ptr(),
        width,
        -(-width // ELEMENTWISE_COLUMNS),
        rows,
        current_stream(out),
    )
    return out


def gate_multiply(value: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """``out [B, W]`` = ``value [B, W]`` times sigmoid(``gate [B, W]``), all bf16; ``out`` may be ``value``.

    W a multiple of 8; ``value`` and ``gate`` with any row stride of 16 bytes, 1 <= B <= 256. Returns ``out``. Raises
    UserError before any launch.
    """
    import torch

    rows, width = _check_elementwise(out)
    for name, tensor in (("value", value), ("gate", gate)):
        check_tensor(name, tensor, dtypes=(torch.bfloat16,), shape=(rows, width), like=out, contiguous=False)
    check_on_gpu("out", out)
    _elementwise("gate_multiply", pdl)(
        value.data_ptr(),
        value.stride(0) * 2,
        gate.data_ptr(),
        gate.stride(0) * 2,
        out.data_ptr(),
        width,
        -(-width // ELEMENTWISE_COLUMNS),
        rows,
        current_stream(out),
    )
    return out


def query_and_cache(
    absorbed: torch.Tensor,
    extra: torch.Tensor,
    latent: torch.Tensor,
    latent_extra: torch.Tensor,
    slots: torch.Tensor,
    query: torch.Tensor,
    cache: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Put the ``query [B, H, 576]`` bf16 together, write one row a token into the paged ``cache``; returns ``query``.

    * ``absorbed [B, H, 512]`` and ``extra [B, H, 64]`` bf16, any row and head stride of 16 bytes (a transposed batched
      product, the last 64 of each head's 192 query values); H 6, 12, 24, 48 or 96, B up to 256;
    * ``latent [B, 512]`` (normalised) and ``latent_extra [B, 64]`` bf16, any row stride of 16 bytes;
    * ``slots [B]`` int64 and ``cache [P, 64, 576]`` float8_e4m3fn or bf16 as in ``mla_prep``.

    Raises UserError before any launch.
    """
    import torch

    bf16 = (torch.bfloat16,)
    check_tensor("query", query, dtypes=bf16, shape=(None, None, ROW))
    rows, heads, _ = query.shape
    check_one_of("query.shape[0]", rows, range(1, MAX_ROWS + 1))
    check_one_of("query.shape[1]", heads, HEADS)
    for name, tensor, shape in (
        ("absorbed", absorbed, (rows, heads, LATENT)),
        ("extra", extra, (rows, heads, EXTRA)),
        ("latent", latent, (rows, LATENT)),
        ("latent_extra", latent_extra, (rows, EXTRA)),
    ):
        check_tensor(name, tensor, dtypes=bf16, shape=shape, like=query, contiguous=False)
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(rows,), like=query, alignment_bytes=8)
    check_tensor(
        "cache",
        cache,
        dtypes=(torch.float8_e4m3fn, torch.bfloat16),
        shape=(None, PAGE_TOKENS, ROW),
        like=query,
        contiguous=False,
    )
    if cache.stride(1) != ROW:
        raise refuse("cache.stride", cache.stride(), f"rows of a page {ROW} values apart")
    check_on_gpu("query", query)
    _query_and_cache(heads, cache.dtype == torch.float8_e4m3fn, pdl)(
        absorbed.data_ptr(),
        absorbed.stride(0) * 2,
        absorbed.stride(1) * 2,
        extra.data_ptr(),
        extra.stride(0) * 2,
        extra.stride(1) * 2,
        latent.data_ptr(),
        latent.stride(0) * 2,
        latent_extra.data_ptr(),
        latent_extra.stride(0) * 2,
        slots.data_ptr(),
        query.data_ptr(),
        cache.data_ptr(),
        cache.stride(0) * cache.element_size(),
        rows,
        current_stream(query),
    )
    return query


# ---- end of a step ------------------------------------------------------------------------------------------------


def sample(
    values: torch.Tensor,
    ids: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``tokens [B]`` int32 out of every rank's candidates: ``values [T, B, 64]`` fp32 and ``ids [T, B, 64]`` int32.

    Alone: the id of the largest value, the lowest of equal ones. With ``temperature``, ``top_p`` and ``uniform``, all
    ``[B]`` fp32: a draw from the 64 best of all ranks; each rank's candidates must then be in falling order, equal
    values by rising id. ``uniform`` in [0, 1); temperature 0 or ``top_p`` 0 is greedy. T 1, 2, 4, 8 or 16, B up to 256.
    Returns ``tokens``. Raises UserError before any launch.
    """
    import torch

    check_tensor("values", values, dtypes=(torch.float32,), shape=(None, None, CANDIDATES))
    ranks, rows, _ = values.shape
    check_one_of("values.shape[0]", ranks, RANK_COUNTS)
    check_one_of("values.shape[1]", rows, range(1, MAX_ROWS + 1))
    check_tensor("ids", ids, dtypes=(torch.int32,), shape=(ranks, rows, CANDIDATES), like=values)
    check_tensor("tokens", tokens, dtypes=(torch.int32,), shape=(rows,), like=values, alignment_bytes=4)
    drawn = (("temperature", temperature), ("top_p", top_p), ("uniform", uniform))
    draw = any(tensor is not None for _, tensor in drawn)
    addresses = [0, 0, 0]
    if draw:
        for number, (name, tensor) in enumerate(drawn):
            if tensor is None:
                raise refuse(name, None, "a tensor where any of temperature, top_p and uniform is given")
            check_tensor(name, tensor, dtypes=(torch.float32,), shape=(rows,), like=values, alignment_bytes=4)
            addresses[number] = tensor.data_ptr()
    check_on_gpu("values", values)
    _sample(ranks, draw, pdl)(
        values.data_ptr(), ids.data_ptr(), *addresses, tokens.data_ptr(), rows, current_stream(values)
    )
    return tokens


def advance(num_tokens: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, *, pdl: bool = False) -> None:
    """Step state for the next replay: ``num_tokens [B]`` int32 grow by one, ``slots [B]`` int64 become the new token's.

    ``pages [B, >= 1]`` int32, rows with any stride: the page table of ``mla_decode``. A row of slot below 0 is padding
    and stays as it is; a row whose table has no page for the new token becomes padding (slot -1, its length unchanged).
    1 <= B <= 16. Raises UserError before any launch.
    """
    import torch

    int32 = (torch.int32,)
    check_tensor("num_tokens", num_tokens, dtypes=int32, shape=(None,), alignment_bytes=4)
    rows = num_tokens.shape[0]
    check_one_of("num_tokens.shape[0]", rows, range(1, MAX_EXCHANGED_ROWS + 1))
    check_tensor("pages", pages, dtypes=int32, shape=(rows, None), like=num_tokens, contiguous=False, alignment_bytes=4)
    if pages.shape[1] < 1:
        raise refuse("pages.shape[1]", pages.shape[1], "1 or more")
    check_tensor("slots", slots, dtypes=(torch.int64,), shape=(rows,), like=num_tokens, alignment_bytes=8)
    check_on_gpu("num_tokens", num_tokens)
    _advance(pdl)(
        num_tokens.data_ptr(),
        pages.data_ptr(),
        pages.stride(0) * 4,
        pages.shape[1],
        slots.data_ptr(),
        rows,
        current_stream(num_tokens),
    )
