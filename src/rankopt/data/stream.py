"""Training rows: shuffled by window, dealt out to ranks, resumable at the exact row.

The rows of an epoch are the pieces of the source (row groups, files) in an order drawn for that
epoch, end to end. Each rank takes one stretch of them, as long as any other's to a row, so it opens
only the pieces that its stretch meets. A stretch is cut into windows of `window_rows`; each window
is held encoded, in an order drawn for it, and batches are cut from one window after the other.

Every draw is seeded by the seed and the place it is for, never by what was drawn before. So epoch,
and rows handed out of it, are all that a resumed stream needs.

Shapes: N rows of a rank in an epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from rankopt.data.encode import encode, load_rows, wanted_columns
from rankopt.data.pieces import Piece, count_rows, fingerprint, pieces_of
from rankopt.data.prefetch import Waits, ahead
from rankopt.data.rows import Rows
from rankopt.data.rowsource import BATCH_ROWS, RowSource
from rankopt.data.stream_state import StreamState, read_state
from rankopt.errors import DataError, Problem, UsageError
from rankopt.models.card import ModelCard

MIN_BATCH = 2
"""Batch statistics need two rows: a shorter last batch is joined to the one before it."""

_PIECES, _WINDOW = 0, 1
"""What a draw is for: a stream of random numbers of its own."""


class StreamSettings(BaseModel):
    """How rows are shuffled and dealt out.

    Attributes:
        batch_size: rows of a batch of one rank. The last batch of an epoch is shorter, or up to
            two rows longer where it would else have less than two.
        window_rows: rows that are shuffled among each other, and held in memory.
        seed: of the order of pieces and rows; the same on all ranks.
        rank: whose rows these are, in [0, world_size).
        world_size: ranks that share the rows.
        prefetch: batches made ahead of the caller; 0 makes each when it is asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int = Field(gt=1)
    window_rows: int = Field(default=262_144, gt=1)
    seed: int = Field(default=0, ge=0)
    rank: int = Field(default=0, ge=0)
    world_size: int = Field(default=1, ge=1)
    prefetch: int = Field(default=2, ge=0)


class RankState(StreamState):
    """Where one rank's stream stands."""

    rank: int
    world_size: int


