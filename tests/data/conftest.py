"""Cards made in Python for the tests of data, and a cache of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankopt.models.card import ModelCard


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("RANKOPT_CACHE", str(folder))
    monkeypatch.delenv("RANKOPT_MOVIELENS", raising=False)
    return folder


@pytest.fixture(scope="session")
def make_card() -> Callable[..., ModelCard]:
    def make(*inputs: dict[str, Any], path: Path | None = None, **data: Any) -> ModelCard:
        card = ModelCard.model_validate(
            {
                "name": "tested",
                "factory": "package.module:Model",
                "inputs": inputs,
                "outputs": [{"name": "click", "label": "label"}],
                "data": data,
            }
        )
        return card.model_copy(update={"path": path})

    return make
