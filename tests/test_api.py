"""The Python API on a small trained model: optimize, compare, refresh, predict."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

import small
from rankopt import compare, load_artifact, load_card, optimize
from rankopt.artifact import predict
from rankopt.artifact.manifest import CONSTANTS, MANIFEST, read_manifest
from rankopt.artifact.predict import predict_file
from rankopt.artifact.refresh import refresh_artifact
from rankopt.artifact.verify import verify_artifact
from rankopt.bench.local_backend import LocalBackend
from rankopt.data.encode import load_rows
from rankopt.data.source import open_source
from rankopt.data.splits import open_splits
from rankopt.errors import ArtifactError, CheckpointError, DataError, OutputExistsError, UsageError
from rankopt.jobs.decisions import read_records
from rankopt.models.build import build_module
from rankopt.models.serving import EagerModel
from rankopt.review.schema import Report

QUICK = small.PLAN.model_copy(update={"batch_sizes": (1,), "min_blocks": 4, "max_blocks": 4})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def artifact(root: Path) -> Path:
    return small.artifact(root)


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    return small.trained(root)


@pytest.fixture(scope="module")
def others(root: Path) -> Path:
    """Train the same model from another seed."""
    return small.trained(root, seed=5)


@pytest.fixture(scope="module")
def test_frame(root: Path) -> pd.DataFrame:
    return pd.read_parquet(small.model(root) / "data" / "test.parquet")


def eager_scores(trained: Path, rows: int) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    card = load_card(trained / "card.yaml")
    features = load_rows(card, open_splits(card).test, limit=rows).features
    return EagerModel(card, build_module(card))(features)["click"].numpy(), features


def test_an_artifact_scores_as_the_model_did_within_int8(artifact: Path, trained: Path) -> None:
    eager, features = eager_scores(trained, 4_096)
    scores = load_artifact(artifact)(features)["click"].numpy()
    # The tables' rounding is all that changed; their rows have steps of 1/255 of their range.
    assert 0 < np.abs(scores - eager).max() < 0.05 * eager.std()


def test_the_artifact_folder_holds_the_contract_and_what_became_of_each_pass(
    artifact: Path,
) -> None:
    manifest = read_manifest(artifact)
    assert manifest.recipe == "small-int8"
    assert {path.name for path in artifact.iterdir() if not path.name.startswith(".")} == {
        "model.pt2",
        "weights",
        "checks.safetensors",
        "manifest.json",
        "passes.json",
    }
    records = {record.kind: record for record in read_records(artifact)}
    assert list(records) == ["fuse_embeddings", "quantize_embeddings", "export_aoti"]
    assert all(record.kept for record in records.values())
    # Three tables of 200 rows of 8: 8 bytes and a 4-byte scale in place of 32.
    [tables] = [entry for entry in manifest.constants if entry.name == "tables"]
    assert tables.size_bytes == pytest.approx(600 * 12, abs=3 * 64)
    assert manifest.control_size_bytes == 4 * (600 * 8 + 28 * 32 + 32 + 32 + 1)


def test_earlier_choices_and_another_checkpoint_give_what_a_refresh_gives(
    artifact: Path, others: Path, trained: Path, tmp_path: Path, test_frame: pd.DataFrame
) -> None:
    checkpoint = others / "checkpoint.safetensors"
    anew = optimize(
        artifact.parent / "model" / "recipe.yaml", trained / "card.yaml", checkpoint,
        test_frame.head(100),
        out=tmp_path / "anew", choices=artifact / "passes.json",
    )  # fmt: skip
    refreshed = refresh_artifact(artifact, checkpoint, tmp_path / "refreshed")
    assert (refreshed / CONSTANTS).read_bytes() == (anew / CONSTANTS).read_bytes()
    assert (refreshed / CONSTANTS).read_bytes() != (artifact / CONSTANTS).read_bytes()
    assert (refreshed / "model.pt2").read_bytes() == (artifact / "model.pt2").read_bytes()
    assert verify_artifact(refreshed).passed
    eager, features = eager_scores(others, 1_024)
    scores = load_artifact(refreshed)(features)["click"]
    # To the bit: nothing of the first weights is left in the compiled code.
    assert torch.equal(scores, load_artifact(anew)(features)["click"])
    assert np.abs(scores.numpy() - eager).max() < 0.05 * eager.std()
    for name in ("fuse_embeddings", "quantize_embeddings"):
        [first] = [r for r in read_records(artifact) if r.kind == name]
        [replayed] = [r for r in read_records(anew) if r.kind == name]
        assert (replayed.kept, replayed.measured_speedup) == (first.kept, first.measured_speedup)


def test_a_refresh_refuses_passes_that_were_calibrated_on_rows(
    artifact: Path, others: Path, tmp_path: Path
) -> None:
    copy = small.copy_of(artifact, tmp_path / "copy")
    told = json.loads((copy / "passes.json").read_text())
    index = next(i for i, step in enumerate(told["passes"]) if step["kind"] != "export_aoti")
    told["passes"][index]["kind"] = "quantize_dense"
    told["recipe"]["passes"][index] = {"quantize_dense": {"activations": "static"}}
    (copy / "passes.json").write_text(json.dumps(told))
    with pytest.raises(ArtifactError, match="quantize_dense was calibrated on rows"):
        refresh_artifact(copy, others / "checkpoint.safetensors", tmp_path / "refreshed")
    assert not (tmp_path / "refreshed").exists()


def test_a_refresh_refuses_weights_that_lead_to_other_constants(
    artifact: Path, others: Path, tmp_path: Path
) -> None:
    changed = small.copy_of(artifact, tmp_path / "changed")
    raw = json.loads((changed / MANIFEST).read_text())
    [bias] = [entry for entry in raw["constants"] if entry["name"] == "model.top.0.bias"]
    bias["shape"] = [8, 4]
    (changed / MANIFEST).write_text(json.dumps(raw))
    with pytest.raises(ArtifactError) as caught:
        refresh_artifact(changed, others / "checkpoint.safetensors", tmp_path / "out")
    assert "constant model.top.0.bias: must be float32 [8, 4]; got 'float32 [32]'" in str(
        caught.value
    )
    assert "rankopt optimize" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_refresh_refuses_a_damaged_artifact_and_another_models_weights(
    artifact: Path, tmp_path: Path
) -> None:
    torch.save({"other.weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"other\.weight"):
        refresh_artifact(artifact, tmp_path / "other.pt", tmp_path / "out")
    damaged = small.copy_of(artifact, tmp_path / "damaged")
    (damaged / "model.pt2").write_bytes(b"PK")
    with pytest.raises(ArtifactError, match=r"model\.pt2 differs from its hash"):
        refresh_artifact(damaged, tmp_path / "other.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def eager_report(artifact: Path, trained: Path) -> Report:
    return compare(trained / "card.yaml", artifact, plan=QUICK, backend=LocalBackend())


def test_compare_judges_the_candidate_on_the_cards_test_rows(
    eager_report: Report, artifact: Path
) -> None:
    ne = eager_report.quality["ne"]
    assert eager_report.verdict == "pass"
    assert (ne.num_rows, ne.num_clusters, ne.margin) == (60_000, 15_000, 0.001)
    assert ne.ci_low is not None
    assert ne.ci_high is not None
    assert ne.ci_low < 0 < ne.ci_high or abs(ne.delta or 0) < 1e-3
    assert eager_report.statistics_unit == "request_id"
    [latency] = eager_report.latency
    assert (latency.batch_size, latency.num_blocks) == (1, 4)
    assert latency.speedup is not None
    assert latency.speedup > 1
    manifest = read_manifest(artifact)
    assert eager_report.size.control_bytes == manifest.control_size_bytes
    assert eager_report.size.candidate_bytes == manifest.size_bytes
    assert [record.kind for record in eager_report.passes][-1] == "export_aoti"
    assert f"--candidate {artifact}" in eager_report.reproduce


def test_compare_reads_the_same_metrics_as_training_did(
    eager_report: Report, trained: Path
) -> None:
    told = json.loads((trained / "metrics.json").read_text())["test"]["click"]
    for name in ("ne", "auc", "log_loss", "calibration"):
        assert eager_report.quality[name].control == pytest.approx(told[name], rel=1e-6)


def test_an_artifact_can_be_the_control(artifact: Path, tmp_path: Path) -> None:
    report = compare(
        artifact, artifact, plan=QUICK, backend=LocalBackend(), out=tmp_path / "report"
    )
    assert report.quality["ne"].delta == 0
    assert report.size.control_bytes == report.size.candidate_bytes
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["verdict"] == report.verdict == "pass"
    assert (tmp_path / "report" / "report.html").stat().st_size > 10_000


# predict


def probabilities(artifact: Path, frame: pd.DataFrame) -> np.ndarray:
    card = load_card(small.model(artifact.parent.parent) / "card.yaml")
    features = load_rows(card, open_source(frame), with_labels=False).features
    return torch.sigmoid(load_artifact(artifact)(features)["click"].double()).numpy()


def test_predict_keeps_the_order_and_the_datas_own_row_ids(
    artifact: Path, test_frame: pd.DataFrame, tmp_path: Path
) -> None:
    some = test_frame.iloc[::-1].head(1_001)
    some.to_parquet(tmp_path / "rows.parquet")
    out = tmp_path / "scores.parquet"
    assert predict_file(artifact, tmp_path / "rows.parquet", out, batch_size=64) == 1_001
    scores = pd.read_parquet(out)
    assert list(scores.columns) == ["row_id", "click"]
    assert scores["row_id"].tolist() == some["row_id"].tolist()
    # A batch of another size sums in another order.
    np.testing.assert_allclose(scores["click"], probabilities(artifact, some), rtol=1e-5)


def test_predict_takes_a_batch_larger_than_the_data_and_rows_without_ids_or_labels(
    artifact: Path, test_frame: pd.DataFrame, tmp_path: Path
) -> None:
    some = test_frame.head(5).drop(columns=["row_id", "label", "request_id"])
    assert predict_file(artifact, some, tmp_path / "s.parquet", batch_size=4_096) == 5
    scores = pd.read_parquet(tmp_path / "s.parquet")
    assert scores["row_id"].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(scores["click"], probabilities(artifact, some), rtol=1e-6)


@pytest.mark.parametrize(
    ("ids", "expected"), [(["7", "10", "9"], [7, 10, 9]), (["07", "x", "9"], ["07", "x", "9"])]
)
def test_predict_reads_csv_with_lists_as_the_card_says(
    artifact: Path,
    test_frame: pd.DataFrame,
    tmp_path: Path,
    ids: list[str],
    expected: list[object],
) -> None:
    some = test_frame.head(3)
    text = some.assign(row_id=ids, R1=["|".join(map(str, ids)) for ids in some["R1"]])
    text.to_csv(tmp_path / "rows.csv", index=False, float_format="%.9g")
    predict_file(artifact, tmp_path / "rows.csv", tmp_path / "s.parquet")
    scores = pd.read_parquet(tmp_path / "s.parquet")
    assert scores["row_id"].tolist() == expected
    np.testing.assert_allclose(scores["click"], probabilities(artifact, some), rtol=1e-6)


def test_predict_streams(
    artifact: Path,
    test_frame: pd.DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predict, "BATCH_ROWS", 100)
    told: list[str] = []
    predict_file(
        artifact, test_frame.head(250), tmp_path / "s.parquet", batch_size=30, progress=told.append
    )
    file = pq.ParquetFile(tmp_path / "s.parquet")
    groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert groups == [100, 100, 50]
    assert told == ["100 rows", "200 rows", "250 rows"]


def test_predict_leaves_an_earlier_file_alone_when_it_cannot_finish(
    artifact: Path,
    test_frame: pd.DataFrame,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "s.parquet"
    out.write_text("earlier")
    with pytest.raises(OutputExistsError):
        predict_file(artifact, test_frame.head(9), out)
    with pytest.raises(DataError, match="holds no rows"):
        predict_file(artifact, test_frame.head(0), out, overwrite=True)
    monkeypatch.setattr(predict, "BATCH_ROWS", 100)  # the bad row comes after a part was written
    late = test_frame.head(150).assign(C1=[*[1] * 149, 200])
    with pytest.raises(DataError, match=r"'C1', row 149: must hold ids in \[0, 200\); got 200"):
        predict_file(artifact, late, out, overwrite=True, batch_size=50)
    with pytest.raises(UsageError, match="batch_size: must be 1 to 65536; got 65537"):
        predict_file(artifact, test_frame, out, overwrite=True, batch_size=65_537)
    assert [path.name for path in tmp_path.iterdir()] == ["s.parquet"]
    assert out.read_text() == "earlier"
