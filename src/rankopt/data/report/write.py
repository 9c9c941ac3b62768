"""Write a data report: JSON for scripts, Markdown for a ticket, HTML for people."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from markupsafe import Markup

from rankopt.data.report.page import figures, page_of
from rankopt.data.report.schema import DataReport


def write_data_report(report: DataReport, out: Path) -> dict[str, Path]:
    """Write data.json, data.md and data.html into a folder that exists.

    The JSON comes first, so that a result outlives any trouble with drawing it.

    Returns:
        The path of each file by its suffix.
    """
    paths = {suffix: out / f"data.{suffix}" for suffix in ("json", "md", "html")}
    value = report.model_dump(mode="json")
    paths["json"].write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    paths["md"].write_text(to_markdown(report), encoding="utf-8")
    paths["html"].write_text(to_html(report), encoding="utf-8")
    return paths


def to_markdown(report: DataReport) -> str:
    """Write a report as Markdown."""
    environment = _environment(autoescape=False)
    environment.filters["cell"] = _cell
    template = environment.get_template("data.md.j2")
    return template.render(report=report, page=page_of(report)).rstrip() + "\n"


def to_html(report: DataReport) -> str:
    """Write a report as one page that needs neither network nor other files."""
    from plotly.offline import get_plotlyjs  # the rest of this module needs none of plotly

    template = _environment(autoescape=True).get_template("data.html.j2")
    text = template.render(
        report=report,
        page=page_of(report),
        figures=figures(report),
        plotly_js=Markup(str(get_plotlyjs())),
    )
    return text.rstrip() + "\n"


def _environment(*, autoescape: bool) -> jinja2.Environment:
    # The review's folder: the page is styled and drawn by the same files as a review.
    return jinja2.Environment(
        loader=jinja2.PackageLoader("rankopt.review", "templates"),
        autoescape=autoescape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _cell(text: str) -> str:
    """Write any text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
