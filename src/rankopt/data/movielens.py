"""MovieLens-100K as a ranking problem: will this user rate this film 4 or 5?

Columns, ids from 1 on with 0 for padding or unknown (`feature_sizes` gives the ranges):

    row_id          rows in order of time, from 0
    user_id, age, gender, occupation, zip_prefix      of the user
    item_id, year, genre (the first one)              of the film
    genres          list: all genres of the film
    history         list: films the user rated 4 or 5 strictly before this row, oldest first
    history_genres  list: the first genre of each film of `history`
    timestamp, rating, label, loved                   label = 1 where rating >= 4, loved where 5

Rows are split by time over all users, so a model is judged on ratings later than any it saw.
A later row's history may hold films of the same split: in service they would be known by then.

Source: F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, 2015.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rankopt.data.cache import cached_folder
from rankopt.data.movielens_raw import PINNED, Hashes, read_members

NUM_USERS = 943
NUM_ITEMS = 1682
AGE_STARTS = (18, 25, 35, 45, 50, 56)
"""Bucket 1 lies below the first, bucket 7 from the last one up: the bounds of MovieLens-1M."""
GENDERS = ("F", "M")
OCCUPATIONS = (
    *("administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive"),
    *("healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other"),
    *("programmer", "retired", "salesman", "scientist", "student", "technician", "writer"),
)
ZIP_PREFIXES = tuple("0123456789")
"""First digit of the zip code; codes of other countries begin with a letter and share one id."""
YEAR_STARTS = (1930, 1940, 1950, 1960, 1970, 1980, 1985, 1990, 1992, 1993, 1994, 1995, 1996, 1997)
"""Finer towards 1998, the year of the ratings."""
GENRES = (
    *("Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama"),
    *("Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller"),
    *("War", "Western"),
)
SPLITS = ("train", "validation", "test")

_POSITIVE_RATING = 4
_TOP_RATING = 5
_FORMAT = 2
"""Raise it when the same options give other files."""

_Ints = npt.NDArray[np.int64]


class MovieLensOptions(BaseModel):
    """How rows are made: `data.options` of a card whose source is movielens."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    history_length: int = Field(default=50, ge=1)
    """The most films of a history; the latest are kept."""
    train_share: float = Field(default=0.8, gt=0, lt=1)
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """What is left after both is the test split, the latest rows."""

    @model_validator(mode="after")
    def _leave_a_test(self) -> MovieLensOptions:
        if self.train_share + self.validation_share >= 1:
            raise ValueError("train_share + validation_share must be below 1, to leave a test")
        return self


def feature_sizes() -> dict[str, int]:
    """Return num_ids of each id column: one more than its largest id."""
    return {
        "user_id": NUM_USERS + 1,
        "age": len(AGE_STARTS) + 2,
        "gender": len(GENDERS) + 1,
        "occupation": len(OCCUPATIONS) + 1,
        "zip_prefix": len(ZIP_PREFIXES) + 2,
        "item_id": NUM_ITEMS + 1,
        "year": len(YEAR_STARTS) + 2,
        "genre": len(GENRES) + 1,
        "genres": len(GENRES) + 1,
        "history": NUM_ITEMS + 1,
        "history_genres": len(GENRES) + 1,
    }


def movielens_folder(
    options: MovieLensOptions | None = None,
    path: str | Path | None = None,
    pinned: Hashes = PINNED,
) -> Path:
    """Return a cached folder of train.parquet, validation.parquet and test.parquet.

    Args:
        options: how rows are made.
        path: where the raw files are; see `read_members`.
        pinned: the hashes they must have.

    Raises:
        DataError: the raw files are not the pinned ones.
        EnvironmentProblem: they could not be downloaded, or the cache cannot be written.
    """
    chosen = options or MovieLensOptions()
    key = {"format": _FORMAT, "raw": pinned.members, "options": chosen.model_dump()}

    def make(folder: Path) -> None:
        tables = build_splits(read_members(path, pinned), chosen)
        for split, table in tables.items():
            pq.write_table(table, folder / f"{split}.parquet")

    return cached_folder("movielens", key, make)


def build_splits(
    members: Mapping[str, str], options: MovieLensOptions | None = None
) -> dict[str, pa.Table]:
    """Make the three splits from the text of the raw files.

    A boundary moves back to the first row of its timestamp, so that no instant is split.

    Args:
        members: the text of ml-100k.inter, .user and .item.
        options: how rows are made.
    """
    chosen = options or MovieLensOptions()
    ratings = _table(members["ml-100k.inter"])
    ratings = ratings.astype({"user_id": "int64", "item_id": "int64", "timestamp": "int64"})
    ratings = ratings.sort_values(["timestamp", "user_id", "item_id"], ignore_index=True)
    table = _rows(ratings, _users(members["ml-100k.user"]), _items(members["ml-100k.item"]), chosen)
    times = ratings["timestamp"].to_numpy()
    shares = (chosen.train_share, chosen.train_share + chosen.validation_share)
    cuts = [int(np.searchsorted(times, times[int(len(times) * share)])) for share in shares]
    bounds = [0, *cuts, len(times)]
    return {
        split: table.slice(start, stop - start)
        for split, start, stop in zip(SPLITS, bounds[:-1], bounds[1:], strict=True)
    }


