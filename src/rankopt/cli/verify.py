"""`rankopt verify`: an artifact's files, contract and outputs; with rows its quality too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankopt.cli.console import AsJson, Checkpoint, Progress, print_json
from rankopt.cli.main import command_line

app = typer.Typer()


@app.command()
def verify(
    artifact: Annotated[Path, typer.Argument(help="The artifact folder.")],
    data: Annotated[
        str | None,
        typer.Option("--data", help="Labelled rows to judge its quality on, with these kernels."),
    ] = None,
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Check an artifact: hashes, machine, contract, outputs; with --data its quality as well."""
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.jobs.verify import verify as check
        from rankopt.review.gates import exit_code

        found = check(
            artifact,
            data,
            checkpoint=checkpoint,
            reproduce=command_line(),
            progress=progress.step,
            detail=progress.update,
        )
    if as_json:
        answer = found.model_dump(mode="json")
        print_json({"passed": found.passed, "verdict": found.verdict, **answer})
    else:
        for problem in found.problems:
            typer.echo(f"problem: {problem}")
        for note in found.notes:
            typer.echo(f"note: {note}")
        if found.passed:
            typer.echo(
                f"{artifact}: sound; ran at batch {', '.join(map(str, found.batch_sizes))}, "
                f"largest difference {found.largest_difference:.2g} of the scores' spread"
            )
        typer.echo(f"verdict: {found.verdict}")
    raise typer.Exit(exit_code(found.verdict))
