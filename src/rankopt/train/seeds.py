"""Whole training runs over several seeds, each in a process of its own, and what they differ in."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from rankopt.bench.backend import driver_import_path
from rankopt.errors import UsageError
from rankopt.quality.registry import find_metric
from rankopt.review.schema import MetricParity, Verdict

CONFIDENCE = 0.95
MIN_SEEDS = 2
_RELATIVE = frozenset({"ne", "log_loss"})
_NUM_LINES = 12

Metrics = dict[str, Any]


def train_seeds(
    card: Path,
    recipes: Mapping[str, Path | None],
    seeds: Sequence[int],
    folder: Path,
    *,
    data: str | Path | None = None,
    num_threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Metrics]]:
    """Train every arm once per seed, the arms of a seed one after the other in turning order.

    Args:
        card: the model card.
        recipes: arm -> its training recipe; None for plain PyTorch.
        seeds: of initial weights and row order, the same for all arms.
        folder: gets ARM-SEED/, what `rankopt train` writes; runs that are there are kept.
        data: rows in place of the card's.
        num_threads: of PyTorch.
        progress: told one line per run.

    Returns:
        Arm -> metrics.json of each seed, in the seeds' order.

    Raises:
        UsageError: a run failed.
    """
    flags = ["--data", str(data)] if data is not None else []
    flags += ["--num-threads", str(num_threads)] if num_threads else []
    found: dict[str, list[Metrics]] = {arm: [] for arm in recipes}
    for index, seed in enumerate(seeds):
        arms = list(recipes) if index % 2 == 0 else list(recipes)[::-1]
        for arm in arms:
            out = folder / f"{arm}-{seed}"
            progress(f"training {arm}, seed {seed} ({index + 1} of {len(seeds)})")
            if not (out / "metrics.json").exists():
                _train(card, recipes[arm], seed, out, flags)
            found[arm].append(json.loads((out / "metrics.json").read_text(encoding="utf-8")))
    return found


def _train(card: Path, recipe: Path | None, seed: int, out: Path, flags: Sequence[str]) -> None:
    command = [sys.executable, "-P", "-m", "rankopt", "train", str(card), "--out", str(out)]
    command += ["--seed", str(seed), *flags]
    command += ["--recipe", str(recipe)] if recipe else []
    # The same code as this process, wherever it was imported from.
    environment = {**os.environ, "PYTHONPATH": driver_import_path()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        tail = "\n".join(done.stderr.strip().splitlines()[-_NUM_LINES:])
        raise UsageError(f"rankopt train, seed {seed}, ended with {done.returncode}:\n{tail}")


def compare_seeds(
    metric: str,
    control: Sequence[float],
    candidate: Sequence[float],
    margin: float,
    num_rows: int,
) -> MetricParity:
    """Judge a metric by its change over seeds, paired by seed.

    The interval is Student's t interval of the mean change: between seeds the change has the noise
    of training, which the rows of one run cannot show. Non-inferior when the harmful end of the
    interval is within the margin.

    Args:
        metric: its name; a change of `ne` and `log_loss` is relative.
        control: one value per seed.
        candidate: of the same seeds.
        margin: the harm allowed, positive.
        num_rows: rows that each value was computed on.
    """
    before, after = np.asarray(control, float), np.asarray(candidate, float)
    changes = after / before - 1 if metric in _RELATIVE else after - before
    known = find_metric(metric)
    direction = known.direction if known is not None else "lower"
    count = len(changes)
    interval: tuple[float, float] | None = None
    reason: str | None = f"an interval needs at least {MIN_SEEDS} seeds"
    verdict: Verdict = "inconclusive"
    delta = float(changes.mean())
    if count >= MIN_SEEDS:
        error = float(changes.std(ddof=1)) / math.sqrt(count)
        half = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) * error
        interval = delta - half, delta + half
        harm_low, harm_high = interval if direction == "lower" else (-interval[1], -interval[0])
        verdict = "pass" if harm_high <= margin else "fail" if harm_low > margin else "inconclusive"
        reason = None
        if verdict == "inconclusive":
            reason = "the noise between seeds leaves both sides of the margin open; add seeds"
    return MetricParity(
        control=float(before.mean()),
        candidate=float(after.mean()),
        delta=delta,
        ci_low=interval[0] if interval else None,
        ci_high=interval[1] if interval else None,
        margin=margin,
        direction=direction,
        num_rows=num_rows,
        num_clusters=count,
        verdict=verdict,
        reason=reason,
    )
