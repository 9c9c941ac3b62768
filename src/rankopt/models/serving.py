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
from rankopt.models.card import Input, KjtInput, ModelCard, Output, RaggedIdsInput
from rankopt.models.id_ranges import features_in_range, maps_ids
from rankopt.models.inputs import PadSide


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
        positional, keywords = call_arguments(self.card, tensors)
        result = self.model(*positional, **keywords)
        return tuple(_pick(result, output, self.card) for output in self.card.outputs)


class EagerModel:
    """The card's model in plain PyTorch: a callable from flat features to named scores."""

    def __init__(self, card: ModelCard, model: nn.Module, device: str = "cpu") -> None:
        self._module = ServingModule(card, model).eval().to(device)
        self._device = device
        self._names = card.tensor_names
        self._outputs = tuple(output.name for output in card.outputs)
        self._card = card if maps_ids(card) else None

    def __call__(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score one batch. Shapes: see `rankopt.models.card`; every output is [B]."""
        if self._card is not None:
            features = features_in_range(self._card, features)
        inputs = [features[name] for name in self._names]
        with torch.inference_mode():
            if self._device == "cpu":
                scores = self._module(*inputs)
            else:
                # Features come from the host and scores go back to it, as an artifact's do.
                scores = self._module(*[given.to(self._device) for given in inputs])
                scores = [score.cpu() for score in scores]
        return dict(zip(self._outputs, scores, strict=True))


def call_arguments(
    card: ModelCard, tensors: Sequence[Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Build what the card's module is called with, from flat tensors in the card's order.

    Returns:
        Positional and keyword arguments.
    """
    features = dict(zip(card.tensor_names, tensors, strict=True))
    tree: dict[str, Any] = {}
    for item in card.inputs:
        for path, value in _arguments_of(item, features).items():
            _place(tree, path, value)
    arguments = {key: _containers(value) for key, value in tree.items()}
    if card.call == "keywords":
        return (), arguments
    if card.call == "positional":
        return tuple(arguments.values()), {}
    if card.call == "list":
        return (list(arguments.values()),), {}
    return (arguments,), {}


def _place(tree: dict[str, Any], path: str, value: Any) -> None:
    *folders, leaf = path.split(".")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[leaf] = value


def _containers(value: Any) -> Any:
    """Turn a mapping whose keys are 0, 1, ... into a list, all the way down."""
    if not isinstance(value, dict):
        return value
    inner = {key: _containers(item) for key, item in value.items()}
    numbered = [str(position) for position in range(len(inner))]
    return [inner[key] for key in numbered] if set(inner) == set(numbered) else inner


def _arguments_of(item: Input, features: Mapping[str, Tensor]) -> dict[str, Any]:
    """Map where an input goes (a dotted path) to what goes there."""
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
        side = item.pad_side
        arguments = {name: pad(values, lengths, item.max_length, item.padding_id, side)}
        if weights is not None:
            arguments[f"{name}_weights"] = pad(weights, lengths, item.max_length, 0, side)
        return arguments
    arguments = {f"{name}_values": values}
    if item.layout == "values_lengths":
        arguments[f"{name}_lengths"] = lengths
    else:
        arguments[f"{name}_offsets"] = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if weights is not None:
        arguments[f"{name}_weights"] = weights
    return arguments


def pad(
    values: Tensor, lengths: Tensor, max_length: int, fill: float, side: PadSide = "end"
) -> Tensor:
    """Lay ragged rows out as [B, max_length], padded at one end.

    One fill value is appended before the gather, so that a batch whose rows are all empty (L = 0)
    reads that and not past the end.
    """
    ends = lengths.cumsum(0)
    position = torch.arange(max_length, device=values.device)[None, :]
    if side == "end":
        source, inside = (ends - lengths)[:, None] + position, position < lengths[:, None]
    else:
        first = max_length - lengths[:, None]
        source, inside = ends[:, None] - max_length + position, position >= first
    index = torch.where(inside, source, values.shape[0])
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
    if isinstance(result, Tensor) and result.dim():
        return f"0 to {result.shape[-1] - 1} (columns of {list(result.shape)})"
    if isinstance(result, Sequence):
        return f"0 to {len(result) - 1}"
    return f"no index: the module returns a {type(result).__name__}, not a tensor, tuple or dict"
