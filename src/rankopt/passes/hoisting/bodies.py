"""Values in two parts: what a request decides once, and what each candidate adds.

A tensor of the plain graph becomes a body over logical axes, one of which counts rows. A body is a
sum of leaves, a constant, or other bodies put side by side along an axis other than that of rows.
Nothing is computed before an operator needs it whole.

Shapes: R requests, B candidates; the axis of rows has R or B entries by a leaf's level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch.fx import Node

from rankopt.passes.graph import aten
from rankopt.passes.hoisting.builder import Builder

ROW = -1
"""Stands for the size of the axis of rows."""


class Level(IntEnum):
    """What a value has a row for: nothing, each request, each candidate."""

    FIXED = 0
    REQUEST = 1
    CANDIDATE = 2


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the new graph.

    Attributes:
        node: one dim per logical axis.
        level: who has rows of it.
        sizes: its dims: ROW, a size, or 1 where it is the same along the axis.
        scale: what it is multiplied by.
    """

    node: Node
    level: Level
    sizes: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class Total:
    """The sum of leaves, requests' rows standing for those of their candidates."""

    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, eq=False)
class Fill:
    """The same value everywhere, known without running anything."""

    value: float | bool


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a joined body, and the places along the axis that it fills."""

    positions: tuple[int, ...]
    body: Body


@dataclass(frozen=True, eq=False)
class Joined:
    """Bodies side by side along an axis; together they fill each place once."""

    axis: int
    pieces: tuple[Piece, ...]


Body = Total | Fill | Joined
Axes = tuple[int, ...]


def level_of(body: Body) -> Level:
    """Return the highest level of a body's leaves."""
    if isinstance(body, Total):
        return max((leaf.level for leaf in body.leaves), default=Level.FIXED)
    if isinstance(body, Joined):
        return max(level_of(piece.body) for piece in body.pieces)
    return Level.FIXED


def leaves_of(body: Body) -> list[Leaf]:
    """List the leaves of a body."""
    if isinstance(body, Total):
        return list(body.leaves)
    if isinstance(body, Joined):
        return [leaf for piece in body.pieces for leaf in leaves_of(piece.body)]
    return []


def has_fill(body: Body) -> bool:
    """Tell whether some part of a body is known."""
    if isinstance(body, Joined):
        return any(has_fill(piece.body) for piece in body.pieces)
    return isinstance(body, Fill)


def is_whole(body: Body, axes: Axes) -> bool:
    """Tell whether a body is one leaf that holds every entry."""
    if not isinstance(body, Total) or len(body.leaves) != 1:
        return False
    leaf = body.leaves[0]
    return leaf.scale == 1.0 and leaf.sizes == axes


def joined(axis: int, size: int, pieces: Iterable[Piece]) -> Body:
    """Put bodies side by side; nested ones along the same axis become one."""
    flat: list[Piece] = []
    for piece in pieces:
        if isinstance(piece.body, Joined) and piece.body.axis == axis:
            flat += [
                Piece(tuple(piece.positions[at] for at in inner.positions), inner.body)
                for inner in piece.body.pieces
            ]
        elif piece.positions:
            flat.append(piece)
    if len(flat) == 1 and flat[0].positions == tuple(range(size)):
        return flat[0].body
    return Joined(axis, tuple(flat))


def sized(axes: Axes, axis: int, size: int) -> Axes:
    """Return axes with another size in one place."""
    return (*axes[:axis], size, *axes[axis + 1 :])


def map_leaves(body: Body, change: Callable[[Leaf], Leaf]) -> Body:
    """Change every leaf; axes stay where they are."""
    if isinstance(body, Total):
        return Total(tuple(change(leaf) for leaf in body.leaves))
    if isinstance(body, Joined):
        pieces = [Piece(p.positions, map_leaves(p.body, change)) for p in body.pieces]
        return Joined(body.axis, tuple(pieces))
    return body


def take(build: Builder, body: Body, axis: int, positions: Sequence[int]) -> Body:
    """Return the entries at some places of an axis, in that order."""
    wanted = tuple(positions)
    if isinstance(body, Total):
        return Total(tuple(_take_leaf(build, leaf, axis, wanted) for leaf in body.leaves))
    if isinstance(body, Fill):
        return body
    if body.axis != axis:
        pieces = [Piece(p.positions, take(build, p.body, axis, wanted)) for p in body.pieces]
        return Joined(body.axis, tuple(pieces))
    home = {
        place: (index, at)
        for index, piece in enumerate(body.pieces)
        for at, place in enumerate(piece.positions)
    }
    parts: dict[int, list[tuple[int, int]]] = {}
    for target, place in enumerate(wanted):
        index, at = home[place]
        parts.setdefault(index, []).append((target, at))
    return joined(
        axis,
        len(wanted),
        [
            Piece(
                tuple(target for target, _ in found),
                take(build, body.pieces[index].body, axis, [at for _, at in found]),
            )
            for index, found in parts.items()
        ],
    )


