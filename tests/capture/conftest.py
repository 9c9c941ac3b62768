"""The split model, compiled once."""

from __future__ import annotations

import json

import pytest

from capture.split_net import CARD, LAYERS, NET, Made
from rankopt.artifact.build import write_artifact
from rankopt.artifact.manifest import PASSES
from rankopt.bundle import build_bundle
from rankopt.capture.export import trace_example
from rankopt.environment import collect_environment
from rankopt.jobs.decisions import write_choices
from rankopt.models.build import build_module
from rankopt.models.card import load_card
from rankopt.passes.base import PassContext
from rankopt.passes.export_aoti import ExportAoti
from rankopt.recipe import parse_recipe
from rankopt.review.schema import PassRecord


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Compile the model, once."""
    root = tmp_path_factory.mktemp("split")
    (root / "split_test_net.py").write_text(NET)
    (root / "split_test_layers.py").write_text(LAYERS)
    (root / "card.yaml").write_text(json.dumps(CARD))
    card = load_card(root / "card.yaml")
    model = build_module(card, allow_random=True)
    bundle = build_bundle(card, model, trace_example(card))
    context = PassContext(collect_environment(), root)
    folder = root / "artifact"
    write_artifact(ExportAoti().apply(bundle, context), folder, control_size_bytes=1)
    recipe = parse_recipe(
        {"name": "plain", "passes": [{"export_aoti": {}}], "gates": {"quality": {"ne": "0.1%"}}},
        where="recipe",
    )
    record = PassRecord(kind="export_aoti", changed=True, kept=True, reason="as planned")
    write_choices(folder / PASSES, recipe, card, [record])
    return Made(card, model, bundle, folder)
