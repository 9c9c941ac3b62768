"""Time one request of many candidates in both forms of a call, and write the table.

    scripts/hoisting.py measure    build, compare scores, time in turns, write the result
    scripts/hoisting.py table      write the table of docs/hoisting.md from the result
    scripts/hoisting.py check      exit 1 when that table is not that of the result file

Nothing else should run on the machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from result_page import ROOT, ResultPage, act, result_parser

from rankopt.artifact.build import write_artifact
from rankopt.artifact.contract import contract_of
from rankopt.artifact.verify import verify_artifact
from rankopt.bench.ab import time_pair
from rankopt.bench.arms import ArmSpec
from rankopt.bench.plan import BenchPlan
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.export import trace_example
from rankopt.capture.requests import random_requests
from rankopt.data.rows import Rows, bag_counts
from rankopt.environment import collect_environment
from rankopt.models.build import build_model
from rankopt.models.card import ModelCard, load_card
from rankopt.passes.base import PassContext
from rankopt.passes.forms import apply_to_forms
from rankopt.recipe import parse_pass
from rankopt.runtime import load_artifact
from rankopt.units import format_duration

SETTINGS = ROOT / "benchmarks" / "hoisting.yaml"
SEED = 7


def measure(models: list[str], settings: dict[str, Any]) -> None:
    """Measure model after model; those not measured now keep their rows."""
    rows = {row["model"]: row for row in PAGE.read()["rows"]}
    for model in models:
        print(f"{model}: building", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="rankopt-hoisting-"))
        try:
            rows[model] = _measure_one(model, settings, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(f"  {rows[model]}", flush=True)
        PAGE.write(rows=[rows[name] for name in settings["models"] if name in rows])


def _measure_one(model: str, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    card = load_card(SETTINGS.parent / "hoisting" / f"{model}.yaml")
    request_size, num_requests = settings["request_size"], settings["num_requests"]
    bundle = _build(card, settings["passes"], folder)
    artifact = folder / "artifact"
    write_artifact(bundle, artifact, control_size_bytes=bundle.size_bytes)
    verification = verify_artifact(artifact)
    if bundle.requests is None or not verification.passed:
        sys.exit(f"{model}: not hoisted, or not sound: {verification.problems}")
    generator = torch.Generator().manual_seed(SEED)
    plain, requests = random_requests(
        contract_of(card), [request_size] * num_requests, generator, fill=1.0
    )
    rows = Rows(plain, {}, None, request_size * num_requests, bag_counts(card))
    row_arm = ArmSpec(label="rows", kind="artifact", artifact=artifact)
    request_arm = ArmSpec(
        label="requests",
        kind="requests",
        artifact=artifact,
        options={"request_size": request_size},
    )
    plan = BenchPlan.model_validate(settings["plan"])
    (line,) = time_pair(row_arm, request_arm, rows, plan, progress=lambda _: None)
    count = bundle.requests.operations
    return {
        "model": model,
        "request_size": request_size,
        "operations_before": count.before,
        "operations_left": count.left,
        "operations_ratio": count.before / count.left,
        "rows_p50_ns": line.control_p50_ns,
        "requests_p50_ns": line.candidate_p50_ns,
        "speedup": line.speedup,
        "ci_low": line.ci_low,
        "ci_high": line.ci_high,
        "num_samples": line.num_samples,
        "max_logit_difference": _difference(artifact, plain, requests),
        "target": settings["targets"].get(model),
    }


def _build(card: ModelCard, passes: list[Any], folder: Path) -> ModelBundle:
    torch.manual_seed(SEED)
    module = build_model(card, allow_random=True).module
    bundle = build_bundle(card, module, trace_example(card))
    context = PassContext(collect_environment(), folder)
    for item in passes:
        ((kind, given),) = item.items()
        step, problems = parse_pass(kind, given, where=str(SETTINGS), prefix=kind)
        if step is None:
            sys.exit("\n".join(map(str, problems)))
        bundle = apply_to_forms(step, bundle, context)
    print("\n".join(f"  {note}" for note in context.notes), flush=True)
    return bundle


def _difference(
    artifact: Path, plain: dict[str, torch.Tensor], requests: dict[str, torch.Tensor]
) -> float:
    """Return the largest difference of a score between the two forms."""
    loaded = load_artifact(artifact)
    expected = {name: score.clone() for name, score in loaded(plain).items()}
    scores = loaded(requests)
    return max(float((scores[name] - expected[name]).abs().max()) for name in expected)


def table(content: dict[str, Any]) -> str:
    """Write the result file as the Markdown that stands in the documentation."""
    if not content["rows"]:
        return "Not measured yet: `python scripts/hoisting.py measure`."
    environment = content["environment"]
    lines = [
        f"`{content['command']}`, {content['made_at'][:10]}: {environment['num_usable_cores']} "
        f"cores of {environment['cpu_model']}, torch {environment['libraries']['torch']}. "
        "Speed-ups are ratios of medians in one interleaved run with 95 % intervals.",
        "",
        "| model | candidates | operations before / left | rows | requests | speed-up | wanted "
        "| largest difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_table_row(row) for row in content["rows"])])


def _table_row(row: dict[str, Any]) -> str:
    cells = [
        row["model"],
        f"{row['request_size']}",
        f"{row['operations_ratio']:.2f}",
        format_duration(row["rows_p50_ns"]),
        format_duration(row["requests_p50_ns"]),
        f"{row['speedup']:.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] "
        f"(n = {row['num_samples']:,})",
        f"{row['target']:g}" if row["target"] else "",
        f"{row['max_logit_difference']:.1g}",
    ]
    return "| " + " | ".join(cells) + " |"


PAGE = ResultPage(
    result=ROOT / "benchmarks" / "results" / "hoisting.json",
    page=ROOT / "docs" / "hoisting.md",
    command="python scripts/hoisting.py measure",
    table=table,
    script="scripts/hoisting.py",
)


def main() -> int:
    """Read the command line."""
    settings = yaml.safe_load(SETTINGS.read_text(encoding="utf-8"))
    parser = result_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=settings["models"], default=settings["models"]
    )
    given = parser.parse_args()
    return act(given.action, [PAGE], lambda: measure(given.models, settings))


if __name__ == "__main__":
    sys.exit(main())
