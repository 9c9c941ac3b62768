"""What is counted of one column of one split.

Shapes: N rows of a batch, L values of all its lists together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rankopt.data.columns import Lists, Numbers, read_integers, read_lists, read_reals
from rankopt.data.report.cells import (
    NUM_REAL_CELLS,
    Buckets,
    IdCells,
    id_buckets,
    real_buckets,
    real_cells,
    real_value,
    stability_index,
)
from rankopt.data.report.schema import Bucket, ColumnReport, Drift, Role
from rankopt.models.card import DenseInput, IdsInput, KjtInput, ModelCard, RaggedIdsInput
from rankopt.models.id_ranges import into_range
from rankopt.models.inputs import OutOfRange

_Mask = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ColumnSpec:
    """What a card says of a column."""

    column: str
    role: Role
    num_ids: int | None = None
    max_length: int | None = None
    policy: OutOfRange = "error"


def column_specs(card: ModelCard) -> tuple[ColumnSpec, ...]:
    """List the columns of a card's inputs, each once for what it is read as."""
    specs: list[ColumnSpec] = []
    for item in card.inputs:
        if isinstance(item, DenseInput):
            specs += [ColumnSpec(column, "dense") for column in item.columns]
        elif isinstance(item, IdsInput):
            specs += [
                ColumnSpec(column, "id", num_ids, None, item.out_of_range)
                for column, num_ids in zip(item.columns, item.ranges, strict=True)
            ]
        elif isinstance(item, (RaggedIdsInput, KjtInput)):
            for bag in [item] if isinstance(item, RaggedIdsInput) else item.features:
                specs.append(
                    ColumnSpec(bag.column, "ids", bag.num_ids, bag.max_length, bag.out_of_range)
                )
                if bag.weights_column:
                    specs.append(ColumnSpec(bag.weights_column, "weights"))
        else:
            for column in item.columns:
                if column.name is not None:
                    role: Role = (
                        "dense" if column.num_ids is None else "ids" if column.length else "id"
                    )
                    specs.append(
                        ColumnSpec(
                            column.name, role, column.num_ids, column.length, column.out_of_range
                        )
                    )
    return tuple({(spec.column, spec.role): spec for spec in specs}.values())