def _take_leaf(build: Builder, leaf: Leaf, axis: int, positions: tuple[int, ...]) -> Leaf:
    size = leaf.sizes[axis]
    if size == 1 or positions == tuple(range(size)):
        return leaf
    node = build.take(leaf.node, axis, positions)
    return replace(leaf, node=node, sizes=sized(leaf.sizes, axis, len(positions)))


def permute(build: Builder, body: Body, order: Sequence[int]) -> Body:
    """Return the body with its axes in another order: the new axis i is the old `order[i]`."""
    if isinstance(body, Joined):
        pieces = [Piece(p.positions, permute(build, p.body, order)) for p in body.pieces]
        return Joined(list(order).index(body.axis), tuple(pieces))

    def change(leaf: Leaf) -> Leaf:
        node = build.call(aten.permute.default, leaf.node, list(order))
        return replace(leaf, node=node, sizes=tuple(leaf.sizes[axis] for axis in order))

    return map_leaves(body, change)


def insert_axis(build: Builder, body: Body, at: int) -> Body:
    """Return the body with an axis of size 1 at a place."""
    if isinstance(body, Joined):
        pieces = [Piece(p.positions, insert_axis(build, p.body, at)) for p in body.pieces]
        return Joined(body.axis + (body.axis >= at), tuple(pieces))

    def change(leaf: Leaf) -> Leaf:
        node = build.call(aten.unsqueeze.default, leaf.node, at)
        return replace(leaf, node=node, sizes=(*leaf.sizes[:at], 1, *leaf.sizes[at:]))

    return map_leaves(body, change)


def remove_axis(build: Builder, body: Body, at: int) -> Body:
    """Return the body without an axis of size 1."""
    if isinstance(body, Joined):
        pieces = [Piece(p.positions, remove_axis(build, p.body, at)) for p in body.pieces]
        return Joined(body.axis - (body.axis > at), tuple(pieces))

    def change(leaf: Leaf) -> Leaf:
        node = build.call(aten.squeeze.dim, leaf.node, at)
        return replace(leaf, node=node, sizes=(*leaf.sizes[:at], *leaf.sizes[at + 1 :]))

    return map_leaves(body, change)


def split_axis(build: Builder, body: Body, at: int, sizes: tuple[int, int]) -> Body | None:
    """Return the body with an axis cut into an outer and an inner one; None where it is joined."""
    if isinstance(body, Joined):
        if body.axis == at:
            return None
        pieces = []
        for piece in body.pieces:
            inner = split_axis(build, piece.body, at, sizes)
            if inner is None:
                return None
            pieces.append(Piece(piece.positions, inner))
        return Joined(body.axis + (body.axis > at), tuple(pieces))

    def change(leaf: Leaf) -> Leaf:
        new = sizes if leaf.sizes[at] != 1 else (1, 1)
        shape = (*leaf.sizes[:at], *new, *leaf.sizes[at + 1 :])
        return replace(leaf, node=build.reshape(leaf.node, shape), sizes=shape)

    return map_leaves(body, change)


def merge_axes(build: Builder, body: Body, axes: Axes, first: int, count: int) -> Body:
    """Return the body with neighbouring axes, none of rows, made one."""
    group = axes[first : first + count]
    total = math.prod(group)
    if isinstance(body, Joined):
        inside = first <= body.axis < first + count
        pieces = []
        for piece in body.pieces:
            own = sized(axes, body.axis, len(piece.positions))
            merged = merge_axes(build, piece.body, own, first, count)
            places = piece.positions
            if inside:
                grid = np.arange(total).reshape(group)
                places = tuple(np.take(grid, places, body.axis - first).reshape(-1).tolist())
            pieces.append(Piece(places, merged))
        if inside:
            return joined(first, total, pieces)
        shift = count - 1 if body.axis >= first + count else 0
        return Joined(body.axis - shift, tuple(pieces))

    def change(leaf: Leaf) -> Leaf:
        own = leaf.sizes[first : first + count]
        node, size = leaf.node, 1
        if any(each != 1 for each in own):
            full = (*leaf.sizes[:first], *group, *leaf.sizes[first + count :])
            node, size = build.expand(node, leaf.sizes, full), total
        sizes = (*leaf.sizes[:first], size, *leaf.sizes[first + count :])
        return replace(leaf, node=build.reshape(node, sizes), sizes=sizes)

    return map_leaves(body, change)


def solid(build: Builder, body: Body, axes: Axes, level: Level | None = None) -> Leaf:
    """Compute a body as one leaf that may still be the same along some axes.

    Args:
        build: the new graph.
        body: what to compute.
        axes: its sizes.
        level: whose rows; its own when None.
    """
    wanted = level_of(body) if level is None else max(level, level_of(body))
    if isinstance(body, Fill):
        ones = (1,) * len(axes)
        return Leaf(build.fill(body.value, len(axes)), Level.FIXED, ones)
    if isinstance(body, Total):
        return _solid_total(build, body, wanted)
    merged = coalesce(build, body, axes)
    if not isinstance(merged, Joined):
        return solid(build, merged, axes, wanted)
    pieces = []
    for piece in merged.pieces:
        own = sized(axes, merged.axis, len(piece.positions))
        pieces.append((piece, solid(build, piece.body, own, wanted)))
    level_here = Level.CANDIDATE if wanted == Level.CANDIDATE else wanted
    shape = list(_widest([leaf.sizes for _, leaf in pieces]))
    nodes = []
    for piece, leaf in pieces:
        own = sized(tuple(shape), merged.axis, len(piece.positions))
        nodes.append(_whole_node(build, leaf, own, level_here))
    places = [place for piece in merged.pieces for place in piece.positions]
    node = build.join(nodes, merged.axis, places)
    return Leaf(node, level_here, sized(tuple(shape), merged.axis, axes[merged.axis]))


