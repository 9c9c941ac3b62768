"""Let linear layers take in what follows them alone.

A constant that is added becomes the bias, batch normalisation becomes other weights, and an
activation moves in front of reshapes so that it stands right behind its layer, where a kernel can
take it into its epilogue.

Shapes: N outputs of a layer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake, is_table

_ACTIVATIONS: dict[Any, Any] = {
    aten.relu.default: aten.relu.default,
    aten.relu_.default: aten.relu.default,
    aten.leaky_relu.default: aten.leaky_relu.default,
    aten.leaky_relu_.default: aten.leaky_relu.default,
    aten.prelu.default: aten.prelu.default,
}


def absorb_followers(emitter: Emitter) -> Counter[str]:
    """Fold what follows each linear layer; returns how many of each kind."""
    done: Counter[str] = Counter()
    for linear in list(emitter.graph.find_nodes(op="call_function", target=aten.linear.default)):
        value = fake(linear)
        if value.dtype != torch.float32 or not isinstance(value.shape[-1], int):
            continue  # a weight with one dim leaves the batch last
        while (kind := _absorb_next(emitter, linear)) is not None:
            done[kind] += 1
            if kind == "activation":
                break
    return done


def _absorb_next(emitter: Emitter, linear: Node) -> str | None:
    top = linear
    dim: int | None = fake(linear).dim() - 1
    while len(top.users) == 1:
        user = next(iter(top.users))
        if user.target in _ACTIVATIONS:
            return "activation" if _take_activation(emitter, linear, top, user) else None
        if user.target in _ADDITIONS:
            taken = dim is not None and _take_bias(emitter, linear, top, dim, user)
            return "bias" if taken else None
        if user.target == aten.batch_norm.default:
            taken = dim == 1 and _take_batch_norm(emitter, linear, top, user)
            return "batch_norm" if taken else None
        if user.target not in _SHAPES:
            return None
        dim = None if dim is None else _follow(user, dim)
        top = user
    return None


_ADDITIONS: dict[Any, float] = {
    aten.add.Tensor: 1.0,
    aten.add_.Tensor: 1.0,
    aten.sub.Tensor: -1.0,
    aten.sub_.Tensor: -1.0,
}
_SHAPES: frozenset[Any] = frozenset(
    {
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.default,
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.contiguous.default,
    }
)


def _follow(node: Node, dim: int) -> int | None:
    """Return where a layer's outputs lie after a change of shape; None where that is no one dim."""
    target, rest = node.target, arguments(node)[1:]
    before, after = fake(arguments(node)[0]), fake(node)
    num = before.dim()
    moved: int | None = None
    if target == aten.transpose.int:
        first, second = (axis % num for axis in rest[:2])
        moved = {first: second, second: first}.get(dim, dim)
    elif target == aten.permute.default:
        moved = [axis % num for axis in rest[0]].index(dim)
    elif target == aten.unsqueeze.default:
        moved = dim + (rest[0] % (num + 1) <= dim)
    elif target == aten.squeeze.dim:
        squeezed = after.dim() < num
        at = rest[0] % num
        moved = None if squeezed and at == dim else dim - (squeezed and at < dim)
    elif target == aten.contiguous.default:
        moved = dim
    elif dim == num - 1 and isinstance(before.shape[-1], int):
        # A reshape: row by row, the last dim stays what it was as long as its size does.
        moved = after.dim() - 1 if after.shape[-1] == before.shape[-1] else None
    return moved


