"""How a review writes numbers: a value, its interval, its limit, always in readable units."""

from __future__ import annotations

from collections.abc import Iterable

from rankopt.quality.registry import find_metric
from rankopt.review.schema import MetricParity
from rankopt.units import format_bytes, format_duration

MISSING = "not measured"


def split_metric(key: str) -> tuple[str | None, str]:
    """Split `click.ne` into the output and the metric; a model of one output writes just `ne`."""
    output, _, metric = key.rpartition(".")
    return output or None, metric


def by_output(keys: Iterable[str]) -> dict[str | None, list[str]]:
    """Put the metrics of a report by the output they are of, in the order given."""
    groups: dict[str | None, list[str]] = {}
    for key in keys:
        groups.setdefault(split_metric(key)[0], []).append(key)
    return groups


def metric_title(key: str) -> str:
    """Name a metric for a reader: `click.ne` reads `Normalized entropy (click)`."""
    output, metric = split_metric(key)
    known = find_metric(metric)
    title = known.title if known else metric
    title = title[:1].upper() + title[1:]
    return f"{title} ({output})" if output else title


def delta(key: str, value: float | None, *, signed: bool = True) -> str:
    """Write a change of a metric: per cent where it is relative, else its own unit."""
    if value is None:
        return MISSING
    sign = "+" if signed else ""
    metric = find_metric(split_metric(key)[1])
    if metric and metric.delta == "relative":
        return f"{value * 100:{sign}.3f} %"
    return f"{value:{sign}.5f}"


def interval(low: str, high: str) -> str:
    """Write two ends as one interval."""
    return f"95 % interval {low} to {high}"


def delta_interval(key: str, parity: MetricParity) -> str | None:
    """Write the interval of a metric's change; None when it has none."""
    if parity.ci_low is None or parity.ci_high is None:
        return None
    return interval(delta(key, parity.ci_low), delta(key, parity.ci_high))


def level(value: float | None) -> str:
    """Write a metric's own value."""
    return MISSING if value is None else f"{value:.5f}"


def ratio(value: float | None) -> str:
    """Write a speed-up or a size ratio: `3.214x`.

    Four digits, since three would round an end of 0.9996 onto its limit of 1.
    """
    if value is None:
        return MISSING
    return f"{value:,.0f}x" if value >= 1_000 else f"{value:.4g}x"


def ratio_interval(low: float | None, high: float | None) -> str | None:
    """Write the interval of a ratio; None when it has none."""
    return None if low is None or high is None else interval(ratio(low), ratio(high))


def count(value: int, noun: str) -> str:
    """Write a count with its noun: `1 row`, `20,000 rows`."""
    return f"{value:,} {noun}" + ("" if value == 1 else "s")


def usd(value: float | None) -> str:
    """Write dollars with three significant digits, cents or less included."""
    if value is None:
        return MISSING
    if value >= 100 or value == 0:
        return f"${value:,.2f}"
    return f"${value:.3g}"


def duration(value_ns: float | None) -> str:
    """Write a duration, or that it was not measured."""
    return MISSING if value_ns is None else format_duration(value_ns)


def size(value_bytes: float | None) -> str:
    """Write a size, or that it was not measured."""
    return MISSING if value_bytes is None else format_bytes(value_bytes)


def rows_of(parity: MetricParity, unit: str) -> str:
    """Write on how many rows a metric was judged, and what counts as independent."""
    rows, clusters = count(parity.num_rows, "row"), clusters_of(parity, unit)
    return rows if clusters is None else f"{rows} in {clusters}"


def clusters_of(parity: MetricParity, unit: str) -> str | None:
    """Write how many independent units a metric was judged on; None where each row is one."""
    return None if unit == "row" else f"{count(parity.num_clusters, 'cluster')} by {unit}"
