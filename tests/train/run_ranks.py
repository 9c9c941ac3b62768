"""One of several processes: train a card by several recipes, one after the other.

    RANK=0 WORLD_SIZE=2 ... run_ranks.py FOLDER CARD:RECIPE:OUT...

Started by hand with torchrun's variables, which spares torchrun's own start.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rankopt.data.splits import open_splits
from rankopt.models.card import load_card
from rankopt.recipe import load_recipe
from rankopt.train.distributed import weights
from rankopt.train.distributed.ranks import Ranks, join
from rankopt.train.loop import train


def run(folder: Path, what: str, ranks: Ranks | None = None) -> None:
    """Train FOLDER/CARD.yaml by FOLDER/RECIPE.yaml (or plainly) into FOLDER/OUT.

    An OUT that ends with `-in-parts`, and all after it, is written as a sharded checkpoint.
    """
    card_name, recipe_name, out = what.split(":")
    card = load_card(folder / f"{card_name}.yaml")
    recipe = load_recipe(folder / f"{recipe_name}.yaml") if recipe_name else None
    if out.endswith("-in-parts"):
        weights.WHOLE_BYTES = 0
    train(card, open_splits(card), folder / out, recipe=recipe, ranks=ranks)


def main() -> None:
    folder = Path(sys.argv[1])
    with join() as ranks:
        for what in sys.argv[2:]:
            run(folder, what, ranks)


if __name__ == "__main__":
    main()
