"""Make the report of a card's rows, and refuse rows that the card's limits do not allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rankopt.data.report.check import breaches_of, not_judged, problem_of
from rankopt.data.report.collect import collect
from rankopt.data.report.schema import Breach, DataReport, SplitReport
from rankopt.data.rowsource import RowSource
from rankopt.data.splits import Splits, open_for_card, open_splits
from rankopt.environment import collect_environment
from rankopt.errors import DataError, Problem, UsageError
from rankopt.models.card import ModelCard

SPLITS = ("train", "validation", "test")
GIVEN, REFERENCE = "data", "reference"
"""Names of rows that were given as one source, and of a reference that is none of the splits."""


@dataclass(frozen=True)
class Compared:
    """What is reported on, and what it is compared with."""

    sources: dict[str, RowSource]
    reference: str | None
    notes: tuple[str, ...] = ()


def report_on(
    card: ModelCard,
    data: Any = None,
    reference: str | None = None,
    *,
    reproduce: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> DataReport:
    """Report on a card's rows.

    Args:
        card: what the columns mean, and `data.limits`.
        data: rows in place of the card's: a folder of splits, or one source, which stays whole.
        reference: a split's name, or a path; None: the train split, of `data` or else of the card.
        reproduce: the command to write into the report.
        progress: told one line per split.

    Raises:
        DataError: rows are missing, damaged, or cannot be read as the card says.
        UsageError: `reference` is a split that there is none of.
        CardError: the card names no rows, and none were given.
    """
    compared = _compared(card, data, reference)
    splits = collect(card, compared.sources, compared.reference, progress)
    limits = card.data.limits
    breaches = _breaches(card, splits)
    unjudged = not_judged(limits, splits, compared.reference) if limits else []
    command = f"rankopt data report {card.where} --out DIR"
    return DataReport(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=card.name,
        verdict=None if limits is None else _verdict(breaches, unjudged),
        reference=compared.reference,
        splits=splits,
        limits=limits,
        breaches=tuple(breaches),
        not_judged=tuple(unjudged),
        notes=compared.notes,
        environment=collect_environment().model_dump(mode="json"),
        reproduce=reproduce or command,
    )


def refuse_broken_limits(
    card: ModelCard, splits: Splits, progress: Callable[[str], None] | None = None
) -> None:
    """Hold the rows against `data.limits`, where the card sets any; this reads all of them once.

    Raises:
        DataError: a limit is broken; every one is listed with the column, what was found and what
            is allowed.
    """
    if card.data.limits is None:
        return
    sources = _named(splits)
    reference = "train" if "train" in sources else None
    tell = progress or (lambda line: None)
    found = collect(card, sources, reference, lambda line: tell(f"limits of the data: {line}"))
    breaches = _breaches(card, found)
    if breaches:
        raise DataError(problems=[problem_of(card.where, breach) for breach in breaches])


def _verdict(
    breaches: list[Breach], unjudged: list[str]
) -> Literal["pass", "fail", "inconclusive"]:
    if breaches:
        return "fail"
    return "inconclusive" if unjudged else "pass"


def _breaches(card: ModelCard, splits: tuple[SplitReport, ...]) -> list[Breach]:
    limits = card.data.limits
    if limits is None:
        return []
    return [breach for split in splits for breach in breaches_of(limits, split)]


def _named(splits: Splits) -> dict[str, RowSource]:
    named = {name: getattr(splits, name) for name in SPLITS}
    return {name: source for name, source in named.items() if source is not None}


def _compared(card: ModelCard, data: Any, reference: str | None) -> Compared:
    sources = _sources(card, data)
    if reference is None:
        return _with_train(card, sources, is_own=data is None)
    if reference in sources:
        return Compared(sources, reference)
    if reference in SPLITS and not Path(reference).exists():
        own = {} if data is None else _own(card)
        if reference not in own:
            problem = Problem(
                "--reference",
                f"must be a split that there is ({', '.join(sources)}), or a path",
                reference,
            )
            raise UsageError(problems=[problem])
        return Compared({reference: own[reference], **sources}, reference)
    return Compared({REFERENCE: open_for_card(card, reference), **sources}, REFERENCE)


def _sources(card: ModelCard, data: Any) -> dict[str, RowSource]:
    if data is None:
        return _named(open_splits(card))
    is_folder = isinstance(data, (str, Path)) and Path(data).is_dir()
    if is_folder:
        splits = open_splits(card, data)
        if splits.description["origin"] != "one folder of files":
            return _named(splits)
    # One source is parted for an A/B; what it holds is a question about all of it.
    return {GIVEN: open_for_card(card, data)}


def _with_train(card: ModelCard, sources: dict[str, RowSource], *, is_own: bool) -> Compared:
    if "train" in sources:
        return Compared(sources, "train")
    own = {} if is_own else _own(card)
    if "train" in own:
        note = "The reference is the train split that the card names."
        return Compared({"train": own["train"], **sources}, "train", (note,))
    note = "There is no train split: nothing was compared. Name other rows with --reference."
    return Compared(sources, None, (note,))


def _own(card: ModelCard) -> dict[str, RowSource]:
    """Open the card's own rows; none where it names none."""
    if card.data.source == "files" and card.data.test is None and card.data.train is not None:
        return {"train": open_for_card(card, card.folder / card.data.train)}
    if card.data.source == "files" and card.data.test is None:
        return {}
    return _named(open_splits(card))
