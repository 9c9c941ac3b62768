"""Errors a user can meet, and the exit code each one maps to.

The tree::

    RankoptError                 2  base; never raised itself
    ├── UsageError               2  the command line or the call is wrong
    │   ├── RecipeError          2  a recipe cannot be read or run as written
    │   ├── CardError            2  a model card cannot be read, or names what is not there
    │   ├── OutputExistsError    2  the output folder already holds a result
    │   └── SelectorError        2  a selector matches nothing
    ├── InputError               2  a file the user gave is not what the card says
    │   ├── CheckpointError      2  truncated, of another model, or holding code
    │   └── DataError            2  missing column, NaN, id out of range, one class, no rows
    ├── ExportError              2  torch.export or AOTInductor refused the model
    ├── ArtifactError            2  an artifact is damaged, or does not fit this machine
    │   └── ContractError        2  a call breaks the artifact's input contract
    ├── EnvironmentProblem       2  a missing compiler, disk space, library or device
    ├── Interrupted            130  a signal stopped a run, which wrote down where it stood
    ├── ArmError                 2  an arm of an A/B raised (`rankopt.bench.backend`)
    └── WorkerDied               2  workers of an A/B died too often (`rankopt.bench.backend`)

Verdicts are not errors: pass exits 0, fail 1, inconclusive 3 (`rankopt.review.gates`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_INTERRUPTED = 130
"""What a shell reports for a program that Ctrl-C ended."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with an input, in the order where, what, got, allowed, next step.

    Attributes:
        where: the file and the path inside it, such as `recipes/x.yaml: passes[0].dtype`.
        what: what must hold there.
        got: what was found instead; None when nothing was there.
        hint: the next step for the reader.
    """

    where: str
    what: str
    got: object | None = None
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}"
        if self.got is not None:
            text += f"; got {self.got!r}"
        text += "."
        if self.hint:
            text += f" {self.hint}"
        return text


class RankoptError(Exception):
    """Base of every error that is the reader's to mend.

    Args:
        message: what went wrong, as one paragraph; or leave it out and give `problems`.
        problems: everything found at once, so that one run lists all of it.
    """

    exit_code: ClassVar[int] = EXIT_USAGE

    def __init__(self, message: str = "", *, problems: Sequence[Problem] = ()) -> None:
        self.problems = tuple(problems)
        lines = [message] if message else []
        lines += [str(problem) for problem in self.problems]
        super().__init__("\n".join(lines))


class UsageError(RankoptError):
    """The command line or the call is wrong."""


class RecipeError(UsageError):
    """A recipe cannot be read, or cannot be run as written."""


class CardError(UsageError):
    """A model card cannot be read, or names what is not there."""


class OutputExistsError(UsageError):
    """The output folder already holds a result."""


class SelectorError(UsageError):
    """A selector matches no table or layer."""


class InputError(RankoptError):
    """A file the user gave is not what the card says it is."""


class CheckpointError(InputError):
    """A checkpoint is truncated, belongs to another model, or holds code."""


class DataError(InputError):
    """Data lacks a column, rows, a class, or holds values the card does not allow."""


class ExportError(RankoptError):
    """torch.export or AOTInductor refused the model."""


class ArtifactError(RankoptError):
    """An artifact is damaged, incomplete, or was built for another machine."""


class ContractError(ArtifactError):
    """A call breaks the input contract in an artifact's manifest."""


class EnvironmentProblem(RankoptError):  # noqa: N818 - EnvironmentError is a builtin
    """A compiler, library, device or disk space that the work needs is missing."""


class Interrupted(RankoptError):  # noqa: N818 - a state to go on from, no error
    """A signal stopped a run after it wrote down where it stood."""

    exit_code: ClassVar[int] = EXIT_INTERRUPTED


def nearest(name: str, allowed: Iterable[str], *, limit: int = 3) -> str:
    """Return a phrase naming what was probably meant, or the whole list when nothing is near."""
    options = sorted(allowed)
    close = difflib.get_close_matches(name, options, n=limit, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(repr(option) for option in close)}?"
    return f"Known: {', '.join(options)}." if options else "None are known."
