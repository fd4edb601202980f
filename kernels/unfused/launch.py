"""Public calls of the stock path's separate kernels: checks, then one launch on the current stream. They allocate
nothing; the first call of a configuration compiles, so make it before a graph capture.

    norm([(latents[:, :1536], query_norm, query_latent), (latents[:, 1536:2048], kv_norm, latent)])
    query_and_cache(absorbed, extra, latent, latent_extra, slots, query, cache)

    sample(values, ids, tokens)                                 # the next token of each row
    advance(num_tokens, pages, slots)                           # and where it will go

Those between ranks are in ``exchange_launch.py``, the KDA step in three in ``recurrence_launch.py``.

``pdl`` lets a kernel start before its predecessor on the stream has ended. Early it reads only weights (and the table
of peers), which no kernel that may still run on the stream may write; all else waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3sim.kernels.harness.checks import check_on_gpu, check_one_of, check_tensor, refuse
from k3sim.kernels.mla_decode.launch import EXTRA, HEADS, LATENT, ROW, check_cache
from k3sim.kernels.toolchain.compile_cache import compiled_kernel, current_stream, strided

if TYPE_CHECKING:
    import torch

HEAD_DIM = 128
MAX_ROWS = 256
MAX_EXCHANGED_ROWS = 16
MAX_HIDDEN = 8192
MAX_RANKS = 16
RANK_COUNTS = (1, 2, 4, 8, 16)
CANDIDATES = 64
ELEMENTWISE_COLUMNS = 8 * 128  # of a block

Norm = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]


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
        arguments += [*strided(x), weight.data_ptr(), out.data_ptr(), out.stride(0) * 2]
    check_on_gpu("parts[0] x", like)
    run = compiled_kernel("unfused.rowwise", "compile_norm", widths=tuple(widths), pdl=pdl)
    run(*arguments, *[0] * (10 - len(arguments)), like.shape[0], current_stream(like))


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
    check_tensor("gate_up", gate_up, dtypes=(torch.bfloat16,), shape=(rows, 2 * width), like=out, contiguous=False)
    return _elementwise("situ", gate_up[:, :width], gate_up[:, width:], out, pdl)


def gate_multiply(value: torch.Tensor, gate: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """``out [B, W]`` = ``value [B, W]`` times sigmoid(``gate [B, W]``), all bf16; ``out`` may be ``value``.

    W a multiple of 8; ``value`` and ``gate`` with any row stride of 16 bytes, 1 <= B <= 256. Returns ``out``. Raises
    UserError before any launch.
    """
    import torch

    rows, width = _check_elementwise(out)
    for name, tensor in (("value", value), ("gate", gate)):
        check_tensor(name, tensor, dtypes=(torch.bfloat16,), shape=(rows, width), like=out, contiguous=False)
    return _elementwise("gate_multiply", value, gate, out, pdl)


def _elementwise(kernel: str, first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, pdl: bool) -> torch.Tensor:
    """Launch it on two operands with rows of any stride. Returns ``out``."""
    check_on_gpu("out", out)
    rows, width = out.shape
    blocks = -(-width // ELEMENTWISE_COLUMNS)
    run = compiled_kernel("unfused.rowwise", "compile_elementwise", kernel=kernel, pdl=pdl)
    run(*strided(first), *strided(second), out.data_ptr(), width, blocks, rows, current_stream(out))
    return out


def query_and_cache(
    absorbed: torch.Tensor, extra: torch.Tensor, latent: torch.Tensor, latent_extra: torch.Tensor,
    slots: torch.Tensor, query: torch.Tensor, cache: torch.Tensor,
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
    check_cache(cache, query)
    check_on_gpu("query", query)
    run = compiled_kernel(
        "unfused.rowwise", "compile_query_and_cache", heads=heads, fp8=cache.dtype == torch.float8_e4m3fn, pdl=pdl
    )
    run(
        absorbed.data_ptr(), absorbed.stride(0) * 2, absorbed.stride(1) * 2, extra.data_ptr(), extra.stride(0) * 2,
        extra.stride(1) * 2, *strided(latent), *strided(latent_extra), slots.data_ptr(), query.data_ptr(),
        *strided(cache), rows, current_stream(query),
    )  # fmt: skip
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
    run = compiled_kernel("unfused.stepping", "compile_sample", ranks=ranks, draw=draw, pdl=pdl)
    run(values.data_ptr(), ids.data_ptr(), *addresses, tokens.data_ptr(), rows, current_stream(values))
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
    run = compiled_kernel("unfused.stepping", "compile_advance", pdl=pdl)
    run(
        num_tokens.data_ptr(), *strided(pages), pages.shape[1], slots.data_ptr(), rows, current_stream(num_tokens),
    )  # fmt: skip
