"""Follow ids back to the tensor that a lookup operator can read them from.

Models cut ids out of matrices: a slice and a cast per column. The operator reads a column where it
lies, so none of that has to be computed.

Shapes: B rows, C columns of a matrix, k ids per row.
"""

from __future__ import annotations

import operator
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from rankopt.passes.graph import arguments, aten, fake
from rankopt.passes.lookups import Lookup

READABLE = (torch.int64, torch.int32, torch.float32)
"""Types of ids that the operator reads; a float32 one is cut to a whole number, as a cast does."""

ROW_VIEWS: frozenset[Any] = frozenset(
    {
        aten.reshape.default,
        aten.view.default,
        aten.flatten.using_ints,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.squeeze.default,
        aten.contiguous.default,
        aten.to.dtype,
    }
)


@dataclass(frozen=True)
class IdSource:
    """Ids of B rows, `length` each, from column `column` of a [B] or [B, C] tensor."""

    node: Node
    column: int
    length: int


def row_width(node: Node) -> int | None:
    """Return how many values each row of a [B, ...] tensor holds; None where that is no number."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    sizes: tuple[Any, ...] = tuple(value.shape[1:])
    width = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        width *= size
    return width


def keeps_rows(node: Node) -> bool:
    """Tell whether a node is a reshape, or nothing, that leaves every row its values, in order."""
    if node.op != "call_function" or node.target not in ROW_VIEWS:
        return False
    source = arguments(node)[0]
    width = row_width(source)
    if width is None or width != row_width(node):
        return False
    before, after = fake(source), fake(node)
    return before.dtype == after.dtype and str(before.shape[0]) == str(after.shape[0])


def id_source(ids: Node, written: Set[Node]) -> IdSource | None:
    """Find where ids [B] or [B, ...] come from.

    Args:
        ids: the node that a lookup reads.
        written: values that something writes into: their parts are read where the graph does it.

    Returns:
        The farthest tensor back that holds them; None where rows hold no constant number of ids.
    """
    length = row_width(ids)
    if length is None:
        return None
    found = None
    here: IdSource | None = IdSource(ids, 0, length)
    while here is not None and here.node not in written:
        if fake(here.node).dim() <= 2 and fake(here.node).dtype in READABLE:
            found = here
        here = _step_back(here)
    return found


def _step_back(at: IdSource) -> IdSource | None:
    node = at.node
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    given = arguments(node)
    source = given[0] if given else None
    if not isinstance(source, Node):
        return None
    if keeps_rows(node):
        return replace(at, node=source)
    if node.target == aten.to.dtype:
        whole = fake(node).dtype in (torch.int64, torch.int32)
        return replace(at, node=source) if whole and fake(source).dtype in READABLE else None
    column = _first_column(node, source)
    if column is None:
        return None
    if node.target is operator.getitem:
        source = arguments(source)[0]
    return IdSource(source, at.column + column, at.length)


def _first_column(node: Node, source: Node) -> int | None:
    """Return at which column of a [B, C] matrix a node begins; None where it is no part of one."""
    given = arguments(node)
    if node.target is operator.getitem:
        if source.op != "call_function" or len(source.args) < 2:
            return None
        matrix, *rest = arguments(source)
        if not _is_matrix(matrix):
            return None
        if source.target == aten.unbind.int and rest[0] in (1, -1):
            return int(given[1])
        if source.target == aten.split.Tensor and len(rest) > 1 and rest[1] in (1, -1):
            return int(given[1]) * int(rest[0]) if isinstance(rest[0], int) else None
        return None
    if not _is_matrix(source) or len(given) < 3 or given[1] not in (1, -1):
        return None
    width = int(fake(source).shape[1])
    if node.target == aten.select.int and isinstance(given[2], int):
        return given[2] % width
    if node.target == aten.slice.Tensor:
        start = given[2] if given[2] is not None else 0
        one_by_one = len(given) < 5 or given[4] == 1
        if isinstance(start, int) and one_by_one:
            return min(start if start >= 0 else max(start + width, 0), width)
    return None


def _is_matrix(node: object) -> bool:
    if not isinstance(node, Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    value = fake(node)
    return value.dim() == 2 and isinstance(value.shape[1], int)


def rectangle(lookup: Lookup) -> Node | None:
    """Return the [B, k] ids of a bag whose rows all hold k of them; None for lists."""
    ids, offsets = lookup.indices, lookup.offsets
    if offsets is None or lookup.include_last:
        return None
    step, flat = _step_of(offsets), uncast(ids)
    if step is None or flat.target not in ROW_VIEWS:
        return None
    matrix = arguments(flat)[0]
    value = fake(matrix)
    rows = str(fake(offsets).shape[0])
    fits = value.dim() == 2 and row_width(matrix) == step
    return matrix if fits and fake(ids).dim() == 1 and str(value.shape[0]) == rows else None


def _step_of(offsets: Node) -> int | None:
    """Return k of offsets 0, k, 2k, ..."""
    if offsets.target == aten.arange.default:
        return 1
    if offsets.target not in (aten.arange.start_step, aten.arange.start):
        return None
    start, _, *rest = arguments(offsets)
    step = rest[0] if rest else offsets.kwargs.get("step", 1)
    return step if start == 0 and isinstance(step, int) and step >= 1 else None


def uncast(ids: Node) -> Node:
    """Skip a cast between types that the operator reads."""
    while ids.target == aten.to.dtype and fake(arguments(ids)[0]).dtype in READABLE:
        ids = arguments(ids)[0]
    return ids
