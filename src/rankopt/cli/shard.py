"""`rankopt shard`: how tables are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import AsJson, Overwrite, Progress, print_json, print_table
from rankopt.cli.main import command_line
from rankopt.cli.shard_measure import measure
from rankopt.cli.shard_reshard import reshard, verify
from rankopt.cli.shard_words import CARD, IDS_PER_ROW, SHARDING_TYPES, TOPOLOGY, read_options

if TYPE_CHECKING:
    from rankopt.sharding.schema import ShardPlan

app = typer.Typer(no_args_is_help=True)
app.command()(measure)
app.command()(reshard)
app.command()(verify)


@app.callback()
def shard() -> None:
    """Spread embedding tables over hosts and ranks."""


@app.command()
def plan(
    source: CARD,
    topology: TOPOLOGY,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="The plan's JSON file; a page with pictures lies beside it."),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows of one rank.")] = 2048,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer",
            help="Of the tables: sgd, row_wise_adagrad, adagrad, adam; default: the card's.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision", help="Of the rows: fp32, fp16; int8 to serve; default: the model's."
        ),
    ] = None,
    serving: Annotated[
        bool, typer.Option("--serving", help="Plan inference of quantised tables.")
    ] = False,
    sharding_types: SHARDING_TYPES = None,
    kernels: Annotated[
        str | None,
        typer.Option("--kernels", help="Choose from these alone: fused,fused_uvm_caching,..."),
    ] = None,
    load_factors: Annotated[
        str, typer.Option("--load-factors", help="Cache sizes to try, as shares of a table's rows.")
    ] = "0.05,0.1,0.2,0.4",
    communication: Annotated[
        str, typer.Option("--communication", help="Send pooled vectors as fp32, fp16 or bf16.")
    ] = "fp32",
    ids_per_row: IDS_PER_ROW = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan the sharding of a model without loading a weight; exit 1 when nothing fits."""
    options = read_options(
        optimizer=optimizer,
        precision=precision,
        sharding_types=sharding_types,
        kernels=kernels,
        load_factors=load_factors,
        communication=communication,
        ids_per_row=ids_per_row,
    )
    if out is not None:
        from rankopt.sharding.report import check_outputs

        check_outputs(out, overwrite=overwrite)
    with Progress() as progress:
        progress.step("reading the topology")
        from rankopt.sharding.topology import load_topology

        over = load_topology(topology)
        progress.step("loading torchrec")
        from rankopt.jobs.shard_plan import plan_shards

        found = plan_shards(
            source,
            over,
            batch_size=batch_size,
            serving=serving,
            reproduce=command_line(),
            progress=progress.step,
            **options,
        )
        if out is not None:
            from rankopt.sharding.report import write_plan

            progress.step("writing the plan")
            write_plan(found, out, overwrite=overwrite)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _show(found)
        if out is not None:
            typer.echo(f"plan: {out}")
            typer.echo(f"page: {out.with_suffix('.html')}")
    if not found.fits:
        raise typer.Exit(1)


def _show(found: ShardPlan) -> None:
    from rankopt.sharding.page import page_of

    page = page_of(found)
    typer.echo(page.headline)
    for table in page.tables:
        if not table.rows:
            continue
        typer.echo(f"\n{table.title}")
        print_table(table.headings, table.rows)
    for remedy in found.remedies:
        typer.echo(f"{remedy.number}. {remedy.text}")
    for note in found.notes:
        typer.echo(f"- {note}")
