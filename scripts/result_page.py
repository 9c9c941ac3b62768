"""A committed result file, and the page that shows it as a table between two markers.

A script of a result reads its command line with `result_parser` and does what it says with `act`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rankopt.environment import collect_environment

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class ResultPage:
    """Where a result and its table lie.

    Attributes:
        result: the JSON file in benchmarks/results/.
        page: the Markdown file with the markers.
        command: what makes the result.
        table: writes the result's content as Markdown.
        script: what writes the table again, for the message.
        marker: the table stands between `<!-- MARKER:start -->` and `<!-- MARKER:end -->`.
    """

    result: Path
    page: Path
    command: str
    table: Callable[[dict[str, Any]], str]
    script: str
    marker: str = "results"

    def read(self) -> dict[str, Any]:
        """Read the result file; no rows where there is none yet."""
        if not self.result.exists():
            return {"rows": []}
        content: dict[str, Any] = json.loads(self.result.read_text(encoding="utf-8"))
        return content

    def write(self, **content: Any) -> None:
        """Write the result file, with the time, this machine and the command in front."""
        whole = {
            "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": collect_environment().model_dump(mode="json", exclude={"compiler"}),
            "command": self.command,
            **content,
        }
        self.result.parent.mkdir(parents=True, exist_ok=True)
        self.result.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def write_table(self) -> None:
        """Put the table into the page, between its markers."""
        self.page.write_text(self._with_table(), encoding="utf-8")

    def check(self) -> int:
        """Return 0 when the page's table is that of the result file; else say so and return 1."""
        if self.page.read_text(encoding="utf-8") == self._with_table():
            return 0
        name = self.page.name
        print(f"{name} is not that of the result file; run: python {self.script} table")
        return 1

    def _with_table(self) -> str:
        text = self.page.read_text(encoding="utf-8")
        start, end = f"<!-- {self.marker}:start -->", f"<!-- {self.marker}:end -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        return f"{before}{start}\n{self.table(self.read())}\n{end}{after}"


def result_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what can be done with a result; a script adds options of its own.

    Args:
        description: the script's docstring, whose first line is shown.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("action", choices=("measure", "table", "check"))
    return parser


def act(action: str, pages: Sequence[ResultPage], measure: Callable[[], int | None]) -> int:
    """Measure and write the tables, write them alone, or check them; returns the exit status.

    Args:
        action: as `result_parser` reads it.
        pages: all that show the result.
        measure: writes the result; may return a status.
    """
    if action == "check":
        return max(page.check() for page in pages)
    status = measure() if action == "measure" else None
    for page in pages:
        page.write_table()
    return status or 0
