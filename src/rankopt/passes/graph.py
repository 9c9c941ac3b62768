"""Find things in an exported graph, and put constants into it.

Works on the unlifted form of an ExportedProgram: weights are `get_attr` nodes, operators are
functional ATen. A model's own module structure plays no part, so a model nobody here wrote is read
the same way.

Shapes: N outputs and K inputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

aten = torch.ops.aten

PREFIX = "model."
"""ServingModule's name for the wrapped module; user-facing names go without it."""


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer on constant weights, with the activation that may go into its epilogue.

    Attributes:
        node: the `aten.linear` node.
        layer: name of the layer, such as `top.0`.
        weight: fp32 [N, K]; bias [N] or None.
        last: the activation's node when one follows alone, else `node`.
        slope: 0.0 for ReLU, the slope of LeakyReLU, the name of PReLU's weight; None without.
        activation: `silu` or `sigmoid`; `none` without.
        tied: the weight is an embedding table too.
    """

    node: Node
    layer: str
    weight: Tensor
    bias: Tensor | None
    last: Node
    slope: float | str | None = None
    activation: str = "none"
    tied: bool = False


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


def replace_linear(node: Node, new: Node) -> None:
    """Let the readers of a layer read `new`; dead in-place activations would count as effects."""
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    node.graph.erase_node(node)


def owner(name: str) -> str:
    """Name a weight's table or layer: `model.tables.user.weight` belongs to `tables.user`."""
    return name.removeprefix(PREFIX).removesuffix(".weight")


def fake(node: Node) -> Tensor:
    """Return the fake tensor that tracing left on a node (its shape may be symbolic)."""
    value: Tensor = node.meta["val"]
    return value


BAG_OPERATORS: frozenset[Any] = frozenset(
    {
        aten.embedding_bag.padding_idx,
        aten.embedding_bag.default,
        aten._embedding_bag_forward_only.default,
        aten._embedding_bag.default,
    }
)
LOOKUP_OPERATORS: frozenset[Any] = BAG_OPERATORS | {aten.embedding.default}


def is_table(module: GraphModule, path: str) -> bool:
    """Tell whether a lookup reads rows of a constant."""
    return any(_looks_up(reader) for reader in module.graph.find_nodes(op="get_attr", target=path))


def _looks_up(reader: Node) -> bool:
    return any(is_lookup_of(user, reader) for user in reader.users)


def is_lookup_of(user: Node, reader: Node) -> bool:
    """Tell whether a node looks rows up in what another node reads."""
    return user.target in LOOKUP_OPERATORS and arguments(user)[0] is reader


def schema_values(node: Node) -> dict[str, Any]:
    """Return an operator's arguments by name, defaults filled in."""
    target: Any = node.target
    schema = target._schema
    values = {argument.name: argument.default_value for argument in schema.arguments}
    values.update(zip((a.name for a in schema.arguments), node.args, strict=False))
    values.update(node.kwargs)
    return values


def find_linears(module: GraphModule) -> list[Linear]:
    """List every `aten.linear` whose weight is a constant, with its fusable activation."""
    found = []
    for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
        weight = constant(module, arguments(node)[1])
        if weight is None or weight.dtype != torch.float32 or weight.dim() != 2:
            continue
        bias_node = arguments(node)[2] if len(node.args) > 2 else None
        bias = constant(module, bias_node)
        if bias_node is not None and bias is None:
            continue
        last, slope = _slope(module, node)
        activation = "none"
        if last is node:
            last, activation = _smooth(node)
        found.append(
            Linear(
                node=node,
                layer=owner(str(arguments(node)[1].target)),
                weight=weight,
                bias=bias,
                last=last,
                slope=slope,
                activation=activation,
                tied=is_table(module, str(arguments(node)[1].target)),
            )
        )
    return found


def _smooth(node: Node) -> tuple[Node, str]:
    """Look for SiLU or a sigmoid as the only reader of a linear; x * sigmoid(x) reads it twice."""
    users = list(node.users)
    if len(users) == 1 and users[0].target in _SMOOTH:
        return users[0], _SMOOTH[users[0].target]
    gates = [user for user in users if user.target is aten.sigmoid.default]
    products = [user for user in users if user.target is aten.mul.Tensor]
    if len(users) == 2 and len(gates) == len(products) == 1:
        (gate,), (product,) = gates, products
        if set(gate.users) == {product} and set(product.all_input_nodes) == {node, gate}:
            return product, "silu"
    return node, "none"


_SMOOTH: dict[Any, str] = {
    aten.silu.default: "silu",
    aten.silu_.default: "silu",
    aten.sigmoid.default: "sigmoid",
    aten.sigmoid_.default: "sigmoid",
}


def _slope(module: GraphModule, node: Node) -> tuple[Node, float | str | None]:
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
