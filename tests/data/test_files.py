from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankopt.data.source import (
    CsvOptions,
    CsvSource,
    ParquetSource,
    RowSource,
    format_by_name,
    open_source,
)
from rankopt.errors import DataError, UsageError


def table(num_rows: int, start: int = 0) -> pa.Table:
    rows = range(start, start + num_rows)
    return pa.table({"a": list(rows), "b": [f"text {row}" for row in rows]})


def write_csv(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def column(source: RowSource, name: str, batch_rows: int = 1000) -> list[object]:
    return [v for batch in source.batches([name], batch_rows) for v in batch.column(0).to_pylist()]


class TestParquet:
    def test_reads_again_the_same_rows_in_order(self, tmp_path: Path) -> None:
        pq.write_table(table(1000), tmp_path / "x.parquet", row_group_size=300)
        source = ParquetSource(tmp_path / "x.parquet")
        assert isinstance(source, RowSource)
        assert (source.num_rows, source.column_names()) == (1000, ("a", "b"))
        assert column(source, "a", 128) == list(range(1000))
        assert column(source, "a", 7) == list(range(1000))

    def test_keeps_to_the_batch_size_and_the_order_of_columns(self, tmp_path: Path) -> None:
        pq.write_table(table(1000), tmp_path / "x.parquet", row_group_size=300)
        batches = list(ParquetSource(tmp_path / "x.parquet").batches(["b", "a", "b"], 128))
        assert max(batch.num_rows for batch in batches) <= 128
        assert batches[0].schema.names == ["b", "a"]

    def test_reads_a_folder_in_name_order(self, tmp_path: Path) -> None:
        pq.write_table(table(10, 10), tmp_path / "part-1.parquet")
        pq.write_table(table(10), tmp_path / "part-0.parquet")
        (tmp_path / "_SUCCESS").touch()
        source = open_source(tmp_path)
        assert source.num_rows == 20
        assert column(source, "a") == list(range(20))

    def test_holds_a_small_part_of_a_row_group(self, tmp_path: Path) -> None:
        big = pa.table({"a": list(range(1_000_000)), "b": [0.5] * 1_000_000})
        pq.write_table(big, tmp_path / "x.parquet", row_group_size=1_000_000, use_dictionary=False)
        size_bytes = big.nbytes
        del big
        before = pa.total_allocated_bytes()
        most = 0
        for _ in ParquetSource(tmp_path / "x.parquet").batches(None, 10_000):
            most = max(most, pa.total_allocated_bytes() - before)
        assert 0 < most < size_bytes / 3

    def test_refuses_a_truncated_file_when_opened(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        pq.write_table(table(1000), path)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(DataError, match=r"x\.parquet: is not readable as parquet"):
            ParquetSource(path)

    def test_refuses_a_damaged_page_when_met(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        pq.write_table(table(50_000), path, compression="snappy", row_group_size=10_000)
        content = bytearray(path.read_bytes())
        content[len(content) // 2 : len(content) // 2 + 2000] = b"\xff" * 2000
        path.write_bytes(content)
        with pytest.raises(DataError, match="is not readable as parquet"):
            list(ParquetSource(path).batches())

    def test_refuses_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "x.parquet").touch()
        with pytest.raises(DataError, match="is empty"):
            open_source(tmp_path / "x.parquet")

    def test_names_the_near_files_of_one_that_is_missing(self, tmp_path: Path) -> None:
        pq.write_table(table(1), tmp_path / "train.parquet")
        with pytest.raises(DataError, match=r"no such file.*Did you mean 'train\.parquet'"):
            open_source(tmp_path / "trian.parquet")

    def test_names_the_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"folder .*nowhere does not exist"):
            open_source(tmp_path / "nowhere" / "x.parquet")

    def test_refuses_files_of_other_columns(self, tmp_path: Path) -> None:
        pq.write_table(table(1), tmp_path / "a.parquet")
        pq.write_table(pa.table({"a": [1], "c": [1]}), tmp_path / "b.parquet")
        with pytest.raises(DataError, match=r"must have the columns of a\.parquet.*'b', 'c'"):
            ParquetSource(tmp_path)

    def test_names_all_missing_columns_at_the_call(self, tmp_path: Path) -> None:
        pq.write_table(table(1).rename_columns(["item_id", "user_id"]), tmp_path / "x.parquet")
        source = ParquetSource(tmp_path / "x.parquet")
        with pytest.raises(DataError) as caught:
            source.batches(["item_ids", "usr_id"])
        assert len(caught.value.problems) == 2
        assert "Did you mean 'item_id'" in str(caught.value)


class TestCsv:
    def test_reads_fields_as_text_and_lists_as_lists(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "id,history,note", '1,3|4|5,"a, b"', "2,,", "3,7,c")
        source = CsvSource(path, CsvOptions(list_columns=("history",)))
        (batch,) = source.batches()
        assert batch.to_pydict() == {
            "id": ["1", "2", "3"],
            "history": [["3", "4", "5"], None, ["7"]],
            "note": ["a, b", None, "c"],
        }

    def test_yields_before_it_has_read_the_file(self, tmp_path: Path) -> None:
        lines = [f"{row},{row}" for row in range(20_000)]
        path = write_csv(tmp_path / "x.csv", "a,b", *lines, "one field only")
        batches = CsvSource(path, CsvOptions(block_bytes=4096)).batches(["a"], 50)
        assert next(batches).column(0).to_pylist() == [str(row) for row in range(50)]
        with pytest.raises(DataError, match="Expected 2 columns, got 1"):
            list(batches)

    def test_a_later_fraction_is_no_surprise(self, tmp_path: Path) -> None:
        lines = [str(row) for row in range(5000)]
        path = write_csv(tmp_path / "x.csv", "a", *lines, "0.5")
        source = CsvSource(path, CsvOptions(block_bytes=1024))
        assert column(source, "a") == [*lines, "0.5"]

    def test_names_the_line_of_a_ragged_row(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "a,b", "1,2", "1,2,3")
        with pytest.raises(DataError, match=r"x\.csv: .*Row #3: Expected 2 columns, got 3"):
            list(CsvSource(path).batches())

    def test_reads_compressed_and_tab_separated(self, tmp_path: Path) -> None:
        with gzip.open(tmp_path / "x.tsv.gz", "wt", encoding="utf-8") as file:
            file.write("a\tb\n1\tx,y\n")
        assert column(open_source(tmp_path / "x.tsv.gz"), "b") == ["x,y"]

    def test_takes_the_delimiter_given(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "a;b", "1;2")
        assert column(open_source(path, options={"delimiter": ";"}), "b") == ["2"]

    def test_reads_a_folder_of_one_header(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "1.csv", "a", "1")
        write_csv(tmp_path / "2.csv", "a", "2")
        assert column(open_source(tmp_path), "a") == ["1", "2"]
        write_csv(tmp_path / "3.csv", "b", "2")
        with pytest.raises(DataError, match=r"must have the header of 1\.csv"):
            open_source(tmp_path)

    def test_a_header_alone_holds_no_rows(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "a,b")
        assert CsvSource(path).column_names() == ("a", "b")
        assert column(CsvSource(path), "a") == []

    def test_refuses_a_name_that_stands_twice(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "a,b,a", "1,2,3")
        with pytest.raises(DataError, match=r"stand twice; got \['a'\]"):
            CsvSource(path)

    def test_refuses_what_is_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "x.csv"
        path.write_bytes(b"a,b\n1,\xff\xfe\n")
        with pytest.raises(DataError, match="is not readable as csv"):
            list(CsvSource(path).batches())

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        lists=st.lists(st.lists(st.integers(0, 2**62), max_size=6), min_size=1, max_size=30),
        delimiter=st.sampled_from(["|", " ", ";", "::"]),
        batch_rows=st.integers(1, 40),
    )
    def test_lists_survive_the_round_trip(
        self, tmp_path: Path, lists: list[list[int]], delimiter: str, batch_rows: int
    ) -> None:
        fields = [delimiter.join(str(value) for value in values) for values in lists]
        lines = [f'{row},"{text}"' for row, text in enumerate(fields)]
        path = write_csv(tmp_path / "x.csv", "row,ids", *lines)
        options = CsvOptions(list_delimiter=delimiter, list_columns=("ids",))
        read = column(CsvSource(path, options), "ids", batch_rows)
        assert [[int(value) for value in values or []] for values in read] == lists


class TestOpenSource:
    def test_says_which_formats_there_are(self, tmp_path: Path) -> None:
        (tmp_path / "day_0").write_text("1\t2\n")
        with pytest.raises(DataError, match="format cannot be told from the name"):
            open_source(tmp_path / "day_0")
        with pytest.raises(UsageError, match="must be one of parquet, csv, criteo; got 'orc'"):
            open_source(tmp_path / "day_0", format="orc")

    def test_lists_everything_wrong_with_options(self, tmp_path: Path) -> None:
        path = write_csv(tmp_path / "x.csv", "a", "1")
        with pytest.raises(UsageError) as caught:
            open_source(path, options={"delimitr": ";", "block_bytes": 1})
        assert len(caught.value.problems) == 2
        assert "Did you mean 'delimiter'" in str(caught.value)

    def test_parquet_takes_no_options(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="parquet takes no options"):
            open_source(tmp_path / "x.parquet", options={"delimiter": ";"})

    def test_refuses_what_holds_no_rows(self) -> None:
        with pytest.raises(DataError, match=r"must be a path, a pandas DataFrame.*got 'list'"):
            open_source([1, 2])

    def test_hands_a_source_through(self, tmp_path: Path) -> None:
        source = CsvSource(write_csv(tmp_path / "x.csv", "a", "1"))
        assert open_source(source) is source

    @pytest.mark.parametrize(
        ("name", "expected"),
        [("x.parquet", "parquet"), ("X.CSV", "csv"), ("x.tsv.gz", "csv"), ("day_0", None)],
    )
    def test_tells_the_format_by_name(self, name: str, expected: str | None) -> None:
        assert format_by_name(name) == expected

    def test_a_folder_without_data_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="holds no data file"):
            open_source(tmp_path)
