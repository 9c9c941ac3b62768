"""Parts of a model that stay eager: one operator that runs a module as it is.

`rankopt::eager_part` stands in an exported graph where a submodule was called. Its arguments say
all that tracing needs: how many rows come out (`outputs`), so a graph can be traced and compiled
again without the module. Which module runs is a number in a constant of the graph (`handle`), set
anew for every loaded artifact: two artifacts in one process never mix, and new weights need no
other compiled code.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from rankopt.errors import ArtifactError

if TYPE_CHECKING:
    from rankopt.capture.diagnose import Diagnosis

SCHEMA = "(Tensor[] inputs, SymInt[] sizes, Tensor handle, int call, str outputs) -> Tensor[]"


@dataclass(frozen=True)
class Slot:
    """A tensor's place among a call's flat arguments or results."""

    index: int


@dataclass(frozen=True)
class SizeSlot:
    """An argument that is a number of rows, by its place among the operator's `sizes`."""

    index: int


@dataclass(frozen=True)
class Size:
    """A size that follows from the call's arguments: `dim * times // over + plus`.

    Attributes:
        source: index of the tensor argument; -1 for the operator's `sizes`.
        dim: which of its dims, or which of the sizes.
    """

    source: int
    dim: int
    times: int = 1
    over: int = 1
    plus: int = 0

    def value(self, inputs: Sequence[Tensor], sizes: Sequence[Any]) -> Any:
        """Work the size out, symbolic where the arguments are."""
        given = sizes[self.dim] if self.source < 0 else inputs[self.source].shape[self.dim]
        scaled = given if self.times == 1 else given * self.times
        scaled = scaled if self.over == 1 else scaled // self.over
        return scaled + self.plus if self.plus else scaled


@dataclass(frozen=True)
class Unknown:
    """A size that depends on data; equal numbers are equal sizes within one call."""

    number: int


Extent = int | Size | Unknown


@dataclass(frozen=True)
class TensorForm:
    """What is known of a tensor that comes out of a part."""

    dtype: str
    shape: tuple[Extent, ...]


@dataclass(frozen=True)
class Call:
    """One place where a part is called.

    Attributes:
        arguments, tree: the flat arguments, `Slot` and `SizeSlot` among constants.
        outputs: the tensors that come out, in order.
        results, result_tree: what the call returns, `Slot` and `Size` among constants.
    """

    arguments: tuple[Any, ...]
    tree: TreeSpec
    outputs: tuple[TensorForm, ...]
    results: tuple[Any, ...]
    result_tree: TreeSpec

    def signature(self) -> str:
        """Digest everything that compiled code relies on."""
        parts = (self.arguments, str(self.tree), self.outputs, self.results, str(self.result_tree))
        return hashlib.sha256(repr(parts).encode()).hexdigest()


_handles = itertools.count(1)
_running: weakref.WeakValueDictionary[int, EagerPart] = weakref.WeakValueDictionary()
_failures: dict[int, str] = {}


