"""Learn what a submodule takes and gives by running the model on batches of several sizes.

Every size that comes out is a constant, follows from a size that goes in, or depends on data.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from rankopt.artifact.contract import contract_of, random_features
from rankopt.capture.parts import Call, Extent, Size, SizeSlot, Slot, TensorForm, Unknown
from rankopt.models.card import ModelCard

MOST_CALLS = 8
"""A part that is called more often in one forward costs more than what is exported gains."""
RUNS = ((7, 0.8), (5, 0.5), (11, 0.2), (3, 1.0), (2, 0.05), (13, 0.5), (7, 0.1))
"""Rows and fill of the lists (see `random_features`) of the batches that shapes are learned from:
sizes that no two dims share, one of them twice with other rows."""
_FEWEST_RUNS = 4
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


class PartRefused(Exception):  # noqa: N818  (an answer, not an error)
    """A module cannot be a part; says why."""


@dataclass(frozen=True)
class _Seen:
    """The form of a tensor in one call."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class _Observed:
    """One call in one run; tensors as `_Seen`."""

    arguments: list[Any]
    tree: TreeSpec
    results: list[Any] = field(default_factory=list)
    result_tree: TreeSpec | None = None


def learn_calls(root: nn.Module, module: nn.Module, card: ModelCard) -> tuple[Call, ...]:
    """Run a model on made-up batches and say what each call of a submodule takes and gives.

    Raises:
        PartRefused: its calls follow no pattern that an operator's arguments can say.
    """
    runs = []
    said = "it is never called"
    for inputs in made_up_inputs(card):
        try:
            runs.append(_record(root, module, inputs))
        except PartRefused:
            raise
        except Exception as error:  # the model's own code
            said = f"the model raised {type(error).__name__}: {error}"
    runs = [run for run in runs if run]
    if len(runs) < _FEWEST_RUNS:
        raise PartRefused(said)
    if len({len(run) for run in runs}) > 1:
        raise PartRefused("how often it is called depends on data")
    if len(runs[0]) > MOST_CALLS:
        raise PartRefused(f"it is called {len(runs[0])} times for one batch")
    return tuple(_combine(list(calls)) for calls in zip(*runs, strict=True))


def made_up_inputs(card: ModelCard) -> Iterator[list[Tensor]]:
    """Make the batches up that shapes are learned from, in the card's order of tensors."""
    contract = contract_of(card)
    for seed, (num_rows, fill) in enumerate(RUNS):
        generator = torch.Generator().manual_seed(seed)
        features = random_features(contract, num_rows, generator, fill=fill)
        yield [features[name] for name in card.tensor_names]


