"""Find feature interactions in an exported graph: pairwise dot products and their sums.

Shapes: B rows, F fields, D numbers of each, N pairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.passes.field_pieces import RESHAPES, Columns, Span, blocks_of, merge, same_rows
from rankopt.passes.graph import arguments, aten, constant, fake, schema_values

Pairs = list[tuple[int, int]]


@dataclass(frozen=True, eq=False)
class Interaction:
    """A part of the graph that one call can replace.

    Attributes:
        form: `dot` for the products of all pairs, `sum` for their sum.
        first: the node it was found by.
        end: the node whose readers will read the call's result.
        name: the user's name for it, as far as the graph has one.
        fields: where the fields lie; None where the refusal says why there are none.
        dim: D.
        refusal: why it is left to the compiler; None where it can be replaced.
        before: what a concatenation puts in front of the pairs; dot products alone.
        after: nodes that the same concatenation puts behind them.
        upper, diagonal: which triangle, in which order; dot products alone.
        total: whether the D columns are summed as well; sums alone.
        factor: what the call's result is multiplied by; sums alone.
    """

    form: Literal["dot", "sum"]
    first: Node
    end: Node
    fields: tuple[Span, ...] = ()
    dim: int = 0
    refusal: str | None = None
    before: tuple[Span, ...] = ()
    after: tuple[Node, ...] = ()
    upper: bool = False
    diagonal: bool = False
    total: bool = False
    factor: float = 1.0

    @property
    def num_fields(self) -> int:
        """F."""
        return sum(span.width for span in self.fields) // self.dim


def find_dot_interactions(module: GraphModule) -> list[Interaction]:
    """List the pairwise dot products, in graph order, refused ones with their reason."""
    found = [*_products_with_transpose(module), *_products_of_pairs(module)]
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    return sorted(found, key=lambda each: order[each.first])


def find_sums_over_pairs(module: GraphModule) -> list[Interaction]:
    """List the factorization machines in Rendle's identity, with or without the last sum."""
    found = []
    for node in module.graph.find_nodes(op="call_function", target=aten.sub.Tensor):
        match = _sum_over_pairs(module, node)
        if match is not None:
            found.append(match)
    return found


def triangle(num_fields: int, upper: bool, diagonal: bool) -> Pairs:
    """List the pairs of a triangle as the operator writes them, the larger field first."""
    if upper:
        places = torch.triu_indices(num_fields, num_fields, offset=0 if diagonal else 1)
    else:
        places = torch.tril_indices(num_fields, num_fields, offset=0 if diagonal else -1)
    return _unordered(zip(*places.tolist(), strict=True))


def _unordered(pairs: Any) -> Pairs:
    return [(max(pair), min(pair)) for pair in pairs]


def _which_triangle(pairs: Pairs, num_fields: int) -> tuple[bool, bool] | None:
    for upper in (False, True):
        for diagonal in (False, True):
            if pairs == triangle(num_fields, upper, diagonal):
                return upper, diagonal
    return None


def _products_with_transpose(module: GraphModule) -> Iterator[Interaction]:
    """X times its own transpose, of which a constant index picks a triangle."""
    for node in list(module.graph.nodes):
        fields = _own_product(node)
        if fields is None or not _is_vectors(fields):
            continue
        num_fields, dim = fake(fields).shape[1:]
        picked = _picked(module, node, num_fields)
        if picked is None:
            yield Interaction(
                "dot", node, node, refusal="all products are read, not one of each pair"
            )
            continue
        end, places, chain = picked
        kind = _which_triangle(_unordered(places), num_fields)
        if kind is None:
            yield Interaction("dot", node, end, refusal="its pairs are in an order of their own")
            continue
        transposed = [n for n in node.all_input_nodes if n is not fields]
        columns = Columns(module, [*chain, node, *transposed], [fields])
        spans = columns.of(fields)
        if any(span.width % dim for span in spans):
            spans = [Span(fields, 0, num_fields * dim)]
        yield _with_neighbours(
            module,
            Interaction("dot", node, end, tuple(spans), dim, upper=kind[0], diagonal=kind[1]),
        )


def _own_product(node: Node) -> Node | None:
    """Return X [B, F, D] of a node that is X times its transpose, [B, F, F]."""
    if node.op != "call_function":
        return None
    if node.target in (aten.bmm.default, aten.matmul.default):
        left, right = arguments(node)[:2]
        return left if _is_transpose(right, left) else None
    if node.target is aten.einsum.default:
        equation, operands = arguments(node)[:2]
        terms, _, result = str(equation).replace(" ", "").partition("->")
        one, _, two = terms.partition(",")
        alike = len(operands) == 2 and operands[0] is operands[1]
        if alike and len(one) == 3 and len(two) == 3 and len(set(one + two)) == 4:
            shared = one[0] == two[0] and one[2] == two[2]
            if shared and result in (one[:2] + two[1], two[:2] + one[1]):
                return operands[0] if isinstance(operands[0], Node) else None
    return None


