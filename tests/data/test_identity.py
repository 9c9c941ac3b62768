"""Hashes of rows: of bytes where there are files, else of values, whatever carries them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rankopt.data import identity
from rankopt.data.identity import format_of, hash_rows, hash_values, hashed_as, num_rows
from rankopt.data.source import open_source
from rankopt.data.splits import HashSplitSource

COLUMNS = ["id", "price", "tags", "name"]


def frame() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "id": np.arange(20),
            "price": [None if i % 7 == 3 else i / 3 for i in range(20)],
            "tags": [list(range(i % 4)) for i in range(20)],
            "name": [None if i == 5 else "x" * (i % 3) for i in range(20)],
        }
    )


def test_values_count_and_not_what_carries_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.parquet"
    table = pa.Table.from_pandas(frame())
    at = table.schema.get_field_index("name")
    pq.write_table(table.set_column(at, "name", table.column("name").dictionary_encode()), file)
    whole = hash_values(open_source(frame()), COLUMNS)
    assert hash_values(open_source(file), COLUMNS[::-1]) == whole
    monkeypatch.setattr(identity, "BATCH_ROWS", 3)
    assert hash_values(open_source(frame()), COLUMNS) == whole


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("id", 3, 4), ("price", 3, 0.0), ("tags", 1, []), ("tags", 1, [7]), ("name", 5, "")],
)
def test_one_other_value_gives_another_hash(column: str, row: int, value: object) -> None:
    changed = frame()
    changed.at[row, column] = value
    first, second = (hash_values(open_source(f), COLUMNS) for f in (frame(), changed))
    assert first != second
    rest = [name for name in COLUMNS if name != column]
    assert hash_values(open_source(frame()), rest) == hash_values(open_source(changed), rest)


def test_order_of_rows_counts() -> None:
    backwards = frame().iloc[::-1]
    assert hash_values(open_source(frame()), COLUMNS) != hash_values(
        open_source(backwards), COLUMNS
    )


def test_files_are_known_by_their_bytes_and_parts_by_the_whole(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("id,label\n1,0\n2,1\n3,1\n")
    source = open_source(file)
    part = HashSplitSource(source, None, 0.0, 0.5, "part")
    assert (hashed_as(part), format_of(part)) == ("bytes", "csv")
    before = hash_rows(part, ["id"], "bytes")
    assert before == hash_rows(source, ["label"], "bytes")
    assert num_rows(source, ["id"]) == 3
    assert num_rows(part, ["id"]) < 3
    file.write_text("id,label\n1,0\n2,1\n3,0\n")
    assert hash_rows(open_source(file), ["id"], "bytes") != before
    assert hashed_as(open_source(frame())) == "values"
