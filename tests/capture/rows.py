"""Trace a small module as the engine does, and compare the graph with the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rankopt.capture.branches import Capture, trace_capturing
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule

NUM_STEPS = 6
NUM_IDS = 30
DIM = 5

CARD = ModelCard.model_validate(
    {
        "name": "filters",
        "factory": "here.py:net",
        "inputs": [
            {"name": "price", "kind": "dense", "columns": ["a", "b", "c", "d", "e"]},
            {
                "name": "history",
                "kind": "ragged_ids",
                "column": "history",
                "num_ids": NUM_IDS,
                "max_length": NUM_STEPS,
                "layout": "padded",
            },
        ],
        "outputs": [{"name": "score", "label": "label"}],
    }
)
"""`forward(price [B, 5], history [B, 6])`: a list is padded at the end with id 0."""


class Net(nn.Module):
    """What the models of these tests share: embedded lists, their lengths and a few layers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.table = nn.Embedding(NUM_IDS, DIM)
        self.layer = nn.Linear(DIM, DIM)
        self.gru = nn.GRU(DIM, DIM, batch_first=True)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5
        self.eval()

    def forward(self, price: Tensor, history: Tensor) -> Tensor:
        lengths = (history != 0).sum(1)
        return self.score(price, self.table(history), lengths)

    def score(self, price: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
        """Return [B] from price [B, 5], steps [B, 6, 5] and lengths [B]."""
        raise AssertionError("each test brings its own")


def trace(module: nn.Module, *example: Tensor) -> tuple[ExportedProgram, Capture]:
    """Export with the rows as the only dynamic size."""
    batch = Dim("B", min=1, max=1 << 16)
    shapes: Any = tuple({0: batch} for _ in example)

    def export() -> ExportedProgram:
        return torch.export.export(module, example, dynamic_shapes=shapes, strict=False)

    with torch.no_grad():
        return trace_capturing(module, export)


def trace_serving(net: nn.Module) -> tuple[ExportedProgram, ServingModule, Capture]:
    """Export behind the card's calling convention, as the engine does."""
    from rankopt.capture.export import trace as trace_card

    serving = ServingModule(CARD, net)
    program, capture = trace_capturing(serving, lambda: trace_card(serving, CARD))
    return program, serving, capture


def some_rows(num_rows: int, *, longest: int = NUM_STEPS, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draw price and history; lists have 0 to `longest` ids, about a third of them none."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(-longest // 2, longest + 1, (num_rows,), generator=generator)
    history = torch.randint(1, NUM_IDS, (num_rows, NUM_STEPS), generator=generator)
    history[torch.arange(NUM_STEPS) >= lengths[:, None]] = 0
    return torch.randn(num_rows, DIM, generator=generator), history


def assert_same_scores(program: ExportedProgram, net: nn.Module) -> None:
    """Compare on one row, two, seven and many, with no list empty, all of them and some."""
    graph = program.module(check_guards=False)
    with torch.no_grad():
        for num_rows in (1, 2, 7, 40):
            for longest in (0, 1, NUM_STEPS):
                inputs = some_rows(num_rows, longest=longest, seed=num_rows)
                torch.testing.assert_close(graph(*inputs), net(*inputs))
