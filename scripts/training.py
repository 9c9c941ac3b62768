"""Measure training recipes against plain PyTorch, and keep the table of docs/training.md in step.

    python scripts/training.py measure    time steps in turns, train over seeds, write the result
    python scripts/training.py table      write the table of docs/training.md from the result
    python scripts/training.py check      exit 1 when that table is not that of the result file

About a quarter of an hour on two cores; nothing else should run on the machine.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from result_page import ROOT, ResultPage, act, result_parser

from rankopt.bench.plan import load_plan
from rankopt.data.splits import open_splits
from rankopt.diagnose.machine import machine_peaks
from rankopt.jobs.compare_training import seed_quality, time_training, training_cost
from rankopt.models.card import load_card
from rankopt.recipe import Recipe, dump_recipe, load_recipe, parse_recipe
from rankopt.train.seeds import train_seeds
from rankopt.units import format_bytes, format_duration

SETTINGS = ROOT / "benchmarks" / "training.yaml"


def measure(models: list[str], settings: dict[str, Any], num_seeds: int) -> None:
    """Measure model after model; those not measured now keep their rows."""
    rows = [row for row in PAGE.read()["rows"] if row["model"] not in models]
    for model in models:
        with tempfile.TemporaryDirectory(prefix="rankopt-training-") as folder:
            rows += _measure_one(model, settings, range(num_seeds), Path(folder))
        order = list(settings["models"])
        PAGE.write(rows=sorted(rows, key=lambda row: order.index(row["model"])))


def _measure_one(
    model: str, settings: dict[str, Any], seeds: range, folder: Path
) -> list[dict[str, Any]]:
    arms = settings["models"][model]
    recipes = {name: _recipe(name, arm, settings) for name, arm in arms.items()}
    card = load_card(ROOT / "models" / f"{model}.yaml")
    open_splits(card)  # made once, before anything is timed
    plan = load_plan(settings["plan"])
    machine_peaks(plan.num_threads)  # what the runs hold their speed against
    lines = {}
    for name, recipe in recipes.items():
        print(f"{model}: timing steps, {name}", flush=True)
        pair: dict[str, Recipe | None] = {"control": None, "candidate": recipe}
        [lines[name]] = time_training(card, pair, folder / name, plan)
    files: dict[str, Path | None] = {"control": None}
    for name, recipe in recipes.items():
        files[name] = file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dump_recipe(recipe)), encoding="utf-8")
    runs = train_seeds(
        ROOT / "models" / f"{model}.yaml", files, seeds, folder / "runs",
        num_threads=plan.num_threads, progress=lambda line: print(f"{model}: {line}", flush=True),
    )  # fmt: skip
    costs = {name: training_cost(found) for name, found in runs.items()}
    rows = []
    for name, recipe in recipes.items():
        line = lines[name]
        pair_runs = {"control": runs["control"], "candidate": runs[name]}
        quality = seed_quality(card, pair_runs, recipe.gates)
        row = {
            "model": model,
            "recipe": name,
            "kept_passes": [item["kind"] for item in runs[name][0]["passes"] if item["kept"]],
            "batch_size": line.batch_size,
            "speedup": line.speedup,
            "ci_low": line.ci_low,
            "ci_high": line.ci_high,
            "num_samples": line.num_samples,
            "wanted": arms[name].get("wanted"),
            "control_step_p50_ns": line.control_p50_ns,
            "candidate_step_p50_ns": line.candidate_p50_ns,
            "control": costs["control"].model_dump(mode="json"),
            "candidate": costs[name].model_dump(mode="json"),
            "ne": quality["ne"].model_dump(mode="json"),
            "ne_by_seed": {
                arm: [item["test"][card.outputs[0].name]["ne"] for item in found]
                for arm, found in pair_runs.items()
            },
            "num_seeds": len(seeds),
        }
        print(f"  {_table_row(row)}", flush=True)
        rows.append(row)
    return rows


def _recipe(name: str, arm: dict[str, Any], settings: dict[str, Any]) -> Recipe:
    if "recipe" in arm:
        return load_recipe(arm["recipe"])
    raw = {"name": name, "passes": arm["passes"], "gates": {"quality": settings["margin"]}}
    return parse_recipe(raw, where=str(SETTINGS))


def table(content: dict[str, Any]) -> str:
    """Write the result file as the Markdown that stands in the documentation."""
    if not content["rows"]:
        return "Not measured yet: `make training`."
    environment = content["environment"]
    lines = [
        f"`{content['command']}`, {content['made_at'][:10]}: {environment['num_usable_cores']} "
        f"cores of {environment['cpu_model']}, torch {environment['libraries']['torch']}. "
        "Speed-ups of a step are ratios of medians in one interleaved run on ready tensors, with "
        "95 % intervals; the rest comes from whole runs, control / candidate.",
        "",
        "| model | recipe | step | speed-up | wanted | samples/s | data wait | peak memory "
        "| NE change over seeds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_table_row(row) for row in content["rows"])])


def _table_row(row: dict[str, Any]) -> str:
    control, candidate, ne = row["control"], row["candidate"], row["ne"]
    arms = (control, candidate)
    interval = "" if ne["ci_low"] is None else f" [{ne['ci_low']:+.3%}, {ne['ci_high']:+.3%}]"
    steps = (row["control_step_p50_ns"], row["candidate_step_p50_ns"])
    cells = [
        row["model"],
        row["recipe"],
        " / ".join(map(format_duration, steps)),
        f"{row['speedup']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] "
        f"(n = {row['num_samples']:,})",
        f"{row['wanted']:g}" if row["wanted"] else "",
        " / ".join(f"{arm['samples_per_s']:,.0f}" for arm in arms),
        " / ".join(f"{arm['data_wait_share']:.1%}" for arm in arms),
        " / ".join(format_bytes(arm["peak_memory_bytes"]) for arm in arms),
        f"{ne['delta']:+.3%}{interval}, {ne['verdict']} ({row['num_seeds']} seeds)",
    ]
    return "| " + " | ".join(cells) + " |"


PAGE = ResultPage(
    result=ROOT / "benchmarks" / "results" / "training.json",
    page=ROOT / "docs" / "training.md",
    command="make training",
    table=table,
    script="scripts/training.py",
)


def main() -> int:
    """Read the command line."""
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    names = list(settings["models"])
    parser = result_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=settings["seeds"])
    given = parser.parse_args()
    return act(given.action, [PAGE], lambda: measure(given.models, settings, given.seeds))


if __name__ == "__main__":
    sys.exit(main())
