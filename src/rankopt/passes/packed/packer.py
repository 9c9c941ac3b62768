"""Go through a graph behind one rectangle and have each operator followed.

Shapes: as in `packed`.
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import aten
from rankopt.passes.packed import attention, layout, masks, tokens
from rankopt.passes.packed.packing import Packing
from rankopt.passes.packed.values import Packed, PackingError
from rankopt.passes.rectangles import Rectangle

_FOLLOWED = tokens.FOLLOWED | layout.FOLLOWED | masks.FOLLOWED | attention.FOLLOWED


def pack(module: GraphModule, emitter: Emitter, rectangle: Rectangle) -> list[str]:
    """Rewrite what one rectangle feeds.

    Returns:
        What was done, one sentence per attention.

    Raises:
        PackingError: something that reads the rectangle is not understood; the graph computes
            what it did before.
    """
    packing = Packing(module, emitter, rectangle)
    ragged, values = rectangle.ragged, packing.values
    values[rectangle.node] = Packed(ragged.values, fill=rectangle.fill)
    ends: dict[Node, Node] = {}
    checks: list[Node] = []
    for node in list(module.graph.nodes):
        read = [each for each in node.all_input_nodes if each in values]
        if node.op == "output" and read:
            raise PackingError("the graph returns the states of its places")
        if not read or node in values or node.target is aten.sym_size.int:
            continue
        if node.target is aten._assert_tensor_metadata.default:
            checks.append(node)
            continue
        follow = _FOLLOWED.get(node.target)
        if follow is None:
            raise packing.unknown(node)
        with emitter.before(node):
            done = follow(packing, node)
        if isinstance(done, Node):
            ends[node] = done
        else:
            values[node] = done
    if not ends or not packing.notes:
        raise PackingError("no attention and no masked sum reads it")
    for old, new in ends.items():
        emitter.replace(old, new)
    for check in checks:  # of what is gone; it would stay for their sake
        module.graph.erase_node(check)
    return packing.notes
