"""Trace a module into an exported graph, with the card's dims dynamic.

Shapes: B batch (candidates), L ids of all rows of a ragged input.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rankopt.artifact.contract import contract_of, random_features
from rankopt.errors import ExportError
from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput
from rankopt.models.serving import ServingModule

TRACE_ROWS = 7
_MOST_TRIES = 20
MAX_BATCH = 1 << 16
"""Largest batch an artifact takes; the bound stands in its contract."""


def export_module(module: nn.Module, card: ModelCard) -> ExportedProgram:
    """Trace a module with the card's dims dynamic.

    Raises:
        ExportError: torch.export refused it.
    """
    try:
        return trace(module, card)
    except Exception as error:  # torch.export raises many unrelated types for user code
        raise ExportError(
            f"{card.where}: torch.export refused the model: {_first_lines(error)}\n"
            "Usual causes: a shape that depends on data (.item(), boolean indexing), a Python "
            "branch on a tensor, or a fixed batch size inside forward."
        ) from error


def trace(module: nn.Module, card: ModelCard) -> ExportedProgram:
    """Trace a module with the card's dims dynamic; raises whatever torch.export does."""
    example = trace_example(card)
    inputs = tuple(example[name] for name in card.tensor_names)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    with torch.no_grad():
        return torch.export.export(
            module, inputs, dynamic_shapes=dynamic_shapes(card, module), strict=False
        )


def trace_example(card: ModelCard) -> dict[str, Tensor]:
    """Make up rows to trace on, with no dim of size 0 or 1 and no two of the same size.

    torch.export freezes a dim whose example is 0 or 1 (pytorch issue 133653), and real rows often
    have empty histories.
    """
    contract = contract_of(card)
    for seed in itertools.count():
        generator = torch.Generator().manual_seed(seed)
        features = random_features(contract, TRACE_ROWS, generator, fill=0.8)
        sizes = [len(features[entry.name]) for entry in contract if entry.role == "values"]
        distinct = len({*sizes, TRACE_ROWS}) == len(sizes) + 1
        # Sizes repeat only where lists are so short that they must.
        if min(sizes, default=2) >= 2 and (distinct or seed > _MOST_TRIES):
            return features
    raise ExportError(f"{card.where}: no rows to trace on could be made up.")


def dynamic_shapes(card: ModelCard, module: nn.Module | None = None) -> Any:
    """Name the dynamic dims of every flat input: B rows, and one L per ragged input."""
    batch = Dim("B", min=card.min_batch, max=MAX_BATCH)
    shapes: list[dict[int, Any]] = []
    for item in card.inputs:
        if isinstance(item, KjtInput | RaggedIdsInput):
            longest = max_ids_per_row(item) * MAX_BATCH
            ids = Dim(f"L_{item.name}", min=0, max=longest)
            groups = len(item.features) if isinstance(item, KjtInput) else 1
            lengths = groups * batch if groups > 1 else batch
            shapes += [{0: ids}, {0: lengths}]
            if len(item.tensor_names) == 3:
                shapes.append({0: ids})
        else:
            shapes.append({0: batch})
    # ServingModule takes its tensors as varargs, which torch.export names as one group; a graph
    # that was unlifted once has one parameter per tensor.
    return (tuple(shapes),) if isinstance(module, ServingModule) else tuple(shapes)


def max_ids_per_row(item: KjtInput | RaggedIdsInput) -> int:
    """Longest list a row may bring into one ragged input, all its features together."""
    if isinstance(item, KjtInput):
        return sum(feature.max_length for feature in item.features)
    return item.max_length


def _first_lines(error: Exception, limit: int = 6) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(lines[:limit])