class ColumnTally:
    """Counts of one column.

    Args:
        spec: what the card says of it.
        cells: the cells of its ids.
        reference: the tally of the same column in the reference, complete; None while it is that
            one that is being made, or without a reference.
        is_reference: whether others will be compared with this one.
    """

    def __init__(
        self,
        spec: ColumnSpec,
        cells: IdCells | None,
        reference: ColumnTally | None,
        *,
        is_reference: bool,
    ) -> None:
        self.spec = spec
        self._cells = cells
        self._reference = reference
        self._is_reference = is_reference
        self._num_rows = self._num_null = self._num_invalid = 0
        self._num_values = self._num_outside = self._num_unseen = 0
        self._length = self._num_empty = self._num_cut = self._num_lists = 0
        self._sum = self._sum_squares = 0.0
        self._low, self._high = np.inf, -np.inf
        num_cells = cells.num_cells if cells else NUM_REAL_CELLS
        self._seen = np.zeros(num_cells if cells else 0, dtype=np.bool_)
        self._reals = np.zeros(0 if cells else NUM_REAL_CELLS, dtype=np.int64)
        self._halves = np.zeros((2, num_cells if cells and is_reference else 0), dtype=np.uint32)
        self._buckets = reference.buckets() if reference else None
        self._in_buckets = np.zeros(len(self._buckets.labels) if self._buckets else 0, np.int64)

    def add(self, array: Any, halves: _Ints) -> None:
        """Count a batch of the column.

        Args:
            array: the column, [N].
            halves: 0 or 1, the half of the reference to which each row belongs, [N].

        Raises:
            ColumnTypeError: its type can hold nothing of what the card says.
        """
        self._num_rows += len(array)
        lists = read_lists(array) if self.spec.role in {"ids", "weights"} else None
        read = read_integers if self._cells else read_reals
        numbers = read(array if lists is None else lists.values)
        if lists is None:
            self._num_null += int(numbers.missing.sum())
        else:
            self._add_lists(array, lists, numbers.missing)
            halves = np.repeat(halves, lists.lengths)
        if self._cells:
            self._add_ids(self._cells, numbers, halves)
        else:
            self._add_reals(numbers)

    def buckets(self) -> Buckets | None:
        """Join the cells of this, the reference, to buckets."""
        if self._cells:
            return id_buckets(self._halves[0], self._halves[1])
        return real_buckets(self._reals)

    def report(self) -> ColumnReport:
        """Say what was counted."""
        common = ColumnReport(
            column=self.spec.column,
            role=self.spec.role,
            num_null=self._num_null,
            null_rate=_share(self._num_null, self._num_rows) or 0.0,
            num_invalid=self._num_invalid,
            num_values=self._num_values,
            drift=self._drift(),
        )
        update = self._id_figures(self._cells) if self._cells else self._real_figures()
        if self.spec.role in {"ids", "weights"}:
            update |= {
                "mean_length": _share(self._length, self._num_lists),
                "empty_rate": _share(self._num_empty, self._num_lists),
            }
        if self.spec.role == "ids":
            update["cut_rate"] = _share(self._num_cut, self._num_lists)
        return common.model_copy(update=update)

    def _add_lists(self, array: Any, lists: Lists, missing: _Mask) -> None:
        row_null = array.is_null().to_numpy(zero_copy_only=False)
        rows = np.repeat(np.arange(len(array)), lists.lengths)
        row_null = row_null.copy()
        row_null[rows[missing]] = True
        self._num_null += int(row_null.sum())
        self._num_lists += len(array)
        self._length += int(lists.lengths.sum())
        self._num_empty += int((lists.lengths == 0).sum())
        if self.spec.max_length is not None:
            self._num_cut += int((lists.lengths > self.spec.max_length).sum())

    def _add_ids(self, cells: IdCells, numbers: Numbers, halves: _Ints) -> None:
        usable = ~numbers.missing & ~numbers.invalid
        self._num_invalid += int(numbers.invalid.sum())
        self._num_values += int(usable.sum())
        ids, halves = numbers.values[usable], halves[usable]
        outside = (ids < 0) | (ids >= cells.num_ids)
        self._num_outside += int(outside.sum())
        if self.spec.policy == "error":
            ids, halves = ids[~outside], halves[~outside]
        elif outside.any():
            ids = into_range(torch.tensor(ids), cells.num_ids, self.spec.policy).numpy()
        found = cells.of(ids)
        self._seen[found] = True
        if self._is_reference:
            np.add.at(self._halves.reshape(-1), halves * cells.num_cells + found, 1)
        if self._reference is not None:
            self._num_unseen += int((~self._reference._seen[found]).sum())
        self._add_to_buckets(found)

    def _add_reals(self, numbers: Numbers) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            values = numbers.values.astype(np.float32)
        usable = ~numbers.missing & ~numbers.invalid & np.isfinite(values)
        self._num_invalid += int((~usable & ~numbers.missing).sum())
        values = values[usable]
        self._num_values += len(values)
        if not len(values):
            return
        wide = values.astype(np.float64)
        self._sum += float(wide.sum())
        self._sum_squares += float((wide**2).sum())
        self._low = min(self._low, float(values.min()))
        self._high = max(self._high, float(values.max()))
        found = real_cells(values)
        self._reals += np.bincount(found, minlength=NUM_REAL_CELLS)
        self._add_to_buckets(found)

    def _add_to_buckets(self, found: _Ints) -> None:
        if self._buckets is not None:
            of_value = self._buckets.of_cell[found]
            self._in_buckets += np.bincount(of_value, minlength=len(self._in_buckets))

    def _id_figures(self, cells: IdCells) -> dict[str, Any]:
        occupied = int(self._seen.sum())
        cardinality = cells.cardinality(occupied)
        figures: dict[str, Any] = {
            "num_out_of_range": self._num_outside,
            "out_of_range_rate": _share(self._num_outside, self._num_values),
            "num_ids": cells.num_ids,
            "cardinality": cardinality,
            "coverage": cardinality / cells.num_ids,
            "exact": cells.exact,
        }
        if self._reference is not None and self._num_placed:
            known = self._reference._seen
            num_known = int(known.sum())
            new = _share(int((self._seen & ~known).sum()), occupied) or 0.0
            figures["unseen_rate"] = cells.unseen(self._num_unseen / self._num_placed, num_known)
            figures["unseen_ids_rate"] = cells.unseen(new, num_known)
        return figures

    def _real_figures(self) -> dict[str, Any]:
        if not self._num_values:
            return {}
        mean = self._sum / self._num_values
        variance = max(self._sum_squares / self._num_values - mean**2, 0.0)
        p1, median, p99 = (self._quantile(share) for share in (0.01, 0.5, 0.99))
        return {
            "mean": mean,
            "std": variance**0.5,
            "min": self._low,
            "p1": p1,
            "median": median,
            "p99": p99,
            "max": self._high,
        }

    def _quantile(self, share: float) -> float:
        rank = share * (self._num_values - 1)
        cell = int(np.searchsorted(np.cumsum(self._reals), rank, side="right"))
        return min(max(real_value(cell), self._low), self._high)

    def _drift(self) -> Drift | None:
        if self._buckets is None or self._reference is None:
            return None
        labels = list(self._buckets.labels)
        reference, values = self._buckets.reference, self._in_buckets
        nulls = (self._reference._num_null, self._num_null)
        # That values are missing more often is drift as well.
        if any(nulls):
            part = reference.sum() / max(self._reference._num_placed, 1)
            labels.append("missing")
            reference = np.append(reference, round(nulls[0] * part))
            values = np.append(values, nulls[1])
        index = stability_index(reference, values)
        if index is None:
            return None
        rows = zip(labels, reference.tolist(), values.tolist(), strict=True)
        buckets = tuple(Bucket(label=a, num_reference=b, num_values=c) for a, b, c in rows)
        return Drift(psi=index[0], noise=index[1], buckets=buckets)

    @property
    def _num_placed(self) -> int:
        """Values that have a cell."""
        is_dropped = self._cells is not None and self.spec.policy == "error"
        return self._num_values - (self._num_outside if is_dropped else 0)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