def _is_transpose(node: object, of: object) -> bool:
    if not isinstance(node, Node) or node.op != "call_function" or arguments(node)[0] is not of:
        return False
    if node.target is aten.transpose.int:
        return {axis % 3 for axis in arguments(node)[1:3]} == {1, 2}
    if node.target is aten.permute.default:
        return [axis % 3 for axis in arguments(node)[1]] == [0, 2, 1]
    return node.target in (aten.mT.default, aten.adjoint.default)


def _is_vectors(node: Node) -> bool:
    value = fake(node)
    static = value.dim() == 3 and all(isinstance(size, int) for size in value.shape[1:])
    return static and value.dtype == torch.float32 and value.device.type == "cpu"


def _picked(
    module: GraphModule, product: Node, num_fields: int
) -> tuple[Node, Pairs, list[Node]] | None:
    """Follow [B, F, F] to the constant index that picks some of it: the node, places, the way."""
    user = _only_user(product)
    if user is None:
        return None
    indices = _indices(module, user)
    if user.target is aten.index.Tensor and len(indices) == 3 and indices[0] is None:
        rows, columns = indices[1:]
        if rows is None or columns is None or rows.shape != columns.shape or rows.dim() != 1:
            return None
        places = zip(_wrapped(rows, num_fields), _wrapped(columns, num_fields), strict=True)
        return user, list(places), [user]
    if tuple(fake(user).shape[1:]) != (num_fields**2,) or not same_rows(user, product):
        return None
    reader = _only_user(user)
    if reader is None:
        return None
    flat: Tensor | None = None
    if reader.target is aten.index_select.default and arguments(reader)[1] in (1, -1):
        flat = _constant_index(module, arguments(reader)[2])
    elif reader.target is aten.index.Tensor:
        indices = _indices(module, reader)
        flat = indices[1] if len(indices) == 2 and indices[0] is None else None
    if flat is None or flat.dim() != 1:
        return None
    found = [divmod(place, num_fields) for place in _wrapped(flat, num_fields**2)]
    return reader, found, [user, reader]


def _wrapped(index: Tensor, size: int) -> list[int]:
    return [int(place) % size for place in index.tolist()]


def _indices(module: GraphModule, node: Node) -> list[Tensor | None]:
    if node.target is not aten.index.Tensor:
        return []
    return [_constant_index(module, index) for index in arguments(node)[1]]


def _constant_index(module: GraphModule, node: object) -> Tensor | None:
    """Read a constant index, or one row of a constant matrix of indices."""
    value = constant(module, node)
    if value is None and isinstance(node, Node) and node.target is aten.select.int:
        matrix, dim, place = arguments(node)
        whole = constant(module, matrix)
        value = None if whole is None else whole.select(dim, place)
    whole_numbers = value is not None and value.dtype in (torch.int64, torch.int32)
    return value if whole_numbers else None


def _products_of_pairs(module: GraphModule) -> Iterator[Interaction]:
    """Two stacks of vectors, one per pair, multiplied and summed over D (PNN's inner product)."""
    for node in module.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        product = arguments(node)[0]
        if product.target is not aten.mul.Tensor or len(product.users) != 1:
            continue
        left, right = arguments(product)[:2]
        operands = isinstance(left, Node) and isinstance(right, Node) and left is not right
        if not operands or not (_is_vectors(left) and _is_vectors(right)):
            continue
        axes = [axis % 3 for axis in arguments(node)[1] or ()]
        if axes != [2] or fake(left).shape[1:] != fake(right).shape[1:]:
            continue
        num_pairs, dim = fake(left).shape[1:]
        columns = Columns(module, [node, product], [left, right])
        one, two = (blocks_of(columns.of(side), dim) for side in (left, right))
        if one is None or two is None or len(one) != num_pairs or num_pairs < 2:
            continue
        unique = list(dict.fromkeys([*one, *two]))
        place = {block: index for index, block in enumerate(unique)}
        pairs = [(place[a], place[b]) for a, b in zip(one, two, strict=True)]
        kind = _which_triangle(_unordered(pairs), len(unique))
        if kind is None:
            continue  # a product of two things that are no pairs of fields
        fields = tuple(merge(unique))
        found = Interaction("dot", node, node, fields, dim, upper=kind[0], diagonal=kind[1])
        yield _with_neighbours(module, found)


