"""Operators on entries: each part by itself, and sums left open.

An addition of requests' and candidates' parts is not carried out: a linear layer behind it may
still take the two apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

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
    add_leaves,
    at_level,
    coalesce,
    fixed_leaf,
    has_fill,
    insert_axis,
    joined,
    leaves_of,
    refine,
    sized,
    solid,
    split_axis,
    take,
)
from rankopt.passes.hoisting.builder import Builder
from rankopt.passes.hoisting.interpret import Interpreter
from rankopt.passes.hoisting.known import Known
from rankopt.passes.hoisting.values import Fixed, Rows, Value, tensor_of

OnLeaves = Callable[[Sequence[Body], Axes], Body]


@dataclass(frozen=True)
class Aligned:
    """Operands that broadcast against each other, on the same axes."""

    axes: Axes
    dims: tuple[int, ...]
    bodies: tuple[Body, ...]


def pointwise(run: Interpreter, node: Node) -> Value | None:
    """Any operator on entries that broadcasts."""
    if node.target == aten.prelu.default:
        return _prelu(run, node)
    sources = list(node.all_input_nodes)
    aligned = align(run, sources)
    if aligned is None:
        return None
    on_leaves = _additions(run, node, sources) or _by_operator(run, node, sources)
    known = run.known.of(node)
    body = zip_bodies(
        run.build, aligned.bodies, aligned.axes, on_leaves, known and known.along(aligned.axes)
    )
    return Rows(aligned.axes, aligned.dims, body)


def _prelu(run: Interpreter, node: Node) -> Value | None:
    """PReLU's slopes belong to dim 1, which is the last one of a matrix."""
    x, slope = arguments(node)
    tensor, slopes = tensor_of(x), tensor_of(slope)
    if tensor is None or slopes is None or (slopes.numel() > 1 and tensor.dim() != 2):
        return None
    aligned = align(run, [x])
    if aligned is None or not isinstance(run.values[slope], Fixed):
        return None
    weight = run.fixed(slope, Level.FIXED)
    last = len(aligned.axes) - 1

    def on_leaves(bodies: Sequence[Body], axes: Axes) -> Body:
        leaf = solid(run.build, bodies[0], axes)
        if slopes.numel() == 1:
            made = run.build.call(aten.prelu.default, leaf.node, weight)
        else:
            # Two dims, so that the slopes meet the last one.
            flat = run.build.reshape(leaf.node, (-1, axes[last]))
            made = run.build.call(aten.prelu.default, flat, weight)
            made = run.build.reshape(made, leaf.sizes)
        return Total((replace(leaf, node=made),))

    if slopes.numel() > 1 and _is_joined_along(aligned.bodies[0], last):
        return None
    body = zip_bodies(run.build, aligned.bodies, aligned.axes, on_leaves, None)
    return Rows(aligned.axes, aligned.dims, body)


def _is_joined_along(body: Body, axis: int) -> bool:
    if not isinstance(body, Joined):
        return False
    return body.axis == axis or any(_is_joined_along(p.body, axis) for p in body.pieces)


def align(run: Interpreter, sources: Sequence[Node]) -> Aligned | None:
    """Bring operands to common axes; None where their dims are made of different ones."""
    held = [run.values[source] for source in sources]
    rank = max((_rank(source) for source in sources), default=0)
    groups: list[tuple[int, ...]] = [(1,)] * rank
    for value, source in zip(held, sources, strict=True):
        for dim, group in enumerate(_groups(run, value, source) or ()):
            at = dim + rank - _rank(source)
            # The finest cut of a dim is the one that all can be brought to.
            if math.prod(group) != 1 and len(group) >= len(groups[at]):
                groups[at] = (
                    group if groups[at] == (1,) or len(group) > len(groups[at]) else groups[at]
                )
    axes = tuple(size for group in groups for size in group)
    if axes.count(ROW) != 1:
        return None
    bodies = []
    for source in sources:
        body = _on(run, source, groups)
        if body is None:
            return None
        bodies.append(coalesce(run.build, body, axes))
    return Aligned(axes, tuple(len(group) for group in groups), tuple(bodies))


