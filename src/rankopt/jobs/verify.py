"""Verify: an artifact's files and outputs; with data its quality as well, with these kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.artifact.judged import write_judgement
from rankopt.artifact.manifest import MANIFEST, PASSES, card_of, read_manifest
from rankopt.artifact.verify import Verification, verify_artifact
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.plan import BenchPlan
from rankopt.errors import CheckpointError, EnvironmentProblem
from rankopt.hashes import sha256_path
from rankopt.jobs.compare import Comparison
from rankopt.jobs.decisions import read_passes
from rankopt.jobs.inputs import Progress, quiet
from rankopt.review.gates import Gates
from rankopt.review.schema import Report

if TYPE_CHECKING:
    from rankopt.jobs.inputs import Data


def verify(
    artifact: str | Path,
    data: Data | None = None,
    *,
    checkpoint: str | Path | None = None,
    reproduce: str = "rankopt verify",
    progress: Progress = quiet,
    detail: Progress = quiet,
) -> Verification:
    """Check an artifact in a fresh process, and judge its quality where rows are given.

    Its scores are compared with those of the eager control, built again from the card that the
    artifact carries and its checkpoint, on the same rows, and held to the quality gates of the
    recipe that made it. The answer is stamped into `judged/` of the artifact.

    Args:
        artifact: the artifact folder.
        data: labelled rows; of one file the test part is judged, as in an A/B.
        checkpoint: where the weights lie that the artifact was made of; what its manifest names
            when None. Other weights may be given, and are noted.
        reproduce: the command, for the stamp.
        progress: told one line per step.
        detail: told how far the current step is.

    Raises:
        ArtifactError: the folder is no artifact, or the process that loaded it died.
        CardError, CheckpointError, DataError: the control or the rows cannot be had; the weights
            that the manifest names are gone or have changed.
    """
    folder = Path(artifact)
    weights, others = (None, ()) if data is None else _weights(folder, checkpoint)
    progress("running the artifact in a fresh process")
    found = verify_artifact(folder)
    if data is None or not found.passed or found.isa is None:
        return found
    report = _judge(folder, data, weights, reproduce, progress, detail)
    notes = (*others, *report.reasons)
    try:
        write_judgement(folder, found.isa, report)
    except EnvironmentProblem as error:  # a folder that is served from may be read-only
        notes = (*notes, f"the answer could not be kept with the artifact: {error}")
    return found.model_copy(
        update={"quality": report.verdict, "metrics": report.quality, "notes": notes}
    )


def _weights(folder: Path, given: str | Path | None) -> tuple[Path | None, tuple[str, ...]]:
    """Find the weights that an artifact was made of, and what is to be noted of those given.

    Raises:
        CheckpointError: those that the manifest names are gone or have changed.
    """
    record = read_manifest(folder).checkpoint
    if given is not None:
        file = Path(given)
        if record is None or not file.exists() or sha256_path(file) == record.sha256:
            return file, ()
        return file, (f"{file} holds other bytes than the checkpoint the artifact was made of",)
    if record is None:  # made before manifests named it: the card's own
        return None, ()
    hint = "Name a copy with --checkpoint, since quality is judged against these weights."
    problem = record.problem(f"{folder / MANIFEST}: checkpoint", hint)
    if problem is not None:
        raise CheckpointError(problems=[problem])
    return Path(record.path), ()


def _judge(
    folder: Path,
    data: Data,
    checkpoint: Path | None,
    reproduce: str,
    progress: Progress,
    detail: Progress,
) -> Report:
    """Score control and artifact in processes of their own; nothing is timed."""
    passes = folder / PASSES
    gates = read_passes(passes)[0].gates if passes.is_file() else Gates()
    job = Comparison(
        card_of(read_manifest(folder)),
        folder,
        checkpoint,
        Gates(quality=gates.quality),
        BenchPlan(),
        baselines={},
        price_per_hour=None,
    )
    with tempfile.TemporaryDirectory(prefix="rankopt-verify-") as workdir:
        return job.run(
            Path(workdir),
            data=data,
            slo_p99_ns=None,
            backend=LocalBackend(),
            resume=False,
            reproduce=reproduce,
            progress=progress,
            detail=detail,
            timed=False,
        )
