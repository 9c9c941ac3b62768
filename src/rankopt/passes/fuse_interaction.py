"""fuse_interaction: pairwise dot products and factorization machines in one call each."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch.fx import GraphModule, Node

from rankopt.bundle import ModelBundle
from rankopt.kernels.build import load_kernels
from rankopt.kernels.interaction_threads import fewest_rows_per_thread
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.emit import Emitter
from rankopt.passes.field_pieces import emit_pieces
from rankopt.passes.graph import aten, fake
from rankopt.passes.interactions import (
    Interaction,
    find_dot_interactions,
    find_sums_over_pairs,
)
from rankopt.passes.order import written_roots


class FuseInteraction(Pass):
    """Compute feature interactions in one call that reads the fields where they lie.

    `dot` is DLRM's interaction and PNN's inner product: the products of all pairs of fields, each
    pair once, in the order of a lower or upper triangle. The stack of the fields, the square of all
    products, the selection of a triangle and the concatenation behind a dense vector go with it.
    `sum` is a factorization machine written by Rendle's identity, with or without the last sum
    over the columns (NFM's pooling).

    Cross layers are left as they are: x0 * (W x + b) + x is a linear layer, which `quantize_dense`
    takes, and one pass over the row, which the compiler already makes of it.

    Put it behind the passes on embeddings, whose calls lay the fields side by side.

    Example:
        ```yaml
        - fuse_interaction: {forms: [dot, sum]}
        ```
    """

    kind: ClassVar[str] = "fuse_interaction"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact"})
    provides: ClassVar[frozenset[str]] = frozenset({"fused_interaction"})

    forms: tuple[Literal["dot", "sum"], ...] = ("dot", "sum")
    """Which interactions to fuse."""
    rows_per_thread: int | None = Field(default=None, ge=0)
    """Rows that pay for waking another thread; 0 estimates it, none given measures it here."""

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Replace every interaction that is found; say of the others why not."""
        load_kernels()
        changed = False

        def rewrite(module: GraphModule) -> None:
            nonlocal changed
            emitter = Emitter(module)
            # One at a time: what one call absorbs may be a piece of the next.
            while (found := self._next(module)) is not None:
                self._replace(emitter, found)
                module.graph.eliminate_dead_code()
                changed = True
            for refused in self._find(module):
                reason = refused.refusal or "its fields are written into"
                context.note(f"{refused.first.name}: left alone, {reason}")

        fused = bundle.edit(rewrite, provided=bundle.provided | self.provides)
        return fused if changed else bundle

    def _find(self, module: GraphModule) -> list[Interaction]:
        found = find_dot_interactions(module) if "dot" in self.forms else []
        return found + (find_sums_over_pairs(module) if "sum" in self.forms else [])

    def _next(self, module: GraphModule) -> Interaction | None:
        written = written_roots(module.graph)
        for found in self._find(module):
            # The call reads its fields later than the graph did: nothing may write in between.
            if found.refusal is None and not any(span.root in written for span in found.fields):
                return found
        return None

    def _replace(self, emitter: Emitter, found: Interaction) -> None:
        emit = self._dot if found.form == "dot" else self._sum
        with emitter.before(found.end):
            result = emit(emitter, found, emit_pieces(emitter, found.fields))
            shape = fake(found.end).shape
            if fake(result).shape[1:] != shape[1:]:
                result = emitter.call(aten.reshape.default, result, [-1, *shape[1:]])
        emitter.replace(found.end, result)

    def _dot(self, emitter: Emitter, found: Interaction, fields: list[Node]) -> Node:
        before = emit_pieces(emitter, found.before)
        result = emitter.call(
            torch.ops.rankopt.dot_interaction.default,
            before,
            fields,
            found.dim,
            found.upper,
            found.diagonal,
            self._rows(found),
        )
        if found.after:
            result = emitter.call(aten.cat.default, [result, *found.after], 1)
        return result

    def _sum(self, emitter: Emitter, found: Interaction, fields: list[Node]) -> Node:
        result = emitter.call(
            torch.ops.rankopt.fm_interaction.default,
            fields,
            found.dim,
            found.total,
            self._rows(found),
        )
        if found.factor != 1.0:
            result = emitter.call(aten.mul.Tensor, result, found.factor)
        return result

    def _rows(self, found: Interaction) -> int:
        if self.rows_per_thread is not None:
            return self.rows_per_thread
        return fewest_rows_per_thread(found.form, found.num_fields, found.dim)
