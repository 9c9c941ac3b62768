"""Build a card's module: find its factory, call it, load its weights.

Everything a card can get wrong about code is told as a `CardError`; nothing of the factory's own
failures reaches the reader as a traceback.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rankopt.errors import CardError, CheckpointError, Problem, nearest
from rankopt.models.card import Input, ModelCard, RaggedIdsInput
from rankopt.models.checkpoint import read_checkpoint
from rankopt.models.match import match_state_dict


@dataclass(frozen=True)
class BuiltModel:
    """A module with its trained weights.

    Attributes:
        module: in eval mode, on the CPU.
        checkpoint: what was loaded; None for random weights.
        notes: what was done to the checkpoint to make it fit, one line each.
    """

    module: nn.Module
    checkpoint: Path | None
    notes: tuple[str, ...] = ()


def build_module(
    card: ModelCard, checkpoint: str | Path | None = None, *, allow_random: bool = False
) -> nn.Module:
    """Build the card's module in eval mode; `build_model` tells also what was loaded, and how.

    Raises:
        CardError: see `make_module`; or no checkpoint is named and random weights are not allowed.
        CheckpointError: the checkpoint cannot be read or does not fit.
    """
    return build_model(card, checkpoint, allow_random=allow_random).module


def build_model(
    card: ModelCard, checkpoint: str | Path | None = None, *, allow_random: bool = False
) -> BuiltModel:
    """Build the card's module and load its weights, every key matched.

    Args:
        card: names the factory and its config.
        checkpoint: where the weights are; the card's own when None.
        allow_random: build with the factory's initial weights when neither names a checkpoint.

    Raises:
        CardError: see `make_module`; or no checkpoint is named and random weights are not allowed.
        CheckpointError: the checkpoint cannot be read or does not fit.
    """
    if not allow_random:
        require_checkpoint(card, checkpoint)
    path = checkpoint_path(card, checkpoint)
    module = make_module(card)
    if path is None:
        return BuiltModel(module.eval(), None)
    stored = read_checkpoint(path)
    matched = match_state_dict(module, stored.state, str(path))
    try:
        # Strict is off for `_extra_state` alone: every tensor was matched above.
        module.load_state_dict(matched.state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(problems=[Problem(str(path), f"does not load: {error}")]) from error
    return BuiltModel(module.eval(), path, stored.notes + matched.notes)


def require_checkpoint(card: ModelCard, checkpoint: str | Path | None) -> None:
    """Refuse to go on where neither names the weights.

    Raises:
        CardError: no checkpoint.
    """
    if checkpoint_path(card, checkpoint) is None:
        problem = Problem(
            f"{card.where}: checkpoint",
            "is required, since nothing else names the weights",
            hint="Name it in the card or with --checkpoint; `rankopt train` makes one.",
        )
        raise CardError(problems=[problem])


def checkpoint_path(card: ModelCard, checkpoint: str | Path | None = None) -> Path | None:
    """Return the given checkpoint, else the card's own, read from the card's folder."""
    if checkpoint is not None:
        return Path(checkpoint)
    return card.folder / card.checkpoint if card.checkpoint else None


def make_module(card: ModelCard) -> nn.Module:
    """Call the card's factory; the weights are whatever it initialises.

    Raises:
        CardError: the factory is not there, takes other keywords, raises, or returns no module.
    """
    factory = resolve_factory(card)
    _check_config(card, factory)
    try:
        module = factory(**card.config)
    except Exception as error:
        problem = Problem(
            f"{card.where}: config",
            f"the factory raised {type(error).__name__}: {error}",
            hint=f"Raised {_origin(error)}.",
        )
        raise CardError(problems=[problem]) from error
    if not isinstance(module, nn.Module):
        problem = Problem(
            f"{card.where}: factory", "must return a torch.nn.Module", type(module).__name__
        )
        raise CardError(problems=[problem])
    return module


def resolve_factory(card: ModelCard) -> Callable[..., Any]:
    """Find the function or class that the card names.

    Raises:
        CardError: no such file, package or function; or it cannot be imported or called.
    """
    target, _, name = card.factory.rpartition(":")
    is_file = target.endswith(".py")
    module = _load_file(card, target) if is_file else _import_package(card, target)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = nearest(part, _callables(found, module.__name__))
            raise _card_error(card, f"{target} has no {part!r}", hint=hint)
        found = getattr(found, part)
    if not callable(found):
        raise _card_error(card, "must name a function or a class", type(found).__name__)
    factory: Callable[..., Any] = found
    return factory


_CONTAINERS = {"dict": "mapping", "list": "list"}


def check_forward_signature(card: ModelCard, module: nn.Module) -> list[Problem]:
    """Compare what the card's inputs pass with what the module's `forward` takes."""
    parameters = inspect.signature(module.forward).parameters.values()
    if card.call == "positional":
        return _check_positional_call(card, module)
    if card.call in ("dict", "list"):
        return _check_single_argument(card, list(parameters))
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    names = [p.name for p in named]
    problems = []
    given: dict[str, str] = {}
    for index, item in enumerate(card.inputs):
        where = f"{card.where}: inputs[{index}] ({item.name})"
        for path in forward_arguments(item):
            argument = path.partition(".")[0]  # the rest leads into a container
            if path in given:
                what = f"passes {path!r}, which {given[path]} passes already"
                problems.append(Problem(where, what, hint="Set `argument` on one of them."))
            elif argument not in names and not takes_any:
                what = f"passes {argument!r}, which forward does not take"
                problems.append(Problem(where, what, hint=nearest(argument, names)))
            given[path] = given[argument] = item.name
    problems += [
        Problem(
            f"{card.where}: inputs",
            f"nothing passes {parameter.name!r}, which forward requires",
            hint="Add an input of that name, or set `argument` on one.",
        )
        for parameter in named
        if parameter.default is parameter.empty and parameter.name not in given
    ]
    return problems


def forward_arguments(item: Input) -> tuple[str, ...]:
    """Name the parameters of `forward` that one input fills."""
    name = item.parameter
    if not isinstance(item, RaggedIdsInput):
        return (name,)
    second = {"values_lengths": (f"{name}_lengths",), "values_offsets": (f"{name}_offsets",)}
    names = (name,) if item.layout == "padded" else (f"{name}_values", *second[item.layout])
    return (*names, f"{name}_weights") if item.weights_column else names


def _check_positional_call(card: ModelCard, module: nn.Module) -> list[Problem]:
    paths = [path for item in card.inputs for path in forward_arguments(item)]
    given = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*given)
    except TypeError as error:
        what = f"pass {len(given)} arguments by position, and forward{signature}: {error}"
        return [Problem(f"{card.where}: inputs", what)]
    return []


def _check_single_argument(card: ModelCard, parameters: list[inspect.Parameter]) -> list[Problem]:
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in {p.VAR_KEYWORD, p.VAR_POSITIONAL}
    ]
    if parameters and len(required) <= 1:
        return []
    return [
        Problem(
            f"{card.where}: call",
            f"{card.call!r} needs a forward that takes one {_CONTAINERS[card.call]}",
            f"forward({', '.join(p.name for p in parameters)})",
            "Use call: keywords.",
        )
    ]


def _check_config(card: ModelCard, factory: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature: the call itself will tell
        return
    named = [p for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    names = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    problems = [
        Problem(
            f"{card.where}: config.{key}",
            "the factory takes no such keyword",
            hint=nearest(key, names),
        )
        for key in card.config
        if key not in names and not takes_any
    ]
    problems += [
        Problem(f"{card.where}: config.{p.name}", "is required by the factory")
        for p in named
        if p.default is p.empty and p.name not in card.config
    ]
    if problems:
        raise CardError(problems=problems)


def _load_file(card: ModelCard, target: str) -> ModuleType:
    file = (card.folder / target).resolve()
    if not file.is_file():
        siblings = [item.name for item in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = f"Looked for {file}. {nearest(file.name, siblings)}"
        raise _card_error(card, f"{target} does not exist", hint=hint)
    digest = hashlib.sha256(str(file).encode() + b"\0" + file.read_bytes()).hexdigest()[:16]
    name = f"rankopt_card_{file.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise _card_error(card, f"{target} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failure(card, target, error) from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _import_package(card: ModelCard, target: str) -> ModuleType:
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name and (target == error.name or target.startswith(f"{error.name}.")):
            hint = "Install the package, or name a file: `file.py:function`."
            raise _card_error(card, f"no module {error.name!r} is installed", hint=hint) from error
        raise _import_failure(card, target, error) from error
    except Exception as error:
        raise _import_failure(card, target, error) from error


def _import_failure(card: ModelCard, target: str, error: Exception) -> CardError:
    what = f"importing {target} raised {type(error).__name__}: {error}"
    return _card_error(card, what, hint=f"Raised {_origin(error)}.")


def _callables(owner: Any, module_name: str) -> Iterable[str]:
    """Prefer what the module itself defines to what it imports."""
    public = [name for name in dir(owner) if not name.startswith("_")]
    names = [name for name in public if callable(getattr(owner, name, None))]
    own = [n for n in names if getattr(getattr(owner, n), "__module__", None) == module_name]
    return own or names


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"at {frames[-1].filename}:{frames[-1].lineno}" if frames else "by the interpreter"


def _card_error(
    card: ModelCard, what: str, got: object | None = None, hint: str | None = None
) -> CardError:
    return CardError(problems=[Problem(f"{card.where}: factory", what, got, hint)])
