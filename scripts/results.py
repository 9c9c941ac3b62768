"""Measure one recipe on every reference model, and keep README's table in step with the result.

    python scripts/results.py measure     train, run the recipe, write the result (make results)
    python scripts/results.py table       write README's table from the result file
    python scripts/results.py check       exit 1 when README's table is not that of the result file

Each model is measured by the commands a user would type; nothing else should run on the machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from result_page import ROOT, ResultPage, act, result_parser

from rankopt.units import format_bytes, format_duration

RECIPE = "serve-int8"
MODELS = (
    "dlrm-synthetic",
    "dcnv2-synthetic",
    "deepfm-synthetic",
    "din-movielens",
    "hstu-movielens",
    "dlrm-torchrec-synthetic",
)


def measure(models: list[str], work: Path) -> None:
    """Run every model and write the result file; models not measured now keep their rows."""
    rows = {row["model"]: row for row in PAGE.read()["rows"]}
    for model in models:
        rows[model] = _measure_one(model, work / model)
        _write([rows[name] for name in MODELS if name in rows])


def _measure_one(model: str, folder: Path) -> dict[str, Any]:
    card = folder / "training" / "card.yaml"
    if not card.exists():
        _rankopt("train", f"models/{model}.yaml", "--out", str(folder / "training"))
    _rankopt(
        "run", f"recipes/{RECIPE}.yaml", "--model", str(card), "--out", str(folder / "run"),
        "--overwrite", allowed=(0, 1, 3),
    )  # fmt: skip
    return _row_of(model, folder / "run" / "report.json")


def _row_of(model: str, file: Path) -> dict[str, Any]:
    report = json.loads(file.read_text(encoding="utf-8"))
    return {
        "model": model,
        "verdict": report["verdict"],
        "reasons": report["reasons"],
        "quality": report["quality"],
        "latency": report["latency"],
        "baselines": report["baselines"],
        "size": report["size"],
        "passes": report["passes"],
        "data": {key: report["data"][key] for key in ("num_rows", "positives")},
        "statistics_unit": report["statistics_unit"],
        "notes": report["environment"]["notes"],
        "made_at": report["made_at"],
    }


def _rankopt(*arguments: str, allowed: tuple[int, ...] = (0,)) -> None:
    command = [sys.executable, "-m", "rankopt", *arguments]
    print("$ rankopt " + " ".join(arguments), flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode not in allowed:
        sys.exit(f"rankopt {arguments[0]} ended with {done.returncode}")


def _write(rows: list[dict[str, Any]]) -> None:
    PAGE.write(recipe=RECIPE, rows=rows)


def table(content: dict[str, Any]) -> str:
    """Write the result file as the Markdown that stands in README."""
    environment = content["environment"]
    isa = ", ".join(name for name in environment["isa"] if name in _NOTABLE)
    lines = [
        f"`{content['command']}`, {content['made_at'][:10]}: {environment['num_usable_cores']} "
        f"cores of {environment['cpu_model']} ({isa}), "
        f"torch {environment['libraries']['torch']}, recipe "
        f"`{content['recipe']}`. Speed-ups are ratios of medians in one interleaved run with 95 % "
        "intervals; control is eager PyTorch with the same threads.",
        "",
        "| model | verdict | speed-up, batch 1 | batch 512 | over plain AOTInductor, batch 1 "
        "| batch 512 | weights | NE change | judged on |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_table_row(row) for row in content["rows"])])


_NOTABLE = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_bf16", "amx_bf16")


def _table_row(row: dict[str, Any]) -> str:
    cells = [row["model"], row["verdict"]]
    cells += [_speedup(row["latency"], batch) for batch in (1, 512)]
    cells += [_speedup(row["baselines"], batch) for batch in (1, 512)]
    size, ne = row["size"], row["quality"]["ne"]
    ratio = size["control_bytes"] / size["candidate_bytes"]
    cells.append(f"{ratio:.2f}x smaller, {format_bytes(size['candidate_bytes'])}")
    cells.append(f"{ne['delta']:+.3%} [{ne['ci_low']:+.3%}, {ne['ci_high']:+.3%}]")
    clusters = ne["num_clusters"]
    unit = "" if row["statistics_unit"] == "row" else f", {clusters:,} x {row['statistics_unit']}"
    cells.append(f"{ne['num_rows']:,} test rows{unit}")
    return "| " + " | ".join(cells) + " |"


def _speedup(rows: list[dict[str, Any]], batch: int) -> str:
    for row in rows:
        if row["batch_size"] == batch:
            candidate = format_duration(row["candidate_p50_ns"])
            return (
                f"{row['speedup']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] "
                f"({candidate}, n = {row['num_samples']:,})"
            )
    return "not measured"


PAGE = ResultPage(
    result=ROOT / "benchmarks" / "results" / "recipes.json",
    page=ROOT / "README.md",
    command="make results",
    table=table,
    script="scripts/results.py",
)


def main() -> int:
    """Read the command line."""
    parser = result_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "results")
    given = parser.parse_args()
    return act(given.action, [PAGE], lambda: measure(given.models, given.work))


if __name__ == "__main__":
    sys.exit(main())
