"""Write a plan, or what measuring plans found: JSON for scripts, and a page with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.errors import OutputExistsError, Problem, UsageError
from rankopt.output import staged_file, write_json_atomic

if TYPE_CHECKING:
    from rankopt.sharding.measured import PlanMeasurement
    from rankopt.sharding.schema import ShardPlan

MEASURED_FILE = "measured.json"
MEASURED_PAGE = "measured.html"


def check_outputs(out: Path, *, overwrite: bool) -> None:
    """Refuse places that `write_plan` could not write to, before the work.

    Raises:
        UsageError: `out` is a folder, or has the page's own suffix.
        OutputExistsError: one of the files exists and `overwrite` is False.
    """
    if out.is_dir():
        raise UsageError(problems=[Problem(str(out), "must be a file; it is a folder")])
    if out.suffix == ".html":
        hint = "The page is written beside it, with the suffix .html."
        raise UsageError(problems=[Problem("--out", "must be a JSON file", str(out), hint)])
    existing = [file for file in (out, out.with_suffix(".html")) if file.exists()]
    if existing and not overwrite:
        hint = "Add --overwrite to replace it, or give another --out."
        problems = [Problem(str(file), "the file exists already", hint=hint) for file in existing]
        raise OutputExistsError(problems=problems)


def write_plan(plan: ShardPlan, out: Path, *, overwrite: bool = False) -> dict[str, Path]:
    """Write the plan and its page.

    The JSON comes first, so that a plan outlives any trouble with drawing it.

    Returns:
        The path of each file by its suffix.

    Raises:
        UsageError: `out` is no place for it.
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    check_outputs(out, overwrite=overwrite)
    write_json_atomic(out, plan.model_dump(mode="json"))
    page = out.with_suffix(".html")
    with staged_file(page, overwrite=overwrite) as partial:
        partial.write_text(to_html(plan), encoding="utf-8")
    return {"json": out, "html": page}


def to_html(plan: ShardPlan) -> str:
    """Write a plan as one page that needs neither network nor other files."""
    from rankopt.review.rendering import render_page
    from rankopt.sharding.page import figures, page_of

    return render_page("shard.html.j2", plan=plan, page=page_of(plan), figures=figures(plan))


def write_measurement(found: PlanMeasurement, out: Path) -> dict[str, Path]:
    """Write a measurement of plans, and its page, into a folder.

    Returns:
        The path of each file by its suffix.

    Raises:
        EnvironmentProblem: the disk is full or the folder cannot be written.
    """
    from rankopt.review.rendering import render_page
    from rankopt.sharding.measured_page import figures, page_of

    paths = {"json": out / MEASURED_FILE, "html": out / MEASURED_PAGE}
    write_json_atomic(paths["json"], found.model_dump(mode="json"))
    page = render_page("measured.html.j2", found=found, page=page_of(found), figures=figures(found))
    paths["html"].write_text(page, encoding="utf-8")
    return paths
