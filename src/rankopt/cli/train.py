"""`rankopt train`: a model card's module, trained to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rankopt.cli.console import AsJson, Data, Overwrite, Progress, Resume, print_json
from rankopt.cli.main import command_line
from rankopt.errors import Problem, UsageError

if TYPE_CHECKING:
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
BatchSize = Annotated[int | None, typer.Option("--batch-size", help="Rows per step.")]
LearningRate = Annotated[float | None, typer.Option("--learning-rate", help="Of the optimizer.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Of initial weights and row order.")]
Threads = Annotated[int | None, typer.Option("--num-threads", help="Threads of PyTorch.")]

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
    """
    flags = {
        "epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "seed": seed,
        "num_threads": num_threads,
    }
    if reproduce is not None:
        _refuse_beside_reproduce({"CARD": card, "recipe": recipe, **flags, "start": start})
        raise typer.Exit(_again(reproduce, out, data, save_optimizer, overwrite, as_json))
    if card is None or out is None:
        raise _missing(card, out)
    from rankopt.models.card import load_card

    loaded = load_card(card)
    settings = _settings(loaded.train, flags)
    chosen = None
    if recipe is not None:
        from rankopt.train.recipes import load_training_recipe

        chosen = load_training_recipe(recipe)
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.data.splits import open_splits
        from rankopt.train.loop import train as train_model

        progress.step("opening the rows")
        splits = open_splits(loaded, data)
        progress.step(f"training {loaded.name}")
        result = train_model(
            loaded,
            splits,
            out,
            settings,
            progress.note,
            recipe=chosen,
            start=start,
            save_optimizer=save_optimizer,
            trace=trace,
            peaks=peaks,
            overwrite=overwrite,
            checkpoint_every=checkpoint_every,
            resume=resume,
            command=command_line(),
        )
    if as_json:
        print_json({"card": str(result.card), **result.metrics})
        return
    for name, metrics in result.metrics["test"].items():
        typer.echo(f"test, {name}: {', '.join(_cells(metrics))}")
    for line in _cost(result.metrics):
        typer.echo(line)
    typer.echo(f"card: {result.card}")


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
) -> int:
    """Train a run again, tell what came of it, and return the exit code."""
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt.review.gates import exit_code
        from rankopt.train.reproduce import reproduce

        found = reproduce(
            run,
            out,
            data=data,
            save_optimizer=save_optimizer,
            overwrite=overwrite,
            command=command_line(),
            progress=progress.note,
        )
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
    from rankopt.train.goodput import goodput_line
    from rankopt.train.phases import breakdown_lines, breakdown_of
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
