"""`rankopt ab`: two arms on the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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

app = typer.Typer()

Control = Annotated[
    str, typer.Option("--control", help="A model card (its eager model) or an artifact folder.")
]
Candidate = Annotated[Path, typer.Option("--candidate", help="An artifact folder.")]
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
    quick: Quick = False,
    price_per_hour: Price = None,
    slo_p99_ms: Slo = None,
    ray_address: RayAddress = None,
    local: Local = False,
    overwrite: Overwrite = False,
    resume: Resume = False,
    as_json: AsJson = False,
) -> None:
    """Compare two arms on the same rows: quality, latency, size, cost; one verdict."""
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


def _baselines(given: list[str]) -> dict[str, str | Path]:
    from rankopt.errors import UsageError

    found: dict[str, str | Path] = {}
    for item in given:
        label, sign, folder = item.partition("=")
        if not (label and sign and folder):
            raise UsageError(f"--baseline must be LABEL=FOLDER; got {item!r}.")
        found[label] = Path(folder)
    return found
