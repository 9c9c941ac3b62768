"""Batches of training rows: shuffled in windows, and made ready beside the step where asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankopt.data.encode import Rows, iter_rows, load_rows
from rankopt.data.rowsource import RowSource
from rankopt.models.card import ModelCard

_POLL_S = 0.1


class Windows:
    """Training rows in shuffled windows; a split that fits into one window is read once."""

    def __init__(self, card: ModelCard, source: RowSource, window_rows: int) -> None:
        self.card = card
        self.source = source
        self.window_rows = window_rows
        fits = source.num_rows is not None and source.num_rows <= window_rows
        self.rows = load_rows(card, source) if fits else None
        self.num_rows = self.rows.num_rows if self.rows else None

    def batches(self, shuffle: np.random.Generator, batch_size: int) -> Iterator[Rows]:
        """Go once over the rows, in an order that `shuffle` draws."""
        for window in self._windows():
            order = shuffle.permutation(window.num_rows)
            for start in range(0, window.num_rows, batch_size):
                chosen = order[start : start + batch_size]
                if len(chosen) > 1:  # batch statistics need two rows
                    yield window.take(chosen)

    def _windows(self) -> Iterator[Rows]:
        if self.rows is not None:
            yield self.rows
            return
        yield from iter_rows(self.card, self.source, self.window_rows)


@dataclass(frozen=True)
class _Failure:
    error: BaseException


def prefetched(batches: Iterator[Rows], depth: int) -> Iterator[Rows]:
    """Yield the same batches in the same order, made by a thread at most `depth` ahead.

    An exception of the thread is raised where its batch would have come. Leaving early ends the
    thread within a tenth of a second after the batch it is at.
    """
    ready: queue.Queue[Rows | _Failure | None] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def put(item: Rows | _Failure | None) -> bool:
        while not stopped.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def run() -> None:
        try:
            for batch in batches:
                if not put(batch):
                    return
            put(None)
        except BaseException as error:
            put(_Failure(error))

    thread = threading.Thread(target=run, name="rankopt-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        thread.join()
