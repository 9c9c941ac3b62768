"""quantize_embeddings: tables in fp16, int8, int4 or int2, straight from their float rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.bundle import ModelBundle
from rankopt.environment import Environment
from rankopt.errors import Problem, SelectorError
from rankopt.kernels.lookup import COPY, decode_plan, encode_plan
from rankopt.models.card import ModelCard
from rankopt.passes.bags import bags_of_rows
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.graph import add_constant, arguments, aten, constant
from rankopt.passes.lookups import Lookup, find_lookups
from rankopt.passes.table_batched import emit_groups, find_calls, group_lookups
from rankopt.scheme import load_scheme, scheme_problems
from rankopt.selectors import Rule, resolve
from rankopt.tables import (
    BITS,
    SCALE_BIAS_BYTES,
    TYPE_CODES,
    TableBatch,
    TableDtype,
    pack_batch,
    pack_rows,
    range_refusal,
    refusal,
    scale_and_bias,
    table_weight,
)

FINER: dict[TableDtype, TableDtype] = {
    "int2": "int4",
    "int4": "int8",
    "int8": "fp16",
    "fp16": "fp32",
}


class QuantizeEmbeddings(Pass):
    """Store embedding tables in fewer bits, row by row (one scale and bias per row, in fp16).

    Pooled lookups become one call, which reads mixed types and unpacks as it pools; other lookups
    gather packed rows and unpack them in place, which the compiler fuses with whatever reads them,
    unless `fuse_embeddings` has put them into the call. Bags that the call cannot pool, such as
    maxima, pool rows that were unpacked before. A table that
    would not get smaller, or whose width does not fit the packing, stays finer and says so.

    Example:
        ```yaml
        - quantize_embeddings:
            dtype: int8
            rules:
              - {select: "first_order.*", use: fp32}
              - {select: "user", use: int4}
        ```
    """

    kind: ClassVar[str] = "quantize_embeddings"
    purpose: ClassVar[Purpose] = "bytes"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact", "quantized_embeddings"})
    provides: ClassVar[frozenset[str]] = frozenset({"quantized_embeddings"})

    dtype: Literal["int8", "int4", "int2", "fp16"] = "int8"
    """For tables that no rule selects."""
    rules: tuple[Rule[TableDtype], ...] = ()
    """The first rule whose pattern matches a table decides."""
    scheme: str | None = None
    """A file in `quantize/` that supplies `dtype` and further rules."""
    min_rows: int = Field(default=2, ge=1)
    """Smaller tables stay as they are: nothing to gain."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """List what is wrong with the scheme."""
        return scheme_problems(self.scheme, "tables")

    def resolved(self) -> QuantizeEmbeddings:
        """Return the pass with its scheme written out."""
        tables = load_scheme(self.scheme).tables if self.scheme else None
        if tables is None:
            return self
        dtype = self.dtype if "dtype" in self.model_fields_set else tables.dtype
        changes = {"dtype": dtype, "rules": (*self.rules, *tables.rules), "scheme": None}
        return self.model_copy(update=changes)

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Quantise every selected table."""
        if self.scheme:
            return self.resolved().apply(bundle, context)
        batches: dict[str, TableBatch] = dict(bundle.batches)
        changed: list[str] = []

        def rewrite(module: GraphModule) -> None:
            lookups = find_lookups(module)
            weights = {lookup.table: lookup.weight for lookup in lookups}
            for store, batch in bundle.batches.items():
                storage = _stored(module, store)
                weights |= {s.name: table_weight(batch, storage, s.name) for s in batch.slots}
            dtypes = self._dtypes(weights, lookups, context)
            changed.extend(name for name, dtype in dtypes.items() if dtype != "fp32")
            for store, batch in bundle.batches.items():
                batches[store] = _requantise(module, store, batch, dtypes)
            packed = {name for name, dtype in dtypes.items() if dtype != "fp32"}
            if bags_of_rows(module, [lk for lk in lookups if lk.table in packed]):
                lookups = find_lookups(module)
            _quantise_lookups(module, lookups, dtypes, batches, bundle.card)

        quantised = bundle.edit(rewrite, batches=batches, provided=bundle.provided | self.provides)
        return quantised if changed else bundle

    def _dtypes(
        self, weights: Mapping[str, Tensor], lookups: list[Lookup], context: PassContext
    ) -> dict[str, TableDtype]:
        if not weights:
            if self.rules:
                raise SelectorError("quantize_embeddings.rules: the model has no embedding table.")
            return {}
        default: TableDtype = self.dtype
        wanted = resolve(
            list(weights), self.rules, default, where="quantize_embeddings.rules", noun="table"
        )
        refused = {lookup.table: lookup.refusal for lookup in lookups if lookup.refusal}
        reasons: dict[str, list[str]] = {}
        dtypes: dict[str, TableDtype] = {}
        for name, weight in weights.items():
            dtype, reason = wanted[name], refused.get(name) or range_refusal(weight)
            if reason is None and weight.shape[0] < self.min_rows:
                reason = f"it has fewer than {self.min_rows} rows"
            if dtype == "fp32":
                reasons.setdefault("kept in fp32 by the recipe", []).append(name)
            elif reason is not None:
                reasons.setdefault(f"left alone, {reason}", []).append(name)
                dtype = "fp32"
            else:
                dtype, finer = fitting(weight.shape[1], dtype)
                for text in finer:
                    reasons.setdefault(text, []).append(name)
            dtypes[name] = dtype
        for text, names in reasons.items():
            context.note(f"{_listed(names)}: {text}")
        return dtypes


