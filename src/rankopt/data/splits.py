"""Find a card's train, validation and test rows.

The test split is judged; the validation split decides (calibration, which passes are dropped, when
training stops). Keeping the two apart is what makes the verdict honest, so where the data comes
without a validation split one is taken out of the test rows, by a hash that never changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rankopt.data.criteo import CATEGORIES, CriteoOptions
from rankopt.data.files import CsvOptions
from rankopt.data.hashing import as_fraction, mix, stable_hash
from rankopt.data.rowsource import (
    ColumnSource,
    FillsMissing,
    RowSource,
    choose_columns,
    numbered_batches,
)
from rankopt.data.source import format_by_name, open_source, read_options
from rankopt.errors import CardError, DataError, Problem
from rankopt.models.card import IdsInput, KjtInput, ModelCard, PackedInput, RaggedIdsInput

VALIDATION_SHARE = 0.3
_SPLITS = ("train", "validation", "test")
_SUFFIXES = (".parquet", ".pq", ".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt", "")


@dataclass(frozen=True)
class Splits:
    """A card's rows by their use.

    Attributes:
        train: None where the data holds none.
        validation: what decisions may look at.
        test: what the verdict is on.
        description: where they came from and how they were parted, for the report; JSON.
    """

    train: RowSource | None
    validation: RowSource | None
    test: RowSource
    description: dict[str, Any]
    given: str | None = None
    """The path that was given in place of the card's own rows, absolute."""

    @property
    def by_name(self) -> dict[str, RowSource]:
        """The sources that there are, by the name of their split."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: source for name, source in named.items() if source is not None}


class HashSplitSource(ColumnSource):
    """The rows of a source whose hash falls in [low, high).

    The hash is of the request key, so that a request stays whole, or of the row's number where no
    key is named. It depends on nothing else: not on the batch size, the file format or the run.
    """

    def __init__(
        self, source: RowSource, key: str | None, low: float, high: float, label: str
    ) -> None:
        self._source, self._key, self._low, self._high = source, key, low, high
        self._label = label
        super().__init__(f"{source.name} ({label})", source.column_names())
        if key is not None:
            choose_columns(source.name, [key], source.column_names())

    @property
    def source(self) -> RowSource:
        """All the rows that these are a part of."""
        return self._source

    def keeping_missing(self) -> HashSplitSource:
        """Return the same rows with what the source fills in left missing."""
        source = self._source
        if isinstance(source, FillsMissing):
            source = source.keeping_missing()
        return HashSplitSource(source, self._key, self._low, self._high, self._label)

    def _read(self, columns: list[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
        return (batch for batch, _ in self.numbered_batches(columns, batch_rows))

    def numbered_batches(
        self, columns: Sequence[str], batch_rows: int
    ) -> Iterator[tuple[pa.RecordBatch, npt.NDArray[np.int64]]]:
        """Read as `batches` does, with each row's number in the whole source."""
        wanted = list(columns) if self._key is None else [*columns, self._key]
        for batch, numbers in numbered_batches(self._source, wanted, batch_rows):
            if self._key is None:
                hashes = mix(numbers.astype(np.uint64))
            else:
                hashes = stable_hash(batch.column(batch.schema.get_field_index(self._key)))
            places = as_fraction(hashes)
            kept = (places >= self._low) & (places < self._high)
            if kept.any():
                yield batch.filter(pa.array(kept)).select(list(columns)), numbers[kept]


def open_splits(card: ModelCard, data: Any = None) -> Splits:
    """Open the splits a card names, or those of `data` in their place.

    Args:
        card: whose `data` says where the rows are.
        data: a folder that holds train, validation and test files; or one file, DataFrame or Ray
            Dataset, of which 30 % by a hash of the request key becomes the validation split and
            the rest the test split; None for the card's own.

    Raises:
        DataError: a file is missing or damaged.
        CardError: the card's data section names no test rows, or has options it should not.
        EnvironmentProblem: data made at run time could not be fetched or stored.
    """
    if data is not None:
        given = str(Path(data).absolute()) if isinstance(data, (str, Path)) else None
        return replace(_override(card, data), given=given)
    if card.data.source == "files":
        return _card_files(card)
    folder = _made_folder(card)
    sources = {name: open_source(folder / f"{name}.parquet") for name in _SPLITS}
    how = "made at run time; the splits are those of the generator"
    if card.data.source == "movielens":
        how = "MovieLens-100K, split by time over all users"
    return _describe(card, sources, card.data.source, how)


def _made_folder(card: ModelCard) -> Path:
    where = f"{card.where}: data.options"
    if card.data.source == "movielens":
        from rankopt.data.movielens import MovieLensOptions, movielens_folder

        options = read_options(MovieLensOptions, card.data.options, where, CardError)
        return movielens_folder(options)
    from rankopt.data.synthetic import SyntheticOptions, synthetic_folder

    return synthetic_folder(read_options(SyntheticOptions, card.data.options, where, CardError))


