"""What predictions and labels must be before two arms can be compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from rankopt.errors import DataError, Problem
from rankopt.quality.bootstrap import Codes
from rankopt.quality.metrics import Array

PROBABILITY_SLACK = 1e-6
"""float32 rounding that a probability may stand outside [0, 1] by."""


def float_rows(values: ArrayLike) -> Array:
    """Read one number per row as float64 [N], from [N] or [N, 1]."""
    return np.asarray(values, dtype=np.float64).reshape(-1)


def check_rows(
    control_N: Array, candidate_N: Array, labels_N: Array, clusters_N: Codes | None
) -> None:
    """Refuse predictions and labels that no comparison can be made from.

    A candidate that is not finite is not refused: it is a finding about the candidate.

    Raises:
        DataError: lengths differ, there are no rows, labels are neither 0, 1 nor NaN (no label),
            the control predicts a value that is not finite, or an arm predicts outside [0, 1].
    """
    lengths = {"control": len(control_N), "candidate": len(candidate_N), "labels": len(labels_N)}
    if clusters_N is not None:
        lengths["clusters"] = len(clusters_N)
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} {count}" for name, count in lengths.items())
        raise DataError(
            f"Quality: both arms, labels and clusters must have the same rows; got {got}. "
            "Score both arms on the same data."
        )
    _check_labels(labels_N)
    problems = [
        problem
        for arm, prob_N in (("control", control_N), ("candidate", candidate_N))
        for problem in _range_problems(arm, prob_N)
    ]
    broken = np.flatnonzero(~np.isfinite(control_N))
    if len(broken):
        problems.append(
            Problem(
                "predictions of the control",
                f"must be finite; {len(broken):,} of {len(control_N):,} rows are NaN or inf, the "
                f"first is row {broken[0]}",
                hint="The control is what the candidate is judged by: check its checkpoint.",
            )
        )
    if problems:
        raise DataError(problems=problems)


def _check_labels(labels_N: Array) -> None:
    if not len(labels_N):
        raise DataError("labels: there are no rows. Quality needs labelled rows of both classes.")
    wrong = np.flatnonzero((labels_N != 0) & (labels_N != 1) & ~np.isnan(labels_N))
    if len(wrong):
        where = f"labels: row {wrong[0]}"
        raise DataError(problems=[Problem(where, "must be 0 or 1", float(labels_N[wrong[0]]))])


def _range_problems(arm: str, prob_N: Array) -> list[Problem]:
    outside = np.flatnonzero(
        np.isfinite(prob_N) & ((prob_N < -PROBABILITY_SLACK) | (prob_N > 1 + PROBABILITY_SLACK))
    )
    if not len(outside):
        return []
    return [
        Problem(
            f"predictions of the {arm}: row {outside[0]}",
            "must be a probability from 0 to 1",
            float(prob_N[outside[0]]),
            "Check the output's `activation` in the model card: a module that returns logits needs "
            "`activation: logit`.",
        )
    ]
