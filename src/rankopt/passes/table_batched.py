"""Build calls in a graph that look many tables up at once.

Single rows and bags of one batch become one call, or one per concatenation that the call writes;
rows of equal width that are not pooled become one call. The rows of all tables lie in one constant
(`tables.py`).

Shapes: T lookups of the call, B rows of its result, L ids of lists, D widths (which may differ).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from rankopt.kernels.build import load_kernels
from rankopt.kernels.lookup import COPY, MEAN, SUM, PlanRow, encode_plan
from rankopt.models.card import ModelCard
from rankopt.passes.graph import add_constant, aten, fake
from rankopt.passes.id_sources import id_source, rectangle, row_width, uncast
from rankopt.passes.list_checks import drop_list_checks
from rankopt.passes.list_inputs import ListProbe, ListSource, find_list_inputs
from rankopt.passes.lookups import Lookup
from rankopt.passes.order import memory_edges, sort, written_roots
from rankopt.passes.row_pieces import Joined, choose_joins, joined, parts_of, readers_of, span_of
from rankopt.tables import TYPE_CODES, TableBatch, TableDtype, pack_batch


@dataclass(frozen=True)
class Group:
    """Lookups of one form that do not wait for each other."""

    lookups: tuple[Lookup, ...]
    pooled: bool


def rows_operator() -> Any:
    """Return the operator that looks up single rows and bags."""
    load_kernels()
    return torch.ops.rankopt.lookup_rows.default


def sequences_operator() -> Any:
    """Return the operator that looks up rows without pooling."""
    load_kernels()
    return torch.ops.rankopt.lookup_sequences.default


def find_calls(module: GraphModule) -> list[Node]:
    """List the calls of a graph; their arguments begin with the store and the plan."""
    return [
        node
        for target in (rows_operator(), sequences_operator())
        for node in module.graph.find_nodes(op="call_function", target=target)
    ]


def group_lookups(lookups: Sequence[Lookup]) -> list[Group]:
    """Sort lookups into calls: by number of rows, and by width where not pooled.

    A lookup whose ids are computed from rows of another goes into a later call.
    """
    levels = _levels(lookups)
    groups: dict[tuple[Any, ...], list[Lookup]] = {}
    for lookup in lookups:
        level = levels[lookup.node]
        if lookup.form == "sequence":
            key: tuple[Any, ...] = (level, False, lookup.weight.shape[1])
        else:
            key = (level, True, str(fake(lookup.node).shape[0]))
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
    module: GraphModule,
    groups: Sequence[Group],
    dtypes: Mapping[str, TableDtype],
    card: ModelCard,
    shared: tuple[TableBatch, torch.Tensor] | None = None,
) -> tuple[str, TableBatch]:
    """Replace the lookups by few calls; all calls read one store, each table once in it.

    Args:
        module: the graph, changed in place.
        groups: from `group_lookups`.
        dtypes: storage type of every table.
        card: names the inputs of the graph.
        shared: the store of another form of the model, to be read in place of one of its own; it
            holds at least the tables of the lookups.

    Returns:
        The name of the constant that holds the rows, and what lies in it.
    """
    every = [lookup for group in groups for lookup in group.lookups]
    batch, storage = shared or _pack(every, dtypes)
    store = add_constant(module, "tables", storage)
    probes = find_list_inputs(module, card)
    writer = _Writer(module, store, batch, [lookup.node for lookup in every], probes)
    for group in groups:
        if group.pooled:
            writer.write_rows(group.lookups)
        else:
            writer.write_sequences(group.lookups)
    module.graph.eliminate_dead_code()
    drop_list_checks(module, probes)
    return store, batch


def _pack(
    lookups: Sequence[Lookup], dtypes: Mapping[str, TableDtype]
) -> tuple[TableBatch, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for lookup in lookups:
        weights[lookup.table] = _without_padding_row(lookup, weights.get(lookup.table))
    # By name: two forms of a model that look the same tables up in another order share the store.
    names = sorted(weights)
    return pack_batch(names, [weights[name] for name in names], [dtypes[name] for name in names])


def _without_padding_row(lookup: Lookup, earlier: torch.Tensor | None) -> torch.Tensor:
    """Zero the row that a sum leaves out; adding zeros is the same sum."""
    weight = lookup.weight if earlier is None else earlier
    if lookup.form != "bag" or lookup.padding_idx is None:
        return weight
    weight = weight.clone()
    weight[lookup.padding_idx] = 0
    return weight


class _Inputs:
    """The tensors that one call reads, each once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def index(self, node: Node) -> int:
        if node not in self.nodes:
            self.nodes.append(node)
        return self.nodes.index(node)


