"""Counts of values in a fixed number of cells, from which cardinality, quantiles and drift follow.

Memory does not grow with the rows, and one pass over each split is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankopt.data.hashing import mix

NUM_BUCKETS = 10
MAX_ID_CELLS = 1 << 25
"""Cells of all id columns together; of the reference a cell takes 9 bytes, of a split one."""

_Ints = npt.NDArray[np.int64]
_SHIFT = 16
NUM_REAL_CELLS = 1 << (32 - _SHIFT)
_MAGNITUDE = np.uint32((1 << 31) - 1)
_HIGH_BITS = np.uint32((1 << 32) - (1 << _SHIFT))


def real_cells(values: npt.NDArray[np.float32]) -> _Ints:
    """Give each real number its cell: sign, exponent and seven binary digits, in rising order.

    Numbers of one cell differ by less than 0.8 %.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # -0 + 0 is 0
    negative = bits >> np.uint32(31) == 1
    rising = np.where(negative, ~bits, bits | np.uint32(1 << 31))
    return (rising >> np.uint32(_SHIFT)).astype(np.int64)


def real_value(cell: int) -> float:
    """Return the number of a cell that is nearest to zero; exact for whole ones up to 256."""
    rising = np.uint32(cell << _SHIFT)
    bits = rising & _MAGNITUDE if rising & ~_MAGNITUDE else ~rising & _HIGH_BITS
    return float(bits.view(np.float32))


@dataclass(frozen=True)
class IdCells:
    """Which cell of a table of counts each id has.

    Attributes:
        num_ids: ids lie in [0, num_ids).
        num_cells: as many, so that counts are exact; or fewer, and ids share cells by a hash.
    """

    num_ids: int
    num_cells: int

    @property
    def exact(self) -> bool:
        return self.num_cells == self.num_ids

    def of(self, ids: _Ints) -> _Ints:
        """Return the cell of each id."""
        if self.exact:
            return ids
        return (mix(ids.view(np.uint64)) % np.uint64(self.num_cells)).astype(np.int64)

    def cardinality(self, num_occupied: int) -> int:
        """Return how many ids occupy so many cells.

        Where ids share cells: linear counting (Whang, Vander-Zanden and Taylor, 1990).
        """
        if self.exact:
            return num_occupied
        empty = max(self.num_cells - num_occupied, 0.5)
        return min(round(-self.num_cells * math.log(empty / self.num_cells)), self.num_ids)

    def unseen(self, share: float, num_occupied: int) -> float:
        """Return the share of unseen ids where `share` fell into cells that nobody occupied.

        An unseen id that shares a cell with a seen one passes as seen.
        """
        if self.exact:
            return share
        empty = 1 - num_occupied / self.num_cells
        return min(share / empty, 1.0) if empty > 0 else share


def share_cells(ranges: dict[str, int], budget: int = MAX_ID_CELLS) -> dict[str, IdCells]:
    """Give each id column its cells: the small ones as many as ids, the rest what is left."""
    cells: dict[str, IdCells] = {}
    left = budget
    for place, (column, num_ids) in enumerate(sorted(ranges.items(), key=lambda item: item[1])):
        fair = max(left // (len(ranges) - place), 1)
        cells[column] = IdCells(num_ids, min(num_ids, fair))
        left -= cells[column].num_cells
    return cells


@dataclass(frozen=True)
class Buckets:
    """Cells joined to buckets of about equal weight in the reference.

    Attributes:
        of_cell: the bucket of each cell.
        labels: one a bucket.
        reference: counts of the reference, one a bucket.
    """

    of_cell: npt.NDArray[np.uint8]
    labels: tuple[str, ...]
    reference: _Ints


def real_buckets(counts: _Ints) -> Buckets | None:
    """Join neighbouring cells of real numbers to tenths; None where the reference has none."""
    total = int(counts.sum())
    if not total:
        return None
    of_cell = _tenths(counts, total)
    used = np.bincount(of_cell, minlength=NUM_BUCKETS, weights=counts) > 0
    # A tenth within which no value of the reference lies joins the next that has one.
    joined = np.minimum(np.cumsum(used)[of_cell] - used[of_cell], used.sum() - 1)
    reference = np.bincount(joined, weights=counts).astype(np.int64)
    labels = []
    for bucket in range(len(reference)):
        cells = np.flatnonzero((joined == bucket) & (counts > 0))
        low, high = real_value(int(cells[0])), real_value(int(cells[-1]))
        labels.append(f"{low:.3g}" if cells[0] == cells[-1] else f"{low:.3g} to {high:.3g}")
    return Buckets(joined.astype(np.uint8), tuple(labels), reference)


def id_buckets(made_by: npt.NDArray[np.uint32], held_out: npt.NDArray[np.uint32]) -> Buckets | None:
    """Join ids to tenths by their frequency in one half of the reference, unseen ones apart.

    The reference's counts are those of the other half. Counts of the same half would be those of
    ids that were chosen for being frequent there, and no id of it is unseen: rows of the very same
    kind would seem to have drifted.
    """
    total = int(made_by.sum(dtype=np.int64))
    if not total or not held_out.any():
        return None
    ranked = np.argsort(-made_by.astype(np.int64), kind="stable")
    ranked = ranked[: int(np.count_nonzero(made_by))]
    tenths = _tenths(made_by[ranked].astype(np.int64), total)
    present, position = np.unique(tenths, return_inverse=True)
    unseen = len(present)
    of_cell = np.full(len(made_by), unseen, dtype=np.uint8)
    of_cell[ranked] = position
    reference = np.bincount(of_cell, weights=held_out, minlength=unseen + 1).astype(np.int64)
    ends = np.searchsorted(position, np.arange(unseen), side="right")
    starts = np.concatenate([[0], ends[:-1]])
    labels = [
        f"rank {low + 1:,}" if high == low + 1 else f"ranks {low + 1:,} to {high:,}"
        for low, high in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    return Buckets(of_cell, (*labels, "rarer or new"), reference)


def _tenths(counts: _Ints, total: int) -> _Ints:
    """Return the tenth of the total in which the middle of each cell's counts falls."""
    middle = np.cumsum(counts) - counts / 2
    return np.minimum((middle * NUM_BUCKETS / total).astype(np.int64), NUM_BUCKETS - 1)


def stability_index(reference: _Ints, values: _Ints) -> tuple[float, float] | None:
    """Return the population stability index of two lists of counts, and its noise.

    The index is the sum over buckets of (p - q) ln(p / q), with p and q the shares of the two; half
    a count is added to each bucket, so that an empty one is not infinitely far. Where both are
    draws of the same kind, the index is about (1/n + 1/m) times chi-square of one degree fewer than
    buckets (Yurdakul, 2018), whose mean is the noise.

    Returns:
        None where one of the two has no counts.
    """
    if not reference.sum() or not values.sum():
        return None
    p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (values, reference))
    index = float(((p - q) * np.log(p / q)).sum())
    noise = (len(reference) - 1) * (1 / float(reference.sum()) + 1 / float(values.sum()))
    return index, noise
