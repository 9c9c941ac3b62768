"""`rankopt predict`: a file scored with an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankopt.cli.console import Overwrite, Progress

app = typer.Typer()


@app.command()
def predict(
    artifact: Annotated[Path, typer.Argument(help="The artifact folder.")],
    data: Annotated[str, typer.Option("--data", help="The rows: a parquet, csv or Criteo file.")],
    out: Annotated[Path, typer.Option("--out", help="The parquet file to write.")],
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows a call.")] = 512,
    requests: Annotated[
        bool,
        typer.Option(
            "--requests",
            help="Compute what the rows of a request share once (pass hoist_requests).",
        ),
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Score a file: OUT holds row_id and one probability per output, in the input's order."""
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.artifact.predict import predict_file

        progress.step("scoring")
        num_rows = predict_file(
            artifact,
            data,
            out,
            batch_size=batch_size,
            requests=requests,
            overwrite=overwrite,
            progress=progress.update,
        )
    typer.echo(f"{out}: {num_rows:,} rows")
