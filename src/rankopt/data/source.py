"""Open whatever holds the rows: files, a pandas DataFrame, a Ray Dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rankopt.data.criteo import CriteoOptions, CriteoSource
from rankopt.data.files import (
    CSV_SUFFIXES,
    PARQUET_SUFFIXES,
    CsvOptions,
    CsvSource,
    ParquetSource,
)
from rankopt.data.frames import FrameSource, RayDatasetSource
from rankopt.data.rowsource import BATCH_ROWS, RowSource, input_files
from rankopt.errors import DataError, Problem, UsageError
from rankopt.problems import problems_of_validation

__all__ = [
    "BATCH_ROWS",
    "CriteoOptions",
    "CriteoSource",
    "CsvOptions",
    "CsvSource",
    "FrameSource",
    "ParquetSource",
    "RayDatasetSource",
    "RowSource",
    "format_by_name",
    "open_source",
    "read_options",
]

_FORMATS = ("parquet", "csv", "criteo")
_Options = TypeVar("_Options", bound=BaseModel)


def open_source(
    data: Any,
    format: str | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    where: str = "options",
) -> RowSource:
    """Open rows for reading.

    Args:
        data: a path (file or folder), a pandas DataFrame, a Ray Dataset, or a `RowSource`.
        format: parquet, csv or criteo; None goes by the suffix.
        options: of the format, `CsvOptions` or `CriteoOptions`.
        where: what an error about the options calls them.

    Raises:
        DataError: nothing is there, it is damaged, or its format cannot be told.
        UsageError: `format` or `options` is not one of those known.
    """
    if not isinstance(data, (str, Path)):
        return _open_object(data)
    kind = format or _known_format(Path(data))
    if kind == "parquet":
        if options:
            problem = Problem(where, "parquet takes no options", sorted(options))
            raise UsageError(problems=[problem])
        return ParquetSource(data)
    if kind == "csv":
        return CsvSource(data, read_options(CsvOptions, options, where))
    if kind == "criteo":
        return CriteoSource(data, read_options(CriteoOptions, options, where))
    problem = Problem("format", f"must be one of {', '.join(_FORMATS)}", kind)
    raise UsageError(problems=[problem])


def read_options(
    model: type[_Options],
    options: Mapping[str, Any] | None,
    where: str,
    error: type[UsageError] = UsageError,
) -> _Options:
    """Validate options, listing everything wrong with them at once.

    Raises:
        UsageError: or the subclass given as `error`: an unknown key or a value not allowed.
    """
    try:
        return model.model_validate(dict(options or {}))
    except ValidationError as failure:
        problems = problems_of_validation(where, failure, model)
        raise error(problems=problems) from failure


def _open_object(data: Any) -> RowSource:
    # Known by where the class comes from, so that neither pandas nor ray is imported to ask.
    modules = {base.__module__.partition(".")[0] for base in type(data).__mro__}
    if "pandas" in modules and hasattr(data, "iloc") and hasattr(data, "columns"):
        return FrameSource(data)
    if "ray" in modules and hasattr(data, "iter_batches"):
        return RayDatasetSource(data)
    if isinstance(data, RowSource):
        return data
    what = "must be a path, a pandas DataFrame, a Ray Dataset or a RowSource"
    raise DataError(problems=[Problem("data", what, type(data).__name__)])


def format_by_name(path: str | Path) -> str | None:
    """Tell parquet or csv by the ending of a file, or of a folder's first such file."""
    sample = Path(path)
    if sample.is_dir():
        endings = PARQUET_SUFFIXES + CSV_SUFFIXES
        visible = (f for f in sorted(sample.rglob("*")) if not f.name.startswith((".", "_")))
        sample = next((f for f in visible if f.name.lower().endswith(endings)), sample)
    name = sample.name.lower()
    if name.endswith(PARQUET_SUFFIXES):
        return "parquet"
    return "csv" if name.endswith(CSV_SUFFIXES) else None


def _known_format(path: Path) -> str:
    if found := format_by_name(path):
        return found
    input_files(path, None)  # a path that is not there is the likelier mistake
    endings = ", ".join(PARQUET_SUFFIXES + CSV_SUFFIXES)
    what = f"its format cannot be told from the name; known endings: {endings}"
    hint = "Name the format: data.format in the card (parquet, csv, criteo)."
    raise DataError(problems=[Problem(str(path), what, hint=hint)])
