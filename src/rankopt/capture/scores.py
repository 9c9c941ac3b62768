"""Find the scores in what a module returned, and tell a probability from a logit.

Shapes: B rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

_SIGMOID = ("Sigmoid", "Softmax")
_WITHIN_RANGE = (
    *("View", "UnsafeView", "Squeeze", "Unsqueeze", "Transpose", "T", "Permute", "Expand"),
    *("Select", "Slice", "Split", "UnsafeSplit", "SplitWithSizes", "Unbind", "Index"),
    *("Cat", "Stack", "Clone", "Clamp", "ToCopy", "Alias", "AsStrided", "Mul"),
)
"""Operators that keep scores within [0, 1] when all that goes in lies there."""
_MOST_STEPS = 64


def ends_with_sigmoid(score: Tensor) -> bool | None:
    """Tell whether a score comes out of a sigmoid, as it is or multiplied with others that do.

    Args:
        score: made while autograd was on.

    Returns:
        None when autograd holds no record: the parameters are frozen, or forward turns it off.
    """
    if score.grad_fn is None:
        return None
    return _bounded(score.grad_fn, _MOST_STEPS)


def _bounded(node: Any, steps: int) -> bool:
    name = type(node).__name__.partition("Backward")[0]
    if name in _SIGMOID:
        return True
    inputs = [parent for parent, _ in node.next_functions]
    # None stands for what autograd does not follow: a constant factor could be anything.
    if name not in _WITHIN_RANGE or not inputs or None in inputs or not steps:
        return False
    return all(_bounded(parent, steps - 1) for parent in inputs)


def tasks_of(result: Any, num_rows: int) -> list[int | str]:
    """List the `index` of every score per row in what a module returned.

    Empty when the result is one score and needs no index.
    """
    if isinstance(result, Tensor):
        return list(range(result.shape[1])) if result.dim() == 2 and result.shape[1] > 1 else []
    items: Sequence[tuple[int | str, Any]] = []
    if isinstance(result, Mapping):
        items = [(key, value) for key, value in result.items() if isinstance(key, str)]
    elif isinstance(result, Sequence):
        items = list(enumerate(result))
    return [
        key
        for key, value in items
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.shape in {(num_rows,), (num_rows, 1)}
    ]
