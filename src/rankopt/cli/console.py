"""What the verbs share on a terminal: progress, answers, and the options of the same name.

Progress goes to stderr and answers to stdout, so that `--json` can be piped while a person still
sees what is going on. On a terminal the current step is one moving line; in a pipe each step is a
plain line of its own.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from rankopt.units import NS_PER_S, format_duration

if TYPE_CHECKING:
    from rich.status import Status

    from rankopt.review.schema import PassRecord, Report

# A pipe gets an update at most this often: logs are read, not watched.
_PLAIN_INTERVAL_NS = 10 * NS_PER_S

Out = Annotated[Path, typer.Option("--out", help="The folder to write the result to.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the result that --out already holds.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from what a killed run of the same --out left.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")]
Model = Annotated[str, typer.Option("--model", help="A model card: a path, or a name in models/.")]
Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", help="Weights to load in place of the card's.")
]
Data = Annotated[
    str | None,
    typer.Option("--data", help="Rows to use in place of the card's: a file or a folder."),
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="A Ray cluster; without it Ray is started here."),
]
Local = Annotated[
    bool, typer.Option("--local", help="Run the arms as plain processes here, without Ray.")
]
Recipe = Annotated[str, typer.Argument(help="A recipe: a path, or a name in recipes/.")]
Plan = Annotated[str, typer.Option("--plan", help="An A/B plan: a path or a name in benchmarks/.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A first look: the plan ab-quick, with wide intervals.")
]
Objective = Annotated[
    str | None,
    typer.Option("--objective", help="latency, bytes or cost, in place of the recipe's own."),
]
QUICK_PLAN = "ab-quick"
Price = Annotated[
    float | None,
    typer.Option("--price-per-hour", min=0, help="Dollars an hour of this machine, for the cost."),
]
Slo = Annotated[
    float | None, typer.Option("--slo-p99-ms", min=0, help="Latency target, written into the cost.")
]
Threads = Annotated[
    int | None,
    typer.Option("--num-threads", min=1, help="Thread budget of every arm; default: all cores."),
]


class Progress:
    """Tell a person what is being done; a context manager.

    Args:
        stream: where to write; stderr when None.
        quiet: say nothing at all.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty()
        self._status: Status | None = None
        self._text = ""
        self._started_ns = 0
        self._said_ns = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(completed=error is None)

    def step(self, text: str) -> None:
        """Begin a step; the one before it counts as done."""
        self._end(completed=True)
        self._text, self._started_ns = text, time.monotonic_ns()
        self._said_ns = self._started_ns
        if self._live:
            from rich.console import Console

            self._status = Console(file=self._stream).status(text)
            self._status.start()
        else:
            self._write(f"{text} ...")

    def update(self, text: str) -> None:
        """Say how far the current step is; in a pipe not more often than every ten seconds."""
        now_ns = time.monotonic_ns()
        if self._status is not None:
            self._status.update(f"{self._text}: {text}")
        elif now_ns - self._said_ns >= _PLAIN_INTERVAL_NS:
            self._said_ns = now_ns
            self._write(f"{self._text}: {text}")

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._write(text)

    def _end(self, *, completed: bool) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if self._text and completed:
            duration = format_duration(time.monotonic_ns() - self._started_ns)
            self._write(f"{self._text}: {duration}")
        self._text = ""

    def _write(self, text: str) -> None:
        if not self._quiet:
            self._stream.write(f"{text}\n")
            self._stream.flush()


def print_json(value: Any) -> None:
    """Print an answer for a program: one JSON document on stdout, never NaN."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False))


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print an answer for a person: a table on a terminal, one plain line a row in a pipe."""
    if not sys.stdout.isatty():
        for row in rows:
            typer.echo("  ".join(cell for cell in row if cell))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns)
    for row in rows:
        # Text, since rich would read a path in brackets as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def show_passes(records: Sequence[PassRecord]) -> None:
    """Print what became of each pass."""
    print_table(
        ("pass", "", "why"),
        [(record.kind, "kept" if record.kept else "dropped", record.reason) for record in records],
    )


def show_verdict(report: Report, out: Path, *, as_json: bool) -> int:
    """Print a report's verdict, reasons and place, and return its exit code."""
    from rankopt.review.gates import exit_code

    if as_json:
        print_json(report.model_dump(mode="json"))
        return exit_code(report.verdict)
    show_passes(report.passes)
    for reason in report.reasons:
        typer.echo(f"- {reason}")
    typer.echo(f"verdict: {report.verdict}")
    typer.echo(f"report: {out / 'report.html'}")
    return exit_code(report.verdict)
