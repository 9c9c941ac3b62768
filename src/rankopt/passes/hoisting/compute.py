"""Rules of the operators that do the work: linear layers, products, norms, sums, lookups."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.graph import arguments, aten, schema_values
from rankopt.passes.hoisting.bodies import (
    ROW,
    Axes,
    Body,
    Fill,
    Joined,
    Leaf,
    Level,
    Piece,
    Total,
    at_level,
    coalesce,
    is_float,
    joined,
    refine,
    remove_axis,
    sized,
    solid,
    take,
)
from rankopt.passes.hoisting.interpret import Interpreter
from rankopt.passes.hoisting.pointwise import pointwise, sum_of, zip_bodies
from rankopt.passes.hoisting.shapes import SHAPE_RULES, atomic, getitem
from rankopt.passes.hoisting.values import Rows, Value, num_entries

REQUEST_MATMUL_RANKS = (3, 4)
BLANK = -1e4
"""Scores at or below it have no weight behind a softmax in fp32."""


@dataclass(frozen=True, eq=False)
class _Share:
    """One term of a linear layer over parts.

    Attributes:
        leaf: [..., K'] of the layer's inputs.
        weight: [N, K'].
    """

    leaf: Leaf
    weight: Tensor


def linear(run: Interpreter, node: Node) -> Value | None:
    """W [u; a] = Wu u + Wa a, the requests' term once for each request."""
    given = run.rows_of(arguments(node)[0])
    weight = run.constant(arguments(node)[1])
    bias = arguments(node)[2] if len(node.args) > 2 else None
    if given is None or weight is None or weight.dim() != 2:
        return None
    if bias is not None and run.constant(bias) is None:
        return None
    one = atomic(run.build, given, len(given.dims) - 1)
    if one is None or one[0].axes[-1] != weight.shape[1]:
        return None
    value = one[0]
    layer = _Layer(run, str(arguments(node)[1].target), weight, bias)
    body = layer.apply(value.body, value.axes)
    return Rows((*value.axes[:-1], weight.shape[0]), value.dims, body)


class _Layer:
    """A linear layer that is applied to a body.

    Args:
        run: the walk.
        path: the weight's constant.
        weight: [N, K].
        bias: its node in the plain graph.
    """

    def __init__(self, run: Interpreter, path: str, weight: Tensor, bias: Node | None) -> None:
        self._run = run
        self._path = path
        self._weight = weight
        self._bias = bias

    def apply(self, body: Body, axes: Axes) -> Body:
        """Return the layer's results, the last axis N."""
        build, last = self._run.build, len(axes) - 1
        if isinstance(body, Joined) and body.axis != last:
            merged = coalesce(build, body, axes)
            if isinstance(merged, Joined):
                return Joined(
                    merged.axis,
                    tuple(
                        Piece(
                            p.positions,
                            self.apply(p.body, sized(axes, merged.axis, len(p.positions))),
                        )
                        for p in merged.pieces
                    ),
                )
            body = merged
        shares = self._merged(self._shares(body, axes))
        if not shares:
            shares = [_Share(solid(build, body, axes), self._weight)]
        groups: dict[tuple[Level, Axes], list[_Share]] = {}
        for share in shares:
            groups.setdefault((share.leaf.level, share.leaf.sizes[:-1]), []).append(share)
        # The bias goes where the fewest rows are.
        order = sorted(groups, key=lambda key: (key[0], num_entries(key[1])))
        leaves = [
            self._term(groups[key], self._bias if number == 0 else None)
            for number, key in enumerate(order)
        ]
        return sum_of(build, leaves)

    def _shares(self, body: Body, axes: Axes) -> list[_Share]:
        build, last = self._run.build, len(axes) - 1
        pieces = [Piece(tuple(range(axes[last])), body)]
        if isinstance(body, Joined):
            pieces = list(body.pieces)
        shares = []
        for piece in pieces:
            own = sized(axes, last, len(piece.positions))
            columns = self._weight[:, list(piece.positions)]
            if isinstance(piece.body, Fill) and not piece.body.value:
                continue
            for leaf in self._terms(piece.body, own):
                full = leaf
                if leaf.sizes[last] != own[last]:
                    wide = sized(leaf.sizes, last, own[last])
                    full = replace(leaf, node=build.expand(leaf.node, leaf.sizes, wide), sizes=wide)
                shares.append(_Share(replace(full, scale=1.0), columns * leaf.scale))
        return shares

    def _terms(self, body: Body, axes: Axes) -> Sequence[Leaf]:
        """Take a sum apart only where no candidate's term is as large as the whole."""
        build = self._run.build
        if not isinstance(body, Total):
            return [solid(build, body, axes)]
        rows = num_entries(axes[:-1])
        full = [
            leaf
            for leaf in body.leaves
            if leaf.level == Level.CANDIDATE and num_entries(leaf.sizes[:-1]) == rows
        ]
        return [solid(build, body, axes)] if full else body.leaves

    def _merged(self, shares: Sequence[_Share]) -> list[_Share]:
        """Add up the weights of terms that stand in several places: (Wq + Wd) q."""
        by_node: dict[Node, _Share] = {}
        for share in shares:
            known = by_node.get(share.leaf.node)
            if known is not None:
                summed = (known.weight.double() + share.weight.double()).to(share.weight.dtype)
                share = _Share(share.leaf, summed)
            by_node[share.leaf.node] = share
        return list(by_node.values())

    def _term(self, shares: Sequence[_Share], bias: Node | None) -> Leaf:
        build = self._run.build
        first = shares[0].leaf
        node = first.node
        weight = torch.cat([share.weight for share in shares], dim=1)
        if len(shares) > 1:
            node = build.call(aten.cat.default, [share.leaf.node for share in shares], -1)
        sizes = (*first.sizes[:-1], weight.shape[0])
        args = [node, self._constant(weight, first)]
        if bias is not None:
            args.append(build.read(str(bias.target)))
        return Leaf(build.call(aten.linear.default, *args), first.level, sizes)

    def _constant(self, weight: Tensor, leaf: Leaf) -> Node:
        if weight.shape == self._weight.shape and torch.equal(weight, self._weight):
            return self._run.build.read(self._path)
        share = "request" if leaf.level == Level.REQUEST else "candidate"
        if leaf.level == Level.FIXED:
            share = "fixed"
        root = self._path.removesuffix(".weight")
        return self._run.build.constant(f"{root}_{share}.weight", weight)


def matmul(run: Interpreter, node: Node) -> Value | None:
    """Products of two tensors: blocks of requests' rows are computed once for each request."""
    left, right = (run.as_rows(each) for each in arguments(node)[:2])
    if left is None or right is None or len(left.dims) != len(right.dims) or len(left.dims) < 3:
        return None
    if not (is_float(arguments(node)[0]) and is_float(arguments(node)[1])):
        return None
    for dim in (-1, -2):
        one = atomic(run.build, left, len(left.dims) + dim)
        other = atomic(run.build, right, len(right.dims) + dim)
        if one is None or other is None:
            return None
        left, right = one[0], other[0]
    if left.dims != right.dims or left.axes[:-2] != right.axes[:-2] or left.axes[0] != ROW:
        return None
    axes = (*left.axes[:-1], right.axes[-1])
    product = _Product(run)
    body = product.of(
        coalesce(run.build, left.body, left.axes),
        coalesce(run.build, right.body, right.axes),
        left.axes,
        right.axes,
    )
    return Rows(axes, left.dims, Fill(0.0) if body is None else body)


class _Product:
    """Batched products of bodies [..., M, K] and [..., K, N]."""

    def __init__(self, run: Interpreter) -> None:
        self._run = run
        self._build = run.build

    def of(self, left: Body, right: Body, left_axes: Axes, right_axes: Axes) -> Body | None:
        """Return the product; None where it is zero."""
        last = len(left_axes) - 1
        if _is_zero(left) or _is_zero(right):
            return None
        if isinstance(left, Joined) and left.axis == last - 1:
            parts = [
                self.of(p.body, right, _cut(left_axes, left, p), right_axes) for p in left.pieces
            ]
            return _side_by_side(left, left_axes, parts)
        if isinstance(right, Joined) and right.axis == last:
            parts = [
                self.of(left, p.body, left_axes, _cut(right_axes, right, p)) for p in right.pieces
            ]
            return _side_by_side(right, right_axes, parts)
        inner = [
            body
            for body, axis in ((left, last), (right, last - 1))
            if isinstance(body, Joined) and body.axis == axis
        ]
        if inner:
            return self._over_parts(left, right, left_axes, right_axes)
        return Total((self._leaf(left, right, left_axes, right_axes),))

    def _over_parts(
        self, left: Body, right: Body, left_axes: Axes, right_axes: Axes
    ) -> Body | None:
        """Add up the products over the parts of the axis that is summed over."""
        last = len(left_axes) - 1
        cuts: list[Body] = []
        if isinstance(left, Joined):
            cuts.append(Joined(0, left.pieces))
        if isinstance(right, Joined):
            cuts.append(Joined(0, right.pieces))
        terms: list[Body] = []
        for places in refine(cuts, 0, left_axes[last]):
            part = self.of(
                take(self._build, left, last, places),
                take(self._build, right, last - 1, places),
                sized(left_axes, last, len(places)),
                sized(right_axes, last - 1, len(places)),
            )
            if part is not None:
                terms.append(part)
        axes = (*left_axes[:-1], right_axes[-1])
        return self._sum(terms, axes) if terms else None

    def _sum(self, terms: Sequence[Body], axes: Axes) -> Body:
        def on_leaves(bodies: Sequence[Body], sizes: Axes) -> Body:
            leaves: list[Leaf] = []
            for body in bodies:
                if _is_zero(body):
                    continue
                part = (
                    body if isinstance(body, Total) else Total((solid(self._build, body, sizes),))
                )
                leaves += part.leaves
            return sum_of(self._build, leaves) if leaves else Fill(0.0)

        if len(terms) == 1:
            return terms[0]
        return zip_bodies(self._build, terms, axes, on_leaves, None)

    def _leaf(self, left: Body, right: Body, left_axes: Axes, right_axes: Axes) -> Leaf:
        build = self._build
        sizes = (*left_axes[:-1], right_axes[-1])
        one, other = solid(build, left, left_axes), solid(build, right, right_axes)
        level = max(one.level, other.level)
        mixed = {one.level, other.level} == {Level.REQUEST, Level.CANDIDATE}
        if mixed and len(sizes) in REQUEST_MATMUL_RANKS:
            if one.level == Level.CANDIDATE:
                return Leaf(self._gathered(one, other, left_axes, right_axes), level, sizes)
            swapped = self._gathered(
                _transposed(build, other), _transposed(build, one),
                _swap(right_axes), _swap(left_axes),
            )  # fmt: skip
            return _transposed(build, Leaf(swapped, level, _swap(sizes)))
        nodes = []
        for leaf, axes in ((one, left_axes), (other, right_axes)):
            at = at_level(build, leaf, level)
            candidate = level == Level.CANDIDATE
            nodes.append(build.expand(at.node, at.sizes, axes, candidate=candidate))
        return Leaf(build.call(aten.matmul.default, *nodes), level, sizes)

    def _gathered(self, x: Leaf, y: Leaf, x_axes: Axes, y_axes: Axes) -> Node:
        """Multiply candidates' rows by their requests' matrices, which are not copied for them."""
        build = self._build
        left = build.expand(x.node, x.sizes, x_axes, candidate=True)
        right = build.expand(y.node, y.sizes, y_axes)
        flat = len(x_axes) == 3
        if flat:
            left = build.call(aten.unsqueeze.default, left, 1)
            right = build.call(aten.unsqueeze.default, right, 1)
        index = build.index
        made = build.call(torch.ops.rankopt.request_matmul.default, left, right, index)
        return build.call(aten.squeeze.dim, made, 1) if flat else made


def _cut(axes: Axes, body: Joined, piece: Piece) -> Axes:
    """Return the sizes of a piece."""
    return sized(axes, body.axis, len(piece.positions))


def _side_by_side(cut: Joined, axes: Axes, parts: Sequence[Body | None]) -> Body:
    """Join results where their operand's pieces stand; None is zero."""
    pieces = [
        Piece(piece.positions, Fill(0.0) if part is None else part)
        for piece, part in zip(cut.pieces, parts, strict=True)
    ]
    return joined(cut.axis, axes[cut.axis], pieces)


def _swap(axes: Axes) -> Axes:
    return (*axes[:-2], axes[-1], axes[-2])


def _transposed(build: Any, leaf: Leaf) -> Leaf:
    node = build.call(aten.transpose.int, leaf.node, -1, -2)
    return replace(leaf, node=node, sizes=_swap(leaf.sizes))


def _is_zero(body: Body) -> bool:
    return isinstance(body, Fill) and body.value == 0


def layer_norm(run: Interpreter, node: Node) -> Value | None:
    """Norms over the last dims: each position by itself."""
    given = run.rows_of(arguments(node)[0])
    shape = arguments(node)[1]
    one = atomic(run.build, given, len(given.dims) - 1) if given is not None else None
    if one is None or len(shape) != 1:
        return None
    value = one[0]
    rest = [run.fixed(each, Level.FIXED) if isinstance(each, Node) else each
            for each in arguments(node)[2:]]  # fmt: skip
    last = len(value.axes) - 1

    def on_leaf(leaf: Leaf) -> Node:
        return run.build.call(aten.layer_norm.default, leaf.node, list(shape), *rest)

    return _along_others(run, value, last, on_leaf)


def _along_others(
    run: Interpreter, value: Rows, axis: int, on_leaf: Callable[[Leaf], Node]
) -> Value | None:
    """Apply an operator that works along one axis to the parts of all others."""
    build = run.build

    def apply(body: Body, axes: Axes) -> Body:
        if isinstance(body, Joined) and body.axis != axis:
            pieces = [
                Piece(p.positions, apply(p.body, sized(axes, body.axis, len(p.positions))))
                for p in body.pieces
            ]
            return joined(body.axis, axes[body.axis], pieces)
        leaf = solid(build, body, axes)
        if leaf.sizes[axis] != axes[axis]:
            wide = sized(leaf.sizes, axis, axes[axis])
            leaf = replace(leaf, node=build.expand(leaf.node, leaf.sizes, wide), sizes=wide)
        return Total((replace(leaf, node=on_leaf(leaf)),))

    return Rows(value.axes, value.dims, apply(coalesce(build, value.body, value.axes), value.axes))


def softmax(run: Interpreter, node: Node) -> Value | None:
    """Softmax along a dim; what is masked out there leaves the rest alone."""
    given = run.rows_of(arguments(node)[0])
    one = None
    if given is not None:
        one = atomic(run.build, given, arguments(node)[1] % len(given.dims))
    if one is None or one[0].axes[one[1]] == ROW:
        return None
    value, axis = one
    target: Any = node.target
    rest = arguments(node)[2:]

    def on_leaf(leaf: Leaf) -> Node:
        return run.build.call(target, leaf.node, axis, *rest)

    def apply(body: Body, axes: Axes) -> Body:
        if isinstance(body, Joined) and body.axis == axis:
            shown = [p for p in body.pieces if not _is_blank(p.body)]
            if len(shown) < len(body.pieces) and shown:
                places = [place for piece in shown for place in piece.positions]
                inner = take(run.build, body, axis, sorted(places))
                done = apply(inner, sized(axes, axis, len(places)))
                blank = [Piece(p.positions, Fill(0.0)) for p in body.pieces if _is_blank(p.body)]
                return joined(axis, axes[axis], [Piece(tuple(sorted(places)), done), *blank])
        if isinstance(body, Joined) and body.axis != axis:
            pieces = [
                Piece(p.positions, apply(p.body, sized(axes, body.axis, len(p.positions))))
                for p in body.pieces
            ]
            return joined(body.axis, axes[body.axis], pieces)
        leaf = solid(run.build, body, axes)
        if leaf.sizes[axis] != axes[axis]:
            wide = sized(leaf.sizes, axis, axes[axis])
            leaf = replace(leaf, node=run.build.expand(leaf.node, leaf.sizes, wide), sizes=wide)
        return Total((replace(leaf, node=on_leaf(leaf)),))

    merged = coalesce(run.build, value.body, value.axes)
    return Rows(value.axes, value.dims, apply(merged, value.axes))


def _is_blank(body: Body) -> bool:
    return isinstance(body, Fill) and body.value <= BLANK


def total(run: Interpreter, node: Node) -> Value | None:
    """Sums and means along one dim: the sum of the parts' sums."""
    named = schema_values(node)
    value = run.rows_of(named["self"])
    dims = named.get("dim")
    if value is None or not isinstance(dims, list | tuple) or len(dims) != 1:
        return None
    if named.get("dtype") is not None:
        return None
    one = atomic(run.build, value, dims[0] % len(value.dims))
    if one is None or one[0].axes[one[1]] == ROW:
        return None
    whole, axis = one
    dim = dims[0] % len(whole.dims)
    scale = 1.0 / whole.axes[axis] if node.target == aten.mean.dim else 1.0
    body = _summed(run, coalesce(run.build, whole.body, whole.axes), whole.axes, axis, scale)
    axes = sized(whole.axes, axis, 1)
    if named.get("keepdim"):
        return Rows(axes, whole.dims, body)
    return Rows(
        (*axes[:axis], *axes[axis + 1 :]),
        (*whole.dims[:dim], *whole.dims[dim + 1 :]),
        remove_axis(run.build, body, axis),
    )


def _summed(run: Interpreter, body: Body, axes: Axes, axis: int, scale: float) -> Body:
    build = run.build
    if isinstance(body, Joined) and body.axis != axis:
        pieces = [
            Piece(
                p.positions,
                _summed(run, p.body, sized(axes, body.axis, len(p.positions)), axis, scale),
            )
            for p in body.pieces
        ]
        return joined(body.axis, axes[body.axis], pieces)
    leaves = []
    parts = list(body.pieces) if isinstance(body, Joined) else [Piece((), body)]
    for part in parts:
        own = sized(axes, axis, len(part.positions)) if part.positions else axes
        leaf = solid(build, part.body, own)
        factor = own[axis] if leaf.sizes[axis] == 1 else 1
        node = build.call(aten.sum.dim_IntList, leaf.node, [axis], True)
        leaves.append(Leaf(node, leaf.level, sized(leaf.sizes, axis, 1), scale * factor))
    return sum_of(build, leaves)


def embedding(run: Interpreter, node: Node) -> Value | None:
    """Rows of a table: each part of the ids by itself."""
    weight, source = arguments(node)[:2]
    value = run.rows_of(source)
    rows = run.constant(weight)
    if value is None or rows is None:
        return None
    width = rows.shape[1]
    table = run.fixed(weight, Level.FIXED)
    build = run.build
    merged = coalesce(build, value.body, value.axes)

    def apply(body: Body, axes: Axes) -> Body:
        if isinstance(body, Joined):
            pieces = [
                Piece(p.positions, apply(p.body, sized(axes, body.axis, len(p.positions))))
                for p in body.pieces
            ]
            return Joined(body.axis, tuple(pieces))
        leaf = solid(build, body, axes)
        made = build.call(aten.embedding.default, table, leaf.node)
        return Total((Leaf(made, leaf.level, (*leaf.sizes, width)),))

    return Rows((*value.axes, width), (*value.dims, 1), apply(merged, value.axes))


RULES: dict[Any, Callable[[Interpreter, Node], Value | None]] = {
    **SHAPE_RULES,
    operator.getitem: getitem,
    "pointwise": pointwise,
    aten.prelu.default: pointwise,
    aten.silu.default: pointwise,
    aten.masked_fill.Scalar: pointwise,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.bmm.default: matmul,
    aten.layer_norm.default: layer_norm,
    aten.softmax.int: softmax,
    aten._softmax.default: softmax,
    aten.sum.dim_IntList: total,
    aten.mean.dim: total,
    aten.embedding.default: embedding,
}
"""Operator -> what it makes of values in two parts; `pointwise` stands for all on entries."""
