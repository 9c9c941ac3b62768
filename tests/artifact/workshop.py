"""Artifacts that several tests share: each is compiled once in a test run, and never changed.

A test that damages an artifact works on a copy (`copy_of`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from passes.zoo import MODELS, apply_passes, make_bundle, seeded
from rankopt.artifact.build import write_artifact
from rankopt.artifact.constants import map_constants, write_constants
from rankopt.artifact.manifest import CONSTANTS, MANIFEST, read_manifest
from rankopt.bundle import ModelBundle
from rankopt.hashes import sha256_file
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass
from rankopt.passes.drop_dead_positions import DropDeadPositions
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_attention import FuseAttention
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.precision import Precision
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.recipe import parse_pass
from rankopt.runtime import LoadedArtifact, load_artifact
from rankopt.tables import TableDtype


@dataclass(frozen=True)
class Built:
    """A compiled model and all that it was made from."""

    card: ModelCard
    model: nn.Module
    bundle: ModelBundle
    notes: tuple[str, ...]
    folder: Path


ZOO_DTYPES: dict[str, TableDtype] = {
    "user": "int8",
    "history": "int2",
    "tags": "int4",
    "cats": "int8",
    "item": "int4",
    "context.0": "fp16",
    "context.1": "int8",
}


def _rules(chosen: Mapping[str, object]) -> list[dict[str, Any]]:
    return [{"select": name, "use": use} for name, use in chosen.items()]


def _step(kind: str, **settings: Any) -> Pass:
    step, problems = parse_pass(kind, settings, where="workshop", prefix=kind)
    assert step is not None, problems
    return step


def _only(backend: str, *layers: str, **settings: Any) -> Pass:
    rules = [*_rules(dict.fromkeys(layers, True)), {"select": "*", "use": False}]
    return _step("quantize_dense", backend=backend, min_inputs=1, rules=rules, **settings)


def _steps(name: str) -> tuple[str, tuple[Pass, ...]]:
    mixed = _step("quantize_embeddings", dtype="fp16", rules=_rules(ZOO_DTYPES))
    everything = {"min_inputs": 1}
    known: dict[str, tuple[str, tuple[Pass, ...]]] = {
        "zoo-plain": ("zoo", ()),
        "zoo-fused": ("zoo", (FuseEmbeddings(),)),
        "zoo-fused-mixed": ("zoo", (FuseEmbeddings(), mixed)),
        "zoo-mixed": ("zoo", (mixed,)),
        "bags-int8": ("bags", (FuseEmbeddings(), QuantizeEmbeddings(dtype="int8"))),
        "din-packed": ("din", (FuseAttention(),)),
        "hstu-packed": ("hstu", (FuseAttention(),)),
        "hstu-last": ("hstu", (DropDeadPositions(),)),
        "din-native": ("din", (QuantizeDense(backend="native", **everything),)),
        "din-fbgemm": ("din", (QuantizeDense(backend="fbgemm", **everything),)),
        "dlrm-native": (
            "dlrm",
            (QuantizeEmbeddings(), QuantizeDense(backend="native", **everything)),
        ),
        "dlrm-fbgemm": ("dlrm", (QuantizeDense(backend="fbgemm", **everything),)),
        "dlrm-fp16": ("dlrm", (QuantizeDense(backend="fp16", **everything),)),
        "dlrm-torchao": (
            "dlrm",
            (
                _only("torchao", "bottom.2", torchao="int8_dynamic"),
                _only("torchao", "top.0", torchao="int8_weight_only"),
                _only("torchao", "top.2", torchao="int4_weight_only"),
            ),
        ),
        "dlrm-16bit": (
            "dlrm",
            (
                Precision(
                    dtype="bf16",
                    rules=[{"select": "bottom.*", "use": True}, {"select": "*", "use": False}],
                ),
                Precision(dtype="fp16", rules=[{"select": "top.4", "use": False}]),
            ),
        ),
    }
    return known[name]


@cache
def bundle_of(model_name: str) -> tuple[ModelCard, nn.Module, ModelBundle]:
    """Export one of the zoo's models, once."""
    make_card, make_model = MODELS[model_name]
    card, model = make_card(), seeded(make_model)
    return card, model, make_bundle(card, model)


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="rankopt-artifacts-")


@cache
def built(name: str) -> Built:
    """Compile an artifact of `_steps`, once."""
    model_name, steps = _steps(name)
    card, model, bundle = bundle_of(model_name)
    applied = apply_passes(bundle, *steps)
    exported = apply_passes(applied.bundle, ExportAoti()).bundle
    folder = Path(_root().name) / name
    write_artifact(exported, folder, control_size_bytes=bundle.size_bytes)
    return Built(card, model, applied.bundle, tuple(applied.notes), folder)


@cache
def loaded(name: str) -> LoadedArtifact:
    """Load an artifact, once; tests that close one load their own."""
    return load_artifact(built(name).folder)


def scores_of(name: str, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in loaded(name)(features).items()}


def copy_of(name: str, folder: Path) -> Path:
    """Copy an artifact to damage it."""
    return Path(shutil.copytree(built(name).folder, folder / name))


def edit_manifest(folder: Path, **changes: Any) -> None:
    """Write other values into a manifest."""
    file = folder / MANIFEST
    manifest = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(manifest | changes), encoding="utf-8")


def alter_weights(folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Write other weights, and hashes that vouch for them."""
    manifest = read_manifest(folder)
    mapped = map_constants(manifest.constants, folder / CONSTANTS)
    values = {name: change(name, value.clone()) for name, value in mapped.items()}
    del mapped
    entries = write_constants(values, folder / "new.bin")
    (folder / "new.bin").replace(folder / CONSTANTS)
    edit_manifest(
        folder,
        constants=[entry.model_dump(mode="json") for entry in entries],
        files={**manifest.files, CONSTANTS: sha256_file(folder / CONSTANTS)},
    )
