"""The grid on which the lookup operators and their reference must agree.

Shapes: B rows of the result, T tables, D width of a table's rows.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rankopt.kernels.lookup import (
    COPY,
    MEAN,
    SUM,
    PlanRow,
    encode_plan,
    lookup_rows_reference,
    lookup_sequences_reference,
)
from rankopt.tables import TYPE_CODES, TableBatch, TableDtype, pack_batch, refusal

Form = Literal[
    "single",  # one id per row and table, columns of one matrix
    "flat",  # one id per row, a vector per table
    "rectangle",  # three ids per row, summed
    "mean_rectangle",
    "sum",  # lists, some of them empty
    "mean",
    "weighted",
    "ones",  # lists of one id each
    "closed",  # lists whose offsets carry the end
    "empty",  # lists, all of them empty
    "long",  # lists longer than what is fetched at once
    "keyed",  # lists of all tables in one input, with their lengths; most of one id
    "keyed_mean",
    "keyed_weighted",
    "mixed",  # one of each, and a piece that is copied
]
IdType = Literal["int64", "int32", "float32"]
_DTYPES: tuple[TableDtype, ...] = ("fp32", "fp16", "int8", "int4", "int2")
_IDS = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
_ROWS_OF_TABLE = 23


@dataclass(frozen=True)
class LookupCase:
    """One call: so many tables of one width and type, all read alike (or `mixed`)."""

    num_rows: int
    dim: int
    dtype: TableDtype
    form: Form
    num_tables: int = 3
    id_type: IdType = "int64"
    nonfinite: bool = False

    def __str__(self) -> str:
        shape = f"{self.num_rows}x{self.num_tables}x{self.dim}"
        parts = (shape, self.dtype, self.form, self.id_type)
        return "-".join((*parts, "nonfinite" if self.nonfinite else "finite"))


def _fits(dim: int, dtype: TableDtype) -> bool:
    return (
        dtype == "fp32"
        or refusal(dim, dtype) is None
        or "bytes against" in str(refusal(dim, dtype))
    )


def _grid() -> Iterator[LookupCase]:
    widths, batches = (1, 3, 8, 32, 64, 100, 128), (0, 1, 2, 7, 513)
    forms: tuple[Form, ...] = ("single", "sum", "weighted", "mean")
    for dtype, dim, num_rows, form in itertools.product(_DTYPES, widths, batches, forms):
        if _fits(dim, dtype):
            yield LookupCase(num_rows, dim, dtype, form)
    keyed: tuple[Form, ...] = ("keyed", "keyed_mean", "keyed_weighted")
    lists: tuple[Form, ...] = ("ones", "closed", "empty", "long", "mixed", *keyed)
    others: tuple[Form, ...] = ("flat", "rectangle", "mean_rectangle", *lists)
    for dtype, dim, num_rows in itertools.product(_DTYPES, (8, 20, 300), (1, 7, 65)):
        if _fits(dim, dtype):
            for other in others:
                yield LookupCase(num_rows, dim, dtype, other)
    id_types: tuple[IdType, ...] = ("int32", "float32")
    read_any: tuple[Form, ...] = ("single", "flat", "rectangle", "sum", "keyed")
    for id_type in id_types:
        for read in read_any:
            yield LookupCase(70, 16, "int8", read, id_type=id_type)
    for read in forms:
        yield LookupCase(33, 24, "fp32", read, nonfinite=True)
        yield LookupCase(33, 24, "fp16", read, nonfinite=True)
    # Lists of one id that are cut into blocks, and tables too large for the first caches.
    yield LookupCase(2000, 128, "fp16", "ones")
    yield LookupCase(3, 128, "fp32", "single", num_tables=40)
    # More lookups than are fetched at once, and enough rows that several threads share them.
    yield LookupCase(1, 16, "int8", "single", num_tables=150)
    yield LookupCase(3, 16, "fp32", "flat", num_tables=70)
    yield LookupCase(0, 16, "int8", "keyed")
    yield LookupCase(3000, 64, "int8", "keyed", num_tables=8)
    yield LookupCase(3000, 64, "int8", "mixed", num_tables=8)


LOOKUP_CASES: tuple[LookupCase, ...] = tuple(_grid())
_SEQUENCES: tuple[tuple[int, IdType], ...] = ((1, "int64"), (3, "int32"))
SEQUENCE_CASES: tuple[LookupCase, ...] = tuple(
    LookupCase(num_rows, dim, dtype, "flat", num_tables=num_tables, id_type=id_type)
    for dtype, dim, num_rows in itertools.product(_DTYPES, (8, 36, 64), (0, 1, 7, 513))
    for num_tables, id_type in _SEQUENCES
    if _fits(dim, dtype)
)


class _Draw:
    """Draws a case's tensors: the same ones every time."""

    def __init__(self, case: LookupCase) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))
        self.inputs: list[Tensor] = []

    def tables(self) -> tuple[TableBatch, Tensor]:
        case = self.case
        names = [f"t{index}" for index in range(case.num_tables)]
        weights = [
            torch.randn(_ROWS_OF_TABLE + index, case.dim, generator=self.generator)
            for index in range(case.num_tables)
        ]
        if case.nonfinite:
            for weight in weights:
                weight[0, 0], weight[1, 1], weight[2] = torch.nan, torch.inf, -torch.inf
        return pack_batch(names, weights, [case.dtype] * case.num_tables)

    def ids(self, *shape: int) -> Tensor:
        drawn = torch.randint(0, _ROWS_OF_TABLE, shape, generator=self.generator)
        return drawn.to(_IDS[self.case.id_type])

    def add(self, tensor: Tensor) -> int:
        self.inputs.append(tensor)
        return len(self.inputs) - 1

    def lists(self, form: Form) -> dict[str, Any]:
        """Draw ids, offsets and weights of one lookup on lists."""
        longest = {"long": 200, "empty": 0}.get(form, 6)
        lengths = torch.randint(0, longest + 1, (self.case.num_rows,), generator=self.generator)
        lengths[::3] = 0 if form != "long" else longest
        if form == "ones":
            lengths[:] = 1
        ends = lengths.cumsum(0)
        count = int(ends[-1]) if len(ends) else 0
        # The ids lie in every other place: a slice of something larger.
        values = self.ids(count * 2)[::2] if form in ("sum", "ones") else self.ids(count)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        if form != "closed":
            offsets = offsets[:-1]
        fields = {"source": self.add(values), "offsets": self.add(offsets), "length": 0}
        if form == "weighted":
            weights = torch.randn(count, generator=self.generator)
            fields["weights"] = self.add(weights)
        return fields

    def keyed(self, form: Form) -> dict[str, Any]:
        """Draw ids, lengths and weights of all lookups."""
        case = self.case
        shape = (case.num_tables * case.num_rows,)
        lengths = torch.randint(-9, 6, shape, generator=self.generator).clamp(min=0)
        lengths[torch.rand(shape, generator=self.generator) < 0.7] = 1
        count = int(lengths.sum())
        fields = {"source": self.add(self.ids(count)), "offsets": self.add(lengths)}
        if form == "keyed_weighted":
            fields["weights"] = self.add(torch.randn(count, generator=self.generator))
        return {**fields, "length": 0, "groups": case.num_tables}


