"""The kernel of Triton that rounds a matrix to FP8 in one pass: it writes the values and their transpose.

Products want both: y = x W^T has the rows of x and W, gradients have their columns. An element in bf16 takes 2 bytes of
reads and 2 of writes, where a quotient in fp32, its cast and a transposed copy move 13. Bits are those of these three.
No GPU has run it; it is compiled for compute capabilities 9.0 and 10.0, without spills.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # a program rounds a square of this many rows and columns
_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}


@triton.jit
def kernel(
    x, peak, values, columns, scale, num_rows, num_columns, largest, tiny, FP8: tl.constexpr, SIZE: tl.constexpr
):
    """Round [num_rows, num_columns], contiguous, by the scale that maps `peak` to `largest`, the end of the range."""
    factor = tl.maximum(tl.div_rn(tl.load(peak), largest), tiny)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, factor)
    row = tl.program_id(1).to(tl.int64) * SIZE + tl.arange(0, SIZE)[:, None]
    column = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    place = row * num_columns + column
    tile = tl.div_rn(tl.load(x + place, mask=inside, other=0.0).to(tl.float32), factor).to(FP8)
    tl.store(values + place, tile, mask=inside)
    row, column = tl.trans(row), tl.trans(column)
    tl.store(columns + column * num_rows + row, tl.trans(tile), mask=tl.trans(inside))


def round_into(x: Tensor, peak: Tensor | None, values: Tensor, columns: Tensor, scale: Tensor) -> None:
    """Round `x`, [rows, columns], contiguous, into `values`, their transpose `columns`, and `scale` (0-d).

    `peak` is the largest absolute value, 0-d, or None for that of `x`.
    """
    peak = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32) if peak is None else peak
    limits = torch.finfo(values.dtype).max, torch.finfo(torch.float32).tiny
    grid = triton.cdiv(x.shape[1], BLOCK), triton.cdiv(x.shape[0], BLOCK)
    kernel[grid](x, peak, values, columns, scale, *x.shape, *limits, FP8=_TYPES[values.dtype], SIZE=BLOCK)
