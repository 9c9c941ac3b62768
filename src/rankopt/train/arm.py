"""A training step as an arm of a timing run: rows lie ready, each call is one step on a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rankopt.bench.arms import ArmSpec
from rankopt.data.rows import Rows, bag_counts
from rankopt.environment import collect_environment
from rankopt.errors import UsageError
from rankopt.models.build import make_module
from rankopt.models.card import load_card
from rankopt.models.serving import ServingModule
from rankopt.recipe import parse_recipe
from rankopt.train.recipes import require_sound, training_passes
from rankopt.train.reproducibility.determinism import one_order_of_sums
from rankopt.train.setup import apply_passes, plain_setup
from rankopt.train.step import Step

if TYPE_CHECKING:
    from torch import Tensor

LABEL_PREFIX = "label:"
"""What stands before a label column's name among the features of a rows file."""


class TrainingArm:
    """A model in training; a call takes a batch with its labels and gives the loss."""

    def __init__(self, spec: ArmSpec) -> None:
        """Build the model from its card's initial weights.

        Args:
            spec: its options hold `recipe`, the mapping of a training recipe, or None.
        """
        if spec.card is None:
            raise UsageError(f"arm {spec.label!r}: kind 'training' needs a model card.")
        card = load_card(spec.card)
        raw = spec.options.get("recipe")
        recipe = parse_recipe(raw, where=f"arm {spec.label!r}") if raw else None
        require_sound(recipe, card)
        torch.manual_seed(card.train.seed)
        serving = ServingModule(card, make_module(card)).train()
        setup = plain_setup(card, card.train, collect_environment(), serving)
        self._card = card
        self._step = Step(apply_passes(setup, training_passes(recipe))[0])

    def __call__(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Train on one batch."""
        num_rows = len(next(v for k, v in features.items() if k.startswith(LABEL_PREFIX)))
        labels: dict[str, Any] = {
            name.removeprefix(LABEL_PREFIX): tensor.numpy()
            for name, tensor in features.items()
            if name.startswith(LABEL_PREFIX)
        }
        batch = Rows(features, labels, None, num_rows, bag_counts(self._card))
        with one_order_of_sums():  # as `rankopt train` does
            return {"loss": torch.tensor(self._step(batch))}


def load_training(spec: ArmSpec) -> TrainingArm:
    """Load an arm of kind `training`."""
    return TrainingArm(spec)


def labelled(rows: Rows) -> Rows:
    """Return rows whose labels lie among the features, as a rows file keeps them."""
    labels = {f"{LABEL_PREFIX}{name}": torch.from_numpy(v) for name, v in rows.labels.items()}
    return Rows({**rows.features, **labels}, {}, None, rows.num_rows, rows.bags)
