"""Whole requests of real rows, and their two forms."""

from __future__ import annotations

import torch

from passes.requests_zoo import REQUEST_MODELS
from passes.zoo import features_of
from rankopt.bench.request_rows import whole_requests
from rankopt.capture.requests import REQUEST_INDEX, split_features
from rankopt.data.rows import Rows, bag_counts
from rankopt.models.card import ModelCard


def rows_of(card: ModelCard, num_rows: int) -> Rows:
    return Rows(features_of(card, num_rows, 0.5), {}, None, num_rows, bag_counts(card))


def test_rows_of_a_request_share_its_inputs_and_no_others() -> None:
    card = REQUEST_MODELS["din"][0]()
    rows = whole_requests(rows_of(card, 40), card, 5, 3)
    assert rows.num_rows == 15
    for request in range(3):
        window = rows.slice(5 * request, 5 * request + 5).features
        assert (window["user"] == window["user"][0]).all()
        lengths = window["history.lengths"]
        assert (lengths == lengths[0]).all()
        histories = window["history.values"].view(5, -1)
        assert (histories == histories[0]).all()
    assert len(rows.features["item"].unique()) > 3


def test_split_features_keep_one_row_of_each_request() -> None:
    card = REQUEST_MODELS["din"][0]()
    rows = whole_requests(rows_of(card, 40), card, 4, 2)
    index = torch.arange(8) // 4
    features = split_features(rows.features, card, torch.tensor([0, 4]), index)
    assert features["user"].tolist() == rows.features["user"][[0, 4]].tolist()
    lengths = rows.features["history.lengths"]
    assert features["history.lengths"].tolist() == lengths[[0, 4]].tolist()
    assert len(features["history.values"]) == int(lengths[0] + lengths[4])
    assert features["item"] is not None
    assert features["item"].tolist() == rows.features["item"].tolist()
    assert features[REQUEST_INDEX].tolist() == index.tolist()
