"""Follow a rectangle of ragged ids through a graph and compute its present tokens only.

Every operator that treats tokens alike is emitted a second time on packed rows: no row for a place
without an id, so nothing is computed there. Where tokens meet, in attention and in sums, an
operator that knows the lengths takes over. What is not understood refuses the whole rectangle, so a
rewrite never mixes the two forms.

Shapes: B rows, C context tokens before the ids, H places for ids, S = C + H + 1 positions when a
token of the candidate's own follows, T packed tokens (B * C + L ids), A heads, K width of a head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import GraphModule, Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake, schema_values
from rankopt.passes.packed_values import (
    Flags,
    Heads,
    Masked,
    Packed,
    PackingError,
    Pairs,
    Scores,
    Slices,
    Value,
)
from rankopt.passes.rectangles import Rectangle, masks_absent, masks_pairs, shows_earlier
from rankopt.passes.target import fuse_target

_UNARY = {
    aten.silu.default,
    aten.relu.default,
    aten.sigmoid.default,
    aten.tanh.default,
    aten.gelu.default,
    aten.neg.default,
    aten.square.default,
    aten.leaky_relu.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.hardtanh.default,
    aten.elu.default,
    aten.to.dtype,
}
_NOT = {aten.bitwise_not.default, aten.logical_not.default}
_AND = {aten.bitwise_and.Tensor, aten.logical_and.default, aten.__and__.Tensor}
_BINARY = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
_RESHAPES = {
    aten.reshape.default,
    aten.view.default,
    aten.flatten.using_ints,
    aten.view_as.default,
    aten.squeeze.dim,
}
_EXPANDS = {aten.expand.default, aten.expand_as.default, aten.repeat.default}


class Packer:
    """Rewrites what one rectangle feeds.

    Attributes:
        notes: what was done, one sentence per attention.
    """

    def __init__(self, module: GraphModule, emitter: Emitter, rectangle: Rectangle) -> None:
        self.notes: list[str] = []
        self._module = module
        self._emitter = emitter
        self._rectangle = rectangle
        self._values: dict[Node, Value] = {}
        self._results: list[tuple[Node, Node]] = []
        self._row_index: Node | None = None
        self._places: Node | None = None

    def run(self) -> None:
        """Rewrite the graph.

        Raises:
            PackingError: something that reads the rectangle is not understood; the graph computes
                what it did before.
        """
        ragged = self._rectangle.ragged
        self._values[self._rectangle.node] = Packed(ragged.values, fill=self._rectangle.fill)
        ends: set[Node] = set()
        checks: list[Node] = []
        for node in list(self._module.graph.nodes):
            read = [each for each in node.all_input_nodes if each in self._values]
            if node.op == "output" and read:
                raise PackingError("the graph returns the states of its places")
            if not read or node in self._values or node.target is aten.sym_size.int:
                continue
            if node.target is aten._assert_tensor_metadata.default:
                checks.append(node)
                continue
            with self._emitter.before(node):
                done = self._apply(node)
            if isinstance(done, Node):
                self._results.append((node, done))
                ends.add(node)
            else:
                self._values[node] = done
        if not ends or not self.notes:
            raise PackingError("no attention and no masked sum reads it")
        for old, new in self._results:
            self._emitter.replace(old, new)
        for check in checks:  # of what is gone; it would stay for their sake
            self._module.graph.erase_node(check)

    def _apply(self, node: Node) -> Value | Node:
        handlers: Sequence[tuple[Callable[[Any], bool], Callable[[Node], Value | Node]]] = (
            (lambda t: t is aten.embedding.default, self._embedding),
            (lambda t: t in _UNARY or t is aten.prelu.default, self._unary),
            (lambda t: t in {aten.eq.Scalar, aten.ne.Scalar}, self._flag),
            (lambda t: t in _NOT, self._negate),
            (lambda t: t in _AND, self._both),
            (lambda t: t in _BINARY, self._binary),
            (lambda t: t is aten.slice.Tensor, self._slice),
            (lambda t: t is aten.linear.default, self._linear),
            (lambda t: t is aten.layer_norm.default, self._layer_norm),
            (lambda t: t is aten.batch_norm.default, self._batch_norm),
            (lambda t: t is aten.cat.default, self._cat),
            (lambda t: t in {aten.chunk.default, aten.split.Tensor}, self._split),
            (lambda t: t is operator.getitem, self._part),
            (lambda t: t in _RESHAPES, self._reshape),
            (lambda t: t in _EXPANDS, self._expand),
            (lambda t: t in {aten.transpose.int, aten.permute.default}, self._turn),
            (lambda t: t in {aten.matmul.default, aten.bmm.default}, self._product),
            (lambda t: t is aten.masked_fill.Scalar, self._mask),
            (lambda t: t is aten.unsqueeze.default, self._unsqueeze),
            (lambda t: t is aten.select.int, self._select),
        )
        for matches, handle in handlers:
            if matches(node.target):
                return handle(node)
        raise self._unknown(node)

    def _unknown(self, node: Node) -> PackingError:
        kind = str(node.target).removeprefix("aten.").partition(".")[0]
        return PackingError(f"{node.name} ({kind}) is not known to treat places alike")

    def _packed(self, node: object, reader: Node) -> Packed:
        value = self._values.get(node) if isinstance(node, Node) else None
        if not isinstance(value, Packed):
            raise self._unknown(reader)
        return value

    def _each(self, packed: Packed, make: Callable[[Node], Node]) -> Packed:
        own = None if packed.own is None else make(packed.own)
        return replace(packed, tokens=make(packed.tokens), own=own, of_rows=None, fill=None)

    # Operators that treat tokens alike.

    def _embedding(self, node: Node) -> Value:
        table, ids, *rest = node.args
        if constant(self._module, table) is None:
            raise self._unknown(node)
        packed = self._packed(ids, node)
        return self._each(packed, lambda t: self._emitter.call(node.target, table, t, *rest))

    def _unary(self, node: Node) -> Value:
        value = self._values[arguments(node)[0]]
        if isinstance(value, Scores):
            ready = value.causal is None or value.seen is not None
            if node.target is not aten.silu.default or value.activated or not ready:
                raise self._unknown(node)
            return replace(value, activated=True)
        packed = self._packed(arguments(node)[0], node)
        if node.target is aten.prelu.default:
            slope = constant(self._module, arguments(node)[1])
            # A slope per channel would read dim 1, which is the place in a rectangle.
            if slope is None or (slope.numel() > 1 and fake(node).dim() != 2):
                raise self._unknown(node)
        rest = node.args[1:]
        made = self._each(
            packed, lambda t: self._emitter.call(node.target, t, *rest, **node.kwargs)
        )
        whole = fake(node).dtype in {torch.int32, torch.int64}
        return replace(made, fill=packed.fill) if node.target is aten.to.dtype and whole else made

    def _flag(self, node: Node) -> Value:
        """Compare ids with one id."""
        source, number = arguments(node)[:2]
        packed = self._packed(source, node)
        if packed.fill is None:
            raise self._unknown(node)
        flags = self._each(packed, lambda t: self._emitter.call(node.target, t, number))
        return Flags(flags, (packed.fill == number) is (node.target is aten.eq.Scalar))

    def _negate(self, node: Node) -> Value:
        value = self._values[arguments(node)[0]]
        if isinstance(value, Pairs):
            return replace(value, hides=not value.hides)
        if not isinstance(value, Flags):
            raise self._unknown(node)
        flags = self._each(value.packed, lambda t: self._emitter.call(node.target, t))
        return Flags(flags, not value.absent)

    def _both(self, node: Node) -> Value:
        """Show a key where it is shown, and to those after it alone."""
        left, right = arguments(node)[:2]
        pairs, other = (left, right) if left in self._values else (right, left)
        value = self._known(pairs)
        if not isinstance(value, Pairs) or value.hides or other in self._values:
            raise self._unknown(node)
        places = self._num_places(value.keys.packed)
        if not shows_earlier(self._rectangle, other, places):
            raise self._unknown(node)
        return replace(value, causal=True)

    def _slice(self, node: Node) -> Value:
        source = arguments(node)[0]
        packed = self._packed(source, node)
        self._require_vector(source, node)
        dim, *bounds = (*arguments(node)[1:], None, None, None)[:4]
        if int(dim) % fake(source).dim() != fake(source).dim() - 1 or bounds[2] not in (None, 1):
            raise self._unknown(node)
        return self._each(
            packed, lambda t: self._emitter.call(node.target, t, 1, bounds[0], bounds[1])
        )

    def _binary(self, node: Node) -> Value:
        left, right = arguments(node)[:2]
        for value in (self._known(left), self._known(right)):
            if isinstance(value, Scores):
                return self._on_scores(node, value)
        if node.kwargs:
            raise self._unknown(node)
        like = next(v for v in (self._known(left), self._known(right)) if v is not None)
        if not isinstance(like, Packed):
            raise self._unknown(node)
        sides = [self._operand(side, like, node) for side in (left, right)]

        def made(pick: Callable[[Packed], Any]) -> Node:
            picked = [pick(side) if isinstance(side, Packed) else side for side in sides]
            return self._emitter.call(node.target, *picked)

        tokens = made(lambda side: side.tokens)
        own = None if like.own is None else made(lambda side: side.own)
        return Packed(tokens, own, like.num_before)

    def _known(self, node: object) -> Value | None:
        return self._values.get(node) if isinstance(node, Node) else None

    def _operand(self, side: object, like: Packed, node: Node) -> Any:
        """Return what stands beside packed tokens: packed too, a number, or features alone."""
        known = self._known(side)
        if isinstance(known, Packed):
            if (known.own is None) != (like.own is None) or known.num_before != like.num_before:
                raise self._unknown(node)
            return known
        if known is not None:
            raise self._unknown(node)
        if not isinstance(side, Node) or fake(side).dim() == 0:
            return side
        by_place = self._by_place(side, like) if not self._is_flat(node) else None
        if by_place is not None:
            return by_place
        if constant(self._module, side) is not None and fake(side).dim() == 1:
            if fake(node).dim() != (2 if self._is_flat(node) else 3):
                raise self._unknown(node)
            return side
        repeated = self._rows_of(side)
        if repeated is None:
            raise self._unknown(node)
        return self._repeat(repeated, like, node)

    def _rows_of(self, node: Node) -> Node | None:
        """Return the [B, width] that a [B, 1, width] or [B, S, width] repeats; None without."""
        while node.target in _EXPANDS and isinstance(node.args[0], Node):
            node = arguments(node)[0]
        shape = fake(node).shape
        if len(shape) != 3 or shape[1] != 1:
            return None
        if node.target is aten.unsqueeze.default and arguments(node)[1] in (1, -2):
            rows: Node = arguments(node)[0]
            return rows
        return self._emitter.call(aten.squeeze.dim, node, 1)

    def _repeat(self, rows: Node, like: Packed, node: Node) -> Packed:
        if like.num_before or like.own is not None:
            raise self._unknown(node)
        tokens = self._emitter.call(aten.index_select.default, rows, 0, self._rows_of_tokens())
        return Packed(tokens, of_rows=rows)

    def _rows_of_tokens(self) -> Node:
        if self._row_index is None:
            ragged = self._rectangle.ragged
            self._row_index = self._emitter.call(
                torch.ops.rankopt.ragged_rows.default, ragged.lengths, ragged.values
            )
        return self._row_index

    def _by_place(self, side: Node, like: Packed) -> Packed | None:
        """Return each token's row of a constant [S, width] that is added by place; None without."""
        shape = tuple(fake(side).shape)
        if constant(self._module, side) is None or shape[:-1] not in (
            (self._num_places(like),),
            (1, self._num_places(like)),
        ):
            return None
        if like.num_before:
            raise PackingError(f"{side.name} differs by place, and tokens stand before the ids")
        call = self._emitter.call
        table = side if len(shape) == 2 else call(aten.select.int, side, 0, 0)
        tokens = call(aten.index_select.default, table, 0, self._places_of_tokens())
        own = None if like.own is None else call(aten.select.int, table, 0, shape[-2] - 1)
        return Packed(tokens, own)

    def _places_of_tokens(self) -> Node:
        """Emit where each id stands in its row; those that do not count stand anywhere."""
        if self._places is None:
            call, ragged, slots = (
                self._emitter.call,
                self._rectangle.ragged,
                self._rectangle.num_slots,
            )
            ones = call(aten.ones_like.default, ragged.values, dtype=torch.int64)
            nth = call(aten.cumsum.default, ones, 0)
            ends = call(aten.cumsum.default, ragged.lengths, 0)
            if not self._rectangle.align_right:
                kept = call(aten.clamp.default, ragged.lengths, None, slots)
                ends = call(aten.add.Tensor, call(aten.sub.Tensor, ends, kept), slots)
            of_row = call(aten.index_select.default, ends, 0, self._rows_of_tokens())
            place = call(aten.add.Tensor, call(aten.sub.Tensor, nth, of_row), slots - 1)
            self._places = call(aten.clamp.default, place, 0, slots - 1)
        return self._places

    def _linear(self, node: Node) -> Value:
        packed = self._packed(arguments(node)[0], node)
        self._require_vector(arguments(node)[0], node)
        rest = node.args[1:]
        return self._each(packed, lambda t: self._emitter.call(node.target, t, *rest))

    def _layer_norm(self, node: Node) -> Value:
        packed = self._packed(arguments(node)[0], node)
        self._require_vector(arguments(node)[0], node)
        if len(arguments(node)[1]) != 1:
            raise self._unknown(node)
        rest = node.args[1:]
        return self._each(packed, lambda t: self._emitter.call(node.target, t, *rest))

    def _batch_norm(self, node: Node) -> Value:
        packed = self._packed(arguments(node)[0], node)
        if schema_values(node)["training"] or not self._is_flat(arguments(node)[0]):
            raise self._unknown(node)
        rest = node.args[1:]
        return self._each(packed, lambda t: self._emitter.call(node.target, t, *rest))

    def _is_flat(self, node: Node) -> bool:
        """Tell [B * S, width] from [B, S, ...]."""
        return str(fake(node).shape[0]) != str(self._num_rows)

    @property
    def _num_rows(self) -> Any:
        return fake(self._rectangle.ragged.lengths).shape[0]

    def _features(self, node: Node) -> tuple[Any, ...]:
        """Return the sizes of a token's features."""
        return tuple(fake(node).shape[1 if self._is_flat(node) else 2 :])

    def _require_vector(self, node: Node, reader: Node) -> None:
        if len(self._features(node)) != 1:
            raise self._unknown(reader)

    # Operators that move features or tokens.

    def _cat(self, node: Node) -> Value:
        pieces: Sequence[Any] = arguments(node)[0]
        dim = int(arguments(node)[1]) if len(node.args) > 1 else 0
        rank = fake(node).dim()
        dim = dim + rank if dim < 0 else dim
        if dim == rank - 1 and rank == (2 if self._is_flat(node) else 3):
            like = next(p for p in map(self._known, pieces) if p is not None)
            if not isinstance(like, Packed):
                raise self._unknown(node)
            sides = [self._operand(piece, like, node) for piece in pieces]
            if not all(isinstance(side, Packed) for side in sides):
                raise self._unknown(node)
            tokens = self._emitter.call(aten.cat.default, [side.tokens for side in sides], 1)
            own = None
            if like.own is not None:
                own = self._emitter.call(aten.cat.default, [side.own for side in sides], 1)
            return Packed(tokens, own, like.num_before)
        if dim == 1 and (rank == 3 or (rank == 2 and not self._is_flat(node))):
            return self._sequence(pieces, node)
        raise self._unknown(node)

    def _sequence(self, pieces: Sequence[Any], node: Node) -> Value:
        """Join context tokens, the ids and a token of the candidate's own."""
        places = [index for index, piece in enumerate(pieces) if self._known(piece) is not None]
        ids = self._packed(pieces[places[0]], node)
        if len(places) != 1 or ids.own is not None or ids.num_before:
            raise self._unknown(node)
        before, after = pieces[: places[0]], pieces[places[0] + 1 :]
        widths = [fake(piece).shape[1] for piece in (*before, *after)]
        if not all(isinstance(width, int) for width in widths) or len(after) > 1:
            raise self._unknown(node)
        if after and widths[-1] != 1:
            raise PackingError(f"{widths[-1]} places follow the ids, and one is understood")
        tokens = ids.tokens
        num_before = sum(widths[: len(before)])
        if before:
            joined = before[0] if len(before) == 1 else self._call_cat(list(before), 1)
            flat = self._emitter.call(aten.flatten.using_ints, joined, 0, 1)
            tokens = self._call_cat([flat, tokens], 0)
        own = self._emitter.call(aten.squeeze.dim, after[0], 1) if after else None
        return Packed(tokens, own, num_before, fill=ids.fill)

    def _call_cat(self, pieces: list[Node], dim: int) -> Node:
        return self._emitter.call(aten.cat.default, pieces, dim)

    def _split(self, node: Node) -> Value:
        source = arguments(node)[0]
        packed = self._packed(source, node)
        self._require_vector(source, node)
        dim = int(arguments(node)[2]) if len(node.args) > 2 else 0
        if dim not in (-1, fake(source).dim() - 1):
            raise self._unknown(node)
        bounds, at = [], 0
        for part in node.meta["val"]:
            bounds.append((at, at + int(part.shape[-1])))
            at = bounds[-1][1]
        return Slices(packed, tuple(bounds))

    def _part(self, node: Node) -> Value:
        value = self._values[arguments(node)[0]]
        if not isinstance(value, Slices):
            raise self._unknown(node)
        begin, end = value.bounds[arguments(node)[1]]
        return self._each(
            value.whole, lambda t: self._emitter.call(aten.slice.Tensor, t, 1, begin, end)
        )

    def _reshape(self, node: Node) -> Value:
        """Follow a change of form; tokens themselves stay [T, width]."""
        source = arguments(node)[0]
        if source not in self._values:
            raise self._unknown(node)
        packed = self._packed(source, node)
        shape = fake(node).shape
        flat = self._is_flat(node)
        if not flat and shape[1] != self._num_places(packed):
            raise self._unknown(node)
        if flat and str(shape[0]) != str(self._num_rows * self._num_places(packed)):
            raise self._unknown(node)
        before, after = self._features(source), self._features(node)
        if prod(before) != prod(after):
            raise self._unknown(node)
        if bool(before) == bool(after):
            return packed
        shape_of = [-1] if not after else [-1, prod(after)]
        return self._each(packed, lambda t: self._emitter.call(aten.reshape.default, t, shape_of))

    def _num_places(self, packed: Packed) -> int:
        return packed.num_before + self._rectangle.num_slots + (packed.own is not None)

    def _expand(self, node: Node) -> Value:
        """Follow rows that are repeated to the size of packed tokens."""
        source = arguments(node)[0]
        like = self._known(arguments(node)[1]) if node.target is aten.expand_as.default else None
        if source in self._values or not isinstance(like, Packed):
            raise self._unknown(node)
        rows = self._rows_of(node)
        if rows is None or fake(node).shape[1] != self._num_places(like):
            raise self._unknown(node)
        return self._repeat(rows, like, node)

    # Attention.

    def _turn(self, node: Node) -> Value:
        source = arguments(node)[0]
        value = self._values[source]
        axes = _axes(node)
        if isinstance(value, Heads):
            if axes == (0, 1, 3, 2):
                return replace(value, turned=not value.turned)
            if axes == (0, 2, 1, 3) and not value.turned:
                return value.packed
        elif isinstance(value, Packed) and not self._is_flat(source):
            if axes == (0, 2, 1, 3):
                return Heads(value, int(fake(source).shape[2]))
            if axes == (0, 2, 3, 1):
                return Heads(value, int(fake(source).shape[2]), turned=True)
            if axes == (0, 2, 1):
                return Heads(value, 1, turned=True)
        raise self._unknown(node)

    def _product(self, node: Node) -> Value | Node:
        left, right = (self._known(each) for each in arguments(node)[:2])
        if isinstance(left, Masked) and left.row and isinstance(right, Packed):
            return self._masked_sum(left.packed, right, node)
        left, right = (Heads(v, 1) if isinstance(v, Packed) else v for v in (left, right))
        if not isinstance(right, Heads):
            raise self._unknown(node)
        if isinstance(left, Heads) and not left.turned and right.turned:
            return Scores(left.packed, right.packed, left.num_heads)
        if isinstance(left, Scores) and not right.turned:
            attended = self._attend(left, right, node)
            return attended if fake(node).dim() == 3 else Heads(attended, right.num_heads)
        raise self._unknown(node)

    def _on_scores(self, node: Node, scores: Scores) -> Value:
        """Follow a scale or a bias."""
        left, right = arguments(node)[:2]
        first = self._known(left) is scores
        other = right if first else left
        hidden = scores.causal is not None
        if node.kwargs or (hidden and not (scores.activated and scores.seen is not None)):
            raise self._unknown(node)
        number = _number(self._module, other)
        if number is not None and node.target is aten.mul.Tensor:
            return self._scaled(scores, number)
        if number is not None and node.target is aten.div.Tensor and first:
            return self._scaled(scores, 1.0 / number)
        bias = constant(self._module, other)
        if bias is not None and node.target is aten.add.Tensor and not (scores.activated or hidden):
            bias = bias.reshape(-1, *bias.shape[-2:]).expand(scores.num_heads, -1, -1)
            return replace(scores, bias=bias if scores.bias is None else scores.bias + bias)
        raise self._unknown(node)

    def _scaled(self, scores: Scores, number: float) -> Scores:
        if scores.activated:
            return replace(scores, weight_scale=scores.weight_scale * number)
        bias = None if scores.bias is None else scores.bias * number
        return replace(scores, score_scale=scores.score_scale * number, bias=bias)

    def _mask(self, node: Node) -> Value:
        source, mask, fill = arguments(node)[:3]
        value = self._values.get(source)
        pairs = self._known(mask)
        if isinstance(value, Scores) and isinstance(pairs, Pairs):
            return self._mask_pairs(node, value, pairs)
        if not self._rectangle.probe.knows_places(mask):
            raise PackingError(f"{node.name} hides places by more than the lengths")
        if mask in self._values or float(fill) != 0.0:
            raise PackingError(f"{node.name} fills masked places with {fill}, not with 0")
        if isinstance(value, Scores) and value.activated:
            packed = value.queries
            absent, later = masks_pairs(
                self._rectangle, mask, packed.num_before, int(packed.own is not None)
            )
            if not absent:
                raise PackingError(f"{node.name} does not hide just the keys where no id stands")
            if packed.own is not None and not later:
                raise PackingError("earlier tokens see the candidate's")
            return replace(value, causal=later)
        packed = self._packed(source, node)
        if packed.own is not None or packed.num_before or not masks_absent(self._rectangle, mask):
            raise PackingError(f"{node.name} does not hide just the places where no id stands")
        if self._features(node):
            raise self._unknown(node)
        return Masked(packed)

    def _mask_pairs(self, node: Node, scores: Scores, pairs: Pairs) -> Scores:
        """Hide keys by their ids and by order, after the activation or before one that gives 0."""
        fill = torch.tensor(float(arguments(node)[2]))
        weight = fill if scores.activated else torch.nn.functional.silu(fill)
        if float(weight) != 0.0:
            raise PackingError(f"{node.name} fills hidden pairs with {float(fill):g}, a weight too")
        if not pairs.hides or pairs.keys.absent or scores.causal is not None:
            raise PackingError(f"{node.name} does not hide just the keys where no id stands")
        if scores.queries.own is not None and not pairs.causal:
            raise PackingError("earlier tokens see the candidate's")
        return replace(scores, causal=pairs.causal, seen=pairs.keys.packed)

    def _shown(self, values: Packed, seen: Packed) -> Packed:
        """Put zeros for the values of tokens that are not seen."""

        def shown(vectors: Node, flags: Node) -> Node:
            factor = self._emitter.call(aten.to.dtype, flags, torch.float32)
            factor = self._emitter.call(aten.unsqueeze.default, factor, 1)
            return self._emitter.call(aten.mul.Tensor, vectors, factor)

        own = values.own
        if own is not None and seen.own is not None:
            own = shown(own, seen.own)
        return replace(values, tokens=shown(values.tokens, seen.tokens), own=own)

    def _attend(self, scores: Scores, values: Heads, node: Node) -> Packed:
        q, k, v = scores.queries, scores.keys, values.packed
        if scores.causal is None or scores.num_heads != values.num_heads:
            raise PackingError(f"{node.name} sums values without a mask")
        if len({(each.own is None, each.num_before) for each in (q, k, v)}) != 1:
            raise self._unknown(node)
        if scores.seen is not None:
            v = self._shown(v, scores.seen)
        emitter, ragged = self._emitter, self._rectangle.ragged
        bias = self._bias_by_distance(scores, node)
        sizes = (scores.num_heads, q.num_before, self._rectangle.num_slots)
        scales = (scores.score_scale, scores.weight_scale)
        side = self._rectangle.align_right
        tokens = emitter.call(
            torch.ops.rankopt.hstu_attention.default,
            *(q.tokens, k.tokens, v.tokens, ragged.lengths, bias, *sizes),
            *(side, bool(scores.causal), *scales),
        )
        own = None
        if q.own is not None:
            own = emitter.call(
                torch.ops.rankopt.hstu_candidate_attention.default,
                *(q.own, k.tokens, v.tokens, k.own, v.own, ragged.lengths, None, bias),
                *(*sizes, side, *scales),
            )
        self.notes.append(f"{ragged.name}: attention over {node.name} on present tokens only")
        return Packed(tokens, own, q.num_before)

    def _bias_by_distance(self, scores: Scores, node: Node) -> Node | None:
        """Store a bias [A, S, S] by the distance of key and query, [A, 2 S - 1]."""
        if scores.bias is None:
            return None
        num_places = self._num_places(scores.queries)
        # The kernels count a place for the candidate's token whether it is there or not.
        num_positions = scores.queries.num_before + self._rectangle.num_slots + 1
        table = scores.bias.new_zeros(scores.num_heads, 2 * num_positions - 1)
        at = torch.arange(num_places)
        distance = at[None, :] - at[:, None]
        used = distance <= 0 if scores.causal else torch.ones_like(distance, dtype=torch.bool)
        index = (distance + num_positions - 1)[used]
        table[:, index] = scores.bias[:, used]
        if not torch.equal(table[:, index], scores.bias[:, used]):
            raise PackingError(f"{node.name} adds a bias that depends on more than the distance")
        return self._emitter.read(self._emitter.add("attention_bias", table))

    # Ends.

    def _unsqueeze(self, node: Node) -> Value:
        value = self._values[arguments(node)[0]]
        dim = arguments(node)[1]
        if isinstance(value, Masked) and not value.row and dim in (1, -2):
            return replace(value, row=True)
        if isinstance(value, Pairs) and dim == 1:
            return value
        if isinstance(value, Flags) and dim == 1:
            return Pairs(value)
        if isinstance(value, Flags) and dim in (-1, 2):
            return self._each(value.packed, lambda t: self._emitter.call(node.target, t, 1))
        raise self._unknown(node)

    def _masked_sum(self, weights: Packed, keys: Packed, node: Node) -> Node:
        """Sum weighted tokens of each row: [B, 1, H] times [B, H, D]."""
        ragged, emitter = self._rectangle.ragged, self._emitter
        num_slots = self._rectangle.num_slots
        if keys.own is not None or keys.num_before:
            raise self._unknown(node)
        summed = fuse_target(
            self._module, emitter, weights.tokens, keys.tokens, ragged.lengths, num_slots
        )
        how = "its scores in the same call"
        if summed is None:
            how = "scores of present ids only"
            summed = emitter.call(
                torch.ops.rankopt.ragged_sum.default,
                *(weights.tokens, keys.tokens, ragged.lengths, num_slots),
            )
        self.notes.append(f"{ragged.name}: weighted sum {node.name} over present ids, {how}")
        return emitter.call(aten.unsqueeze.default, summed, 1)

    def _select(self, node: Node) -> Node:
        source, dim, index = arguments(node)[:3]
        packed = self._packed(source, node)
        places = self._num_places(packed)
        if dim != 1 or self._is_flat(source) or index not in (-1, places - 1):
            raise PackingError(f"{node.name} reads place {index}, and only the last is understood")
        if packed.own is None:
            raise PackingError(f"{node.name} reads a place that may hold no id")
        return packed.own


def _axes(node: Node) -> tuple[int, ...]:
    rank = fake(node).dim()
    if node.target is aten.permute.default:
        return tuple(axis % rank for axis in arguments(node)[1])
    first, second = (int(axis) % rank for axis in arguments(node)[1:3])
    axes = list(range(rank))
    axes[first], axes[second] = second, first
    return tuple(axes)


def _number(module: GraphModule, value: object) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    held = constant(module, value)
    return float(held) if held is not None and held.numel() == 1 and held.dim() == 0 else None
