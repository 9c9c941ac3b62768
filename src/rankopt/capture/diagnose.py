"""Say why torch.export refused a model: which module, which line of its code, and what helps.

The exception's traceback runs through the model's own frames, whose `self` is one of its modules.
Where a dim was frozen, torch raises after the trace and names no line, so the model is traced once
more while the first guard on that dim is watched for.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    PendingUnbackedSymbolNotFound,
    ShapeEnv,
)

from rankopt.capture.author import is_authors
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule

Cause = Literal[
    "data-dependent branch",
    "data-dependent shape",
    "specialised dim",
    "tensor read into Python",
    "unsupported operator",
    "mutation",
    "other",
]

ADVICE: dict[Cause, tuple[str, str]] = {
    "data-dependent branch": (
        "a branch may depend on the model's configuration, not on the rows",
        "Compute both sides and choose with torch.where, or multiply by a mask; drop a check for "
        "empty input where the code behind it gives the right answer anyway.",
    ),
    "data-dependent shape": (
        "every shape must follow from the number of rows and the length of the lists",
        "Keep all rows and zero what the mask leaves out (torch.where, masked_fill) instead of "
        "selecting with it; pad to a fixed length.",
    ),
    "specialised dim": (
        "the code must run for any number of rows and any length of lists",
        "Take the size from the tensor (`x.shape[0]`, -1 in view) where it is wanted; no int() or "
        "len() of it, no tensor made for a fixed batch size, no loop over rows.",
    ),
    "tensor read into Python": (
        "values of tensors must stay in tensors",
        "Replace .item(), int(), float() and .tolist() by tensor operations; a constant belongs "
        "into the configuration or a buffer read in __init__.",
    ),
    "unsupported operator": (
        "forward may call torch operators that know their output's shape without running",
        "Replace numpy or Python code by torch operators, or give the operator a fake "
        "implementation (torch.library.register_fake).",
    ),
    "mutation": (
        "forward must leave its inputs and the module's attributes as they are",
        "Work on a clone of the input; do not keep tensors on `self` in forward.",
    ),
    "other": (
        "forward must run on tensors without values",
        "Run the model alone on two rows first; then look at the named line.",
    ),
}
"""Cause -> what is allowed, and what usually helps."""

LONGEST_SEARCH_S = 5.0
"""How long further lines are looked for."""
_LARGEST_SAID = 240
_ALIASES = {"model": ""}


@dataclass(frozen=True)
class Place:
    """A line of code, and the modules that were running.

    Attributes:
        file: its path.
        line: counted from 1.
        source: the line as it is written.
        chain: names of the modules whose `forward` led there, the outermost first.
    """

    file: str
    line: int
    source: str
    chain: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: `{self.source}`"


@dataclass(frozen=True)
class Diagnosis:
    """Why a model, or a part of it, cannot be exported.

    Attributes:
        card: the card's name for messages.
        module: path such as `interest_extractor`; empty for the model itself.
        class_name: of that module.
        file, line, source: the line of the model's code; None where none is known.
        cause: one of `Cause`.
        said: what torch said, in one line.
        advice: what usually helps.
        chain: names of the modules on the traceback within the traced one, the outermost first.
        others: further lines that would be refused once this one is mended.
    """

    card: str
    module: str
    class_name: str
    cause: Cause
    said: str
    file: str | None = None
    line: int | None = None
    source: str | None = None
    chain: tuple[str, ...] = ()
    others: tuple[Place, ...] = ()

    @property
    def advice(self) -> str:
        return ADVICE[self.cause][1]

    @property
    def where(self) -> str:
        """The module, its class and the line, in one phrase."""
        name = f"`{self.module}` ({self.class_name})" if self.module else self.class_name
        return f"{name}, {self.file}:{self.line}" if self.file else name

    @property
    def why(self) -> str:
        """The cause and the line that shows it, in one phrase."""
        return f"{self.cause}: `{self.source}`" if self.source else f"{self.cause}: {self.said}"

    def __str__(self) -> str:
        lines = [
            f"{self.card}: torch.export refused the model.",
            f"  where: {self.where}",
            f"  what: {self.why}",
            f"  got: {self.said}",
            f"  allowed: {ADVICE[self.cause][0]}",
            f"  next: {self.advice}",
        ]
        lines += [f"  also: {place}" for place in self.others]
        return "\n".join(lines)


def explain(
    error: BaseException, module: nn.Module, card: ModelCard, *, others: bool = True
) -> Diagnosis:
    """Find the line of the model's code that torch.export stumbled over.

    Args:
        error: what it raised.
        module: the traced module, as a rule a `ServingModule`.
        card: the model's card.
        others: look for the lines that would be refused after this one.
    """
    errors = [error, *_behind(error)]
    constraint = next((e for e in errors if isinstance(e, ConstraintViolationError)), None)
    place = None
    if constraint is None:
        place = next(filter(None, (_place_of(e.__traceback__, module) for e in errors)), None)
    else:
        place = _frozen_at(module, card)
    chain = place.chain if place else ()
    path = chain[-1] if chain else ""
    owner = module.get_submodule(path)
    if isinstance(owner, ServingModule):
        owner = owner.model
    source = place.source if place else None
    diagnosis = Diagnosis(
        card=card.where,
        module=shown(path),
        class_name=type(owner).__name__,
        cause=_cause(errors, source or ""),
        said=_said(constraint or error, card),
        file=place.file if place else None,
        line=place.line if place else None,
        source=source,
        chain=chain,
    )
    return replace(diagnosis, others=_others(module, card, diagnosis)) if others else diagnosis


def shown(path: str) -> str:
    """Write a module's name without ServingModule's prefix."""
    return _ALIASES.get(path, path.removeprefix("model."))


def _behind(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    current: BaseException | None = error
    while current is not None:
        current = current.__cause__ or current.__context__
        if current is None or id(current) in seen:
            return
        seen.add(id(current))
        yield current


def _cause(errors: Sequence[BaseException], source: str) -> Cause:
    names = {kind.__name__ for error in errors for kind in type(error).__mro__}
    text = str(errors[0])
    if any(isinstance(error, ConstraintViolationError) for error in errors):
        return "specialised dim"
    if any(
        isinstance(e, GuardOnDataDependentSymNode | PendingUnbackedSymbolNotFound) for e in errors
    ) or names & {"DataDependentOutputException", "DynamicOutputShapeException"}:
        return _data_cause(names, text, source)
    if "was assigned during export" in text or re.search(r"\bmutat|in-place|inplace", text):
        return "mutation"
    if names & {"UnsupportedOperatorException", "UnsupportedFakeTensorException"} or re.search(
        r"numpy|tensor subclass|data_ptr|storage|fake (kernel|impl|class)|[Ff]ake[Tt]ensor|"
        r"only produce tensors|Unsupported",
        text,
    ):
        return "unsupported operator"
    if re.search(r"\b[uz]u?f?\d+\b", text) or "data-dependent" in text:
        return "data-dependent shape"  # a symbol of torch for a size that depends on data
    if re.search(r"\bs\d+\b", text):
        return "specialised dim"  # one for the size of an input
    return "other"


def _data_cause(names: set[str], text: str, source: str) -> Cause:
    if re.match(r"(el)?if\b|while\b|assert\b|return .* if\b|.*\sif\b.*\selse\b", source):
        return "data-dependent branch"
    if re.search(r"\.item\(|\.tolist\(|\b(int|float|bool|range|max|min|list)\(", source):
        return "tensor read into Python"
    if "DynamicOutputShapeException" in names or re.search(r"Size-like symbols: (?!none)", text):
        return "data-dependent shape"
    if "DataDependentOutputException" in names:
        return "tensor read into Python"
    return (
        "data-dependent branch"
        if re.search(r"\b(any|all|and|or|not)\b", source)
        else ("data-dependent shape")
    )


def _said(error: BaseException, card: ModelCard) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, ConstraintViolationError):
        lines = [line.removeprefix("- ") for line in lines if line.startswith("-")] or lines
        frozen = re.match(
            r"You marked (\w+) as dynamic but .* to be a constant \((\d+)\)", lines[0]
        )
        if frozen:
            dim = _dim_in_words(frozen[1], card)
            return f"{dim} was frozen at {frozen[2]}, the size of the traced rows"
        narrowed = re.match(
            r"Not all values of (\w+) = .* satisfy the generated guard (.*)", lines[0]
        )
        if narrowed:
            guard = re.sub(r"L\['[^=<>]*\.size\(\)\[\d\]", narrowed[1], narrowed[2])
            return f"{_dim_in_words(narrowed[1], card)} was limited to {guard}"
    first = lines[0] if lines else type(error).__name__
    if not isinstance(error, RuntimeError):
        first = f"{type(error).__name__}: {first}"
    return first if len(first) <= _LARGEST_SAID else first[:_LARGEST_SAID] + " ..."


def _dim_in_words(name: str, card: ModelCard) -> str:
    if name.startswith("L_"):
        return f"the number of ids in input {name[2:]} (dim 0 of {name[2:]}.values)"
    return f"the number of rows {name} (dim 0 of {', '.join(card.tensor_names)})"


# Frames.


def _place_of(traceback: TracebackType | None, module: nn.Module) -> Place | None:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return _innermost(frames, module)


def _innermost(frames: Iterable[tuple[FrameType, int]], module: nn.Module) -> Place | None:
    """Return the last line of the model's own code; frames come the outermost first."""
    # By their attributes: of a module that lies in two places torch.export traces stand-ins, which
    # share these.
    names = {id(vars(child)): name for name, child in module.named_modules()}
    chain: list[str] = []
    found: Place | None = None
    for frame, line in frames:
        owner = frame.f_locals.get((frame.f_code.co_varnames or ("",))[0])
        name = names.get(id(vars(owner))) if isinstance(owner, nn.Module) else None
        if name is not None and frame.f_code.co_name == "forward" and name not in chain[-1:]:
            chain.append(name)
        if chain and is_authors(frame.f_code.co_filename):
            file = frame.f_code.co_filename
            source = linecache.getline(file, line).strip()
            found = Place(file, line, source, tuple(chain))
    return found


