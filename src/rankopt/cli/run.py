"""`rankopt run`: optimize, compare and review in one go."""

from __future__ import annotations

import typer

from rankopt.cli.console import (
    QUICK_PLAN,
    AsJson,
    Checkpoint,
    Data,
    Local,
    Model,
    Objective,
    Out,
    Overwrite,
    Plan,
    Price,
    Progress,
    Quick,
    RayAddress,
    Recipe,
    Resume,
    Slo,
    Threads,
    show_verdict,
)
from rankopt.cli.main import command_line

app = typer.Typer()


@app.command()
def run(
    recipe: Recipe,
    model: Model,
    out: Out,
    checkpoint: Checkpoint = None,
    data: Data = None,
    plan: Plan = "ab-default",
    quick: Quick = False,
    price_per_hour: Price = None,
    slo_p99_ms: Slo = None,
    objective: Objective = None,
    num_threads: Threads = None,
    ray_address: RayAddress = None,
    local: Local = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Optimize a model, compare it with the original, and write the launch review.

    OUT gets artifact/, baseline/ (the model exported as it is), report.json, report.md and
    report.html. Exit code: 0 pass, 1 fail, 3 inconclusive.
    """
    with Progress() as progress:
        progress.step("loading PyTorch")
        from rankopt import api
        from rankopt.cli import choices as given

        report = api.run(
            given.with_objective(recipe, objective),
            model,
            checkpoint,
            data,
            out=out,
            plan=QUICK_PLAN if quick else plan,
            price_per_hour=price_per_hour,
            slo_p99_ns=given.to_ns(slo_p99_ms),
            backend=given.choose_backend(ray_address, local=local),
            overwrite=overwrite,
            resume=resume,
            num_threads=num_threads,
            reproduce=command_line(),
            progress=progress.step,
            detail=progress.update,
        )
    raise typer.Exit(show_verdict(report, out, as_json=as_json))