def _rank(node: Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.dim()


def _groups(run: Interpreter, value: Value, source: Node) -> list[tuple[int, ...]] | None:
    rows = value if isinstance(value, Rows) else run.as_rows(source)
    if rows is not None:
        return [tuple(rows.axes[axis] for axis in rows.group(dim)) for dim in range(len(rows.dims))]
    tensor = tensor_of(source)
    if not isinstance(value, Fixed) or tensor is None:
        return None
    sizes = [run.rows.factor(size) for size in tensor.shape]
    return [(size[0],) for size in sizes if size is not None]


def _on(run: Interpreter, source: Node, groups: Sequence[tuple[int, ...]]) -> Body | None:
    rows = run.as_rows(source)
    total = sum(len(group) for group in groups)
    if rows is None:
        tensor = tensor_of(source)
        if not isinstance(run.values[source], Fixed) or tensor is None:
            return None
        shape = [run.rows.factor(size) for size in tensor.shape]
        if any(size is None or size[1] for size in shape):
            return None
        node = run.fixed(source, Level.FIXED)
        sizes = [size[0] for size in shape if size is not None]
        if total == len(groups):
            return Total((fixed_leaf(run.build, node, sizes, total),))
        behind = groups[len(groups) - len(sizes) :]
        full: list[int] = []
        for size, group in zip(sizes, behind, strict=True):
            if size == 1:
                full += [1] * len(group)
            elif ROW not in group and math.prod(group) == size:
                full += group
            else:
                return None
        return (
            Total((fixed_leaf(run.build, node, full, total),))
            if len(full) == len(sizes)
            else Total(
                (
                    Leaf(
                        run.build.reshape(node, (*(1,) * (total - len(full)), *full)),
                        Level.FIXED,
                        (*(1,) * (total - len(full)), *full),
                    ),
                )
            )
        )
    return _regroup(run.build, rows, groups)


def _regroup(build: Builder, rows: Rows, groups: Sequence[tuple[int, ...]]) -> Body | None:
    body, axes = rows.body, list(rows.axes)
    missing = len(groups) - len(rows.dims)
    at = 0
    for number, group in enumerate(groups):
        own: tuple[int, ...] = ()
        if number >= missing:
            dim = number - missing
            own = tuple(rows.axes[axis] for axis in rows.group(dim))
        if own == group:
            at += len(group)
            continue
        if math.prod(own) == 1:
            for _ in range(len(group) - len(own)):
                body = insert_axis(build, body, at)
                axes.insert(at, 1)
            at += len(group)
            continue
        if len(own) != 1 or len(group) != 2 or ROW in group or math.prod(group) != own[0]:
            return None
        cut = split_axis(build, body, at, (group[0], group[1]))
        if cut is None:
            return None
        body = cut
        axes[at : at + 1] = group
        at += 2
    return body


def zip_bodies(
    build: Builder,
    bodies: Sequence[Body],
    axes: Axes,
    on_leaves: OnLeaves,
    known: Known | None,
) -> Body:
    """Apply an operator on entries part by part.

    Where all parts end up with the candidates, and none is known, it is applied to the whole.
    """
    value = known.constant() if known is not None else None
    if value is not None:
        return Fill(value)
    axis = _joined_axis(bodies, axes)
    if axis is None:
        return on_leaves(bodies, axes)
    pieces = []
    for places in refine(bodies, axis, axes[axis]):
        parts = [take(build, body, axis, places) for body in bodies]
        rest = known.take(axis, places) if known is not None else None
        own = sized(axes, axis, len(places))
        pieces.append(Piece(places, zip_bodies(build, parts, own, on_leaves, rest)))
    body = joined(axis, axes[axis], pieces)
    if _all_of_candidates(body):
        return on_leaves([Total((solid(build, each, axes),)) for each in bodies], axes)
    return body


def _joined_axis(bodies: Sequence[Body], axes: Axes) -> int | None:
    """Return an axis that some body is joined along and none is merely repeated along."""
    return next((body.axis for body in bodies if isinstance(body, Joined)), None)


def _all_of_candidates(body: Body) -> bool:
    return not has_fill(body) and all(leaf.level == Level.CANDIDATE for leaf in leaves_of(body))


def _by_operator(run: Interpreter, node: Node, sources: Sequence[Node]) -> OnLeaves:
    target: Any = node.target

    def on_leaves(bodies: Sequence[Body], axes: Axes) -> Body:
        leaves = [solid(run.build, body, axes) for body in bodies]
        level = max(leaf.level for leaf in leaves)
        placed = {
            source: at_level(run.build, leaf, level).node
            for source, leaf in zip(sources, leaves, strict=True)
        }
        made = run.build.call(
            target,
            *map_arg(node.args, placed.__getitem__),
            **map_arg(node.kwargs, placed.__getitem__),
        )
        return Total((Leaf(made, level, _broadcast([leaf.sizes for leaf in leaves])),))

    return on_leaves


def _broadcast(shapes: Sequence[Axes]) -> Axes:
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True)
    )


