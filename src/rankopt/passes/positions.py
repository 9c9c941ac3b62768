"""Push the choice of a position back to where fewer positions can be computed.

Where a graph computes all positions of a sequence and reads one, the layers in between need only
that one. Starting at the choice, every operator whose results nothing else reads is replaced by the
same operator on the chosen positions; what others read too is computed whole and sliced.

Shapes: S positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake
from rankopt.passes.order import written_roots


@dataclass(frozen=True)
class Span:
    """Positions [begin, end) of one dim."""

    dim: int
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


_POINTWISE = {
    aten.silu.default,
    aten.relu.default,
    aten.gelu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.leaky_relu.default,
    aten.neg.default,
    aten.clone.default,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.masked_fill.Scalar,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.bitwise_not.default,
    aten.logical_not.default,
}
_UNARY = {aten.silu.default, aten.relu.default, aten.gelu.default, aten.sigmoid.default}
_COSTLY = {aten.linear.default, aten.matmul.default, aten.bmm.default}
Demands = dict[Node, Span | None]


@dataclass
class _Plan:
    """What one choice needs: spans of nodes to compute anew, in reverse order of the graph."""

    narrowed: dict[Node, Span] = field(default_factory=dict)
    demanded: dict[Node, list[Span]] = field(default_factory=dict)


def narrow_positions(emitter: Emitter) -> list[str]:
    """Narrow what single positions are chosen from.

    Returns:
        For each choice that saved a product, a sentence.
    """
    if written_roots(emitter.graph):
        # What is sliced later than it was read may have been written into since.
        return []
    _parts_to_slices(emitter)
    notes = []
    for node in list(emitter.graph.nodes):
        span = _chosen(node)
        if span is None:
            continue
        plan = _plan(emitter, node, span)
        saved = [each for each in plan.narrowed if each.target in _COSTLY]
        if not saved:
            continue
        whole = fake(arguments(node)[0]).shape[span.dim]
        with emitter.before(node):
            new = _Narrower(emitter, plan).node(arguments(node)[0], span)
            if node.target is aten.select.int:
                new = emitter.call(aten.select.int, new, span.dim, 0)
        emitter.replace(node, new)
        notes.append(f"{node.name}: {len(saved)} products on {span.size} of {whole} positions")
        emitter.graph.eliminate_dead_code()
    return notes


def _chosen(node: Node) -> Span | None:
    """Return the positions that a select or a slice picks; None for anything else."""
    if node.target not in {aten.select.int, aten.slice.Tensor} or len(node.args) < 3:
        return None
    source = fake(arguments(node)[0])
    dim = int(arguments(node)[1]) % source.dim()
    size: Any = source.shape[dim]
    if not isinstance(size, int) or dim in (0, source.dim() - 1):
        return None
    begin = arguments(node)[2]
    if node.target is aten.select.int:
        return Span(dim, begin % size, begin % size + 1) if isinstance(begin, int) else None
    end, step = (*arguments(node)[3:], None, None)[:2]
    begin, end = begin or 0, size if end is None else end
    if not (isinstance(begin, int) and isinstance(end, int)) or step not in (None, 1):
        return None
    begin, end = begin + size * (begin < 0), min(end + size * (end < 0), size)
    return Span(dim, begin, end) if 0 <= begin < end and end - begin < size else None


def _plan(emitter: Emitter, choice: Node, span: Span) -> _Plan:
    """Walk back from a choice, past every node that only what is narrowed reads."""
    plan = _Plan()
    plan.demanded[arguments(choice)[0]] = [span]
    dead = {choice}
    at = choice.prev
    while at.op != "root":
        wanted = plan.demanded.get(at)
        # One demand per reader: a reader that needs all positions states none.
        if wanted and len(set(wanted)) == 1 and len(wanted) == len(at.users):
            needs = _needs(emitter, at, wanted[0])
            if needs is not None and all(user in dead for user in at.users):
                dead.add(at)
                plan.narrowed[at] = wanted[0]
                for source, needed in needs.items():
                    if needed is not None:
                        plan.demanded.setdefault(source, []).append(needed)
        at = at.prev
    return plan


def _needs(emitter: Emitter, node: Node, span: Span) -> Demands | None:
    """Return what a node's inputs must hold for a span of it; None where that is not known."""
    if node.op != "call_function" or not hasattr(node.meta.get("val"), "shape"):
        return None
    rank = fake(node).dim()
    if node.target in _POINTWISE:
        return {each: _aligned(each, rank, span) for each in node.all_input_nodes}
    if node.target is aten.linear.default:
        return {arguments(node)[0]: span} if span.dim < rank - 1 else None
    if node.target is aten.layer_norm.default:
        kept = rank - len(arguments(node)[1])
        return {arguments(node)[0]: span} if span.dim < kept else None
    if node.target in {aten.matmul.default, aten.bmm.default}:
        left, right = arguments(node)[:2]
        same = fake(left).dim() == fake(right).dim() == rank
        return {left: span} if same and left is not right and span.dim == rank - 2 else None
    rules: dict[Any, Callable[[Node, Span], Demands | None]] = {
        aten.cat.default: _needs_of_cat,
        aten.transpose.int: _needs_of_transpose,
        aten.unsqueeze.default: _needs_of_unsqueeze,
        aten.reshape.default: _needs_of_reshape,
        aten.softmax.int: _needs_of_softmax,
        aten.slice.Tensor: _needs_of_slice,
    }
    return rules[node.target](node, span) if node.target in rules else None


