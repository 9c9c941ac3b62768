"""What a review says, in words and rows: the one source of the HTML page and of the Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rankopt.quality.registry import find_metric
from rankopt.review import wording
from rankopt.review.schema import Cost, LatencyRow, PassRecord, Report, Size, Verdict
from rankopt.review.training import training_cells

SYMBOLS: Mapping[Verdict, str] = {"pass": "\u2713", "fail": "\u2715", "inconclusive": "?"}


@dataclass(frozen=True)
class Tile:
    """One key figure: its value always has its interval, or what stands in for one, beside it."""

    label: str
    value: str
    note: str
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of a table; a value has its interval, or why it has none, along with it."""

    value: str
    interval: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        beside = self.interval or self.reason
        return f"{self.value} ({beside})" if beside else self.value


@dataclass(frozen=True)
class Row:
    """One row of a table, its cells in the order of the headings."""

    cells: tuple[Cell, ...]
    verdict: Verdict | None = None
    note: str | None = None


@dataclass(frozen=True)
class QualityTable:
    """The metrics of one output; None where the model has just one."""

    output: str | None
    rows: list[Row]


@dataclass(frozen=True)
class PassRow:
    """One row of the table of passes."""

    kind: str
    outcome: str
    reason: str
    details: tuple[str, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Page:
    """A report in readable words."""

    title: str
    headline: str
    tiles: list[Tile]
    quality: list[QualityTable]
    latency: list[Row]
    baselines: list[Row]
    passes: list[PassRow]
    size: list[Row]
    cost: list[Row]
    training: list[Row]
    limits: list[str]
    data: list[tuple[str, str]]
    environment: list[tuple[str, str]]


MAX_QUALITY_TILES = 3
"""The first gated metric of each output, up to so many."""

QUALITY_HEADINGS = (
    "Metric", "Control", "Candidate", "Change (95 % interval)", "Margin", "Better", "Judged on",
)  # fmt: skip
LATENCY_HEADINGS = (
    "Batch", "Control p50", "Candidate p50", "Speed-up (95 % interval)", "Control p99",
    "Candidate p99", "Timed calls",
)  # fmt: skip
BASELINE_HEADINGS = (
    "Arm", "Batch", "Arm p50", "Candidate p50", "Speed-up over it (95 % interval)", "Timed calls",
)  # fmt: skip
PASS_HEADINGS = (
    "Bytes after", "Speed-up (95 % interval)", "Predicted", "Took", "Largest drift",
)  # fmt: skip
TWO_ARM_HEADINGS = ("", "Control", "Candidate", "Candidate against control")


def page_of(report: Report) -> Page:
    """Put a report into words."""
    return Page(
        title=f"{report.verdict.upper()}: {report.recipe or 'A/B'} on {report.model}",
        headline=_headline(report),
        tiles=_tiles(report),
        quality=_quality(report),
        latency=[_latency(row) for row in report.latency],
        baselines=_baselines(report),
        passes=[_pass(record) for record in report.passes],
        size=_size(report.size),
        cost=_cost(report.cost),
        training=[Row(_cells(*cells)) for cells in training_cells(report.training)],
        limits=_limits(report),
        data=list(flatten(report.data)),
        environment=list(flatten(report.environment)),
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield nested settings as dotted names with their text."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, (list, tuple)):
            yield name, ", ".join(str(item) for item in value)
        else:
            yield name, "none" if value is None else str(value)


def _headline(report: Report) -> str:
    total = len(report.gates)
    bad = sum(result.verdict == report.verdict for result in report.gates)
    gates = wording.count(total, "gate")
    if report.verdict == "pass":
        return f"The candidate meets {'its gate' if total == 1 else f'all {gates}'}."
    if report.verdict == "fail":
        return f"Do not launch: {bad} of {gates} failed."
    if not total:
        return "Not decided: no gate was applied."
    return f"Not decided: {bad} of {gates} could not be settled by this measurement."


def _tiles(report: Report) -> list[Tile]:
    tiles = []
    per_output = wording.by_output(_gated(report) or report.quality)
    for key in [keys[0] for keys in per_output.values()][:MAX_QUALITY_TILES]:
        parity = report.quality[key]
        note = wording.delta_interval(key, parity) or parity.reason or wording.MISSING
        title = f"{wording.metric_title(key)}, change"
        tiles.append(Tile(title, wording.delta(key, parity.delta), note, parity.verdict))
    rows = [row for row in report.latency if row.verdict] or report.latency
    rows = rows if len(rows) <= 2 else [rows[0], rows[-1]]
    for row in rows:
        shown = wording.ratio_interval(row.ci_low, row.ci_high) or "no interval"
        label = f"Speed-up at batch {row.batch_size}"
        tiles.append(Tile(label, wording.ratio(row.speedup), shown, row.verdict))
    size = report.size
    if size.control_bytes and size.candidate_bytes:
        note = f"{wording.size(size.control_bytes)} to {wording.size(size.candidate_bytes)}, exact"
        times = wording.ratio(size.control_bytes / size.candidate_bytes)
        tiles.append(Tile("Stored weights, smaller by", times, note))
    if report.cost.ratio is not None:
        cost = report.cost
        shown = wording.ratio_interval(cost.ratio_low, cost.ratio_high) or "no interval"
        tiles.append(Tile("Cost against control", wording.ratio(cost.ratio), shown))
    return tiles


def _cells(*values: str | Cell) -> tuple[Cell, ...]:
    return tuple(value if isinstance(value, Cell) else Cell(value) for value in values)


def _bare(interval: str | None) -> str | None:
    # Under a heading that says "95 % interval" the words would only repeat it.
    return None if interval is None else interval.removeprefix("95 % interval ")


def _ratio(value: float | None, low: float | None, high: float | None) -> Cell:
    shown = _bare(wording.ratio_interval(low, high))
    return Cell(wording.ratio(value), shown or ("no interval" if value is not None else None))


def _duration(value_ns: float | None, low_ns: float | None, high_ns: float | None) -> Cell:
    if low_ns is None or high_ns is None:
        return Cell(wording.duration(value_ns))
    ends = f"{wording.duration(low_ns)} to {wording.duration(high_ns)}"
    return Cell(wording.duration(value_ns), ends)


def _quality(report: Report) -> list[QualityTable]:
    return [
        QualityTable(output, [_metric(report, key) for key in keys])
        for output, keys in wording.by_output(report.quality).items()
    ]


def _metric(report: Report, key: str) -> Row:
    parity = report.quality[key]
    shown = _bare(wording.delta_interval(key, parity))
    why = None if shown else parity.reason or "no interval"
    cells = _cells(
        wording.metric_title(wording.split_metric(key)[1]),
        wording.level(parity.control),
        wording.level(parity.candidate),
        Cell(wording.delta(key, parity.delta), shown, why),
        wording.delta(key, parity.margin, signed=False) if parity.margin else "none",
        parity.direction,
        Cell(
            wording.count(parity.num_rows, "row"),
            wording.clusters_of(parity, report.statistics_unit),
        ),
    )
    # A metric without a gate does not enter the verdict, but a bad one is not hidden either.
    note = None if key in _gated(report) else "not gated"
    return Row(cells, parity.verdict if parity.margin else None, note)


def _gated(report: Report) -> list[str]:
    names = {result.gate for result in report.gates}
    return [key for key in report.quality if f"quality.{key}" in names]


def _latency(row: LatencyRow) -> Row:
    few = Cell("too few calls")
    low, high = row.candidate_p99_low_ns, row.candidate_p99_high_ns
    cells = _cells(
        f"{row.batch_size:,}",
        _duration(row.control_p50_ns, row.control_p50_low_ns, row.control_p50_high_ns),
        _duration(row.candidate_p50_ns, row.candidate_p50_low_ns, row.candidate_p50_high_ns),
        _ratio(row.speedup, row.ci_low, row.ci_high),
        few if row.control_p99_ns is None else wording.duration(row.control_p99_ns),
        few if row.candidate_p99_ns is None else _duration(row.candidate_p99_ns, low, high),
        Cell(f"{row.num_samples:,}", wording.count(row.num_blocks, "block")),
    )
    return Row(cells, row.verdict)


def _baselines(report: Report) -> list[Row]:
    return [
        Row(
            _cells(
                row.arm,
                f"{row.batch_size:,}",
                wording.duration(row.arm_p50_ns),
                wording.duration(row.candidate_p50_ns),
                _ratio(row.speedup, row.ci_low, row.ci_high),
                f"{row.num_samples:,}",
            ),
            row.verdict,
        )
        for row in report.baselines
    ]


def _pass(record: PassRecord) -> PassRow:
    outcome = "dropped" if not record.kept else "kept" if record.changed else "kept, no change"
    before, after = wording.size(record.bytes_before), wording.size(record.bytes_after)
    speedup = _ratio(record.measured_speedup, record.ci_low, record.ci_high)
    if record.measured_speedup is not None and record.batch_size is not None:
        speedup = Cell(speedup.value, f"{speedup.interval}, batch {record.batch_size:,}")
    predicted = record.predicted_speedup
    drift = wording.MISSING if record.max_abs_drift is None else f"{record.max_abs_drift:.2g}"
    cells = _cells(
        Cell(after, None if before == after else f"from {before}"),
        speedup,
        "none" if predicted is None else wording.ratio(predicted),
        wording.duration(record.duration_ns),
        drift,
    )
    return PassRow(record.kind, outcome, record.reason, record.details, cells)


def _size(size: Size) -> list[Row]:
    control, candidate = size.control_bytes, size.candidate_bytes
    against = "not compared"
    if control and candidate:
        against = f"{wording.ratio(control / candidate)} smaller"
    code = wording.size(size.control_code_bytes), wording.size(size.candidate_code_bytes)
    rows = [
        ("Weights and tables", wording.size(control), wording.size(candidate), against),
        ("Compiled code", *code, "counted apart"),
    ]
    if size.candidate_resident_bytes is not None:
        resident = wording.size(size.candidate_resident_bytes)
        rows.append(("Resident after packing", "not compared", resident, "not compared"))
    return [Row(_cells(*row)) for row in rows]


def _cost(cost: Cost) -> list[Row]:
    candidate = Cell(wording.usd(cost.candidate_usd_per_million))
    if cost.candidate_usd_low is not None and cost.candidate_usd_high is not None:
        ends = f"{wording.usd(cost.candidate_usd_low)} to {wording.usd(cost.candidate_usd_high)}"
        candidate = Cell(candidate.value, ends)
    control = wording.usd(cost.control_usd_per_million)
    against = _ratio(cost.ratio, cost.ratio_low, cost.ratio_high)
    if cost.ratio is not None:
        against = Cell(f"{against.value} the cost", against.interval)
    rows = [Row(_cells("Dollars per million predictions", control, candidate, against))]
    if cost.control_qps is not None and cost.candidate_qps is not None:
        faster = f"{wording.ratio(cost.candidate_qps / cost.control_qps)} the throughput"
        qps = f"{cost.control_qps:,.0f}", f"{cost.candidate_qps:,.0f}"
        rows.append(Row(_cells("Predictions a second", *qps, faster)))
    return rows


def _limits(report: Report) -> list[str]:
    limits = []
    if report.statistics_unit == "row" and report.quality:
        limits.append(
            "Rows are counted as independent, since the card names no request_key. Impressions of "
            "one request are not, so the true intervals of quality are wider than those shown."
        )
    elif report.quality:
        limits.append(
            f"Intervals of quality count the rows of one {report.statistics_unit} as dependent."
        )
    if report.latency:
        limits.append(
            "Latency is closed-loop: one call at a time, with no queue of waiting requests. It "
            "does not say how the tail behaves under arriving traffic."
        )
    lacking = [str(row.batch_size) for row in report.latency if row.candidate_p99_ns is None]
    if lacking:
        limits.append(
            f"The candidate's p99 is left out at batch {', '.join(lacking)}: too few timed calls "
            "to support it."
        )
    cost = report.cost
    if cost.reason:
        limits.append(f"Dollars are left out or incomplete: {cost.reason}.")
    if cost.candidate_usd_per_million is not None:
        limits.append(
            f"Cost is {cost.load_model} at batch {cost.batch_size}: a machine kept busy at "
            f"{wording.usd(cost.price_per_hour)} an hour."
        )
    return [*limits, *_quality_limits(report)]


def _quality_limits(report: Report) -> list[str]:
    limits = []
    if report.quality and not any(map(_needs_groups, report.quality)):
        why = "every group of the request_key is a single row"
        if report.statistics_unit == "row":
            why = "the card names no request_key"
        limits.append(f"GAUC, NDCG and hit rate are left out: {why}, so no rows share a ranking.")
    total = report.data.get("num_rows")
    for output, keys in wording.by_output(report.quality).items():
        judged = max(report.quality[key].num_rows for key in keys)
        if isinstance(total, int) and judged < total:
            limits.append(
                f"{output or 'The output'} has a label on {judged:,} of {total:,} rows, and is "
                "judged on those alone."
            )
    loose: dict[str, list[str]] = {}
    for key in report.quality:
        output, metric = wording.split_metric(key)
        if key not in _gated(report):
            loose.setdefault(wording.metric_title(metric), []).append(output or "")
    num_outputs = len(wording.by_output(report.quality))
    if loose:
        shown = [
            title if len(outputs) == num_outputs else f"{title} ({', '.join(outputs)})"
            for title, outputs in loose.items()
        ]
        limits.append(f"Shown but not gated: {', '.join(shown)}.")
    return limits


def _needs_groups(key: str) -> bool:
    metric = find_metric(wording.split_metric(key)[1])
    return metric is not None and metric.grouping is not None
