"""`rankopt diagnose`: where the time goes, and what bounds it."""

from __future__ import annotations

from typing import Annotated

import typer

from rankopt.cli.console import (
    AsJson,
    Checkpoint,
    Data,
    Out,
    Overwrite,
    Progress,
    Threads,
    print_json,
    print_table,
)
from rankopt.cli.main import command_line

app = typer.Typer()


@app.command()
def diagnose(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CARD_OR_DIR", help="A model card (its eager model) or an artifact folder."
        ),
    ],
    out: Out,
    data: Data = None,
    checkpoint: Checkpoint = None,
    batch_sizes: Annotated[
        str, typer.Option("--batch-sizes", help="Rows of a call, as a list such as 1,64,512.")
    ] = "1,64,512",
    num_threads: Threads = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: few calls, wide intervals.")
    ] = False,
    measure_again: Annotated[
        bool,
        typer.Option("--measure-again", help="Measure this machine's peaks anew; they are kept."),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say where the time of one call goes, operator by operator, and what bounds it."""
    sizes = _sizes(batch_sizes)
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.jobs.diagnose import diagnose as run

        found = run(
            source,
            out,
            data=data,
            checkpoint=checkpoint,
            batch_sizes=sizes,
            num_threads=num_threads,
            quick=quick,
            again=measure_again,
            overwrite=overwrite,
            reproduce=command_line(),
            progress=progress.step,
            detail=progress.update,
        )
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rankopt.units import format_duration

    rows = [
        (
            str(batch.batch_size),
            part.part,
            format_duration(part.time.p50_ns),
            f"{part.share:.0%}",
            part.bound,
        )
        for batch in found.batches
        for part in batch.parts
    ]
    print_table(("batch", "part", "time", "share", "nearest limit"), rows)
    typer.echo(f"report: {out / 'diagnose.html'}")


def _sizes(text: str) -> tuple[int, ...]:
    from rankopt.errors import UsageError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--batch-sizes must be whole numbers above 0, such as 1,64,512; got {text!r}."
        )
    return tuple(dict.fromkeys(int(word) for word in words))
