"""Row filters and branches on data, traced as compilers do predication: every row, then a choice.

A model that works on `x[mask]` and writes `y[mask] = result` scores the same when it works on all
rows and keeps the result where the mask holds, and so exports with the batch as its only dynamic
size. `if mask.any():` then needs no branch: taken always, it changes nothing where no row passes.
That is an assumption about the model, so `rankopt.capture.agreement` runs the traced graph against
the model before it is used.

Shapes: B rows; a mask covers the leading dims of what it filters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from rankopt.capture.author import raised_by_author
from rankopt.capture.conditions import Conditions, Place, calling_line
from rankopt.capture.recurrent import StepCounts, padded_recurrences, with_rows

_READ: Any = Tensor.__getitem__
_WRITE: Any = Tensor.__setitem__
_SELECT = {torch.masked_select, Tensor.masked_select}
_PICK = {torch.index_select, Tensor.index_select}
_WHERE = {torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where}
_SAME_PLACES: set[Any] = {
    torch.squeeze,
    torch.flatten,
    torch.reshape,
    Tensor.squeeze,
    Tensor.flatten,
    Tensor.reshape,
    Tensor.view,
    Tensor.__getitem__,
}


@dataclass
class Capture:
    """What tracing took for granted.

    Attributes:
        branches: how each condition was taken: true, or false where true raises an error.
        filters: row filters that keep every row.
        recurrences: packed lists that were traced padded.
    """

    branches: dict[Place, bool] = field(default_factory=dict)
    filters: set[Place] = field(default_factory=set)
    recurrences: set[Place] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.branches or self.filters or self.recurrences)


T = TypeVar("T")


def trace_capturing(module: nn.Module, export: Callable[[], T]) -> tuple[T, Capture]:
    """Export with filters, branches and packed lists of the module traced.

    The module's own weights keep their names; nothing of it is changed afterwards.

    Args:
        module: what `export` exports.
        export: calls `torch.export.export(module, ...)`, without `strict`.

    Returns:
        What `export` returned, and what was assumed for it: `verify_capture` takes both.

    Raises:
        ExportError: a recurrence that is not captured.
        Exception: whatever torch.export raises for what stays dependent on data.

    Example:
        ```python
        program, capture = trace_capturing(serving, lambda: trace(serving, card))
        notes = verify_capture(program, serving, card, capture)
        ```
    """
    passed_by: dict[Place, bool] = {}
    while True:
        capture = Capture(branches=dict(passed_by))
        try:
            with _capturing(module, capture):
                return export(), capture
        except Exception:
            # `if torch.isnan(x).any(): raise` guards the input; scoring goes past it.
            newly = dict.fromkeys((p for p, way in capture.branches.items() if not way), False)
            if newly == passed_by:
                raise
            passed_by = newly


@contextmanager
def _capturing(module: nn.Module, capture: Capture) -> Iterator[None]:
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Entered here rather than around the export, so that it is asked before export's own modes.
        mode = _Predication(capture)
        try:
            with padded_recurrences(mode.follow), mode:
                return original(*args, **kwargs)
        except Exception as error:
            if mode.latest is not None and raised_by_author(error):
                capture.branches[mode.latest] = False
            raise

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def depends_on_data(program: ExportedProgram) -> bool:
    """Tell whether a size in a graph depends on data, as a row filter leaves it."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    return any(isinstance(value, Tensor) and free_unbacked_symbols(value) for value in values)


