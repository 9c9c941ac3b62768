"""The whole chain's verdicts against planted truths: artifacts, workers, statistics, gates.

Nothing is mocked: every candidate is an artifact on disk, scored and timed in processes of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

import small
from rankopt import compare, load_artifact, load_card
from rankopt.artifact.constants import map_constants, write_constants
from rankopt.artifact.manifest import CONSTANTS, MANIFEST, read_manifest
from rankopt.bench.local_backend import LocalBackend
from rankopt.bench.stats import claimed_differences
from rankopt.data.encode import load_rows
from rankopt.data.splits import open_splits
from rankopt.hashes import sha256_file
from rankopt.quality.metrics import normalized_entropy
from rankopt.review.gates import Gates
from rankopt.review.schema import Report

Floats = npt.NDArray[np.float64]

NUM_AA_RUNS = 20
MARGIN = 0.001
FEW_ROWS = 200
BIAS = "model.top.2.bias"
GATES = Gates.model_validate({"quality": {"ne": MARGIN}})
BRIEF = small.PLAN.model_copy(update={"batch_sizes": (1,), "min_blocks": 4, "max_blocks": 4})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def artifact(root: Path) -> Path:
    return small.artifact(root)


@pytest.fixture(scope="module")
def scored(root: Path, artifact: Path) -> tuple[Floats, Floats]:
    """Score the test rows; return logits and labels, [N]."""
    card = load_card(small.trained(root) / "card.yaml")
    rows = load_rows(card, open_splits(card).test)
    logits = load_artifact(artifact)(rows.features)["click"].double().numpy()
    return logits, rows.labels["label"]


@pytest.fixture(scope="module")
def few(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("few")
    frame = pd.read_parquet(small.model(root) / "data" / "test.parquet").head(FEW_ROWS)
    for name in ("validation", "test"):
        frame.to_parquet(folder / f"{name}.parquet")
    return folder


def altered(artifact: Path, target: Path, alter: Callable[[dict[str, npt.NDArray]], None]) -> Path:
    """Copy an artifact with other constants, and hashes that agree with them."""
    small.copy_of(artifact, target)
    manifest = read_manifest(target)
    mapped = map_constants(manifest.constants, artifact / CONSTANTS)
    constants = {name: value.clone() for name, value in mapped.items()}
    alter({name: value.numpy() for name, value in constants.items()})
    entries = write_constants(constants, target / CONSTANTS)
    files = {**manifest.files, CONSTANTS: sha256_file(target / CONSTANTS)}
    changed = manifest.model_copy(update={"constants": entries, "files": files})
    (target / MANIFEST).write_text(changed.model_dump_json())
    return target


def judged(control: Path, candidate: Path, data: Path | None = None) -> Report:
    return compare(control, candidate, data, plan=BRIEF, gates=GATES, backend=LocalBackend())


@pytest.mark.slow
def test_of_twenty_runs_of_the_same_artifact_at_most_three_claim_a_difference(
    artifact: Path, few: Path
) -> None:
    claims = []
    for _ in range(NUM_AA_RUNS):
        report = compare(artifact, artifact, few, plan=small.PLAN, backend=LocalBackend())
        assert len(report.quality) > 3
        assert len(report.latency) == 2
        claims.append(claimed_differences(report.quality, report.latency))
    alarms = [found for found in claims if found]
    assert len(alarms) <= 3, alarms


def test_a_candidate_whose_tables_were_damaged_fails_on_ne(artifact: Path, tmp_path: Path) -> None:
    def damage(constants: dict[str, npt.NDArray]) -> None:
        # Three tables of 200 rows of 12 bytes, each ending on a cache line. Rows change places, as
        # when two shards are swapped: each is sound, and none is where it belongs.
        for table in constants["tables"].reshape(3, -1):
            rows = table[: 200 * 12].reshape(200, 12)
            rows[:] = rows[np.random.default_rng(0).permutation(200)]

    report = judged(artifact, altered(artifact, tmp_path / "damaged", damage))
    assert report.verdict == "fail"
    ne = report.quality["ne"]
    assert ne.verdict == "fail"
    assert ne.ci_low is not None
    assert ne.ci_low > MARGIN
    assert any("Normalized entropy" in reason for reason in report.reasons)


def ne_change(shift: float, logits: Floats, labels: Floats) -> float:
    def ne(values: Floats) -> float:
        return normalized_entropy(1 / (1 + np.exp(-values)), labels)

    return ne(logits + shift) / ne(logits) - 1


def bias_for(wanted: float, logits: Floats, labels: Floats) -> float:
    """Find, by halving, the shift of all logits that worsens NE by `wanted`."""
    low, high = 0.0, 2.0
    # Over-prediction first helps a model that under-predicts; from its best shift on it harms.
    while ne_change(high, logits, labels) <= wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if ne_change(middle, logits, labels) < wanted:
            low = middle
        else:
            high = middle
    return high


@pytest.mark.parametrize(("share", "verdict"), [(0.3, "pass"), (2.0, "fail")])
def test_a_planted_change_of_ne_is_told_on_all_rows_and_left_open_on_few(
    artifact: Path,
    scored: tuple[Floats, Floats],
    few: Path,
    tmp_path: Path,
    share: float,
    verdict: str,
) -> None:
    shift = bias_for(share * MARGIN, *scored)

    def plant(constants: dict[str, npt.NDArray]) -> None:
        constants[BIAS] += np.float32(shift)

    candidate = altered(artifact, tmp_path / "planted", plant)
    report = judged(artifact, candidate)
    ne = report.quality["ne"]
    assert ne.delta == pytest.approx(share * MARGIN, rel=0.01), "the plant itself"
    assert ne.num_rows == small.DATA.num_test
    assert ne.ci_low is not None
    assert ne.ci_high is not None
    assert ne.ci_low < share * MARGIN < ne.ci_high
    assert report.verdict == ne.verdict == verdict

    small_report = judged(artifact, candidate, few)
    ne = small_report.quality["ne"]
    assert ne.num_rows == FEW_ROWS
    assert small_report.verdict == ne.verdict == "inconclusive"
    assert any("would decide it" in reason for reason in small_report.reasons)
