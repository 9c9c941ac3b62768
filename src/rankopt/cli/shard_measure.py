"""`rankopt shard measure`: predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import AsJson, Out, Overwrite, Progress, print_json, print_table
from rankopt.cli.main import command_line
from rankopt.cli.shard_words import CARD, IDS_PER_ROW, SHARDING_TYPES, TOPOLOGY, read_options

if TYPE_CHECKING:
    from rankopt.sharding.measured import PlanMeasurement


def measure(
    source: CARD,
    topology: TOPOLOGY,
    out: Out,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Of `shard plan --out`; default: what would be chosen."),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="Rows of one rank; default: the plan's, or 2048."),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option("--optimizer", help="Of the tables; default: the plan's, or the card's."),
    ] = None,
    sharding_types: SHARDING_TYPES = None,
    communication: Annotated[
        str, typer.Option("--communication", help="Send pooled vectors as fp32, fp16 or bf16.")
    ] = "fp32",
    ids_per_row: IDS_PER_ROW = None,
    zipf: Annotated[
        float, typer.Option("--zipf", help="Exponent of the law that ids follow; 0: all alike.")
    ] = 1.05,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Steps of each plan; default: 40.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A first look: 9 steps, wide intervals.")
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan and its alternatives on this machine, beside what was predicted of them."""
    options = read_options(
        optimizer=optimizer,
        sharding_types=sharding_types,
        communication=communication,
        ids_per_row=ids_per_row,
    )
    with Progress() as progress:
        progress.step("loading torchrec")
        from rankopt.jobs.shard_measure import DEFAULT_STEPS, QUICK_STEPS, measure_plans
        from rankopt.jobs.shard_plan import read_plan
        from rankopt.output import staged_output
        from rankopt.sharding.report import write_measurement

        given = None if plan is None else read_plan(plan)
        with staged_output(out, overwrite=overwrite) as stage:
            found = measure_plans(
                source,
                topology,
                plan=given,
                batch_size=batch_size,
                zipf=zipf,
                num_steps=steps or (QUICK_STEPS if quick else DEFAULT_STEPS),
                reproduce=command_line(),
                progress=progress.step,
                detail=progress.update,
                **options,
            )
            write_measurement(found, stage)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    _show(found)
    typer.echo(f"page: {out / 'measured.html'}")


def _show(found: PlanMeasurement) -> None:
    from rankopt.sharding.measured_page import page_of

    page = page_of(found)
    typer.echo(page.headline)
    for table in page.tables:
        typer.echo(f"\n{table.title}")
        print_table(table.headings, table.rows)
    for note in found.notes:
        typer.echo(f"- {note}")
