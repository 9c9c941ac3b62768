"""What the kernels' measurement is asked for, what it writes, and the tables made of that."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rankopt.bench.stats import MIN_BLOCKS
from rankopt.content import read_yaml
from rankopt.diagnose.schema import Bound, MachinePeaks
from rankopt.errors import UsageError
from rankopt.units import NS_PER_MS, format_duration


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KernelGoals(_Frozen):
    """What the measured rows are held against, at some batch sizes."""

    batch_sizes: tuple[int, ...] = ()
    of_int8_peak: float | None = None
    of_gather: float | None = None
    against_fbgemm: float | None = None


class KernelSettings(_Frozen):
    """What is measured, and how long."""

    suite: str
    recipe: str
    batch_sizes: tuple[int, ...] = Field(min_length=1)
    num_threads: int | None = Field(default=None, gt=0)
    num_blocks: int = Field(default=12, ge=MIN_BLOCKS)
    block_duration_ns: int = Field(default=12 * NS_PER_MS, gt=0)
    min_calls: int = Field(default=3, gt=0)
    num_windows: int = Field(default=8, gt=0)
    goals: KernelGoals = KernelGoals()


class KernelRow(_Frozen):
    """One operator at one batch size, beside the machine's peak and fbgemm in the same blocks.

    Attributes:
        kind: an int8 layer by itself, layers in one call, or a lookup.
        model, layer: where it was met first.
        calls: model -> how often one call of its artifact makes exactly this one; 0 for a layer
            that runs as a part of a chain only.
        num_rows: that the operator is given: histories have more of them than the batch.
        achieved_per_s, peak_per_s: operations (a multiply and an add are two) or bytes of rows; the
            peak is a loop of multiply-adds on registers, or gathering the same rows: copying them
            as they are, one after the other.
        fraction: of the peak, with its 95 % interval.
        read_fraction: of a lookup, the time of reading the same rows and no more, over ours.
        write_fraction: of a lookup, the time of reading the same rows and writing as many floats to
            the same places, over ours.
        ratio_to_fbgemm: fbgemm's time over ours, with its interval.
        bound: what the time is nearest to, as `rankopt diagnose` says it.
    """

    kind: Literal["layer", "chain", "lookup"]
    model: str
    layer: str
    shape: str
    calls: dict[str, int]
    batch_size: int
    num_rows: int
    p50_ns: float
    achieved_per_s: float
    peak_per_s: float
    fraction: float
    ci_low: float
    ci_high: float
    read_fraction: float | None = None
    write_fraction: float | None = None
    fbgemm_p50_ns: float
    ratio_to_fbgemm: float
    ratio_ci_low: float
    ratio_ci_high: float
    bound: Bound
    num_samples: int
    num_blocks: int


class KernelResult(_Frozen):
    """The whole file."""

    made_at: str
    environment: dict[str, Any]
    command: str
    isa: str
    num_threads: int
    settings: KernelSettings
    machine: MachinePeaks
    rows: tuple[KernelRow, ...]
    not_run: dict[str, str] = {}
    """Model -> why it could not be captured."""


def read_settings(file: Path) -> KernelSettings:
    """Read the YAML file of settings."""
    return KernelSettings.model_validate(read_yaml(file, UsageError))


def table(content: dict[str, Any]) -> str:
    """Write the result file as the Markdown that stands in the documentation."""
    if not content["rows"]:
        return "Not measured yet: `make kernels`."
    result = KernelResult.model_validate(content)
    environment = result.environment
    lines = [
        f"`{result.command}`, {result.made_at[:10]}: {result.num_threads} threads on "
        f"{environment['num_usable_cores']} cores of {environment['cpu_model']} ({result.isa}), "
        f"torch {environment['libraries']['torch']}. Paired ratios in one interleaved run, with "
        "95 % intervals.",
    ]
    goals = result.settings.goals
    for size in goals.batch_sizes:
        rows = [row for row in result.rows if row.batch_size == size]
        lines += ["", f"Batch {size}:", "", *_detail(rows, goals)]
    lines += ["", "All batch sizes, lowest, middle and highest row of each kind:", ""]
    lines += _overview(result.rows)
    lines += ["", "All dense calls of one artifact together, of the int8 peak:", ""]
    lines += _totals(result.rows)
    lines += [f"- not run: {name}: {error}" for name, error in result.not_run.items()]
    return "\n".join(lines)


def _detail(rows: Sequence[KernelRow], goals: KernelGoals) -> list[str]:
    lines = [
        "| kind | where | shape | rows | time | reaches | of peak | goal | of reading alone "
        "| of read and write | fbgemm's time / ours | goal | nearest limit |",
        "|---" * 13 + "|",
    ]
    for row in rows:
        unit = "GB/s" if row.kind == "lookup" else "GOP/s"
        wanted = goals.of_gather if row.kind == "lookup" else goals.of_int8_peak
        against = None if row.kind == "lookup" else goals.against_fbgemm
        cells = [
            row.kind,
            f"{row.model}: {row.layer}",
            row.shape,
            f"{row.num_rows:,}",
            format_duration(row.p50_ns),
            f"{row.achieved_per_s / 1e9:.4g} of {row.peak_per_s / 1e9:.4g} {unit}",
            f"{row.fraction:.0%} [{row.ci_low:.0%}, {row.ci_high:.0%}]",
            _verdict(row.ci_low, row.ci_high, wanted),
            *(
                "" if each is None else f"{each:.0%}"
                for each in (row.read_fraction, row.write_fraction)
            ),
            f"{row.ratio_to_fbgemm:.2f} [{row.ratio_ci_low:.2f}, {row.ratio_ci_high:.2f}]",
            _verdict(row.ratio_ci_low, row.ratio_ci_high, against),
            row.bound,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _verdict(ci_low: float, ci_high: float, wanted: float | None) -> str:
    """Hold an interval against a goal; `open` while it holds the goal."""
    if wanted is None:
        return ""
    return "met" if ci_low >= wanted else "missed" if ci_high < wanted else "open"


def _overview(rows: Sequence[KernelRow]) -> list[str]:
    lines = ["| kind | batch | of peak | fbgemm's time / ours |", "|---|---|---|---|"]
    for kind in ("layer", "chain", "lookup"):
        for size in sorted({row.batch_size for row in rows}):
            some = [row for row in rows if (row.kind, row.batch_size) == (kind, size)]
            if some:
                reached = _three([row.fraction for row in some], lambda each: f"{each:.0%}")
                faster = _three([row.ratio_to_fbgemm for row in some], lambda each: f"{each:.2f}")
                lines.append(f"| {kind} | {size} | {reached} | {faster} |")
    return lines


def _three(values: Sequence[float], shown: Callable[[float], str]) -> str:
    return ", ".join(map(shown, (min(values), statistics.median(values), max(values))))


def _totals(rows: Sequence[KernelRow]) -> list[str]:
    """Weigh each call by its time: a model's narrow layers hardly count in its time."""
    sizes = sorted({row.batch_size for row in rows})
    dense = [row for row in rows if row.kind != "lookup"]
    models = dict.fromkeys(model for row in dense for model in row.calls)
    lines = ["| model | " + " | ".join(f"batch {size}" for size in sizes) + " |"]
    lines.append("|---" * (1 + len(sizes)) + "|")
    for model in models:
        cells = []
        for size in sizes:
            calls = [(row, row.calls.get(model, 0)) for row in dense if row.batch_size == size]
            spent = sum(row.p50_ns * count for row, count in calls)
            at_peak_ns = sum(row.fraction * row.p50_ns * count for row, count in calls)
            cells.append(f"{at_peak_ns / spent:.0%}" if spent else "")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines
