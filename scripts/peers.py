"""Measure the peer suite, and keep the tables of README and docs/peers.md in step with the result.

    python scripts/peers.py measure     run the suite, write the result and the tables (make bench)
    python scripts/peers.py table       write the tables from the result file
    python scripts/peers.py check       exit 1 when a table is not that of the result file

Nothing else should run on the machine. `measure` goes on from what a stopped run has finished.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from result_page import ROOT, ResultPage, act, result_parser

from rankopt.bench.peers.report import breakdown_table, mean_text, missed_text
from rankopt.bench.peers.result import GeometricMean, PeerResult
from rankopt.units import format_duration

RESULT = ROOT / "benchmarks" / "results" / "peers.json"


def measure() -> None:
    """Run the suite as a user would and write the tables."""
    out = str(RESULT.relative_to(ROOT))
    command = [sys.executable, "-m", "rankopt", "bench", "benchmarks/peers.yaml", "--out", out]
    done = subprocess.run([*command, "--overwrite", "--resume"], cwd=ROOT, check=False)
    if done.returncode not in (0, 1):
        sys.exit(f"rankopt bench ended with {done.returncode}")


def short_table(content: dict[str, Any]) -> str:
    """Write what README shows: rankopt against the best peer and against eager."""
    if not content["rows"]:
        return "Not measured yet: `make peers bench`."
    eager = {(row["model"], row["batch_size"]): row for row in content["against_eager"]}
    lines = [
        _heading(content),
        "",
        "| model | batch | rankopt | best peer | its time over rankopt's | eager over rankopt |",
        "|---|---|---|---|---|---|",
    ]
    ours = {
        (row["model"], row["batch_size"]): row for row in content["rows"] if row["arm"] == "rankopt"
    }
    for row in content["summary"]:
        cell = (row["model"], row["batch_size"])
        own = format_duration(ours[cell]["p50_ns"]) if cell in ours else "not run"
        cells = [cell[0], str(cell[1]), own, row["best_peer"] or "none", _ratio(row)]
        lines.append("| " + " | ".join([*cells, _ratio(eager.get(cell))]) + " |")
    return "\n".join([*lines, "", _means(content)])


def full_table(content: dict[str, Any]) -> str:
    """Write what docs/peers.md shows: every arm's p50 at its best setting, and what did not run."""
    if not content["rows"]:
        return "Not measured yet: `make peers bench`."
    arms = list(dict.fromkeys(row["arm"] for row in content["rows"]))
    cells = {(row["model"], row["batch_size"], row["arm"]): row for row in content["rows"]}
    lines = [
        _heading(content),
        "",
        "| model | batch | " + " | ".join(arms) + " |",
        "|---|---" + "|---" * len(arms) + "|",
    ]
    for model, size in dict.fromkeys((row["model"], row["batch_size"]) for row in content["rows"]):
        times = [_time(cells.get((model, size, arm))) for arm in arms]
        lines.append(f"| {model} | {size} | " + " | ".join(times) + " |")
    lines += ["", "A time in brackets does not hold the NE margin and does not count."]
    if content["not_run"]:
        lines += ["", "Not run:", ""]
        lines += [
            f"- {item['model']}, {item['arm']}: {' '.join(item['error'].split())}"
            for item in content["not_run"]
        ]
    return "\n".join([*lines, *_times(PeerResult.model_validate(content))])


def _times(result: PeerResult) -> list[str]:
    """Write where the time of rankopt's arm goes, and what bounds the cells that miss a goal."""
    lines = []
    if result.time_breakdown:
        heading, *rows = breakdown_table(result)
        lines += [
            "",
            "Where the time of one call of rankopt's arm goes, looked into after the arms were "
            "timed. Dense layers, quantising included, are held against the arithmetic peak, "
            "lookups against a gather of the same rows.",
            "",
            f"| {' | '.join(heading)} |",
            "|---" * len(heading) + "|",
            *(f"| {' | '.join(cells)} |" for cells in rows),
        ]
    if result.not_broken_down:
        lines += ["", "Not looked into:", ""]
        lines += [
            f"- {item.model}, batch {', '.join(map(str, item.batch_sizes))}: "
            + " ".join(item.error.split())
            for item in result.not_broken_down
        ]
    asked = [mean for mean in result.geometric_means if mean.goal is not None]
    if asked:
        told = [f"{mean_text(mean)} against {_NAMES[mean.against]}" for mean in asked]
        lines += ["", f"Geometric means: {', '.join(told)}."]
    if asked or result.missed_goals:
        lines += ["", "Cells that miss a goal, and what bounds them:", ""]
        lines += [f"- {missed_text(missed)}" for missed in result.missed_goals] or ["- none"]
    return lines


_NAMES = {"best_peer": "the best peer", "eager": "eager"}


def _heading(content: dict[str, Any]) -> str:
    environment = content["environment"]
    libraries = environment["libraries"]
    engines = ", ".join(
        f"{name} {libraries[name]}"
        for name in ("torch", "onnxruntime", "openvino", "zentorch")
        if name in libraries
    )
    return (
        f"`{content['command']}`, {content['made_at'][:10]}: {environment['num_usable_cores']} "
        f"cores of {environment['cpu_model']}; {engines}. p50 of one call; ratios are paired, in "
        "one interleaved run, with 95 % intervals."
    )


def _means(content: dict[str, Any]) -> str:
    means = [GeometricMean.model_validate(mean) for mean in content["geometric_means"]]
    told = [
        f"{mean_text(mean)} against {_NAMES[mean.against]}"
        for mean in means
        if mean.batch_size is None
    ]
    if not told:
        return "No ratio could be taken."
    missed = len(content.get("missed_goals", ()))
    more = f" Comparisons that miss a goal: {missed}, listed in docs/peers.md." if missed else ""
    return f"Geometric mean: {', '.join(told)}.{more}"


def _ratio(row: dict[str, Any] | None) -> str:
    if row is None or row["ratio"] is None:
        return (row or {}).get("reason") or "not measured"
    return f"{row['ratio']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}]"


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    shown = format_duration(row["p50_ns"])
    return shown if row["quality_ok"] else f"({shown})"


PAGES = tuple(
    ResultPage(
        result=RESULT,
        page=page,
        command="make bench",
        table=table,
        script="scripts/peers.py",
        marker="peers",
    )
    for page, table in (
        (ROOT / "README.md", short_table),
        (ROOT / "docs" / "peers.md", full_table),
    )
)


def main() -> int:
    """Read the command line."""
    return act(result_parser(__doc__).parse_args().action, PAGES, measure)


if __name__ == "__main__":
    sys.exit(main())
