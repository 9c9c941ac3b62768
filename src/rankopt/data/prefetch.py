"""Make what comes next while the caller is busy with what it has."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

_LOOK_S = 0.05
"""How often a producer that finds no room looks whether it should stop."""


@dataclass
class Waits:
    """How long a consumer stood still for its items.

    Attributes:
        num_items: items handed out.
        total_ns: waited for all of them.
        last_ns: waited for the last one.
        longest_ns: waited for the one that took longest.
    """

    num_items: int = 0
    total_ns: int = 0
    last_ns: int = 0
    longest_ns: int = 0

    def add(self, wait_ns: int) -> None:
        """Count one item."""
        self.num_items += 1
        self.total_ns += wait_ns
        self.last_ns = wait_ns
        self.longest_ns = max(self.longest_ns, wait_ns)


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class _Ended:
    pass


def ahead(items: Iterator[Item], depth: int, waits: Waits | None = None) -> Iterator[Item]:
    """Hand out items in their order while a thread makes up to `depth` of those that follow.

    What the making raises is raised here, after the items before it. Closing the iterator, or
    letting go of it, ends the thread.

    Args:
        items: what is made; with a depth above 0 it runs in the thread alone.
        depth: the most items that wait; 0 makes each when it is asked for, without a thread.
        waits: counts how long each item was waited for.
    """
    counted = waits or Waits()
    line = _Line(items, depth) if depth else None
    taken = line or items
    try:
        while True:
            started_ns = time.perf_counter_ns()
            try:
                item = next(taken)
            except StopIteration:
                return
            counted.add(time.perf_counter_ns() - started_ns)
            yield item
            del item  # or the consumer's last item would live on while the next is waited for
    finally:
        if line is not None:
            line.close()


class _Line(Generic[Item]):
    """A bounded queue and the thread that fills it."""

    def __init__(self, items: Iterator[Item], depth: int) -> None:
        self._items = items
        self._queue: queue.Queue[Item | _Failed | type[_Ended]] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="rankopt-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> _Line[Item]:
        return self

    def __next__(self) -> Item:
        got = self._queue.get()
        if isinstance(got, _Failed):
            raise got.error
        if got is _Ended:
            raise StopIteration
        return got  # type: ignore[return-value]  # what is left is an item

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    return
                del item
            self._put(_Ended)
        except BaseException as error:
            self._put(_Failed(error))

    def _put(self, item: Item | _Failed | type[_Ended]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
