"""What a plan says, in words, rows and figures: the one source of the page and of the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rankopt.review.page import flatten
from rankopt.review.plots import Figure
from rankopt.review.rendering import Table
from rankopt.sharding.schema import Alternative, MemoryParts, RankLoad, ShardPlan, TablePlan
from rankopt.units import BYTES_PER_GIB, NS_PER_MS, format_bytes, format_duration

ALTERNATIVE_HEADINGS = (
    "Alternative", "Verdict", "Step", "All-to-all", "Device memory", "Host memory", "Why",
)  # fmt: skip
RANK_HEADINGS = (
    "Rank", "Host", "Shards", "Device memory", "Host memory", "Lookup", "Update", "All-to-all",
    "All-reduce", "Step",
)  # fmt: skip
MEMORY_HEADINGS = (
    "Rank", "Memory", "Weights", "Optimizer", "Activations", "Buffers", "Total", "Usable",
)  # fmt: skip
TABLE_HEADINGS = (
    "Table", "Rows", "Dim", "Ids a row", "Size", "Sharding", "Kernel", "Cache", "Ranks",
)  # fmt: skip
MAX_RANKS_NAMED = 8
NONE = "none"

_PARTS: tuple[tuple[str, str, Callable[[MemoryParts], int]], ...] = (
    ("weights", "#2c7fb8", lambda parts: parts.weights_bytes),
    ("optimizer", "#d98a1f", lambda parts: parts.optimizer_bytes),
    ("activations", "#2a9d8f", lambda parts: parts.activations_bytes),
    ("buffers", "#a0609e", lambda parts: parts.buffers_bytes),
)
_TIMES: tuple[tuple[str, str, Callable[[RankLoad], float]], ...] = (
    ("lookup", "#2c7fb8", lambda rank: rank.lookup_ns),
    ("update", "#d98a1f", lambda rank: rank.update_ns),
    ("all-to-all", "#2a9d8f", lambda rank: rank.all_to_all_ns),
    ("all-reduce", "#a0609e", lambda rank: rank.all_reduce_ns),
    ("dense", "#7d8794", lambda rank: rank.dense_ns or 0.0),
)


@dataclass(frozen=True)
class Page:
    """A plan, or a measurement of some, in readable words."""

    title: str
    headline: str
    tiles: list[tuple[str, str, str]]
    tables: list[Table]
    facts: list[tuple[str, str]]


def page_of(plan: ShardPlan) -> Page:
    """Put a plan into words."""
    verdict = "Plan" if plan.fits else "No plan fits"
    kinds = Counter(f"{table.sharding_type} {table.compute_kernel}" for table in plan.tables)
    mix = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return Page(
        title=f"{verdict}: {plan.model} over {plan.topology_name}",
        headline=(
            f"{verdict}: {plan.chosen}, {plan.precision} rows. {plan.reason[:1].upper()}"
            f"{plan.reason[1:]}. Tables: {mix}."
        ),
        tiles=_tiles(plan),
        tables=[
            Table(
                "Alternatives", ALTERNATIVE_HEADINGS, [_alternative(a) for a in plan.alternatives]
            ),
            Table("Ranks", RANK_HEADINGS, [_rank(rank) for rank in plan.ranks]),
            Table("Memory of each rank", MEMORY_HEADINGS, _memory(plan.ranks)),
            Table("Tables", TABLE_HEADINGS, [_table(table) for table in plan.tables]),
        ],
        facts=list(flatten(plan.topology)) + list(flatten(plan.versions)),
    )


def _tiles(plan: ShardPlan) -> list[tuple[str, str, str]]:
    worst = max(plan.ranks, key=lambda rank: (_fill(rank), -rank.rank))
    slowest = max(plan.ranks, key=lambda rank: (rank.step_ns, -rank.rank))
    share = f"rank {worst.rank} needs the most of what it has"
    tiles = [
        (
            "Tables",
            format_bytes(plan.table_bytes),
            f"{plan.num_tables} tables in {plan.precision}, {plan.world_size} ranks",
        ),
        ("Fullest memory", f"{_fill(worst):.0%}", share),
    ]
    if plan.step_ns is not None and plan.all_to_all_ns is not None:
        note = f"predicted, rank {slowest.rank}, {plan.batch_size:,} rows a rank"
        tiles.append(("Step", format_duration(plan.step_ns), note))
        tiles.append(("All-to-all", format_duration(plan.all_to_all_ns), "predicted, a step"))
    return tiles


def _fill(rank: RankLoad) -> float:
    return max(
        part.total_bytes / part.capacity_bytes if part.capacity_bytes else 0.0
        for part in (rank.hbm, rank.host_memory)
    )


def _alternative(row: Alternative) -> tuple[str, ...]:
    verdict = "chosen" if row.chosen else "fits" if row.fits else "does not fit"
    return (
        row.name,
        verdict,
        NONE if row.step_ns is None else format_duration(row.step_ns),
        NONE if row.all_to_all_ns is None else format_duration(row.all_to_all_ns),
        _of(row.hbm_bytes, row.hbm_capacity_bytes),
        _of(row.host_bytes, row.host_capacity_bytes),
        row.reason,
    )


def _of(size_bytes: int, capacity_bytes: int) -> str:
    if not capacity_bytes:
        return NONE
    return f"{format_bytes(size_bytes)} of {format_bytes(capacity_bytes)}"


def _rank(rank: RankLoad) -> tuple[str, ...]:
    return (
        str(rank.rank),
        str(rank.host),
        str(rank.num_shards),
        _of(rank.hbm.total_bytes, rank.hbm.capacity_bytes),
        _of(rank.host_memory.total_bytes, rank.host_memory.capacity_bytes),
        format_duration(rank.lookup_ns),
        format_duration(rank.update_ns),
        format_duration(rank.all_to_all_ns),
        format_duration(rank.all_reduce_ns),
        format_duration(rank.step_ns),
    )


def _memory(ranks: Sequence[RankLoad]) -> list[tuple[str, ...]]:
    return [
        (
            str(rank.rank),
            name,
            *(format_bytes(size(parts)) for _, _, size in _PARTS),
            format_bytes(parts.total_bytes),
            format_bytes(parts.capacity_bytes),
        )
        for rank in ranks
        for name, parts in (("device", rank.hbm), ("host", rank.host_memory))
        if parts.capacity_bytes and (parts.total_bytes or name == "device")
    ]


def _table(table: TablePlan) -> tuple[str, ...]:
    ranks = list(dict.fromkeys(shard.rank for shard in table.shards))
    shown = ", ".join(str(rank) for rank in ranks[:MAX_RANKS_NAMED])
    if len(ranks) > MAX_RANKS_NAMED:
        shown = f"{len(ranks)} ranks"
    return (
        table.name,
        f"{table.num_rows:,}",
        str(table.dim),
        f"{table.ids_per_row:g}",
        format_bytes(table.size_bytes),
        table.sharding_type,
        table.compute_kernel,
        NONE if table.cache_load_factor is None else f"{table.cache_load_factor:.0%}",
        shown,
    )


def figures(plan: ShardPlan) -> list[Figure]:
    """Draw the memory and the step of each rank."""
    drawn = [
        _memory_figure(plan, "hbm", "Device memory of each rank", lambda rank: rank.hbm),
        _memory_figure(plan, "host", "Host memory of each rank", lambda rank: rank.host_memory),
        _step_figure(plan),
    ]
    return [figure for figure in drawn if figure is not None]


def _memory_figure(
    plan: ShardPlan, key: str, title: str, of: Callable[[RankLoad], MemoryParts]
) -> Figure | None:
    capacity = of(plan.ranks[0]).capacity_bytes
    if not capacity or not any(of(rank).total_bytes for rank in plan.ranks):
        return None
    names = [str(rank.rank) for rank in plan.ranks]
    traces = []
    for name, colour, size in _PARTS:
        sizes = [size(of(rank)) for rank in plan.ranks]
        traces.append(
            _bar(name, colour, names, [s / BYTES_PER_GIB for s in sizes], map(format_bytes, sizes))
        )
    layout = _layout("GiB")
    usable = capacity / BYTES_PER_GIB
    layout["shapes"] = [
        {
            "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": usable, "y1": usable,
            "line": {"dash": "dash", "width": 1.5},
        }
    ]  # fmt: skip
    caption = (
        f"The dashed line is what a plan may use: {format_bytes(capacity)} a rank, the reserved "
        "share taken off."
    )
    return Figure(f"memory-{key}", title, caption, traces, layout)


def _step_figure(plan: ShardPlan) -> Figure:
    names = [str(rank.rank) for rank in plan.ranks]
    traces = []
    for name, colour, time in _TIMES:
        times = [time(rank) for rank in plan.ranks]
        if any(times):
            values = [t / NS_PER_MS for t in times]
            traces.append(_bar(name, colour, names, values, map(format_duration, times)))
    caption = (
        "Predicted from the topology's bandwidths; the slowest rank is the step. Nothing overlaps."
    )
    if not plan.fits:
        caption += " This placement does not fit, so it cannot run."
    return Figure("step", "A step of each rank", caption, traces, _layout("ms"))


def _bar(
    name: str, colour: str, ranks: list[str], values: list[float], texts: Any
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": ranks,
        "y": [round(value, 6) for value in values],
        "marker": {"color": colour},
        "hovertext": [f"{escape(name)}: {text}" for text in texts],
        "hoverinfo": "text",
    }


def _layout(unit: str) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "xaxis": {"title": {"text": "rank"}, "type": "category"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
