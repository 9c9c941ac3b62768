"""`rankopt train`: a model card's module, trained to a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankopt.cli.console import (
    AsJson,
    Data,
    Overwrite,
    Progress,
    RayAddress,
    Resume,
    print_json,
)
from rankopt.cli.main import command_line
from rankopt.errors import EXIT_USAGE, Problem, UsageError

if TYPE_CHECKING:
    from rankopt.train.distributed.launch import TrainJob
    from rankopt.train.distributed.ranks import Ranks
    from rankopt.train.settings import TrainSettings

app = typer.Typer()

Card = Annotated[str | None, typer.Argument(help="A model card: a path, or a name in models/.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="The folder to write the result to."),
]
Recipe = Annotated[
    str | None, typer.Option("--recipe", help="A training recipe: one of train_* passes only.")
]
Epochs = Annotated[int | None, typer.Option("--epochs", help="At most so many passes.")]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", help="Rows per step, of all processes together.")
]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", help="Of the optimizer.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of initial weights and row order.")]
Threads = Annotated[int | None, typer.Option("--num-threads", help="Threads of PyTorch.")]

RowShards = Annotated[
    int | None,
    typer.Option("--row-shards", help="Stretches of rows, for runs of several processes."),
]
Workers = Annotated[
    int | None, typer.Option("--num-workers", min=1, help="Train in so many Ray Train workers.")
]
Restarts = Annotated[
    int,
    typer.Option(
        "--max-restarts", min=0, help="Start all Ray workers again so often after one has died."
    ),
]
Start = Annotated[
    Path | None, typer.Option("--start", help="A folder of `rankopt train` to go on from.")
]
SaveOptimizer = Annotated[
    bool, typer.Option("--save-optimizer", help="Write the optimizers' state beside the weights.")
]
Trace = Annotated[
    bool, typer.Option("--trace", help="Write trace.json, a Chrome trace of three steps.")
]
Peaks = Annotated[
    bool, typer.Option("--peaks", help="Measure the machine's peaks where none are known.")
]

CheckpointEvery = Annotated[
    int | None,
    typer.Option("--checkpoint-every", min=1, help="Steps between checkpoints to go on from."),
]
Reproduce = Annotated[
    Path | None,
    typer.Option(
        "--reproduce", help="Train again as the run.json of a run says, and compare the weights."
    ),
]


@app.command()
def train(
    card: Card = None,
    out: Out = None,
    recipe: Recipe = None,
    data: Data = None,
    epochs: Epochs = None,
    batch_size: BatchSize = None,
    learning_rate: LearningRate = None,
    seed: Seed = None,
    num_threads: Threads = None,
    row_shards: RowShards = None,
    num_workers: Workers = None,
    ray_address: RayAddress = None,
    max_restarts: Restarts = 0,
    start: Start = None,
    save_optimizer: SaveOptimizer = False,
    trace: Trace = False,
    peaks: Peaks = False,
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = False,
    reproduce: Reproduce = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a model card's module to a checkpoint, plainly or by a training recipe.

    OUT gets card.yaml (ready for `rankopt optimize --model`), checkpoint.safetensors,
    metrics.json, journal.jsonl and run.json. A flag goes before the card's `train:` settings. With
    --checkpoint-every, a run that was killed goes on by the same command and --resume.

    With --reproduce RUN a run is trained again with its own card, recipe and settings; exit code 0
    when the weights are the same bit for bit, 1 when they are not.

    Several processes train on the same global batches and give the same weights to rounding:
    `--num-workers N` starts them through Ray Train, here or on --ray-address;
    `torchrun --nproc-per-node N -m rankopt train CARD --out OUT` without Ray.
    """
    flags = {
        "epochs": epochs,
        "batch_size": batch_size,
        "row_shards": row_shards,
        "learning_rate": learning_rate,
        "seed": seed,
        "num_threads": num_threads,
    }
    if reproduce is not None:
        others = {
            "num_workers": num_workers,
            "ray_address": ray_address,
            "max_restarts": max_restarts or None,
            "trace": trace or None,
            "peaks": peaks or None,
            "checkpoint_every": checkpoint_every,
            "resume": resume or None,
        }
        _refuse_beside_reproduce(
            {"CARD": card, "recipe": recipe, **flags, "start": start, **others}
        )
        with _together() as ranks:
            code = _again(reproduce, out, data, save_optimizer, overwrite, as_json, ranks)
        raise typer.Exit(code)
    if card is None or out is None:
        raise _missing(card, out)
    from rankopt.models.card import load_card
    from rankopt.train.distributed.launch import TrainJob

    def ask() -> TrainJob:
        loaded = load_card(card)
        return TrainJob(
            card=str(loaded.path.resolve()) if loaded.path else card,
            out=str(out.expanduser().resolve()),
            settings=_settings(loaded.train, flags).model_dump(mode="json"),
            recipe=_absolute(recipe),
            data=_absolute(data),
            start=_absolute(start),
            save_optimizer=save_optimizer,
            trace=trace,
            peaks=peaks,
            overwrite=overwrite,
            checkpoint_every=checkpoint_every,
            resume=resume,
            command=command_line(),
        )

    if num_workers is not None or ray_address is not None or max_restarts:
        _show(_train_on_ray(ask(), num_workers, ray_address, max_restarts), out, as_json)
        return
    with _together() as ranks:
        metrics = _train_here(ask(), ranks)
    if ranks.is_first:
        _show(metrics, out, as_json)


