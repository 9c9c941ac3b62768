from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankopt.data.pieces import count_rows, pieces_of
from rankopt.data.prefetch import Waits, ahead
from rankopt.data.rows import Rows
from rankopt.data.source import CsvSource, FrameSource, ParquetSource, RowSource, open_source
from rankopt.data.stream import RowStream, StreamSettings
from rankopt.errors import DataError, UsageError
from rankopt.models.card import ModelCard

MakeCard = Callable[..., ModelCard]
NUM_IDS = 1 << 20


@pytest.fixture(scope="module")
def card(make_card: MakeCard) -> ModelCard:
    return make_card(
        {"name": "row", "kind": "ids", "columns": ["row"], "num_ids": NUM_IDS},
        {"name": "bag", "kind": "ragged_ids", "column": "bag", "num_ids": NUM_IDS, "max_length": 9},
    )


def table(num_rows: int) -> pa.Table:
    rows = np.arange(num_rows)
    bags = [[row] * (row % 3) for row in rows]
    return pa.table({"row": rows, "bag": pa.array(bags, pa.list_(pa.int64())), "label": rows % 2})


def numbers(batch: Rows) -> list[int]:
    """Return the number of each row of a batch, having checked that the row is whole."""
    rows: list[int] = batch.features["row"].tolist()
    assert batch.labels["label"].tolist() == [row % 2 for row in rows]
    assert batch.features["bag.lengths"].tolist() == [row % 3 for row in rows]
    assert batch.features["bag.values"].tolist() == [row for row in rows for _ in range(row % 3)]
    return rows


def epoch(stream: RowStream) -> list[list[int]]:
    return [numbers(batch) for batch in stream.batches()]