def _record(root: nn.Module, module: nn.Module, inputs: list[Tensor]) -> list[_Observed]:
    """Run the model once and note every call of the module."""
    calls: list[_Observed] = []
    versions: list[list[tuple[Tensor, int]]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        leaves, tree = tree_flatten((args, kwargs))
        versions.append([(each, each._version) for each in leaves if isinstance(each, Tensor)])
        calls.append(_Observed([_see(leaf) for leaf in leaves], tree))

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        del args, kwargs
        leaves, calls[-1].result_tree = tree_flatten(result)
        calls[-1].results = [_see(leaf) for leaf in leaves]
        if any(tensor._version != version for tensor, version in versions[-1]):
            raise PartRefused("it changes its inputs in place")

    hooks = [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
    try:
        with torch.no_grad():
            root(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _see(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.layout != torch.strided or leaf.is_nested:
            raise PartRefused(f"it takes or gives a {leaf.layout} tensor")
        return _Seen(leaf.dtype, tuple(leaf.shape))
    if not isinstance(leaf, _CONSTANTS):
        raise PartRefused(f"it takes or gives a {type(leaf).__name__}")
    return leaf


def _combine(calls: Sequence[_Observed]) -> Call:
    """Find what the same call has in common over all runs."""
    first = calls[0]
    if any(each.tree != first.tree or each.result_tree != first.result_tree for each in calls):
        raise PartRefused("the structure of what it takes or gives depends on data")
    if first.result_tree is None:
        raise PartRefused("it calls itself")
    arguments: list[Any] = []
    known: list[tuple[Size, list[int]]] = []
    num_tensors = num_sizes = 0
    for values in zip(*(each.arguments for each in calls), strict=True):
        if isinstance(values[0], _Seen):
            arguments.append(Slot(num_tensors))
            rows = zip(*_shapes(values), strict=True)
            known += [(Size(num_tensors, dim), list(row)) for dim, row in enumerate(rows)]
            num_tensors += 1
        elif len(set(map(repr, values))) == 1:
            arguments.append(values[0])
        elif all(type(value) is int for value in values):
            arguments.append(SizeSlot(num_sizes))
            known.append((Size(-1, num_sizes), list(values)))
            num_sizes += 1
        else:
            raise PartRefused(f"a {type(values[0]).__name__} that it takes depends on data")
    outputs, results = _results(calls, known)
    return Call(tuple(arguments), first.tree, outputs, results, first.result_tree)


def _results(
    calls: Sequence[_Observed], known: Sequence[tuple[Size, list[int]]]
) -> tuple[tuple[TensorForm, ...], tuple[Any, ...]]:
    outputs: list[TensorForm] = []
    results: list[Any] = []
    unknown: dict[tuple[int, ...], Unknown] = {}
    for values in zip(*(each.results for each in calls), strict=True):
        if isinstance(values[0], _Seen):
            results.append(Slot(len(outputs)))
            extents: list[Extent] = []
            for row in zip(*_shapes(values), strict=True):
                fitted = fit(row, known)
                if fitted is None:
                    fitted = unknown.setdefault(row, Unknown(len(unknown)))
                extents.append(fitted)
            dtype = str(values[0].dtype).removeprefix("torch.")
            outputs.append(TensorForm(dtype, tuple(extents)))
        elif len(set(map(repr, values))) == 1:
            results.append(values[0])
        else:
            size = fit(values, known) if all(type(each) is int for each in values) else None
            if size is None:
                raise PartRefused(f"a {type(values[0]).__name__} that it gives depends on data")
            results.append(size)
    if not outputs:
        raise PartRefused("it gives no tensor")
    return tuple(outputs), tuple(results)


def _shapes(values: Sequence[Any]) -> list[tuple[int, ...]]:
    """Return a tensor's shape in every run, its kind being always the same."""
    kinds = {(each.dtype, len(each.shape)) if isinstance(each, _Seen) else None for each in values}
    if len(kinds) > 1:
        raise PartRefused("the type or the number of dims of a tensor depends on data")
    return [each.shape for each in values]


def fit(values: Sequence[int], known: Sequence[tuple[Size, Sequence[int]]]) -> Extent | None:
    """Express a size, as it was in every run, by sizes that the arguments have.

    Returns:
        A constant, a multiple or fraction of a known size, such a multiple plus a constant, or
        None: it depends on data.
    """
    if len(set(values)) == 1:
        return values[0]
    for size, row in known:
        if list(row) == list(values):
            return size
    for size, row in known:
        if min(row) > 0 and all(
            v * row[0] == values[0] * r for v, r in zip(values, row, strict=True)
        ):
            common = math.gcd(values[0], row[0])
            return Size(size.source, size.dim, values[0] // common, row[0] // common)
    for size, row in known:
        other = next((i for i, r in enumerate(row) if r != row[0]), None)
        if other is None:
            continue
        times, rest = divmod(values[other] - values[0], row[other] - row[0])
        plus = values[0] - times * row[0]
        fits = all(v == times * r + plus for v, r in zip(values, row, strict=True))
        if not rest and times and fits:
            return Size(size.source, size.dim, times, 1, plus)
    return None
