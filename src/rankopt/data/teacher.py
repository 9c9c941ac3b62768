"""The planted teacher of synthetic data: a logistic model with pairwise interactions.

Shapes: N rows, T tables, K latent dimensions, L ids of all bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankopt.data.hashing import mix

_CODEBOOK_ROWS = 4096
_TEACHER_STREAM = 1_000_003
_BISECTIONS = 60

_Floats = npt.NDArray[np.float64]
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Draws:
    """Features of some rows.

    Attributes:
        dense: [N, dense columns].
        ids: int64 [N] of each table.
        bags: values [L] and lengths [N] of each ragged column.
    """

    dense: _Floats
    ids: Sequence[_Ints]
    bags: Sequence[tuple[_Ints, _Ints]]


class Teacher:
    """Scores rows by dense weights, one bias per id, products of latent vectors, and bag means.

    A table of more than 4,096 ids shares that many latent rows among its ids, so that memory does
    not grow with the tables; which ids share is scrambled.
    """

    def __init__(
        self,
        *,
        table_sizes: Sequence[int],
        ragged_sizes: Sequence[int],
        num_dense: int,
        latent_dim: int,
        num_interactions: int,
        seed: int,
    ) -> None:
        rng = np.random.default_rng([seed, _TEACHER_STREAM])
        self._weights = rng.standard_normal(num_dense)
        self._sizes = (*table_sizes, *ragged_sizes)
        rows = [min(size, _CODEBOOK_ROWS) for size in self._sizes]
        self._biases = [rng.standard_normal(count) for count in rows]
        self._latent = [rng.standard_normal((count, latent_dim)) for count in rows]
        # Later features of the list are the bags, so they take part in interactions like tables.
        num_features = len(self._sizes)
        pairs = [(a, b) for a in range(num_features) for b in range(a + 1, num_features)]
        chosen = rng.permutation(len(pairs))[:num_interactions]
        self._pairs = [pairs[index] for index in chosen]
        self._pair_weights = rng.standard_normal(len(self._pairs)) / np.sqrt(latent_dim)
        self._scale, self._shift = 1.0, 0.0

    def calibrate(self, sample: Draws, logit_std: float, click_rate: float) -> None:
        """Set scale and shift so that a sample has the spread and the mean probability asked."""
        raw = self._raw(sample)
        self._scale = logit_std / max(float(raw.std()), 1e-12)
        logits = self._scale * raw
        low, high = -float(logits.max()) - 40, -float(logits.min()) + 40
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            if _sigmoid(logits + middle).mean() < click_rate:
                low = middle
            else:
                high = middle
        self._shift = (low + high) / 2

    def probability(self, draws: Draws) -> _Floats:
        """Return the chance of a click, [N], kept within [1e-9, 1 - 1e-9]."""
        chance = _sigmoid(self._scale * self._raw(draws) + self._shift)
        return np.clip(chance, 1e-9, 1 - 1e-9)

    def _raw(self, draws: Draws) -> _Floats:
        logits: _Floats = draws.dense @ self._weights
        vectors = []
        for feature, ids in enumerate(draws.ids):
            code = self._code(feature, ids)
            logits = logits + self._biases[feature][code]
            vectors.append(self._latent[feature][code])
        for feature, (values, lengths) in enumerate(draws.bags, start=len(draws.ids)):
            code = self._code(feature, values)
            logits = logits + _bag_mean(self._biases[feature][code][:, None], lengths)[:, 0]
            vectors.append(_bag_mean(self._latent[feature][code], lengths))
        for (a, b), weight in zip(self._pairs, self._pair_weights, strict=True):
            logits = logits + weight * np.einsum("nk,nk->n", vectors[a], vectors[b])
        return logits

    def _code(self, feature: int, ids: _Ints) -> _Ints:
        if self._sizes[feature] <= _CODEBOOK_ROWS:
            return ids
        scrambled = mix(ids.astype(np.uint64) + np.uint64(feature << 40))
        return (scrambled % np.uint64(_CODEBOOK_ROWS)).astype(np.int64)


def _bag_mean(values_LK: _Floats, lengths: _Ints) -> _Floats:
    """Average each bag, [N, K]; an empty bag gives zeros."""
    sums = np.vstack([np.zeros((1, values_LK.shape[1])), np.cumsum(values_LK, axis=0)])
    ends = np.cumsum(lengths)
    means: _Floats = (sums[ends] - sums[ends - lengths]) / np.maximum(lengths, 1)[:, None]
    return means


def _sigmoid(logits: _Floats) -> _Floats:
    out: _Floats = 0.5 * (1 + np.tanh(0.5 * logits))
    return out
