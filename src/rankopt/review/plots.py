"""The figures of a review, as plotly values; the page gives them its own colours.

Series differ by symbol and dash as well as by colour. Plotly reads a little HTML in its texts, so
every name that a user chose is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rankopt.review import wording
from rankopt.review.schema import BaselineRow, CalibrationPoint, LatencyRow, Report
from rankopt.units import NS_PER_MS, format_duration

CONTROL_COLOUR = "#7d8794"
CANDIDATE_COLOUR = "#2c7fb8"
BASELINE_COLOURS = ("#d98a1f", "#a0609e", "#2a9d8f", "#8c6d46")
_BASELINE_SYMBOLS = ("diamond", "square", "triangle-up", "cross")
_MARKERS = {"pass": "circle", "fail": "x", "inconclusive": "diamond-open"}

WIDEST_IN_MARGINS = 5.0
"""How far from no change an interval may stretch the axis; a value itself always shows."""

Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One plot: what it is, in words, and what plotly draws."""

    key: str
    title: str
    caption: str
    data: list[Trace]
    layout: dict[str, Any]


def figures(report: Report) -> dict[str, list[Figure]]:
    """Draw what the report can fill, by the section it stands in."""
    drawn = {
        "quality": [
            _forest(report, output, keys)
            for output, keys in wording.by_output(report.quality).items()
        ],
        "latency": [_speedup(report), _latency(report)],
        "predictions": [
            figure
            for output in dict.fromkeys([*report.calibration_curve, *report.scatter])
            for figure in (_calibration(report, output), _scatter(report, output))
        ],
    }
    return {
        section: [figure for figure in found if figure is not None]
        for section, found in drawn.items()
    }


def _forest(report: Report, output: str | None, keys: Sequence[str]) -> Figure | None:
    # Metrics have different units; in margins they share one axis and one limit line.
    names, values, low, high, symbols, texts = [], [], [], [], [], []
    for key in reversed(keys):
        parity = report.quality[key]
        shown = wording.delta_interval(key, parity)
        if not parity.margin or parity.delta is None or shown is None:
            continue
        sign = (1 if parity.direction == "lower" else -1) / parity.margin
        ends = sorted((sign * (parity.ci_low or 0.0), sign * (parity.ci_high or 0.0)))
        harm = sign * parity.delta
        title = wording.metric_title(wording.split_metric(key)[1])
        names.append(f"{escape(title)}<br>{parity.verdict}")
        values.append(harm)
        low.append(harm - ends[0])
        high.append(ends[1] - harm)
        symbols.append(_MARKERS[parity.verdict])
        texts.append(f"{wording.delta(key, parity.delta)}<br>{shown}")
    if not names:
        return None
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": values,
        "y": names,
        "error_x": {"type": "data", "symmetric": False, "array": high, "arrayminus": low},
        "marker": {"symbol": symbols, "size": 11, "color": CANDIDATE_COLOUR},
        "hovertext": texts,
        "hoverinfo": "text",
        "showlegend": False,
    }
    layout = {
        "height": 130 + 58 * len(names),
        "xaxis": {
            "title": {"text": "harm, in margins (left is better)"},
            "zeroline": False,
            "range": _forest_range(values, low, high),
        },
        "yaxis": {"automargin": True},
        "shapes": [_vertical(0, "dot"), _vertical(1, "solid")],
        "annotations": [_top_label(0, "no change", "right"), _top_label(1, "margin", "left")],
    }
    caption = (
        "Each metric's change with its 95 % interval, divided by its margin and turned so that "
        "right is worse. A metric passes when the whole interval lies left of the margin line. An "
        "interval that runs off an edge goes on; its ends stand in the table."
    )
    title = "Change of quality against its margin" + (f": {output}" if output else "")
    # An element id: the position of the output, since its name may hold any character.
    place = list(wording.by_output(report.quality)).index(output)
    return Figure(f"forest-{place}", title, caption, [trace], layout)


def _forest_range(
    values: Sequence[float], below: Sequence[float], above: Sequence[float]
) -> list[float]:
    # One interval of many margins, as few groups give, would press all others into one point.
    ends = [value - size for value, size in zip(values, below, strict=True)]
    low = min(*values, max(min(ends), -WIDEST_IN_MARGINS), -1.0)
    ends = [value + size for value, size in zip(values, above, strict=True)]
    high = max(*values, min(max(ends), WIDEST_IN_MARGINS), 2.0)
    room = 0.05 * (high - low)
    return [low - room, high + room]


