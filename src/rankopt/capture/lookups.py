"""Write every way to read rows of a table as `embedding` or `embedding_bag`.

Shapes: N rows of a table, D its width, B bags, L ids of all bags.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import (
    LOOKUP_OPERATORS,
    arguments,
    aten,
    constant,
    fake,
    schema_values,
)
from rankopt.passes.lookups import Lookup, find_lookups


def indexing_to_lookups(emitter: Emitter) -> int:
    """Rewrite `table[ids]`, `index_select` and `gather` of whole rows; returns how many."""
    changed = 0
    for node in list(emitter.graph.nodes):
        handler = _HANDLERS.get(node.target) if node.op == "call_function" else None
        if handler is None or not isinstance(node.meta.get("val"), Tensor):
            continue
        table = constant(emitter.module, arguments(node)[0])
        if table is None or table.dtype != torch.float32:
            continue
        with emitter.before(node):
            new = handler(emitter, node, table)
        if new is not None:
            emitter.replace(node, new)
            changed += 1
    return changed


def _index(emitter: Emitter, node: Node, table: Tensor) -> Node | None:
    indices = arguments(node)[1]
    if len(indices) != 1 or not isinstance(indices[0], Node) or table.dim() not in (1, 2):
        return None
    ids = indices[0]
    if fake(ids).dtype not in (torch.int64, torch.int32):
        return None
    source = arguments(node)[0]
    if table.dim() == 1:
        if not _indexed_alone(emitter, str(source.target)):
            return None
        name = emitter.derive(str(source.target), "column", lambda value: value.unsqueeze(1))
        source = emitter.read(name)
    if not _never_negative(emitter, ids):
        # Indexing counts negative ids from the end; a lookup knows none.
        shifted = emitter.call(aten.add.Tensor, ids, len(table))
        negative = emitter.call(aten.lt.Scalar, ids, 0)
        ids = emitter.call(aten.where.self, negative, shifted, ids)
    rows = emitter.call(aten.embedding.default, source, ids)
    return rows if table.dim() == 2 else emitter.call(aten.squeeze.dim, rows, -1)


def _indexed_alone(emitter: Emitter, path: str) -> bool:
    users = [user for reader in emitter.readers(path) for user in reader.users]
    return all(user.target == aten.index.Tensor and len(arguments(user)[1]) == 1 for user in users)


_KEEP_SIGN: frozenset[Any] = frozenset(
    {
        aten.to.dtype,
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.contiguous.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.cat.default,
        aten.stack.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.abs.default,
        aten.arange.default,
    }
)


def _never_negative(emitter: Emitter, ids: Node) -> bool:
    """Tell whether ids come from ids (whose range the contract checks) and counts alone."""
    waiting, seen = [ids], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            if fake(node).is_floating_point():  # a real number may be anything
                return False
            continue
        value = constant(emitter.module, node)
        if value is not None:
            if value.numel() and float(value.min()) < 0:
                return False
            continue
        if node.target not in _KEEP_SIGN or _has_negative_number(node):
            return False
        waiting += node.all_input_nodes
    return True


def _has_negative_number(node: Node) -> bool:
    if node.target not in (aten.add.Tensor, aten.mul.Tensor):
        return False
    numbers = [*node.args, *node.kwargs.values()]
    return any(isinstance(number, int | float) and number < 0 for number in numbers)


def _index_select(emitter: Emitter, node: Node, table: Tensor) -> Node | None:
    dim, ids = arguments(node)[1:3]
    if dim % table.dim() != 0 or table.dim() != 2 or fake(ids).dim() != 1:
        return None
    return emitter.call(aten.embedding.default, arguments(node)[0], ids)


def _gather(emitter: Emitter, node: Node, table: Tensor) -> Node | None:
    """`table.gather(0, ids[:, None].expand(-1, D))` reads whole rows."""
    dim, spread = arguments(node)[1:3]
    if dim != 0 or table.dim() != 2 or spread.target != aten.expand.default:
        return None
    column = arguments(spread)[0]
    if fake(column).dim() != 2 or fake(column).shape[1] != 1:
        return None
    if fake(spread).shape[1] != table.shape[1]:
        return None
    ids = emitter.call(aten.squeeze.dim, column, 1)
    return emitter.call(aten.embedding.default, arguments(node)[0], ids)


_HANDLERS: dict[Any, Any] = {
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.gather.default: _gather,
}


def blocks_to_whole_tables(emitter: Emitter, *, axis: int) -> int:
    """Read a block of rows (axis 0) or columns (1) from the table itself; returns how many lookups.

    `embedding(table[a:b], ids)` reads rows `ids + a`; `embedding(table[:, a:b], ids)` is columns
    a to b of whole rows. Either way the table stays one.
    """
    changed = 0
    for node in list(emitter.graph.nodes):
        if node.op != "call_function" or node.target not in LOOKUP_OPERATORS:
            continue
        part = arguments(node)[0]
        if part.target != aten.slice.Tensor or constant(emitter.module, part.args[0]) is None:
            continue
        given: tuple[Any, ...] = (*part.args, *(None, 0, 0, None, 1)[len(part.args) :])
        source, dim, start, stop, step = given
        start = start or 0
        if step != 1 or start < 0 or dim % 2 != axis:
            continue
        with emitter.before(node):
            if axis == 0:
                _shift_ids(emitter, node, source, start)
            elif node.target == aten.embedding.default:
                rows = emitter.call(aten.embedding.default, source, *node.args[1:])
                columns = emitter.call(aten.slice.Tensor, rows, -1, start, stop)
                emitter.replace(node, columns)
            else:
                continue
        changed += 1
    emitter.graph.eliminate_dead_code()
    return changed


def _shift_ids(emitter: Emitter, node: Node, source: Node, start: int) -> None:
    ids = arguments(node)[1]
    moved = emitter.call(aten.add.Tensor, ids, start) if start else ids
    values = schema_values(node)
    padding = values.get("padding_idx")
    if node.target == aten.embedding_bag.padding_idx and padding is not None:
        # A negative one counts from the end of the block.
        num_rows = int(fake(arguments(node)[0]).shape[0])
        values["padding_idx"] = padding % num_rows + start
    values |= {"weight": source, "indices": moved}
    node.args, node.kwargs = tuple(values.values()), {}


def padded_bags(emitter: Emitter) -> int:
    """Write bags that leave out a row as sums that a lookup call knows.

    A mean becomes a sum over what is left, divided by how much that is. A sum whose left-out row
    other lookups read takes weights of 0 and 1; its table cannot hold zeros there.

    Returns:
        How many bags were changed.
    """
    changed = 0
    for lookup in find_lookups(emitter.module):
        if lookup.mode == "mean" and _leaves_out(lookup):
            _mean_as_sum(emitter, lookup)
            changed += 1
    for lookup in find_lookups(emitter.module):
        if lookup.mode == "sum" and _leaves_out(lookup) and lookup.shares_padding:
            _padding_as_weights(emitter, lookup)
            changed += 1
    return changed


def _leaves_out(lookup: Lookup) -> bool:
    padded = lookup.operator.target == aten.embedding_bag.padding_idx
    return padded and lookup.padding_idx is not None and lookup.offsets is not None


def _mean_as_sum(emitter: Emitter, lookup: Lookup) -> None:
    operator = lookup.operator
    operator.update_arg(4, 0)
    with emitter.before(operator):
        counts = _counts(emitter, lookup)
    after = lookup.node.next
    with emitter.before(after):
        mean = emitter.call(aten.div.Tensor, lookup.node, counts)
    lookup.node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _counts(emitter: Emitter, lookup: Lookup) -> Node:
    """Count the ids of each bag that are not left out, [B, 1], at least one."""
    call = emitter.call
    ids, offsets = lookup.indices, lookup.offsets
    if offsets is None:
        raise ValueError(f"the bag on {lookup.table} has no offsets")
    kept = call(aten.to.dtype, call(aten.ne.Scalar, ids, lookup.padding_idx), torch.int64)
    running = call(aten.cumsum.default, kept, 0)
    before = call(aten.constant_pad_nd.default, running, [1, 0], 0)
    if lookup.include_last:
        edges = offsets
    else:
        total = call(aten.sym_size.int, ids, 0)
        options = {"dtype": fake(offsets).dtype, "device": torch.device("cpu")}
        end = call(aten.full.default, [1], total, **options)
        edges = call(aten.cat.default, [offsets, end])
    at_edges = call(aten.index_select.default, before, 0, edges)
    following = call(aten.slice.Tensor, at_edges, 0, 1)
    counts = call(aten.sub.Tensor, following, call(aten.slice.Tensor, at_edges, 0, 0, -1))
    floats = call(aten.to.dtype, call(aten.clamp.default, counts, 1), torch.float32)
    return call(aten.unsqueeze.default, floats, 1)


def _padding_as_weights(emitter: Emitter, lookup: Lookup) -> None:
    operator = lookup.operator
    values = schema_values(operator)
    with emitter.before(operator):
        kept = emitter.call(aten.ne.Scalar, lookup.indices, lookup.padding_idx)
        weights = emitter.call(aten.to.dtype, kept, torch.float32)
        if lookup.weights is not None:
            weights = emitter.call(aten.mul.Tensor, weights, lookup.weights)
    values |= {"per_sample_weights": weights, "padding_idx": None}
    operator.args, operator.kwargs = tuple(values.values()), {}
