"""Global batches do not depend on how many ranks share them, nor on a stop in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.data.dealt import DealtSettings, DealtStream, Share
from rankopt.data.source import FrameSource
from rankopt.errors import UsageError
from rankopt.models.card import ModelCard


@pytest.fixture(scope="module")
def card(make_card: Callable[..., ModelCard]) -> ModelCard:
    return make_card(
        {"name": "row", "kind": "ids", "columns": ["row"], "num_ids": 1 << 20},
        {"name": "bag", "kind": "ragged_ids", "column": "bag", "num_ids": 1 << 20, "max_length": 9},
    )


class Plain:
    """A source that does not know its rows."""

    num_rows = None
    name = "plain"

    def __init__(self, source: FrameSource) -> None:
        self.column_names = source.column_names
        self.batches = source.batches


def source(num_rows: int, *, knows: bool = True) -> Any:
    rows = np.arange(num_rows)
    bags = [[row] * (row % 3) for row in rows]
    frame = FrameSource(pd.DataFrame({"row": rows, "bag": bags, "label": rows % 2}))
    return frame if knows else Plain(frame)


def stream(card: ModelCard, rows: Any, rank: int = 0, world_size: int = 1, **rest: Any) -> Any:
    return DealtStream(card, rows, DealtSettings(rank=rank, world_size=world_size, **rest))


def own(share: Share) -> list[int]:
    """Return the numbers of a share's own rows, having checked that each row is whole."""
    rows: list[int] = share.rows.features["row"].tolist()
    assert share.rows.features["bag.values"].tolist() == [n for n in rows for _ in range(n % 3)]
    assert share.rows.labels["label"].tolist() == [n % 2 for n in rows]
    assert len(rows) == max(share.num_own, 1)
    assert share.weight == share.num_own / share.num_rows
    return rows[: share.num_own]


deals = st.fixed_dictionaries(
    {
        "num_rows": st.integers(8, 90),
        "per_stretch": st.integers(2, 9),
        "row_shards": st.integers(1, 4),
        "window_rows": st.integers(2, 60),
        "seed": st.integers(0, 3),
        "prefetch": st.integers(0, 2),
        "knows": st.booleans(),
    }
)


def opened(card: ModelCard, deal: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    chosen = dict(deal)
    rows = source(chosen.pop("num_rows"), knows=chosen.pop("knows"))
    chosen["batch_size"] = chosen.pop("per_stretch") * chosen["row_shards"]
    return rows, chosen


def fitting(row_shards: int) -> st.SearchStrategy[int]:
    return st.sampled_from([n for n in range(1, 9) if row_shards % n == 0 or n % row_shards == 0])


@settings(max_examples=60)
@given(st.data(), deals)
def test_the_shares_of_all_ranks_are_the_batch_of_one_process(card, data, deal) -> None:
    rows, how = opened(card, deal)
    world_size = data.draw(fitting(deal["row_shards"]))
    alone = stream(card, rows, **how)
    ranks = [stream(card, rows, rank, world_size, **how) for rank in range(world_size)]
    seen = []
    for epoch in range(2):
        for batch, *shares in zip(
            alone.batches(), *(rank.batches() for rank in ranks), strict=True
        ):
            assert [row for share in shares for row in own(share)] == own(batch)
            assert {share.num_rows for share in shares} == {batch.num_own}
            assert sum(share.weight for share in shares) == pytest.approx(1)
            sizes = [share.num_own for share in shares]
            if world_size >= deal["row_shards"]:  # slices of a stretch differ by a row at most
                per = world_size // deal["row_shards"]
                groups = [sizes[i : i + per] for i in range(0, world_size, per)]
                assert all(max(group) - min(group) <= 1 for group in groups)
            seen += own(batch)
            assert all(rank.state() == alone.state() for rank in ranks)
        assert sorted(seen) == list(range(deal["num_rows"]))
        assert alone.epoch == epoch + 1
        seen = []


@settings(max_examples=60)
@given(st.data(), deals)
def test_a_run_goes_on_with_another_number_of_ranks(card, data, deal) -> None:
    rows, how = opened(card, deal)
    before = data.draw(fitting(deal["row_shards"]))
    after = data.draw(fitting(deal["row_shards"]))
    alone = stream(card, rows, **how)
    whole = [own(share) for _ in range(2) for share in alone.batches()]
    stop = data.draw(st.integers(0, len(whole)))
    first = stream(card, rows, before - 1, before, **how)
    count = 0
    while count < stop:
        for _ in first.batches():
            count += 1
            if count == stop:
                break
    state = json.loads(json.dumps(first.state()))
    assert "rank" not in state
    assert "world_size" not in state
    ranks = [stream(card, rows, rank, after, **how) for rank in range(after)]
    for rank in ranks:
        rank.restore(state)
    rest: list[list[int]] = []
    while len(rest) < len(whole) - stop:
        for shares in zip(*(rank.batches() for rank in ranks), strict=True):
            rest.append([row for share in shares for row in own(share)])  # noqa: PERF401
    assert rest[: len(whole) - stop] == whole[stop:]


def test_stretches_that_fit_neither_ranks_nor_batch_are_refused(card) -> None:
    with pytest.raises(UsageError, match=r"divide the number of ranks \(3\) .*: 1, 3, 6, 9 and so"):
        stream(card, source(60), world_size=3, row_shards=2, batch_size=12)
    with pytest.raises(UsageError, match=r"must divide the global batch_size \(10\)"):
        stream(card, source(60), row_shards=4, batch_size=10)
    with pytest.raises(UsageError, match="at least 2 rows"):
        stream(card, source(60), row_shards=4, batch_size=4)


def test_a_state_of_other_rows_or_settings_is_refused(card) -> None:
    given_state = stream(card, source(40), batch_size=8).state()
    with pytest.raises(UsageError) as caught:
        stream(card, source(41), batch_size=4, row_shards=2, seed=1).restore(given_state)
    told = str(caught.value)
    for name in ("batch_size", "row_shards", "seed", "data"):
        assert f"stream state: {name}: must be" in told
    with pytest.raises(UsageError, match="row_shards"):
        stream(card, source(40), batch_size=8).restore({"epoch": 0})