def lookup_arguments(case: LookupCase) -> tuple[Any, ...]:
    """Draw the arguments of `lookup_rows`."""
    draw = _Draw(case)
    batch, store = draw.tables()
    rows: list[PlanRow] = []
    out = 0
    matrix = None
    keyed: dict[str, Any] = {}
    for index, slot in enumerate(batch.slots):
        form = case.form
        if form == "mixed":
            form = ("single", "weighted", "flat", "mean", "rectangle")[index % 5]
        fields: dict[str, Any]
        if form == "single":
            if matrix is None:
                matrix = draw.add(draw.ids(case.num_rows, case.num_tables + 2))
            fields = {"source": matrix, "column": index + 1}
        elif form == "flat":
            fields = {"source": draw.add(draw.ids(case.num_rows))}
        elif form in ("rectangle", "mean_rectangle"):
            # Columns of a matrix that lies the other way round.
            ids = draw.ids(4, case.num_rows).t()
            fields = {"source": draw.add(ids), "column": 1, "length": 3}
        elif form in ("keyed", "keyed_mean", "keyed_weighted"):
            keyed = keyed or draw.keyed(form)
            fields = {**keyed, "column": index}
        else:
            fields = draw.lists(form)
        mode = MEAN if form in ("mean", "mean_rectangle", "keyed_mean") else SUM
        code = TYPE_CODES[slot.dtype]
        rows.append(PlanRow(mode, slot.offset, slot.num_rows, slot.dim, code, out, **fields))
        out += slot.dim
        if case.form == "mixed" and index == 0:
            piece = torch.randn(case.num_rows, 9, generator=draw.generator)[:, 2:7]
            rows.append(PlanRow(COPY, 0, 0, 5, 0, out, source=draw.add(piece)))
            out += 5
    return store, encode_plan(rows), draw.inputs, case.num_rows, out


def sequence_arguments(case: LookupCase) -> tuple[Any, ...]:
    """Draw the arguments of `lookup_sequences`: ids [B], [B, 2] turned round, [2, B, 1], ..."""
    draw = _Draw(case)
    batch, store = draw.tables()
    rows = []
    for index, slot in enumerate(batch.slots):
        ids = (
            draw.ids(case.num_rows),
            draw.ids(2, case.num_rows).t(),
            draw.ids(2, case.num_rows, 1),
        )[index % 3]
        source = draw.add(ids)
        code = TYPE_CODES[slot.dtype]
        rows.append(PlanRow(SUM, slot.offset, slot.num_rows, slot.dim, code, 0, source))
    return store, encode_plan(rows), draw.inputs, case.dim


def lookup_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Allow the rounding of sums and of unpacked values, where an implementation has its own."""
    return 1e-6 * lookup_rows_reference(*arguments, sizes=True).nan_to_num().abs()


def sequence_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Allow the rounding of unpacked values, where an implementation has its own."""
    return 1e-6 * lookup_sequences_reference(*arguments, sizes=True)
