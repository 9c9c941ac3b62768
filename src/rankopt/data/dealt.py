"""Training rows dealt out so that a global batch is the same whatever the number of ranks.

An epoch is dealt into `row_shards` stretches, each a `RowStream` of its own; the global batch is
the stretches' batches joined in their order. Ranks own whole stretches, or several ranks share one
and each takes a slice of its batches. The slices of all ranks, joined in the order of ranks, are
therefore the batch that one process would train on, row for row.

Shapes: N rows of an epoch, B rows of a global batch, K stretches, W ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from rankopt.data.prefetch import Waits
from rankopt.data.rows import Rows
from rankopt.data.rowsource import RowSource
from rankopt.data.stream import MIN_BATCH, RowStream, StreamSettings
from rankopt.data.stream_state import StreamState, read_state
from rankopt.errors import Problem, UsageError
from rankopt.models.card import ModelCard


class DealtSettings(StreamSettings):
    """How rows are shuffled, and which of them are this rank's.

    Attributes:
        batch_size: B.
        row_shards: K; divides B, and divides W or is divided by it.
        window_rows: rows of a stretch that are shuffled among each other, and held in memory.
        world_size: W.
    """

    row_shards: int = Field(default=1, ge=1)


class DealtState(StreamState):
    """Where a dealt stream stands; the same for all ranks, and for any number of them."""

    row_shards: int


@dataclass(frozen=True)
class Share:
    """One rank's rows of a global batch.

    Attributes:
        rows: the rank's rows, in their order; where it has none, one row of the batch that stands
            in, so that every rank makes the same calls.
        num_own: how many of them are the rank's; 0 where one stands in.
        num_rows: rows of the global batch.
    """

    rows: Rows
    num_own: int
    num_rows: int

    @classmethod
    def whole(cls, rows: Rows) -> Share:
        """Return the share of one process."""
        return cls(rows, len(rows), len(rows))

    @property
    def weight(self) -> float:
        """What the mean over `rows` counts for in the mean over the global batch."""
        return self.num_own / self.num_rows


class DealtStream:
    """One rank's shares of global batches, epoch after epoch.

    Ranks that share a stretch all read it. Rows that fit into one window are read once and kept
    where there is one stretch.

    Args:
        card: what the columns mean.
        source: the rows.
        settings: batches, windows, seed, stretches and rank.

    Attributes:
        epoch: the epoch being handed out, from 0.
        step: global batches of it that were handed out.
        num_rows: N, of all ranks; None where only reading would tell.
        num_steps: batches of an epoch; None where N is.
        waits: how long the caller stood still for each batch.

    Raises:
        UsageError: the stretches do not fit the batch or the ranks.
        DataError: no rows, fewer rows than stretches, or rows the card does not allow.
    """

    def __init__(self, card: ModelCard, source: RowSource, settings: DealtSettings) -> None:
        _check(settings)
        self.settings = settings
        self.waits = Waits()
        self.epoch = self.step = 0
        self._row = 0
        self._where = source.name
        count, num_ranks = settings.row_shards, settings.world_size
        owned = max(1, count // num_ranks)
        self._sharing = max(1, num_ranks // count)
        first = settings.rank * count // num_ranks
        shared = settings.model_dump(include={"window_rows", "seed", "prefetch"})
        self._streams = [
            RowStream(
                card,
                source,
                StreamSettings(
                    **shared,
                    batch_size=settings.batch_size // count,
                    rank=first + index,
                    world_size=count,
                ),
            )
            for index in range(owned)
        ]
        self.num_rows = self._streams[0].total_rows
        self.num_steps = self._streams[0].num_steps

    def batches(self) -> Iterator[Share]:
        """Hand out what is left of the epoch; after its last batch the next epoch begins.

        Left early, it goes on with the batch after the last one handed out.

        Raises:
            DataError: a row the card does not allow, when its turn comes.
        """
        parts_of = zip(*(stream.batches() for stream in self._streams), strict=True)
        while True:
            began_ns = time.perf_counter_ns()
            parts = next(parts_of, None)
            if parts is None:
                break
            share = self._share(Rows.concat(parts))
            self.waits.add(time.perf_counter_ns() - began_ns)
            self.step += 1
            self._row += share.num_rows
            yield share
        self.epoch += 1
        self.step = self._row = 0

    def state(self) -> dict[str, Any]:
        """Describe, as small JSON, what all ranks have handed out: a checkpoint's part."""
        return self._state_at(self.epoch, self.step, self._row).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch handed out before `state` was taken, by any number of ranks.

        Raises:
            UsageError: it is no state of a dealt stream, or of one with other settings or other
                data; everything that differs is listed.
        """
        hint = (
            "Resume with the data, seed, batch size, window and row_shards of the run it is from; "
            "the number of ranks may differ."
        )
        found = read_state(DealtState, state, self._state_at, self._where, hint)
        self.epoch, self.step, self._row = found.epoch, found.step, found.row
        for stream in self._streams:
            row = found.row
            if self.settings.row_shards > 1:
                row = sum(stream.batch_rows(step) for step in range(found.step))
            stream.restore(stream.state() | {"epoch": found.epoch, "step": found.step, "row": row})

    def _state_at(self, epoch: int, step: int, row: int) -> DealtState:
        shared = self.settings.model_dump(include=set(DealtState.model_fields))
        return DealtState(epoch=epoch, step=step, row=row, data=self._streams[0].mark, **shared)

    def _share(self, joined: Rows) -> Share:
        """Take this rank's slice of what its stretches gave."""
        settings = self.settings
        size, position = len(joined), settings.rank % self._sharing
        start, stop = (size * (position + end) // self._sharing for end in (0, 1))
        total = size
        if settings.row_shards > 1:
            total = sum(
                self._streams[0].batch_rows(self.step, stretch)
                for stretch in range(settings.row_shards)
            )
        if self._sharing == 1:
            return Share(joined, size, total)
        if start == stop:
            return Share(joined.slice(0, 1), 0, total)
        return Share(joined.slice(start, stop), stop - start, total)


def _check(settings: DealtSettings) -> None:
    count, num_ranks = settings.row_shards, settings.world_size
    problems = []
    if settings.rank >= num_ranks:
        what = f"must lie in [0, {num_ranks}), the world's size"
        problems.append(Problem("rank", what, settings.rank))
    if count % num_ranks and num_ranks % count:
        divisors = [str(n) for n in range(1, num_ranks) if num_ranks % n == 0]
        what = (
            f"must divide the number of ranks ({num_ranks}) or be a multiple of it: "
            f"{', '.join([*divisors, str(num_ranks)])}, {2 * num_ranks}, {3 * num_ranks} and so on"
        )
        problems.append(Problem("row_shards", what, count))
    if settings.batch_size % count or settings.batch_size // count < MIN_BATCH:
        what = (
            f"must divide the global batch_size ({settings.batch_size}) into batches of at least "
            f"{MIN_BATCH} rows"
        )
        problems.append(Problem("row_shards", what, count))
    if problems:
        raise UsageError(problems=problems)
