"""Walk the plain graph once and write the hoisted one.

What only request-level inputs reach is computed with a row per request, whatever the operator.
Where that meets candidates, a rule of the operator keeps the two parts apart (`rules.py`); without
one the requests' part is gathered and the operator runs on candidates, as it did before.

Shapes: R requests, B candidates.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from rankopt.artifact.contract import InputContract
from rankopt.capture.requests import REQUEST_INDEX
from rankopt.passes.graph import aten, constant
from rankopt.passes.hoisting.bodies import (
    ROW,
    Axes,
    Leaf,
    Level,
    Total,
    at_level,
    is_whole,
    level_of,
    solid,
)
from rankopt.passes.hoisting.builder import Builder
from rankopt.passes.hoisting.known import KnownValues
from rankopt.passes.hoisting.values import (
    Fixed,
    GatherError,
    HoistError,
    Opaque,
    Rows,
    RowSymbol,
    Several,
    Size,
    Value,
    tensor_of,
)

Rule = Callable[["Interpreter", Node], Value | None]

MOST_TRIES = 200
"""Operators moved back to the candidates, one a try, before the graph counts as hopeless."""


def hoist_graph(
    module: Callable[[], GraphModule], contract: Sequence[InputContract], rules: Mapping[Any, Rule]
) -> tuple[GraphModule, tuple[str, ...]]:
    """Write the hoisted form of a plain graph.

    Args:
        module: makes a fresh unlifted copy of the plain graph, whose constants it shares.
        contract: its inputs, in the order of its placeholders.
        rules: by operator.

    Returns:
        The graph, its inputs those of the plain one and `request_index`; and notes on operators
        that run per candidate although their inputs are requests' alone.

    Raises:
        HoistError: ragged requests' values are wanted per candidate, or the graph writes in place.
    """
    moved: set[str] = set()
    for _ in range(MOST_TRIES):
        plain = module()
        run = Interpreter(plain, contract, rules, moved)
        try:
            graph = run.walk()
        except GatherError as stop:
            if stop.origin.op != "call_function" or stop.origin.name in moved:
                raise HoistError(
                    f"{stop.origin.name}: requests' values without a row each are read together "
                    "with the candidates'"
                ) from None
            moved.add(stop.origin.name)
            continue
        hoisted = GraphModule(plain, graph)
        return hoisted, tuple(f"{name}: runs per candidate" for name in sorted(moved))
    raise HoistError(f"{len(moved)} operators mix requests and candidates in unknown ways")


class Interpreter:
    """One walk over a plain graph.

    Args:
        plain: the unlifted graph; constants are added to it.
        contract: its inputs.
        rules: by operator.
        moved: names of nodes that run per candidate whatever they read.
    """

    def __init__(
        self,
        plain: GraphModule,
        contract: Sequence[InputContract],
        rules: Mapping[Any, Rule],
        moved: set[str],
    ) -> None:
        self.plain = plain
        self.build = Builder(plain)
        self.known = KnownValues(plain)
        self.values: dict[Node, Value] = {}
        self._contract = contract
        self._rules = rules
        self._moved = moved
        self._emitted: dict[tuple[Node, Level], Node] = {}
        self.rows = RowSymbol(self._row_symbol())

    def walk(self) -> torch.fx.Graph:
        """Write the whole graph."""
        self._inputs()
        for node in self.plain.graph.nodes:
            if node.op == "get_attr":
                self.values[node] = Fixed(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._output(node)
            elif node.op != "placeholder":
                raise HoistError(f"{node.name}: is a {node.op}, not an operator")
        self.build.graph.eliminate_dead_code()
        self.build.graph.lint()
        return self.build.graph

    # Inputs and outputs.

    def _row_symbol(self) -> Any:
        placeholders = self.plain.graph.find_nodes(op="placeholder")
        for node, entry in zip(placeholders, self._contract, strict=True):
            size = node.meta["val"].shape[0]
            if entry.role not in ("values", "weights") and not isinstance(size, int):
                symbols = size.node.expr.free_symbols
                if len(symbols) == 1:
                    return next(iter(symbols))
        raise HoistError("no input says how many rows there are")

    def _inputs(self) -> None:
        placeholders = self.plain.graph.find_nodes(op="placeholder")
        made = [self.build.graph.placeholder(node.name) for node in placeholders]
        self.build.index = self.build.graph.placeholder(REQUEST_INDEX)
        for node, new, entry in zip(placeholders, made, self._contract, strict=True):
            level = Level.REQUEST if entry.request_level else Level.CANDIDATE
            if entry.role in ("values", "weights"):
                self.values[node] = Opaque(new, level, node)
                continue
            if level == Level.REQUEST:
                self.build.set_requests(new, 0, entry.groups)
            axes: Axes = (ROW,) if entry.groups == 1 else (entry.groups, ROW)
            shape = (*axes, entry.width) if entry.width else axes
            tracked = new if entry.groups == 1 else self.build.reshape(new, shape)
            dims = (len(axes), 1) if entry.width else (len(axes),)
            self.values[node] = Rows(shape, dims, Total((Leaf(tracked, level, shape),)))

    def _output(self, node: Node) -> None:
        self.build.graph.output(
            map_arg(
                node.args[0], lambda each: self.actual(self.values[each], Level.CANDIDATE, each)
            )
        )

    # Operators.

    def _call(self, node: Node) -> None:
        target: Any = node.target
        if not node.users:
            return  # assertions; tracing the new graph makes its own
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise HoistError(f"{node.name}: writes in place")
        if tensor_of(node) is None and isinstance(node.meta.get("val"), torch.SymInt | int):
            self.values[node] = Size(node)
            return
        inputs = [self.values[source] for source in node.all_input_nodes]
        if all(isinstance(value, Fixed | Size) for value in inputs):
            self.values[node] = Fixed(node)
            return
        level = self._level(inputs)
        rule = self._rules.get(target)
        if rule is None and torch.Tag.pointwise in getattr(target, "tags", ()):
            rule = self._rules.get("pointwise")
        if rule is not None and node.name not in self._moved and self._is_split(inputs, level):
            value = rule(self, node)
            if value is not None:
                self.values[node] = value
                return
        if node.name in self._moved:
            level = Level.CANDIDATE
        self.values[node] = self.emit(node, level)

    def _level(self, inputs: Sequence[Value]) -> Level:
        levels = [Level.FIXED]
        for value in inputs:
            if isinstance(value, Several):
                levels.append(self._level(value.values))
            elif isinstance(value, Opaque):
                levels.append(value.level)
            elif isinstance(value, Rows):
                levels.append(level_of(value.body))
        return max(levels)

    def _is_split(self, inputs: Sequence[Value], level: Level) -> bool:
        """Tell whether a rule could keep something apart: both levels, or a body in parts."""
        if level != Level.CANDIDATE:
            return False
        for value in inputs:
            if isinstance(value, Several):
                return True
            if isinstance(value, Rows) and not (
                level_of(value.body) == Level.CANDIDATE and is_whole(value.body, value.axes)
            ):
                return True
            if isinstance(value, Opaque) and value.level == Level.REQUEST:
                return True
        return False

    def emit(self, node: Node, level: Level) -> Value:
        """Run an operator as the plain graph does, on the rows of one level."""
        target: Any = node.target
        args = self.mapped(node.args, level)
        kwargs = self.mapped(node.kwargs, level)
        new = self.build.call(target, *args, **kwargs)
        return self.track(node, new, level)

    def mapped(self, arguments: Any, level: Level) -> Any:
        """Replace the nodes in arguments by those of the new graph."""
        return map_arg(arguments, lambda each: self.actual(self.values[each], level, each))

    def track(self, node: Node, new: Node, level: Level) -> Value:
        """Find the rows of a new tensor by the sizes of the plain one."""
        value = node.meta.get("val")
        if isinstance(value, list | tuple):
            return Opaque(new, level, node)
        if not isinstance(value, torch.Tensor):
            raise HoistError(f"{node.name}: returns a {type(value).__name__}")
        layout = self._layout(node, value)
        if layout is None:
            return Opaque(new, level, node)
        axes, dims = layout
        tracked = new if len(axes) == len(dims) else self.build.reshape(new, axes)
        return Rows(axes, dims, Total((Leaf(tracked, level, axes),)))

    def _layout(self, node: Node, value: torch.Tensor) -> tuple[Axes, tuple[int, ...]] | None:
        axes: list[int] = []
        dims: list[int] = []
        for size in value.shape:
            factor = self.rows.factor(size)
            if factor is None:
                return None
            count, of_rows = factor
            if not of_rows:
                axes.append(count)
                dims.append(1)
            elif count == 1:
                axes.append(ROW)
                dims.append(1)
            else:
                group = self._group_like(node, size)
                if group is None:
                    return None
                axes += group
                dims.append(len(group))
        return (tuple(axes), tuple(dims)) if axes.count(ROW) == 1 else None

    def _group_like(self, node: Node, size: Any) -> list[int] | None:
        """Return the axes of an input's dim of the same size: operators keep their rows' order."""
        for source in node.all_input_nodes:
            value, tensor = self.values[source], tensor_of(source)
            if not isinstance(value, Rows) or tensor is None:
                continue
            for dim, own in enumerate(tensor.shape):
                axes = [value.axes[axis] for axis in value.group(dim)]
                if ROW in axes and str(own) == str(size):
                    return axes
        return None

    # Values as nodes of the new graph.

    def actual(self, value: Value, level: Level, origin: Node) -> Any:
        """Return a value as its operator sees it, with the rows of a level.

        Raises:
            GatherError: it is the requests', wanted per candidate, and its rows are not tracked.
        """
        if isinstance(value, Size):
            return self._size(value.source, level)
        if isinstance(value, Fixed):
            return self.fixed(value.source, level)
        if isinstance(value, Several):
            return [self.actual(each, level, origin) for each in value.values]
        if isinstance(value, Opaque):
            if value.level == Level.REQUEST and level == Level.CANDIDATE:
                raise GatherError(value.origin)
            return value.node
        leaf = solid(self.build, value.body, value.axes, level)
        leaf = at_level(self.build, leaf, level)
        candidate = level == Level.CANDIDATE
        node = self.build.expand(leaf.node, leaf.sizes, value.axes, candidate=candidate)
        if len(value.axes) == len(value.dims):
            return node
        shape = []
        for dim in range(len(value.dims)):
            sizes = [value.axes[axis] for axis in value.group(dim)]
            product = 1
            for size in sizes:
                product *= size
            shape.append(-1 if ROW in sizes else product)
        return self.build.reshape(node, shape)

    def fixed(self, source: Node, level: Level) -> Node:
        """Return a value without data, at the number of rows of a level."""
        if source.op == "get_attr":
            return self.build.read(str(source.target))
        tensor = tensor_of(source)
        depends = any(self._depends(each) for each in (source, *source.all_input_nodes))
        at = level if depends or tensor is None else Level.FIXED
        key = (source, at)
        if key not in self._emitted:
            target: Any = source.target
            args = map_arg(source.args, lambda each: self._constant_or_size(each, level))
            kwargs = map_arg(source.kwargs, lambda each: self._constant_or_size(each, level))
            self._emitted[key] = self.build.call(target, *args, **kwargs)
        return self._emitted[key]

    def _depends(self, node: Node) -> bool:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        return any(self.rows.depends(size) for size in sizes)

    def _constant_or_size(self, node: Node, level: Level) -> Any:
        return self.actual(self.values[node], level, node)

    def _size(self, source: Node, level: Level) -> Any:
        value = source.meta["val"]
        if isinstance(value, int):
            return value
        factor = self.rows.factor(value)
        if factor is not None:
            count, of_rows = factor
            if not of_rows:
                return count
            at = Level.REQUEST if level == Level.REQUEST else Level.CANDIDATE
            key = (source, at)
            if key not in self._emitted:
                rows = (
                    self.build.num_requests()
                    if at == Level.REQUEST
                    else self.build.num_candidates()
                )
                made = rows if count == 1 else self.build.call(operator.mul, rows, count)
                self._emitted[key] = made
            return self._emitted[key]
        target: Any = source.target
        if target == aten.sym_size.int:
            of, dim = source.args[0], source.args[1]
            if not isinstance(of, Node):
                raise HoistError(f"{source.name}: is the size of no tensor")
            held = self.values[of]
            if isinstance(held, Opaque):
                return self.build.call(target, held.node, dim)
            own = self._level([held])
            return self.build.call(target, self.actual(held, own, of), dim)
        args = map_arg(source.args, lambda each: self._size(each, level))
        return self.build.call(target, *args)

    # What rules ask.

    def constant(self, value: object) -> torch.Tensor | None:
        """Return the tensor behind a node of the plain graph that reads a constant."""
        return constant(self.plain, value)

    def rows_of(self, node: object) -> Rows | None:
        """Return the tracked value of a node of the plain graph; None for anything else."""
        value = self.values.get(node) if isinstance(node, Node) else None
        return value if isinstance(value, Rows) else None

    def as_rows(self, node: Node) -> Rows | None:
        """Return a tracked value; one without data counts as the requests' where it has rows."""
        value = self.values[node]
        if isinstance(value, Rows):
            return value
        tensor = tensor_of(node)
        if not isinstance(value, Fixed) or tensor is None:
            return None
        layout = self._layout(node, tensor)
        if layout is None or len(layout[0]) != len(layout[1]):
            return None
        leaf = Leaf(self.fixed(node, Level.REQUEST), Level.REQUEST, layout[0])
        return Rows(*layout, Total((leaf,)))
