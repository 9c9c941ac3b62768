"""Trained weights for a suite's models: the card's, or trained once and kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from rankopt._version import __version__
from rankopt.bench.arms import factory_file
from rankopt.bench.peers.suite import PeerSuite, SuiteModel
from rankopt.data.cache import cached_folder
from rankopt.errors import CheckpointError
from rankopt.models.card import ModelCard, load_card


def model_card(suite: PeerSuite, model: SuiteModel) -> ModelCard:
    """Load a model's card; a path is looked for beside the suite first.

    Raises:
        CardError: there is no such card, or it breaks the schema.
    """
    if suite.path is not None and (beside := suite.path.parent / model.card).is_file():
        return load_card(beside)
    return load_card(model.card)


def trained_weights(
    suite: PeerSuite,
    model: SuiteModel,
    card: ModelCard,
    progress: Callable[[str], None],
    detail: Callable[[str], None],
) -> Path:
    """Return a model's checkpoint, training it where neither suite nor card names one.

    Raises:
        CheckpointError: the named checkpoint is not there.
    """
    given = _named(suite, model, card)
    if given is not None:
        if not given.is_file() and not given.is_dir():
            raise CheckpointError(f"{model.name}: checkpoint {given} is not there.")
        return given.resolve()
    key = {
        "card": card.model_dump(mode="json"),
        "code": _code(card),
        "rankopt": __version__,
    }

    def make(folder: Path) -> None:
        from rankopt.data.splits import open_splits
        from rankopt.train.loop import train

        progress(f"{model.name}: training, since there are no weights yet")
        train(card, open_splits(card), folder / "training", card.train, detail)

    from rankopt.train.state import CHECKPOINT_NAME

    return cached_folder("peers-weights", key, make) / "training" / CHECKPOINT_NAME


def _named(suite: PeerSuite, model: SuiteModel, card: ModelCard) -> Path | None:
    if model.checkpoint is not None:
        folder = suite.path.parent if suite.path else Path.cwd()
        return folder / model.checkpoint
    return card.folder / card.checkpoint if card.checkpoint else None


def _code(card: ModelCard) -> str:
    """Hash the file of the card's factory."""
    from rankopt.models.build import resolve_factory

    file = factory_file(card.path) if card.path is not None else None
    if file is None:
        import sys

        module = sys.modules[resolve_factory(card).__module__]
        file = Path(str(module.__file__))
    return hashlib.sha256(file.read_bytes()).hexdigest()
