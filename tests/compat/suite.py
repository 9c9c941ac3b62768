"""Put one third-party model through the recipe: train it in its own library, optimise, compare.

The steps are those of a user: a checkpoint that the library saved, a card, `rankopt optimize` and
`rankopt ab`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rankopt.artifact.verify import verify_artifact
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan, load_plan
from rankopt.data.cache import cached_folder
from rankopt.data.splits import open_splits
from rankopt.errors import RankoptError
from rankopt.jobs.compare import compare
from rankopt.jobs.optimize import optimize
from rankopt.models.build import resolve_factory
from rankopt.models.card import ModelCard, load_card
from rankopt.recipe import Recipe, load_recipe
from rankopt.review.schema import Report

HERE = Path(__file__).resolve().parent
LIST = HERE.parents[1] / "benchmarks" / "compat.yaml"


@dataclass(frozen=True)
class Entry:
    """One class of one library."""

    library: str
    version: str
    model: str

    @property
    def name(self) -> str:
        return f"{self.library}-{self.model}"

    @property
    def card_file(self) -> Path:
        return HERE / "cards" / self.library / f"{self.model}.yaml"


def entries() -> Iterator[Entry]:
    """Read the committed list of classes."""
    for library in _list()["libraries"]:
        for model in library["models"]:
            yield Entry(library["name"], library["version"], model)


def recipe() -> Recipe:
    """Load the one recipe that every class goes through."""
    return load_recipe(LIST.parents[1] / "recipes" / f"{_list()['recipe']}.yaml")


def _list() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return content


def checkpoint(entry: Entry, num_rows: int | None = None) -> Path:
    """Train a class with its library's own training code, once per version of that code.

    Args:
        entry: the class.
        num_rows: train on the first rows only; all of them when None.
    """
    card = load_card(entry.card_file)
    code = Path(str(sys.modules[resolve_factory(card).__module__].__file__))
    key = {
        "code": hashlib.sha256(code.read_bytes()).hexdigest(),
        "model": entry.model,
        "version": entry.version,
        "data": card.data.model_dump(mode="json"),
        "num_rows": num_rows,
    }

    def make(folder: Path) -> None:
        frame = _training_rows(card, num_rows)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sys.modules[resolve_factory(card).__module__].train(entry.model, frame, folder)

    folder = cached_folder("compat", key, make)
    return next(iter(sorted(folder.glob("model*.pt*"))))


def _training_rows(card: ModelCard, num_rows: int | None) -> pd.DataFrame:
    source = open_splits(card).train
    assert source is not None
    parts = [batch.to_pandas() for batch in source.batches()]
    return pd.concat(parts, ignore_index=True).iloc[:num_rows]


def measure(entry: Entry, out: Path, plan: BenchPlan | None = None) -> dict[str, Any]:
    """Optimise and compare one class; the row says what came of it, or why nothing did."""
    row: dict[str, Any] = {
        "library": entry.library,
        "version": entry.version,
        "model": entry.model,
        "card_lines": len(entry.card_file.read_text(encoding="utf-8").splitlines()),
        "exported": False,
        "passing": False,
        "kept_passes": [],
        "speedup_1": None,
        "speedup_512": None,
        "size_ratio": None,
        "ne_change": None,
        "error": None,
    }
    try:
        weights = checkpoint(entry)
        artifact = optimize(
            recipe(),
            entry.card_file,
            weights,
            out=out,
            overwrite=True,
            progress=lambda line: print(f"  {line}", flush=True),
        )
        report = compare(
            entry.card_file,
            artifact,
            checkpoint=weights,
            plan=plan or load_plan("ab-quick"),
            backend=LocalBackend(),
        )
    except RankoptError as error:
        return row | {"error": str(error)}
    except Exception as error:  # one class that breaks something must not end the run of the others
        return row | {"error": f"a fault of rankopt: {type(error).__name__}: {error}"}
    return row | _figures(report, load_card(entry.card_file).min_batch, artifact)


def _figures(report: Report, small: int, artifact: Path) -> dict[str, Any]:
    latency = {line.batch_size: line for line in report.latency}
    proof = verify_artifact(artifact)
    quality = {
        name: parity.model_dump(mode="json")
        for name, parity in report.quality.items()
        if name.rpartition(".")[2] in ("ne", "auc")
    }
    ne = [parity.delta for name, parity in report.quality.items() if name.endswith("ne")]
    return {
        "exported": True,
        "passing": report.verdict == "pass" and proof.passed,
        "verdict": report.verdict,
        "reasons": list(report.reasons),
        "kept_passes": [item.kind for item in report.passes if item.kept],
        "passes": [item.model_dump(mode="json") for item in report.passes],
        "small_batch": small,
        "speedup_1": latency[small].speedup,
        "speedup_512": latency[512].speedup,
        "latency": [line.model_dump(mode="json") for line in report.latency],
        "size_ratio": _ratio(report.size.control_bytes, report.size.candidate_bytes),
        "size": report.size.model_dump(mode="json"),
        "ne_change": max((delta for delta in ne if delta is not None), default=None),
        "quality": quality,
        "parity": {
            "passed": proof.passed,
            "largest_difference": proof.largest_difference,
            "rows_alone_equal": proof.rows_alone_equal,
        },
        "capture": list(getattr(report, "capture", ())),
        "num_rows": report.data["num_rows"],
        "made_at": report.made_at,
    }


def _ratio(control: float | None, candidate: float | None) -> float | None:
    return control / candidate if control and candidate else None


def slower(row: Mapping[str, Any]) -> list[int]:
    """List the batch sizes at which a row's whole interval lies below 1."""
    return [
        line["batch_size"]
        for line in row.get("latency", ())
        if line["ci_high"] is not None and line["ci_high"] < 1
    ]
