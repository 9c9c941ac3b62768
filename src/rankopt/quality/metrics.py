"""Pointwise quality metrics of one arm, and for each the influence of every row on it.

Every function takes probabilities and 0/1 labels of the same rows. The influence psi of a row is
the derivative of the metric in that row's weight: it has mean zero, and the metric's sampling error
is that of mean(psi). Summing it by cluster, or subtracting it between two arms, gives the error of
a clustered or of a paired metric, so an interval needs no further formula per metric (Hampel, 1974,
"The influence curve and its role in robust estimation").

Shapes: N rows. All arrays are float64 [N].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rankopt.review.schema import CalibrationPoint, PredictionChange

Array = NDArray[np.float64]

LOG_LOSS_EPS = 1e-7
"""Probabilities are held in [eps, 1 - eps] before the logarithm. float32 cannot tell 1 - 6e-8 from
1, so a smaller eps would charge an arm for the precision it reports in and not for what it says."""


def auc(prob_N: Array, labels_N: Array) -> float:
    """Area under the ROC curve; rows of equal score count one half.

    The Mann-Whitney statistic over the pairs of a positive and a negative row, from midranks.
    """
    positive = labels_N == 1
    num_positives = int(positive.sum())
    num_negatives = len(labels_N) - num_positives
    if num_positives == 0 or num_negatives == 0:
        return float("nan")
    rank_sum = float(midranks(prob_N)[positive].sum())
    wins = rank_sum - num_positives * (num_positives + 1) / 2
    return wins / (num_positives * num_negatives)


def auc_influence(prob_N: Array, labels_N: Array) -> Array:
    """Influence of each row on the AUC: its placement among the rows of the other class.

    DeLong, DeLong and Clarke-Pearson (1988), in the O(N log N) form of Sun and Xu (2014), "Fast
    implementation of DeLong's algorithm". Summed by cluster it is the estimator of Obuchowski
    (1997), "Nonparametric analysis of clustered ROC curve data". Each class is scaled by
    sqrt(n / (n - 1)), which makes the unclustered variance DeLong's unbiased one.
    """
    positive = labels_N == 1
    ranks_N = midranks(prob_N)
    num_rows, num_positives = len(labels_N), int(positive.sum())
    num_negatives = num_rows - num_positives
    beaten = (ranks_N[positive] - midranks(prob_N[positive])) / num_negatives
    lost_to = 1 - (ranks_N[~positive] - midranks(prob_N[~positive])) / num_positives
    psi_N = np.empty(num_rows)
    psi_N[positive] = (beaten - beaten.mean()) * num_rows / _unbiased(num_positives)
    psi_N[~positive] = (lost_to - lost_to.mean()) * num_rows / _unbiased(num_negatives)
    return psi_N


def log_loss(prob_N: Array, labels_N: Array) -> float:
    """Mean negative log likelihood in nats, probabilities held in [LOG_LOSS_EPS, 1 - same]."""
    return float(_row_losses(prob_N, labels_N).mean())


def log_loss_influence(prob_N: Array, labels_N: Array) -> Array:
    """Influence of each row on the log loss: its own loss less the mean."""
    loss_N = _row_losses(prob_N, labels_N)
    return np.asarray(loss_N - loss_N.mean())


def normalized_entropy(prob_N: Array, labels_N: Array) -> float:
    """Log loss over the entropy of the label's base rate; 1.0 is a constant prediction.

    He et al. (2014), "Practical lessons from predicting clicks on ads at Facebook", eq. 1.
    """
    rate = float(labels_N.mean())
    if not 0 < rate < 1:
        return float("nan")
    return log_loss(prob_N, labels_N) / _entropy(rate)


def normalized_entropy_influence(prob_N: Array, labels_N: Array) -> Array:
    """Influence of each row on NE, through its loss and through the base rate."""
    rate = float(labels_N.mean())
    entropy = _entropy(rate)
    entropy_slope = np.log((1 - rate) / rate)
    ne = log_loss(prob_N, labels_N) / entropy
    base_N = entropy_slope * (labels_N - rate)
    return np.asarray((log_loss_influence(prob_N, labels_N) - ne * base_N) / entropy)


def calibration(prob_N: Array, labels_N: Array) -> float:
    """Predicted over observed clicks; 1.0 is calibrated, above it the model over-predicts."""
    clicks = float(labels_N.sum())
    return float(prob_N.sum()) / clicks if clicks else float("nan")


def calibration_influence(prob_N: Array, labels_N: Array) -> Array:
    """Influence of each row on predicted over observed clicks."""
    ratio = calibration(prob_N, labels_N)
    return np.asarray((prob_N - ratio * labels_N) / labels_N.mean())


def prediction_change(control_N: Array, candidate_N: Array) -> PredictionChange:
    """Return the largest and the mean absolute change of a row's probability.

    A prediction that is not finite in one arm only counts as a change of 1, the most that a
    probability can move: a row is never left out.
    """
    change_N = np.ones(len(control_N))
    finite = np.isfinite(control_N) & np.isfinite(candidate_N)
    change_N[finite] = np.abs(candidate_N[finite] - control_N[finite])
    change_N[~np.isfinite(control_N) & ~np.isfinite(candidate_N)] = 0.0
    if not len(change_N):
        return PredictionChange(max_abs=0.0, mean_abs=0.0)
    return PredictionChange(max_abs=float(change_N.max()), mean_abs=float(change_N.mean()))


def calibration_curve(
    prob_N: Array, labels_N: Array, num_bins: int = 20
) -> Sequence[CalibrationPoint]:
    """Bin rows by predicted probability into bins of about equal count.

    Equal scores share a bin, so there may be fewer bins than asked for. Rows whose prediction is
    not finite stand in no bin; `num_rows` of the points shows how many are left.
    """
    finite = np.isfinite(prob_N)
    prob, labels = prob_N[finite], labels_N[finite]
    if not len(prob):
        return []
    edges = np.unique(np.quantile(prob, np.linspace(0, 1, num_bins + 1)[1:-1]))
    bin_of_row = np.searchsorted(edges, prob, side="right")
    counts = np.bincount(bin_of_row)
    predicted = np.bincount(bin_of_row, weights=prob)
    observed = np.bincount(bin_of_row, weights=labels)
    return [
        CalibrationPoint(
            mean_predicted=float(predicted[i] / counts[i]),
            observed_rate=float(observed[i] / counts[i]),
            num_rows=int(counts[i]),
        )
        for i in np.flatnonzero(counts)
    ]


def midranks(values_N: Array) -> Array:
    """Rank from 1 upwards, equal values sharing the mean of their ranks."""
    _, inverse_N, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    return np.asarray((last_rank - (counts - 1) / 2)[inverse_N], dtype=np.float64)


def _unbiased(count: int) -> float:
    return float(np.sqrt(count * (count - 1))) if count > 1 else float(count)


def _entropy(rate: float) -> float:
    return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))


def _row_losses(prob_N: Array, labels_N: Array) -> Array:
    held_N = np.clip(prob_N, LOG_LOSS_EPS, 1 - LOG_LOSS_EPS)
    return np.asarray(-np.where(labels_N == 1, np.log(held_N), np.log1p(-held_N)))
