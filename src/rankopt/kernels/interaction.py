"""Feature interactions as operators: pairwise dot products (DLRM, PNN) and their sum (FM).

Fields come as pieces: matrices whose columns hold one or many fields side by side, so that neither
a stack nor a concatenation of them has to be made first.

Shapes: B rows, F fields, D numbers of each, N columns copied in front.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rankopt.kernels.build import load_kernels


def dot_interaction(
    before: Sequence[Tensor],
    fields: Sequence[Tensor],
    *,
    dim: int,
    upper: bool = False,
    diagonal: bool = False,
    rows_per_thread: int = 0,
) -> Tensor:
    """Multiply all pairs of fields, each pair once, behind columns that are copied.

    A row's result is the same bit for bit alone, anywhere in a batch, beside any neighbours, with
    any number of threads and on every instruction set.

    Args:
        before: what stands in front of the products, each float32 [B, columns].
        fields: each float32 [B, k * D], k fields side by side.
        dim: D.
        upper: the pairs (i, j) with j > i, row by row, in place of those with j < i.
        diagonal: each field with itself too.
        rows_per_thread: rows that pay for waking another thread; 0 estimates it.

    Shapes: returns float32 [B, N + F (F - 1) / 2], with F (F + 1) / 2 pairs under `diagonal`.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.dot_interaction(
        list(before), list(fields), dim, upper, diagonal, rows_per_thread
    )
    return result


def fm_interaction(
    fields: Sequence[Tensor], *, dim: int, total: bool = True, rows_per_thread: int = 0
) -> Tensor:
    """Sum the products of all pairs of fields: a factorization machine's second order.

    The products are summed as such, in one pass over the fields. Rendle's identity, half of the
    square of the sum less the sum of the squares, is the same number but subtracts two large ones;
    a row that holds an infinity may therefore give infinity here and NaN there. A row's result has
    the promises of `dot_interaction`.

    Args:
        fields: each float32 [B, k * D], k fields side by side.
        dim: D.
        total: add the D columns up as well.
        rows_per_thread: rows that pay for waking another thread; 0 estimates it.

    Shapes: returns float32 [B], or [B, D] without `total`.
    """
    load_kernels()
    result: Tensor = torch.ops.rankopt.fm_interaction(list(fields), dim, total, rows_per_thread)
    return result


def dot_reference(
    before: Sequence[Tensor],
    fields: Sequence[Tensor],
    dim: int,
    upper: bool,
    diagonal: bool,
    rows_per_thread: int = 0,
) -> Tensor:
    """Compute `rankopt::dot_interaction` in float64; `rows_per_thread` changes no result."""
    del rows_per_thread
    fields_BFD = _fields(fields, dim)
    products_BFF = torch.einsum("bid,bjd->bij", fields_BFD, fields_BFD)
    num_fields = fields_BFD.shape[1]
    if upper:
        rows, columns = torch.triu_indices(num_fields, num_fields, offset=0 if diagonal else 1)
    else:
        rows, columns = torch.tril_indices(num_fields, num_fields, offset=0 if diagonal else -1)
    pairs = products_BFF[:, rows, columns].to(torch.float32)
    return torch.cat([*before, pairs], dim=1)


def fm_reference(
    fields: Sequence[Tensor], dim: int, total: bool, rows_per_thread: int = 0
) -> Tensor:
    """Compute `rankopt::fm_interaction` in float64; `rows_per_thread` changes no result."""
    del rows_per_thread
    fields_BFD = _fields(fields, dim)
    before_BFD = fields_BFD.cumsum(1)[:, :-1]
    sums_BD = (before_BFD * fields_BFD[:, 1:]).sum(1)
    return (sums_BD.sum(1) if total else sums_BD).to(torch.float32)


def _fields(pieces: Sequence[Tensor], dim: int) -> Tensor:
    num_rows = pieces[0].shape[0]
    parts = [
        piece.to(torch.float64).reshape(num_rows, piece.shape[1] // dim, dim) for piece in pieces
    ]
    return torch.cat(parts, dim=1)
