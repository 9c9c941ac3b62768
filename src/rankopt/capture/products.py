"""Write products with a constant matrix as linear layers.

`x.matmul(W)`, `W @ x`, `mm`, `addmm`, `tensordot`, `einsum` and convolutions of width one all
multiply rows by one matrix. Written as `aten.linear` with a weight [N, K], they are what the dense
passes know.

Shapes: K inputs, N outputs, B rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake, is_table


@dataclass(frozen=True)
class Matrix:
    """A constant operand of a product.

    Attributes:
        path: the constant it is read from.
        view: what the graph makes of that constant without copying it.
        value: the operand.
        spelling: the view in words; two views of one constant may have the same shape.
    """

    path: str
    view: Callable[[Tensor], Tensor]
    value: Tensor
    spelling: str = ""


def products_to_linears(emitter: Emitter) -> tuple[int, int, list[str]]:
    """Rewrite every product that is one.

    Returns:
        How many became linear layers, how many products of one term became multiplications, and
        the tables that a product would have needed a second copy of.
    """
    linears, outer, tied = 0, 0, []
    for node in list(emitter.graph.nodes):
        handler = _HANDLERS.get(node.target) if node.op == "call_function" else None
        if handler is None or not isinstance(node.meta.get("val"), Tensor):
            continue
        if fake(node).dtype != torch.float32:
            continue
        try:
            with emitter.before(node):
                new = handler(emitter, node)
        except _NeedsCopy as refusal:
            tied.append(str(refusal))
            continue
        if new is None:
            continue
        outer += new.target == aten.mul.Tensor
        linears += new.target != aten.mul.Tensor
        emitter.replace(node, new)
    return linears, outer, tied


class _NeedsCopy(Exception):  # noqa: N818  (a signal inside this module, never an error)
    """The weight is an embedding table, which is never stored twice."""


def _matrix(emitter: Emitter, node: object) -> Matrix | None:
    """Read a constant operand, also through the views that folding left in place."""
    value = constant(emitter.module, node)
    if value is not None and isinstance(node, Node):
        known = value.dtype == torch.float32
        return Matrix(str(node.target), lambda source: source, value) if known else None
    if not isinstance(node, Node) or node.target not in _VIEWS:
        return None
    inner = _matrix(emitter, arguments(node)[0])
    if inner is None:
        return None
    target, rest = _VIEWS[node.target], node.args[1:]
    before = inner.view
    return Matrix(
        inner.path,
        lambda s: target(before(s), *rest),
        target(inner.value, *rest),
        f"{inner.spelling}.{node.target}{rest}",
    )


_VIEWS: dict[Any, Any] = {
    aten.t.default: torch.t,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
}


def _linear(
    emitter: Emitter,
    x: Node,
    matrix: Matrix,
    lay_out: Callable[[Tensor], Tensor],
    key: str,
    bias: Node | None = None,
) -> Node:
    """Multiply by the matrix that `lay_out` brings into the form [N, K]."""
    source = constant(
        emitter.module, emitter.graph.find_nodes(op="get_attr", target=matrix.path)[0]
    )
    if source is None:
        raise ValueError(f"{matrix.path} is no constant of this graph")

    def make(value: Tensor) -> Tensor:
        return lay_out(matrix.view(value))

    weight = make(source)
    as_it_is = weight.data_ptr() == source.data_ptr() and weight.stride() == source.stride()
    if is_table(emitter.module, matrix.path) and not (as_it_is and weight.shape == source.shape):
        raise _NeedsCopy(matrix.path)
    name = emitter.derive(
        matrix.path, f"linear {matrix.spelling} {key} {tuple(weight.shape)}", make
    )
    inputs = (x, emitter.read(name)) if bias is None else (x, emitter.read(name), bias)
    return emitter.call(aten.linear.default, *inputs)


def _matmul(emitter: Emitter, node: Node) -> Node | None:
    left, right = arguments(node)[:2]
    matrix = _matrix(emitter, right)
    if matrix is not None:
        return _rows_times(emitter, left, matrix)
    matrix = _matrix(emitter, left)
    if matrix is not None:
        return _times_columns(emitter, matrix, right)
    a, b = fake(left), fake(right)
    if min(a.dim(), b.dim()) >= 2 and _is_one(a.shape[-1]):
        # One term each: a multiplication, which the compiler fuses where a product is a call.
        return emitter.call(aten.mul.Tensor, left, right)
    return None


def _is_one(size: object) -> bool:
    """Tell whether a size is 1 whatever the batch; asking a symbolic one would fix it."""
    return isinstance(size, int) and size == 1


def _rows_times(emitter: Emitter, x: Node, matrix: Matrix) -> Node | None:
    if matrix.value.dim() == 2:
        return _linear(emitter, x, matrix, torch.t, "t")
    if matrix.value.dim() == 1 and fake(x).dim() >= 2:
        row = _linear(emitter, x, matrix, lambda vector: vector.unsqueeze(0), "row")
        return emitter.call(aten.squeeze.dim, row, -1)
    return None


def _times_columns(emitter: Emitter, matrix: Matrix, x: Node) -> Node | None:
    if matrix.value.dim() != 2:
        return None
    shape = fake(x).shape
    if len(shape) == 1:
        return _linear(emitter, x, matrix, _unchanged, "")
    if _is_one(shape[-1]):
        flat = emitter.call(aten.squeeze.dim, x, -1)
        return emitter.call(
            aten.unsqueeze.default, _linear(emitter, flat, matrix, _unchanged, ""), -1
        )
    rows = emitter.call(aten.transpose.int, x, -2, -1)
    return emitter.call(aten.transpose.int, _linear(emitter, rows, matrix, _unchanged, ""), -2, -1)


def _unchanged(value: Tensor) -> Tensor:
    return value


def _addmm(emitter: Emitter, node: Node) -> Node | None:
    bias, left, right = arguments(node)[:3]
    matrix, offset = _matrix(emitter, right), _matrix(emitter, bias)
    plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
    if matrix is None or offset is None or not plain or matrix.value.dim() != 2:
        return None
    if offset.value.numel() != matrix.value.shape[1]:
        return None
    name = emitter.derive(offset.path, "bias", lambda value: offset.view(value).reshape(-1))
    return _linear(emitter, left, matrix, torch.t, "t", emitter.read(name))


def _tensordot(emitter: Emitter, node: Node) -> Node | None:
    left, right, left_dims, right_dims = arguments(node)[:4]
    matrix = _matrix(emitter, right)
    if matrix is not None:
        return _contract(emitter, left, left_dims, matrix, right_dims)
    matrix = _matrix(emitter, left)
    if matrix is None:
        return None
    product = _contract(emitter, right, right_dims, matrix, left_dims)
    # The constant's free dims came first.
    free = matrix.value.dim() - len(left_dims)
    num = fake(product).dim()
    order = [*range(num - free, num), *range(num - free)]
    return emitter.call(aten.permute.default, product, order)


def _inner(emitter: Emitter, node: Node) -> Node | None:
    left, right = arguments(node)[:2]
    matrix = _matrix(emitter, right)
    return None if matrix is None else _contract(emitter, left, [-1], matrix, [-1])


def _contract(
    emitter: Emitter, x: Node, x_dims: Sequence[int], matrix: Matrix, w_dims: Sequence[int]
) -> Node:
    """Sum over dims of `x` and of a constant; the constant's free dims come last."""
    num, num_w = fake(x).dim(), matrix.value.dim()
    x_last = [dim % num for dim in x_dims]
    w_last = [dim % num_w for dim in w_dims]
    x_free = [dim for dim in range(num) if dim not in x_last]
    w_free = [dim for dim in range(num_w) if dim not in w_last]
    if [*x_free, *x_last] != list(range(num)):
        x = emitter.call(aten.permute.default, x, [*x_free, *x_last])
    if len(x_last) > 1:
        x = emitter.call(aten.flatten.using_ints, x, len(x_free), -1)
    sizes = [matrix.value.shape[dim] for dim in w_free]
    outputs = math.prod(sizes)

    def lay_out(value: Tensor) -> Tensor:
        return value.permute(*w_free, *w_last).reshape(outputs, -1)

    product = _linear(emitter, x, matrix, lay_out, f"{w_free} {w_last}")
    if not w_free:
        return emitter.call(aten.squeeze.dim, product, -1)
    if len(w_free) > 1:
        return emitter.call(aten.unflatten.int, product, -1, sizes)
    return product


