"""What a peer bench found, in words: for the terminal and for the documentation."""

from __future__ import annotations

from rankopt.bench.peers.goals import nearest_limit
from rankopt.bench.peers.result import GeometricMean, MissedGoal, PeerResult, TimeBreakdown
from rankopt.diagnose.schema import PARTS, Part, PartRow
from rankopt.units import format_duration

GOALS = {"ci_low": "an interval from", "geometric_mean": "for the mean"}


def part_of(row: TimeBreakdown, part: Part) -> PartRow | None:
    """Return one part of a call; None where the call has none."""
    return next((each for each in row.parts if each.part == part), None)


def parts_text(row: TimeBreakdown) -> str:
    """Write the parts with their shares, largest first."""
    shares = [(part.part, f"{part.share:.0%}") for part in row.parts if part.share >= 0.005]
    return ", ".join(f"{name} {share}" for name, share in shares)


def dense_text(row: TimeBreakdown) -> str:
    """Write what the dense layers reach, their quantising included."""
    part = part_of(row, "dense")
    if part is None or part.operations_per_s is None or part.of_operations_peak is None:
        return ""
    return f"{_giga(part.operations_per_s)} GOP/s, {part.of_operations_peak:.0%} of peak"


def lookup_text(row: TimeBreakdown) -> str:
    """Write what the lookups reach."""
    part = part_of(row, "lookup")
    if part is None or part.bytes_per_s is None or part.of_bytes_peak is None:
        return ""
    return f"{_giga(part.bytes_per_s)} GB/s, {part.of_bytes_peak:.0%} of peak"


def limit_text(row: TimeBreakdown) -> str:
    """Write what most of a call's time is nearest to."""
    bound, share = nearest_limit(row)
    return f"{bound} ({share:.0%})"


def breakdown_table(result: PeerResult) -> list[tuple[str, ...]]:
    """Return a heading and one row per model and batch size: a column for each part there is."""
    rows = result.time_breakdown
    parts = [part for part in PARTS if any(part_of(row, part) for row in rows)]
    table: list[tuple[str, ...]] = [
        ("model", "batch", "one call", *parts, "dense reaches", "lookup reaches", "bound by")
    ]
    for row in rows:
        found = [part_of(row, part) for part in parts]
        table.append(
            (
                row.model,
                str(row.batch_size),
                format_duration(row.whole.p50_ns),
                *("" if part is None else f"{part.share:.0%}" for part in found),
                dense_text(row),
                lookup_text(row),
                limit_text(row),
            )
        )
    return table


def mean_text(mean: GeometricMean) -> str:
    """Write a geometric mean, with the goal where there is one."""
    text = f"{mean.ratio:.2f}"
    if mean.goal is None:
        return text
    return f"{text} (goal {mean.goal:g}, {'met' if mean.ratio >= mean.goal else 'missed'})"


def missed_text(missed: MissedGoal) -> str:
    """Write a cell that misses a goal, and what bounds it."""
    wanted = " and ".join(f"{GOALS[name]} {value:g}" for name, value in missed.wanted.items())
    got = missed.reason or "no ratio"
    if missed.ratio is not None:
        got = f"{missed.ratio:.2f} [{missed.ci_low:.2f}, {missed.ci_high:.2f}]"
    cell = f"{missed.model}, batch {missed.batch_size}, against {missed.peer}"
    return f"{cell}: {got}, wanted {wanted}; {_bound_text(missed)}"


def _bound_text(missed: MissedGoal) -> str:
    if missed.bound is None or missed.bound_share is None:
        return "what bounds it was not looked into"
    text = f"bound by {missed.bound} ({missed.bound_share:.0%} of a call)"
    if missed.largest_part is not None and missed.largest_share is not None:
        text += f"; largest part {missed.largest_part} ({missed.largest_share:.0%}"
        if missed.largest_of_limit is not None:
            text += f", at {missed.largest_of_limit:.0%} of its nearest limit"
        text += ")"
    return text


def _giga(per_s: float) -> str:
    value = per_s / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
