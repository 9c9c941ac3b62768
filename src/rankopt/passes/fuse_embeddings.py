"""fuse_embeddings: many lookups become few calls."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor
from torch.fx import GraphModule

from rankopt.bundle import ModelBundle
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.lookups import Lookup, find_lookups
from rankopt.passes.table_batched import Group, emit_groups, group_lookups
from rankopt.selectors import Rule, resolve
from rankopt.tables import TableBatch, TableDtype

_Calls = tuple[list[Group], tuple[TableBatch, Tensor] | None]
"""Calls of one store, and the store where another form of the model has it."""


class FuseEmbeddings(Pass):
    """Replace the lookups of nn.Embedding, nn.EmbeddingBag and EmbeddingBagCollection by few calls.

    Single rows and bags of one batch become one call, which reads ids where they lie in the inputs;
    where a concatenation joins their results, and what else it joins depends on no lookup, the call
    writes the concatenation itself. Sequences become one call per width. Rows stay fp32 here.
    A form with `request_index` joins the tables that the plain one does, and reads its store.

    Example:
        ```yaml
        - fuse_embeddings: {forms: [bag, single]}
        ```
    """

    kind: ClassVar[str] = "fuse_embeddings"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact", "quantized_embeddings"})
    provides: ClassVar[frozenset[str]] = frozenset({"fused_embeddings"})

    forms: tuple[Literal["bag", "single", "sequence"], ...] = ("bag", "single", "sequence")
    """Which kinds of lookup to fuse."""
    rules: tuple[Rule[bool], ...] = ()
    """`use: false` leaves a table alone."""

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Fuse what can be fused; say what cannot."""
        batches: dict[str, TableBatch] = dict(bundle.batches)
        changed = False

        def rewrite(module: GraphModule) -> None:
            nonlocal changed
            for groups, shared in self._calls(find_lookups(module), bundle, context):
                tables = [lookup.table for group in groups for lookup in group.lookups]
                dtypes: dict[str, TableDtype] = dict.fromkeys(tables, "fp32")
                store, batch = emit_groups(module, groups, dtypes, bundle.card, shared)
                batches[store] = batch
                changed = True

        fused = bundle.edit(rewrite, batches=batches, provided=bundle.provided | self.provides)
        return fused if changed else bundle

    def _calls(
        self, lookups: list[Lookup], bundle: ModelBundle, context: PassContext
    ) -> list[_Calls]:
        """List calls and the store that they share with the plain form, if they do."""
        if context.plain is not None:
            return _calls_of_plain(lookups, bundle, context.plain)
        groups = group_lookups(self._choose(lookups, context))
        return [(groups, None)] if groups else []

    def _choose(self, lookups: list[Lookup], context: PassContext) -> list[Lookup]:
        names = list(dict.fromkeys(lookup.table for lookup in lookups))
        wanted = resolve(names, self.rules, True, where="fuse_embeddings.rules", noun="table")
        chosen, outside = [], set[str]()
        for lookup in lookups:
            refusal = lookup.refusal or lookup.unbatched
            if refusal:
                context.note(f"{lookup.table}: left alone, {refusal}")
            if refusal or not wanted[lookup.table] or lookup.form not in self.forms:
                outside.add(lookup.table)
            else:
                chosen.append(lookup)
        return _joinable(chosen, outside, context)


def _calls_of_plain(lookups: list[Lookup], bundle: ModelBundle, plain: ModelBundle) -> list[_Calls]:
    """List calls on what the plain form has joined, however few lookups they are.

    Joining by this form's own lookups would store the tables a second time: in DIN's plain form the
    history alone looks the item table up by lists, in this one the user's ids do so as well.
    """
    calls: list[_Calls] = []
    for store, batch in plain.batches.items():
        names = {slot.name for slot in batch.slots}
        chosen = [
            lookup
            for lookup in lookups
            if lookup.table in names and not (lookup.refusal or lookup.unbatched)
        ]
        if chosen and batch not in bundle.batches.values():
            calls.append((group_lookups(chosen), (batch, plain.constants[store])))
    return calls


def _joinable(lookups: list[Lookup], outside: set[str], context: PassContext) -> list[Lookup]:
    """Leave out lookups with nothing to join, and tables that would then be stored twice.

    A table is read either from the common store or from its own constant, never from both.
    """
    while True:
        kept = [lookup for lookup in lookups if lookup.table not in outside]
        lone = {
            group.lookups[0].table
            for group in group_lookups(kept)
            if len(group.lookups) == 1 and group.lookups[0].form != "bag"
        }
        if not lone:
            return kept
        for table in sorted(lone):
            context.note(f"{table}: left alone, a lookup of it has nothing to join")
        outside |= lone