def _widest(shapes: Sequence[Axes]) -> Axes:
    """Broadcast sizes against each other."""
    return tuple(
        next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes, strict=True)
    )


def _whole_node(build: Builder, leaf: Leaf, shape: Axes, level: Level) -> Node:
    """Return a leaf's node at a level, as large as `shape`."""
    node = at_level(build, leaf, level).node
    return build.expand(node, leaf.sizes, shape, candidate=level == Level.CANDIDATE)


def at_level(build: Builder, leaf: Leaf, level: Level) -> Leaf:
    """Give each candidate its request's row where the level asks for it."""
    if leaf.level != Level.REQUEST or level != Level.CANDIDATE or ROW not in leaf.sizes:
        return leaf
    node = build.gather(leaf.node, leaf.sizes.index(ROW))
    return replace(leaf, node=node, level=Level.CANDIDATE)


def _solid_total(build: Builder, body: Total, level: Level) -> Leaf:
    """Add leaves up, requests' first, so that they are gathered once."""
    done: Leaf | None = None
    for leaf in sorted(body.leaves, key=lambda each: each.level):
        scaled = leaf
        if leaf.scale != 1.0:
            node = build.call(aten.mul.Tensor, leaf.node, leaf.scale)
            scaled = replace(leaf, node=node, scale=1.0)
        done = scaled if done is None else add_leaves(build, done, scaled)
    if done is None:
        raise ValueError("a sum without terms")
    return at_level(build, done, level)


def add_leaves(build: Builder, left: Leaf, right: Leaf) -> Leaf:
    """Add two leaves at the higher of their levels."""
    level = max(left.level, right.level)
    nodes = [at_level(build, leaf, level).node for leaf in (left, right)]
    return Leaf(build.call(aten.add.Tensor, *nodes), level, _widest([left.sizes, right.sizes]))


def coalesce(build: Builder, body: Body, axes: Axes) -> Body:
    """Join pieces of the same level, so that at most one of each is left."""
    if not isinstance(body, Joined):
        return body
    groups: dict[object, list[Piece]] = {}
    for number, piece in enumerate(body.pieces):
        own = sized(axes, body.axis, len(piece.positions))
        inner = coalesce(build, piece.body, own)
        key: object = level_of(inner) if isinstance(inner, Total) else ("alone", number)
        if isinstance(inner, Fill):
            key = ("fill", inner.value)
        groups.setdefault(key, []).append(Piece(piece.positions, inner))
    pieces = [_join_group(build, body.axis, axes, group) for group in groups.values()]
    pieces.sort(key=lambda piece: piece.positions)
    return joined(body.axis, axes[body.axis], pieces)


def _join_group(build: Builder, axis: int, axes: Axes, group: list[Piece]) -> Piece:
    if len(group) == 1:
        return group[0]
    places = tuple(place for piece in group for place in piece.positions)
    if isinstance(group[0].body, Fill):
        return Piece(tuple(sorted(places)), group[0].body)
    leaves = [solid(build, piece.body, sized(axes, axis, len(piece.positions))) for piece in group]
    shape = _widest([leaf.sizes for leaf in leaves])
    nodes = [
        _whole_node(build, leaf, sized(shape, axis, len(piece.positions)), leaf.level)
        for piece, leaf in zip(group, leaves, strict=True)
    ]
    node = build.call(aten.cat.default, nodes, axis)
    leaf = Leaf(node, leaves[0].level, sized(shape, axis, len(places)))
    return Piece(places, Total((leaf,)))


def refine(bodies: Sequence[Body], axis: int, size: int) -> list[tuple[int, ...]]:
    """Cut an axis so that each part lies in one piece of every body joined along it."""
    keys: list[list[int]] = [[] for _ in range(size)]
    for body in bodies:
        if isinstance(body, Joined) and body.axis == axis:
            owner: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
            for number, piece in enumerate(body.pieces):
                owner[list(piece.positions)] = number
            for place in range(size):
                keys[place].append(int(owner[place]))
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(tuple(key), []).append(place)
    return [tuple(places) for places in groups.values()]


def fixed_leaf(build: Builder, node: Node, shape: Sequence[int], rank: int) -> Leaf:
    """Return a tensor without rows as a leaf of a given rank, aligned to the right."""
    sizes = (*(1,) * (rank - len(shape)), *shape)
    return Leaf(build.reshape(node, sizes) if rank != len(shape) else node, Level.FIXED, sizes)


def is_float(node: Node) -> bool:
    """Tell whether a node of the plain graph holds floats of 32 bits."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32
