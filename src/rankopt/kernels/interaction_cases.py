"""The parity grid of the interactions, as data, and the error that each result may have.

Shapes: B rows, F fields, D numbers of each.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rankopt.kernels.interaction import dot_reference, fm_reference

Values = Literal[
    "normal",
    "zero",
    "alternating",  # large, with alternating signs: sums that cancel
    "tiny",  # products below the smallest normal number
    "huge",  # products near the largest
    "nonfinite",  # rows of NaN, inf and -inf between ordinary ones
]
Layout = Literal["contiguous", "row_stride", "transposed"]
HALF_ULP = torch.finfo(torch.float32).eps / 2
SMALLEST = 2.0**-149


@dataclass(frozen=True)
class InteractionCase:
    """One call: `pieces` are the numbers of fields in each tensor.

    `num_before`, `upper` and `diagonal` are for the dot products, `total` for their sum.
    """

    num_rows: int
    pieces: tuple[int, ...]
    dim: int
    values: Values = "normal"
    layout: Layout = "contiguous"
    num_before: int = 0
    upper: bool = False
    diagonal: bool = False
    total: bool = True
    rows_per_thread: int = 0

    def __str__(self) -> str:
        pieces = "+".join(str(count) for count in self.pieces)
        triangle = ("upper" if self.upper else "lower") + ("_diagonal" if self.diagonal else "")
        total = "total" if self.total else "columns"
        shape = f"{self.num_rows}x{pieces}x{self.dim}"
        parts = (shape, self.values, self.layout, f"before{self.num_before}", triangle, total)
        return "-".join((*parts, f"grain{self.rows_per_thread}"))


_FIELDS = ((1,), (2,), (1, 4), (15,), (1, 15), (17,), (1, 26), (32,), (3, 30))
_DIMS = (1, 3, 4, 16, 30, 64)


def _variants(num_rows: int) -> Iterator[InteractionCase]:
    kinds: tuple[Values, ...] = ("zero", "alternating", "tiny", "huge", "nonfinite")
    for values, dim in itertools.product(kinds, (5, 32)):
        yield InteractionCase(num_rows, (1, 8), dim, values=values, num_before=dim)
    layouts: tuple[Layout, ...] = ("row_stride", "transposed")
    for layout, dim in itertools.product(layouts, (5, 32)):
        yield InteractionCase(num_rows, (1, 8), dim, layout=layout, num_before=3)


def _dot_grid() -> Iterator[InteractionCase]:
    for num_rows, pieces, dim in itertools.product((0, 1, 3), _FIELDS, _DIMS):
        yield InteractionCase(num_rows, pieces, dim, num_before=dim)
    triangles = itertools.product((False, True), repeat=2)
    for (upper, diagonal), pieces in itertools.product(triangles, _FIELDS):
        yield InteractionCase(5, pieces, 18, upper=upper, diagonal=diagonal, num_before=1)
    for num_rows in (1, 4):
        yield from _variants(num_rows)
    yield InteractionCase(2, (1,) * 40, 8)  # more tensors than are held without an allocation
    yield InteractionCase(2, (100,), 7, diagonal=True)
    yield InteractionCase(2, (3, 2), 1000, upper=True)
    # Rows enough to be multiplied side by side, and a group that is not full.
    for (upper, diagonal), pieces in itertools.product(
        itertools.product((False, True), repeat=2), _FIELDS
    ):
        yield InteractionCase(28, pieces, 18, upper=upper, diagonal=diagonal, num_before=1)
    for num_rows, dim in itertools.product((12, 13, 16, 17, 31), (1, 7, 64, 70, 130)):
        yield InteractionCase(num_rows, (1, 10), dim)
    yield from _variants(30)
    # Large enough that several threads share it.
    yield InteractionCase(513, (1, 26), 64, num_before=64)
    yield InteractionCase(33, (9,), 16, upper=True, rows_per_thread=1)


def _fm_grid() -> Iterator[InteractionCase]:
    for num_rows, pieces, dim in itertools.product((0, 1, 3), _FIELDS, _DIMS):
        yield InteractionCase(num_rows, pieces, dim)
    for pieces, dim in itertools.product(_FIELDS, _DIMS):
        yield InteractionCase(5, pieces, dim, total=False)
    for num_rows in (1, 4):
        yield from _variants(num_rows)
    yield InteractionCase(2, (1,) * 40, 8)
    yield InteractionCase(2, (3, 2), 1000, total=False)
    yield InteractionCase(2, (200,), 16)
    yield InteractionCase(1025, (13, 26), 16)
    yield InteractionCase(33, (9,), 32, rows_per_thread=1)


DOT_CASES: tuple[InteractionCase, ...] = tuple(_dot_grid())
FM_CASES: tuple[InteractionCase, ...] = tuple(_fm_grid())


def dot_arguments(case: InteractionCase) -> tuple[Any, ...]:
    """Draw the arguments of a dot interaction: the same ones every time."""
    generator = _generator(case)
    before = [_draw(case, case.num_before, generator)] if case.num_before else []
    fields = [_draw(case, count * case.dim, generator) for count in case.pieces]
    return before, fields, case.dim, case.upper, case.diagonal, case.rows_per_thread


def fm_arguments(case: InteractionCase) -> tuple[Any, ...]:
    """Draw the arguments of a sum over pairs: the same ones every time."""
    generator = _generator(case)
    fields = [_draw(case, count * case.dim, generator) for count in case.pieces]
    return fields, case.dim, case.total, case.rows_per_thread


def dot_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """One rounding for each product that is added, and the reference's own; copies are exact."""
    before, fields, dim, upper, diagonal, _ = arguments
    zeros = [torch.zeros_like(piece) for piece in before]
    size = dot_reference(zeros, _absolute(fields), dim, upper, diagonal).to(torch.float64)
    allowance: Tensor = (dim + 2) * (HALF_ULP * size + SMALLEST)
    allowance[:, : sum(piece.shape[1] for piece in before)] = 0
    return allowance.broadcast_to(expected.shape)


def fm_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Two roundings for each field, one of its product and one of the sum before it."""
    fields, dim, total, _ = arguments
    num_fields = sum(piece.shape[1] for piece in fields) // dim
    size = fm_reference(_absolute(fields), dim, total).to(torch.float64)
    roundings = 2 * num_fields + (dim // 16 + 6 if total else 2)
    allowance: Tensor = roundings * (HALF_ULP * size + dim * SMALLEST)
    return allowance.broadcast_to(expected.shape)


def _absolute(pieces: Sequence[Tensor]) -> list[Tensor]:
    return [piece.abs() for piece in pieces]


def _generator(case: InteractionCase) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(str(case).encode()))


def _draw(case: InteractionCase, width: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(case.num_rows, width, generator=generator)
    if case.values == "zero":
        x = torch.zeros_like(x)
    elif case.values == "alternating":
        x = torch.full_like(x, 1e3) + x
        x[:, 1::2] *= -1
    elif case.values == "tiny":
        x = x * 1e-21
    elif case.values == "huge":
        x = x.clamp(-1, 1) * 1e18
    elif case.values == "nonfinite":
        x[0::4, 0] = torch.nan
        x[1::4, -1] = torch.inf
        x[2::4] = -torch.inf
    return _lay_out(x, case.layout)


def _lay_out(x: Tensor, layout: Layout) -> Tensor:
    if layout == "row_stride":
        wide = torch.full((x.shape[0], x.shape[1] + 3), 1e9)
        wide[:, 1 : 1 + x.shape[1]] = x
        return wide[:, 1 : 1 + x.shape[1]]
    if layout == "transposed":
        return x.T.contiguous().T
    return x
