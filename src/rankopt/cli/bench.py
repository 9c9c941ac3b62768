"""`rankopt bench`: the artifact beside other ways to serve the same models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import AsJson, Overwrite, Progress, Resume, print_json, print_table
from rankopt.cli.main import command_line

if TYPE_CHECKING:
    from rankopt.bench.peers.result import Comparison, PeerResult

app = typer.Typer()

Suite = Annotated[str, typer.Argument(help="A peer suite: a path, or a name in benchmarks/.")]
OutFile = Annotated[Path, typer.Option("--out", help="The JSON file to write.")]
Models = Annotated[str, typer.Option("--models", help="Only these, as a,b.")]
BatchSizes = Annotated[str, typer.Option("--batch-sizes", help="In place of the suite's, as 1,64.")]
Arms = Annotated[str, typer.Option("--arms", help="Only these, as x,y.")]
Breakdown = Annotated[
    bool,
    typer.Option(
        "--breakdown/--no-breakdown", help="Say where the time of rankopt's arm goes, or do not."
    ),
]


@app.command()
def bench(
    suite: Suite,
    out: OutFile,
    models: Models = "",
    batch_sizes: BatchSizes = "",
    arms: Arms = "",
    breakdown: Breakdown = True,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Time rankopt's artifact beside other engines, each at its best setting, in one run.

    Exit codes: 0 every model was measured, 1 a model or rankopt's own arm was not.
    """
    sizes = _sizes(batch_sizes)
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.bench.peers.suite import load_suite
        from rankopt.jobs.bench import bench as run_bench
        from rankopt.jobs.bench import is_complete

        chosen = load_suite(suite).chosen(_names(models), sizes, _names(arms))
        result = run_bench(
            chosen,
            out,
            overwrite=overwrite,
            resume=resume,
            breakdown=breakdown,
            command=command_line(),
            progress=progress.step,
            detail=progress.update,
        )
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        _show(result, out)
    raise typer.Exit(0 if is_complete(result, chosen) else 1)


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _sizes(given: str) -> list[int]:
    from rankopt.errors import UsageError

    sizes = []
    for name in _names(given):
        if not name.isdecimal():
            raise UsageError(f"--batch-sizes must be whole numbers, as 1,64; got {name!r}.")
        sizes.append(int(name))
    return sizes


def _show(result: PeerResult, out: Path) -> None:
    from rankopt.bench.peers.report import mean_text, missed_text

    eager = {(row.model, row.batch_size): row for row in result.against_eager}
    lines = [
        (
            row.model,
            f"batch {row.batch_size}",
            row.best_peer or "",
            _ratio(row),
            _ratio(eager.get((row.model, row.batch_size))),
        )
        for row in result.summary
    ]
    print_table(("model", "", "best peer", "its p50 / rankopt's", "eager / rankopt"), lines)
    _show_times(result)
    for item in result.not_run:
        typer.echo(f"not run: {item.model}: {item.arm}: {item.error}")
    for mean in result.geometric_means:
        if mean.batch_size is None:
            typer.echo(f"geometric mean against {mean.against}: {mean_text(mean)}")
    for missed in result.missed_goals:
        typer.echo(f"goal missed: {missed_text(missed)}")
    typer.echo(f"result: {out}")


def _show_times(result: PeerResult) -> None:
    """Print where the time of rankopt's arm goes, one line per model and batch size."""
    from rankopt.bench.peers.report import dense_text, limit_text, lookup_text, parts_text
    from rankopt.units import format_duration

    lines = [
        (
            row.model,
            f"batch {row.batch_size}",
            format_duration(row.whole.p50_ns),
            parts_text(row),
            dense_text(row),
            lookup_text(row),
            limit_text(row),
        )
        for row in result.time_breakdown
    ]
    if lines:
        heading = ("model", "", "one call", "where its time goes", "dense", "lookup", "bound by")
        print_table(heading, lines)
    for item in result.not_broken_down:
        sizes = ", ".join(map(str, item.batch_sizes))
        typer.echo(f"time not broken down: {item.model}: batch {sizes}: {item.error}")


def _ratio(row: Comparison | None) -> str:
    if row is None or row.ratio is None:
        return (row.reason or "") if row else ""
    return f"{row.ratio:.2f} [{row.ci_low:.2f}, {row.ci_high:.2f}]"
