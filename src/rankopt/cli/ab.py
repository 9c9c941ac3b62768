"""`rankopt ab`: two arms on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rankopt.cli.console import (
    QUICK_PLAN,
    AsJson,
    Checkpoint,
    Data,
    Local,
    Out,
    Overwrite,
    Plan,
    Price,
    Progress,
    Quick,
    RayAddress,
    Resume,
    Slo,
    show_verdict,
)
from rankopt.cli.main import command_line
from rankopt.units import format_bytes

if TYPE_CHECKING:
    from rankopt.review.schema import Report

app = typer.Typer()

Control = Annotated[
    str,
    typer.Option(
        "--control", help="A model card (its eager model), an artifact folder or a training recipe."
    ),
]
Candidate = Annotated[
    Path, typer.Option("--candidate", help="An artifact folder, or a training recipe.")
]
TrainedModel = Annotated[
    str | None,
    typer.Option("--model", help="The card to train, where --control is a training recipe."),
]
Seeds = Annotated[
    int, typer.Option("--seeds", min=1, help="Runs of each arm, of two training recipes.")
]
Baseline = Annotated[
    list[str] | None,
    typer.Option("--baseline", help="LABEL=FOLDER, a further artifact timed in the same run."),
]


@app.command()
def ab(
    control: Control,
    candidate: Candidate,
    out: Out,
    data: Data = None,
    checkpoint: Checkpoint = None,
    plan: Plan = "ab-default",
    baseline: Baseline = None,
    model: TrainedModel = None,
    seeds: Seeds = 5,
    quick: Quick = False,
    price_per_hour: Price = None,
    slo_p99_ms: Slo = None,
    ray_address: RayAddress = None,
    local: Local = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Compare two arms on the same rows: quality, latency, size, cost; one verdict.

    With a training recipe as candidate the arms are two ways of training: the control is another
    recipe (with --model CARD), or the card itself for plain PyTorch.
    """
    from rankopt.train.recipes import find_training_recipe

    if find_training_recipe(candidate) is not None:
        chosen = "ab-training" if plan == "ab-default" else plan
        with Progress() as progress:
            progress.step("loading PyTorch")
            from rankopt.jobs.compare_training import compare_training, read_pair

            report = compare_training(
                read_pair(control, candidate, model),
                out,
                data,
                seeds=range(seeds),
                plan=QUICK_PLAN if quick else chosen,
                overwrite=overwrite,
                resume=resume,
                reproduce=command_line(),
                progress=progress.step,
                detail=progress.update,
            )
        if not as_json:
            _show_training(report)
        raise typer.Exit(show_verdict(report, out, as_json=as_json))
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt import api
        from rankopt.cli import choices as given

        report = api.compare(
            control,
            candidate,
            data,
            checkpoint=checkpoint,
            out=out,
            plan=QUICK_PLAN if quick else plan,
            baselines=_baselines(baseline or []),
            price_per_hour=price_per_hour,
            slo_p99_ns=given.to_ns(slo_p99_ms),
            backend=given.choose_backend(ray_address, local=local),
            overwrite=overwrite,
            resume=resume,
            reproduce=command_line(),
            progress=progress.step,
            detail=progress.update,
        )
    raise typer.Exit(show_verdict(report, out, as_json=as_json))


def _show_training(report: Report) -> None:
    for row in report.latency:
        typer.echo(
            f"step on {row.batch_size:,} rows: {row.speedup:.2f} times faster "
            f"[{row.ci_low:.2f}, {row.ci_high:.2f}]"
        )
    for arm, cost in report.training.items():
        typer.echo(
            f"{arm}: {cost.samples_per_s:,.0f} samples/s, data wait {cost.data_wait_share:.1%}, "
            f"peak memory {format_bytes(cost.peak_memory_bytes)}"
        )


def _baselines(given: list[str]) -> dict[str, str | Path]:
    from rankopt.errors import UsageError

    found: dict[str, str | Path] = {}
    for item in given:
        label, sign, folder = item.partition("=")
        if not (label and sign and folder):
            raise UsageError(f"--baseline must be LABEL=FOLDER; got {item!r}.")
        found[label] = Path(folder)
    return found
