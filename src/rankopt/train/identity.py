"""What must be equal for a killed run to go on: settings, card, code, recipe, rows, start.

Compared by content, not by path, so that a run may go on in another place. The machine, the number
of threads and the versions of libraries are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rankopt.bench.arms import hash_path
from rankopt.data.encode import wanted_columns
from rankopt.data.pieces import fingerprint, pieces_of
from rankopt.data.rowsource import RowSource
from rankopt.data.splits import Splits
from rankopt.errors import Problem
from rankopt.models.card import ModelCard
from rankopt.recipe import Recipe, dump_recipe
from rankopt.train.settings import TrainSettings

FIRST_ROWS = 1024
"""Rows of each split that are looked at; sizes tell of changes behind them."""


def run_identity(
    card: ModelCard,
    splits: Splits,
    settings: TrainSettings,
    recipe: Recipe | None,
    start: str | Path | None,
    *,
    save_optimizer: bool,
) -> dict[str, Any]:
    """Describe a run as JSON, such that equal descriptions mean the same weights."""
    found = {
        "settings": settings.model_dump(mode="json"),
        "card": card.model_dump(mode="json", exclude={"train", "checkpoint"}),
        "code": _code(card),
        "recipe": None if recipe is None else dump_recipe(recipe),
        "data": {
            name: None if source is None else _rows(card, source)
            for name, source in (
                ("train", splits.train),
                ("validation", splits.validation),
                ("test", splits.test),
            )
        },
        "start": None if start is None else _start(Path(start)),
        "save_optimizer": save_optimizer,
    }
    result: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return result


def differences(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """Name everything in which a run differs from the one that was begun."""
    before, after = dict(_leaves(then)), dict(_leaves(now))
    return [
        Problem(
            name,
            f"must be {_shown(before.get(name))}, as in the run that {where} holds",
            _shown(after.get(name)),
            "Give what the run began with, or begin anew with --overwrite and without --resume.",
        )
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)


def _code(card: ModelCard) -> str | None:
    """Hash the file that the factory lies in, where the card names one."""
    name = card.factory.rpartition(":")[0]
    file = card.folder / name
    return hash_path(file)[:16] if name.endswith(".py") and file.is_file() else None


def _start(folder: Path) -> str | None:
    return hash_path(folder)[:16] if folder.exists() else None


def _rows(card: ModelCard, source: RowSource) -> dict[str, Any]:
    columns = wanted_columns(card, source.column_names(), source.name)
    first = next(iter(source.batches(columns, FIRST_ROWS)), None)
    text = "" if first is None else repr(first.slice(0, FIRST_ROWS).to_pydict())
    return {
        "num_rows": source.num_rows,
        "sizes": fingerprint(pieces_of(source)),
        "first_rows": hashlib.sha256(text.encode()).hexdigest()[:16],
    }
