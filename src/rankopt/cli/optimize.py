"""`rankopt optimize`: a recipe applied to a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankopt.cli.console import (
    AsJson,
    Checkpoint,
    Data,
    Model,
    Objective,
    Out,
    Overwrite,
    Progress,
    Recipe,
    Threads,
    print_json,
    show_passes,
)

app = typer.Typer()

Choices = Annotated[
    Path | None,
    typer.Option("--choices", help="passes.json of an earlier run: decide as it did, untimed."),
]


@app.command()
def optimize(
    recipe: Recipe,
    model: Model,
    out: Out,
    checkpoint: Checkpoint = None,
    data: Data = None,
    choices: Choices = None,
    objective: Objective = None,
    num_threads: Threads = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Apply a recipe to a trained model; OUT becomes the artifact folder."""
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt import api
        from rankopt.cli.choices import with_objective
        from rankopt.jobs.decisions import read_records

        folder = api.optimize(
            with_objective(recipe, objective),
            model,
            checkpoint,
            data,
            out=out,
            overwrite=overwrite,
            choices=choices,
            num_threads=num_threads,
            progress=progress.step,
            detail=progress.update,
        )
        records = read_records(folder)
    if as_json:
        print_json(
            {
                "artifact": str(folder),
                "passes": [record.model_dump(mode="json") for record in records],
            }
        )
        return
    show_passes(records)
    typer.echo(f"artifact: {folder}")
