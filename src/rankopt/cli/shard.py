"""`rankopt shard`: how tables are spread over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankopt.cli.console import AsJson, Overwrite, Progress, print_json, print_table
from rankopt.cli.main import command_line
from rankopt.cli.shard_reshard import reshard, verify

if TYPE_CHECKING:
    from rankopt.sharding.schema import ShardPlan

app = typer.Typer(no_args_is_help=True)
app.command()(reshard)
app.command()(verify)


@app.callback()
def shard() -> None:
    """Spread embedding tables over hosts and ranks."""


@app.command()
def plan(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CARD", help="A model card, or a file that lists tables: a path or a name."
        ),
    ],
    topology: Annotated[
        str, typer.Option("--topology", help="A path, or a name in benchmarks/topologies.")
    ],
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
    sharding_types: Annotated[
        str | None,
        typer.Option("--sharding-types", help="Choose from these alone: table_wise,row_wise,..."),
    ] = None,
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
    ids_per_row: Annotated[
        list[str] | None,
        typer.Option("--ids-per-row", help="TABLE=MEAN lookups of a row, repeated."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Plan the sharding of a model without loading a weight; exit 1 when nothing fits."""
    options = _options(
        optimizer, precision, sharding_types, kernels, load_factors, communication, ids_per_row
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


def _options(
    optimizer: str | None,
    precision: str | None,
    sharding_types: str | None,
    kernels: str | None,
    load_factors: str,
    communication: str,
    ids_per_row: list[str] | None,
) -> dict[str, Any]:
    """Read the words of the command line; every wrong one is told at once."""
    from typing import get_args

    from rankopt.errors import Problem, UsageError, nearest
    from rankopt.sharding.setting import KERNELS, SHARDING_TYPES, Communication
    from rankopt.sharding.tables import Optimizer, Precision

    problems: list[Problem] = []

    def among(flag: str, words: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
        problems.extend(
            Problem(flag, f"must be among {', '.join(known)}", word, nearest(word, known))
            for word in words
            if word not in known
        )
        return tuple(dict.fromkeys(words))

    def number(flag: str, word: str) -> float:
        try:
            return float(word)
        except ValueError:
            problems.append(Problem(flag, "must be a number", word))
            return 0.0

    if optimizer is not None:
        among("--optimizer", [optimizer], get_args(Optimizer))
    if precision is not None:
        among("--precision", [precision], get_args(Precision))
    among("--communication", [communication], get_args(Communication))
    lookups = {}
    for word in ids_per_row or []:
        name, equals, value = word.partition("=")
        mean = number("--ids-per-row", value) if equals else 0.0
        if not 0 < mean < float("inf"):
            problems.append(Problem("--ids-per-row", "must be TABLE=MEAN, the mean above 0", word))
        lookups[name] = mean
    options = {
        "optimizer": optimizer,
        "precision": precision,
        "communication": communication,
        "sharding_types": among("--sharding-types", _words(sharding_types), SHARDING_TYPES),
        "kernels": among("--kernels", _words(kernels), KERNELS),
        "load_factors": tuple(number("--load-factors", w) for w in _words(load_factors)),
        "ids_per_row": lookups,
    }
    if problems:
        raise UsageError(problems=problems)
    return options


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


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