class _Predication(TorchFunctionMode):
    """Answers the torch functions that would make a shape or a branch depend on data."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self.latest: Place | None = None  # the branch taken last
        self._capture = capture
        self._conditions = Conditions()
        self._selected: Any = WeakIdKeyDictionary()  # filtered by a mask of several dims: from what
        self._places: Any = WeakIdKeyDictionary()  # row numbers: of which mask
        self._num_rows: Any = None

    def follow(self, counts: StepCounts) -> None:
        """Put B where the counts' stand-in for it turns up."""
        self._capture.recurrences.add(calling_line())
        self._num_rows = counts.num_rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._num_rows is not None:
            args = with_rows(args, self._num_rows)
            kwargs = {name: with_rows(value, self._num_rows) for name, value in kwargs.items()}
        if self._conditions.asks(func, args):
            self.latest = calling_line()
            return self._capture.branches.setdefault(self.latest, True)
        answer = self._answer(func, args, kwargs)
        if answer is not None:
            self._capture.filters.add(calling_line())
            return answer
        result = func(*args, **kwargs)
        self._conditions.note(func, result)
        if func in _SAME_PLACES and args and args[0] in self._places and _as_many(result, args[0]):
            self._places[result] = self._places[args[0]]
        return result

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what stands for a filter's result; None for a call that is no filter."""
        if func is _READ:
            return self._read(*args)
        if func is _WRITE:
            return self._write(*args)
        if func in _SELECT:
            return self._select(*args, **kwargs)
        if func in _PICK:
            return self._pick(*args, **kwargs)
        if func in _WHERE and len(args) == 1:  # not torch.where(mask, new, old)
            return self._number(func, args[0], as_tuple=bool(kwargs.get("as_tuple")))
        return None

    def _number(self, func: Any, mask: Tensor, *, as_tuple: bool) -> Any:
        """Number all rows where the model asks for those that pass."""
        if mask.dim() != 1 or not _is_row_mask(mask):
            return None
        rows = torch.arange(mask.shape[0], device=mask.device)
        answer = rows if as_tuple or func is torch.where else rows[:, None]
        self._places[answer] = mask
        return (answer,) if answer is rows else answer

    def _pick(self, input: Tensor, dim: Any, index: Tensor) -> Tensor | None:
        """Keep the rows that `index_select` would drop, by their numbers."""
        return self._read(input, index) if dim == 0 and index in self._places else None

    def _read(self, tensor: Tensor, index: Any) -> Tensor | None:
        """Keep the rows of `tensor[mask, ...]` that the mask would drop."""
        found = _row_mask(tensor, self._as_mask(index))
        if found is None:
            return None
        mask, rest = found
        every = tensor[(*[slice(None)] * mask.dim(), *rest)]
        # A filter copies, so what is done to the result in place must not reach its source.
        kept = every.flatten(0, mask.dim() - 1).clone()
        if mask.dim() > 1:
            self._selected[kept] = (every, mask)
        return kept

    def _select(self, input: Tensor, mask: Tensor) -> Tensor | None:
        """Keep what `masked_select` would drop, for a mask over the leading dims."""
        leading = list(mask.shape)
        while leading and _is_one(leading[-1]):
            leading.pop()
        rows = mask.view(leading) if leading and mask.dim() == input.dim() else mask
        if mask.dim() != input.dim() or _row_mask(input, rows) is None:
            return None
        return input.reshape(-1).clone()

    def _write(self, tensor: Tensor, index: Any, value: Any) -> bool | None:
        """Write `tensor[mask, ...] = value` as a choice between old and new."""
        found = _row_mask(tensor, self._as_mask(index))
        if found is None:
            return None
        mask, rest = found
        old = tensor[(*[slice(None)] * mask.dim(), *rest)]
        if isinstance(value, Tensor):
            value = self._line_up(value, old, mask)
        condition = mask.view(*mask.shape, *[1] * (old.dim() - mask.dim()))
        old.copy_(torch.where(condition, value, old))
        return True

    def _as_mask(self, index: Any) -> Any:
        """Put the mask where row numbers stand that were taken from it."""
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        if isinstance(first, Tensor) and first.dim() == 1 and first in self._places:
            return (self._places[first], *rest)
        return index

    def _line_up(self, value: Tensor, old: Tensor, mask: Tensor) -> Tensor:
        """Bring what was computed on all rows into the shape of what it is written to."""
        if value.dim() != old.dim() - mask.dim() + 1 or _is_one(value.shape[0]):
            return value  # one value for all rows, or one for each place of a row
        if mask.dim() > 1:
            return value.reshape(*mask.shape, *value.shape[1:])
        source = self._selected.get(value)
        if source is not None:
            # `states[places][..]` with one place per row, such as its last step.
            every, places = source
            chosen = places.view(*places.shape, *[1] * (every.dim() - places.dim()))
            return torch.where(chosen, every, 0).sum(tuple(range(1, places.dim())))
        return value


def _row_mask(tensor: Tensor, index: Any) -> tuple[Tensor, tuple[Any, ...]] | None:
    """Split an index into a mask over the leading dims, batch first, and plain indices."""
    mask, *rest = index if isinstance(index, tuple) and index else (index,)
    if not isinstance(mask, Tensor) or not _is_row_mask(mask) or mask.dim() > tensor.dim():
        return None
    if not all(type(part) in (int, slice) or part is Ellipsis for part in rest):
        return None
    if tuple(mask.shape) != tuple(tensor.shape[: mask.dim()]):
        return None
    return mask, tuple(rest)


def _is_row_mask(mask: Tensor) -> bool:
    """Tell a mask over rows from one of fixed size, which is a choice of the model's own."""
    size: Any = mask.shape[0] if mask.dim() else 1
    return mask.dtype == torch.bool and isinstance(size, torch.SymInt)


def _as_many(result: Any, places: Tensor) -> bool:
    """Tell whether a reshaped tensor of row numbers still has all of them, one by one."""
    if not isinstance(result, Tensor) or not 1 <= result.dim() <= 2:
        return False
    return statically_known_true(result.numel() == places.numel())


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1