def _additions(run: Interpreter, node: Node, sources: Sequence[Node]) -> OnLeaves | None:
    """Return how a sum, a difference or a multiple of operands is left open; None for others."""
    scales = _scales(node, sources)
    if scales is None:
        return None

    at_once = _by_operator(run, node, sources)

    def on_leaves(bodies: Sequence[Body], axes: Axes) -> Body:
        given = [leaf for body in bodies for leaf in leaves_of(body)]
        # Beside a candidates' term of full size a layer behind has nothing to gain from the others.
        if any(leaf.level == Level.CANDIDATE and leaf.sizes == axes for leaf in given) or not (
            {leaf.level for leaf in given} >= {Level.REQUEST, Level.CANDIDATE}
        ):
            return at_once(bodies, axes)
        leaves: list[Leaf] = []
        for body, scale in zip(bodies, scales, strict=True):
            part = body if isinstance(body, Total) else Total((solid(run.build, body, axes),))
            leaves += [replace(leaf, scale=leaf.scale * scale) for leaf in part.leaves]
        return sum_of(run.build, leaves)

    return on_leaves


def sum_of(build: Builder, leaves: Sequence[Leaf]) -> Body:
    """Add up what has the same rows and the same sizes, and leave the rest open."""
    groups: dict[tuple[Level, Axes], list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault((leaf.level, leaf.sizes), []).append(leaf)
    added = []
    for group in groups.values():
        one = group[0]
        if len(group) > 1:
            scaled = [_scaled(build, leaf) for leaf in group]
            one = scaled[0]
            for other in scaled[1:]:
                one = add_leaves(build, one, other)
        added.append(one)
    return Total(tuple(added))


def _scaled(build: Builder, leaf: Leaf) -> Leaf:
    if leaf.scale == 1.0:
        return leaf
    return replace(leaf, node=build.call(aten.mul.Tensor, leaf.node, leaf.scale), scale=1.0)


def _scales(node: Node, sources: Sequence[Node]) -> list[float] | None:
    tensor = tensor_of(node)
    if tensor is None or not tensor.is_floating_point():
        return None
    if node.target == aten.neg.default:
        return [-1.0]
    if node.target not in (aten.add.Tensor, aten.sub.Tensor):
        return None
    named = schema_values(node)
    left, right, alpha = named["self"], named["other"], named["alpha"]
    if not isinstance(left, Node) or not isinstance(right, Node) or left is right:
        return None
    if any((value := tensor_of(each)) is None or value.dtype != tensor.dtype for each in sources):
        return None
    sign = 1.0 if node.target == aten.add.Tensor else -1.0
    return [1.0 if source is left else sign * alpha for source in sources]