def _einsum(emitter: Emitter, node: Node) -> Node | None:
    equation, operands = str(arguments(node)[0]).replace(" ", ""), arguments(node)[1]
    terms, _, result = equation.partition("->")
    parts = terms.split(",")
    if "." in equation or len(operands) != 2 or len(parts) != 2:
        return None
    if "->" not in equation:
        # Left out, it is every letter that stands once, in the alphabet's order.
        result = "".join(sorted(letter for letter in terms if terms.count(letter) == 1))
        result = result.replace(",", "")
    matrices = [_matrix(emitter, operand) for operand in operands]
    at = next((i for i, found in enumerate(matrices) if found is not None), None)
    if at is None:
        return None
    matrix, w, x = matrices[at], parts[at], parts[1 - at]
    shared = [letter for letter in w if letter in x]
    letters = [letter for letter in (*x, *w) if letter not in shared]
    # Anything else: a letter twice in a term, summed alone, or kept from both operands.
    if matrix is None or not shared or sorted(letters) != sorted(result):
        return None
    if any(len(set(term)) != len(term) for term in parts):
        return None
    product = _contract(
        emitter,
        operands[1 - at],
        [x.index(letter) for letter in shared],
        matrix,
        [w.index(letter) for letter in shared],
    )
    order = [letters.index(letter) for letter in result]
    if order != list(range(len(order))):
        product = emitter.call(aten.permute.default, product, order)
    return product


