"""MovieLens from small files made by hand in its layout, and once from the real wheel."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rankopt.data import movielens_raw
from rankopt.data.movielens import (
    SPLITS,
    MovieLensOptions,
    build_splits,
    feature_sizes,
    movielens_folder,
)
from rankopt.data.movielens_raw import MEMBER_FOLDER, Hashes, read_members
from rankopt.errors import DataError, EnvironmentProblem

USERS = """user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token
1\t17\tM\twriter\t85711
2\t56\tF\tadministrator\tT8H1N
3\t25\tX\tastronaut\t00000
"""
ITEMS = """item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq
1\tA "quoted" title\t1929\tAction
2\tSecond\t1998\tComedy War
3\tThird\tunkonwn\tunknown
4\tFourth\t1995\tWestern Drama
"""
# Out of order on purpose; user 1 rates films 2 and 3 in one second.
RATINGS = """user_id:token\titem_id:token\trating:float\ttimestamp:float
1\t4\t5\t400
1\t1\t4\t100
2\t1\t5\t150
1\t2\t5\t200
1\t3\t4\t200
2\t2\t3\t300
1\t1\t2\t450
3\t4\t1\t500
2\t4\t4\t600
1\t2\t4\t700
"""
MEMBERS = {"ml-100k.inter": RATINGS, "ml-100k.item": ITEMS, "ml-100k.user": USERS}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "raw"
    made.mkdir()
    for name, text in MEMBERS.items():
        (made / name).write_text(text, encoding="utf-8")
    return made


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in MEMBERS.items():
            archive.writestr(f"{MEMBER_FOLDER}/{name}", text)
    return path


@pytest.fixture
def pinned(wheel: Path) -> Hashes:
    members = {name: sha256(text.encode()) for name, text in MEMBERS.items()}
    return Hashes(sha256(wheel.read_bytes()), members)


def rows(options: MovieLensOptions | None = None) -> dict[str, list[Any]]:
    tables = build_splits(MEMBERS, options)
    merged: dict[str, list[Any]] = pa.concat_tables([tables[s] for s in SPLITS]).to_pydict()
    return merged


class TestRows:
    def test_rows_stand_in_order_of_time(self) -> None:
        found = rows()
        assert found["row_id"] == list(range(10))
        assert found["timestamp"] == sorted(found["timestamp"])
        assert found["item_id"] == [1, 1, 2, 3, 2, 4, 1, 4, 4, 2]
        assert found["label"] == [1, 1, 1, 1, 0, 1, 0, 0, 1, 1]

    def test_features_of_users_and_films(self) -> None:
        found = rows()
        user = {name: dict(zip(found["user_id"], found[name], strict=True)) for name in found}
        assert user["age"] == {1: 1, 2: 7, 3: 3}
        assert user["gender"] == {1: 2, 2: 1, 3: 0}
        assert user["occupation"] == {1: 21, 2: 1, 3: 0}
        assert user["zip_prefix"] == {1: 9, 2: 11, 3: 1}
        film = {name: dict(zip(found["item_id"], found[name], strict=True)) for name in found}
        assert film["year"] == {1: 1, 2: 15, 3: 0, 4: 13}
        assert film["genres"] == {1: [1], 2: [5, 17], 3: [0], 4: [18, 8]}
        assert film["genre"] == {1: 1, 2: 5, 3: 0, 4: 18}

    def test_history_is_what_was_liked_before_and_not_in_the_same_second(self) -> None:
        found = rows()
        histories = list(zip(found["user_id"], found["timestamp"], found["history"], strict=True))
        assert histories == [
            (1, 100, []),
            (2, 150, []),
            (1, 200, [1]),
            (1, 200, [1]),
            (2, 300, [1]),
            (1, 400, [1, 2, 3]),
            (1, 450, [1, 2, 3, 4]),
            (3, 500, []),
            (2, 600, [1]),
            (1, 700, [1, 2, 3, 4]),
        ]
        assert found["history_genres"][6] == [1, 5, 0, 18]

    def test_history_keeps_the_latest(self) -> None:
        assert rows(MovieLensOptions(history_length=2))["history"][6] == [3, 4]

    def test_ids_stay_within_the_sizes_named(self) -> None:
        found = rows()
        for column, num_ids in feature_sizes().items():
            flat = np.concatenate([np.atleast_1d(value) for value in found[column]])
            assert flat.min() >= 0
            assert flat.max() < num_ids


ratings = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(1000, 1020)),
    min_size=5,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(drawn=ratings, history_length=st.integers(1, 8), share=st.sampled_from([0.5, 0.8]))
def test_no_row_knows_its_future(
    drawn: list[tuple[int, int, int, int]], history_length: int, share: float
) -> None:
    text = RATINGS.splitlines()[0] + "\n"
    text += "".join("\t".join(map(str, line)) + "\n" for line in drawn)
    options = MovieLensOptions(history_length=history_length, train_share=share)
    tables = build_splits({**MEMBERS, "ml-100k.inter": text}, options)
    found = pa.concat_tables([tables[split] for split in SPLITS]).to_pylist()
    assert len(found) == len(drawn)
    for row in found:
        liked = [
            (time, film)
            for user, film, rating, time in drawn
            if user == row["user_id"] and rating >= 4 and time < row["timestamp"]
        ]
        # Films of one second come by their number.
        expected = [film for _, film in sorted(liked)][-history_length:]
        assert row["history"] == expected
    last = -1
    for split in SPLITS:
        times = tables[split]["timestamp"].to_pylist()
        if times:
            assert min(times) > last
            last = max(times)


class TestSplits:
    def test_boundaries_fall_at_the_shares(self) -> None:
        tables = build_splits(MEMBERS, MovieLensOptions(train_share=0.5, validation_share=0.2))
        assert [tables[split].num_rows for split in SPLITS] == [5, 2, 3]

    def test_one_instant_is_never_split(self) -> None:
        # 0.3 of 10 rows would part the two ratings at 200.
        tables = build_splits(MEMBERS, MovieLensOptions(train_share=0.3, validation_share=0.3))
        assert tables["train"]["timestamp"].to_pylist() == [100, 150]
        assert tables["validation"]["timestamp"].to_pylist() == [200, 200, 300, 400]

    @pytest.mark.parametrize(
        "options", [{"train_share": 0.9}, {"history_length": 0}, {"shares": 1}]
    )
    def test_options_that_cannot_be(self, options: dict[str, Any]) -> None:
        with pytest.raises(ValidationError):
            MovieLensOptions(**options)


class TestRaw:
    def test_wheel_and_folder_give_the_same(
        self, wheel: Path, folder: Path, pinned: Hashes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert read_members(wheel, pinned) == read_members(folder, pinned) == MEMBERS
        monkeypatch.setenv("RANKOPT_MOVIELENS", str(wheel))
        assert read_members(None, pinned) == MEMBERS

    def test_another_wheel_is_refused(self, wheel: Path) -> None:
        with pytest.raises(DataError, match=r"small-1.*must have the SHA-256 9c9948"):
            read_members(wheel)

    def test_a_changed_member_is_refused(self, folder: Path, pinned: Hashes) -> None:
        (folder / "ml-100k.item").write_text(ITEMS.replace("1998", "1999"))
        with pytest.raises(DataError, match=r"ml-100k\.item: must have the SHA-256") as caught:
            read_members(folder, pinned)
        assert len(caught.value.problems) == 1

    def test_a_changed_member_of_the_right_wheel_is_refused(
        self, wheel: Path, pinned: Hashes
    ) -> None:
        other = Hashes(pinned.wheel, {**pinned.members, "ml-100k.user": "0" * 64})
        with pytest.raises(DataError, match=r"ml-100k\.user: must have the SHA-256"):
            read_members(wheel, other)

    def test_a_missing_member_is_named(self, folder: Path, pinned: Hashes) -> None:
        (folder / "ml-100k.user").unlink()
        with pytest.raises(DataError, match=r"lacks ml-100k\.user"):
            read_members(folder, pinned)

    def test_what_is_no_wheel(self, tmp_path: Path) -> None:
        path = tmp_path / "x.whl"
        path.write_bytes(b"no zip")
        with pytest.raises(DataError, match="is no wheel"):
            read_members(path, Hashes(sha256(b"no zip"), {}))
        with pytest.raises(DataError, match=r"no such file.*RANKOPT_MOVIELENS"):
            read_members(tmp_path / "none.whl")

    def test_no_network_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        def offline(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: no route\n")

        monkeypatch.setattr(movielens_raw.subprocess, "run", offline)
        with pytest.raises(EnvironmentProblem) as caught:
            movielens_folder()
        assert "could not be downloaded (ERROR: no route)" in str(caught.value)
        assert "set RANKOPT_MOVIELENS" in str(caught.value)
        assert list(cache.rglob("*.parquet")) == []

    def test_a_pip_that_hangs_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hang(command: list[str], **_: Any) -> None:
            raise subprocess.TimeoutExpired(command, 300)

        monkeypatch.setattr(movielens_raw.subprocess, "run", hang)
        with pytest.raises(EnvironmentProblem, match="pip did not finish"):
            read_members()


def test_the_folder_is_made_once(
    wheel: Path, pinned: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = movielens_folder(path=wheel, pinned=pinned)
    assert pq.read_table(made / "train.parquet").num_rows == 8
    wheel.unlink()
    assert movielens_folder(path=wheel, pinned=pinned) == made
    with pytest.raises(DataError, match="no such file"):
        movielens_folder(MovieLensOptions(history_length=7), wheel, pinned)


@pytest.mark.network
def test_the_real_data() -> None:
    made = movielens_folder()
    tables = {split: pq.read_table(made / f"{split}.parquet") for split in SPLITS}
    assert [tables[split].num_rows for split in SPLITS] == [79_999, 10_001, 10_000]
    whole = pa.concat_tables(tables.values())
    assert np.mean(whole["label"].to_numpy()) == pytest.approx(0.55375)
    for column, num_ids in feature_sizes().items():
        array = whole[column].combine_chunks()
        flat = array.flatten() if pa.types.is_list(array.type) else array
        assert np.max(flat.to_numpy()) == num_ids - 1 or column.startswith("history")
        assert np.min(flat.to_numpy()) >= 0
