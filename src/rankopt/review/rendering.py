"""Fill the templates of reports: one look for reviews, diagnoses, data reports and plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from markupsafe import Markup


@dataclass(frozen=True)
class Table:
    """A table: its cells are text."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def make_environment(*, autoescape: bool, finalize: Any = None) -> jinja2.Environment:
    """Open `review/templates/`; a name that a template lacks is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("rankopt.review", "templates"),
        autoescape=autoescape,
        finalize=finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render_markdown(template: str, **values: Any) -> str:
    """Fill a Markdown template, with the filter `cell` for texts in tables."""
    environment = make_environment(autoescape=False)
    environment.filters["cell"] = _cell
    return _render(environment, template, values)


def render_page(template: str, *, finalize: Any = None, **values: Any) -> str:
    """Fill the template of a page that needs neither network nor other files."""
    from plotly.offline import get_plotlyjs  # the rest of this module needs none of plotly

    environment = make_environment(autoescape=True, finalize=finalize)
    return _render(environment, template, {**values, "plotly_js": Markup(str(get_plotlyjs()))})


def _render(environment: jinja2.Environment, template: str, values: dict[str, Any]) -> str:
    return environment.get_template(template).render(values).rstrip() + "\n"


def _cell(text: str) -> str:
    """Write any text as one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
