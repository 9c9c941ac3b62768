"""Frames with planted drift, and what the report finds in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from rankopt.data.report.collect import collect
from rankopt.data.source import open_source
from rankopt.models.card import ModelCard

MakeCard = Callable[..., ModelCard]
DAY = 86_400
START = 1_700_006_400  # 2023-11-15, 00:00 UTC


def frame(num_rows: int, seed: int, **planted: Any) -> pd.DataFrame:
    """Draw rows; `planted` moves prices, shifts ids, or raises the label rate."""
    rng = np.random.default_rng(seed)
    ranks = np.minimum(rng.zipf(1.5, num_rows) - 1, 899)
    return pd.DataFrame(
        {
            "price": rng.standard_normal(num_rows) * planted.get("spread", 1.0)
            + planted.get("moved", 0.0),
            "age": rng.integers(0, 3, num_rows).astype(float),
            "item": (ranks + planted.get("shifted", 0)) % 1_000,
            "bag": lists(rng, num_rows),
            "request": np.arange(num_rows) // 4 + seed * 1_000_000,
            "time": START + np.arange(num_rows) * 3 * DAY // num_rows,
            "label": (rng.random(num_rows) < planted.get("rate", 0.2)).astype(int),
        }
    )


def lists(rng: np.random.Generator, num_rows: int) -> Any:
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 6, num_rows))]).astype(np.int32)
    values = pa.array(rng.integers(0, 50, offsets[-1]))
    array = pa.ListArray.from_arrays(offsets, values)
    return pd.Series(array, dtype=pd.ArrowDtype(array.type))


def reports(card: ModelCard, **frames: pd.DataFrame) -> dict[str, Any]:
    sources = {name: open_source(rows) for name, rows in frames.items()}
    found = collect(card, sources, next(iter(sources)))
    return {split.name: split for split in found}
