"""The second form of a model's inputs: request-level ones once, and a map to the candidates.

Shapes: R requests, B candidates, L ids of all rows of a ragged input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from rankopt.artifact.contract import InputContract, contract_of, random_features
from rankopt.capture.export import MAX_BATCH, max_ids_per_row
from rankopt.data.rows import Rows, bag_counts
from rankopt.errors import ExportError
from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput

REQUEST_INDEX = "request_index"
"""The input that names each candidate's request: int64 [B], values in [0, R)."""

TRACE_REQUESTS = 5
TRACE_CANDIDATES = 11


def request_level(card: ModelCard) -> tuple[str, ...]:
    """Name the inputs that all candidates of a request share."""
    return tuple(item.name for item in card.inputs if item.request_level)


def split_features(
    features: Mapping[str, Tensor], card: ModelCard, first_rows: Tensor, request_index: Tensor
) -> dict[str, Tensor]:
    """Turn features of B rows into those of the second form.

    Args:
        features: the card's flat tensors, request-level ones repeated for each candidate.
        card: says which are request-level.
        first_rows: int64 [R], a row of each request.
        request_index: int64 [B].
    """
    names = _tensors(card)
    inner = {name: features[name] for name in names}
    counts = bag_counts(card)
    shared = {name: counts[name] for name in request_level(card) if name in counts}
    num_rows = len(request_index)
    picked = Rows(inner, {}, None, num_rows, shared).take(first_rows).features
    return {name: picked.get(name, features[name]).contiguous() for name in card.tensor_names} | {
        REQUEST_INDEX: request_index.contiguous()
    }


def one_request_a_row(features: Mapping[str, Tensor], card: ModelCard) -> dict[str, Tensor]:
    """Turn features of B rows into those of the second form, each row a request of its own."""
    entry = next(e for e in contract_of(card) if e.role not in ("values", "weights"))
    rows = torch.arange(len(features[entry.name]) // entry.groups)
    return split_features(features, card, rows, rows)


def _tensors(card: ModelCard) -> list[str]:
    return [name for item in card.inputs if item.request_level for name in item.tensor_names]


def random_requests(
    contract: Sequence[InputContract],
    sizes: Sequence[int],
    generator: torch.Generator,
    *,
    fill: float = 0.5,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Make up requests, in both forms.

    Args:
        contract: of the plain form.
        sizes: how many candidates each request has; they come one request after the other.
        generator: decides everything.
        fill: mean length of lists as a share of the longest.

    Returns:
        The features with a row for every candidate, and those of the second form.
    """
    shared = [entry for entry in contract if entry.request_level]
    own = [entry for entry in contract if not entry.request_level]
    index = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(list(sizes)))
    requests = random_features(shared, len(sizes), generator, fill=fill)
    candidates = random_features(own, len(index), generator, fill=fill)
    bags = {
        entry.name.removesuffix(".lengths"): entry.groups
        for entry in shared
        if entry.role == "lengths"
    }
    spread = Rows(requests, {}, None, len(sizes), bags).take(index).features
    order = [entry.name for entry in contract]
    plain = {name: {**spread, **candidates}[name] for name in order}
    hoisted = {name: {**requests, **candidates}[name] for name in order}
    return plain, {**hoisted, REQUEST_INDEX: index}


def trace_requests(card: ModelCard) -> dict[str, Tensor]:
    """Make up requests to trace on, no dim of size 0 or 1 and no two of the same size."""
    contract = contract_of(card)
    sizes = [TRACE_CANDIDATES // TRACE_REQUESTS] * TRACE_REQUESTS
    sizes[0] += TRACE_CANDIDATES - sum(sizes)
    best: dict[str, Tensor] | None = None
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        _, features = random_requests(contract, sizes, generator, fill=0.8)
        lengths = [len(features[entry.name]) for entry in contract if entry.role == "values"]
        if min(lengths, default=2) < 2:
            continue
        best = best or features
        if len({*lengths, TRACE_REQUESTS, TRACE_CANDIDATES}) == len(lengths) + 2:
            return features
    if best is None:
        raise ExportError(f"{card.where}: no requests to trace on could be made up.")
    return best


def export_requests(module: nn.Module, card: ModelCard) -> ExportedProgram:
    """Trace the second form of a graph, R, B and every L dynamic.

    Raises:
        ExportError: torch.export refused it.
    """
    example = trace_requests(card)
    names = (*card.tensor_names, REQUEST_INDEX)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    try:
        with torch.no_grad():
            return torch.export.export(
                module,
                tuple(example[name] for name in names),
                dynamic_shapes=request_shapes(card),
                strict=False,
            )
    except Exception as error:  # torch.export raises many unrelated types
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise ExportError(
            f"{card.where}: the form with {REQUEST_INDEX} cannot be traced: "
            + "\n  ".join(lines[:6])
        ) from error


def request_shapes(card: ModelCard) -> tuple[dict[int, Any], ...]:
    """Name the dynamic dims of the second form's inputs."""
    candidates, requests = Dim("B", min=1, max=MAX_BATCH), Dim("R", min=1, max=MAX_BATCH)
    shapes: list[dict[int, Any]] = []
    for item in card.inputs:
        rows = requests if item.request_level else candidates
        if isinstance(item, KjtInput | RaggedIdsInput):
            ids = Dim(f"L_{item.name}", min=0, max=max_ids_per_row(item) * MAX_BATCH)
            groups = len(item.features) if isinstance(item, KjtInput) else 1
            shapes += [{0: ids}, {0: groups * rows if groups > 1 else rows}]
            if len(item.tensor_names) == 3:
                shapes.append({0: ids})
        else:
            shapes.append({0: rows})
    return (*shapes, {0: candidates})
