"""`rankopt refresh`: new weights in an artifact that is already compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankopt.cli.console import Out, Overwrite, Progress

app = typer.Typer()


@app.command()
def refresh(
    artifact: Annotated[Path, typer.Argument(help="The artifact folder.")],
    checkpoint: Annotated[Path, typer.Option("--checkpoint", help="The new weights.")],
    out: Out,
    overwrite: Overwrite = False,
) -> None:
    """Put new weights into an artifact: the recipe's kept passes run again, the compiler does not.

    The result is checked in a fresh process like any artifact. Its quality is not: that is for
    `rankopt ab`.
    """
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.artifact.refresh import refresh_artifact

        refresh_artifact(artifact, checkpoint, out, overwrite=overwrite, progress=progress.step)
    typer.echo(f"artifact: {out}")
