"""What a measurement of plans says, in words, rows and figures: for the page and the terminal."""

from __future__ import annotations

from html import escape
from typing import Any

from rankopt.review.page import flatten
from rankopt.review.plots import CANDIDATE_COLOUR, CONTROL_COLOUR, Figure
from rankopt.review.rendering import Table
from rankopt.sharding.measured import PARTS, Compared, MeasuredPlan, PlanMeasurement
from rankopt.sharding.page import Page
from rankopt.units import NS_PER_MS, format_bytes, format_duration

PLAN_HEADINGS = ("Plan", "Tables", "Predicted step", "Measured step", "Ratio", "95 %", "Steps")
PART_HEADINGS = ("Figure", "Predicted", "Measured", "Ratio", "95 %", "Samples")
NONE = "none"


def page_of(found: PlanMeasurement) -> Page:
    """Put a measurement into words."""
    return Page(
        title=f"Plans measured: {found.model} over {found.topology_name}",
        headline=_headline(found),
        tiles=_tiles(found),
        tables=[
            Table("Plans", PLAN_HEADINGS, [_plan(plan) for plan in found.plans]),
            *(
                Table(plan.name, PART_HEADINGS, [_part(item) for item in plan.compared])
                for plan in found.plans
                if plan.compared
            ),
        ],
        facts=list(flatten(found.topology)),
    )


def _headline(found: PlanMeasurement) -> str:
    order = found.ordering
    if order.fastest_predicted == order.fastest_measured:
        said = f"{order.fastest_predicted} was predicted to be the fastest, and is."
    else:
        said = (
            f"{order.fastest_predicted} was predicted to be the fastest; {order.fastest_measured} "
            f"is, and the first takes {order.cost_of_choice:.2f} times as long "
            f"({order.ci_low:.2f} to {order.ci_high:.2f})."
        )
    pairs = "No two plans differ beyond their interval."
    if order.num_pairs:
        pairs = (
            f"Of {order.num_pairs} pairs that differ beyond their interval, "
            f"{order.num_pairs_in_order} are in the predicted order."
        )
    return f"{said} {pairs}"


def _tiles(found: PlanMeasurement) -> list[tuple[str, str, str]]:
    order = found.ordering
    chosen = next(plan for plan in found.plans if plan.chosen)
    step, memory = chosen.of("step"), chosen.of("memory")
    rank = NONE if order.rank_correlation is None else f"{order.rank_correlation:.2f}"
    tiles = [("Rank correlation", rank, f"of {order.num_alternatives} plans' steps")]
    if step is not None and step.measured is not None:
        note = f"{chosen.name}; predicted {format_duration(step.predicted)}"
        tiles.append(("Step", format_duration(step.measured), note))
        tiles.append(("Measured / predicted", _ratio(step), f"step of {chosen.name}"))
    if memory is not None and memory.measured is not None:
        note = f"fullest rank; predicted {format_bytes(round(memory.predicted))}"
        tiles.append(("Memory", format_bytes(round(memory.measured)), note))
    return tiles


def _plan(plan: MeasuredPlan) -> tuple[str, ...]:
    mix = ", ".join(f"{number} {kind}" for kind, number in plan.sharding.items())
    name = f"{plan.name} (chosen)" if plan.chosen else plan.name
    step = plan.of("step")
    if step is None:
        return (name, mix, f"as {plan.same_as}", "", "", "", "")
    return (name, mix, *_figures(step), str(step.num_samples))


def _part(item: Compared) -> tuple[str, ...]:
    return (PARTS[item.part], *_figures(item), str(item.num_samples))


def _figures(item: Compared) -> tuple[str, str, str, str]:
    interval = NONE
    if item.ci_low is not None and item.ci_high is not None:
        interval = f"{item.ci_low:.3g} to {item.ci_high:.3g}"
    return (_value(item, item.predicted), _value(item, item.measured), _ratio(item), interval)


def _value(item: Compared, value: float | None) -> str:
    if value is None:
        return NONE
    return format_duration(value) if item.unit == "ns" else format_bytes(round(value))


def _ratio(item: Compared) -> str:
    return NONE if item.ratio is None else f"{item.ratio:.3g}"


def figures(found: PlanMeasurement) -> list[Figure]:
    """Draw each plan's step, predicted and measured, and the ratio of every part."""
    plans = [plan for plan in found.plans if plan.compared]
    return [_steps(plans), _ratios(plans)]


def _steps(plans: list[MeasuredPlan]) -> Figure:
    names = [escape(plan.name) for plan in plans]
    traces = []
    for title, colour, key in (
        ("predicted", CONTROL_COLOUR, "predicted"),
        ("measured", CANDIDATE_COLOUR, "measured"),
    ):
        steps = [getattr(plan.of("step"), key) or 0.0 for plan in plans]
        traces.append(
            {
                "type": "bar",
                "name": title,
                "x": names,
                "y": [round(step / NS_PER_MS, 6) for step in steps],
                "marker": {"color": colour},
                "hovertext": [f"{title}: {format_duration(step)}" for step in steps],
                "hoverinfo": "text",
            }
        )
    layout = {
        "barmode": "group",
        "xaxis": {"title": {"text": "plan"}, "type": "category"},
        "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
    }
    caption = "The slowest rank's step of each plan, the plans run in turns."
    return Figure("steps", "A step of each plan", caption, traces, layout)


def _ratios(plans: list[MeasuredPlan]) -> Figure:
    traces = [_ratio_trace(plan) for plan in plans]
    layout = {
        "xaxis": {"title": {"text": "measured / predicted"}, "type": "log"},
        "yaxis": {"type": "category", "autorange": "reversed"},
        "shapes": [
            {
                "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": 1, "x1": 1,
                "line": {"dash": "dash", "width": 1.5},
            }
        ],
    }  # fmt: skip
    caption = "1 is as predicted, on a logarithmic axis; bars are 95 % intervals."
    return Figure("ratios", "Measured over predicted", caption, traces, layout)


def _ratio_trace(plan: MeasuredPlan) -> dict[str, Any]:
    items = [(item, item.ratio) for item in plan.compared if item.ratio is not None]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": escape(plan.name),
        "x": [round(ratio, 6) for _, ratio in items],
        "y": [PARTS[item.part] for item, _ in items],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [round((item.ci_high or ratio) - ratio, 6) for item, ratio in items],
            "arrayminus": [round(ratio - (item.ci_low or ratio), 6) for item, ratio in items],
        },
        "hovertext": [f"{escape(plan.name)}: {_ratio(item)}" for item, _ in items],
        "hoverinfo": "text",
    }
