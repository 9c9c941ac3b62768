"""A batch that somebody saved: how it goes into `forward`, and what it shows.

The file is what `torch.save` made of one batch: a tensor, a KeyedJaggedTensor, a dict of them, or a
tuple of arguments. It is read as data; a file that would run code when read is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.capture.author import author_line
from rankopt.errors import InputError, Problem
from rankopt.jobs.card_look import parameters_of, required_parameters


@dataclass(frozen=True)
class Leaf:
    """One tensor that `forward` takes.

    Attributes:
        path: the parameter, and the keys that lead into it, joined by dots.
        value: the tensor or KeyedJaggedTensor of the batch; None when there is no batch.
    """

    path: str
    value: Any = None

    @property
    def name(self) -> str:
        """The path as a name that a card allows."""
        legal = "".join(letter if letter.isalnum() else "_" for letter in self.path)
        return legal if legal[:1].isalpha() else f"input_{legal}"


@dataclass(frozen=True)
class Form:
    """One way to give a batch to `forward`.

    Attributes:
        call: the card's `call`.
        leaves: what goes in, in order.
        positional: arguments as they are passed.
        keywords: the others.
        left_over: what of the batch is no argument: the label, as data loaders yield it.
    """

    call: str
    leaves: tuple[Leaf, ...]
    positional: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None
    left_over: Any = None


def read_batch(path: Path) -> Any:
    """Read a saved batch without running any code of the file's.

    Raises:
        InputError: nothing is there, it is damaged, or it holds objects of other classes.
    """
    with ExitStack() as stack:
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError:  # then no batch can hold one
            pass
        else:
            stack.enter_context(torch.serialization.safe_globals([KeyedJaggedTensor]))
        try:
            return torch.load(path, map_location="cpu", weights_only=True)
        except OSError as error:
            problem = Problem(str(path), f"cannot be read: {error.strerror or error}")
            raise InputError(problems=[problem]) from error
        except Exception as error:  # damaged bytes make the unpickler raise almost anything
            _, refused, name = str(error).partition("Unsupported global: GLOBAL ")
            what = f"holds a {name.split()[0]}" if refused else f"cannot be read: {_first(error)}"
            hint = "Save a tensor, a KeyedJaggedTensor, or a dict or tuple of them with torch.save."
            raise InputError(problems=[Problem(str(path), what, hint=hint)]) from error


def running_form(module: nn.Module, batch: Any, path: Path) -> Form:
    """Find how a module takes a batch, by trying.

    Raises:
        InputError: it takes it in no way.
    """
    failures = []
    for form in _forms(module, batch):
        try:
            with torch.no_grad():
                module(*form.positional, **(form.keywords or {}))
        except Exception as error:  # the module's own code may raise anything
            line = author_line(error)
            failures.append(
                f"call: {form.call} raised {type(error).__name__}: {_first(error)}"
                + (f" ({line})" if line else "")
            )
            continue
        return form
    what = f"the module, forward{inspect.signature(module.forward)}, does not run on it"
    tried = "; ".join(dict.fromkeys(failures)) or "nothing, since it takes no argument"
    raise InputError(problems=[Problem(str(path), what, _described(batch), f"Tried {tried}.")])


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_described, value)) + ")"
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__


def _forms(module: nn.Module, batch: Any) -> Iterator[Form]:
    names = [parameter.name for parameter in parameters_of(module)]
    required = required_parameters(module)
    if isinstance(batch, Mapping):
        known = {key: value for key, value in batch.items() if key in names}
        if set(required) <= set(known) and known:
            left = {key: value for key, value in batch.items() if key not in names}
            leaves = tuple(leaf for key, value in known.items() for leaf in _leaves(key, value))
            yield Form("keywords", leaves, keywords=known, left_over=left or None)
        yield from _single(names, batch)
    elif isinstance(batch, tuple | list):
        yield from _by_position(names, tuple(batch))
        if isinstance(batch, list):
            yield from _single(names, batch)
        if len(batch) > 1:
            *front, last = batch
            for form in _forms(module, front[0] if len(front) == 1 else tuple(front)):
                yield Form(form.call, form.leaves, form.positional, form.keywords, last)
    else:
        yield from _single(names, batch)


def _single(names: list[str], value: Any) -> Iterator[Form]:
    """Give the batch as one argument."""
    if isinstance(value, Mapping):
        leaves = tuple(leaf for key, item in value.items() for leaf in _leaves(str(key), item))
        yield Form("dict", leaves, (value,))
    elif isinstance(value, tuple | list):
        name = names[0] if names else "input"
        numbered = enumerate(value)
        leaves = tuple(leaf for i, item in numbered for leaf in _leaves(f"{name}_{i}", item))
        yield Form("list", leaves, (value,))
    elif names:
        yield Form("keywords", tuple(_leaves(names[0], value)), (value,))
    else:
        yield Form("positional", tuple(_leaves("input", value)), (value,))


def _by_position(names: list[str], values: tuple[Any, ...]) -> Iterator[Form]:
    if len(values) <= len(names):
        pairs = list(zip(names, values, strict=False))
        if len(pairs) == 1 and isinstance(values[0], Mapping | list | tuple):
            yield from _single(names, values[0])
        call = "keywords"
    else:  # forward(*tensors)
        pairs = [(f"input_{i}", value) for i, value in enumerate(values)]
        call = "positional"
    leaves = tuple(leaf for name, value in pairs for leaf in _leaves(name, value))
    yield Form(call, leaves, values)


def _leaves(path: str, value: Any) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}.{index}", item)
    elif isinstance(value, Tensor) or is_jagged(value):
        yield Leaf(path, value)


def is_jagged(value: Any) -> bool:
    """Tell a KeyedJaggedTensor without importing torchrec."""
    return type(value).__name__ == "KeyedJaggedTensor"


def _first(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0].rstrip(".")
