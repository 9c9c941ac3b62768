"""`rankopt data`: what the rows of a model card hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import AsJson, Data, Out, Overwrite, Progress, print_json, print_table
from rankopt.cli.main import command_line
from rankopt.errors import EXIT_FAIL, EXIT_INCONCLUSIVE

if TYPE_CHECKING:
    from rankopt.data.report.schema import SplitReport

app = typer.Typer(no_args_is_help=True)

Card = Annotated[str, typer.Argument(help="A model card: a path, or a name in models/.")]
Reference = Annotated[
    str | None,
    typer.Option(
        "--reference", help="What the rows are compared with: a split or a path; default: train."
    ),
]


@app.callback()
def data() -> None:
    """Look at the rows of a model card."""


@app.command("report")
def report(
    card: Card,
    out: Out,
    data: Data = None,
    reference: Reference = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say what each split holds, how far it is from the reference, and whether limits are kept.

    Exits with 1 where the card's data.limits are broken, with 3 where one could not be judged.
    """
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.jobs.data_report import data_report

        found = data_report(
            card,
            out,
            data=data,
            reference=reference,
            overwrite=overwrite,
            reproduce=command_line(),
            progress=progress.step,
        )
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        for split in found.splits:
            typer.echo(_summary(split))
        rows = [(b.split, b.column, b.limit, b.got, b.allowed) for b in found.breaches]
        if rows:
            print_table(("split", "column", "limit", "found", "allowed"), rows)
        for line in (*found.not_judged, *found.notes):
            typer.echo(f"- {line}")
        if found.verdict:
            typer.echo(f"limits: {found.verdict}")
        typer.echo(f"report: {out / 'data.html'}")
    if found.verdict == "fail":
        raise typer.Exit(EXIT_FAIL)
    if found.verdict == "inconclusive":
        raise typer.Exit(EXIT_INCONCLUSIVE)


def _summary(split: SplitReport) -> str:
    cells = [f"{split.num_rows:,} rows"]
    cells += [f"{rate.label} {rate.rate:.4f}" for rate in split.labels if rate.rate is not None]
    nulls = max(split.columns, key=lambda column: column.null_rate)
    if nulls.null_rate:
        cells.append(f"most nulls {nulls.column} {nulls.null_rate:.2%}")
    drifted = [column for column in split.columns if column.drift is not None]
    if drifted:
        most = max(drifted, key=lambda column: column.drift.psi if column.drift else 0.0)
        cells.append(f"most drift {most.column} PSI {most.drift.psi if most.drift else 0.0:.3g}")
    return f"{split.name}: {', '.join(cells)}"
