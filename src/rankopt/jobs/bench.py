"""Bench: the peer suite, model by model, as one result file."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rankopt.bench.peers.artifact import source_digest
from rankopt.bench.peers.goals import missed_goals
from rankopt.bench.peers.measure import measure_model
from rankopt.bench.peers.result import ModelResult, NotRun, PeerResult
from rankopt.bench.peers.suite import RANKOPT, PeerSuite, SuiteModel, load_suite
from rankopt.bench.peers.summary import geometric_means
from rankopt.environment import LIBRARIES, collect_environment, installed_libraries
from rankopt.errors import RankoptError
from rankopt.jobs.inputs import Progress, quiet
from rankopt.output import staged_file, write_json_atomic

PEER_LIBRARIES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "zentorch")


def bench(
    suite: PeerSuite | str | Path,
    out: str | Path,
    *,
    models: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
    arms: Sequence[str] = (),
    overwrite: bool = False,
    resume: bool = False,
    breakdown: bool = True,
    command: str | None = None,
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> PeerResult:
    """Measure a peer suite and write its result.

    Args:
        suite: a suite, its path, or its name in benchmarks/.
        out: the JSON file.
        models: only these; all when empty.
        batch_sizes: in place of the suite's.
        arms: only these; all when empty.
        overwrite: replace a result that `out` holds.
        resume: take over models that a stopped run with the same `out` has finished.
        breakdown: say where the time of rankopt's arm goes, if the suite asks for it.
        command: what to write into the result; made up when None.
        progress: told one line per step.
        detail: told how far the current step is.

    Returns:
        What was written.

    Raises:
        UsageError: the suite is wrong, or names what is not there.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    whole = suite if isinstance(suite, PeerSuite) else load_suite(suite)
    chosen = whole.chosen(models, batch_sizes, arms)
    if not breakdown:
        chosen = chosen.model_copy(update={"breakdown": False})
    target = Path(out)
    with staged_file(target, overwrite=overwrite) as partial:
        workdir = target.with_name(f"{target.name}.partial")
        if not resume:
            shutil.rmtree(workdir, ignore_errors=True)
        workdir.mkdir(parents=True, exist_ok=True)
        results = [_measure(chosen, model, workdir, progress, detail) for model in chosen.models]
        result = join_results(results, chosen, command or f"rankopt bench --out {out}")
        partial.write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(workdir, ignore_errors=True)
    return result


def join_results(results: Sequence[ModelResult], suite: PeerSuite, command: str) -> PeerResult:
    """Put models' results into one file's content."""
    environment = collect_environment()
    summary = [row for result in results for row in result.summary]
    against_eager = [row for result in results for row in result.against_eager]
    means = geometric_means(summary, against_eager, suite.goals)
    breakdown = [row for result in results for row in result.time_breakdown]
    asked = any(arm.kind == RANKOPT for arm in suite.arms)
    missed = missed_goals(suite.goals, summary, against_eager, means, breakdown) if asked else []
    libraries = installed_libraries((*LIBRARIES, *PEER_LIBRARIES))
    machine = environment.model_dump(mode="json", exclude={"compiler"})
    return PeerResult(
        made_at=datetime.now(UTC).isoformat(timespec="seconds"),
        environment={**machine, "libraries": libraries},
        command=command,
        suite=suite_content(suite),
        rows=tuple(row for result in results for row in result.rows),
        summary=tuple(summary),
        against_eager=tuple(against_eager),
        geometric_means=tuple(means),
        not_run=tuple(item for result in results for item in result.not_run),
        settings=tuple(item for result in results for item in result.settings),
        notes=tuple(note for result in results for note in result.notes),
        time_breakdown=tuple(breakdown),
        peaks=tuple(result.peaks for result in results if result.peaks is not None),
        not_broken_down=tuple(item for result in results for item in result.not_broken_down),
        missed_goals=tuple(missed),
    )


def suite_content(suite: PeerSuite) -> dict[str, object]:
    """Write a suite as JSON values, its arms by kind."""
    content = suite.model_dump(mode="json", exclude={"arms"})
    content["arms"] = {arm.kind: arm.model_dump(mode="json") for arm in suite.arms}
    return content


def is_complete(result: PeerResult, suite: PeerSuite) -> bool:
    """Tell whether every model was measured, with rankopt where the suite asks for it."""
    wanted = RANKOPT if any(arm.kind == RANKOPT for arm in suite.arms) else suite.arms[0].kind
    measured = {row.model for row in result.rows if row.arm == wanted}
    return all(model.name in measured for model in suite.models)


def _measure(
    suite: PeerSuite, model: SuiteModel, workdir: Path, progress: Progress, detail: Progress
) -> ModelResult:
    file = workdir / f"{model.name}.json"
    identity = _identity(suite, model)
    if file.is_file():
        stored = json.loads(file.read_text(encoding="utf-8"))
        if stored["identity"] == identity:
            progress(f"{model.name}: taken over from the stopped run")
            return ModelResult.model_validate(stored["result"])
    try:
        result = measure_model(suite, model, workdir / model.name, progress, detail)
    except RankoptError as error:  # one model that fails must not end the run of the others
        progress(f"{model.name}: not measured: {error}")
        return _failed(suite, model, error)
    content = {"identity": identity, "result": result.model_dump(mode="json")}
    write_json_atomic(file, content)
    return result


def _identity(suite: PeerSuite, model: SuiteModel) -> str:
    """Name what a model's result depends on, as far as a stopped run can be taken up again."""
    content = suite_content(suite) | {
        "models": [model.model_dump(mode="json")],
        "source": source_digest(),
        "machine": collect_environment().fingerprint(),
    }
    del content["goals"]  # held against what was measured once all of it is there
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _failed(suite: PeerSuite, model: SuiteModel, error: RankoptError) -> ModelResult:
    return ModelResult(
        model=model.name,
        rows=(),
        summary=(),
        against_eager=(),
        not_run=tuple(
            NotRun(model=model.name, arm=arm.kind, error=str(error)) for arm in suite.arms
        ),
        settings=(),
        notes=(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
