"""Leave out the outputs of linear layers that nothing reads.

Shapes: N outputs and K inputs of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, constant, fake

_UNARY = {aten.silu.default, aten.relu.default, aten.sigmoid.default, aten.tanh.default}
Bounds = tuple[int, int]


def drop_dead_outputs(emitter: Emitter) -> int:
    """Narrow linear layers whose outputs are read in slices that leave some out.

    Returns:
        How many layers became narrower.
    """
    return sum(
        _narrow(emitter, node)
        for node in emitter.graph.find_nodes(op="call_function", target=aten.linear.default)
    )


def _narrow(emitter: Emitter, linear: Node) -> bool:
    weight = constant(emitter.module, arguments(linear)[1])
    last = _activated(linear)
    if weight is None or weight.dim() != 2 or not last.users:
        return False
    slices = {user: _bounds(user) for user in last.users}
    read: list[Bounds] = []
    for bounds in slices.values():
        if bounds is None:
            return False
        read.append(bounds)
    kept = _union(read)
    if sum(end - begin for begin, end in kept) == len(weight):
        return False
    source, weight_node, *rest = arguments(linear)

    def cut(whole: Tensor) -> Tensor:
        return torch.cat([whole[begin:end] for begin, end in kept])

    key = "outputs " + " ".join(f"{begin}:{end}" for begin, end in kept)
    with emitter.before(linear):
        vectors = [
            None if node is None else emitter.read(emitter.derive(str(node.target), key, cut))
            for node in (weight_node, *rest)
        ]
        new = emitter.call(aten.linear.default, source, *vectors)
        if last is not linear:
            new = emitter.call(last.target, new)
    for user, bounds in slices.items():
        if bounds is None:
            continue
        begin = _place(bounds[0], kept)
        with emitter.before(user):
            part = emitter.call(
                aten.slice.Tensor, new, fake(new).dim() - 1, begin, begin + bounds[1] - bounds[0]
            )
        emitter.replace(user, part)
    return True


def _activated(linear: Node) -> Node:
    users = list(linear.users)
    return users[0] if len(users) == 1 and users[0].target in _UNARY else linear


def _bounds(node: Node) -> Bounds | None:
    """Return what a slice of the last dim reads; None for anything else."""
    if node.target is not aten.slice.Tensor or len(node.args) not in (4, 5):
        return None
    source, dim, begin, end, *step = arguments(node)
    width = fake(source).shape[-1]
    if dim not in (-1, fake(source).dim() - 1) or step not in ([], [1]):
        return None
    if not (isinstance(begin, int) and isinstance(end, int) and 0 <= begin < end):
        return None
    return begin, min(end, int(width))


def _union(ranges: list[Bounds]) -> list[Bounds]:
    merged: list[Bounds] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _place(at: int, kept: list[Bounds]) -> int:
    before = 0
    for begin, end in kept:
        if begin <= at < end:
            return before + at - begin
        before += end - begin
    raise ValueError(f"output {at} was left out")
