"""Artifacts that take request-level inputs once, each compiled once in a test run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from artifact.workshop import _root
from conftest import CHECKOUT
from passes.requests_zoo import bundle_for, large_din
from passes.zoo import card, context
from rankopt.artifact.build import write_artifact
from rankopt.artifact.manifest import PASSES
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.export import trace_example
from rankopt.jobs.decisions import write_choices
from rankopt.models.build import build_model
from rankopt.models.card import DataSpec, ModelCard
from rankopt.models.checkpoint import save_checkpoint
from rankopt.passes.base import Pass
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.forms import apply_to_forms
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.hoist_requests import HoistRequests
from rankopt.recipe import Recipe, parse_recipe
from rankopt.review.schema import PassRecord

NUM_IDS = [30, 30, 30, 20, 20]
RECIPE = {
    "name": "both",
    "passes": [
        {"hoist_requests": {"request_size": 20}},
        {"fuse_embeddings": {}},
        {
            "quantize_dense": {
                "backend": "fbgemm",
                "min_inputs": 1,
                "rules": [
                    {"select": "model.top.4", "use": True},
                    {"select": "*", "use": False},
                ],
            }
        },
        {"export_aoti": {}},
    ],
}


@dataclass(frozen=True)
class Both:
    card: ModelCard
    recipe: Recipe
    folder: Path
    checkpoint: Path


def dlrm_card() -> ModelCard:
    inputs = (
        {"kind": "dense", "name": "dense", "columns": ["a", "b"], "request_level": True},
        {"kind": "ids", "name": "user", "columns": ["u", "v", "w"], "num_ids": 30},
        {"kind": "ids", "name": "ad", "columns": ["x", "y"], "num_ids": 20},
    )
    made = card("both", inputs[0], {**inputs[1], "request_level": True}, inputs[2])
    raw = made.model_dump(mode="json") | {
        "data": {"request_key": "request"},
        "factory": f"{CHECKOUT}/benchmarks/hoisting/two_sided.py:make_dlrm",
        "config": {
            "num_ids": NUM_IDS,
            "num_dense": 2,
            "embedding_dim": 8,
            "bottom_mlp": [8],
            "top_mlp": [24, 16],
        },
    }
    return ModelCard.model_validate(raw)


def save_weights(model_card: ModelCard, seed: int, file: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = build_model(model_card, allow_random=True).module
    save_checkpoint({name: 3 * value for name, value in module.state_dict().items()}, file)
    return file


@cache
def both() -> Both:
    root = Path(_root().name)
    model_card, recipe = dlrm_card(), parse_recipe(RECIPE, where="here")
    checkpoint = save_weights(model_card, 3, root / "both.safetensors")
    bundle = build_bundle(
        model_card, build_model(model_card, checkpoint).module, trace_example(model_card)
    )
    records = []
    for step in recipe.passes:
        about = context()
        changed = apply_to_forms(step, bundle, about)
        assert changed is not bundle, about.notes
        bundle = changed
        records.append(PassRecord(kind=step.kind, changed=True, kept=True, reason="as planned"))
    folder = root / "both"
    write_artifact(bundle, folder, control_size_bytes=1)
    write_choices(folder / PASSES, recipe, model_card, records)
    return Both(model_card, recipe, folder, checkpoint)


def in_both_forms(bundle: ModelBundle, steps: Sequence[Pass]) -> ModelBundle:
    """Hoist, and apply passes to both forms."""
    for step in (HoistRequests(), *steps):
        about = context()
        changed = apply_to_forms(step, bundle, about)
        assert changed is not bundle, about.notes
        bundle = changed
    return bundle


@cache
def din() -> tuple[ModelCard, Path]:
    """Compile DIN, whose item table candidates and histories share, both of them with lists."""
    model_card, model = large_din()
    model_card = model_card.model_copy(update={"data": DataSpec(request_key="request")})
    bundle = bundle_for(model_card, model)
    folder = Path(_root().name) / "din-requests"
    both_made = in_both_forms(bundle, [FuseEmbeddings(), ExportAoti()])
    write_artifact(both_made, folder, control_size_bytes=bundle.size_bytes)
    return model_card, folder
