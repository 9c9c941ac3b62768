"""Find ragged ids that a graph lays out as a rectangle, and prove what stands where.

A rectangle is recognised by what it does, not by how it is spelled: the nodes between the ragged
input and the ids or the mask are run on lists of every length there is, and what comes out says
which place holds which id.

Shapes: B lists, H places, L ids of all lists together, M longest list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.models.card import ModelCard, RaggedIdsInput
from rankopt.passes.graph import arguments, aten, fake, is_lookup_of
from rankopt.passes.made_up import MadeUpRun

_MOST_CELLS = 1 << 26
"""A probe of the allowed pairs holds M * S * S cells; beyond this it is not made."""


@dataclass(frozen=True, eq=False)
class RaggedInput:
    """One ragged input of a graph.

    Attributes:
        name: the card's.
        values: the input of its ids [L]; lengths: of its lengths [B].
        max_length: M.
    """

    name: str
    values: Node
    lengths: Node
    max_length: int


@dataclass(frozen=True, eq=False)
class Rectangle:
    """Ids of a ragged input in a rectangle, the last H of a longer list.

    Attributes:
        node: the ids [B, H].
        ragged: where they come from.
        num_slots: H.
        align_right: the newest id stands last; else the oldest stands first.
        probe: runs parts of the graph on lists of every length.
    """

    node: Node
    ragged: RaggedInput
    num_slots: int
    align_right: bool
    probe: Probe

    @property
    def present(self) -> Tensor:
        """Say for each of the probe's lists where an id stands, bool [B, H]."""
        kept = self.probe.lengths.clamp(max=self.num_slots)[:, None]
        slots = torch.arange(self.num_slots)
        return slots >= self.num_slots - kept if self.align_right else slots < kept

    @property
    def fill(self) -> int | None:
        """Return the id at places without one; None where there are several."""
        ids = self.probe.run(self.node)
        if ids is None:
            return None
        found = set(ids[~self.present].tolist())
        return int(found.pop()) if len(found) == 1 else None


class Probe(MadeUpRun):
    """Runs the part of a graph that depends on one ragged input alone."""

    def __init__(self, module: GraphModule, ragged: RaggedInput) -> None:
        self.ragged = ragged
        generator = torch.Generator().manual_seed(0)
        # Each length twice, in an order that puts different ones side by side.
        each = torch.arange(ragged.max_length + 1).repeat(2)
        self.lengths = each[torch.randperm(len(each), generator=generator)]
        self.values = torch.arange(1, int(self.lengths.sum()) + 1)
        super().__init__(module, {ragged.lengths: self.lengths, ragged.values: self.values})

    def follows(self, node: Node) -> bool:
        """Tell whether a node's numbers depend on the lengths and ids alone."""
        return _sources(node) <= {self.ragged.values, self.ragged.lengths}

    def knows_places(self, node: Node) -> bool:
        """Tell whether a node's numbers depend on the lengths alone.

        What depends on the ids is no sign of where an id stands: one of a list may look like one
        that fills a place.
        """
        return _sources(node) <= {self.ragged.lengths}

    def run(self, node: Node) -> Tensor | None:
        """Compute a node on the probe's lists; None where it cannot be run."""
        value = self.value(node)
        return value if isinstance(value, Tensor) else None

    def stand_in(self, node: Node) -> Tensor:
        """Make another input, of which only sizes are read."""
        num_lists = str(fake(self.ragged.lengths).shape[0])
        shape: tuple[Any, ...] = tuple(fake(node).shape)
        sizes = [
            size if isinstance(size, int) else len(self.lengths) if str(size) == num_lists else 1
            for size in shape
        ]
        return torch.zeros(sizes, dtype=fake(node).dtype)


def _sources(node: Node) -> set[Node]:
    """Collect the inputs whose numbers, not only sizes, a node depends on."""
    found: set[Node] = set()
    seen: set[Node] = set()
    pending = [node]
    while pending:
        each = pending.pop()
        if each in seen or each.target is aten.sym_size.int:
            continue
        seen.add(each)
        if each.op in {"placeholder", "call_module"}:
            found.add(each)
        pending += each.all_input_nodes
    return found


def ragged_inputs(module: GraphModule, card: ModelCard) -> list[RaggedInput]:
    """List the ragged inputs of a graph that takes the card's, and perhaps `request_index`."""
    placeholders = module.graph.find_nodes(op="placeholder")
    by_name = dict(zip(card.tensor_names, placeholders, strict=False))
    return [
        RaggedInput(
            item.name,
            by_name[f"{item.name}.values"],
            by_name[f"{item.name}.lengths"],
            item.max_length,
        )
        for item in card.inputs
        if isinstance(item, RaggedIdsInput) and not item.weights_column
    ]