class _Writer:
    """Puts calls into a graph."""

    def __init__(
        self,
        module: GraphModule,
        store: str,
        batch: TableBatch,
        lookups: Sequence[Node],
        probes: Sequence[ListProbe],
    ) -> None:
        self._module = module
        self._graph: Graph = module.graph
        self._store = store
        self._batch = batch
        self._edges = memory_edges(self._graph)
        self._written = written_roots(self._graph)
        self._behind_lookups = readers_of(self._graph, lookups)
        self._probes = probes

    def write_rows(self, lookups: Sequence[Lookup]) -> None:
        """Replace single rows and bags: a call per concatenation, and one for what is left."""
        left = {lookup.node: lookup for lookup in lookups}
        count = str(fake(lookups[0].node).shape[0])
        for found in choose_joins(self._graph, left, count, self._behind_lookups):
            self._rows_call(found.leaves, left, found)
            left = {node: lookup for node, lookup in left.items() if node not in found.leaves}
        if left:
            self._rows_call(tuple(left), left, None)

    def _rows_call(
        self, leaves: Sequence[Node], lookups: Mapping[Node, Lookup], found: Joined | None
    ) -> None:
        graph, inputs = self._graph, _Inputs()
        used = [lookups[leaf] for leaf in leaves if leaf in lookups]
        plan: list[PlanRow] = []
        places: dict[Node, tuple[int, int]] = {}
        width = 0
        with graph.inserting_before(found.root if found else self._behind_inputs(used)):
            for leaf in leaves:
                if leaf in lookups:
                    plan.append(self._plan_row(lookups[leaf], inputs, width))
                else:
                    dim = row_width(leaf) or 0
                    plan.append(PlanRow(COPY, 0, 0, dim, 0, width, inputs.index(leaf)))
                places[leaf] = (width, plan[-1].dim)
                width += plan[-1].dim
            count = self._num_rows(plan, inputs, used)
            rows = graph.call_function(
                rows_operator(), (*self._constants(plan), inputs.nodes, count, width)
            )
            result = _Result(graph, rows, count, width)
            if found is None:
                for leaf in leaves:
                    result.stand_in_for(leaf, *places[leaf])
            else:
                self._replace_joined(found, places, result)
        # Readers of an early lookup stood before the last index was ready; now they follow.
        sort(graph, self._edges)

    def _replace_joined(
        self, found: Joined, places: Mapping[Node, tuple[int, int]], result: _Result
    ) -> None:
        """Let readers of a concatenation, or of a part of it, read the call's result."""
        # Other concatenations of the same pieces in the same order lie in the result as well.
        others = [
            (node, span)
            for node in self._graph.nodes
            if node not in found.spans
            and parts_of(node) is not None
            and (other := joined(node, places)) is not None
            and (span := span_of(other, places)) is not None
        ]
        for node, span in (*found.spans.items(), *others):
            inner = node is not found.root and all(user in found.spans for user in node.users)
            if node in self._behind_lookups and not inner:
                result.stand_in_for(node, *span)

    def _behind_inputs(self, lookups: Sequence[Lookup]) -> Node:
        order = {node: index for index, node in enumerate(self._graph.nodes)}
        inputs = [
            node
            for lookup in lookups
            for node in (lookup.indices, lookup.offsets, lookup.weights)
            if node is not None
        ]
        return max(inputs, key=lambda node: order[node]).next

    def _plan_row(self, lookup: Lookup, inputs: _Inputs, out: int) -> PlanRow:
        slot = self._batch.slot(lookup.table)
        ids = rectangle(lookup) if lookup.form == "bag" else lookup.indices
        weights = lookup.weights
        if ids is not None:
            place = self._columns(ids, inputs)
        elif (source := self._list_source(lookup)) is not None:
            place = _lengths(source, inputs)
            weights = source.weights
        else:
            place = self._lists(lookup, inputs)
        if weights is not None:
            place["weights"] = inputs.index(weights)
        mode = MEAN if lookup.mode == "mean" else SUM
        code = TYPE_CODES[slot.dtype]
        return PlanRow(mode, slot.offset, slot.num_rows, slot.dim, code, out, **place)

    def _columns(self, ids: Node, inputs: _Inputs) -> dict[str, int]:
        source = id_source(ids, self._written)
        if source is None:
            length = row_width(ids) or 1
            flat = self._graph.call_function(aten.reshape.default, (ids, [-1, length]))
            return {"source": inputs.index(flat), "length": length}
        index = inputs.index(source.node)
        return {"source": index, "column": source.column, "length": source.length}

    def _list_source(self, lookup: Lookup) -> ListSource | None:
        found = (probe.source(lookup) for probe in self._probes)
        return next((source for source in found if source is not None), None)

    def _lists(self, lookup: Lookup, inputs: _Inputs) -> dict[str, int]:
        if lookup.offsets is None:
            raise ValueError(f"the bag on {lookup.table} has no offsets")
        ids = uncast(lookup.indices)
        if fake(ids).dim() != 1:
            ids = self._graph.call_function(aten.reshape.default, (ids, [-1]))
        offsets = inputs.index(uncast(lookup.offsets))
        return {"source": inputs.index(ids), "length": 0, "offsets": offsets}

    def _num_rows(
        self, plan: Sequence[PlanRow], inputs: _Inputs, lookups: Sequence[Lookup]
    ) -> Node:
        graph = self._graph
        rows = [row for row in plan if row.mode != COPY]
        for row in (*rows, *(row for row in plan if row.mode == COPY)):
            if row.length:
                return graph.call_function(aten.sym_size.int, (inputs.nodes[row.source], 0))
        count = graph.call_function(aten.sym_size.int, (inputs.nodes[rows[0].offsets], 0))
        if rows[0].groups > 1:
            return graph.call_function(operator.floordiv, (count, rows[0].groups))
        if not rows[0].groups and lookups[0].include_last:
            count = graph.call_function(operator.sub, (count, 1))
        return count

    def _constants(self, plan: Sequence[PlanRow]) -> tuple[Node, Node]:
        name = add_constant(self._module, f"{self._store}_plan", encode_plan(plan))
        return self._graph.get_attr(self._store), self._graph.get_attr(name)

    def write_sequences(self, lookups: Sequence[Lookup]) -> None:
        """Replace lookups of one width that are not pooled by one call."""
        graph = self._graph
        slots = [self._batch.slot(lookup.table) for lookup in lookups]
        plan = [
            PlanRow(SUM, slot.offset, slot.num_rows, slot.dim, TYPE_CODES[slot.dtype], 0, index)
            for index, slot in enumerate(slots)
        ]
        ids = [uncast(lookup.indices) for lookup in lookups]
        with graph.inserting_before(self._behind_inputs(lookups)):
            rows = graph.call_function(
                sequences_operator(), (*self._constants(plan), ids, slots[0].dim)
            )
            pieces = _cut(graph, lookups, rows)
        for lookup, piece in zip(lookups, pieces, strict=True):
            lookup.node.replace_all_uses_with(piece)
        sort(graph, self._edges)


