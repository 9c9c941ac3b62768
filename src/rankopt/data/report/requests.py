"""Rows per request, in bounded memory and wherever a request's rows stand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankopt.data.hashing import mix
from rankopt.data.report.schema import RequestReport

MAX_REQUESTS = 1 << 20
_HASH_BITS = 64

_Hashes = npt.NDArray[np.uint64]


class RequestTally:
    """Rows of each request, or of a sample of the requests once there are too many.

    A request is kept while its hash lies in the lower part of all hashes; the part is halved
    whenever more than `capacity` are kept (adaptive sampling: Flajolet, 1990). Which requests are
    kept does not depend on how many rows they have, so the sample's distribution is unbiased.
    """

    def __init__(self, key: str, capacity: int = MAX_REQUESTS) -> None:
        self._key = key
        self._capacity = capacity
        self._level = 0
        self._num_null = 0
        self._keys: _Hashes = np.empty(0, dtype=np.uint64)
        self._counts = np.empty(0, dtype=np.int64)
        self._new: list[_Hashes] = []
        self._num_new = 0

    def add(self, hashes: _Hashes, missing: npt.NDArray[np.bool_]) -> None:
        """Count the rows of a batch by the hash of their key."""
        self._num_null += int(missing.sum())
        mixed = mix(hashes)  # a split made by this very hash holds one part of its range alone
        kept = mixed[~missing & self._is_kept(mixed)]
        self._new.append(kept)
        self._num_new += len(kept)
        if self._num_new >= self._capacity // 4:
            self._merge()

    def report(self) -> RequestReport:
        """Say how many requests there are and how many rows they have."""
        self._merge()
        counts = self._counts
        exact = self._level == 0
        known = len(counts) > 0
        p50, p90, p99 = (
            np.percentile(counts, [50, 90, 99], method="inverted_cdf").astype(int).tolist()
            if known
            else (None, None, None)
        )
        return RequestReport(
            key=self._key,
            num_null=self._num_null,
            num_requests=len(counts) << self._level,
            exact=exact,
            mean=float(counts.mean()) if known else None,
            p50=p50,
            p90=p90,
            p99=p99,
            # The longest request of all need not be in the sample.
            max=int(counts.max()) if known and exact else None,
        )

    def _merge(self) -> None:
        keys = np.concatenate([self._keys, *self._new])
        counts = np.concatenate([self._counts, np.ones(self._num_new, dtype=np.int64)])
        self._new, self._num_new = [], 0
        self._keys, place = np.unique(keys, return_inverse=True)
        self._counts = np.zeros(len(self._keys), dtype=np.int64)
        np.add.at(self._counts, place, counts)
        while len(self._keys) > self._capacity:
            self._level += 1
            kept = self._is_kept(self._keys)
            self._keys, self._counts = self._keys[kept], self._counts[kept]

    def _is_kept(self, hashes: _Hashes) -> npt.NDArray[np.bool_]:
        if not self._level:
            return np.ones(len(hashes), dtype=np.bool_)
        return np.asarray(hashes >> np.uint64(_HASH_BITS - self._level) == 0)