def _aligned(source: Node, rank: int, span: Span) -> Span | None:
    """Return the span of an operand that broadcasting lines up from the right."""
    value = source.meta["val"]
    if not hasattr(value, "shape"):
        return None
    dim = span.dim - (rank - value.dim())
    if dim < 0 or value.shape[dim] == 1:
        return None
    return Span(dim, span.begin, span.end)


def _needs_of_cat(node: Node, span: Span) -> Demands | None:
    if _cat_dim(node) != span.dim:
        pieces = list(arguments(node)[0])
        return dict.fromkeys(pieces, span) if len(set(pieces)) == len(pieces) else None
    found = _piece(node, span)
    return None if found is None else {found[0]: found[1]}


def _cat_dim(node: Node) -> int:
    dim = int(arguments(node)[1]) if len(node.args) > 1 else 0
    return dim % fake(node).dim()


def _piece(node: Node, span: Span) -> tuple[Node, Span] | None:
    """Return the one piece of a concatenation that holds a span."""
    at = 0
    for piece in arguments(node)[0]:
        size: Any = fake(piece).shape[span.dim]
        if not isinstance(size, int):
            return None
        if at <= span.begin and span.end <= at + size:
            return piece, Span(span.dim, span.begin - at, span.end - at)
        at += size
    return None


def _needs_of_transpose(node: Node, span: Span) -> Demands:
    rank = fake(node).dim()
    first, second = (int(dim) % rank for dim in arguments(node)[1:3])
    dim = {first: second, second: first}.get(span.dim, span.dim)
    return {arguments(node)[0]: Span(dim, span.begin, span.end)}


def _needs_of_unsqueeze(node: Node, span: Span) -> Demands | None:
    added = int(arguments(node)[1]) % fake(node).dim()
    if span.dim == added:
        return None
    dim = span.dim - (span.dim > added)
    return {arguments(node)[0]: Span(dim, span.begin, span.end)}


def _needs_of_reshape(node: Node, span: Span) -> Demands | None:
    """A reshape keeps a dim whose size and whose predecessors' sizes stay."""
    before, after = fake(arguments(node)[0]).shape, fake(node).shape
    upto = span.dim + 1
    kept = [str(size) for size in before[:upto]] == [str(size) for size in after[:upto]]
    return {arguments(node)[0]: span} if kept and len(arguments(node)[1]) == len(after) else None


def _needs_of_softmax(node: Node, span: Span) -> Demands | None:
    return (
        None
        if int(arguments(node)[1]) % fake(node).dim() == span.dim
        else {arguments(node)[0]: span}
    )