def _rows(
    ratings: pd.DataFrame, users: pd.DataFrame, items: pd.DataFrame, options: MovieLensOptions
) -> pa.Table:
    of_user = users.reindex(ratings["user_id"])
    of_item = items.reindex(ratings["item_id"])
    rating = ratings["rating"].astype("float64").to_numpy()
    positive = rating >= _POSITIVE_RATING
    history, offsets = _histories(ratings, positive, options.history_length)
    first_genres = items["genre"].reindex(history).to_numpy(dtype=np.int64)
    columns = {"row_id": pa.array(np.arange(len(ratings)))}
    columns["user_id"] = pa.array(ratings["user_id"].to_numpy())
    for name in ("age", "gender", "occupation", "zip_prefix"):
        columns[name] = pa.array(of_user[name].to_numpy(dtype=np.int64))
    columns["item_id"] = pa.array(ratings["item_id"].to_numpy())
    for name in ("year", "genre"):
        columns[name] = pa.array(of_item[name].to_numpy(dtype=np.int64))
    columns["genres"] = pa.array(of_item["genres"].to_list(), pa.list_(pa.int64()))
    columns["history"] = pa.ListArray.from_arrays(offsets, pa.array(history))
    columns["history_genres"] = pa.ListArray.from_arrays(offsets, pa.array(first_genres))
    columns["timestamp"] = pa.array(ratings["timestamp"].to_numpy())
    columns["rating"] = pa.array(rating.astype(np.float32))
    columns["label"] = pa.array(positive.astype(np.int8))
    columns["loved"] = pa.array((rating >= _TOP_RATING).astype(np.int8))
    return pa.table(columns)


def _histories(
    ratings: pd.DataFrame, positive: npt.NDArray[np.bool_], max_length: int
) -> tuple[_Ints, npt.NDArray[np.int32]]:
    """Return all histories end to end, and where each begins, [N + 1].

    Ratings are looked up by user and time as one number, so that a row's history ends before the
    first rating of its own second: ratings given at once do not see each other.
    """
    times = ratings["timestamp"].to_numpy()
    users = ratings["user_id"].to_numpy()
    span = int(times.max() - times.min()) + 1
    moments = users * span + (times - times.min())
    liked = np.flatnonzero(positive)
    liked = liked[np.argsort(moments[liked], kind="stable")]
    ends = np.searchsorted(moments[liked], moments, side="left")
    starts = np.searchsorted(moments[liked], users * span, side="left")
    starts = np.maximum(starts, ends - max_length)
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    films = ratings["item_id"].to_numpy()[liked][positions]
    return films.astype(np.int64), offsets.astype(np.int32)


def _table(text: str) -> pd.DataFrame:
    """Read a member: tab-separated, its header naming columns as `name:type`."""
    frame = pd.read_csv(io.StringIO(text), sep="\t", dtype=str, keep_default_na=False, quoting=3)
    return frame.rename(columns=lambda name: str(name).partition(":")[0])


def _users(text: str) -> pd.DataFrame:
    raw = _table(text)
    ages = raw["age"].astype("int64").to_numpy()
    letters = raw["zip_code"].str[:1]
    return pd.DataFrame(
        {
            "age": np.searchsorted(AGE_STARTS, ages, side="right") + 1,
            "gender": _known(raw["gender"], GENDERS),
            "occupation": _known(raw["occupation"], OCCUPATIONS),
            "zip_prefix": _known(letters, ZIP_PREFIXES, otherwise=len(ZIP_PREFIXES) + 1),
        },
        index=raw["user_id"].astype("int64"),
    )


def _items(text: str) -> pd.DataFrame:
    raw = _table(text)
    years = pd.to_numeric(raw["release_year"], errors="coerce").to_numpy(dtype=np.float64)
    buckets = np.searchsorted(YEAR_STARTS, years, side="right") + 1
    numbers = {genre: number for number, genre in enumerate(GENRES, start=1)}
    genres = [[numbers.get(name, 0) for name in text.split()] or [0] for text in raw["class"]]
    return pd.DataFrame(
        {
            "year": np.where(np.isnan(years), 0, buckets),
            "genre": [listed[0] for listed in genres],
            "genres": genres,
        },
        index=raw["item_id"].astype("int64"),
    )


def _known(values: pd.Series[str], known: tuple[str, ...], otherwise: int = 0) -> _Ints:
    numbers = {value: number for number, value in enumerate(known, start=1)}
    return np.asarray(values.map(numbers).fillna(otherwise), dtype=np.int64)
