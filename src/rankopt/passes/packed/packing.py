"""The rewrite of one rectangle: what is known of the graph's values, and what to emit beside them.

Shapes: as in `packed`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake
from rankopt.passes.packed.values import Packed, PackingError, Value
from rankopt.passes.rectangles import Rectangle

EXPANDS = {aten.expand.default, aten.expand_as.default, aten.repeat.default}


class Packing:
    """What those that follow operators share.

    Attributes:
        module, emitter, rectangle: what is rewritten, and for which ids.
        values: what the nodes that read the rectangle are over packed tokens.
        notes: what was done, one sentence per attention.
    """

    def __init__(self, module: GraphModule, emitter: Emitter, rectangle: Rectangle) -> None:
        self.module = module
        self.emitter = emitter
        self.rectangle = rectangle
        self.values: dict[Node, Value] = {}
        self.notes: list[str] = []
        self._row_index: Node | None = None
        self._places: Node | None = None

    def unknown(self, node: Node) -> PackingError:
        kind = str(node.target).removeprefix("aten.").partition(".")[0]
        return PackingError(f"{node.name} ({kind}) is not known to treat places alike")

    def packed(self, node: object, reader: Node) -> Packed:
        value = self.values.get(node) if isinstance(node, Node) else None
        if not isinstance(value, Packed):
            raise self.unknown(reader)
        return value

    def each(self, packed: Packed, make: Callable[[Node], Node]) -> Packed:
        own = None if packed.own is None else make(packed.own)
        return replace(packed, tokens=make(packed.tokens), own=own, of_rows=None, fill=None)

    def known(self, node: object) -> Value | None:
        return self.values.get(node) if isinstance(node, Node) else None

    def operand(self, side: object, like: Packed, node: Node) -> Any:
        """Return what stands beside packed tokens: packed too, a number, or features alone."""
        known = self.known(side)
        if isinstance(known, Packed):
            if (known.own is None) != (like.own is None) or known.num_before != like.num_before:
                raise self.unknown(node)
            return known
        if known is not None:
            raise self.unknown(node)
        if not isinstance(side, Node) or fake(side).dim() == 0:
            return side
        by_place = self._by_place(side, like) if not self.is_flat(node) else None
        if by_place is not None:
            return by_place
        if constant(self.module, side) is not None and fake(side).dim() == 1:
            if fake(node).dim() != (2 if self.is_flat(node) else 3):
                raise self.unknown(node)
            return side
        repeated = self.rows_of(side)
        if repeated is None:
            raise self.unknown(node)
        return self.repeat(repeated, like, node)

    def rows_of(self, node: Node) -> Node | None:
        """Return the [B, width] that a [B, 1, width] or [B, S, width] repeats; None without."""
        while node.target in EXPANDS and isinstance(node.args[0], Node):
            node = arguments(node)[0]
        shape = fake(node).shape
        if len(shape) != 3 or shape[1] != 1:
            return None
        if node.target is aten.unsqueeze.default and arguments(node)[1] in (1, -2):
            rows: Node = arguments(node)[0]
            return rows
        return self.emitter.call(aten.squeeze.dim, node, 1)

    def repeat(self, rows: Node, like: Packed, node: Node) -> Packed:
        if like.num_before or like.own is not None:
            raise self.unknown(node)
        tokens = self.emitter.call(aten.index_select.default, rows, 0, self._rows_of_tokens())
        return Packed(tokens, of_rows=rows)

    def _rows_of_tokens(self) -> Node:
        if self._row_index is None:
            ragged = self.rectangle.ragged
            self._row_index = self.emitter.call(
                torch.ops.rankopt.ragged_rows.default, ragged.lengths, ragged.values
            )
        return self._row_index

    def _by_place(self, side: Node, like: Packed) -> Packed | None:
        """Return each token's row of a constant [S, width] that is added by place; None without."""
        shape = tuple(fake(side).shape)
        if constant(self.module, side) is None or shape[:-1] not in (
            (self.num_places(like),),
            (1, self.num_places(like)),
        ):
            return None
        if like.num_before:
            raise PackingError(f"{side.name} differs by place, and tokens stand before the ids")
        call = self.emitter.call
        table = side if len(shape) == 2 else call(aten.select.int, side, 0, 0)
        tokens = call(aten.index_select.default, table, 0, self._places_of_tokens())
        own = None if like.own is None else call(aten.select.int, table, 0, shape[-2] - 1)
        return Packed(tokens, own)

    def _places_of_tokens(self) -> Node:
        """Emit where each id stands in its row; those that do not count stand anywhere."""
        if self._places is None:
            call, ragged, slots = (
                self.emitter.call,
                self.rectangle.ragged,
                self.rectangle.num_slots,
            )
            ones = call(aten.ones_like.default, ragged.values, dtype=torch.int64)
            nth = call(aten.cumsum.default, ones, 0)
            ends = call(aten.cumsum.default, ragged.lengths, 0)
            if not self.rectangle.align_right:
                kept = call(aten.clamp.default, ragged.lengths, None, slots)
                ends = call(aten.add.Tensor, call(aten.sub.Tensor, ends, kept), slots)
            of_row = call(aten.index_select.default, ends, 0, self._rows_of_tokens())
            place = call(aten.add.Tensor, call(aten.sub.Tensor, nth, of_row), slots - 1)
            self._places = call(aten.clamp.default, place, 0, slots - 1)
        return self._places

    def is_flat(self, node: Node) -> bool:
        """Tell [B * S, width] from [B, S, ...]."""
        return str(fake(node).shape[0]) != str(self.num_rows)

    @property
    def num_rows(self) -> Any:
        return fake(self.rectangle.ragged.lengths).shape[0]

    def features(self, node: Node) -> tuple[Any, ...]:
        """Return the sizes of a token's features."""
        return tuple(fake(node).shape[1 if self.is_flat(node) else 2 :])

    def require_vector(self, node: Node, reader: Node) -> None:
        if len(self.features(node)) != 1:
            raise self.unknown(reader)

    def num_places(self, packed: Packed) -> int:
        return packed.num_before + self.rectangle.num_slots + (packed.own is not None)


Follow = Callable[[Packing, Node], Value | Node]
"""Follows one operator: returns its value over packed tokens, or a node that takes its place."""