def find_rectangles(module: GraphModule, card: ModelCard) -> list[Rectangle]:
    """List the ids that rows are looked up by and that lie in a rectangle."""
    found = []
    for ragged in ragged_inputs(module, card):
        probe = Probe(module, ragged)
        for node in _looked_up(module, probe):
            align = _alignment(node, probe)
            if align is not None:
                num_slots = int(fake(node).shape[1])
                found.append(Rectangle(node, ragged, num_slots, align == "right", probe))
    return found


def joined_lookups(module: GraphModule, card: ModelCard) -> list[tuple[str, Node]]:
    """List the lookups of sequences whose ids are a ragged input's and others' as well."""
    found = []
    for ragged in ragged_inputs(module, card):
        probe = Probe(module, ragged)
        for lookup in module.graph.find_nodes(op="call_function", target=aten.embedding.default):
            ids = arguments(lookup)[1]
            shape: tuple[Any, ...] = tuple(fake(ids).shape)
            alone = any(ragged.values in _sources(p) and probe.follows(p) for p in _pieces(ids))
            if ragged.values in _sources(ids) and len(shape) == 2 and not alone:
                found.append((ragged.name, lookup))
    return found


def _looked_up(module: GraphModule, probe: Probe) -> Iterator[Node]:
    seen: set[Node] = set()
    for lookup in module.graph.find_nodes(op="call_function", target=aten.embedding.default):
        if not is_lookup_of(lookup, arguments(lookup)[0]):
            continue
        for ids in _pieces(arguments(lookup)[1]):
            shape: tuple[Any, ...] = tuple(fake(ids).shape)
            rectangle = len(shape) == 2 and isinstance(shape[1], int)
            if ids not in seen and rectangle and probe.follows(ids):
                seen.add(ids)
                yield ids


def _pieces(ids: Node) -> list[Node]:
    """Return ids side by side that are looked up in one call."""
    joined = ids.target is aten.cat.default and fake(ids).dim() == 2 and len(ids.args) > 1
    if joined and arguments(ids)[1] in (1, -1):
        return list(arguments(ids)[0])
    return [ids]


def _alignment(node: Node, probe: Probe) -> str | None:
    """Say at which end the ids stand; None where that is not what the rectangle holds."""
    ids = probe.run(node)
    num_slots = int(fake(node).shape[1])
    if ids is None or ids.shape != (len(probe.lengths), num_slots):
        return None
    ends = probe.lengths.cumsum(0)
    for align in ("left", "right"):
        if all(
            torch.equal(_part(row, kept, align), probe.values[end - kept : end])
            for row, kept, end in zip(
                ids, probe.lengths.clamp(max=num_slots).tolist(), ends.tolist(), strict=True
            )
        ):
            return align
    return None


def _part(row: Tensor, count: int, align: str) -> Tensor:
    return row[:count] if align == "left" else row[len(row) - count :]


def masks_absent(rectangle: Rectangle, mask: Node) -> bool:
    """Tell whether a mask [B, H] is true exactly where no id stands."""
    value = rectangle.probe.run(mask) if rectangle.probe.knows_places(mask) else None
    return value is not None and torch.equal(value, ~rectangle.present)


def masks_pairs(
    rectangle: Rectangle, mask: Node, num_before: int, num_after: int
) -> tuple[bool, bool]:
    """Tell what a mask [B, ..., S, S] hides: (every absent key, and what comes later as well).

    Only what tokens see that are there counts. (False, False) where it is something else.
    """
    present = rectangle.present
    ones = torch.ones(len(present), 1, dtype=torch.bool)
    present = torch.cat([ones.expand(-1, num_before), present, ones.expand(-1, num_after)], dim=1)
    num_positions = present.shape[1]
    if len(present) * num_positions**2 > _MOST_CELLS or not rectangle.probe.knows_places(mask):
        return False, False
    value = rectangle.probe.run(mask)
    if value is None or value.dtype != torch.bool or value.dim() < 2:
        return False, False
    shape = (len(present), num_positions, num_positions)
    if value.numel() not in {num_positions**2, len(present) * num_positions**2}:
        return False, False
    hidden = value.reshape(-1, num_positions, num_positions).expand(shape)
    seen = present[:, None, :].expand(shape)
    rows = present[:, :, None]
    earlier = torch.ones(num_positions, num_positions, dtype=torch.bool).tril()
    if bool(((hidden == ~seen) | ~rows).all()):
        return True, False
    if bool(((hidden == ~(seen & earlier)) | ~rows).all()):
        return True, True
    return False, False


def shows_earlier(rectangle: Rectangle, mask: Node, num_places: int) -> bool:
    """Tell whether a mask [..., S, S] shows each place those up to itself, in every row alike."""
    if _sources(mask):
        return False
    value = rectangle.probe.run(mask)
    earlier = torch.ones(num_places, num_places, dtype=torch.bool).tril()
    return (
        value is not None
        and value.shape[-2:] == earlier.shape
        and value.numel() == earlier.numel()
        and torch.equal(value.reshape(earlier.shape), earlier)
    )