def write(folder: Path, num_rows: int, kind: str, part_rows: int, num_files: int = 1) -> RowSource:
    """Write rows as several files or row groups, or hold them as a source without pieces."""
    whole = table(num_rows)
    folder.mkdir(exist_ok=True)
    if kind == "frame":
        return FrameSource(whole.to_pandas())
    if kind == "plain":
        return Plain(FrameSource(whole.to_pandas()))
    step = -(-num_rows // num_files)
    for file in range(num_files):
        part = whole.slice(file * step, step)
        if not part.num_rows:
            continue
        if kind == "parquet":
            pq.write_table(part, folder / f"{file}.parquet", row_group_size=part_rows)
        else:
            frame = part.to_pandas()
            frame["bag"] = ["|".join(map(str, bag)) for bag in frame["bag"]]
            frame.to_csv(folder / f"{file}.csv", index=False)
    return open_source(folder)


class Plain:
    """A source that does not know its rows, and is read from the first one on."""

    num_rows = None

    def __init__(self, source: RowSource) -> None:
        self._source = source
        self.name = "plain"
        self.column_names = source.column_names
        self.batches = source.batches


class Watched(ParquetSource):
    """Notes how many rows were read out of it."""

    num_read = 0

    def read(self, num_rows: int) -> None:
        self.num_read += num_rows

    def pieces(self) -> Any:
        def watch(piece: Any) -> Any:
            def read(columns: Any, batch_rows: int) -> Iterator[Any]:
                for batch, found in piece.read(columns, batch_rows):
                    self.read(batch.num_rows)
                    yield batch, found

            return type(piece)(piece.where, read, piece.num_rows, piece.size_bytes)

        return tuple(map(watch, super().pieces()))


layouts = st.fixed_dictionaries(
    {
        "num_rows": st.integers(1, 60),
        "kind": st.sampled_from(["parquet", "csv", "frame", "plain"]),
        "part_rows": st.integers(1, 20),
        "num_files": st.integers(1, 3),
    }
)
shuffles = st.fixed_dictionaries(
    {
        "batch_size": st.integers(2, 13),
        "window_rows": st.integers(2, 40),
        "seed": st.integers(0, 3),
        "prefetch": st.integers(0, 2),
    }
)


@given(layouts, shuffles, st.integers(1, 4))
def test_every_row_goes_to_one_rank_in_equally_many_steps(
    tmp_path_factory, card, layout, shuffle, world_size
):
    layout["num_rows"] = max(layout["num_rows"], world_size)
    # One class would be refused where all rows are kept.
    layout["num_rows"] = max(layout["num_rows"], 2)
    source = write(tmp_path_factory.mktemp("rows"), **layout)
    shares = []
    for rank in range(world_size):
        settings = StreamSettings(rank=rank, world_size=world_size, **shuffle)
        stream = RowStream(card, source, settings)
        batches = epoch(stream)
        shares.append(batches)
        assert stream.num_steps in (None, len(batches))
        sizes = [len(batch) for batch in batches]
        assert all(size == shuffle["batch_size"] for size in sizes[:-1])
        assert sizes[-1] <= shuffle["batch_size"] + 2
        assert sizes[-1] >= 2 or len(sizes) == 1
    assert len({len(batches) for batches in shares}) == 1
    lengths = [sum(map(len, batches)) for batches in shares]
    assert max(lengths) - min(lengths) <= 1
    everything = Counter(row for batches in shares for batch in batches for row in batch)
    assert everything == Counter(range(layout["num_rows"]))


@given(layouts, shuffles, st.integers(1, 3), st.data())
def test_a_fresh_stream_goes_on_exactly_where_the_state_was_taken(
    tmp_path_factory, card, layout, shuffle, world_size, data
):
    layout["num_rows"] = max(layout["num_rows"], world_size, 2)
    source = write(tmp_path_factory.mktemp("rows"), **layout)
    rank = data.draw(st.integers(0, world_size - 1))
    settings = StreamSettings(rank=rank, world_size=world_size, **shuffle)
    whole = RowStream(card, source, settings)
    batches, states = [], [whole.state()]
    for _ in range(2):
        for batch in whole.batches():
            batches.append(numbers(batch))
            states.append(whole.state())
    point = data.draw(st.integers(0, len(batches)))
    state = json.loads(json.dumps(states[point]))
    fresh = RowStream(card, source, settings)
    fresh.restore(state)
    rest = []
    while fresh.epoch < 2:
        rest += epoch(fresh)
    assert rest == batches[point:]
    assert len(json.dumps(state)) < 300


def test_left_early_a_stream_goes_on_with_the_next_batch(tmp_path, card):
    source = write(tmp_path, 50, "parquet", 7)
    settings = StreamSettings(batch_size=4, window_rows=10)
    expected = epoch(RowStream(card, source, settings))
    stream = RowStream(card, source, settings)
    found = []
    for batch in stream.batches():
        found.append(numbers(batch))
        if len(found) == 5:
            break
    assert found + epoch(stream) == expected


def test_a_process_of_its_own_takes_the_state_up(tmp_path, card):
    source = write(tmp_path / "rows", 300, "parquet", 32, num_files=2)
    settings = StreamSettings(batch_size=16, window_rows=64, seed=5, rank=1, world_size=2)
    stream = RowStream(card, source, settings)
    made = stream.batches()
    for _ in range(4):
        next(made)
    state = stream.state()
    expected = [numbers(batch) for batch in made]
    (tmp_path / "card.json").write_text(card.model_dump_json())
    code = (
        "import json, sys\n"
        "from rankopt.data.source import open_source\n"
        "from rankopt.data.stream import RowStream, StreamSettings\n"
        "from rankopt.models.card import ModelCard\n"
        "folder, card, settings, state = sys.argv[1:]\n"
        "card = ModelCard.model_validate_json(open(card).read())\n"
        "settings = StreamSettings.model_validate_json(settings)\n"
        "stream = RowStream(card, open_source(folder), settings)\n"
        "stream.restore(json.loads(state))\n"
        "print(json.dumps([batch.features['row'].tolist() for batch in stream.batches()]))\n"
    )
    given_to_it = [
        str(tmp_path / "rows"),
        str(tmp_path / "card.json"),
        settings.model_dump_json(),
        json.dumps(state),
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *given_to_it], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


def test_epochs_differ_seeds_differ_and_rows_are_mixed(tmp_path, card):
    source = write(tmp_path, 2_000, "parquet", 100)
    settings = StreamSettings(batch_size=50, window_rows=500)

    def order(stream: RowStream) -> list[int]:
        return [row for batch in epoch(stream) for row in batch]

    stream = RowStream(card, source, settings)
    first, second = order(stream), order(stream)
    other = order(RowStream(card, source, settings.model_copy(update={"seed": 1})))
    assert first != second
    assert first != other
    # A window holds row groups from all over the file, and no batch is a piece of it.
    windows = np.array(first).reshape(4, 500) // 100
    assert all(np.ptp(groups) > 8 for groups in windows)
    batches = np.array(first).reshape(-1, 50) // 100
    assert all(len(set(groups)) > 2 for groups in batches.tolist())


def test_a_rank_reads_the_row_groups_of_its_share_and_no_others(tmp_path, card):
    write(tmp_path, 4_000, "parquet", 50, num_files=4)
    for rank in range(4):
        source = Watched(tmp_path)
        settings = StreamSettings(batch_size=64, window_rows=200, rank=rank, world_size=4)
        assert sum(map(len, epoch(RowStream(card, source, settings)))) == 1_000
        assert source.num_read <= 1_000 + 2 * 50


def test_rows_that_fit_a_window_are_read_once(tmp_path, card):
    write(tmp_path, 100, "parquet", 10)
    source = Watched(tmp_path)
    stream = RowStream(card, source, StreamSettings(batch_size=8, window_rows=100))
    (tmp_path / "0.parquet").unlink()
    assert sorted(row for batch in epoch(stream) for row in batch) == list(range(100))
    assert epoch(stream)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_reaches_the_caller_with_its_row_after_the_batches_before_it(
    tmp_path, card, prefetch
):
    whole = table(1_000).to_pandas()
    whole.loc[700, "row"] = NUM_IDS
    pq.write_table(pa.Table.from_pandas(whole), tmp_path / "a.parquet")
    settings = StreamSettings(batch_size=50, window_rows=100, prefetch=prefetch)
    stream = RowStream(card, open_source(tmp_path / "a.parquet"), settings)
    taken = []
    with pytest.raises(DataError, match=r"a.parquet: column 'row', row 700: must hold ids in"):
        taken.extend(stream.batches())
    assert len(taken) >= 12
    assert stream.step == len(taken)
    assert not [t for t in threading.enumerate() if t.name == "rankopt-ahead"]


def test_an_error_in_a_text_file_names_the_file_and_its_row(tmp_path, card):
    write(tmp_path, 30, "csv", 0, num_files=3)
    lines = (tmp_path / "1.csv").read_text().splitlines()
    lines[5] = "none,,1"
    (tmp_path / "1.csv").write_text("\n".join(lines))
    stream = RowStream(card, open_source(tmp_path), StreamSettings(batch_size=4, window_rows=8))
    with pytest.raises(DataError, match=r"1\.csv: column 'row', row 4: must be a whole number"):
        epoch(stream)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_memory_is_bounded_by_the_window_and_not_by_the_file(tmp_path, card, prefetch):
    num_rows, window_rows = 400_000, 10_000
    rows = pa.table({"row": np.arange(num_rows), "label": np.arange(num_rows) % 2})
    offsets = np.arange(num_rows + 1, dtype=np.int32) * 8
    bags = pa.ListArray.from_arrays(offsets, pa.array(np.repeat(np.arange(num_rows), 8)))
    pq.write_table(rows.append_column("bag", bags), tmp_path / "a.parquet", row_group_size=3_000)
    row_bytes = 8 + 8 * 8 + 8
    most = {"arrow": 0, "torch": 0, "python": 0}
    before = pa.total_allocated_bytes()

    class Measured(Watched):
        """Looks at memory where it is fullest: while the next window is read."""

        def read(self, num_rows: int) -> None:
            super().read(num_rows)
            most["arrow"] = max(most["arrow"], pa.total_allocated_bytes() - before)
            most["python"] = max(most["python"], tracemalloc.get_traced_memory()[1])
            most["torch"] = max(most["torch"], tensor_bytes())
            # The list of all objects, a pointer each, is not the stream's.
            tracemalloc.reset_peak()

    settings = StreamSettings(batch_size=500, window_rows=window_rows, prefetch=prefetch)
    stream = RowStream(card, Measured(tmp_path / "a.parquet"), settings)
    tracemalloc.start()
    assert sum(map(len, stream.batches())) == num_rows
    most["python"] = max(most["python"], tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
    # A window joined of its pieces beside them, and batches; a piece of a chunk holds the chunk.
    window_bytes, chunk_bytes = row_bytes * window_rows, row_bytes * 3_000
    batches_bytes = row_bytes * 500 * (prefetch + 3)
    assert window_bytes / 2 < most["torch"] < 2 * window_bytes + chunk_bytes + batches_bytes
    file_bytes = row_bytes * num_rows  # forty windows
    assert most["arrow"] < file_bytes / 4
    assert most["python"] < file_bytes / 4


def tensor_bytes() -> int:
    """Bytes of all tensors alive, each storage once."""
    storages = {}
    for item in gc.get_objects():
        if type(item) is Rows:
            for tensor in item.features.values():
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 9}, r"stream state: seed: must be 0, as of this stream .*; got 9"),
        ({"world_size": 2}, r"stream state: world_size: must be 1"),
        ({"data": "0"}, r"stream state: data: must be '"),
        ({"row": -1}, r"stream state: row: input should be greater"),
        ({"rows": 1}, r"stream state: rows: is not a known key. Did you mean 'row'"),
    ],
)
def test_a_state_of_another_stream_is_refused(tmp_path, card, changed, message):
    source = write(tmp_path, 30, "parquet", 5)
    stream = RowStream(card, source, StreamSettings(batch_size=4, window_rows=8))
    with pytest.raises(UsageError, match=message):
        stream.restore(stream.state() | changed)


