"""Call a module as its card says, in plain PyTorch, and explain a call that fails."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from rankopt.capture.author import author_line
from rankopt.capture.columns import Column, made_up_rows
from rankopt.errors import CardError, Problem, nearest
from rankopt.models.build import check_forward_signature, forward_arguments
from rankopt.models.card import DenseInput, IdsInput, ModelCard, RaggedIdsInput
from rankopt.models.inputs import IdType
from rankopt.models.serving import ServingModule, call_arguments

NUM_ROWS = 4
_DTYPE = re.compile(
    r"dtype|scalar ?type|data type|tensors? of type|must be long|can't be cast|"
    r"not implemented for '",
    re.IGNORECASE,
)
_OUT_OF_RANGE = re.compile(
    r"index out of range|out of bounds|out-of-bounds|Class values must be", re.IGNORECASE
)
_DTYPES: tuple[IdType, ...] = get_args(IdType)
_CALLS = ("keywords", "positional", "dict", "list")


class _Returned(nn.Module):
    """Stands in for a module that has been called already."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.result


class ModuleCall:
    """A module and the card that says how to call it.

    Args:
        card: describes the call.
        module: in eval mode; it is called and never copied.
    """

    def __init__(self, card: ModelCard, module: nn.Module) -> None:
        self.card = card
        self.module = module

    def raw(self, features: Mapping[str, Tensor]) -> Any:
        """Return what the module's own `forward` returns."""
        tensors = [features[name] for name in self.card.tensor_names]
        positional, keywords = call_arguments(self.card, tensors)
        with torch.no_grad():
            return self.module(*positional, **keywords)

    def raw_with_history(self, features: Mapping[str, Tensor]) -> Any:
        """Do the same with autograd's record of how each tensor was made."""
        tensors = [features[name] for name in self.card.tensor_names]
        positional, keywords = call_arguments(self.card, tensors)
        with torch.enable_grad():
            return self.module(*positional, **keywords)

    def pick(self, result: Any, index: int, features: Mapping[str, Tensor]) -> Tensor:
        """Find output number `index` of the card in what the module returned.

        Raises:
            CardError: it is not there, or is not one score per row.
        """
        output = self.card.outputs[index]
        alone = self.card.model_copy(update={"outputs": (output,)})
        tensors = [features[name] for name in self.card.tensor_names]
        try:
            (score,) = ServingModule(alone, _Returned(result))(*tensors)
        except CardError as error:
            named, numbered = f"outputs[{output.name}]", f"outputs[{index}]"
            problems = [
                Problem(p.where.replace(named, numbered), p.what, p.got, p.hint)
                for p in error.problems
            ]
            raise CardError(problems=problems) from error
        picked: Tensor = score
        return picked


def is_out_of_range(error: Exception) -> bool:
    """Tell whether an error says that an id does not fit a table."""
    return isinstance(error, IndexError | RuntimeError) and bool(_OUT_OF_RANGE.search(str(error)))


def largest_fit(
    call: ModuleCall, rows: Mapping[str, Tensor], column: Column, too_large: int
) -> int:
    """Find the largest id of a column that the module takes.

    Args:
        call: the module.
        rows: with which it runs.
        column: what is varied.
        too_large: an id that the module refused.
    """
    fits = 0
    while too_large - fits > 1:
        middle = (fits + too_large) // 2
        try:
            call.raw(column.fill(rows, middle))
            fits = middle
        except Exception:  # the same refusal as at the largest id
            too_large = middle
    return fits


