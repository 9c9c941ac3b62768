"""Hold a report against the limits of its card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankopt.data.report.limits import DataLimits
from rankopt.data.report.schema import Breach, ColumnReport, LabelRate, SplitReport
from rankopt.errors import Problem


def breaches_of(limits: DataLimits, split: SplitReport) -> list[Breach]:
    """List what a split holds that the limits do not allow."""
    found = [
        breach for column in split.columns for breach in _column_breaches(limits, split, column)
    ]
    ranges = limits.label_ranges([rate.label for rate in split.labels])
    for rate in split.labels:
        if rate.label in ranges and rate.rate is not None:
            low, high = ranges[rate.label]
            if not low <= rate.rate <= high:
                found.append(_label_breach(limits, split, rate, low, high))
    return found


def not_judged(
    limits: DataLimits, splits: Sequence[SplitReport], reference: str | None
) -> list[str]:
    """List the limits that nothing could be held against, each with the reason."""
    reasons = [
        f"data.limits.{limit}: there is no reference"
        for limit in ("max_unseen_ids", "max_psi")
        if getattr(limits, limit) is not None and (reference is None or len(splits) < 2)
    ]
    for split in splits:
        known = {rate.label for rate in split.labels if rate.rate is not None}
        if limits.label_rate is not None and not known:
            reasons.append(f"data.limits.label_rate: {split.name} has no labels")
        else:
            missing = sorted(set(limits.label_ranges(known)) - known)
            reasons += [
                f"data.limits.label_rate.{name}: {split.name} has no such label" for name in missing
            ]
    return reasons


def problem_of(where: str, breach: Breach) -> Problem:
    """Put a breach as an error that stops a run."""
    return Problem(
        f"{where}: data.limits.{breach.limit}",
        f"{breach.split}, column {breach.column!r}: {breach.what} must be {breach.allowed}, "
        f"and is {breach.got}",
        hint="Look at `rankopt data report`, mend the data, or change the limit.",
    )


def _column_breaches(
    limits: DataLimits, split: SplitReport, column: ColumnReport
) -> Iterator[Breach]:
    drift = column.drift
    shares = (
        ("max_null_rate", "share of rows without a value", column.null_rate),
        ("max_out_of_range", "share of ids out of range", column.out_of_range_rate),
        ("max_unseen_ids", "share of ids that the reference never holds", column.unseen_rate),
    )
    for limit, what, rate in shares:
        allowed = limits.of(limit, column.column)
        if rate is None or allowed is None or rate <= allowed:
            continue
        got = percent(rate)
        if limit == "max_null_rate":
            got += f" ({column.num_null:,} of {split.num_rows:,} rows)"
        yield _breach(limits, split, column.column, limit, what, got, f"at most {percent(allowed)}")
    allowed = limits.of("max_psi", column.column)
    if drift is not None and allowed is not None and drift.psi > allowed:
        got = f"{drift.psi:.3g} ({drift.noise:.2g} is expected of chance)"
        what = "population stability index"
        yield _breach(limits, split, column.column, "max_psi", what, got, f"at most {allowed:g}")


def _label_breach(
    limits: DataLimits, split: SplitReport, rate: LabelRate, low: float, high: float
) -> Breach:
    got = f"{percent(rate.rate or 0.0)} ({rate.num_positive:,} of {rate.num_rows:,} rows)"
    allowed = f"between {percent(low)} and {percent(high)}"
    return _breach(limits, split, rate.label, "label_rate", "share of ones", got, allowed)


def _breach(
    limits: DataLimits,
    split: SplitReport,
    column: str,
    limit: str,
    what: str,
    got: str,
    allowed: str,
) -> Breach:
    place = f"{limit}.{column}" if isinstance(getattr(limits, limit), dict) else limit
    return Breach(split=split.name, limit=place, column=column, what=what, got=got, allowed=allowed)


def percent(share: float) -> str:
    """Write a share with three digits: 0.0123 reads 1.23%."""
    return f"{share * 100:.3g}%"
