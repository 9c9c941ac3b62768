"""Find things in an exported graph, and put constants into it.

Works on the unlifted form of an ExportedProgram: weights are `get_attr` nodes, operators are
functional ATen. A model's own module structure plays no part, so a model nobody here wrote is read
the same way.

Shapes: N rows of a table, D its width, B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten

PREFIX = "model."
"""ServingModule's name for the wrapped module; user-facing names go without it."""


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


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer on constant weights, with the activation that may go into its epilogue.

    Attributes:
        node: the `aten.linear` node.
        layer: name of the layer, such as `top.0`.
        weight: fp32 [N, K]; bias [N] or None.
        last: the activation's node when one follows alone, else `node`.
        slope: 0.0 for ReLU, the slope of LeakyReLU, the name of PReLU's weight; None without.
    """

    node: Node
    layer: str
    weight: Tensor
    bias: Tensor | None
    last: Node
    slope: float | str | None = None


def arguments(node: Node) -> tuple[Any, ...]:
    """Return a node's positional arguments; fx types them as a union of some twenty."""
    return node.args


def constant(module: GraphModule, node: object) -> Tensor | None:
    """Return the tensor behind a `get_attr` node; None for anything else."""
    if not isinstance(node, Node) or node.op != "get_attr":
        return None
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value.detach() if isinstance(value, Tensor) else None


def add_constant(module: GraphModule, name: str, value: Tensor) -> str:
    """Register a tensor as a buffer under a name that is free, and return that name."""
    free = free_name(module, name)
    module.register_buffer(free, value)
    return free


def free_name(module: GraphModule, name: str) -> str:
    """Return `name`, dots flattened, with a number behind it where the module has it already."""
    flat = name.replace(".", "_")
    free, count = flat, 1
    while hasattr(module, free):
        free, count = f"{flat}_{count}", count + 1
    return free


class LayerConstants:
    """New constants of layers; a layer that is applied twice stores them once."""

    def __init__(self, module: GraphModule) -> None:
        self._module = module
        self._names: dict[tuple[str, str], str] = {}

    def node(self, linear: Linear, suffix: str, make: Callable[[], Tensor]) -> Node:
        """Return a node that reads the layer's constant, made when it is first asked for."""
        key = (linear.layer, suffix)
        if key not in self._names:
            value = make().contiguous()
            self._names[key] = add_constant(self._module, f"{linear.layer}_{suffix}", value)
        return self._module.graph.get_attr(self._names[key])


def owner(name: str) -> str:
    """Name a weight's table or layer: `model.tables.user.weight` belongs to `tables.user`."""
    return name.removeprefix(PREFIX).removesuffix(".weight")


def fake(node: Node) -> Tensor:
    """Return the fake tensor that tracing left on a node (its shape may be symbolic)."""
    value: Tensor = node.meta["val"]
    return value


def find_lookups(module: GraphModule) -> list[Lookup]:
    """List every lookup on a constant table, in graph order, refused ones with their reason."""
    found = list(_lookups(module))
    return [
        replace(lookup, refusal=lookup.refusal or _padding_refusal(lookup, found))
        for lookup in found
    ]


def _padding_refusal(lookup: Lookup, found: list[Lookup]) -> str | None:
    """Refuse a bag whose left-out row another lookup of the table reads.

    A batched sum leaves a row out by holding zeros in it, so the row must be zero already or be
    left out by every lookup of the table.
    """
    padding = lookup.padding_idx
    if padding is None or not bool(lookup.weight[padding].any()):
        return None
    others = [other for other in found if other.table == lookup.table]
    if all(other.padding_idx == padding for other in others):
        return None
    return f"its sum leaves out row {padding}, which another lookup of the table reads"


def _lookups(module: GraphModule) -> Iterator[Lookup]:
    for node in module.graph.nodes:
        if node.op != "call_function" or not node.args:
            continue
        weight = constant(module, arguments(node)[0])
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            continue
        if node.target == aten.embedding.default:
            yield _rows_lookup(node, weight)
        elif node.target in _BAG_OPERATORS:
            lookup = _bag_lookup(node, weight)
            if lookup is not None:
                yield lookup


_BAG_OPERATORS = {
    aten.embedding_bag.padding_idx,
    aten.embedding_bag.default,
    aten._embedding_bag_forward_only.default,
    aten._embedding_bag.default,
}
_MODES: tuple[Literal["sum", "mean", "max"], ...] = ("sum", "mean", "max")


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
    target: Any = node.target
    schema = target._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    pooled = [user for user in node.users if arguments(user)[1:] == (0,)]
    if len(pooled) != 1:
        return None
    mode = _MODES[values["mode"]]
    padding = values.get("padding_idx")
    padding = None if padding is None or padding < 0 else padding
    refusal = _refuse_table(arguments(node)[0], weight)
    if mode == "max":
        refusal = "table-batched lookups pool by sum or mean, and this bag takes the maximum"
    elif mode == "mean" and padding is not None:
        refusal = "its mean leaves out padding_idx, which table-batched lookups count"
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
        refusal=refusal,
    )


def _refuse_table(source: Node, weight: Tensor) -> str | None:
    if weight.dtype != torch.float32:
        return f"its table is {weight.dtype}, not float32"
    writers = [
        user
        for detached in [source, *source.users]
        for user in detached.users
        if user.op == "call_function" and str(user.target).endswith("_.default")
    ]
    if writers:
        return f"{writers[0].target} changes its rows while scoring (max_norm)"
    return None


def find_linears(module: GraphModule) -> list[Linear]:
    """List every `aten.linear` whose weight is a constant, with its fusable activation."""
    found = []
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = constant(module, arguments(node)[1])
        if weight is None or weight.dtype != torch.float32:
            continue
        bias_node = arguments(node)[2] if len(node.args) > 2 else None
        bias = constant(module, bias_node)
        if bias_node is not None and bias is None:
            continue
        last, slope = _activation(module, node)
        found.append(
            Linear(
                node=node,
                layer=owner(str(arguments(node)[1].target)),
                weight=weight,
                bias=bias,
                last=last,
                slope=slope,
            )
        )
    return found


def _activation(module: GraphModule, node: Node) -> tuple[Node, float | str | None]:
    """Look for ReLU, LeakyReLU or PReLU as the only reader of a linear."""
    if len(node.users) != 1:
        return node, None
    user = next(iter(node.users))
    if user.target in (aten.relu.default, aten.relu_.default):
        return user, 0.0
    if user.target in (aten.leaky_relu.default, aten.leaky_relu_.default):
        slope = arguments(user)[1] if len(user.args) > 1 else 0.01
        return user, float(slope)
    if user.target == aten.prelu.default:
        weight = constant(module, arguments(user)[1])
        # PReLU's channels are dim 1; only for a 2-D input is that the linear's last dim.
        per_channel = weight is not None and weight.numel() > 1
        if weight is not None and (not per_channel or fake(node).dim() == 2):
            return user, str(arguments(user)[1].target)
    return node, None


def describe_shape(value: Tensor) -> str:
    """Write a shape for a message, symbolic dims by their names."""
    return "[" + ", ".join(str(size) for size in value.shape) + "]"
