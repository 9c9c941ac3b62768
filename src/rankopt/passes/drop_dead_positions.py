"""drop_dead_positions: compute the positions of a sequence that the scores depend on."""

from __future__ import annotations

from typing import ClassVar

from torch.fx import GraphModule

from rankopt.bundle import ModelBundle
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.passes.dead_outputs import drop_dead_outputs
from rankopt.passes.emit import Emitter
from rankopt.passes.positions import narrow_positions


class DropDeadPositions(Pass):
    """Compute only the positions that are read, back through layers that treat positions alike.

    A model that runs a whole sequence through its last block and scores the last state needs that
    block's queries, gates and outputs at one position only. Exact up to the order of sums. After
    `fuse_attention`, which leaves such positions out by itself where it understands the history.

    Example:
        ```yaml
        - drop_dead_positions: {}
        ```
    """

    kind: ClassVar[str] = "drop_dead_positions"
    purpose: ClassVar[Purpose] = "latency"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact", "low_precision_dense"})
    provides: ClassVar[frozenset[str]] = frozenset({"live_positions"})

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Narrow every choice of a position that saves a product."""
        done: list[str] = []

        def rewrite(module: GraphModule) -> None:
            emitter = Emitter(module)
            done.extend(narrow_positions(emitter))
            if done:
                module.graph.eliminate_dead_code()
                drop_dead_outputs(emitter)
                emitter.restore_names()

        narrowed = bundle.edit(rewrite, provided=bundle.provided | self.provides)
        for note in done:
            context.note(note)
        return narrowed if done else bundle