def _speedup(report: Report) -> Figure | None:
    rows: Sequence[LatencyRow | BaselineRow]
    series: list[tuple[str, str, str, Sequence[LatencyRow | BaselineRow]]] = [
        ("over control", CANDIDATE_COLOUR, "circle", report.latency)
    ]
    for index, arm in enumerate(_baseline_arms(report)):
        colour, symbol = _baseline_style(index)
        rows = [row for row in report.baselines if row.arm == arm]
        series.append((f"over {escape(arm)}", colour, symbol, rows))
    data = []
    for name, colour, symbol, rows in series:
        known = [row for row in rows if row.speedup is not None]
        trace = _line(
            name, colour, symbol, [row.batch_size for row in known], [r.speedup for r in known]
        )
        trace["error_y"] = _error_bars([(row.speedup, row.ci_low, row.ci_high) for row in known])
        trace["hovertext"] = [
            f"{name}, batch {row.batch_size}: {wording.ratio(row.speedup)}<br>"
            f"{wording.ratio_interval(row.ci_low, row.ci_high) or 'no interval'}"
            for row in known
        ]
        data.append(trace)
    if not any(trace["x"] for trace in data):
        return None
    layout = {
        "xaxis": _batch_axis(report),
        "yaxis": {"title": {"text": "speed-up"}, "ticksuffix": "x", "rangemode": "tozero"},
        "shapes": [_horizontal(1)],
    }
    caption = (
        "How many times faster the candidate's p50 is, in the same interleaved run, with 95 % "
        "intervals. Below the dashed line at 1x the candidate is slower."
    )
    return Figure("speedup", "Speed-up by batch size", caption, data, layout)


def _latency(report: Report) -> Figure | None:
    if not report.latency:
        return None
    sizes = [row.batch_size for row in report.latency]
    data = []
    for arm, colour, symbol in (
        ("control", CONTROL_COLOUR, "square-open"),
        ("candidate", CANDIDATE_COLOUR, "circle"),
    ):
        data.append(_arm_p50(arm, colour, symbol, report.latency))
        p99 = [getattr(row, f"{arm}_p99_ns") for row in report.latency]
        if any(value is not None for value in p99):
            trace = _line(f"{arm} p99", colour, "line-ew-open", sizes, [_ms(v) for v in p99])
            trace["line"]["dash"] = "dot"
            trace["hovertext"] = [f"{arm} p99: {wording.duration(value)}" for value in p99]
            data.append(trace)
    for index, arm in enumerate(_baseline_arms(report)):
        colour, symbol = _baseline_style(index)
        rows = [row for row in report.baselines if row.arm == arm]
        values = [_ms(row.arm_p50_ns) for row in rows]
        name = f"{escape(arm)} p50"
        trace = _line(name, colour, symbol, [row.batch_size for row in rows], values)
        trace["hovertext"] = [f"{name}: {wording.duration(row.arm_p50_ns)}" for row in rows]
        data.append(trace)
    layout = {
        "xaxis": _batch_axis(report),
        "yaxis": {"title": {"text": "latency of one call"}, "type": "log", **_log_ticks(data)},
    }
    caption = (
        "Latency of each arm on a logarithmic scale, with 95 % intervals where they were measured. "
        "A p99 is drawn only where the samples support one."
    )
    return Figure("latency", "Latency by batch size", caption, data, layout)


def _arm_p50(arm: str, colour: str, symbol: str, rows: Sequence[LatencyRow]) -> Trace:
    ends = [
        tuple(_ms(getattr(row, f"{arm}_p50{end}_ns")) for end in ("", "_low", "_high"))
        for row in rows
    ]
    sizes = [row.batch_size for row in rows]
    trace = _line(f"{arm} p50", colour, symbol, sizes, [value for value, _, _ in ends])
    trace["error_y"] = _error_bars(ends)
    trace["hovertext"] = [
        f"{arm} p50, batch {row.batch_size}: {wording.duration(getattr(row, f'{arm}_p50_ns'))}"
        for row in rows
    ]
    return trace


def _calibration(report: Report, output: str) -> Figure | None:
    curves = report.calibration_curve.get(output, {})
    data, top = [], 0.0
    for arm, colour, symbol in (
        ("control", CONTROL_COLOUR, "square-open"),
        ("candidate", CANDIDATE_COLOUR, "circle"),
    ):
        points = [point for point in curves.get(arm, []) if _drawable(point)]
        x = [point.mean_predicted for point in points]
        y = [point.observed_rate for point in points]
        top = max([top, *(v for v in (*x, *y) if v is not None)])
        trace = _line(arm, colour, symbol, x, y)
        trace["hovertext"] = [
            f"{arm}: predicted {point.mean_predicted:.4f}, observed {point.observed_rate:.4f}, "
            f"{wording.count(point.num_rows, 'row')}"
            for point in points
        ]
        data.append(trace)
    if top == 0.0:
        return None
    layout = _diagonal("mean predicted probability", "observed rate", top)
    caption = "Rows in bins of predicted probability. On the dashed line predictions come true."
    return Figure(
        f"calibration-{_slug(report, output)}", f"Calibration: {output}", caption, data, layout
    )