def test_ranks_without_rows_and_ranks_that_are_none_are_refused(tmp_path, card):
    source = write(tmp_path, 3, "parquet", 5)
    with pytest.raises(DataError, match=r"must hold a row for each of 4 ranks; got 3"):
        RowStream(card, source, StreamSettings(batch_size=4, rank=0, world_size=4))
    with pytest.raises(UsageError, match=r"rank: must lie in \[0, 2\), the world's size; got 2"):
        RowStream(card, source, StreamSettings(batch_size=4, rank=2, world_size=2))


def test_a_source_without_rows_is_refused(tmp_path, card):
    source = open_source(table(3).to_pandas().iloc[:0])
    with pytest.raises(DataError, match="holds no rows"):
        RowStream(card, source, StreamSettings(batch_size=4))


def test_pieces_cover_every_row_once_with_its_number(tmp_path):
    source = write(tmp_path, 95, "parquet", 10, num_files=2)
    pieces = pieces_of(source)
    assert len(pieces) == 10
    parts = [part for piece in pieces for part in piece.read(["row"], 7)]
    for batch, found in parts:
        assert batch.column(0).to_pylist() == found.tolist()
    assert sorted(np.concatenate([found for _, found in parts]).tolist()) == list(range(95))
    frame = FrameSource(pd.DataFrame({"row": np.arange(70_000)}))
    assert [piece.num_rows for piece in pieces_of(frame)] == [65_536, 4_464]
    assert isinstance(CsvSource(write(tmp_path / "c", 5, "csv", 0).name), RowSource)


