"""Prove an artifact in a fresh process: files whole, contract kept, outputs those of the bundle.

Run as a module (`python -m rankopt.artifact.verify DIR`) it prints one JSON object. An artifact
counts as built only after this passed, since a package that compiled may still fail to run
(pytorch issue 135563).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rankopt.artifact.judged import quality_with
from rankopt.artifact.manifest import CHECKS, Manifest, damaged_files, read_manifest
from rankopt.errors import ArtifactError, RankoptError
from rankopt.review.schema import MetricParity, Verdict

TIMEOUT_S = 600
ROW_BATCH = 33
"""Batch in which single rows are compared with themselves alone: odd, more than two vectors."""


class Verification(BaseModel):
    """What was found; `problems` is empty when the artifact is sound.

    Attributes:
        largest_difference: from the bundle's outputs, as a share of their spread.
        rows_alone_equal: a row scored the same bits alone and inside a batch; None where the model
            scores no single row.
        batch_sizes: sizes that ran.
        isa: the kernels' instruction set here, which may differ from where it was judged.
        quality: what is known of quality with that one; None where it was not looked up.
        metrics: as judged in this run, where rows were given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: str
    problems: tuple[str, ...]
    largest_difference: float | None = None
    rows_alone_equal: bool | None = None
    batch_sizes: tuple[int, ...] = ()
    isa: str | None = None
    judged_isa: str | None = None
    quality: Verdict | None = None
    metrics: dict[str, MetricParity] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether the files are whole and the outputs those of the bundle."""
        return not self.problems

    @property
    def verdict(self) -> Verdict:
        """The answer, quality included: inconclusive where it was judged with other kernels."""
        return (self.quality or "pass") if self.passed else "fail"


def verify_artifact(folder: Path) -> Verification:
    """Check an artifact in a fresh process, so that nothing of this one helps it.

    Raises:
        ArtifactError: the folder is no artifact, or the process died.
    """
    read_manifest(folder)
    done = subprocess.run(
        [sys.executable, "-m", "rankopt.artifact.verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = "\n".join((done.stderr or done.stdout).splitlines()[-6:])
        raise ArtifactError(
            f"{folder}: the process that loaded it ended with {done.returncode}:\n{tail}"
        )
    return Verification.model_validate_json(lines[-1])


def _verify_here(folder: Path) -> Verification:
    manifest = read_manifest(folder)
    damaged = damaged_files(folder, manifest)
    if damaged:
        return Verification(artifact=str(folder), problems=tuple(damaged))
    from rankopt.kernels.ops import current_isa
    from rankopt.runtime import load_artifact

    try:
        artifact = load_artifact(folder)
    except RankoptError as error:
        return Verification(artifact=str(folder), problems=(str(error),))
    problems: list[str] = []
    try:
        difference, sizes = _compare(artifact, folder, manifest, problems)
        if manifest.requests is not None:
            difference = max(difference, _compare_requests(artifact, folder, manifest, problems))
        alone = _rows_alone(artifact, manifest) if manifest.min_batch == 1 else None
    except RankoptError as error:  # a part that stays eager may raise
        return Verification(artifact=str(folder), problems=(str(error),))
    isa = current_isa()
    quality, why = quality_with(folder, manifest, isa)
    return Verification(
        artifact=str(folder),
        problems=tuple(problems),
        largest_difference=difference,
        rows_alone_equal=alone,
        batch_sizes=sizes,
        isa=isa,
        judged_isa=manifest.judged_isa,
        quality=quality,
        notes=() if why is None else (why,),
    )


def _compare(
    artifact: Any, folder: Path, manifest: Manifest, problems: list[str]
) -> tuple[float, tuple[int, ...]]:
    from safetensors.torch import load_file

    checks = load_file(folder / CHECKS)
    sizes = sorted({int(name.split("/")[0]) for name in checks})
    # The spread over all check rows: a single row has none of its own.
    expected = {
        entry.name: [checks[f"{size}/output/{entry.name}"] for size in sizes]
        for entry in manifest.outputs
    }
    largest = 0.0
    for index, size in enumerate(sizes):
        features = {
            name.split("/", 2)[2]: value
            for name, value in checks.items()
            if name.startswith(f"{size}/input/")
        }
        scores = artifact(features)
        for name, references in expected.items():
            share = _share(scores[name], references[index], references)
            largest = max(largest, share)
            if not share <= manifest.tolerance:
                problems.append(
                    f"output {name} at batch {size} differs from the bundle's by {share:.3g} of "
                    f"its spread; allowed is {manifest.tolerance}"
                )
    return largest, tuple(sizes)


def _compare_requests(
    artifact: Any, folder: Path, manifest: Manifest, problems: list[str]
) -> float:
    """Run the calls with request_index that the artifact carries."""
    from rankopt.artifact.requests import request_checks

    calls = request_checks(folder)
    largest = 0.0
    for features, expected in calls:
        scores = artifact(features)
        for name, reference in expected.items():
            share = _share(scores[name], reference, [call[1][name] for call in calls])
            largest = max(largest, share)
            if not share <= manifest.tolerance:
                problems.append(
                    f"output {name} of {len(reference)} candidates with request_index differs from "
                    f"the bundle's by {share:.3g} of its spread; allowed is {manifest.tolerance}"
                )
    return largest


def _share(score: Any, reference: Any, references: list[Any]) -> float:
    import torch

    if score.shape != reference.shape or bool((score.isnan() != reference.isnan()).any()):
        return float("inf")
    # Made-up rows may bring a logarithm of a negative number: NaN where the bundle says NaN is
    # agreement, and so are equal infinities.
    finite = torch.cat(references).double()
    finite = finite[finite.isfinite()]
    spread = float(finite.std()) if len(finite) > 1 else 0.0
    same = (score == reference) | score.isnan()
    apart = (score.double() - reference.double()).abs().masked_fill(same, 0.0)
    return float(apart.max()) / max(spread, 1e-6)


def _rows_alone(artifact: Any, manifest: Manifest) -> bool:
    """Tell whether rows score the same bits alone as inside a batch."""
    import torch

    from rankopt.artifact.contract import random_features
    from rankopt.artifact.rows import one_row

    features = random_features(manifest.inputs, ROW_BATCH, torch.Generator().manual_seed(1))
    together = artifact(features)
    for row in (0, ROW_BATCH // 2, ROW_BATCH - 1):
        alone = artifact(one_row(manifest.inputs, features, row))
        if any(not _same_bits(alone[name][0], score[row]) for name, score in together.items()):
            return False
    return True


def _same_bits(left: Any, right: Any) -> bool:
    return bool(left == right) or bool(left.isnan() and right.isnan())


def main(arguments: Sequence[str]) -> int:
    """Verify one folder and print the result as one line of JSON."""
    print(json.dumps(_verify_here(Path(arguments[0])).model_dump(mode="json")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