def _card_files(card: ModelCard) -> Splits:
    named = {name: getattr(card.data, name) for name in _SPLITS}
    if named["test"] is None:
        where = f"{card.where}: data.test"
        hint = "Name a file in data.test, or give --data PATH."
        raise CardError(problems=[Problem(where, "names no rows to judge", hint=hint)])
    paths = {name: card.folder / path for name, path in named.items() if path is not None}
    return _of_paths(card, paths, "the files the card names")


def _override(card: ModelCard, data: Any) -> Splits:
    if not isinstance(data, (str, Path)) or not Path(data).is_dir():
        return _parted(card, {}, open_for_card(card, data), "one source")
    folder = Path(data)
    paths = {name: found for name in _SPLITS if (found := _split_path(folder, name)) is not None}
    if "test" in paths:
        return _of_paths(card, paths, f"files of {folder}")
    if paths:
        what = f"holds {' and '.join(sorted(paths))} but no test rows"
        hint = "Add test.parquet or test.csv, or give one file, which is then parted."
        raise DataError(problems=[Problem(str(folder), what, hint=hint)])
    return _parted(card, {}, open_for_card(card, folder), "one folder of files")


def _split_path(folder: Path, name: str) -> Path | None:
    for suffix in _SUFFIXES:
        path = folder / f"{name}{suffix}"
        if path.exists():
            return path
    return None


def _of_paths(card: ModelCard, paths: Mapping[str, Path], origin: str) -> Splits:
    sources: dict[str, RowSource] = {}
    problems: list[Problem] = []
    for name, path in paths.items():
        try:
            sources[name] = open_for_card(card, path)
        except DataError as error:  # the others may be wrong as well: say it all at once
            problems.extend(error.problems)
    if problems:
        raise DataError(problems=problems)
    if "validation" in sources:
        return _describe(card, sources, origin, "as the files part them")
    test = sources.pop("test")
    return _parted(card, sources, test, origin)


def _parted(
    card: ModelCard, sources: Mapping[str, RowSource], source: RowSource, origin: str
) -> Splits:
    key = card.data.request_key
    parts = {
        "validation": HashSplitSource(source, key, 0.0, VALIDATION_SHARE, "validation part"),
        "test": HashSplitSource(source, key, VALIDATION_SHARE, 1.0, "test part"),
    }
    by = f"request key {key!r}" if key else "row number (the card names no request key)"
    how = f"{VALIDATION_SHARE:.0%} validation, the rest test, by a stable hash of the {by}"
    return _describe(card, {**sources, **parts}, origin, how)


def _describe(card: ModelCard, sources: Mapping[str, RowSource], origin: str, how: str) -> Splits:
    description: dict[str, Any] = {
        "origin": origin,
        "split": how,
        "request_key": card.data.request_key,
    }
    for name in _SPLITS:
        source = sources.get(name)
        described = None if source is None else {"name": source.name, "num_rows": source.num_rows}
        description[name] = described
    return Splits(sources.get("train"), sources.get("validation"), sources["test"], description)


def open_for_card(card: ModelCard, data: Any) -> RowSource:
    """Open one source as the card says it is written, list columns and id ranges included."""
    if not isinstance(data, (str, Path)):
        return open_source(data)
    kind = _format(card, Path(data))
    # Options belong to the format of the card's own files; data given instead may have another.
    options = dict(card.data.options) if kind == _format_of_card(card) else {}
    where = f"{card.where}: data.options"
    if kind == "criteo":
        options.setdefault("num_ids", _criteo_ranges(card))
        read_options(CriteoOptions, options, where, CardError)
    elif kind == "csv":
        named = read_options(CsvOptions, options, where, CardError).list_columns
        options["list_columns"] = sorted({*named, *_list_columns(card)})
    return open_source(data, kind, options, where=where)


def _format(card: ModelCard, path: Path) -> str | None:
    """Go by the file's name; where that does not tell, and for Criteo's text, by the card."""
    named = card.data.format if card.data.source == "files" else None
    by_name = format_by_name(path)
    if named == "criteo" and by_name != "parquet":
        return named
    return by_name or named


def _format_of_card(card: ModelCard) -> str | None:
    if card.data.source != "files":
        return None
    if card.data.format or card.data.test is None:
        return card.data.format
    return format_by_name(card.folder / card.data.test)


def _list_columns(card: ModelCard) -> set[str]:
    columns: set[str] = set()
    for item in card.inputs:
        if isinstance(item, (RaggedIdsInput, KjtInput)):
            columns.update(item.data_columns)
        elif isinstance(item, PackedInput):
            columns.update(str(column.name) for column in item.columns if column.length)
    return columns


def _criteo_ranges(card: ModelCard) -> tuple[int, ...]:
    """Take each category's range from the input that reads it; 1 for one that none reads."""
    ranges = dict.fromkeys(CATEGORIES, 1)
    for item in card.inputs:
        if isinstance(item, IdsInput):
            ranges.update(zip(item.columns, item.ranges, strict=True))
        elif isinstance(item, RaggedIdsInput):
            ranges[item.column] = item.num_ids
        elif isinstance(item, KjtInput):
            ranges.update((feature.column, feature.num_ids) for feature in item.features)
        elif isinstance(item, PackedInput):
            ranges.update((str(column.name), column.num_ids or 1) for column in item.columns)
    return tuple(ranges[column] for column in CATEGORIES)
