"""Where a model's code branches on data: the line, and how it went.

A condition is what `any()` returned for a whole tensor and Python then asked for a truth value.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from rankopt.capture.author import is_authors

_ANY = {torch.any, Tensor.any}
_TRUTH: set[Any] = {Tensor.__bool__, Tensor.item}


@dataclass(frozen=True)
class Place:
    """A line of the model's code.

    Attributes:
        file: its path.
        line: counted from 1.
        text: the line, for a message.
    """

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"`{self.text}` ({Path(self.file).name}:{self.line})"


def calling_line() -> Place:
    """Find the line of the author's code that called torch."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_authors(frame.f_code.co_filename):
        frame = frame.f_back
    file, line = frame.f_code.co_filename, frame.f_lineno
    return Place(file, line, linecache.getline(file, line).strip().rstrip(":"))


class Conditions:
    """Recognises conditions among the torch functions of one run."""

    def __init__(self) -> None:
        self._found: Any = WeakIdKeyDictionary()

    def note(self, func: Any, result: Any) -> None:
        """Remember a result that is a condition."""
        if func in _ANY and isinstance(result, Tensor) and result.dim() == 0:
            self._found[result] = True

    def asks(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Tell whether a call asks a condition for its truth value."""
        return func in _TRUTH and args[0] in self._found


class Watching(TorchFunctionMode):
    """Runs a model as it is and notes how its branches went.

    Attributes:
        branches: for each condition, the values it had.
    """

    def __init__(self) -> None:
        super().__init__()
        self.branches: dict[Place, list[bool]] = {}
        self._conditions = Conditions()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._conditions.asks(func, args):
            self.branches.setdefault(calling_line(), []).append(bool(result))
        self._conditions.note(func, result)
        return result
