"""Write a review: report.json for scripts, report.md for a pull request, report.html for people."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup
from pydantic import ValidationError

from rankopt.errors import InputError, Problem
from rankopt.problems import problems_of_validation
from rankopt.review import page as words
from rankopt.review.plots import figures
from rankopt.review.rendering import make_environment, render_page
from rankopt.review.schema import Report


def write_report(report: Report, out: str | Path) -> dict[str, Path]:
    """Write report.json, report.md and report.html into a folder, each complete or not at all.

    The JSON comes first, so that a result outlives any trouble with drawing it.

    Args:
        report: a judged report.
        out: the folder; made when missing. Files of the same names are replaced.

    Returns:
        The path of each file by its suffix: `json`, `md`, `html`.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {suffix: folder / f"report.{suffix}" for suffix in ("json", "md", "html")}
    _replace(paths["json"], to_json(report))
    _replace(paths["md"], to_markdown(report))
    _replace(paths["html"], to_html(report))
    return paths


def load_report(path: str | Path) -> Report:
    """Read a report.json.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        InputError: the file is missing, is not JSON, or is not a report.
    """
    file = Path(path)
    file = file / "report.json" if file.is_dir() else file
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "`rankopt ab` and `rankopt run` write one."
        what = f"cannot be read ({error.strerror})"
        raise InputError(problems=[Problem(str(file), what, hint=hint)]) from error
    except ValueError as error:  # not UTF-8, or not JSON
        hint = "It is damaged or cut short; write it again with `rankopt ab`."
        raise InputError(problems=[Problem(str(file), f"is not JSON ({error})", hint=hint)]) from (
            error
        )
    try:
        return Report.model_validate(raw)
    except ValidationError as error:
        found = problems_of_validation(str(file), error, Report)
        raise InputError("This is not a report of rankopt:", problems=found) from error


def review(report: Report | str | Path, out: str | Path) -> Path:
    """Write a review and return the path of its page.

    Args:
        report: a judged report, or where its report.json is.
        out: the folder to write into.

    Raises:
        InputError: the report cannot be read.
    """
    held = report if isinstance(report, Report) else load_report(report)
    return write_report(held, out)["html"]


def to_json(report: Report) -> str:
    """Write a report as JSON; what is not finite is null, since JSON has no NaN."""
    return json.dumps(_plain(report.model_dump()), indent=2, allow_nan=False) + "\n"


def to_markdown(report: Report) -> str:
    """Write a report as Markdown for a pull request or a ticket."""
    environment = make_environment(autoescape=False, finalize=_markdown_text)
    environment.filters["verbatim"] = _Verbatim
    environment.filters["code"] = _code
    return environment.get_template("report.md.j2").render(_values(report)).rstrip() + "\n"


def to_html(report: Report) -> str:
    """Write a report as one page that needs neither network nor other files."""
    return render_page(
        "report.html.j2", finalize=_unbroken_percent, figures=figures(report), **_values(report)
    )


def _values(report: Report) -> dict[str, Any]:
    page = words.page_of(report)
    return {"report": report, "page": page, "words": words, "symbols": words.SYMBOLS}


def _unbroken_percent(value: Any) -> Any:
    # A line that ends in "95" and one that starts with "% interval" are hard to read.
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return value.replace(" %", "\u00a0%") if plain else value


class _Verbatim(str):
    """Text that is Markdown already."""


def _code(text: str) -> _Verbatim:
    return _Verbatim(f"`{' '.join(text.replace('`', '').split())}`")


def _markdown_text(value: Any) -> Any:
    if isinstance(value, _Verbatim):
        return value
    # Every value is written as text of one line: a name may hold a pipe, a tag or a line break.
    text = " ".join(str(value).split())
    # Underscores inside a word and lone brackets are plain text, and stay readable.
    marks = re.compile(r"[\\|`*]|(?<!\w)_|_(?!\w)|\](?=\()")
    return marks.sub(lambda found: "\\" + found.group(), text).replace("<", "&lt;")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # a numpy scalar
        return _plain(value.item())
    return str(value)


def _replace(path: Path, text: str) -> None:
    # Written beside and renamed, so that a kill leaves the old file or the new one, never half.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
