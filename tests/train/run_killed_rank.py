"""One of torchrun's processes: train cards, one after the other; used by test_resume_ranks.py.

    run_killed_rank.py FOLDER CARD:RECIPE:OUT...

KILLS, `OUT:STEP,OUT:STEP`, has rank 1 killed before that step of that run: the first when all
processes are started, the second when they are started again.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from rankopt.data.splits import open_splits
from rankopt.models.card import load_card
from rankopt.recipe import load_recipe
from rankopt.train.distributed.ranks import Ranks, join
from rankopt.train.loop import train
from rankopt.train.step import Step

REAL = Step.timed


def kill_before(num_steps: int) -> None:
    calls = []

    def timed(self: Step, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == num_steps:
            os.kill(os.getpid(), signal.SIGKILL)
        return REAL(self, batch)

    Step.timed = timed  # type: ignore[method-assign]


def run(folder: Path, what: str, ranks: Ranks) -> None:
    card_name, recipe_name, out = what.split(":")
    if (folder / out / "metrics.json").exists():  # an earlier start has ended it
        return
    kills = os.environ.get("KILLS", "").split(",")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    place, _, num_steps = kills[attempt].partition(":") if attempt < len(kills) else ("", "", "")
    Step.timed = REAL  # type: ignore[method-assign]
    if place == out and ranks.rank == 1:
        kill_before(int(num_steps))
    card = load_card(folder / f"{card_name}.yaml")
    recipe = load_recipe(folder / f"{recipe_name}.yaml") if recipe_name else None
    tell = lambda line: print(f"{out}: {line}", file=sys.stderr, flush=True)  # noqa: E731
    train(
        card,
        open_splits(card),
        folder / out,
        progress=tell,
        recipe=recipe,
        checkpoint_every=7,
        ranks=ranks,
    )


def main() -> None:
    with join() as ranks:
        for what in sys.argv[2:]:
            run(Path(sys.argv[1]), what, ranks)


if __name__ == "__main__":
    main()