def _convolution(emitter: Emitter, node: Node) -> Node | None:
    """A convolution whose kernel covers one position, or all of them."""
    defaults = (None, None, None, 1, 0, 1, 1)
    given: tuple[Any, ...] = (*node.args, *defaults[len(node.args) :])
    x, weight, bias, stride, padding, _, groups = given
    matrix = _matrix(emitter, weight)
    if matrix is None or node.kwargs or groups != 1 or not _all(padding, 0):
        return None
    if fake(x).dim() != matrix.value.dim() or (bias is not None and not _matrix(emitter, bias)):
        return None
    kernel, places = list(matrix.value.shape[2:]), list(fake(x).shape[2:])
    if all(isinstance(size, int) for size in places) and kernel == places:
        flat = emitter.call(aten.flatten.using_ints, x, 1, -1)
        product = _linear(emitter, flat, matrix, lambda value: value.flatten(1), "flat", bias)
        for _ in places:
            product = emitter.call(aten.unsqueeze.default, product, -1)
        return product
    if not _all(kernel, 1) or not _all(stride, 1):
        return None
    num = fake(x).dim()
    rows = emitter.call(aten.permute.default, x, [0, *range(2, num), 1])
    product = _linear(emitter, rows, matrix, lambda value: value.flatten(1), "flat", bias)
    return emitter.call(aten.permute.default, product, [0, num - 1, *range(1, num - 1)])


def _all(value: object, wanted: int) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(each == wanted for each in values)


_HANDLERS: dict[Any, Callable[[Emitter, Node], Node | None]] = {
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.addmm.default: _addmm,
    aten.inner.default: _inner,
    aten.tensordot.default: _tensordot,
    aten.einsum.default: _einsum,
    aten.conv1d.default: _convolution,
    aten.conv2d.default: _convolution,
}
