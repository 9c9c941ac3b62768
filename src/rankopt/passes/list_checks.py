"""Remove checks from a graph that inputs within the contract cannot fail.

Splitting an input of lists leaves checks behind: no feature has fewer than zero ids, and all of
them together as many as there are. An artifact's contract refuses such inputs before the graph
runs. A check is removed where that follows from the contract, as an inequality between sums of
counts, and where nothing else in the graph needs the numbers it reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rankopt.capture.export import MAX_BATCH
from rankopt.passes.graph import arguments, aten, fake, schema_values
from rankopt.passes.list_inputs import ListProbe

_RANGES = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
_NUMBERS = (aten.item.default, aten._local_scalar_dense.default)
_ARITHMETIC = (operator.add, operator.sub, operator.mul)
_RELATIONS: dict[Any, Any] = {
    operator.ge: lambda left, right: left - right,
    operator.gt: lambda left, right: left - right - 1,
    operator.le: lambda left, right: right - left,
    operator.lt: lambda left, right: right - left - 1,
}
"""What is at least 0 where the relation between whole numbers holds."""


def drop_list_checks(module: GraphModule, probes: Sequence[ListProbe]) -> int:
    """Remove checks that follow from the contract of inputs of lists.

    Returns:
        How many were removed; what only they read is dead code now.
    """
    graph = module.graph
    proof = _Proof(probes)
    implied = [node for node in graph.nodes if proof.implies(node)]
    needed = _needed(module, set(implied))
    dropped = [node for node in implied if not proof.counts_under(node) & needed]
    for node in dropped:
        graph.erase_node(node)
    return len(dropped)


def _needed(module: GraphModule, without: set[Node]) -> set[Node]:
    """Collect what outputs and effects read, the effects of `without` left out."""
    needed: set[Node] = set()
    for node in reversed(module.graph.nodes):
        effect = node.op == "output" or (node.is_impure() and node not in without)
        if effect or node in needed:
            needed.update(node.all_input_nodes)
    return needed


class _Proof:
    """Derives checks from the contract: counts of ids lie between 0 and what fits."""

    def __init__(self, probes: Sequence[ListProbe]) -> None:
        self._probes = probes
        self._counts: dict[Node, sympy.Expr] = {}
        self._largest: dict[sympy.Expr, int] = {}
        self._sizes: dict[Node, sympy.Expr] = {}
        for index, probe in enumerate(probes):
            counts = [sympy.Symbol(f"ids_{index}_{k}") for k in range(len(probe.given.longest))]
            longest = dict(zip(counts, probe.given.longest, strict=True))
            self._largest |= {count: most * MAX_BATCH for count, most in longest.items()}
            total = sympy.Add(*counts)
            self._sizes[probe.given.values] = total
            if probe.given.weights is not None:
                self._sizes[probe.given.weights] = total

    def implies(self, node: Node) -> bool:
        """Tell whether a node is a check that inputs within the contract pass."""
        try:
            if node.target == aten._assert_scalar.default:
                return bool(self._counts_in(node)) and self._holds(arguments(node)[0])
            if node.target in _RANGES:
                return bool(self._counts_in(node)) and self._in_range(node)
        except _NotProvenError:
            pass
        return False

    def counts_under(self, node: Node) -> set[Node]:
        """Collect the numbers that a check reads from the inputs."""
        found: set[Node] = set()
        seen: set[Node] = set()
        pending = [node]
        while pending:
            each = pending.pop()
            if each in seen:
                continue
            seen.add(each)
            if each.target in _NUMBERS:
                found.add(each)
            else:
                pending += each.all_input_nodes
        return found

    _counts_in = counts_under

    def _in_range(self, node: Node) -> bool:
        values = schema_values(node)
        count, least, most = self._value(values["size"]), values["min"], values["max"]
        above = least is None or self._smallest(count - least) >= 0
        return above and (most is None or self._smallest(most - count) >= 0)

    def _holds(self, condition: Any) -> bool:
        if not isinstance(condition, Node):
            return condition is True
        if condition.target is operator.eq:
            left, right = self._values(condition)
            return bool(sympy.expand(left - right) == 0)
        if condition.target not in _RELATIONS:
            return False
        left, right = self._values(condition)
        return self._smallest(_RELATIONS[condition.target](left, right)) >= 0

    def _smallest(self, value: Any) -> float:
        """Bound a sum of counts from below."""
        smallest = 0.0
        for term, factor in sympy.expand(value).as_coefficients_dict().items():
            if term == 1:
                smallest += float(factor)
            elif term not in self._largest:
                raise _NotProvenError
            elif factor < 0:
                smallest += float(factor) * self._largest[term]
        return smallest

    def _value(self, node: Any) -> Any:
        """Write a number of the graph as a sum of counts."""
        if node not in self._counts:
            self._counts[node] = self._derive(node)
        return self._counts[node]

    def _values(self, node: Node) -> Any:
        return map_arg(node.args, self._value)

    def _derive(self, node: Node) -> Any:
        given = arguments(node)
        if node.target in _NUMBERS:
            return self._count(node)
        if node.target == aten.sym_size.int:
            if given[0] in self._sizes and given[1] == 0:
                return self._sizes[given[0]]
            return sympy.Symbol(str(fake(given[0]).shape[given[1]]))
        target: Any = node.target
        if target in _ARITHMETIC:
            return target(*self._values(node))
        if node.target is torch.sym_sum:
            return sympy.Add(*self._values(node)[0])
        raise _NotProvenError

    def _count(self, number: Node) -> sympy.Expr:
        for index, probe in enumerate(self._probes):
            features = probe.features_counted(number)
            if features is not None:
                return sympy.Add(*(sympy.Symbol(f"ids_{index}_{k}") for k in features))
        raise _NotProvenError


class _NotProvenError(Exception):
    """A check reads something else than counts of ids."""