def _listed(names: list[str], shown: int = 3) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more tables" if more > 0 else "")


def fitting(dim: int, dtype: TableDtype) -> tuple[TableDtype, list[str]]:
    """Return the nearest type, from `dtype` to finer ones, that a row of width `dim` can take.

    The second value says why each coarser type was passed over.
    """
    passed_over = []
    while dtype != "fp32":
        reason = refusal(dim, dtype)
        if reason is None:
            break
        passed_over.append(f"stays finer than {dtype}, since {reason}")
        dtype = FINER[dtype]
    return dtype, passed_over


def _stored(module: GraphModule, store: str) -> Tensor:
    storage = constant(module, module.graph.find_nodes(op="get_attr", target=store)[0])
    if storage is None:
        raise ValueError(f"{store} is no constant of this graph")
    return storage


def _requantise(
    module: GraphModule, store: str, batch: TableBatch, dtypes: Mapping[str, TableDtype]
) -> TableBatch:
    """Pack the tables of a common store again and point its calls at the new rows."""
    storage = _stored(module, store)
    names = [slot.name for slot in batch.slots]
    weights = [table_weight(batch, storage, table) for table in names]
    packed, rows = pack_batch(names, weights, [dtypes[table] for table in names])
    setattr(module, store, rows)
    for node in find_calls(module):
        if str(arguments(node)[0].target) == store:
            _point_call_at(module, node, batch, packed)
    return packed


def _point_call_at(module: GraphModule, node: Node, before: TableBatch, after: TableBatch) -> None:
    plan = constant(module, arguments(node)[1])
    if plan is None:
        raise ValueError("the lookup's plan is no constant")
    by_offset = {slot.offset: after.slot(slot.name) for slot in before.slots}
    rows = []
    for row in decode_plan(plan):
        if row.mode != COPY:
            slot = by_offset[row.offset]
            row = replace(row, offset=slot.offset, storage=TYPE_CODES[slot.dtype])
        rows.append(row)
    setattr(module, str(arguments(node)[1].target), encode_plan(rows))


def _quantise_lookups(
    module: GraphModule,
    lookups: list[Lookup],
    dtypes: Mapping[str, TableDtype],
    batches: dict[str, TableBatch],
    card: ModelCard,
) -> None:
    movable = [lk for lk in lookups if lk.refusal is None and dtypes[lk.table] != "fp32"]
    # A table that is pooled somewhere goes into the common store with all its lookups: reading
    # the others from a constant of their own would store it twice.
    pooled = _pooled_tables(movable)
    batched = [lookup for lookup in movable if lookup.table in pooled]
    if batched:
        store, batch = emit_groups(module, group_lookups(batched), dtypes, card)
        batches[store] = batch
    packed: dict[str, tuple[str, str]] = {}
    for lookup in movable:
        if lookup.table not in pooled:
            _gather_packed(module, lookup, dtypes[lookup.table], packed)


def _pooled_tables(lookups: list[Lookup]) -> set[str]:
    return {lookup.table for lookup in lookups if lookup.form == "bag"}


def _gather_packed(
    module: GraphModule, lookup: Lookup, dtype: TableDtype, packed: dict[str, tuple[str, str]]
) -> None:
    """Replace `embedding(weight, ids)` by a gather of packed rows and the arithmetic to unpack."""
    graph = module.graph
    if lookup.table not in packed:
        packed[lookup.table] = _packed_constants(module, lookup, dtype)
    values_name, head_name = packed[lookup.table]
    with graph.inserting_before(lookup.operator):
        ids = lookup.indices
        rows = graph.call_function(aten.embedding.default, (graph.get_attr(values_name), ids))
        if dtype == "fp16":
            result = graph.call_function(aten.to.dtype, (rows, torch.float32))
        else:
            head = graph.call_function(aten.embedding.default, (graph.get_attr(head_name), ids))
            result = _unpack(graph, rows, head, BITS[dtype])
    lookup.node.replace_all_uses_with(result)


def _packed_constants(module: GraphModule, lookup: Lookup, dtype: TableDtype) -> tuple[str, str]:
    rows = pack_rows(lookup.weight, dtype)
    if dtype == "fp16":
        return add_constant(module, f"{lookup.table}_fp16", rows.view(torch.float16)), ""
    values = rows[:, SCALE_BIAS_BYTES:].contiguous()
    head = scale_and_bias(rows)
    return (
        add_constant(module, f"{lookup.table}_{dtype}", values),
        add_constant(module, f"{lookup.table}_{dtype}_scale_bias", head),
    )


def _unpack(graph: torch.fx.Graph, rows: Node, head: Node, bits: int) -> Node:
    values = rows
    if bits < 8:
        mask = 2**bits - 1
        parts = []
        for shift in range(0, 8, bits):
            part = graph.call_function(aten.bitwise_right_shift.Tensor_Scalar, (rows, shift))
            parts.append(graph.call_function(aten.bitwise_and.Scalar, (part, mask)))
        stacked = graph.call_function(aten.stack.default, (parts, -1))
        values = graph.call_function(aten.flatten.using_ints, (stacked, -2, -1))
    values = graph.call_function(aten.to.dtype, (values, torch.float32))
    head = graph.call_function(aten.to.dtype, (head, torch.float32))
    scale = graph.call_function(aten.slice.Tensor, (head, -1, 0, 1))
    bias = graph.call_function(aten.slice.Tensor, (head, -1, 1, 2))
    scaled = graph.call_function(aten.mul.Tensor, (values, scale))
    return graph.call_function(aten.add.Tensor, (scaled, bias))
