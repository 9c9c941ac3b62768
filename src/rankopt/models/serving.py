"""One calling convention for every model: flat tensors in, one score per output.

The module's own `forward` may want keywords, a dict, padded lists or a KeyedJaggedTensor. The
adapter here builds those from flat tensors *inside* the traced region, so that the exported graph,
the artifact and the eager control all take the same inputs.

Shapes: B batch, L ids of all rows together, F features of a KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.errors import CardError, Problem
from rankopt.models.card import KjtInput, ModelCard, Output, RaggedIdsInput


class ServingModule(nn.Module):
    """Wrap a module so that `forward` takes the card's flat tensors in the card's order.

    The wrapped module's parameters keep their own names under `model.`.
    """

    def __init__(self, card: ModelCard, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.card = card

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Score B candidates.

        Returns:
            One float tensor [B] per output of the card, as the module says it (logit or
            probability).
        """
        features = dict(zip(self.card.tensor_names, tensors, strict=True))
        arguments: dict[str, Any] = {}
        for item in self.card.inputs:
            arguments.update(_arguments_of(item, features))
        result = self.model(arguments) if self.card.call == "dict" else self.model(**arguments)
        return tuple(_pick(result, output, self.card) for output in self.card.outputs)


class EagerModel:
    """The card's model in plain PyTorch: a callable from flat features to named scores."""

    def __init__(self, card: ModelCard, model: nn.Module) -> None:
        self._module = ServingModule(card, model).eval()
        self._names = card.tensor_names
        self._outputs = tuple(output.name for output in card.outputs)

    def __call__(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score one batch. Shapes: see `rankopt.models.card`; every output is [B]."""
        with torch.inference_mode():
            scores = self._module(*[features[name] for name in self._names])
        return dict(zip(self._outputs, scores, strict=True))


def _arguments_of(item: Any, features: Mapping[str, Tensor]) -> dict[str, Any]:
    if isinstance(item, KjtInput):
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor  # slow to import, rarely needed

        jagged = KeyedJaggedTensor(
            keys=[feature.key for feature in item.features],
            values=features[f"{item.name}.values"],
            lengths=features[f"{item.name}.lengths"],
            weights=features[f"{item.name}.weights"] if item.weighted else None,
        )
        return {item.parameter: jagged}
    if isinstance(item, RaggedIdsInput):
        return _ragged_arguments(item, features)
    return {item.parameter: features[item.name]}


def _ragged_arguments(item: RaggedIdsInput, features: Mapping[str, Tensor]) -> dict[str, Any]:
    values, lengths = features[f"{item.name}.values"], features[f"{item.name}.lengths"]
    weights = features[f"{item.name}.weights"] if item.weights_column else None
    name = item.parameter
    if item.layout == "padded":
        arguments = {name: pad(values, lengths, item.max_length, item.padding_id)}
        if weights is not None:
            arguments[f"{name}_weights"] = pad(weights, lengths, item.max_length, 0)
        return arguments
    arguments = {f"{name}_values": values}
    if item.layout == "values_lengths":
        arguments[f"{name}_lengths"] = lengths
    else:
        arguments[f"{name}_offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if weights is not None:
        arguments[f"{name}_weights"] = weights
    return arguments


def pad(values: Tensor, lengths: Tensor, max_length: int, fill: float) -> Tensor:
    """Lay ragged rows out as [B, max_length], padded at the end.

    One fill value is appended before the gather, so that a batch whose rows are all empty (L = 0)
    reads that and not past the end.
    """
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(max_length, device=values.device)
    index = torch.where(
        position[None, :] < lengths[:, None], starts[:, None] + position[None, :], values.shape[0]
    )
    return torch.cat([values, values.new_full((1,), fill)])[index]


def _pick(result: Any, output: Output, card: ModelCard) -> Tensor:
    """Find one output in what the module returned, as [B]."""
    picked = result
    if output.index is not None:
        picked = _index(result, output, card)
    elif isinstance(result, Sequence | Mapping):
        raise CardError(
            problems=[
                Problem(
                    f"{card.where}: outputs[{output.name}].index",
                    f"is required, since the module returns a {type(result).__name__}",
                    hint=f"Allowed: {_positions(result)}.",
                )
            ]
        )
    if not isinstance(picked, Tensor):
        raise CardError(
            problems=[
                Problem(
                    f"{card.where}: outputs[{output.name}]",
                    "must be a tensor",
                    type(picked).__name__,
                )
            ]
        )
    if picked.dim() == 2 and picked.shape[1] == 1:
        return picked.squeeze(1)
    if picked.dim() != 1:
        raise CardError(
            problems=[
                Problem(
                    f"{card.where}: outputs[{output.name}]",
                    "must be one score per row, [B] or [B, 1]",
                    list(picked.shape),
                    "Give `index` to pick one column.",
                )
            ]
        )
    return picked


def _index(result: Any, output: Output, card: ModelCard) -> Any:
    try:
        if isinstance(result, Tensor) and isinstance(output.index, int) and result.dim() == 2:
            return result[:, output.index]
        return result[output.index]
    except (KeyError, IndexError, TypeError) as error:
        raise CardError(
            problems=[
                Problem(
                    f"{card.where}: outputs[{output.name}].index",
                    f"must be one of {_positions(result)}",
                    output.index,
                )
            ]
        ) from error


def _positions(result: Any) -> str:
    if isinstance(result, Mapping):
        return ", ".join(map(repr, result))
    if isinstance(result, Tensor):
        return f"0 to {result.shape[-1] - 1} (columns of {list(result.shape)})"
    return f"0 to {len(result) - 1}"
