"""Build fbgemm's table-batched lookup in a graph.

One call replaces many: pooled lookups of one batch size become bags of one call, rows of equal
width become one call without pooling. The rows of all tables lie in one constant (`tables.py`).

Shapes: T lookups of the call, B bags of each, L ids of all bags, D widths (which may differ).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch
from torch.fx import GraphModule, Node

from rankopt.passes.graph import add_constant, arguments, aten, fake
from rankopt.passes.lookups import Lookup
from rankopt.passes.order import memory_edges, sort
from rankopt.tables import TYPE_CODES, TableBatch, TableDtype, pack_batch

LOOKUP = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default
HOST = 3
"""fbgemm's PlacementType::HOST."""
FP32_OUTPUT = 0
SUM, MEAN, NONE = 0, 1, 2


@dataclass(frozen=True)
class Group:
    """Lookups that one call can serve."""

    lookups: tuple[Lookup, ...]
    pooling: int

    @property
    def name(self) -> str:
        return "sequences" if self.pooling == NONE else "bags"


def group_lookups(lookups: Sequence[Lookup]) -> list[Group]:
    """Sort lookups into calls: by pooling, weights, number of bags, and width where not pooled.

    A lookup whose ids are computed from rows of another goes into a later call.
    """
    levels = _levels(lookups)
    groups: dict[tuple[Any, ...], list[Lookup]] = {}
    for lookup in lookups:
        level = levels[lookup.node]
        if lookup.form == "sequence":
            key: tuple[Any, ...] = (level, NONE, lookup.weight.shape[1])
        else:
            # A single row is its own sum, so single rows join the sums of as many bags.
            pooling = MEAN if lookup.mode == "mean" else SUM
            weighted = lookup.weights is not None
            key = (level, pooling, weighted, str(fake(lookup.node).shape[0]))
        groups.setdefault(key, []).append(lookup)
    # By level, so that a call stands in the graph when the ids of the next one are made from it.
    in_order = sorted(groups.items(), key=lambda item: item[0][0])
    return [Group(tuple(members), key[1]) for key, members in in_order]


def _levels(lookups: Sequence[Lookup]) -> dict[Node, int]:
    """Count for each lookup how many others its ids go through, one after the other."""
    if not lookups:
        return {}
    own = {lookup.node: lookup for lookup in lookups}
    levels: dict[Node, int] = {}
    graph = lookups[0].node.graph
    edges = memory_edges(graph)
    for node in graph.nodes:
        behind = (*node.all_input_nodes, *edges.get(node, ()))
        above = max((levels[source] for source in behind), default=0)
        levels[node] = above
        if node in own:
            # The bag's own operator lies between its ids and its result, at the level of the ids.
            levels[node] = above + 1
    return {node: levels[node] - 1 for node in own}


def emit_groups(
    module: GraphModule, groups: Sequence[Group], dtypes: Mapping[str, TableDtype]
) -> tuple[str, TableBatch]:
    """Replace each group's lookups by one call; all calls read one store, each table once in it.

    Args:
        module: the graph, changed in place.
        groups: from `group_lookups`.
        dtypes: storage type of every table.

    Returns:
        The name of the constant that holds the rows, and what lies in it.
    """
    weights: dict[str, torch.Tensor] = {}
    for lookup in (lookup for group in groups for lookup in group.lookups):
        weights[lookup.table] = _without_padding_row(lookup, weights.get(lookup.table))
    # By name: two forms of a model that look the same tables up in another order share the store.
    names = sorted(weights)
    tables = [weights[name] for name in names]
    batch, storage = pack_batch(names, tables, [dtypes[name] for name in names])
    store = add_constant(module, "tables", storage)
    edges = memory_edges(module.graph)
    for group in groups:
        with module.graph.inserting_before(_latest_input(module.graph, group).next):
            rows = _call(module, group, batch, store)
            pieces = _split(module, group, rows)
        for lookup, piece in zip(group.lookups, pieces, strict=True):
            lookup.node.replace_all_uses_with(piece)
        # Readers of an early lookup stood before the last index was ready; now they follow.
        sort(module.graph, edges)
    return store, batch


def _without_padding_row(lookup: Lookup, earlier: torch.Tensor | None) -> torch.Tensor:
    """Zero the row that a sum leaves out; adding zeros is the same sum."""
    weight = lookup.weight if earlier is None else earlier
    if lookup.form != "bag" or lookup.padding_idx is None:
        return weight
    weight = weight.clone()
    weight[lookup.padding_idx] = 0
    return weight


def _latest_input(graph: torch.fx.Graph, group: Group) -> Node:
    order = {node: index for index, node in enumerate(graph.nodes)}
    inputs = [
        node
        for lookup in group.lookups
        for node in (lookup.indices, lookup.offsets, lookup.weights)
        if node is not None
    ]
    return max(inputs, key=lambda node: order[node])


def _call(module: GraphModule, group: Group, batch: TableBatch, store: str) -> Node:
    graph = module.graph
    lookups = group.lookups
    slots = [batch.slot(lookup.table) for lookup in lookups]
    indices, offsets, weights = _flat_inputs(graph, group)
    starts = [0]
    for slot in slots:
        starts.append(starts[-1] + slot.dim)
    total = slots[0].dim if group.pooling == NONE else starts[-1]
    widest = {
        dtype: max((slot.dim for slot in slots if slot.dtype == dtype), default=0)
        for dtype in TYPE_CODES
    }

    def attribute(name: str, value: torch.Tensor) -> Node:
        return graph.get_attr(add_constant(module, f"{store}_{group.name}_{name}", value))

    return graph.call_function(
        LOOKUP,
        (
            graph.get_attr(store),
            attribute("uvm", torch.empty(0, dtype=torch.uint8)),
            attribute("placements", torch.full((len(slots),), HOST, dtype=torch.int32)),
            attribute("starts", torch.tensor([slot.offset for slot in slots])),
            attribute(
                "types",
                torch.tensor([TYPE_CODES[slot.dtype] for slot in slots], dtype=torch.uint8),
            ),
            attribute("dims", torch.tensor(starts, dtype=torch.int32)),
            total,
            widest["int2"],
            widest["int4"],
            widest["int8"],
            widest["fp16"],
            widest["fp32"],
            indices,
            offsets,
            group.pooling,
            weights,
            FP32_OUTPUT,
            None,
            None,
            1,
        ),
    )