# Looking again.


def _trace(module: nn.Module, card: ModelCard) -> Any:
    from rankopt.capture.export import trace  # which imports this file

    return trace(module, card)


def _frozen_at(module: nn.Module, card: ModelCard) -> Place | None:
    """Trace again and return the line that froze or narrowed a dim."""
    frozen: list[Place] = []
    narrowed: list[Place] = []
    joined: list[Place] = []

    def watch(env: ShapeEnv, evaluate: Callable[[], Any]) -> Any:
        guards, replaced = len(env.guards), set(env.replacements)
        answer = evaluate()
        new = [value for key, value in env.replacements.items() if key not in replaced]
        place = _running(module) if new or len(env.guards) > guards else None
        if place is None:
            return answer
        if any(value.is_number for value in new):
            frozen.append(place)
        elif len(env.guards) > guards and _narrows(env.guards[-1].expr):
            narrowed.append(place)
        elif new:  # two dims were found equal, which most often they are
            joined.append(place)
        return answer

    with quiet_torch(), _watching("_evaluate_expr", watch), contextlib.suppress(Exception):
        _trace(module, card)
    return next(iter(frozen + narrowed + joined), None)


@contextlib.contextmanager
def _watching(method: str, watch: Callable[[ShapeEnv, Callable[[], Any]], Any]) -> Iterator[None]:
    """Pass every question that a trace asks about a size through a function."""
    cls: Any = ShapeEnv
    original = getattr(cls, method)

    def evaluate(env: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        return watch(env, lambda: original(env, *args, **kwargs))

    setattr(cls, method, evaluate)
    try:
        yield
    finally:
        setattr(cls, method, original)


def _running(module: nn.Module) -> Place | None:
    """Return the line of the model that is running now."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame, frame.f_lineno))
        frame = frame.f_back
    return _innermost(reversed(frames), module)


def _narrows(guard: Any) -> bool:
    """Tell whether a guard rules out some of the sizes a dim may have."""
    named = [int(number) for number in guard.atoms() if number.is_Integer]
    sizes = {1, 2, 3, 1 << 16, *named, *(number + 1 for number in named)} - {0}
    return any(guard.subs(dict.fromkeys(guard.free_symbols, size)) == False for size in sizes)  # noqa: E712  (sympy's)


def _others(module: nn.Module, card: ModelCard, first: Diagnosis) -> tuple[Place, ...]:
    """List further lines that would be refused; empty where torch cannot go past the first."""
    deadline = time.monotonic() + LONGEST_SEARCH_S

    def watch(_: ShapeEnv, evaluate: Callable[[], Any]) -> Any:
        if time.monotonic() > deadline:  # a loop that ends by its data is traced for ever
            raise TimeoutError
        return evaluate()

    try:
        from torch.export._draft_export import draft_export

        from rankopt.capture.export import dynamic_shapes, trace_example

        example = trace_example(card)
        inputs = tuple(example[name] for name in card.tensor_names)
        shapes = dynamic_shapes(card, module)
        # Not where a guard is asked for: draft_export tells failures apart by the frames there.
        watching = _watching("create_unbacked_symint", watch)
        with torch.no_grad(), quiet_torch(), watching, _traces_deleted():
            program: Any = draft_export(module, inputs, dynamic_shapes=shapes, strict=False)
        return _failures(program._report, first)
    except Exception:  # a function private to torch: without it one line is named, not all
        return ()


def _failures(report: Any, first: Diagnosis) -> tuple[Place, ...]:
    from torch._logging.structured import INTERN_TABLE

    # Of files seen by an earlier trace in this process the report holds the numbers alone.
    files = {number: name for name, number in INTERN_TABLE.items()}
    places: dict[tuple[str, int], Place] = {}
    for failure in report.failures:
        for entry in reversed(failure.data.get("user_stack", failure.data.get("stack", []))):
            file = entry["filename"] if isinstance(entry, dict) else None
            file = files.get(file, "") if isinstance(file, int) else file
            if not file or not is_authors(file):
                continue
            line = int(entry["line"])
            if (file, line) != (first.file, first.line):
                source = linecache.getline(file, line).strip()
                places.setdefault((file, line), Place(file, line, source))
            break
    return tuple(places.values())


@contextlib.contextmanager
def _traces_deleted() -> Iterator[None]:
    """Have draft_export's log, which it leaves behind, lie where it is deleted."""
    name = "TORCH_DTRACE"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            del os.environ[name]
            if before is not None:
                os.environ[name] = before


@contextlib.contextmanager
def quiet_torch() -> Iterator[None]:
    """Keep what torch logs and prints about a trace that may fail off the terminal.

    Its handlers are silenced rather than its loggers: `draft_export` reads what is logged.
    """
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict)]
    loggers = [each for each in loggers if each.name.split(".")[0] == "torch"]
    handlers = {
        handler
        for logger in [logging.root, *loggers]
        if logger.name != "torch.__trace"
        for handler in logger.handlers
    }
    levels = {handler: handler.level for handler in handlers}
    try:
        for handler in handlers:
            handler.setLevel(logging.CRITICAL + 1)
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        for handler, level in levels.items():
            handler.setLevel(level)
