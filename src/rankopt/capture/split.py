"""Split export: what torch.export refuses stays eager, the rest of the model is exported.

The submodule that holds the refused line is taken out of the model and an operator that runs it as
it is (`rankopt.capture.parts`) put in its place. What shapes come out is learned by running the
model on made-up batches of several sizes. The innermost module is tried first, then the ones around
it; a model that keeps nothing outside the part is refused, since there is nothing left to optimise.

Shapes: B rows.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_flatten, tree_unflatten

from rankopt.capture.diagnose import Diagnosis, explain, quiet_torch, shown
from rankopt.capture.learn import PartRefused, learn_calls, made_up_inputs
from rankopt.capture.parts import EagerPart, Size, SizeSlot, Slot, encode_outputs
from rankopt.errors import ExportError
from rankopt.models.card import ModelCard

MOST_TRACES = 12
"""How often a model is traced, with one part more or a larger one each time."""
_TOLERANCE = 1e-4
_HANDLE = "eager_part"


@dataclass(frozen=True)
class SplitExport:
    """A graph with parts that stay eager.

    Attributes:
        program: calls the parts; keep `parts` alive as long as it runs.
        parts: by id.
        notes: one line per part, for the report.
    """

    program: ExportedProgram
    parts: Mapping[str, EagerPart]
    notes: tuple[str, ...]


def export_split(
    serving: nn.Module,
    card: ModelCard,
    trace: Callable[[nn.Module], ExportedProgram],
    error: BaseException,
) -> SplitExport | None:
    """Export a model with the submodules left out that torch.export refuses.

    Args:
        serving: takes the card's flat tensors; it is left as it was.
        card: the model's card.
        trace: exports a module, or raises whatever torch.export raises.
        error: what it raised for `serving`.

    Returns:
        None where the refused line is the model's own, or no part helps.
    """
    found = None
    with _Splitter(serving, card) as splitter, quiet_torch():
        for _ in range(MOST_TRACES):
            if not splitter.take_out(error):
                return None
            try:
                program = trace(serving)
            except Exception as refused:  # torch.export raises many unrelated types
                error = refused
                continue
            parts = splitter.parts.values()
            notes = [f"`{each.path}` ({each.class_name}) stays eager: {each.why}" for each in parts]
            found = SplitExport(program, splitter.parts, tuple(notes))
            break
    return found if found is not None and _agrees(found.program, serving, card) else None


def _agrees(program: ExportedProgram, serving: nn.Module, card: ModelCard) -> bool:
    """Tell whether the graph scores made-up rows as the model does."""
    run = program.module(check_guards=False)
    for inputs in made_up_inputs(card):
        with torch.no_grad():
            try:
                wanted = serving(*inputs)
            except Exception:  # not every model can score every made-up batch
                continue
            try:
                got = run(*inputs)
            except Exception:
                return False
        for pair in zip(got, wanted, strict=True):
            if not torch.allclose(*pair, _TOLERANCE, _TOLERANCE, equal_nan=True):
                return False
    return True


@dataclass
class _Counter:
    """Calls of a part in one forward."""

    num_calls: int = 0


@dataclass
class _Taken:
    """A module that an operator stands for."""

    part: EagerPart
    places: list[tuple[nn.Module, str]]
    counter: _Counter


@dataclass
class _Splitter:
    """Which submodules are taken out, and where they belong."""

    root: nn.Module
    card: ModelCard
    taken: dict[str, _Taken] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        def start(*_: Any) -> None:
            for each in self.taken.values():
                each.counter.num_calls = 0

        self._hook = self.root.register_forward_pre_hook(start)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        for path in list(self.taken):
            self.put_back(path)

    @property
    def parts(self) -> dict[str, EagerPart]:
        return {each.part.id: each.part for each in self.taken.values()}

    def take_out(self, error: BaseException) -> bool:
        """Take the smallest module out that holds the refused line and was not tried yet."""
        diagnosis = explain(error, self.root, self.card, others=False)
        for path in self._candidates(diagnosis):
            self.tried.add(path)
            for inner in [each for each in self.taken if each.startswith(f"{path}.")]:
                self.put_back(inner)
            try:
                self._replace(path, diagnosis)
            except PartRefused:
                continue
            return True
        return False

    def _candidates(self, diagnosis: Diagnosis) -> list[str]:
        """Name the modules to try, the innermost first, without those that are the whole model."""
        # A line outside every submodule may be refused for what the last part gave out.
        last = next(reversed(self.taken), "")
        around = [path for path in _ancestors(last) if _is_module(self.root, path)]
        chain = [*reversed(diagnosis.chain), *around]
        chain = [path for path in chain if path not in self.taken and path not in self.tried]
        return [path for path in dict.fromkeys(chain) if not self._is_whole(path)]

    def _is_whole(self, path: str) -> bool:
        if path in ("", "model"):
            return True
        inside = {id(each) for each in self.root.get_submodule(path).parameters()}
        taken = [each.part.module.parameters() for each in self.taken.values()]
        inside |= {id(parameter) for parameter in itertools.chain(*taken)}
        return all(id(each) in inside for each in self.root.parameters() if each.dim() > 1)

    def _replace(self, path: str, diagnosis: Diagnosis) -> None:
        module = self.root.get_submodule(path)
        calls = learn_calls(self.root, module, self.card)
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        where = f" ({Path(diagnosis.file).name}:{diagnosis.line})" if diagnosis.file else ""
        name = shown(path)
        part = EagerPart(
            id=re.sub(r"[^A-Za-z0-9_.-]", "_", name),
            path=name,
            module=module,
            calls=calls,
            why=f"{diagnosis.why}{where}",
            diagnosis=diagnosis,
        )
        _check_storable(part)
        counter = _Counter()
        stand_in = _make_stand_in(part, counter)
        places = [
            (owner, name)
            for owner in self.root.modules()
            for name, child in owner._modules.items()
            if child is module
        ]
        for owner, name in places:
            owner._modules[name] = stand_in
        self.taken[path] = _Taken(part, places, counter)

    def put_back(self, path: str) -> None:
        """Undo `_replace`."""
        taken = self.taken.pop(path)
        for owner, name in taken.places:
            owner._modules[name] = taken.part.module


def _ancestors(path: str) -> list[str]:
    """Name the modules around one, the nearest first."""
    steps = path.split(".")
    return [".".join(steps[:end]) for end in range(len(steps) - 1, 0, -1)]


def _is_module(root: nn.Module, path: str) -> bool:
    """Tell a module with a forward from a container such as ModuleList."""
    return not isinstance(root.get_submodule(path), nn.ModuleList | nn.ModuleDict)


def _check_storable(part: EagerPart) -> None:
    try:
        torch.save(part.module, io.BytesIO())
    except Exception as error:  # pickling runs the module's own code
        raise PartRefused(f"cannot be stored: {error}") from error


def _make_stand_in(part: EagerPart, counter: _Counter) -> nn.Module:
    """Make a module that calls the operator and otherwise looks like the part.

    It registers none of the part's weights, so they are no constants of the graph.
    """
    original = type(part.module)

    def forward(stand_in: Any, *args: Any, **kwargs: Any) -> Any:
        index = counter.num_calls
        counter.num_calls += 1
        if index >= len(part.calls):
            raise ExportError(f"{part.path} is called more often while it is traced than before.")
        return _call(part, index, getattr(stand_in, _HANDLE), args, kwargs)

    def getattribute(stand_in: Any, name: str) -> Any:
        try:
            return nn.Module.__getattr__(stand_in, name)
        except AttributeError:
            return getattr(part.module, name)

    methods = {"forward": forward, "__getattr__": getattribute}
    made: Any = type(f"Eager{original.__name__}", (original,), methods)
    stand_in: nn.Module = made.__new__(made)
    nn.Module.__init__(stand_in)
    stand_in.register_buffer(_HANDLE, torch.tensor([part.handle]))
    return stand_in.eval()


def _call(part: EagerPart, index: int, handle: Tensor, args: Any, kwargs: Any) -> Any:
    call = part.calls[index]
    leaves, tree = tree_flatten((args, kwargs))
    if tree != call.tree:
        raise ExportError(f"{part.path} is traced with other arguments than it takes on rows.")
    inputs, sizes = [], []
    for leaf, learned in zip(leaves, call.arguments, strict=True):
        if isinstance(learned, Slot):
            inputs.append(leaf)
        elif isinstance(learned, SizeSlot):
            sizes.append(leaf)
        elif type(leaf) is not type(learned) or leaf != learned:
            raise ExportError(f"{part.path} is traced with {leaf!r}, where rows give {learned!r}.")
    outputs = torch.ops.rankopt.eager_part(
        inputs, sizes, handle, index, encode_outputs(call.outputs)
    )
    results = [
        outputs[leaf.index]
        if isinstance(leaf, Slot)
        else leaf.value(inputs, sizes)
        if isinstance(leaf, Size)
        else leaf
        for leaf in call.results
    ]
    return tree_unflatten(results, call.result_tree)