def _scatter(report: Report, output: str) -> Figure | None:
    pairs = report.scatter.get(output, [])
    if not pairs:
        return None
    trace = {
        "type": "scatter",
        "mode": "markers",
        "x": [control for control, _ in pairs],
        "y": [candidate for _, candidate in pairs],
        "marker": {"size": 4, "opacity": 0.45, "color": CANDIDATE_COLOUR},
        "hovertemplate": "control %{x:.4f}<br>candidate %{y:.4f}<extra></extra>",
        "showlegend": False,
    }
    top = max(max(pair) for pair in pairs)
    caption = f"{wording.count(len(pairs), 'sampled row')}: on the dashed line the arms agree."
    change = report.prediction_change.get(output)
    if change and change.max_abs is not None and change.mean_abs is not None:
        caption += (
            f" Over all rows the prediction moved by {change.mean_abs:.2g} on average and "
            f"{change.max_abs:.2g} at most."
        )
    layout = _diagonal("control", "candidate", top)
    key, title = f"scatter-{_slug(report, output)}", f"Predictions of both arms: {output}"
    return Figure(key, title, caption, [trace], layout)


def _slug(report: Report, output: str) -> str:
    # An element id: the position of the output, since its name may hold any character.
    return str(list(dict.fromkeys([*report.calibration_curve, *report.scatter])).index(output))


def _drawable(point: CalibrationPoint) -> bool:
    return point.mean_predicted is not None and point.observed_rate is not None


def _baseline_arms(report: Report) -> list[str]:
    return list(dict.fromkeys(row.arm for row in report.baselines))


def _baseline_style(index: int) -> tuple[str, str]:
    return (
        BASELINE_COLOURS[index % len(BASELINE_COLOURS)],
        _BASELINE_SYMBOLS[index % len(_BASELINE_SYMBOLS)],
    )


def _batch_axis(report: Report) -> dict[str, Any]:
    sizes = {row.batch_size for row in report.latency} | {r.batch_size for r in report.baselines}
    order = [str(size) for size in sorted(sizes)]
    return {
        "title": {"text": "batch size"},
        "type": "category",
        "categoryorder": "array",
        "categoryarray": order,
    }


def _line(
    name: str, colour: str, symbol: str, x: Sequence[float | None], y: Sequence[float | None]
) -> Trace:
    as_category = all(isinstance(value, int) for value in x)
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [str(value) for value in x] if as_category else list(x),
        "y": list(y),
        "line": {"color": colour, "width": 2},
        "marker": {"symbol": symbol, "size": 9, "color": colour},
        "hoverinfo": "text",
    }


def _error_bars(ends: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    above, below = [], []
    for value, low, high in ends:
        known = value is not None and low is not None and high is not None
        above.append((high or 0.0) - (value or 0.0) if known else 0.0)
        below.append((value or 0.0) - (low or 0.0) if known else 0.0)
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "width": 5}


def _log_ticks(data: Sequence[Trace]) -> dict[str, Any]:
    # Plotly labels a logarithmic axis "2, 5, 10, 2"; whole durations read better.
    values = [value for trace in data for value in trace["y"] if value and value > 0]
    if not values:
        return {}
    powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
    ticks = [step * 10.0**power for power in powers for step in (1, 2, 5)]
    return {"tickvals": ticks, "ticktext": [format_duration(tick * NS_PER_MS) for tick in ticks]}


def _ms(duration_ns: float | None) -> float | None:
    return None if duration_ns is None else duration_ns / NS_PER_MS


def _vertical(x: float, dash: str) -> dict[str, Any]:
    return {
        "type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1,
        "line": {"dash": dash, "width": 1.5},
    }  # fmt: skip


def _horizontal(y: float) -> dict[str, Any]:
    return {
        "type": "line", "y0": y, "y1": y, "xref": "paper", "x0": 0, "x1": 1,
        "line": {"dash": "dash", "width": 1.5},
    }  # fmt: skip


def _top_label(x: float, text: str, anchor: str) -> dict[str, Any]:
    return {
        "x": x, "y": 1, "yref": "paper", "yanchor": "bottom", "text": text, "showarrow": False,
        "xanchor": anchor,
    }  # fmt: skip


def _diagonal(x_title: str, y_title: str, top: float) -> dict[str, Any]:
    end = min(1.0, top * 1.05) or 1.0
    ticks = {"range": [0, end], "tickformat": ".2~g"}
    return {
        "xaxis": {"title": {"text": x_title}, **ticks},
        "yaxis": {"title": {"text": y_title}, **ticks},
        "shapes": [
            {
                "type": "line", "x0": 0, "y0": 0, "x1": end, "y1": end,
                "line": {"dash": "dash", "width": 1.5},
            }
        ],
    }  # fmt: skip
