"""Where a stream of rows stands, and what it must be for that to mean the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.errors import Problem, UsageError
from rankopt.problems import problems_of_validation


class StreamState(BaseModel):
    """What every stream says of itself; each adds who its rows are dealt out to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epoch: int = Field(ge=0)
    step: int = Field(ge=0)
    row: int = Field(ge=0)
    """Rows of the epoch that were handed out."""
    batch_size: int
    window_rows: int
    seed: int
    data: str
    """A fingerprint of the sizes of the source's pieces."""


State = TypeVar("State", bound=StreamState)


def read_state(
    kind: type[State],
    state: Mapping[str, Any],
    at: Callable[[int, int, int], State],
    source: str,
    hint: str,
) -> State:
    """Read a state that a stream is to go on from.

    Args:
        kind: of the stream's states.
        state: as the stream that it is from described it.
        at: the state that this stream would have at an epoch, step and row.
        source: what messages call this stream's rows.
        hint: what to resume with.

    Raises:
        UsageError: it is no such state, or one of other settings or data; all that differs is
            listed.
    """
    where = "stream state"
    try:
        found = kind.model_validate(dict(state))
    except ValidationError as error:
        raise UsageError(problems=problems_of_validation(where, error, kind)) from error
    own = at(found.epoch, found.step, found.row)
    problems = [
        Problem(
            f"{where}: {name}",
            f"must be {getattr(own, name)!r}, as of this stream of {source}",
            getattr(found, name),
            hint,
        )
        for name in kind.model_fields
        if getattr(own, name) != getattr(found, name)
    ]
    if problems:
        raise UsageError(problems=problems)
    return found