def _take_bias(emitter: Emitter, linear: Node, top: Node, dim: int, add: Node) -> bool:
    if len(linear.args) > 2 and linear.args[2] is not None:
        return False
    left, right = arguments(add)[:2]
    other, sign = right if left is top else left, _ADDITIONS[add.target]
    if sign < 0 and left is not top:
        return False
    value = constant(emitter.module, other)
    if value is None or add.kwargs.get("alpha", 1) != 1 or value.dtype != torch.float32:
        return False
    shape, num_outputs = fake(top).shape, int(fake(linear).shape[-1])
    if str(shape) != str(fake(add).shape) or value.dim() > len(shape):
        return False
    aligned = [1] * (len(shape) - value.dim()) + list(value.shape)
    if any(size != 1 for axis, size in enumerate(aligned) if axis != dim):
        return False
    if aligned[dim] not in (1, num_outputs) or is_table(emitter.module, str(other.target)):
        return False
    name = emitter.derive(
        str(other.target),
        f"bias {num_outputs} {sign}",
        lambda constant: (constant if sign > 0 else -constant).reshape(-1).expand(num_outputs),
    )
    with emitter.before(linear):
        bias = emitter.read(name)
    linear.args = (*linear.args[:2], bias)
    emitter.replace(add, top)
    return True


def _take_batch_norm(emitter: Emitter, linear: Node, top: Node, norm: Node) -> bool:
    given, inputs = arguments(norm), arguments(linear)
    training, eps = given[5], given[7]
    bias_node: Node | None = inputs[2] if len(inputs) > 2 else None
    path = str(inputs[1].target)
    weight, bias = constant(emitter.module, inputs[1]), constant(emitter.module, bias_node)
    if training or given[0] is not top or weight is None or is_shared(emitter, path):
        return False
    if weight.dtype != torch.float32 or weight.dim() != 2:
        return False
    values = [constant(emitter.module, node) for node in given[1:5]]
    read = [(bias_node, bias), *zip(given[1:5], values, strict=True)]
    if any(node is not None and value is None for node, value in read):
        return False
    gain, shift, mean, variance = (None if v is None else v.double() for v in values)
    if mean is None or variance is None:
        return False
    scale = (variance + eps).rsqrt() * (1.0 if gain is None else gain)
    offset = (-mean if bias is None else bias.double() - mean) * scale
    offset = offset if shift is None else offset + shift
    folded = weight.double() * scale[:, None]
    if not bool(torch.isfinite(folded).all()) or not bool(torch.isfinite(offset).all()):
        return False
    emitter.overwrite(path, folded.float())
    _set_bias(emitter, linear, bias_node, offset.float())
    emitter.replace(norm, top)
    return True


def _set_bias(emitter: Emitter, linear: Node, before: Node | None, value: Tensor) -> None:
    if before is not None and not is_shared(emitter, str(before.target)):
        emitter.overwrite(str(before.target), value)
        return
    weight_path = str(arguments(linear)[1].target)
    parent, _, _ = weight_path.rpartition(".")
    beside = f"{parent}.bias" if parent else "bias"
    with emitter.before(linear):
        new = emitter.read(emitter.add(beside, value))
    linear.args = (*linear.args[:2], new)


def is_shared(emitter: Emitter, path: str) -> bool:
    """Tell whether a constant is read more than once, under any name."""
    if emitter.num_users(path) != 1:
        return True
    value = constant(emitter.module, emitter.readers(path)[0])
    for node in emitter.graph.find_nodes(op="get_attr"):
        other = constant(emitter.module, node) if node.users else None
        if value is None or other is None or not other.numel() or str(node.target) == path:
            continue
        if other.data_ptr() == value.data_ptr():
            return True
    return False


def _take_activation(emitter: Emitter, linear: Node, top: Node, activation: Node) -> bool:
    if top is linear or arguments(activation)[0] is not top:
        return False
    if activation.target == aten.prelu.default:
        slope = constant(emitter.module, arguments(activation)[1])
        # A slope per channel belongs to dim 1 of what it is applied to.
        if slope is None or slope.numel() != 1:
            return False
    first = next(iter(linear.users))
    with emitter.before(linear.next):
        new = emitter.call(_ACTIVATIONS[activation.target], linear, *activation.args[1:])
    first.replace_input_with(linear, new)
    emitter.replace(activation, top)
    return True
