"""Multiply-adds of a graph, counted from its shapes: what is left of them on paper.

Shapes: R requests, B candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from rankopt.artifact.contract import contract_of
from rankopt.bundle import ModelBundle
from rankopt.passes.graph import arguments, aten


def operations_left(
    plain: ModelBundle, hoisted: ModelBundle, num_candidates: int
) -> tuple[int, int]:
    """Count the multiply-adds of both forms for one request.

    Returns:
        Those of the form with requests, and those of the plain one.
    """
    contract = contract_of(plain.card)
    rows = dict.fromkeys(range(len(contract)), num_candidates)
    requests = {
        at: 1 if entry.request_level else num_candidates for at, entry in enumerate(contract)
    }
    requests[len(contract)] = num_candidates
    ragged = {at for at, entry in enumerate(contract) if entry.role in ("values", "weights")}
    for entry in (rows, requests):
        for at in ragged:
            del entry[at]
    for at, item in enumerate(contract):
        if item.role == "lengths":
            rows[at] *= item.groups
            requests[at] *= item.groups
    return count_operations(hoisted.program, requests), count_operations(plain.program, rows)


def count_operations(program: ExportedProgram, sizes: Mapping[int, int]) -> int:
    """Count the multiply-adds of all linear layers and products of an exported graph.

    Args:
        program: the graph.
        sizes: the first dim of inputs, by their position; a number of ids need not be given.
    """
    values = _symbols(program, sizes)
    return sum(
        counter(node, values)
        for node in program.graph.nodes
        if (counter := _COUNTERS.get(str(node.target))) is not None
    )


def _first_dims(program: ExportedProgram) -> list[tuple[int, torch.SymInt]]:
    names = list(program.graph_signature.user_inputs)
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    found = []
    for at, name in enumerate(names):
        size = nodes[str(name)].meta["val"].shape[0]
        if isinstance(size, torch.SymInt):
            found.append((at, size))
    return found


def _symbols(program: ExportedProgram, sizes: Mapping[int, int]) -> dict[Any, int]:
    values: dict[Any, int] = {}
    for at, size in _first_dims(program):
        expression = size.node.expr
        if at in sizes and len(expression.free_symbols) == 1:
            (symbol,) = expression.free_symbols
            # A KeyedJaggedTensor's lengths are F * B.
            values[symbol] = int(sizes[at] * symbol / expression)
    return values


def _number(size: int | torch.SymInt, values: Mapping[Any, int]) -> int:
    if isinstance(size, int):
        return size
    # A number of ids that the caller did not give counts as none: products have none in them.
    known = {symbol: values.get(symbol, 0) for symbol in size.node.expr.free_symbols}
    return int(size.node.expr.subs(known))


def _entries(tensor: Tensor, values: Mapping[Any, int]) -> int:
    return math.prod(_number(size, values) for size in tensor.shape)


Counter = Callable[[Node, Mapping[Any, int]], int]


def _by_inputs(node: Node, values: Mapping[Any, int]) -> int:
    """Every entry of the result is a sum over the last dim of the first argument."""
    x: Any = arguments(node)[0].meta["val"]
    return _entries(node.meta["val"], values) * _number(x.shape[-1], values)


def _addmm(node: Node, values: Mapping[Any, int]) -> int:
    x: Any = arguments(node)[1].meta["val"]
    return _entries(node.meta["val"], values) * _number(x.shape[-1], values)


_COUNTERS: dict[str, Counter] = {
    **dict.fromkeys(
        (
            str(aten.linear.default),
            str(aten.matmul.default),
            str(aten.mm.default),
            str(aten.bmm.default),
            "rankopt.linear_int8.default",
            "rankopt.linear_fp16.default",
            "rankopt.linear_fp32.default",
            "rankopt.linear_fbgemm.default",
            "rankopt.request_matmul.default",
        ),
        _by_inputs,
    ),
    **dict.fromkeys((str(aten.addmm.default), str(aten.baddbmm.default)), _addmm),
}
