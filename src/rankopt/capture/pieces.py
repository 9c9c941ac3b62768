"""Write a concatenation that repeats its pieces as a selection from what they are made of.

Models that pair up all fields (AFM, FiBiNET, field-aware machines) concatenate each field's vector
once per pair: 36 pairs of 9 fields are 72 copies of 9 vectors. Selected by a constant index, each
vector is stored once, and the product of a pair reads it where it lies.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten

FEWEST_REPEATS = 2
"""How often a piece must stand in a concatenation, on average."""


def share_pieces(emitter: Emitter) -> int:
    """Rewrite every concatenation that repeats its pieces; returns how many."""
    found = 0
    for node in emitter.graph.find_nodes(op="call_function", target=aten.cat.default):
        if _share(emitter, node):
            found += 1
    return found


def _share(emitter: Emitter, node: Node) -> bool:
    pieces = list(arguments(node)[0])
    unique = list(dict.fromkeys(pieces))
    if len(unique) < 2 or len(pieces) < FEWEST_REPEATS * len(unique):
        return False
    dim = arguments(node)[1] if len(node.args) > 1 else 0
    widths = [piece.meta["val"].shape[dim] for piece in unique]
    if not all(isinstance(width, int) for width in widths):
        return False
    starts = dict(zip(unique, accumulate(widths, initial=0), strict=False))
    spans = [range(starts[piece], starts[piece] + piece.meta["val"].shape[dim]) for piece in pieces]
    places = torch.tensor([place for span in spans for place in span])
    with emitter.before(node):
        whole = emitter.call(aten.cat.default, unique, dim)
        index = emitter.read(emitter.add("pieces", places))
        chosen = emitter.call(aten.index_select.default, whole, dim, index)
    emitter.replace(node, chosen)
    return True
