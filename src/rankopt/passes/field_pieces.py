"""Follow the vectors of fields back to where they lie, so that no stack of them has to be made.

A stack, a concatenation, a reshape, a slice or a selection by a constant index moves columns about
and changes none. What is read through them are spans of columns of fewer tensors: the 26 tables of
a fused lookup, concatenated behind a dense vector, are two.

Shapes: B rows, F fields, D numbers of each. The columns of [B, F, D] are counted flat, F * D.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake, schema_values

MAX_PIECES = 8
"""More tensors than this are concatenated for one call: each costs a check and, as a view, a
handle."""

RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.contiguous.default,
    aten.alias.default,
}
_JOINS = {aten.cat.default, aten.stack.default}
_SPLITS = {aten.split_with_sizes.default, aten.split.Tensor, aten.split.sizes, aten.chunk.default}


@dataclass(frozen=True)
class Span:
    """Columns [start, start + width) of a tensor whose rows are laid flat."""

    root: Node
    start: int
    width: int


class Columns:
    """Reads columns back through what only moves them about.

    A concatenation is read through only when nothing else needs it: one that is made anyway is the
    better place to read from.

    Args:
        module: the graph.
        matched: nodes that vanish when the match is replaced.
        sources: what will be read.
    """

    def __init__(
        self, module: GraphModule, matched: Iterable[Node], sources: Iterable[Node]
    ) -> None:
        self._module = module
        self._vanishing = _vanishing(module, set(matched), sources)

    def of(self, node: Node) -> list[Span]:
        """List the spans that make up the columns of [B, ...]; neighbours of one tensor joined."""
        return merge(self._of(node))

    def _of(self, node: Node) -> list[Span]:
        if node.op != "call_function":
            return [_whole(node)]
        if _is_same_columns(node):
            return self._of(arguments(node)[0])
        if node.target in _JOINS:
            joined = self._joined(node) if node in self._vanishing else None
            return [_whole(node)] if joined is None else joined
        read = _READERS.get(node.target)
        picked = None if read is None else read(self._module, node)
        if picked is None:
            return [_whole(node)]
        source, blocks = picked
        spans = self._of(source)
        return [part for start, width in blocks for part in cut(spans, start, width)]

    def _joined(self, node: Node) -> list[Span] | None:
        pieces, values = arguments(node)[0], schema_values(node)
        shape = list(fake(node).shape)
        dim = values["dim"] % len(shape)
        if dim == 0 or _product(shape[1:dim]) != 1:
            return None
        return [span for piece in pieces for span in self._of(piece)]


def _vanishing(module: GraphModule, matched: set[Node], sources: Iterable[Node]) -> set[Node]:
    """Add to the matched nodes those in front of them that nothing else reads."""
    behind, pending = set[Node](), list(sources)
    while pending:
        node = pending.pop()
        if node in behind:
            continue
        behind.add(node)
        if node.op == "call_function" and node.target in _MOVERS:
            pending.extend(node.all_input_nodes)
    vanishing = set(matched)
    for node in reversed(module.graph.nodes):
        if node in behind and all(user in vanishing for user in node.users):
            vanishing.add(node)
    return vanishing


def _is_same_columns(node: Node) -> bool:
    source = arguments(node)[0] if node.args else None
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
        return False
    if node.target is aten.to.dtype:
        return fake(node).dtype == fake(source).dtype
    return node.target in RESHAPES and same_rows(node, source)


def merge(spans: Sequence[Span]) -> list[Span]:
    """Join spans that lie side by side in one tensor."""
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.root is span.root and last.start + last.width == span.start:
            merged[-1] = Span(last.root, last.start, last.width + span.width)
        elif span.width:
            merged.append(span)
    return merged


def cut(spans: Sequence[Span], start: int, width: int) -> list[Span]:
    """Take `width` columns from column `start` on of what the spans make up."""
    found, position = [], 0
    for span in spans:
        begin = max(start, position)
        end = min(start + width, position + span.width)
        if begin < end:
            found.append(Span(span.root, span.start + begin - position, end - begin))
        position += span.width
    return found


def blocks_of(spans: Sequence[Span], dim: int) -> list[Span] | None:
    """Cut spans into fields of `dim` columns; None where a field lies in two tensors."""
    if any(span.width % dim for span in spans):
        return None
    return [
        Span(span.root, span.start + offset, dim)
        for span in spans
        for offset in range(0, span.width, dim)
    ]


def emit_pieces(emitter: Emitter, spans: Sequence[Span]) -> list[Node]:
    """Make the matrices [B, columns] that hold the spans, at the insertion point."""
    pieces = []
    for span in merge(spans):
        piece = span.root
        if fake(piece).dim() != 2:
            piece = emitter.call(aten.flatten.using_ints, piece, 1)
        if span.width != fake(piece).shape[1]:
            piece = emitter.call(aten.slice.Tensor, piece, 1, span.start, span.start + span.width)
        pieces.append(piece)
    if len(pieces) > MAX_PIECES:
        return [emitter.call(aten.cat.default, pieces, 1)]
    return pieces


def same_rows(left: Node, right: Node) -> bool:
    """Tell whether two tensors have the same first dim, and static ones behind it."""
    one, two = fake(left).shape, fake(right).shape
    static = all(isinstance(size, int) for size in (*one[1:], *two[1:]))
    return static and len(one) > 0 and len(two) > 0 and str(one[0]) == str(two[0])


def _whole(node: Node) -> Span:
    return Span(node, 0, _product(fake(node).shape[1:]))


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(int(size) for size in sizes)


Blocks = tuple[Node, list[tuple[int, int]]]


def _slice(module: GraphModule, node: Node) -> Blocks | None:
    values = schema_values(node)
    source: Node = arguments(node)[0]
    found = _inner(source, values["dim"])
    bounds = (values["start"] or 0, values.get("end"), values.get("step", 1))
    if found is None or not all(isinstance(bound, int | None) for bound in bounds):
        return None
    size, inner = found
    places = range(size)[slice(*bounds)]
    if places.step != 1:
        return None
    return source, [(places.start * inner, len(places) * inner)]


def _narrow(module: GraphModule, node: Node) -> Blocks | None:
    source, dim, start, length = arguments(node)
    found = _inner(source, dim)
    if found is None or not (isinstance(start, int) and isinstance(length, int)):
        return None
    return source, [(start % found[0] * found[1], length * found[1])]


def _select(module: GraphModule, node: Node) -> Blocks | None:
    source, dim, index = arguments(node)
    found = _inner(source, dim)
    if found is None or not isinstance(index, int):
        return None
    return source, [(index % found[0] * found[1], found[1])]


def _index_select(module: GraphModule, node: Node) -> Blocks | None:
    source, dim, index = arguments(node)
    found, places = _inner(source, dim), constant(module, index)
    if found is None or places is None:
        return None
    return source, [(int(place) * found[1], found[1]) for place in places.tolist()]


def _piece_of_split(module: GraphModule, node: Node) -> Blocks | None:
    split, index = arguments(node)
    if not isinstance(split, Node) or split.target not in _SPLITS:
        return None
    source: Node = arguments(split)[0]
    dim = schema_values(split)["dim"]
    found = _inner(source, dim)
    if found is None:
        return None
    sizes = [value.shape[dim] for value in split.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return source, [(sum(sizes[:index]) * found[1], sizes[index] * found[1])]


_READERS: dict[Any, Callable[[GraphModule, Node], Blocks | None]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.index_select.default: _index_select,
    operator.getitem: _piece_of_split,
}


_MOVERS = {*RESHAPES, *_JOINS, *_SPLITS, *_READERS, aten.to.dtype}


def _inner(source: Node, dim: int) -> tuple[int, int] | None:
    """Return the size of a dim and the columns of one place of it; None where places are apart."""
    shape = list(fake(source).shape)
    dim %= len(shape)
    if dim == 0 or not all(isinstance(size, int) for size in shape[1:]):
        return None
    if _product(shape[1:dim]) != 1:
        return None
    return shape[dim], _product(shape[dim + 1 :])