def table_named(error: Exception, module: nn.Module) -> str | None:
    """Name the innermost submodule that an error came from, with its rows when it has them."""
    names = {id(child): name for name, child in module.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            rows = getattr(owner, "num_embeddings", None)
            found = names[id(owner)] + (f", {rows} rows" if isinstance(rows, int) else "")
        trace = trace.tb_next
    return found


def explain_failure(
    call: ModuleCall, features: Mapping[str, Tensor], error: Exception
) -> list[Problem]:
    """Say what in the card makes a call fail, as near as trying can tell.

    Args:
        call: what failed.
        features: what it was given.
        error: what it raised.
    """
    if isinstance(error, CardError):
        return list(error.problems)
    if _DTYPE.search(str(error)):
        problems = _wrong_dtypes(call, error)
        if problems:
            return problems
    way = _other_way(call)
    # Names that do not match are often a mapping passed as keywords; else they say more.
    if isinstance(error, TypeError) and way not in ("dict", "list"):
        problems = check_forward_signature(call.card, call.module)
        if problems:
            return problems
    if way is not None:
        what = f"must be {way}, with which the module runs"
        hint = f"With {call.card.call!r} {_said(error)}."
        return [Problem(f"{call.card.where}: call", what, call.card.call, hint)]
    return _missing_key(call, error) or [_plain(call, features, error)]


def _plain(call: ModuleCall, features: Mapping[str, Tensor], error: Exception) -> Problem:
    line = author_line(error)
    given = ", ".join(
        f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        for name, tensor in features.items()
    )
    hint = f"Raised at {line}. " if line else ""
    return Problem(
        f"{call.card.where}: inputs", _said(error), hint=f"{hint}The card's inputs gave: {given}."
    )


def _said(error: Exception) -> str:
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"the module raised {type(error).__name__}: {first.rstrip('.')}"


def _runs(card: ModelCard, module: nn.Module) -> bool:
    try:
        ModuleCall(card, module).raw(made_up_rows(card, NUM_ROWS, 1))
    except Exception:  # any failure means that this is not the way
        return False
    return True


def _other_way(call: ModuleCall) -> str | None:
    """Find another way to call the module with which it runs."""
    for way in _CALLS:
        if way != call.card.call and _runs(call.card.model_copy(update={"call": way}), call.module):
            return way
    return None


def _missing_key(call: ModuleCall, error: Exception) -> list[Problem]:
    key = error.args[0] if isinstance(error, KeyError) and error.args else None
    passed = [path for item in call.card.inputs for path in forward_arguments(item)]
    if not isinstance(key, str) or key in passed:
        return []
    what = f"nothing passes {key!r}, which the module reads"
    hint = f"{nearest(key, passed)} Read at {author_line(error)}."
    return [Problem(f"{call.card.where}: inputs", what, hint=hint)]


def _wrong_dtypes(call: ModuleCall, error: Exception) -> list[Problem]:
    """Find a smallest change of the inputs' dtypes with which the module runs."""
    for changes in _dtype_changes(call.card):
        if not _runs(_with_dtypes(call.card, changes), call.module):
            continue
        needed = dict(changes)
        for index in changes:
            fewer = {key: value for key, value in needed.items() if key != index}
            if fewer and _runs(_with_dtypes(call.card, fewer), call.module):
                needed = fewer
        return [_dtype_problem(call.card, index, dtype, error) for index, dtype in needed.items()]
    return []


def _dtype_changes(card: ModelCard) -> Iterator[dict[int, IdType]]:
    """Yield changes worth trying: one input alone, then all of them to one dtype."""
    choices: dict[int, list[IdType]] = {}
    for index, item in enumerate(card.inputs):
        if isinstance(item, IdsInput | RaggedIdsInput):
            choices[index] = [dtype for dtype in _DTYPES if dtype != item.dtype]
        elif isinstance(item, DenseInput):
            choices[index] = ["int64", "int32"]
    for index, dtypes in choices.items():
        for dtype in dtypes:
            yield {index: dtype}
    for dtype in _DTYPES:
        yield {index: dtype for index, dtypes in choices.items() if dtype in dtypes}


def _with_dtypes(card: ModelCard, changes: Mapping[int, IdType]) -> ModelCard:
    inputs = list(card.inputs)
    for index, dtype in changes.items():
        item = inputs[index]
        if isinstance(item, DenseInput):
            inputs[index] = IdsInput(
                kind="ids",
                name=item.name,
                argument=item.argument,
                columns=item.columns,
                num_ids=1,
                dtype=dtype,
                keep_width=True,
            )
        else:
            inputs[index] = item.model_copy(update={"dtype": dtype})
    return card.model_copy(update={"inputs": tuple(inputs)})


def _dtype_problem(card: ModelCard, index: int, dtype: IdType, error: Exception) -> Problem:
    item = card.inputs[index]
    where = f"{card.where}: inputs[{index}]"
    line = author_line(error)
    hint = f"As it is, {_said(error)}" + (f", at {line}." if line else ".")
    if isinstance(item, IdsInput | RaggedIdsInput):
        what = f"must be {dtype}, with which the module runs ({item.name!r})"
        return Problem(f"{where}.dtype", what, item.dtype, hint)
    what = f"must be ids of dtype {dtype}, with which the module runs ({item.name!r})"
    return Problem(f"{where}.kind", what, item.kind, hint)
