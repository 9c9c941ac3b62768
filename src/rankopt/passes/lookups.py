"""Find every lookup of rows of a constant table in an exported graph.

Shapes: N rows of a table, D its width, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.passes.graph import (
    BAG_OPERATORS,
    arguments,
    aten,
    constant,
    fake,
    is_lookup_of,
    owner,
    schema_values,
)

_MODES: tuple[Literal["sum", "mean", "max"], ...] = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows read from one constant table.

    Attributes:
        node: the node whose value consumers use (pooled [B, D], or rows [..., D]).
        operator: the lookup operator itself (differs from `node` for embedding_bag's tuple).
        table: name of the table, such as `tables.user`.
        form: `bag` (pooled), `single` (one row per candidate) or `sequence` (many, not pooled).
        indices, offsets, weights: input nodes; offsets and weights are None where there are none.
        mode: pooling of a bag.
        include_last: offsets carry a closing entry.
        refusal: why the lookup cannot be moved; None when it can.
        unbatched: why a call cannot pool it, though its rows can be moved.
        shares_padding: its bag leaves out a row that another lookup of the table reads.
    """

    node: Node
    operator: Node
    table: str
    weight: Tensor
    form: Literal["bag", "single", "sequence"]
    indices: Node
    offsets: Node | None = None
    weights: Node | None = None
    mode: Literal["sum", "mean", "max"] = "sum"
    include_last: bool = False
    padding_idx: int | None = None
    refusal: str | None = None
    unbatched: str | None = None
    shares_padding: bool = False


def find_lookups(module: GraphModule) -> list[Lookup]:
    """List every lookup on a constant table, in graph order, refused ones with their reason."""
    found = list(_lookups(module))
    tied = _tied_tables(module, found)
    complete = []
    for lookup in found:
        shares_padding = _shares_padding(lookup, found)
        unbatched = lookup.unbatched
        if shares_padding and unbatched is None:
            unbatched = f"it leaves out row {lookup.padding_idx}, which another lookup reads"
        complete.append(
            replace(
                lookup,
                refusal=lookup.refusal or tied.get(lookup.table),
                unbatched=unbatched,
                shares_padding=shares_padding,
            )
        )
    return complete


def _shares_padding(lookup: Lookup, found: list[Lookup]) -> bool:
    """Tell whether another lookup of the table reads the row that a bag leaves out.

    A batched sum leaves a row out by holding zeros in it, so the row must be zero already or be
    left out by every lookup of the table.
    """
    padding = lookup.padding_idx
    if padding is None or not bool(lookup.weight[padding].any()):
        return False
    others = [other for other in found if other.table == lookup.table]
    return any(other.padding_idx != padding for other in others)


def _tied_tables(module: GraphModule, found: list[Lookup]) -> dict[str, str]:
    """Say of every table whose rows something else reads too what that is."""
    readers: dict[int, list[Node]] = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = constant(module, node)
        if value is not None and value.numel():
            readers.setdefault(value.data_ptr(), []).append(node)
    tied = {}
    for lookup in found:
        same = readers.get(lookup.weight.data_ptr(), [])
        others = [u for node in same for u in node.users if not is_lookup_of(u, node)]
        if others:
            kind = str(others[0].target).removeprefix("aten.").partition(".")[0]
            tied[lookup.table] = (
                f"its rows are the operand of {kind!r} too (tied weights), so its fp32 copy stays"
            )
    return tied


def _lookups(module: GraphModule) -> Iterator[Lookup]:
    for node in module.graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        weight = constant(module, arguments(node)[0])
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            continue
        if node.target == aten.embedding.default:
            yield _rows_lookup(node, weight)
        elif node.target in BAG_OPERATORS:
            lookup = _bag_lookup(node, weight)
            if lookup is not None:
                yield lookup


def _rows_lookup(node: Node, weight: Tensor) -> Lookup:
    indices = arguments(node)[1]
    shape = fake(indices).shape
    one_each = len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)
    return Lookup(
        node=node,
        operator=node,
        table=owner(str(arguments(node)[0].target)),
        weight=weight,
        form="single" if one_each and _is_batch(node.graph, shape[0]) else "sequence",
        indices=indices,
        refusal=_refuse_table(arguments(node)[0], weight),
    )


def _is_batch(graph: torch.fx.Graph, size: object) -> bool:
    """Tell whether a size is that of some input's first dim which is also an output's."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    first = next(iter(output.all_input_nodes))
    return bool(str(fake(first).shape[0]) == str(size))


def _bag_lookup(node: Node, weight: Tensor) -> Lookup | None:
    values = schema_values(node)
    pooled = [user for user in node.users if arguments(user)[1:] == (0,)]
    if len(pooled) != 1:
        return None
    mode = _MODES[values["mode"]]
    padding = values.get("padding_idx")
    if padding is not None and padding < 0:
        # Only the public overload counts from the end; to the others a negative one means none.
        counts_back = node.target == aten.embedding_bag.padding_idx
        padding = padding + len(weight) if counts_back else None
    unbatched = None
    if mode == "max":
        unbatched = "lookup calls pool by sum or mean, and this bag takes the maximum"
    elif mode == "mean" and padding is not None:
        unbatched = "its mean leaves out padding_idx, which lookup calls count"
    return Lookup(
        node=pooled[0],
        operator=node,
        table=owner(str(arguments(node)[0].target)),
        weight=weight,
        form="bag",
        indices=values["indices"],
        offsets=values["offsets"],
        weights=values.get("per_sample_weights"),
        mode=mode,
        include_last=bool(values.get("include_last_offset")),
        padding_idx=padding,
        refusal=_refuse_table(arguments(node)[0], weight),
        unbatched=unbatched,
    )


def _refuse_table(source: Node, weight: Tensor) -> str | None:
    if weight.dtype != torch.float32:
        return f"its table is {weight.dtype}, not float32"
    detached = [user for user in source.users if user.target == aten.detach.default]
    writers = [
        user
        for holder in [source, *detached]
        for user in holder.users
        if getattr(getattr(user.target, "_schema", None), "is_mutable", False)
        and arguments(user)[:1] == (holder,)
    ]
    if writers:
        return f"{writers[0].target} changes its rows while scoring (max_norm)"
    return None
