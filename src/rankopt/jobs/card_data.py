"""Match a drafted card with the columns and the first rows of its data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankopt.data.source import open_source
from rankopt.errors import DataError, Problem, nearest
from rankopt.jobs.card_draft import Entry

if TYPE_CHECKING:
    import pandas as pd

LOOK_ROWS = 20_000
_SPLITS = ("train", "validation", "test")
_SUFFIXES = (".parquet", ".csv")
_LABELS = (
    *("label", "click", "clicked", "is_click", "clk", "ctr", "like", "liked", "is_like", "target"),
    *(
        "conversion",
        "converted",
        "purchase",
        "buy",
        "cvr",
        "ctcvr",
        "follow",
        "share",
        "loved",
        "y",
    ),
)
_REQUEST_KEYS = (
    *("request_id", "impression_id", "query_id", "qid", "session_id", "group_id"),
    *("user_id", "userid", "uid", "user"),
)
_FEWEST_GROUPS = 20


@dataclass(frozen=True)
class DataLook:
    """What the data shows.

    Attributes:
        files: split name to file.
        columns: names of all columns.
        head: the first rows.
    """

    files: dict[str, Path]
    columns: tuple[str, ...]
    head: pd.DataFrame


def look_at_data(path: Path) -> DataLook:
    """Read the columns and the first rows of a file, or of a folder of splits.

    Raises:
        DataError: nothing is there, or it is damaged.
    """
    files = {
        name: path / f"{name}{suffix}"
        for name in _SPLITS
        for suffix in reversed(_SUFFIXES)
        if path.is_dir() and (path / f"{name}{suffix}").exists()
    }
    # One source stands as the test split: it is divided into a part to tune on and one to judge.
    files = files or {"test": path}
    source = open_source(files.get("train") or next(iter(files.values())))
    columns = source.column_names()
    batch = next(iter(source.batches(columns, LOOK_ROWS)), None)
    if batch is None or not batch.num_rows:
        hint = "Give data with at least one row."
        raise DataError(problems=[Problem(source.name, "holds no rows", hint=hint)])
    return DataLook(files, columns, batch.to_pandas())


def data_entry(look: DataLook, folder: Path) -> Entry:
    """Write the card's `data`, its paths relative to the card's folder."""
    entry = Entry(source="files")
    for name, file in look.files.items():
        entry[name] = os.path.relpath(file.resolve(), folder)
    key = _first_of(_REQUEST_KEYS, look.columns)
    if key is None:
        entry.doubt("request_key, the column whose rows belong to one request or user")
    else:
        entry["request_key"] = key
        entry.doubt("whether request_key is right; it goes by the name")
    return entry


def match_columns(fields: Entry, look: DataLook) -> None:
    """Say which columns of the inputs the data lacks; take those that differ in spelling alone."""
    spelled = {_plain(column): column for column in look.columns}
    for entry, name, rename in list(_references(fields)):
        if name in look.columns:
            continue
        same = spelled.get(_plain(name))
        if same is not None:
            rename(same)
        else:
            entry.doubt(f"its column: the data has no {name!r}. {nearest(name, look.columns)}")


def _references(fields: Entry) -> Iterator[tuple[Entry, str, Callable[[str], None]]]:
    """Yield each column that an input reads, where a doubt about it belongs, and how to rename."""
    for item in fields["inputs"]:
        if "kind" not in item:
            continue
        if item["kind"] == "packed":
            for column in item["columns"]:
                if "name" in column:
                    yield column, column["name"], _packed_setter(item, column)
        elif item["kind"] == "kjt":
            for feature in item["features"]:
                yield from _keys(feature, ("column", "weights_column"))
        elif item["kind"] == "ragged_ids":
            yield from _keys(item, ("column", "weights_column"))
        elif "columns" in item:
            names = item["columns"]
            for place, name in enumerate(names):
                yield item, name, _setter(names, place)
        else:
            yield item, item["name"], _column_setter(item)


def _keys(
    entry: Entry, keys: tuple[str, ...]
) -> Iterator[tuple[Entry, str, Callable[[str], None]]]:
    yield from ((entry, entry[key], _setter(entry, key)) for key in keys if key in entry)


def _setter(owner: Any, key: Any) -> Callable[[str], None]:
    def rename(name: str) -> None:
        owner[key] = name

    return rename


def _packed_setter(item: Entry, column: Entry) -> Callable[[str], None]:
    def rename(name: str) -> None:
        for other in item["columns"]:
            if other.get("length_of") == column["name"]:
                other["length_of"] = name
        column["name"] = name

    return rename


def _column_setter(item: Entry) -> Callable[[str], None]:
    def rename(name: str) -> None:
        item["columns"] = [name]

    return rename


def longest_list(look: DataLook, column: str) -> int | None:
    """Return the longest list of a column among the first rows; None when it holds no lists."""
    if column not in look.columns:
        return None
    lists = look.head[column].dropna()
    if not len(lists) or not hasattr(lists.iloc[0], "__len__") or isinstance(lists.iloc[0], str):
        return None
    return max(1, int(lists.map(len).max()))


def match_labels(fields: Entry, look: DataLook) -> None:
    """Give each output the column of its name, else a free column that looks like a label."""
    used = {name for _, name, _ in _references(fields)}
    free = [name for name in look.columns if name not in used and _is_binary(look.head[name])]
    ranked = sorted(free, key=lambda name: _LABELS.index(name) if name in _LABELS else len(_LABELS))
    for output in fields["outputs"]:
        if output["name"] in free:
            output["label"] = output["name"]
            ranked.remove(output["name"])
    for output in fields["outputs"]:
        if "label" in output:
            continue
        if ranked and (ranked[0] in _LABELS or len(free) == len(fields["outputs"])):
            output["label"] = ranked.pop(0)
            output.doubt("whether this is its label; it goes by the name")
        else:
            output["label"] = "label"
            output.doubt(f"its label. Columns of 0 and 1: {', '.join(free) or 'none'}")


def mark_request_level(fields: Entry, look: DataLook) -> None:
    """Mark inputs whose columns are the same in all rows of a request."""
    key = fields["data"].get("request_key")
    if key is None:
        return
    groups = look.head.groupby(key, sort=False)
    if int((groups.size() > 1).sum()) < _FEWEST_GROUPS:
        fields["data"].doubt("which inputs are request_level: too few rows share a request_key")
        return
    marked = False
    for item in fields["inputs"]:
        names = [name for _, name, _ in _references(Entry(inputs=[item]))]
        if (
            names
            and all(name in look.columns for name in names)
            and all(_constant(groups, name, key) for name in names)
        ):
            item["request_level"] = True
            marked = True
    if marked:
        reason = f"whether request_level holds beyond the first {len(look.head)} rows"
        fields["data"].doubt(reason)


def _constant(groups: Any, name: str, key: str) -> bool:
    if name == key:
        return True
    try:
        return int(groups[name].nunique(dropna=False).max()) <= 1
    except TypeError:  # lists cannot be hashed; as text they can
        return bool(groups[name].agg(lambda lists: len({_as_text(x) for x in lists})).max() <= 1)


def _as_text(value: Any) -> str:
    return str(None if value is None else list(value))


_BINARY = {"0", "1", "0.0", "1.0", "True", "False"}


def _is_binary(column: pd.Series[Any]) -> bool:
    known = column.dropna()
    # A csv file gives text, and lists cannot be hashed: both are compared as text.
    if known.map(lambda value: hasattr(value, "__len__") and not isinstance(value, str)).any():
        return False
    values = set(known.astype(str).unique())
    return bool(values) and values <= _BINARY


def _first_of(wanted: tuple[str, ...], present: tuple[str, ...]) -> str | None:
    lower = {name.lower(): name for name in present}
    return next((lower[name] for name in wanted if name in lower), None)


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).lower()
