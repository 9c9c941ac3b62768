"""fuse_attention: attention over ragged histories without work for padding."""

from __future__ import annotations

from typing import ClassVar

from torch.fx import GraphModule

from rankopt.bundle import ModelBundle
from rankopt.kernels.build import load_kernels
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.dead_outputs import drop_dead_outputs
from rankopt.passes.emit import Emitter
from rankopt.passes.packed.packer import pack
from rankopt.passes.packed.values import PackingError
from rankopt.passes.places import fuse_places
from rankopt.passes.rectangles import find_rectangles, joined_lookups


class FuseAttention(Pass):
    """Compute a padded history's tokens where an id stands, and nowhere else.

    Layers that treat tokens alike run on the ids of all rows, one after the other, as they came in.
    HSTU attention and the weighted sum of a target attention become operators that read the
    lengths; a token of the candidate's own, after the history, is kept apart from it. Target
    attention over the candidate, an id, their difference and their product takes its whole MLP
    along, in fp32. Exact up to the order of sums.

    Where tokens and padding cannot be taken apart (lists inside a packed matrix, lists that are
    joined, masks that look at the ids, softmax), the rectangle stays and target attention becomes
    an operator that reads the graph's own mask: the MLP runs where it is true.

    Before passes that replace lookups or layers: this one reads them as they are.

    Example:
        ```yaml
        - fuse_attention: {}
        ```
    """

    kind: ClassVar[str] = "fuse_attention"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset(
        {"artifact", "fused_embeddings", "quantized_embeddings", "low_precision_dense"}
    )
    provides: ClassVar[frozenset[str]] = frozenset({"packed_attention"})

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Pack what can be packed; say what cannot."""
        load_kernels()
        done: list[str] = []

        def rewrite(module: GraphModule) -> None:
            emitter = Emitter(module)
            refused = [
                f"{name}: stays padded, {lookup.name} looks its ids up among others"
                for name, lookup in joined_lookups(module, bundle.card)
            ]
            for rectangle in find_rectangles(module, bundle.card):
                try:
                    notes = pack(module, emitter, rectangle)
                except PackingError as reason:
                    refused.append(f"{rectangle.ragged.name}: stays padded, {reason}")
                else:
                    done.extend(notes)
            module.graph.eliminate_dead_code()  # what a list that stays had come to
            fused, left = fuse_places(module, emitter)
            done.extend(fused)
            for note in refused + left:
                context.note(note)
            if done:
                module.graph.eliminate_dead_code()
                drop_dead_outputs(emitter)

        packed = bundle.edit(rewrite, provided=bundle.provided | self.provides)
        for note in done:
            context.note(note)
        return packed if done else bundle