def _needs_of_slice(node: Node, span: Span) -> Demands | None:
    """A slice of features: of a projection only the rows of its weight that make them."""
    source = arguments(node)[0]
    if int(arguments(node)[1]) % fake(node).dim() != fake(node).dim() - 1:
        return None
    if span.dim == fake(node).dim() - 1:
        return None
    linear = _projection(source)
    return {source: span} if linear is None else {arguments(linear)[0]: span}


def _projection(node: Node) -> Node | None:
    while node.target in _UNARY:
        node = arguments(node)[0]
    return node if node.target is aten.linear.default else None


class _Narrower:
    """Emits the narrowed copies of a plan."""

    def __init__(self, emitter: Emitter, plan: _Plan) -> None:
        self._emitter = emitter
        self._plan = plan
        self._made: dict[tuple[Node, Span], Node] = {}

    def node(self, source: Node, span: Span) -> Node:
        """Return a node that computes a span of another."""
        key = (source, span)
        if key not in self._made:
            if self._plan.narrowed.get(source) == span:
                self._made[key] = self._copy(source, span)
            else:
                self._made[key] = self._emitter.call(
                    aten.slice.Tensor, source, span.dim, span.begin, span.end
                )
        return self._made[key]

    def _copy(self, node: Node, span: Span) -> Node:
        if node.target is aten.cat.default and _cat_dim(node) == span.dim:
            found = _piece(node, span)
            if found is not None:
                return self._whole_or_part(*found)
        if node.target is aten.slice.Tensor:
            linear = _projection(arguments(node)[0])
            if linear is not None:
                return self._project(node, linear, span)
        needs = _needs(self._emitter, node, span)
        if needs is None:
            raise ValueError(f"{node.name} was planned and cannot be narrowed")
        replaced = {
            source: self.node(source, needed)
            for source, needed in needs.items()
            if needed is not None
        }
        args = [_swap(argument, replaced) for argument in node.args]
        if node.target is aten.reshape.default:
            args[1] = [*args[1][: span.dim], span.size, *args[1][span.dim + 1 :]]
        return self._emitter.call(node.target, *args, **node.kwargs)

    def _whole_or_part(self, piece: Node, span: Span) -> Node:
        whole = fake(piece).shape[span.dim] == span.size
        return piece if whole else self.node(piece, span)

    def _project(self, part: Node, linear: Node, span: Span) -> Node:
        """Compute some features of some positions straight from a projection's weight."""
        begin, end = arguments(part)[2:4]
        source, *vectors = arguments(linear)
        key = f"rows {begin}:{end}"
        held = [
            self._emitter.read(
                self._emitter.derive(str(each.target), key, lambda whole: whole[begin:end])
            )
            if each is not None
            else None
            for each in vectors
        ]
        new = self._emitter.call(aten.linear.default, self.node(source, span), *held)
        chain: list[Node] = []
        at = arguments(part)[0]
        while at is not linear:
            chain.append(at)
            at = arguments(at)[0]
        for each in reversed(chain):
            new = self._emitter.call(each.target, new, *each.args[1:], **each.kwargs)
        return new


def _swap(argument: Any, replaced: dict[Node, Node]) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_swap(each, replaced) for each in argument]
    return replaced.get(argument, argument) if isinstance(argument, Node) else argument


def _parts_to_slices(emitter: Emitter) -> None:
    """Write the parts of a projection that is split up as slices, each of which may be narrowed."""
    for split in list(emitter.graph.nodes):
        if split.target not in {aten.chunk.default, aten.split.Tensor}:
            continue
        source = arguments(split)[0]
        dim = int(arguments(split)[2]) if len(split.args) > 2 else 0
        linear = _projection(source)
        if linear is None or dim % fake(source).dim() != fake(source).dim() - 1:
            continue
        if any(constant(emitter.module, each) is None for each in arguments(linear)[1:] if each):
            continue
        bounds, at = [], 0
        for part in split.meta["val"]:
            bounds.append((at, at + int(part.shape[-1])))
            at = bounds[-1][1]
        for part in list(split.users):
            begin, end = bounds[arguments(part)[1]]
            with emitter.before(part):
                new = emitter.call(aten.slice.Tensor, source, fake(source).dim() - 1, begin, end)
            emitter.replace(part, new)
