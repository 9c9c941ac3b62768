from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from bench import fake_arms
from rankopt.bench.arms import ArmSpec
from rankopt.bench.plan import BenchPlan
from rankopt.models.card import ModelCard
from rankopt.units import NS_PER_MS

fake_arms.register()


@dataclass(frozen=True)
class PlainRows:
    features: dict[str, torch.Tensor]
    num_rows: int


@pytest.fixture
def rows():
    dense = torch.randn(100, 4, generator=torch.Generator().manual_seed(7))
    return PlainRows({"dense": dense}, 100)


@pytest.fixture(scope="session")
def card():
    return ModelCard.model_validate(
        {
            "name": "plain",
            "factory": "nowhere:Net",
            "inputs": [{"name": "dense", "kind": "dense", "columns": ["a", "b", "c", "d"]}],
            "outputs": [{"name": "score", "activation": "logit", "label": "label"}],
        }
    )


@pytest.fixture
def plan():
    """A plan small enough for tests: a block is a few milliseconds."""
    return BenchPlan(**QUICK)


QUICK = {
    "batch_sizes": (2,),
    "num_threads": 1,
    "min_blocks": 8,
    "max_blocks": 8,
    "calls_per_block": 5,
    "block_duration_ns": 4 * NS_PER_MS,
    "max_block_duration_ns": 20 * NS_PER_MS,
    "min_num_samples": 1,
    "warm_up_calls": 3,
    "warm_up_duration_ns": 0,
    "lead_in_duration_ns": 0,
    "idle_cpu_limit": 0.5,  # a block of milliseconds sees every hiccup of an idle interpreter
    "quality_batch_size": 16,
}


@pytest.fixture
def arm():
    def make(label="control", kind="busy", **options):
        return ArmSpec(label=label, kind=f"fake-{kind}", options=options)

    return make
