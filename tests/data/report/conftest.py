"""The card of the frames, and splits of the same kind."""

from __future__ import annotations

from typing import Any

import pytest

from data.report.frames import MakeCard, frame, reports
from rankopt.models.card import ModelCard


@pytest.fixture(scope="session")
def card(make_card: MakeCard) -> ModelCard:
    return make_card(
        {"name": "dense", "kind": "dense", "columns": ["price", "age"], "fill": 0.0},
        {"name": "item", "kind": "ids", "columns": ["item"], "num_ids": 1_000},
        {"name": "bag", "kind": "ragged_ids", "column": "bag", "num_ids": 50, "max_length": 3},
        request_key="request",
        time_column="time",
    )


@pytest.fixture(scope="session")
def same(card: ModelCard) -> dict[str, Any]:
    return reports(card, train=frame(40_000, 1), test=frame(20_000, 2))
