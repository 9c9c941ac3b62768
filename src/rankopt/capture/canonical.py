"""Rewrite an exported graph into the forms that the passes know.

`torch.export` keeps what a model's author wrote: a product by `matmul`, `tensordot` or a
convolution, a table read by indexing, weights sliced and transposed in `forward`, dropout that does
nothing. All of it is exact algebra away from `aten.linear` and `aten.embedding` on constants, and
that is done here once, at capture, so that no pass has to know the other spellings.

Every rewrite is exact up to fp32 rounding; what is folded into a weight is computed in fp64.
Nothing is stored twice for it: an embedding table that a product reads too is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from rankopt.capture.absorb import absorb_followers
from rankopt.capture.folding import fold_constants
from rankopt.capture.inplace import (
    drop_identities,
    own_inputs,
    plain_results,
    views_to_reshapes,
)
from rankopt.capture.lookups import (
    blocks_to_whole_tables,
    indexing_to_lookups,
    padded_bags,
)
from rankopt.capture.max_norm import fold_max_norm
from rankopt.capture.pieces import share_pieces
from rankopt.capture.products import products_to_linears
from rankopt.passes.emit import Emitter
from rankopt.passes.graph import owner


def canonicalise(graph_module: GraphModule) -> tuple[str, ...]:
    """Rewrite an unlifted exported graph in place.

    The caller traces the graph again, which also drops the constants that nothing reads any more.

    Args:
        graph_module: `ExportedProgram.module()`, not decomposed. The tensors it shares with the
            user's module are replaced, never written into.

    Returns:
        One note per kind of thing that was done, or deliberately not done.
    """
    emitter = Emitter(graph_module)
    notes: list[str] = []
    scaled, unscaled = fold_max_norm(emitter)
    if scaled:
        notes.append(f"{_listed(scaled)}: rows scaled to max_norm once, not at every lookup")
    if unscaled:
        notes.append(
            f"{_listed(unscaled)}: rows are scaled to max_norm while scoring, since not all that "
            "reads them scales them alike"
        )
    own_inputs(emitter)
    views_to_reshapes(emitter)
    dropouts = drop_identities(emitter)
    plain_results(emitter)
    lookups = indexing_to_lookups(emitter) + blocks_to_whole_tables(emitter, axis=0)
    folded = fold_constants(emitter)
    # Tables that folding made, and columns that it left, since their table is read elsewhere too.
    lookups += indexing_to_lookups(emitter) + blocks_to_whole_tables(emitter, axis=1)
    linears, outer, tied = products_to_linears(emitter)
    followers = absorb_followers(emitter)
    bags = padded_bags(emitter)
    repeated = share_pieces(emitter)
    counted = (
        (dropouts, "dropout outside training removed"),
        (lookups, "read of rows written as a lookup"),
        (folded, "result of constants computed once"),
        (linears, "product with a constant matrix written as a linear layer"),
        (outer, "product of one term written as a multiplication"),
        (followers["bias"], "constant after a product taken as its bias"),
        (followers["batch_norm"], "batch normalisation folded into the layer before it"),
        (followers["activation"], "activation moved in front of a reshape"),
        (bags, "bag with a padding row written as a sum"),
        (repeated, "concatenation that repeats its pieces written as a selection"),
    )
    notes += [f"{count} x {what}" for count, what in counted if count]
    if tied:
        names = [owner(path) for path in dict.fromkeys(tied)]
        notes.append(f"{_listed(names)}: a product reads this embedding table too; left as it is")
    emitter.restore_names()
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    return tuple(notes)


def _listed(names: Sequence[str], shown: int = 3) -> str:
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")
