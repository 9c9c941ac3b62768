from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankopt.data.criteo import CATEGORIES, INTEGERS, CriteoOptions, CriteoSource
from rankopt.data.source import open_source
from rankopt.errors import DataError, UsageError

PLAIN = ["1", *(str(value) for value in range(13)), *(f"{value:08x}" for value in range(26))]


def write(path: Path, *rows: list[str] | str) -> Path:
    lines = [row if isinstance(row, str) else "\t".join(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path, batch_rows: int = 1000, **options: Any) -> dict[str, list[Any]]:
    source = CriteoSource(path, CriteoOptions(**options))
    merged: dict[str, list[Any]] = {name: [] for name in source.column_names()}
    for batch in source.batches(None, batch_rows):
        for name, values in batch.to_pydict().items():
            merged[name].extend(values)
    return merged


def changed(position: int, field: str) -> list[str]:
    return [*PLAIN[:position], field, *PLAIN[position + 1 :]]


def test_reads_the_layout(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "day_0", PLAIN, PLAIN), num_ids=20)
    assert list(rows) == ["label", *INTEGERS, *CATEGORIES]
    assert rows["label"] == [1, 1]
    assert rows["I4"] == pytest.approx([math.log1p(3)] * 2)
    assert rows["C8"] == [7, 7]
    assert rows["C26"] == [25 % 20] * 2


def test_empty_fields_are_missing(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "day_0", ["0"] + [""] * 39))
    assert rows["label"] == [0]
    assert [rows[name] for name in INTEGERS] == [[0.0]] * 13
    assert [rows[name] for name in CATEGORIES] == [[0]] * 26


def test_only_the_wanted_columns_in_the_wanted_order(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "day_0", PLAIN), format="criteo")
    (batch,) = source.batches(["C2", "label", "I1"])
    assert batch.schema.names == ["C2", "label", "I1"]


def test_a_test_file_has_no_label(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "test.txt", PLAIN[1:]), labelled=False)
    assert next(iter(rows)) == "I1"
    assert rows["C3"] == [2]


def test_a_range_for_each_column(tmp_path: Path) -> None:
    ranges = tuple(range(1, 27))
    rows = read(write(tmp_path / "day_0", PLAIN), num_ids=ranges)
    assert [rows[name][0] for name in CATEGORIES] == [k % (k + 1) for k in range(26)]


def test_short_lines_name_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0", *[PLAIN] * 5, PLAIN[:30])
    with pytest.raises(DataError, match=r"day_0: line 6: must have 40 fields.*got 30"):
        list(CriteoSource(path).batches(batch_rows=2))


def test_short_lines_may_be_padded(tmp_path: Path) -> None:
    rows = read(write(tmp_path / "day_0", PLAIN[:15], PLAIN), short_lines="pad")
    assert rows["C1"] == [0, 0]
    assert rows["C9"] == [0, 8]
    assert rows["I13"] == pytest.approx([math.log1p(12)] * 2)


def test_a_blank_line_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0", PLAIN, "", PLAIN)
    with pytest.raises(DataError, match="line 2: must have 40 fields"):
        read(path)
    assert read(path, short_lines="pad")["label"] == [1, None, 1]


@pytest.mark.parametrize("short_lines", ["error", "pad"])
def test_long_lines_are_refused(tmp_path: Path, short_lines: str) -> None:
    path = write(tmp_path / "day_0", PLAIN, [*PLAIN, "extra"])
    with pytest.raises(DataError, match=r"line 2: must have 40 fields.*got 41"):
        read(path, short_lines=short_lines)


@pytest.mark.parametrize(
    ("position", "field", "message"),
    [
        (0, "yes", r"line 3, column 'label': must be a whole number.*got 'yes'"),
        (2, "1.5", r"line 3, column 'I2': must be a whole number.*got '1.5'"),
        (15, "xyz", r"line 3, column 'C2': must be at most 16 hexadecimal digits.*got 'xyz'"),
        (15, "0" * 17, r"line 3, column 'C2': must be at most 16 hexadecimal digits"),
        (15, "é", r"line 3, column 'C2': must be at most 16 hexadecimal digits"),
    ],
)
def test_a_bad_field_names_its_line(
    tmp_path: Path, position: int, field: str, message: str
) -> None:
    path = write(tmp_path / "day_0", PLAIN, PLAIN, changed(position, field))
    with pytest.raises(DataError, match=message):
        read(path, batch_rows=2)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        CriteoSource(tmp_path / "day_0")
    (tmp_path / "day_0").touch()
    with pytest.raises(DataError, match="is empty"):
        CriteoSource(tmp_path / "day_0")


def test_binary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "day_0").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(DataError):
        read(tmp_path / "day_0")


@pytest.mark.parametrize("options", [{"num_ids": 0}, {"num_ids": (1, 2)}, {"num_id": 5}])
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="num_id"):
        open_source(tmp_path / "day_0", "criteo", options)


def test_yields_before_it_has_read_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "day_0", *[PLAIN] * 200, "broken")
    batches = CriteoSource(path, CriteoOptions(block_bytes=2048)).batches(["label"])
    assert next(batches).num_rows < 100
    with pytest.raises(DataError, match="line 201"):
        list(batches)


integers = st.one_of(st.none(), st.integers(-(10**17), 10**17))
categories = st.one_of(st.none(), st.integers(0, 2**64 - 1))
line = st.tuples(
    st.integers(0, 1),
    st.lists(integers, min_size=13, max_size=13),
    st.lists(categories, min_size=26, max_size=26),
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(line, min_size=1, max_size=6),
    num_ids=st.integers(1, 2**40),
    batch_rows=st.integers(1, 7),
    upper=st.booleans(),
    log_transform=st.booleans(),
)
def test_agrees_with_python_a_field_at_a_time(
    tmp_path: Path, rows: Any, num_ids: int, batch_rows: int, upper: bool, log_transform: bool
) -> None:
    form = "X" if upper else "x"
    text = [
        [str(label)]
        + ["" if value is None else str(value) for value in dense]
        + ["" if value is None else format(value, form) for value in ids]
        for label, dense, ids in rows
    ]
    found = read(
        write(tmp_path / "day_0", *text), batch_rows, num_ids=num_ids, log_transform=log_transform
    )
    assert found["label"] == [label for label, _, _ in rows]
    for k, name in enumerate(INTEGERS):
        raw = [float(dense[k] or 0) for _, dense, _ in rows]
        if log_transform:
            raw = [math.copysign(math.log1p(abs(value)), value) for value in raw]
        assert found[name] == pytest.approx(raw, rel=1e-6)
    for k, name in enumerate(CATEGORIES):
        assert found[name] == [(ids[k] or 0) % num_ids for _, _, ids in rows]
