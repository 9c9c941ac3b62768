"""Encoded rows: the flat tensors a model takes, with labels and clusters beside them.

Shapes: N rows, F features of a KeyedJaggedTensor (1 for a ragged input), L ids of all bags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput


def bag_counts(card: ModelCard) -> dict[str, int]:
    """Map each input that holds bags to how many it holds a row: 1 if ragged, F for a KJT."""
    counts = {}
    for item in card.inputs:
        if isinstance(item, RaggedIdsInput):
            counts[item.name] = 1
        elif isinstance(item, KjtInput):
            counts[item.name] = len(item.features)
    return counts


@dataclass(frozen=True)
class Rows:
    """Some rows of a source, ready for an arm.

    Attributes:
        features: tensors by their names in the card. Of an input with bags, `name.lengths` is
            int64 [F * N], feature-major, and `name.values` int64 [L] in the same order.
        labels: float64 [N] of zeros and ones by label column; empty when read without labels.
        clusters: int64 [N], equal where rows share the card's request key; None without a key.
        num_rows: N.
        bags: `bag_counts` of the card: how `features` is to be cut.
    """

    features: dict[str, Tensor]
    labels: dict[str, npt.NDArray[np.float64]]
    clusters: npt.NDArray[np.int64] | None
    num_rows: int
    bags: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_rows

    def slice(self, start: int, stop: int) -> Rows:
        """Return rows [start, stop), clipped as Python slices are; a view where one is possible."""
        start, stop, _ = slice(start, stop).indices(self.num_rows)
        stop = max(start, stop)
        features = {name: self.features[name][start:stop] for name in self._fixed}
        for name, num_features in self.bags.items():
            bounds = self._offsets[name]
            ends = [
                (feature * self.num_rows + start, feature * self.num_rows + stop)
                for feature in range(num_features)
            ]
            lengths = self.features[f"{name}.lengths"]
            features[f"{name}.lengths"] = _join([lengths[a:b] for a, b in ends])
            for part in self._parts(name):
                values = self.features[part]
                features[part] = _join([values[bounds[a] : bounds[b]] for a, b in ends])
        clusters = None if self.clusters is None else self.clusters[start:stop]
        labels = {name: label[start:stop] for name, label in self.labels.items()}
        return self._like(features, labels, clusters, stop - start)

    def take(self, indices: Tensor | npt.NDArray[Any] | Sequence[int]) -> Rows:
        """Return the rows at `indices`, in that order; one may be taken several times.

        Raises:
            IndexError: an index is outside [0, num_rows).
        """
        picked = torch.as_tensor(indices, dtype=torch.int64).reshape(-1)
        if len(picked) and not (int(picked.min()) >= 0 and int(picked.max()) < self.num_rows):
            raise IndexError(f"row indices must lie in [0, {self.num_rows})")
        features = {name: self.features[name][picked] for name in self._fixed}
        for name, num_features in self.bags.items():
            shifts = torch.arange(num_features)[:, None] * self.num_rows
            bags = (shifts + picked[None, :]).reshape(-1)
            lengths = self.features[f"{name}.lengths"][bags]
            features[f"{name}.lengths"] = lengths
            positions = bag_positions(self._offsets[name][bags], lengths)
            for part in self._parts(name):
                features[part] = self.features[part][positions]
        rows = picked.numpy()
        clusters = None if self.clusters is None else self.clusters[rows]
        labels = {name: label[rows] for name, label in self.labels.items()}
        return self._like(features, labels, clusters, len(picked))

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Put rows of one card below each other.

        Raises:
            ValueError: there are no parts.
        """
        if not parts:
            raise ValueError("concat needs at least one part")
        first = parts[0]
        if len(parts) == 1:
            return first
        features = {name: _join([part.features[name] for part in parts]) for name in first._fixed}
        for name in first.bags:
            features.update(_concat_bags(name, parts))
        clusters = None
        if first.clusters is not None:
            clusters = np.concatenate([p.clusters for p in parts if p.clusters is not None])
        labels = {name: np.concatenate([p.labels[name] for p in parts]) for name in first.labels}
        return first._like(features, labels, clusters, sum(part.num_rows for part in parts))

    @cached_property
    def _fixed(self) -> tuple[str, ...]:
        """Tensors with one entry a row."""
        return tuple(name for name in self.features if name.rpartition(".")[0] not in self.bags)

    @cached_property
    def _offsets(self) -> dict[str, Tensor]:
        """Where each bag begins, [F * N + 1], by input; kept, since every slice asks."""
        return {name: _offsets(self.features[f"{name}.lengths"]) for name in self.bags}

    def _parts(self, name: str) -> list[str]:
        return [p for p in (f"{name}.values", f"{name}.weights") if p in self.features]

    def _like(
        self,
        features: dict[str, Tensor],
        labels: dict[str, npt.NDArray[np.float64]],
        clusters: npt.NDArray[np.int64] | None,
        num_rows: int,
    ) -> Rows:
        ordered = {name: features[name] for name in self.features}
        return Rows(ordered, labels, clusters, num_rows, self.bags)


def bag_positions(starts: Tensor, lengths: Tensor) -> Tensor:
    """List the positions of the values of bags that begin at `starts`, [sum of lengths]."""
    shifts = starts - (_offsets(lengths)[:-1])
    return torch.repeat_interleave(shifts, lengths) + torch.arange(int(lengths.sum()))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _join(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _concat_bags(name: str, parts: Sequence[Rows]) -> dict[str, Tensor]:
    """Interleave the features of several parts, so that each feature's rows stand together."""
    pieces: dict[str, list[Tensor]] = {}
    for feature in range(parts[0].bags[name]):
        for part in parts:
            a, b = feature * part.num_rows, (feature + 1) * part.num_rows
            bounds = part._offsets[name]
            lengths = part.features[f"{name}.lengths"][a:b]
            pieces.setdefault(f"{name}.lengths", []).append(lengths)
            for tensor in part._parts(name):
                values = part.features[tensor][bounds[a] : bounds[b]]
                pieces.setdefault(tensor, []).append(values)
    return {tensor: _join(listed) for tensor, listed in pieces.items()}
