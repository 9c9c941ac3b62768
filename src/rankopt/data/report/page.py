"""What a data report says, in words and rows: the one source of HTML and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rankopt.data.report.check import percent
from rankopt.data.report.schema import ColumnReport, DataReport, Drift, LabelRate, SplitReport
from rankopt.review.page import flatten
from rankopt.review.plots import Figure
from rankopt.review.rendering import Table

COLOURS = ("#2c7fb8", "#d98a1f", "#2a9d8f", "#a0609e", "#8c6d46")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross")
NONE = "none"
MAX_DRIFTS = 12
"""Columns whose buckets are listed, those that drifted most."""
WORTH_A_LOOK = 2.0
"""Buckets are listed of columns whose index is above so many times its noise."""

BREACH_HEADINGS = ("Split", "Column", "Limit", "What", "Found", "Allowed")
ID_HEADINGS = (
    "Column", "Null", "Out of range", "Different ids", "Of the table", "Unseen",
    "Unseen, different", "PSI (by chance)", "Lists",
)  # fmt: skip
REAL_HEADINGS = (
    "Column", "Null", "Not finite", "Mean", "Std", "Min", "1 %", "Median", "99 %", "Max",
    "PSI (by chance)",
)  # fmt: skip
LABEL_HEADINGS = ("Label", "Rows", "Ones", "Rate (95 % interval)")
BLOCK_HEADINGS = ("When", *LABEL_HEADINGS)
BUCKET_HEADINGS = ("Bucket", "Reference", "Here", "Share in the reference", "Share here")

LIMITS = (
    "A rate of nulls is of rows; a list counts as null where it is missing or holds a missing id.",
    "Unseen ids are those that the reference never holds: of all ids, each occurrence counted, and "
    "of the different ones. Ids are counted as the card maps them into the table.",
    "PSI sums (p - q) ln(p / q) over tenths of the reference. Ids are put into tenths by their "
    "frequency in one half of the reference and counted in the other, so that rare ids do not pass "
    "as drift. What chance alone is expected to give stands beside it; dependent rows, as of one "
    "request, give more.",
    "Intervals of label rates take rows as independent.",
)


@dataclass(frozen=True)
class Section:
    """One split."""

    title: str
    summary: str
    tables: list[Table]
    details: list[Table]


@dataclass(frozen=True)
class Page:
    """A report in readable words."""

    title: str
    headline: str
    tiles: list[tuple[str, str, str]]
    breaches: Table | None
    sections: list[Section]
    limits: tuple[str, ...]
    facts: list[tuple[str, str]]


def page_of(report: DataReport) -> Page:
    """Put a report into words."""
    rows = [(b.split, b.column, b.limit, b.what, b.got, b.allowed) for b in report.breaches]
    facts = [("reference", report.reference or NONE)]
    if report.limits is not None:
        facts += flatten(report.limits.model_dump(mode="json", exclude_none=True), "limits")
    return Page(
        title=f"Data of {report.model}",
        headline=f"{_headline(report)} {_largest_drift(report)}",
        tiles=[_tile(split) for split in report.splits],
        breaches=Table("Broken limits", BREACH_HEADINGS, rows) if rows else None,
        sections=[_section(report, split) for split in report.splits],
        limits=(*LIMITS, *report.notes),
        facts=[*facts, *flatten(report.environment)],
    )


def _headline(report: DataReport) -> str:
    if report.verdict is None:
        return "The card sets no limits for its data."
    if report.verdict == "pass":
        return "Every limit of the card is kept."
    if report.verdict == "inconclusive":
        return f"Not every limit could be judged. {'. '.join(report.not_judged)}."
    num = len(report.breaches)
    return f"{num} limit{' is' if num == 1 else 's are'} broken: training refuses these rows."


def _largest_drift(report: DataReport) -> str:
    found = [
        (drift.psi, column.column, split.name)
        for split in report.splits
        for column, drift in _drifted(split)
        if drift.psi > WORTH_A_LOOK * drift.noise
    ]
    if not found:
        compared = report.reference is not None and len(report.splits) > 1
        return "No column drifts beyond chance." if compared else "Nothing was compared."
    psi, column, split_name = max(found)
    return f"The largest drift is that of {column} in {split_name}: PSI {psi:.3g}."


def _tile(split: SplitReport) -> tuple[str, str, str]:
    rates = [f"{rate.label} {_rate(rate)}" for rate in split.labels]
    return f"Rows of {split.name}", f"{split.num_rows:,}", "; ".join(rates) or "no labels"


def _section(report: DataReport, split: SplitReport) -> Section:
    ids = [column for column in split.columns if column.num_ids is not None]
    reals = [column for column in split.columns if column.num_ids is None]
    tables = [
        Table("Labels", LABEL_HEADINGS, [_label(rate) for rate in split.labels]),
        Table("Ids", ID_HEADINGS, [_ids(column) for column in ids]),
        Table("Real numbers", REAL_HEADINGS, [_reals(column) for column in reals]),
    ]
    blocks = [(rate.block or "", *_label(rate)) for rate in split.label_blocks]
    details = [Table("Label rate over time", BLOCK_HEADINGS, blocks)]
    details += [
        Table(f"Drift of {column.column}", BUCKET_HEADINGS, _buckets(drift))
        for column, drift in _drifted(split)
        if drift.psi > WORTH_A_LOOK * drift.noise
    ]
    title = f"{split.name} (the reference)" if split.name == report.reference else split.name
    return Section(
        title=title,
        summary=_summary(split),
        tables=[table for table in tables if table.rows],
        details=[table for table in details if table.rows],
    )


def _summary(split: SplitReport) -> str:
    text = f"{split.num_rows:,} rows of {split.source}."
    requests = split.requests
    if requests is None:
        return f"{text} The card names no request_key."
    about = "" if requests.exact else "about "
    text += f" {about}{requests.num_requests:,} requests by {requests.key}"
    if requests.mean is None:
        return f"{text}."
    if requests.max == 1:
        return f"{text}, of one row each."
    text += (
        f": {requests.mean:.3g} rows each on average, {requests.p50:,} in the middle, "
        f"{requests.p99:,} at the 99th percentile"
    )
    return f"{text}, {requests.max:,} at most." if requests.max is not None else f"{text}."


def _drifted(split: SplitReport) -> list[tuple[ColumnReport, Drift]]:
    """List the columns that drifted most, most first."""
    found = [(column, column.drift) for column in split.columns if column.drift is not None]
    return sorted(found, key=lambda item: -item[1].psi)[:MAX_DRIFTS]


def _label(rate: LabelRate) -> tuple[str, ...]:
    return rate.label, f"{rate.num_rows:,}", f"{rate.num_positive:,}", _rate(rate)


def _rate(rate: LabelRate) -> str:
    if rate.rate is None or rate.ci_low is None or rate.ci_high is None:
        return NONE
    return f"{percent(rate.rate)} ({percent(rate.ci_low)} to {percent(rate.ci_high)})"


def _ids(column: ColumnReport) -> tuple[str, ...]:
    lists = NONE
    if column.mean_length is not None:
        lists = f"{column.mean_length:.3g} ids, {_shown(column.empty_rate)} empty"
        if column.cut_rate:
            lists += f", {percent(column.cut_rate)} cut"
    about = "" if column.exact else "about "
    return (
        column.column,
        _shown(column.null_rate),
        _shown(column.out_of_range_rate),
        f"{about}{column.cardinality or 0:,} of {column.num_ids or 0:,}",
        _shown(column.coverage),
        _shown(column.unseen_rate),
        _shown(column.unseen_ids_rate),
        _psi(column.drift),
        lists,
    )


def _reals(column: ColumnReport) -> tuple[str, ...]:
    figures = (column.mean, column.std, column.min, column.p1, column.median, column.p99)
    return (
        column.column,
        _shown(column.null_rate),
        f"{column.num_invalid:,}",
        *(NONE if value is None else f"{value:.4g}" for value in (*figures, column.max)),
        _psi(column.drift),
    )


def _psi(drift: Drift | None) -> str:
    return NONE if drift is None else f"{drift.psi:.3g} ({drift.noise:.2g})"


def _shown(share: float | None) -> str:
    return NONE if share is None else percent(share)


def _buckets(drift: Drift) -> list[tuple[str, ...]]:
    totals = [
        max(sum(getattr(bucket, name) for bucket in drift.buckets), 1)
        for name in ("num_reference", "num_values")
    ]
    return [
        (
            bucket.label,
            f"{bucket.num_reference:,}",
            f"{bucket.num_values:,}",
            percent(bucket.num_reference / totals[0]),
            percent(bucket.num_values / totals[1]),
        )
        for bucket in drift.buckets
    ]


def figures(report: DataReport) -> list[Figure]:
    """Draw the label rate over time, drift, and the share of unseen ids."""
    drawn = [
        _rates(report),
        _bars(
            report,
            "drift",
            "Drift against the reference",
            "population stability index",
            "The population stability index of each column; 0.1 and 0.25 are usual warnings.",
            lambda column: column.drift.psi if column.drift else None,
        ),
        _bars(
            report,
            "unseen",
            "Ids that the reference never holds",
            "share of ids, %",
            "Each occurrence counts: what the model scores with a row it never trained.",
            lambda column: None if column.unseen_rate is None else column.unseen_rate * 100,
        ),
    ]
    return [figure for figure in drawn if figure is not None]


def _rates(report: DataReport) -> Figure | None:
    traces: list[dict[str, Any]] = []
    for place, split in enumerate(report.splits):
        for label in dict.fromkeys(rate.label for rate in split.label_blocks):
            points = [r for r in split.label_blocks if r.label == label and r.rate is not None]
            shares = [(r.rate or 0.0, r.ci_low or 0.0, r.ci_high or 0.0) for r in points]
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers+lines",
                    "name": f"{escape(label)}, {escape(split.name)}",
                    "x": [escape(rate.block or "") for rate in points],
                    "y": [round(rate * 100, 4) for rate, _, _ in shares],
                    "error_y": {
                        "type": "data",
                        "symmetric": False,
                        "array": [round((high - rate) * 100, 4) for rate, _, high in shares],
                        "arrayminus": [round((rate - low) * 100, 4) for rate, low, _ in shares],
                    },
                    "marker": _marker(place),
                }
            )
    if not traces:
        return None
    layout = {
        "xaxis": {"title": {"text": ""}, "type": "category"},
        "yaxis": {"title": {"text": "share of ones, %"}},
    }
    caption = "The share of ones with its 95 % interval, by day or by blocks of rows."
    return Figure("labels", "Label rate over time", caption, traces, layout)


def _bars(
    report: DataReport,
    key: str,
    title: str,
    axis: str,
    caption: str,
    value_of: Callable[[ColumnReport], float | None],
) -> Figure | None:
    traces = []
    for place, split in enumerate(report.splits):
        found = [(column.column, value_of(column)) for column in split.columns]
        known = [(name, value) for name, value in found if value is not None]
        if known:
            traces.append(
                {
                    "type": "bar",
                    "name": escape(split.name),
                    "x": [escape(name) for name, _ in known],
                    "y": [round(value, 5) for _, value in known],
                    "marker": {"color": COLOURS[place % len(COLOURS)]},
                }
            )
    if not traces:
        return None
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": ""}, "type": "category"},
        "yaxis": {"title": {"text": axis}, "rangemode": "tozero"},
    }
    return Figure(key, title, caption, traces, layout)


def _marker(place: int) -> dict[str, Any]:
    options: Sequence[str] = SYMBOLS
    return {
        "color": COLOURS[place % len(COLOURS)],
        "symbol": options[place % len(options)],
        "size": 7,
    }
