"""Put every third-party model of benchmarks/compat.yaml through one recipe, and write the table.

    scripts/compatibility.py measure    train, optimise, compare, write the result (make compat)
    scripts/compatibility.py table      write the table of docs/compatibility.md from the result
    scripts/compatibility.py check      exit 1 when that table is not that of the result file

Rows are written one by one: a run that was stopped goes on with `measure --missing`. Nothing else
should run on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from result_page import ResultPage, act, result_parser  # noqa: E402

from compat.suite import Entry, checkpoint, entries, measure, recipe  # noqa: E402


def measure_all(chosen: list[Entry], work: Path, missing_only: bool) -> None:
    """Train what is not trained yet, then measure class after class."""
    rows = {(row["library"], row["model"]): row for row in PAGE.read()["rows"]}
    todo = [e for e in chosen if not (missing_only and (e.library, e.model) in rows)]
    for number, entry in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] training {entry.name}", flush=True)
        checkpoint(entry)
    for number, entry in enumerate(todo, 1):
        print(f"[{number}/{len(todo)}] {entry.name}", flush=True)
        row = measure(entry, work / entry.library / entry.model)
        rows[entry.library, entry.model] = row
        print(f"  {row['error'] or row['verdict']}", flush=True)
        _write([rows[e.library, e.model] for e in entries() if (e.library, e.model) in rows])


def _write(rows: list[dict[str, Any]]) -> None:
    measured = {(row["library"], row["model"]) for row in rows}
    PAGE.write(
        recipe=recipe().name,
        not_measured=[e.name for e in entries() if (e.library, e.model) not in measured],
        rows=rows,
    )


def table(content: dict[str, Any]) -> str:
    """Write the result file as the Markdown that stands in the documentation."""
    rows = content["rows"]
    passing = sum(row["passing"] for row in rows)
    missing = content["not_measured"]
    rest = f" Not measured yet: {', '.join(missing)}." if missing else ""
    environment = content["environment"]
    lines = [
        f"`{content['command']}`, {content['made_at'][:10]}, recipe `{content['recipe']}`: "
        f"{passing} of {len(rows)} pass. {environment['num_usable_cores']} cores of "
        f"{environment['cpu_model']}, torch {environment['libraries']['torch']}.{rest}",
        "",
        "| library | model | verdict | captured | passes kept | batch 1 | batch 512 | weights "
        "| NE change | card |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_table_row(row) for row in rows)])


def _table_row(row: dict[str, Any]) -> str:
    name = f"{row['library']} {row['version']} | {row['model']}"
    if not row["exported"]:
        reason = row["error"].splitlines()[0].replace("|", "/")
        return f"| {name} | not exported: {reason} | | | | | | | {row['card_lines']} lines |"
    kept = [kind for kind in row["kept_passes"] if kind != "export_aoti"]
    cells = [name, row["verdict"], _captured(row["capture"]), ", ".join(kept) or "none"]
    cells += [_speedup(line, row["small_batch"]) for line in row["latency"]]
    cells.append(f"{row['size_ratio']:.2f}x smaller")
    cells.append(_quality(row["quality"]))
    return "| " + " | ".join([*cells, f"{row['card_lines']} lines"]) + " |"


def _captured(notes: list[str]) -> str:
    """Say in a few words what tracing had to do; the row holds the notes themselves."""
    signs = {
        "stays eager": "part left eager",
        "is taken as always": "branches for every row",
        "are computed on every row": "filters for every row",
        "are run on padded rows": "GRU as one operator",
    }
    found = [words for sign, words in signs.items() if any(sign in note for note in notes)]
    return ", ".join(found) or "as it is"


def _speedup(line: dict[str, Any], small: int) -> str:
    shown = f"{line['speedup']:.2f} [{line['ci_low']:.2f}, {line['ci_high']:.2f}]"
    return f"{shown} at {small}" if line["batch_size"] == small > 1 else shown


def _quality(quality: dict[str, Any]) -> str:
    shown = []
    for name, ne in quality.items():
        if name.rpartition(".")[2] == "ne":
            task = name.rpartition(".")[0]
            text = f"{ne['delta']:+.3%} [{ne['ci_low']:+.3%}, {ne['ci_high']:+.3%}]"
            shown.append(f"{task} {text}".strip())
    return "; ".join(shown)


PAGE = ResultPage(
    result=ROOT / "benchmarks" / "results" / "compat.json",
    page=ROOT / "docs" / "compatibility.md",
    command="make compat",
    table=table,
    script="scripts/compatibility.py",
)


def main() -> int:
    """Read the command line."""
    parser = result_parser(__doc__)
    parser.add_argument("--models", nargs="+", metavar="LIBRARY-MODEL", help="all when not given")
    parser.add_argument("--missing", action="store_true", help="only what has no row yet")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "compat")
    given = parser.parse_args()
    known = {entry.name: entry for entry in entries()}
    unknown = sorted(set(given.models or ()) - set(known))
    if unknown:
        parser.error(f"unknown models {unknown}; known: {', '.join(known)}")
    chosen = [known[name] for name in given.models or known]
    return act(given.action, [PAGE], lambda: measure_all(chosen, given.work, given.missing))


if __name__ == "__main__":
    sys.exit(main())
