"""Write a data report: JSON for scripts, Markdown for a ticket, HTML for people."""

from __future__ import annotations

import json
from pathlib import Path

from rankopt.data.report.page import figures, page_of
from rankopt.data.report.schema import DataReport
from rankopt.review.rendering import render_markdown, render_page


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
    return render_markdown("data.md.j2", report=report, page=page_of(report))


def to_html(report: DataReport) -> str:
    """Write a report as one page that needs neither network nor other files."""
    return render_page("data.html.j2", report=report, page=page_of(report), figures=figures(report))