def test_lines_of_criteo_are_counted_without_being_parsed(make_card, tmp_path):
    def line(row: int) -> str:
        return "\t".join([str(row % 2), *[str(row)] * 13, *[f"{row:x}"] * 26])

    for file, rows in enumerate((range(30), range(30, 37), range(37, 60))):
        (tmp_path / f"day_{file}").write_text("".join(f"{line(row)}\n" for row in rows))
    source = open_source(tmp_path, "criteo")
    assert [count_rows(piece, ["label"]).num_rows for piece in pieces_of(source)] == [30, 7, 23]
    card = make_card({"name": "ids", "kind": "ids", "columns": ["C1"], "num_ids": 100_000})
    shares = []
    for rank in range(3):
        settings = StreamSettings(batch_size=8, window_rows=10, rank=rank, world_size=3)
        shares.append(
            [b.features["ids"].tolist() for b in RowStream(card, source, settings).batches()]
        )
    assert [len(share) for share in shares] == [3, 3, 3]
    assert sorted(row for share in shares for batch in share for row in batch) == list(range(60))


# what makes items ahead


def test_items_are_made_ahead_up_to_the_depth_and_no_further():
    made = []

    def items() -> Iterator[int]:
        for item in range(100):
            made.append(item)
            yield item

    found = ahead(items(), 3)
    assert next(found) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    # One is with the caller, three wait in the queue and one for room in it.
    assert len(made) == 5
    found.close()
    assert not [t for t in threading.enumerate() if t.name == "rankopt-ahead"]


def test_the_wait_of_a_slow_source_is_seen_and_that_of_a_slow_caller_is_not():
    def slow() -> Iterator[int]:
        for item in range(5):
            time.sleep(0.03)
            yield item

    waits = Waits()
    assert list(ahead(slow(), 2, waits)) == list(range(5))
    assert waits.num_items == 5
    assert waits.total_ns > 0.1e9
    assert waits.longest_ns >= waits.last_ns > 0

    hidden = Waits()
    for _ in ahead(iter(range(5)), 2, hidden):
        time.sleep(0.03)
    assert hidden.total_ns < 0.1e9

    unhidden = Waits()
    assert len(list(ahead(slow(), 0, unhidden))) == 5
    assert unhidden.total_ns > 0.14e9


def test_the_same_rows_come_with_and_without_a_thread(tmp_path, card):
    source = write(tmp_path, 200, "parquet", 30)
    runs = []
    for prefetch in (0, 1, 4):
        settings = StreamSettings(batch_size=16, window_rows=50, prefetch=prefetch)
        runs.append(list(RowStream(card, source, settings).batches()))
    for run in runs[1:]:
        for expected, found in zip(runs[0], run, strict=True):
            assert all(torch.equal(expected.features[n], found.features[n]) for n in found.features)
