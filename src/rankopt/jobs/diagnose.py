"""Diagnose: where the time of an artifact or of a card's eager module goes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rankopt.artifact.contract import contract_of, random_features
from rankopt.artifact.manifest import card_of, read_manifest
from rankopt.data.encode import load_rows
from rankopt.data.rows import Rows, bag_counts
from rankopt.data.splits import open_splits
from rankopt.diagnose.process import BATCH_SIZES, look_into
from rankopt.diagnose.report import write_diagnosis
from rankopt.diagnose.schema import Diagnosis
from rankopt.environment import collect_environment
from rankopt.errors import CheckpointError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.models.build import checkpoint_path
from rankopt.models.card import ModelCard, load_card
from rankopt.output import staged_output

if TYPE_CHECKING:
    from rankopt.jobs.inputs import Data

MAX_ROWS = 32_768
MADE_UP_ROWS = 8_192


def diagnose(
    source: ModelCard | str | Path,
    out: str | Path,
    *,
    data: Data | None = None,
    checkpoint: str | Path | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    num_threads: int | None = None,
    quick: bool = False,
    again: bool = False,
    overwrite: bool = False,
    reproduce: str | None = None,
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> Diagnosis:
    """Say where the time of each batch size goes, and what bounds it.

    Args:
        source: an artifact folder, or a model card (its eager module).
        out: where to write diagnose.json, diagnose.md and diagnose.html.
        data: rows in place of the card's.
        checkpoint: the eager module's weights in place of the card's; times hardly depend on them,
            so the factory's own do where none is named.
        batch_sizes: rows of a call.
        num_threads: thread budget; None: all physical cores.
        quick: take few samples: a first look.
        again: measure the machine's peaks even though they are known.
        overwrite: replace a result that `out` holds.
        reproduce: the command to write into the result.
        progress: told one line per step.
        detail: told how far the current step is.

    Raises:
        InputError, UsageError, ArtifactError: an input is wrong.
        EnvironmentProblem: there is no compiler, or the process died.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    artifact, card = _open(source)
    notes = []
    if artifact is None and checkpoint is not None and not Path(checkpoint).exists():
        raise CheckpointError(f"{checkpoint}: is not there.")
    if artifact is None and checkpoint_path(card, checkpoint) is None:
        notes.append("no checkpoint is named: the weights are the factory's own")
    with staged_output(Path(out), overwrite=overwrite) as stage:
        progress("reading rows")
        rows, described = _rows(card, data)
        if described["origin"] == MADE_UP:
            notes.append(
                "no data is named: ids are made up, all alike, which is harder on caches than "
                "traffic is"
            )
        progress("looking into the model in a fresh process")
        found = look_into(
            artifact,
            card,
            rows,
            batch_sizes,
            num_threads=num_threads,
            checkpoint=checkpoint,
            quick=quick,
            again=again,
            allow_random=True,
            progress=detail,
        )
        result = Diagnosis(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            model=card.name,
            subject="eager" if artifact is None else "artifact",
            source=str(source if not isinstance(source, ModelCard) else source.where),
            num_threads=found.num_threads,
            machine=found.machine,
            batches=found.batches,
            data=described,
            environment=collect_environment().model_dump(mode="json"),
            notes=tuple(notes),
            reproduce=reproduce or f"rankopt diagnose {source} --out DIR",
        )
        progress("writing the result")
        write_diagnosis(result, stage)
    return result


MADE_UP = "made up"


def _open(source: ModelCard | str | Path) -> tuple[Path | None, ModelCard]:
    if isinstance(source, ModelCard):
        return None, source
    if Path(source).is_dir():
        return Path(source), card_of(read_manifest(Path(source)))
    return None, load_card(source)


def _rows(card: ModelCard, data: Data | None) -> tuple[Rows, dict[str, Any]]:
    """Read the rows of the test split; make some up where neither card nor caller names data."""
    if data is None and card.data.source == "files" and card.data.test is None:
        random = torch.Generator().manual_seed(0)
        features = random_features(contract_of(card), MADE_UP_ROWS, random)
        rows = Rows(features, {}, None, MADE_UP_ROWS, bags=bag_counts(card))
        return rows, {"origin": MADE_UP, "num_rows": MADE_UP_ROWS}
    splits = open_splits(card, data)
    rows = load_rows(card, splits.test, limit=MAX_ROWS, with_labels=False)
    return rows, {"origin": splits.description["origin"], "num_rows": rows.num_rows}
