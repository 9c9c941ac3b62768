"""`rankopt diagnose`: where the time goes, and what bounds it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

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

if TYPE_CHECKING:
    from rankopt.diagnose.collectives import Backend, Measured

app = typer.Typer()


@app.command()
def diagnose(
    out: Out,
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="CARD_OR_DIR",
            help="A model card (its eager model) or an artifact folder; --collectives needs none.",
        ),
    ] = None,
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
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives", help="Measure all-to-all and all-reduce by size, for a topology."
        ),
    ] = False,
    num_processes: Annotated[
        int | None,
        typer.Option("--num-processes", min=2, help="With --collectives: how many take part."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="With --collectives: gloo or nccl.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Say where the time of one call goes, operator by operator, and what bounds it."""
    sizes = _sizes(batch_sizes)
    _check(source, collectives, num_processes, backend)
    if source is None:
        _measure_collectives(out, num_processes, backend, quick, overwrite, as_json, alone=True)
        return
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
    if collectives:
        _measure_collectives(out, num_processes, backend, quick, overwrite, False, alone=False)
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


def _check(
    source: str | None, collectives: bool, num_processes: int | None, backend: str | None
) -> None:
    from rankopt.errors import Problem, UsageError

    problems = []
    if source is None and not collectives:
        hint = "Name a model card or an artifact folder, or add --collectives."
        problems.append(Problem("CARD_OR_DIR", "is required", hint=hint))
    if backend not in {None, "gloo", "nccl"}:
        problems.append(Problem("--backend", "must be gloo or nccl", backend))
    for flag, value in (("--num-processes", num_processes), ("--backend", backend)):
        if value is not None and not collectives:
            problems.append(Problem(flag, "goes with --collectives alone"))
    if problems:
        raise UsageError(problems=problems)


def _measure_collectives(
    out: Path,
    num_processes: int | None,
    backend: str | None,
    quick: bool,
    overwrite: bool,
    as_json: bool,
    *,
    alone: bool,
) -> None:
    """Measure, and write into a folder of its own, or beside the diagnosis of a model."""
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.diagnose.collectives import measure_collectives, write_collectives
        from rankopt.output import staged_output

        def measure() -> Measured:
            progress.step("measuring collectives and lookups")
            return measure_collectives(
                num_processes=num_processes,
                backend=cast("Backend | None", backend),
                quick=quick,
                reproduce=command_line(),
            )

        if alone:
            with staged_output(out, overwrite=overwrite) as stage:
                measured = measure()
                write_collectives(measured, stage)
        else:
            measured = measure()
            write_collectives(measured, out)
    found = measured.collectives
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rankopt.units import BYTES_PER_GB, format_bytes, format_duration

    rows = [
        (
            item.collective,
            format_bytes(message.size_bytes),
            format_duration(message.p50_ns),
            f"{format_duration(message.lowest_ns)} to {format_duration(message.highest_ns)}",
            f"{message.bytes_per_s / BYTES_PER_GB:.3g} GB/s",
        )
        for item in found.collectives
        for message in item.messages
    ]
    if alone:
        print_table(("collective", "message", "time", "range", "rate"), rows)
        typer.echo(f"topology: {out / 'topology.yaml'}")


def _sizes(text: str) -> tuple[int, ...]:
    from rankopt.errors import UsageError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(
            f"--batch-sizes must be whole numbers above 0, such as 1,64,512; got {text!r}."
        )
    return tuple(dict.fromkeys(int(word) for word in words))