def _flat_inputs(graph: torch.fx.Graph, group: Group) -> tuple[Node, Node, Node | None]:
    """Lay the ids of all lookups behind each other, with one offset per bag."""
    flat = [_flatten(graph, lookup.indices) for lookup in group.lookups]
    indices = _concatenate(graph, flat)
    if all(lookup.form == "single" for lookup in group.lookups):
        count = graph.call_function(aten.sym_size.int, (indices, 0))
        end = graph.call_function(operator.add, (count, 1))
        offsets = graph.call_function(
            aten.arange.default, (end,), {"dtype": torch.int64, "device": torch.device("cpu")}
        )
        return indices, offsets, None
    offsets = _offsets(graph, group, flat)
    weights = None
    if group.lookups[0].weights is not None:
        weights = _concatenate(
            graph, [lookup.weights for lookup in group.lookups if lookup.weights is not None]
        )
    return indices, offsets, weights


def _flatten(graph: torch.fx.Graph, node: Node) -> Node:
    value = node.meta["val"]
    flat = node
    if value.dim() != 1:
        flat = graph.call_function(aten.reshape.default, (node, [-1]))
    if value.dtype != torch.int64:
        flat = graph.call_function(aten.to.dtype, (flat, torch.int64))
    return flat


def _concatenate(graph: torch.fx.Graph, pieces: Sequence[Node]) -> Node:
    if len(pieces) == 1:
        return pieces[0]
    whole = _split_source(pieces)
    return whole or graph.call_function(aten.cat.default, (list(pieces),))


def _split_source(pieces: Sequence[Node]) -> Node | None:
    """Return the tensor that these pieces are all parts of, in order (a KJT's values)."""
    source = pieces[0].args[0] if pieces[0].args else None
    if not isinstance(source, Node) or source.target != aten.split_with_sizes.default:
        return None
    whole = [arguments(piece) == (source, index) for index, piece in enumerate(pieces)]
    sizes = arguments(source)[1]
    if all(whole) and isinstance(sizes, Sequence) and len(sizes) == len(pieces):
        found = arguments(source)[0]
        return found if isinstance(found, Node) else None
    return None


def _offsets(graph: torch.fx.Graph, group: Group, flat: Sequence[Node]) -> Node:
    parts: list[Node] = []
    base: Node | None = None
    for lookup, ids in zip(group.lookups, flat, strict=True):
        count = graph.call_function(aten.sym_size.int, (ids, 0))
        starts = _starts(graph, lookup, count)
        if base is not None:
            starts = graph.call_function(aten.add.Tensor, (starts, base))
        parts.append(starts)
        base = count if base is None else graph.call_function(operator.add, (base, count))
    end = graph.call_function(
        aten.full.default, ([1], base), {"dtype": torch.int64, "device": torch.device("cpu")}
    )
    return graph.call_function(aten.cat.default, ([*parts, end],))


def _starts(graph: torch.fx.Graph, lookup: Lookup, count: Node) -> Node:
    """First id of every bag of one lookup, [B]."""
    if lookup.form == "sequence":
        # Rows without pooling: fbgemm reads the ids of a table as one bag.
        return graph.call_function(
            aten.full.default, ([1], 0), {"dtype": torch.int64, "device": torch.device("cpu")}
        )
    if lookup.form == "single":
        return graph.call_function(
            aten.arange.default, (count,), {"dtype": torch.int64, "device": torch.device("cpu")}
        )
    starts = lookup.offsets
    if starts is None:
        raise ValueError(f"the bag on {lookup.table} has no offsets")
    if starts.meta["val"].dtype != torch.int64:
        starts = graph.call_function(aten.to.dtype, (starts, torch.int64))
    if lookup.include_last:
        starts = graph.call_function(aten.slice.Tensor, (starts, 0, 0, -1))
    return starts


def _split(module: GraphModule, group: Group, rows: Node) -> list[Node]:
    """Cut the call's result into what each lookup returned before."""
    graph = module.graph
    pieces, start = [], 0
    begin: Any = 0
    for lookup in group.lookups:
        width = lookup.weight.shape[1]
        if group.pooling == NONE:
            sizes = [
                graph.call_function(aten.sym_size.int, (lookup.indices, axis))
                for axis in range(fake(lookup.indices).dim())
            ]
            count: Any = sizes[0]
            for size in sizes[1:]:
                count = graph.call_function(operator.mul, (count, size))
            piece = rows
            if len(group.lookups) > 1:
                piece = graph.call_function(aten.narrow.default, (rows, 0, begin, count))
                begin = graph.call_function(operator.add, (begin, count)) if begin != 0 else count
            if len(sizes) != 1:
                piece = graph.call_function(aten.reshape.default, (piece, [*sizes, width]))
        else:
            piece = rows
            if len(group.lookups) > 1:
                piece = graph.call_function(aten.slice.Tensor, (rows, 1, start, start + width))
            start += width
            if lookup.form == "single" and fake(lookup.indices).dim() == 2:
                piece = graph.call_function(aten.unsqueeze.default, (piece, 1))
        pieces.append(piece)
    return pieces