@dataclass(frozen=True, eq=False)
class EagerPart:
    """A submodule that runs as it is inside an exported graph.

    Attributes:
        id: names its file in an artifact.
        path: where it lies in the model, such as `interest_extractor`.
        module: in eval mode, with its weights.
        calls: the places where the graph calls it.
        why: one line for the report.
        diagnosis: what torch.export said of it; None in a loaded artifact.
        handle: by which the operator finds it, as long as it is alive.
    """

    id: str
    path: str
    module: nn.Module
    calls: tuple[Call, ...]
    why: str
    diagnosis: Diagnosis | None = None
    handle: int = field(default_factory=lambda: next(_handles))

    def __post_init__(self) -> None:
        _running[self.handle] = self

    @property
    def class_name(self) -> str:
        return type(self.module).__name__

    @property
    def size_bytes(self) -> int:
        """Bytes of its parameters and buffers as they are stored; tied ones count once."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        seen = {(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in tensors}
        return sum(seen.values())

    @property
    def signature(self) -> str:
        """Digest of all its calls; compiled code fits parts of the same signature alone."""
        joined = "".join(call.signature() for call in self.calls)
        return hashlib.sha256(joined.encode()).hexdigest()

    @cached_property
    def _weights(self) -> set[int]:
        """Where its weights lie in memory."""
        held = itertools.chain(self.module.parameters(), self.module.buffers())
        return {tensor.untyped_storage().data_ptr() for tensor in held}

    def run(self, index: int, inputs: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Call the module as the model does, and return the tensors that come out.

        Raises:
            ArtifactError: they have other shapes than the graph was compiled for.
        """
        call = self.calls[index]
        leaves = [_fill(leaf, inputs, sizes) for leaf in call.arguments]
        args, kwargs = tree_unflatten(leaves, call.tree)
        with torch.no_grad():
            result = self.module(*args, **kwargs)
        flat, tree = tree_flatten(result)
        found = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        if tree != call.result_tree or len(found) != len(call.outputs):
            raise ArtifactError(f"part {self.path} returned {tree}, not {call.result_tree}")
        known: dict[int, int] = {}
        for position, (tensor, form) in enumerate(zip(found, call.outputs, strict=True)):
            if not _fits(tensor, form, inputs, sizes, known):
                raise ArtifactError(
                    f"part {self.path} returned {_form(tensor)} as tensor {position}, where the "
                    f"compiled graph expects {describe(form)}: rows that were not seen when it was "
                    "exported change its shape"
                )
        return self._own(found, inputs)

    def _own(self, results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """Copy what shares memory: a compiled graph may write into what an operator returns."""
        taken = {tensor.untyped_storage().data_ptr() for tensor in inputs} | self._weights
        owned = []
        for tensor in results:
            plain = tensor.contiguous()
            if plain.untyped_storage().data_ptr() in taken:
                plain = plain.clone(memory_format=torch.contiguous_format)
            taken.add(plain.untyped_storage().data_ptr())
            owned.append(plain)
        return owned


def forget(parts: Sequence[EagerPart]) -> None:
    """Make parts unknown to the operator, whoever still holds them."""
    for part in parts:
        _running.pop(part.handle, None)
        _failures.pop(part.handle, None)


def take_failure(handles: Sequence[int]) -> str | None:
    """Return what the last failed call said, once: compiled code loses the exception's type."""
    said = [_failures.pop(handle) for handle in handles if handle in _failures]
    return said[-1] if said else None


def encode_outputs(outputs: Sequence[TensorForm]) -> str:
    """Write the forms as the operator's `outputs` argument."""
    return json.dumps(
        [[form.dtype, [_encode(extent) for extent in form.shape]] for form in outputs]
    )


def _encode(extent: Extent) -> Any:
    if isinstance(extent, Size):
        return [extent.source, extent.dim, extent.times, extent.over, extent.plus]
    return {"unknown": extent.number} if isinstance(extent, Unknown) else extent


def _decode(extent: Any) -> Extent:
    if isinstance(extent, list):
        return Size(*extent)
    return Unknown(extent["unknown"]) if isinstance(extent, dict) else int(extent)


def _fill(leaf: Any, inputs: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    if isinstance(leaf, Slot):
        return inputs[leaf.index]
    return sizes[leaf.index] if isinstance(leaf, SizeSlot) else leaf


def _fits(
    tensor: Tensor,
    form: TensorForm,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    known: dict[int, int],
) -> bool:
    if str(tensor.dtype) != f"torch.{form.dtype}" or tensor.dim() != len(form.shape):
        return False
    for got, extent in zip(tensor.shape, form.shape, strict=True):
        if isinstance(extent, Unknown):
            wanted = known.setdefault(extent.number, got)
        else:
            wanted = extent.value(inputs, sizes) if isinstance(extent, Size) else extent
        if got != wanted:
            return False
    return True


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def describe(form: TensorForm) -> str:
    """Write a form for a message: `float32 [dim 0 of argument 0, 16]`."""
    return f"{form.dtype} [{', '.join(map(_in_words, form.shape))}]"


def _in_words(extent: Extent) -> str:
    if isinstance(extent, Unknown):
        return "any"
    if not isinstance(extent, Size):
        return str(extent)
    text = f"size {extent.dim}" if extent.source < 0 else f"dim {extent.dim} of {extent.source}"
    text += f" * {extent.times}" if extent.times != 1 else ""
    text += f" / {extent.over}" if extent.over != 1 else ""
    return text + (f" + {extent.plus}" if extent.plus else "")


def part_handles(graph_module: torch.fx.GraphModule) -> tuple[str, ...]:
    """List the handle constants that an unlifted graph reads, in graph order."""
    target = torch.ops.rankopt.eager_part.default
    nodes = graph_module.graph.find_nodes(op="call_function", target=target)
    return tuple(dict.fromkeys(str(node.args[2].target) for node in nodes))


def parts_in(
    graph_module: torch.fx.GraphModule, parts: Mapping[str, EagerPart]
) -> dict[str, EagerPart]:
    """Map each handle constant of an unlifted graph to the part it calls."""
    by_handle = {part.handle: part for part in parts.values()}
    found = {}
    for name in part_handles(graph_module):
        value: Any = graph_module
        for step in name.split("."):
            value = getattr(value, step)
        found[name] = by_handle[int(value)]
    return found


# The operator.


def _run(
    inputs: Sequence[Tensor], sizes: Sequence[int], handle: Tensor, call: int, outputs: str
) -> list[Tensor]:
    del outputs
    number = int(handle)
    part = _running.get(number)
    if part is None:
        raise ArtifactError("a part of this graph was released, or belongs to another process")
    try:
        return part.run(call, inputs, sizes)
    except ArtifactError as error:
        _failures[number] = str(error)
        raise
    except Exception as error:  # a user's module may raise anything
        _failures[number] = f"part {part.path} raised {type(error).__name__}: {error}"
        raise ArtifactError(_failures[number]) from error


def _make_fake(
    inputs: Sequence[Tensor], sizes: Sequence[Any], handle: Tensor, call: int, outputs: str
) -> list[Tensor]:
    del call
    unknown: dict[int, Any] = {}
    made = []
    for dtype, shape in json.loads(outputs):
        size = []
        for extent in map(_decode, shape):
            if isinstance(extent, Size):
                size.append(extent.value(inputs, sizes))
            elif isinstance(extent, Unknown):
                if extent.number not in unknown:
                    unknown[extent.number] = torch.library.get_ctx().new_dynamic_size(min=0)
                size.append(unknown[extent.number])
            else:
                size.append(extent)
        made.append(torch.empty(size, dtype=getattr(torch, dtype), device=handle.device))
    return made


torch.library.define("rankopt::eager_part", SCHEMA)
torch.library.impl("rankopt::eager_part", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("rankopt::eager_part")(_make_fake)