def _with_neighbours(module: GraphModule, found: Interaction) -> Interaction:
    """Take what a concatenation puts in front of the pairs into the call."""
    end = found.end
    num_pairs = fake(end).shape[1]
    while (user := _only_user(end)) is not None and _is_same_pairs(user, end, num_pairs):
        end = user
    if tuple(fake(end).shape[1:]) != (num_pairs,):
        end = found.end
    user = _only_user(end)
    plain = fake(end).dim() == 2
    if user is None or not plain or user.target is not aten.cat.default:
        return _moved(found, end)
    pieces = list(arguments(user)[0])
    joinable = all(
        fake(piece).dim() == 2 and fake(piece).dtype == torch.float32 and same_rows(piece, end)
        for piece in pieces
    )
    if schema_values(user)["dim"] % 2 != 1 or pieces.count(end) != 1 or not joinable:
        return _moved(found, end)
    place = pieces.index(end)
    columns = Columns(module, [user], pieces[:place])
    before = merge([span for piece in pieces[:place] for span in columns.of(piece)])
    return _moved(found, user, before=tuple(before), after=tuple(pieces[place + 1 :]))


def _is_same_pairs(user: Node, end: Node, num_pairs: int) -> bool:
    value = fake(user)
    return user.target in RESHAPES and same_rows(user, end) and value.shape[1:].numel() == num_pairs


def _moved(found: Interaction, end: Node, **changes: Any) -> Interaction:
    return replace(found, end=end, **changes)


def _sum_over_pairs(module: GraphModule, node: Node) -> Interaction | None:
    """Match (sum of X)^2 - sum of X^2, over F, and what halves it or sums it over D."""
    minuend, subtrahend = arguments(node)[:2]
    if node.kwargs or not isinstance(minuend, Node) or not isinstance(subtrahend, Node):
        return None
    sum_node = _square_of(minuend)
    squares = _summed_over_fields(subtrahend)
    fields = None if sum_node is None else _summed_over_fields(sum_node)
    if sum_node is None or fields is None or squares is None or _square_of(squares) is not fields:
        return None
    if not _is_vectors(fields) or fake(minuend).shape != fake(subtrahend).shape:
        return None
    inside = [minuend, subtrahend, sum_node, squares]
    num_fields, dim = fake(fields).shape[1:]
    end, factor, total = node, 2.0, False
    while (user := _only_user(end)) is not None:
        if factor == 2.0 and _halves(user, end):
            factor = 1.0
        elif not total and _sums_over_columns(user, end):
            total = True
        else:
            break
        inside.append(end)
        end = user
    members = {*inside, node, end}
    if any(reader not in members for each in inside for reader in each.users):
        return Interaction("sum", node, end, refusal="something else reads a part of it")
    if dim < MIN_COLUMNS:
        return Interaction("sum", node, end, refusal=f"vectors of {dim} are too short for it")
    spans = Columns(module, members, [fields]).of(fields)
    if any(span.width % dim for span in spans):
        spans = [Span(fields, 0, num_fields * dim)]
    return Interaction("sum", node, end, tuple(spans), dim, total=total, factor=factor)


MIN_COLUMNS = 4
"""A sum over pairs works on whole vectors of columns: with fewer than this most lanes are idle."""


def _square_of(node: Node) -> Node | None:
    if node.op != "call_function":
        return None
    first = arguments(node)[0]
    power = node.target is aten.pow.Tensor_Scalar and arguments(node)[1] == 2
    product = node.target is aten.mul.Tensor and arguments(node)[1] is first
    if isinstance(first, Node) and (power or product or node.target is aten.square.default):
        return first
    return None


def _summed_over_fields(node: Node) -> Node | None:
    if node.target is not aten.sum.dim_IntList:
        return None
    source: Node = arguments(node)[0]
    if fake(source).dim() != 3 or [axis % 3 for axis in arguments(node)[1] or ()] != [1]:
        return None
    return source


def _halves(user: Node, end: Node) -> bool:
    values: Sequence[object] = arguments(user)
    if user.target in (aten.mul.Tensor, aten.mul.Scalar):
        return 0.5 in [v for v in values if isinstance(v, float)] and end in values
    return user.target in (aten.div.Tensor, aten.div.Scalar) and values[:2] == (end, 2)


def _sums_over_columns(user: Node, end: Node) -> bool:
    if user.target is not aten.sum.dim_IntList:
        return False
    shape = fake(end).shape
    axes = {axis % len(shape) for axis in arguments(user)[1] or ()}
    return len(shape) - 1 in axes and all(axis != 0 for axis in axes)


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None
