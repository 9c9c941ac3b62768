"""Write a diagnosis: JSON for scripts, Markdown for a ticket, HTML for people."""

from __future__ import annotations

import json
from pathlib import Path

from rankopt.diagnose.page import figures, page_of
from rankopt.diagnose.schema import Diagnosis
from rankopt.review.rendering import render_markdown, render_page


def write_diagnosis(diagnosis: Diagnosis, out: Path) -> dict[str, Path]:
    """Write diagnose.json, diagnose.md and diagnose.html into a folder that exists.

    The JSON comes first, so that a result outlives any trouble with drawing it.

    Returns:
        The path of each file by its suffix.
    """
    paths = {suffix: out / f"diagnose.{suffix}" for suffix in ("json", "md", "html")}
    value = diagnosis.model_dump(mode="json")
    paths["json"].write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    paths["md"].write_text(to_markdown(diagnosis), encoding="utf-8")
    paths["html"].write_text(to_html(diagnosis), encoding="utf-8")
    return paths


def to_markdown(diagnosis: Diagnosis) -> str:
    """Write a diagnosis as Markdown."""
    return render_markdown("diagnose.md.j2", diagnosis=diagnosis, page=page_of(diagnosis))


def to_html(diagnosis: Diagnosis) -> str:
    """Write a diagnosis as one page that needs neither network nor other files."""
    return render_page(
        "diagnose.html.j2", diagnosis=diagnosis, page=page_of(diagnosis), figures=figures(diagnosis)
    )
