"""predict through the form with request_index: the plain form's scores, in the data's order."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from artifact.two_forms import both, din
from artifact.workshop import built
from passes.requests_zoo import LARGE_IDS
from rankopt.artifact import predict
from rankopt.artifact.predict import predict_file
from rankopt.capture.requests import REQUEST_INDEX
from rankopt.errors import ArtifactError, DataError, UsageError
from rankopt.models.card import ModelCard
from rankopt.runtime import LoadedArtifact

Cli = Callable[..., Any]


def made_rows(card: ModelCard, num_requests: int = 9, seed: int = 0) -> pd.DataFrame:
    """Make rows of requests of different sizes, in no order."""
    draw = np.random.default_rng(seed)
    sizes = draw.integers(1, 7, num_requests)
    request = np.repeat(np.arange(num_requests), sizes)

    def column(item: Any, count: int) -> dict[str, Any]:
        if item.kind == "dense":
            return {name: draw.normal(size=count) for name in item.columns}
        if item.kind == "ids":
            return {n: draw.integers(0, item.ranges[0], count) for n in item.columns}
        # Longer than max_length, and empty ones.
        lists = [
            draw.integers(0, item.num_ids, draw.integers(0, 12)).tolist() for _ in range(count)
        ]
        return {item.column: lists}

    columns: dict[str, Any] = {"request": [f"r{number}" for number in request]}
    for item in card.inputs:
        made = column(item, num_requests if item.request_level else len(request))
        for name, values in made.items():
            columns[name] = [values[at] for at in request] if item.request_level else values
    frame = pd.DataFrame(columns)
    return frame.sample(frac=1, random_state=seed).reset_index(drop=True)


def scores(folder: Path, data: pd.DataFrame, out: Path, **options: Any) -> pd.DataFrame:
    assert predict_file(folder, data, out, overwrite=True, **options) == len(data)
    return pd.read_parquet(out)


@pytest.mark.parametrize("batch_size", [1, 4, 512])
def test_lists_and_columns_score_as_in_the_plain_form(batch_size: int, tmp_path: Path) -> None:
    card, folder = din()
    data = made_rows(card)
    plain = scores(folder, data, tmp_path / "plain.parquet")
    hoisted = scores(
        folder, data, tmp_path / "hoisted.parquet", requests=True, batch_size=batch_size
    )
    assert plain["score"].std() > 0.01
    assert hoisted["row_id"].tolist() == list(range(len(data)))
    np.testing.assert_allclose(hoisted["score"], plain["score"], atol=1e-6)


def test_requests_that_lie_in_parts_read_apart_are_scored_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, folder = din()
    data = made_rows(card, num_requests=40)
    plain = scores(folder, data, tmp_path / "plain.parquet")
    monkeypatch.setattr(predict, "BATCH_ROWS", 16)
    hoisted = scores(folder, data, tmp_path / "hoisted.parquet", requests=True, batch_size=8)
    np.testing.assert_allclose(hoisted["score"], plain["score"], atol=1e-6)


def test_request_level_inputs_enter_once_and_calls_hold_whole_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, folder = din()
    data = made_rows(card, num_requests=30)
    largest = int(data["request"].value_counts().max())
    calls: list[tuple[int, int]] = []
    score = LoadedArtifact.__call__

    def spy(self: LoadedArtifact, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        calls.append((len(features["user"]), len(features[REQUEST_INDEX])))
        return score(self, features)

    monkeypatch.setattr(LoadedArtifact, "__call__", spy)
    scores(folder, data, tmp_path / "s.parquet", requests=True, batch_size=2 * largest)
    assert sum(requests for requests, _ in calls) == 30
    assert sum(candidates for _, candidates in calls) == len(data)
    assert max(candidates for _, candidates in calls) <= 2 * largest


def test_the_datas_own_row_ids_stay_with_their_rows(tmp_path: Path, cli: Cli) -> None:
    given = both()
    data = made_rows(given.card).assign(row_id=lambda rows: 1_000 - np.arange(len(rows)))
    data.to_parquet(tmp_path / "rows.parquet")
    plain = scores(given.folder, data, tmp_path / "plain.parquet")
    out = tmp_path / "hoisted.parquet"
    told = cli(
        "predict", given.folder, "--data", tmp_path / "rows.parquet", "--out", out, "--requests"
    )
    assert told.exit_code == 0, told.stderr
    hoisted = pd.read_parquet(out)
    assert hoisted["row_id"].tolist() == data["row_id"].tolist()
    # One layer quantises what differs in its last bits.
    np.testing.assert_allclose(hoisted["score"], plain["score"], atol=0.02)


def test_rows_of_a_request_that_differ_are_named(tmp_path: Path) -> None:
    card, folder = din()
    data = made_rows(card)
    row = next(i for i, key in enumerate(data["request"]) if key in set(data["request"][:i]))
    data.at[row, "user1"] = (data.at[row, "user1"] + 1) % LARGE_IDS
    with pytest.raises(DataError, match=re.escape(f"column 'user1', row {row}")):
        predict_file(folder, data, tmp_path / "s.parquet", requests=True)
    assert not (tmp_path / "s.parquet").exists()
    predict_file(folder, data, tmp_path / "s.parquet")


def test_data_without_the_key_is_told_which_column_is_missing(tmp_path: Path) -> None:
    card, folder = din()
    data = made_rows(card).rename(columns={"request": "reqest"})
    with pytest.raises(DataError, match=r"'request': is missing\. Did you mean 'reqest'"):
        predict_file(folder, data, tmp_path / "s.parquet", requests=True)


def test_an_artifact_without_the_form_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="build it with the pass hoist_requests"):
        predict_file(
            built("dlrm-native").folder, pd.DataFrame(), tmp_path / "s.parquet", requests=True
        )


def test_a_card_without_a_key_is_told_what_to_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, folder = din()
    keyless = card.model_copy(update={"data": card.data.model_copy(update={"request_key": None})})
    monkeypatch.setattr(predict, "card_of", lambda _: keyless)
    with pytest.raises(UsageError, match=r"data\.request_key: is required"):
        predict_file(folder, made_rows(card), tmp_path / "s.parquet", requests=True)
