"""Artifacts for a GPU: built, loaded, replayed, and equal to the bundle on the CPU."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from artifact.workshop import bundle_of
from passes.zoo import apply_passes, features_of, largest_error
from rankopt.artifact.build import write_artifact
from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_attention import FuseAttention
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.fuse_interaction import FuseInteraction
from rankopt.passes.precision import Precision
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.runtime import load_artifact

pytestmark = pytest.mark.gpu
MODELS = ("dlrm", "din", "hstu")
FLOAT: tuple[Pass, ...] = (FuseAttention(), FuseEmbeddings(), FuseInteraction())
SMALL: tuple[Pass, ...] = (
    *(FuseAttention(), FuseEmbeddings(), QuantizeEmbeddings(dtype="int8")),
    *(FuseInteraction(), Precision(dtype="bf16")),
)


@cache
def built(name: str, steps: tuple[Pass, ...], root: Path) -> tuple[ModelCard, ModelBundle, Path]:
    card, _, bundle = bundle_of(name)
    applied = apply_passes(bundle, *steps).bundle
    exported = apply_passes(applied, ExportAoti(target="aoti-cuda")).bundle
    folder = root / f"{name}-{len(steps)}"
    write_artifact(exported, folder, control_size_bytes=bundle.size_bytes)
    return card, applied, folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("steps", [FLOAT, SMALL], ids=["fp32", "int8-bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_the_bundle_on_a_cpu(
    name: str, steps: tuple[Pass, ...], root: Path
) -> None:
    card, bundle, folder = built(name, steps, root)
    artifact = load_artifact(folder)
    for batch in (1, 2, 7, 513):
        features = features_of(card, batch)
        error = largest_error(artifact(features), bundle.run(features))
        assert error <= (1e-4 if steps is FLOAT else 5e-2), f"batch {batch}"
    verification = verify_artifact(folder)
    assert verification.problems == ()


@pytest.mark.parametrize("name", MODELS)
def test_replayed_graph_scores_the_same_bits_for_other_rows_too(name: str, root: Path) -> None:
    card, _, folder = built(name, FLOAT, root)
    artifact = load_artifact(folder)
    program = artifact._loader
    features = features_of(card, 7)
    plain = artifact(features)
    assert program.num_graphs == 0
    for _ in range(4):
        again = artifact(features)
        assert all(torch.equal(again[key], plain[key]) for key in plain)
    assert program.num_graphs == 1
    changed = {
        key: value * 0.5 if value.is_floating_point() else value for key, value in features.items()
    }
    fresh = load_artifact(folder)(changed)
    replayed = artifact(changed)
    assert all(torch.equal(replayed[key], fresh[key]) for key in fresh)
    assert all(torch.equal(artifact(features)[key], plain[key]) for key in plain)


def test_large_batches_are_not_captured(root: Path) -> None:
    card, _, folder = built("dlrm", FLOAT, root)
    artifact = load_artifact(folder)
    for _ in range(5):
        artifact(features_of(card, 513))
    assert artifact._loader.num_graphs == 0


def test_manifest_records_card_and_precision(root: Path) -> None:
    _, _, folder = built("dlrm", FLOAT, root)
    target = load_artifact(folder).manifest.target
    major, minor = torch.cuda.get_device_capability()
    assert (target.device, target.capability) == ("cuda", f"{major}.{minor}")
    assert target.tf32 is False
    assert target.gpus
