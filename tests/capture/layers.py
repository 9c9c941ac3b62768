"""A model of a few constants, captured, and what shows how its graph was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from passes.zoo import SIZES, card, exact, features_of, largest_error, make_bundle
from rankopt.bundle import ModelBundle
from rankopt.passes.graph import Linear, find_linears

WIDTH = 12
FP32 = 1e-5
"""fp32 sums of a dozen terms in another order than PyTorch's."""


class Layers(nn.Module):
    """Some constants, and what a score is made of."""

    def __init__(self, score: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.score = score
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, dense: Tensor) -> Tensor:
        return self.score(self, dense).flatten(1).sum(1)


def dense_card() -> Any:
    columns = [f"c{index}" for index in range(WIDTH)]
    return card("layers", {"kind": "dense", "name": "dense", "columns": columns})


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.4


def canonical(model: nn.Module, model_card: Any = None) -> tuple[ModelBundle, tuple[str, ...]]:
    """Export and rewrite; the model's own weights must stay as they were."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bundle = make_bundle(model_card or dense_card(), model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    return bundle, bundle.capture


def check(model: nn.Module, bundle: ModelBundle, allowed: float = FP32) -> None:
    for batch, _ in SIZES:
        features = features_of(bundle.card, batch)
        error = largest_error(bundle.run(features), exact(bundle.card, model, features))
        assert error < allowed, f"batch {batch}: {error}"


def layers(bundle: ModelBundle) -> dict[str, Linear]:
    found = find_linears(bundle.program.module(check_guards=False))
    return {linear.layer: linear for linear in found}


def operators(bundle: ModelBundle) -> Counter[str]:
    nodes = bundle.program.graph.nodes
    names = (str(n.target).removeprefix("aten.") for n in nodes if n.op == "call_function")
    return Counter(name.partition(".")[0] for name in names)
