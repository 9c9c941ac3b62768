"""`rankopt shard reshard` and `rankopt shard verify`: checkpoints of sharded models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import AsJson, Overwrite, Progress, print_json, print_table

if TYPE_CHECKING:
    from rankopt.sharding.reshard import Resharded
    from rankopt.sharding.verify import Verified

FORMS = "a torch.distributed.checkpoint folder, a .pt or a .safetensors file"


def reshard(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help=f"The checkpoint: {FORMS}.")],
    out: Annotated[
        Path, typer.Option("--out", help="A folder; or a .pt or .safetensors file, for one rank.")
    ],
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, help="Ranks that will read it; default: the plan's."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option("--plan", help="Of `shard plan --out`; default: even blocks of rows."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Cut a checkpoint for another number of ranks, optimizer state and all, in little memory."""
    from rankopt.errors import Problem, UsageError

    if world_size is None and plan is None:
        hint = "Add --world-size N, or --plan FILE of `rankopt shard plan --out`."
        raise UsageError(problems=[Problem("--world-size", "is required", hint=hint)])
    with Progress() as progress:
        progress.step("opening the checkpoint")
        from rankopt.jobs.shard_plan import read_plan
        from rankopt.sharding.reshard import reshard as cut_anew

        placements = None if plan is None else read_plan(plan)
        ranks = placements.world_size if world_size is None and placements else world_size or 1
        progress.step(f"writing for {ranks} rank{'s' if ranks > 1 else ''}")
        done = cut_anew(
            checkpoint,
            out,
            ranks,
            plan=placements,
            overwrite=overwrite,
            progress=progress.update,
        )
    if as_json:
        print_json(done.model_dump(mode="json"))
    else:
        _show_resharded(done)


def verify(
    control: Annotated[Path, typer.Argument(metavar="A", help=f"A checkpoint: {FORMS}.")],
    candidate: Annotated[
        Path | None,
        typer.Argument(metavar="[B]", help="Another; without it A's own checksums are checked."),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0, help="Allowed absolute difference; 0: bit for bit."),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Say whether two checkpoints hold the same tables, however they are cut; exit 1 if not."""
    with Progress() as progress:
        progress.step("opening the checkpoints")
        from rankopt.sharding.verify import verify as compare

        progress.step("comparing")
        done = compare(control, candidate, tolerance=tolerance, progress=progress.update)
    if as_json:
        print_json(done.model_dump(mode="json"))
    else:
        _show_verified(done)
    if not done.same:
        raise typer.Exit(1)


def _show_resharded(done: Resharded) -> None:
    from rankopt.units import format_bytes

    print_table(
        ("rank", "shards", "size"),
        [
            (f"rank {share.rank}", f"{share.num_shards} shards", format_bytes(share.size_bytes))
            for share in done.ranks
        ],
    )
    for note in done.notes:
        typer.echo(f"- {note}")
    checked = "its checksums agree" if done.checked else "it carried no checksums"
    typer.echo(f"{done.num_tensors} tensors of {done.source}: {checked}")
    typer.echo(f"checkpoint: {done.out}")


def _show_verified(done: Verified) -> None:
    for difference in done.differences:
        typer.echo(difference.message)
    for note in done.notes:
        typer.echo(f"- {note}")
    if done.candidate is None:
        typer.echo("whole" if done.same else "damaged")
    elif done.same and done.tolerance:
        typer.echo(f"same within {done.tolerance:g}: {done.num_tensors} tensors")
    else:
        typer.echo(f"same: {done.num_tensors} tensors" if done.same else "different")