@contextlib.contextmanager
def _together() -> Iterator[Ranks]:
    """Join torchrun's other processes, if it started this one: what is wrong is said once."""
    from rankopt.train.distributed.ranks import OtherRankFailed, join

    try:
        with join() as ranks:
            yield ranks
    except OtherRankFailed as error:
        raise typer.Exit(EXIT_USAGE) from error


def _train_here(job: TrainJob, ranks: Ranks) -> dict[str, Any]:
    """Train in this process, alone or as one of torchrun's."""
    from rankopt.train.distributed.launch import run_job

    with Progress(quiet=not ranks.is_first) as progress:
        progress.step(f"training {Path(job.card).stem}")
        return run_job(job, ranks, progress.note)


def _train_on_ray(
    job: TrainJob, num_workers: int | None, address: str | None, max_restarts: int
) -> dict[str, Any]:
    """Train in Ray Train's workers, and read what the first of them wrote."""
    from rankopt.train.distributed.launch import train_on_ray
    from rankopt.train.distributed.ranks import started_by_torchrun

    if num_workers is None:
        raise UsageError("--ray-address and --max-restarts need --num-workers.")
    if started_by_torchrun():
        raise UsageError("--num-workers starts workers through Ray; under torchrun, leave it out.")
    with Progress() as progress:
        progress.step(f"training {Path(job.card).stem} with {num_workers} Ray Train workers")
        train_on_ray(
            job, num_workers, address=address, max_restarts=max_restarts, progress=progress.note
        )
    metrics = (Path(job.out) / "metrics.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(metrics)
    return found


def _absolute(path: str | Path | None) -> str | None:
    """Make a path that exists here absolute: a worker runs in another folder."""
    if path is None:
        return None
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _show(metrics: dict[str, Any], out: Path, as_json: bool) -> None:
    """Print what came of a run."""
    card = out / "card.yaml"
    if as_json:
        print_json({"card": str(card), **metrics})
        return
    for name, judged in metrics["test"].items():
        typer.echo(f"test, {name}: {', '.join(_cells(judged))}")
    for line in _cost(metrics):
        typer.echo(line)
    typer.echo(f"card: {card}")


def _missing(card: str | None, out: Path | None) -> UsageError:
    """Say which of the two is not there, that --reproduce alone can do without."""
    problems = [
        Problem(name, "is required", hint="Only --reproduce RUN goes without it.")
        for name, value in (("CARD", card), ("--out", out))
        if value is None
    ]
    return UsageError(problems=problems)


def _refuse_beside_reproduce(given: dict[str, Any]) -> None:
    """Refuse what the run's manifest decides."""
    problems = [
        Problem(
            name if name.isupper() else f"--{name.replace('_', '-')}",
            "goes not with --reproduce, which takes it from run.json",
            value if isinstance(value, int | float) else str(value),
            "Leave it out, or train without --reproduce.",
        )
        for name, value in given.items()
        if value is not None
    ]
    if problems:
        raise UsageError(problems=problems)


def _again(
    run: Path,
    out: Path | None,
    data: str | None,
    save_optimizer: bool,
    overwrite: bool,
    as_json: bool,
    ranks: Ranks,
) -> int:
    """Train a run again, tell what came of it, and return the exit code."""
    with Progress(quiet=not ranks.is_first) as progress:
        progress.step("loading PyTorch")
        from rankopt.review.gates import exit_code
        from rankopt.train.reproducibility.reproduce import reproduce

        found = reproduce(
            run,
            out,
            data=data,
            save_optimizer=save_optimizer,
            overwrite=overwrite,
            command=command_line(),
            progress=progress.note,
            ranks=ranks,
        )
    if not ranks.is_first:
        return exit_code(found.verdict)
    if as_json:
        print_json(found.model_dump(mode="json"))
        return exit_code(found.verdict)
    for reason in found.reasons:
        typer.echo(f"- {reason}")
    for difference in found.differences:
        typer.echo(f"- {difference}")
    typer.echo(f"verdict: {found.verdict}")
    if found.out is not None:
        typer.echo(f"card: {Path(found.out) / 'card.yaml'}")
    return exit_code(found.verdict)


def _settings(defaults: TrainSettings, flags: dict[str, Any]) -> TrainSettings:
    """Put flags over the card's settings, refusing values the schema does not allow."""
    from pydantic import ValidationError

    from rankopt.problems import problems_of_validation
    from rankopt.train.settings import TrainSettings

    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return TrainSettings.model_validate({**defaults.model_dump(), **given})
    except ValidationError as error:
        problems = problems_of_validation("rankopt train", error, TrainSettings)
        raise UsageError(problems=problems) from error


def _cost(metrics: dict[str, Any]) -> list[str]:
    """Say what steps cost, and what each pass of the recipe did."""
    from rankopt.train.breakdown.phases import breakdown_lines, breakdown_of
    from rankopt.train.fault_tolerance.goodput import goodput_line
    from rankopt.units import format_bytes, format_duration

    steps = metrics["steps"]
    lines = [f"{item['kind']}: {_verdict(item)}" for item in metrics["passes"]]
    if steps["step_p50_ns"] is not None:
        lines.append(
            f"step {format_duration(steps['step_p50_ns'])}, "
            f"{steps['samples_per_s']:,.0f} samples/s, "
            f"data wait {steps['data_wait_share']:.1%}, "
            f"peak memory {format_bytes(steps['peak_memory_bytes'])}"
        )
    found = breakdown_of(metrics)
    lines += [] if found is None else breakdown_lines(found)
    return [*lines, goodput_line(metrics["goodput"])]


def _verdict(record: dict[str, Any]) -> str:
    return f"{'kept' if record['kept'] else 'changed nothing'} ({record['reason']})"


def _cells(metrics: dict[str, float | int | None]) -> list[str]:
    names = {"ne": "NE", "auc": "AUC", "log_loss": "log loss", "calibration": "calibration"}
    cells = [
        f"{title} {metrics[name]:.4f}" for name, title in names.items() if metrics[name] is not None
    ]
    return [*cells, f"{metrics['num_rows']:,} rows"]
