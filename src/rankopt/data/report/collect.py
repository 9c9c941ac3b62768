"""Go over the splits of a card's rows once each, and say what they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankopt.data.columns import ColumnTypeError, read_reals
from rankopt.data.hashing import mix, stable_hash
from rankopt.data.report.cells import MAX_ID_CELLS, IdCells, share_cells
from rankopt.data.report.requests import RequestTally
from rankopt.data.report.schema import SplitReport
from rankopt.data.report.tallies import ColumnSpec, ColumnTally, column_specs
from rankopt.data.report.timeline import Timeline, days_of
from rankopt.data.rowsource import (
    BATCH_ROWS,
    FillsMissing,
    RowSource,
    choose_columns,
    numbered_batches,
)
from rankopt.errors import DataError, Problem
from rankopt.models.card import ModelCard

_Ints = npt.NDArray[np.int64]


def collect(
    card: ModelCard,
    sources: Mapping[str, RowSource],
    reference: str | None,
    progress: Callable[[str], None] = lambda line: None,
    *,
    max_id_cells: int = MAX_ID_CELLS,
) -> tuple[SplitReport, ...]:
    """Report on each source, and on how far each is from the reference.

    Args:
        card: what the columns mean.
        sources: by name; each is read once.
        reference: the name of the one that others are compared with; None compares none.
        progress: told one line per source.
        max_id_cells: memory of the counts of ids; beyond it they are estimates.

    Raises:
        DataError: a column is missing or of a type that cannot be read; no rows.
    """
    specs = column_specs(card)
    ranges = {spec.column: max(spec.num_ids, 1) for spec in specs if spec.num_ids is not None}
    cells = share_cells(ranges, max_id_cells)
    tallies: dict[str, _SplitTally] = {}
    base: _SplitTally | None = None
    # The reference first: what the others are compared with must be complete.
    for name in sorted(sources, key=lambda name: name != reference):
        progress(f"reading {name}")
        source = sources[name]
        read = source.keeping_missing() if isinstance(source, FillsMissing) else source
        tally = _SplitTally(card, read, specs, cells, base, is_reference=name == reference)
        tally.read()
        tallies[name] = tally
        base = tally if name == reference else base
    return tuple(tallies[name].report(name, sources[name].name) for name in sources)


class _SplitTally:
    """What is counted of one split."""

    def __init__(
        self,
        card: ModelCard,
        source: RowSource,
        specs: tuple[ColumnSpec, ...],
        cells: Mapping[str, IdCells],
        base: _SplitTally | None,
        *,
        is_reference: bool,
    ) -> None:
        self._card = card
        self._source = source
        present = source.column_names()
        key, time = card.data.request_key, card.data.time_column
        self._key = key if key in present else None
        self._labels = [label for label in card.labels if label in present]
        wanted = [*card.data_columns, *self._labels]
        self._columns = choose_columns(
            source.name, [*wanted, *(name for name in (self._key, time) if name)], present
        )
        self._tallies: list[ColumnTally] = [
            ColumnTally(
                spec,
                cells[spec.column] if spec.num_ids is not None else None,
                base._tallies[place] if base else None,
                is_reference=is_reference,
            )
            for place, spec in enumerate(specs)
        ]
        self._timeline = Timeline(self._labels, by_day=time is not None)
        self._requests = RequestTally(self._key) if self._key else None
        self._num_rows = 0

    def read(self) -> None:
        """Go over the rows."""
        for batch, numbers in numbered_batches(self._source, self._columns, BATCH_ROWS):
            if batch.num_rows:
                self._add(batch, numbers)
        if not self._num_rows:
            raise DataError(problems=[Problem(self._source.name, "holds no rows")])

    def report(self, name: str, source_name: str) -> SplitReport:
        """Say what was counted."""
        return SplitReport(
            name=name,
            source=source_name,
            num_rows=self._num_rows,
            columns=tuple(tally.report() for tally in self._tallies),
            labels=self._timeline.totals(),
            label_blocks=self._timeline.blocks(),
            requests=self._requests.report() if self._requests else None,
        )

    def _add(self, batch: pa.RecordBatch, numbers: _Ints) -> None:
        problems: list[Problem] = []
        self._num_rows += batch.num_rows
        by_row = (mix(numbers.astype(np.uint64)) & np.uint64(1)).astype(np.int64)
        by_request = by_row
        if self._requests is not None and self._key is not None:
            array = _column(batch, self._key)
            hashes = stable_hash(array)
            missing = array.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
            self._requests.add(hashes, missing)
            by_request = (mix(hashes) & np.uint64(1)).astype(np.int64)
        for tally in self._tallies:
            column = tally.spec.column
            # The rows of one request share ids, so that a half of them would know the other's.
            # Of the key itself a half of the requests would know none.
            halves = by_row if column == self._key else by_request
            try:
                tally.add(_column(batch, column), halves)
            except ColumnTypeError as error:
                problems.append(self._unreadable(column, f"as {tally.spec.role}", error))
        self._add_labels(batch, problems)
        if problems:
            raise DataError(problems=problems)

    def _add_labels(self, batch: pa.RecordBatch, problems: list[Problem]) -> None:
        time = self._card.data.time_column
        days: _Ints | None = None
        labels = []
        try:
            if time is not None:
                days = days_of(_column(batch, time), self._card.data.time_unit)
        except ColumnTypeError as error:
            problems.append(self._unreadable(time or "", "as times", error))
        for label in self._labels:
            try:
                numbers = read_reals(_column(batch, label))
            except ColumnTypeError as error:
                problems.append(self._unreadable(label, "as a label", error))
                continue
            bad = numbers.missing | numbers.invalid
            labels.append(np.where(bad, np.nan, numbers.values > 0))
        if not problems:
            self._timeline.add(labels, days)

    def _unreadable(self, column: str, what: str, error: ColumnTypeError) -> Problem:
        return Problem(
            f"{self._source.name}: column {column!r}", f"cannot be read {what}", str(error)
        )


def _column(batch: pa.RecordBatch, name: str) -> Any:
    return batch.column(batch.schema.get_field_index(name))