class RowStream:
    """Encoded batches of a source, epoch after epoch.

    Rows that fit into one window are read once and kept. Otherwise a window, the one being read
    and the batches made ahead are all that is held.

    Args:
        card: what the columns mean.
        source: the rows. Where only reading tells how many there are (text), several ranks count
            them once, by reading one column.
        settings: batches, windows, seed and rank.

    Attributes:
        epoch: the epoch being handed out, from 0.
        step: batches of it that were handed out.
        num_rows: N; None where one rank reads a source that does not know.
        total_rows: rows of all ranks in an epoch; None where N is.
        num_steps: batches of an epoch, the same on all ranks; None where N is.
        waits: how long the caller stood still for each batch.

    Raises:
        UsageError: the rank is not one of the world's.
        DataError: no rows, fewer rows than ranks, or rows the card does not allow.
    """

    def __init__(self, card: ModelCard, source: RowSource, settings: StreamSettings) -> None:
        _check_rank(settings)
        self.settings = settings
        self.epoch = self.step = 0
        self.waits = Waits()
        self._row = 0
        self._card = card
        self._source = source
        self._columns = wanted_columns(card, source.column_names(), source.name)
        self._pieces = pieces_of(source)
        self._mark = fingerprint(self._pieces)
        if settings.world_size > 1:
            self._pieces = tuple(count_rows(piece, self._columns) for piece in self._pieces)
        total = _total(self._pieces)
        self._kept: Rows | None = None
        if settings.world_size == 1 and self._fits(total):
            self._kept = load_rows(card, source)
            total = self._kept.num_rows
        if total is not None and total < settings.world_size:
            what = f"must hold a row for each of {settings.world_size} ranks"
            raise DataError(problems=[Problem(source.name, what, total)])
        self.total_rows = total
        self._low, self.num_rows = _stretch(total, settings, settings.rank)
        self.num_steps = None if total is None else _num_steps(total, settings)

    def batches(self) -> Iterator[Rows]:
        """Hand out what is left of the epoch; after its last batch the next epoch begins.

        Left early, it goes on with the batch after the last one handed out.

        Raises:
            DataError: a row the card does not allow, when its turn comes.
        """
        made = self._cut(self.epoch, self.step, self._row)
        for batch in ahead(made, self.settings.prefetch, self.waits):
            self.step += 1
            self._row += batch.num_rows
            yield batch
        self.epoch += 1
        self.step = self._row = 0

    @property
    def mark(self) -> str:
        """A fingerprint of the sizes of the source's pieces."""
        return self._mark

    def batch_rows(self, step: int, rank: int | None = None) -> int:
        """Return the rows of one batch of an epoch.

        Args:
            step: which one, in [0, num_steps).
            rank: whose; None for this stream's own.

        Raises:
            ValueError: the source does not know how many rows it has.
        """
        settings = self.settings
        own = settings.rank if rank is None else rank
        num_rows = _stretch(self.total_rows, settings, own)[1]
        if num_rows is None or self.num_steps is None:
            raise ValueError(f"{self._source.name} does not know how many rows it has")
        if step < self.num_steps - 1:
            return settings.batch_size
        return num_rows - (self.num_steps - 1) * settings.batch_size

    def state(self) -> dict[str, Any]:
        """Describe, as small JSON, what was handed out: a checkpoint's part of the stream."""
        return self._state_at(self.epoch, self.step, self._row).model_dump(mode="json")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on after the last batch that was handed out before `state` was taken.

        Raises:
            UsageError: it is no state of a stream, or of one with other settings or other data;
                everything that differs is listed.
        """
        hint = "Resume with the data, seed, batch size, window and ranks of the run it is from."
        found = read_state(RankState, state, self._state_at, self._source.name, hint)
        self.epoch, self.step, self._row = found.epoch, found.step, found.row

    def _state_at(self, epoch: int, step: int, row: int) -> RankState:
        shared = self.settings.model_dump(exclude={"prefetch"})
        return RankState(epoch=epoch, step=step, row=row, data=self._mark, **shared)

    def _fits(self, total: int | None) -> bool:
        """Tell whether all rows go into one window, reading so many where none says."""
        window_rows = self.settings.window_rows
        if total is not None:
            return total <= window_rows
        num_rows = 0
        for batch in self._source.batches(self._columns, min(window_rows, BATCH_ROWS)):
            num_rows += batch.num_rows
            if num_rows > window_rows:
                return False
        return True

    def _cut(self, epoch: int, step: int, row: int) -> Iterator[Rows]:
        """Cut the rest of an epoch into batches."""
        size, window_rows = self.settings.batch_size, self.settings.window_rows
        if self.num_rows is not None and row >= self.num_rows:
            return
        held: Rows | None = None
        first = 0 if self._kept is not None else row // window_rows
        skipped = row - first * window_rows
        for number, window in enumerate(self._windows(epoch, first), first):
            order = self._draw(_WINDOW, epoch, self.settings.rank, number).permutation(len(window))
            order, skipped = order[skipped:], 0
            while self._is_full(step, _length(held) + len(order)):
                missing = max(size - _length(held), 0)
                joined = _join(held, window.take(order[:missing]))
                order = order[missing:]
                held = joined.slice(size, len(joined)) if len(joined) > size else None
                step += 1
                yield joined if held is None else joined.slice(0, size)
            held = _join(held, window.take(order))
            del window  # it would live on while the next is read
        if held is not None and len(held):
            yield held

    def _is_full(self, step: int, num_rows: int) -> bool:
        """Tell whether a batch may be cut from so many rows and leave enough for the last one."""
        if self.num_steps is not None:
            return step < self.num_steps - 1 and num_rows >= self.settings.batch_size
        return num_rows >= self.settings.batch_size + MIN_BATCH

    def _windows(self, epoch: int, first: int) -> Iterator[Rows]:
        """Read windows from number `first` on, unshuffled."""
        if self._kept is not None:
            yield self._kept
            return
        window_rows = self.settings.window_rows
        held: list[Rows] = []
        num_held = 0
        for read in self._read(epoch, first * window_rows):
            rows = read
            while num_held + len(rows) >= window_rows:
                missing = window_rows - num_held
                window = Rows.concat([*held, rows.slice(0, missing)])
                rows = rows.slice(missing, len(rows))
                held, num_held = [], 0
                yield window
                del window
            if len(rows):
                held.append(rows)
                num_held += len(rows)
        if held:
            yield Rows.concat(held)

    def _read(self, epoch: int, start: int) -> Iterator[Rows]:
        """Read and encode this rank's rows of an epoch, from number `start` on."""
        skipped = self._low + start
        left = math.inf if self.num_rows is None else self.num_rows - start
        batch_rows = min(self.settings.window_rows, BATCH_ROWS)
        for piece in self._in_order(epoch):
            if left <= 0:
                return
            if piece.num_rows is not None and piece.num_rows <= skipped:
                skipped -= piece.num_rows
                continue
            for batch, numbers in piece.read(self._columns, batch_rows):
                begin = min(skipped, batch.num_rows)
                stop = int(min(batch.num_rows, begin + left))
                skipped -= begin
                left -= stop - begin
                if stop > begin:
                    yield encode(
                        self._card,
                        batch.slice(begin, stop - begin),
                        source_name=piece.where,
                        row_numbers=numbers[begin:stop],
                    )
                if left <= 0:
                    break

    def _in_order(self, epoch: int) -> list[Piece]:
        order = self._draw(_PIECES, epoch).permutation(len(self._pieces))
        return [self._pieces[index] for index in order]

    def _draw(self, *place: int) -> np.random.Generator:
        return np.random.default_rng([self.settings.seed, *place])


def _check_rank(settings: StreamSettings) -> None:
    if settings.rank >= settings.world_size:
        what = f"must lie in [0, {settings.world_size}), the world's size"
        raise UsageError(problems=[Problem("rank", what, settings.rank)])


def _total(pieces: tuple[Piece, ...]) -> int | None:
    counts = [piece.num_rows for piece in pieces]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _stretch(total: int | None, settings: StreamSettings, rank: int) -> tuple[int, int | None]:
    """Return the first row of a rank among the rows of all, and how many are its own."""
    if total is None:
        return 0, None
    ends = [(rank + end) * total // settings.world_size for end in (0, 1)]
    return ends[0], ends[1] - ends[0]


def _num_steps(total: int, settings: StreamSettings) -> int:
    """Return the batches of an epoch: as many on the rank with fewest rows as on any other."""
    fewest, most = total // settings.world_size, -(-total // settings.world_size)
    num_steps = -(-most // settings.batch_size)
    last = fewest - (num_steps - 1) * settings.batch_size
    return num_steps - 1 if num_steps > 1 and last < MIN_BATCH else num_steps


def _length(rows: Rows | None) -> int:
    return 0 if rows is None else len(rows)


def _join(held: Rows | None, rows: Rows) -> Rows:
    if held is None or not len(held):
        return rows
    return Rows.concat([held, rows]) if len(rows) else held
