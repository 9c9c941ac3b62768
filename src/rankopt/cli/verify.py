"""`rankopt verify`: an artifact's files and contract, in a fresh process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankopt.cli.console import AsJson, Progress, print_json
from rankopt.errors import EXIT_FAIL

app = typer.Typer()


@app.command()
def verify(
    artifact: Annotated[Path, typer.Argument(help="The artifact folder.")],
    as_json: AsJson = False,
) -> None:
    """Check an artifact: hashes, machine, contract, and its outputs on stored made-up rows."""
    with Progress() as progress:
        progress.step("running the artifact in a fresh process")
        from rankopt.artifact.verify import verify_artifact

        found = verify_artifact(artifact)
    if as_json:
        print_json({"passed": found.passed, **found.model_dump(mode="json")})
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
    raise typer.Exit(0 if found.passed else EXIT_FAIL)