def _lengths(source: ListSource, inputs: _Inputs) -> dict[str, int]:
    return {
        "source": inputs.index(source.given.values),
        "column": source.feature,
        "length": 0,
        "offsets": inputs.index(source.given.lengths),
        "groups": source.num_features,
    }


@dataclass(frozen=True)
class _Result:
    """What a call returns, `rows` [count, width]; nodes are added at the insertion point."""

    graph: Graph
    rows: Node
    count: Node
    width: int

    def stand_in_for(self, node: Node, start: int, width: int) -> None:
        """Let readers of `node` read columns of the result in its shape."""
        piece = self.rows
        if width != self.width:
            piece = self.graph.call_function(
                aten.slice.Tensor, (self.rows, 1, start, start + width)
            )
        shape = list(fake(node).shape[1:])
        if len(shape) != 1:
            piece = self.graph.call_function(aten.reshape.default, (piece, [self.count, *shape]))
        node.replace_all_uses_with(piece)


def _cut(graph: Graph, lookups: Sequence[Lookup], rows: Node) -> list[Node]:
    """Cut the rows of all ids [N, D] into what each lookup returned before."""
    pieces = []
    begin: Any = 0
    for lookup in lookups:
        sizes = [
            graph.call_function(aten.sym_size.int, (lookup.indices, axis))
            for axis in range(fake(lookup.indices).dim())
        ]
        count: Any = sizes[0]
        for size in sizes[1:]:
            count = graph.call_function(operator.mul, (count, size))
        piece = rows
        if len(lookups) > 1:
            piece = graph.call_function(aten.narrow.default, (rows, 0, begin, count))
            begin = graph.call_function(operator.add, (begin, count)) if begin != 0 else count
        if len(sizes) != 1:
            width = lookup.weight.shape[1]
            piece = graph.call_function(aten.reshape.default, (piece, [*sizes, width]))
        pieces.append(piece)
    return pieces
