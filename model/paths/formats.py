"""One product in every format that public engines have kernels for: rows of a table, of which the weights choose one.

A quantised product needs its input quantised, which is a launch of its own in front of it on the same stream. Formats
without a row here are refused by name (``program``), never priced as another.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from k3sim.model.step import Row

#: Format of the weights -> operator, and what the machine must have.
PRODUCTS = (
    ("fp8_block", "quantised_gemm.fp8_block", ""),
    ("mxfp8", "quantised_gemm.mxfp8", "block-scaled"),
    ("nvfp4", "quantised_gemm.nvfp4", "block-scaled"),
)


def joined(*needs: str) -> str:
    """Several needs of a row as one."""
    return ", ".join(one for one in needs if one)


def in_formats(row: Row) -> tuple[Row, ...]:
    """``row``, a product of one matrix in bf16, and its forms for quantised weights, each behind its quantisation."""
    (weight,) = row.weights
    rows, found = row.shape["rows"], [row]
    for name, operator, needs in PRODUCTS:
        condition = joined(row.needs, needs)
        found.append(
            replace(
                row, stage=f"{row.stage}.quantise", operator="quantised_gemm.quantise", weights=(), of=weight,
                shape={"rows": rows, "width": f"depth of {weight}"}, needs=condition, formats=(name,), launch="graph",
                trigger="end", sends="", receives=(),
            )
        )  # fmt: skip
        found.append(
            replace(
                row, operator=operator, shape={"rows": rows}, needs=condition, formats=(name,), launch="graph",
                trigger="end", after=(),
            )
        )  # fmt: skip
    return tuple(found)


def product(stage: str, weight: str, *, rows: str = "rows", **columns: Any) -> tuple[Row, ...]:
    """A linear layer: cuBLAS in bf16, or one of the quantised products."""
    return in_formats(
        Row(stage=stage, operator="cublas.public_gemm", shape={"rows": rows}, weights=(weight,), **columns)
    )


def products_in_formats(rows: Iterable[Row], operators: tuple[str, ...]) -> tuple[Row, ...]:
    """A table in which every product by one of ``operators`` stands in every format."""
    found: list[Row] = []
    for row in rows:
        found += in_formats(row) if row.operator in operators and len(row.weights) == 1 else (row,)
    return tuple(found)
