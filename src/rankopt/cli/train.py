"""`rankopt train`: a model card's module, trained to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from rankopt.cli.console import (
    AsJson,
    Data,
    Out,
    Overwrite,
    Progress,
    RayAddress,
    Resume,
    print_json,
)
from rankopt.errors import EXIT_USAGE, UsageError

if TYPE_CHECKING:
    from rankopt.train.ranks import Ranks
    from rankopt.train.settings import TrainSettings

app = typer.Typer()

Card = Annotated[str, typer.Argument(help="A model card: a path, or a name in models/.")]
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

CheckpointEvery = Annotated[
    int | None,
    typer.Option("--checkpoint-every", min=1, help="Steps between checkpoints to go on from."),
]


@app.command()
def train(
    card: Card,
    out: Out,
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
    checkpoint_every: CheckpointEvery = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Train a model card's module to a checkpoint, plainly or by a training recipe.

    OUT gets card.yaml (ready for `rankopt optimize --model`), checkpoint.safetensors, metrics.json
    and journal.jsonl. A flag goes before the card's `train:` settings. With --checkpoint-every, a
    run that was killed goes on by the same command and --resume.

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
    others = _Others(recipe, data, start, save_optimizer, overwrite, checkpoint_every, resume)
    if num_workers is not None or ray_address is not None or max_restarts:
        ray = _Ray(num_workers, ray_address, max_restarts)
        _show(_train_on_ray(card, out, flags, others, ray), out, as_json=as_json)
        return
    from rankopt.train.ranks import OtherRankFailed, join

    try:
        with join() as ranks:
            metrics = _train_here(card, out, flags, others, ranks)
    except OtherRankFailed as error:
        raise typer.Exit(EXIT_USAGE) from error
    if ranks.is_first:
        _show(metrics, out, as_json=as_json)


class _Others(NamedTuple):
    """What a run is given beside its card, folder and settings."""

    recipe: str | None
    data: str | None
    start: Path | None
    save_optimizer: bool
    overwrite: bool
    checkpoint_every: int | None
    resume: bool


class _Ray(NamedTuple):
    """What Ray Train is given."""

    num_workers: int | None
    address: str | None
    max_restarts: int


def _train_here(
    card: str, out: Path, flags: dict[str, Any], others: _Others, ranks: Ranks
) -> dict[str, Any]:
    """Train in this process, alone or as one of torchrun's."""
    from rankopt.models.card import load_card

    loaded = load_card(card)
    settings = _settings(loaded.train, flags)
    chosen = None
    if others.recipe is not None:
        from rankopt.train.recipes import load_training_recipe

        chosen = load_training_recipe(others.recipe)
    with Progress(quiet=not ranks.is_first) as progress:
        progress.step("loading PyTorch")
        from rankopt.data.splits import open_splits
        from rankopt.train.loop import train as train_model

        progress.step("opening the rows")
        splits = ranks.first_then_others(lambda: open_splits(loaded, others.data))
        progress.step(f"training {loaded.name}")
        result = train_model(
            loaded,
            splits,
            out,
            settings,
            progress.note,
            recipe=chosen,
            start=others.start,
            save_optimizer=others.save_optimizer,
            overwrite=others.overwrite,
            checkpoint_every=others.checkpoint_every,
            resume=others.resume,
            ranks=ranks,
        )
    return result.metrics


def _train_on_ray(
    card: str, out: Path, flags: dict[str, Any], others: _Others, ray: _Ray
) -> dict[str, Any]:
    """Train in Ray Train's workers, and read what the first of them wrote."""
    from rankopt.models.card import load_card
    from rankopt.train.launch import TrainJob, train_on_ray
    from rankopt.train.ranks import started_by_torchrun

    if ray.num_workers is None:
        raise UsageError("--ray-address and --max-restarts need --num-workers.")
    if started_by_torchrun():
        raise UsageError("--num-workers starts workers through Ray; under torchrun, leave it out.")
    loaded = load_card(card)
    settings = _settings(loaded.train, flags).model_dump(mode="json")
    job = TrainJob(
        card=str(loaded.path.resolve()) if loaded.path else card,
        out=str(out.expanduser().resolve()),
        settings=settings,
        recipe=_absolute(others.recipe),
        data=_absolute(others.data),
        start=_absolute(others.start),
        save_optimizer=others.save_optimizer,
        overwrite=others.overwrite,
        checkpoint_every=others.checkpoint_every,
        resume=others.resume,
    )
    with Progress() as progress:
        progress.step(f"training {loaded.name} with {ray.num_workers} Ray Train workers")
        train_on_ray(
            job,
            ray.num_workers,
            address=ray.address,
            max_restarts=ray.max_restarts,
            progress=progress.note,
        )
    metrics: dict[str, Any] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    return metrics


def _absolute(path: str | Path | None) -> str | None:
    """Make a path that exists here absolute: a worker runs in another folder."""
    if path is None:
        return None
    return str(Path(path).resolve()) if Path(path).exists() else str(path)


def _show(metrics: dict[str, Any], out: Path, *, as_json: bool) -> None:
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
    from rankopt.train.goodput import goodput_line
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
    return [*lines, goodput_line(metrics["goodput"])]


def _verdict(record: dict[str, Any]) -> str:
    return f"{'kept' if record['kept'] else 'changed nothing'} ({record['reason']})"


def _cells(metrics: dict[str, float | int | None]) -> list[str]:
    names = {"ne": "NE", "auc": "AUC", "log_loss": "log loss", "calibration": "calibration"}
    cells = [
        f"{title} {metrics[name]:.4f}" for name, title in names.items() if metrics[name] is not None
    ]
    return [*cells, f"{metrics['num_rows']:,} rows"]
