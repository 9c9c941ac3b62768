"""docs/pipeline.py does what it says, on a small model."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import ray

import small

RECIPE = """
name: one-pass
objective: bytes
batch_sizes: [1]
passes: [{quantize_embeddings: {dtype: int8}}, export_aoti]
gates:
  quality: {ne: 0.1%}
  baselines: [{arm: aoti-fp32, batch_size: 1, min_speedup: 0.01}]
"""


def test_it_is_short(checkout: Path) -> None:
    lines = (checkout / "docs" / "pipeline.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


@pytest.mark.slow
def test_a_data_frame_and_a_ray_dataset_are_judged_alike(
    checkout: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = small.model(tmp_path_factory.getbasetemp())
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    # As by hand; only the model, and with it the time, is smaller.
    document = runpy.run_path(str(checkout / "docs" / "pipeline.py"))
    try:
        arguments = (model / "card.yaml", recipe, tmp_path / "out", model / "plan.yaml")
        verdicts = document["main"](*map(str, arguments))
    finally:
        ray.shutdown()
    assert verdicts == {"pandas": "pass", "ray": "pass"}
    reports = [
        json.loads((tmp_path / "out" / kind / "review" / "report.json").read_text())
        for kind in ("pandas", "ray")
    ]
    # Two compilations of the same weights, on the same rows of the same split.
    assert reports[0]["quality"] == reports[1]["quality"]
    assert 0 < reports[0]["quality"]["ne"]["num_rows"] < small.DATA.num_test
    for report in reports:
        assert [row["arm"] for row in report["baselines"]] == ["aoti-fp32"] * 2
        assert report["latency"][0]["speedup"] > 1, "eager PyTorch is the control"
