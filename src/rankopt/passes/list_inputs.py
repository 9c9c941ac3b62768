"""Follow the ids and offsets of bags back to an input that holds the lists of one or more features.

A KeyedJaggedTensor holds the lists of all its features, one after the other. Models split it, and
for that read how many ids each feature has, check those numbers and make views. A lookup call reads
a feature's lists where they lie, from the ids and lengths of all.

What a bag reads is recognised by what it is, not by how it is spelled: the nodes between the input
and the bag are run on made-up lists of every length, and what comes out says whose lists they are.

Shapes: F features of an input, P rows of a probe, L ids of all lists.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput
from rankopt.passes.graph import aten, fake
from rankopt.passes.lookups import Lookup
from rankopt.passes.made_up import MadeUpRun
from rankopt.passes.order import written_roots

_MOST_ROWS, _MOST_IDS = 512, 1 << 24
"""A probe has no more rows than this, and none is made of more ids."""
_LARGEST = {torch.int64: 2**31 - 1, torch.int32: 2**31 - 1, torch.float32: 2**24}
"""Ids of a probe reach up to here: clamps and remainders would change them."""
_MOVES: frozenset[Any] = frozenset(
    {
        operator.getitem,
        aten.split_with_sizes.default,
        aten.split.Tensor,
        aten.slice.Tensor,
        aten.narrow.default,
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.to.dtype,
    }
)
"""Operators that leave ids what they are."""


@dataclass(frozen=True, eq=False)
class ListInput:
    """An input of lists.

    Attributes:
        values: its ids [L], feature after feature.
        lengths: [F * B], feature after feature.
        weights: one for each id; None without.
        longest: longest list of each feature.
    """

    values: Node
    lengths: Node
    weights: Node | None
    longest: tuple[int, ...]

    @property
    def nodes(self) -> set[Node]:
        return {self.values, self.lengths} | ({self.weights} if self.weights else set())


@dataclass(frozen=True, eq=False)
class ListSource:
    """The lists that a bag reads: those of feature number `feature` of an input."""

    given: ListInput
    feature: int
    weights: Node | None

    @property
    def num_features(self) -> int:
        return len(self.given.longest)


def find_list_inputs(module: GraphModule, card: ModelCard) -> list[ListProbe]:
    """Make a probe for each input of lists of a graph whose first inputs are the card's."""
    nodes = module.graph.find_nodes(op="placeholder")
    named = dict(zip(card.tensor_names, nodes, strict=False))
    written = written_roots(module.graph)
    found = []
    for item in card.inputs:
        if isinstance(item, KjtInput):
            longest = tuple(feature.max_length for feature in item.features)
        elif isinstance(item, RaggedIdsInput):
            longest = (item.max_length,)
        else:
            continue
        values, lengths, *weights = (named[name] for name in item.tensor_names)
        given = ListInput(values, lengths, weights[0] if weights else None, longest)
        found.append(ListProbe(module, given, written))
    return found


class ListProbe:
    """Tells what the nodes that depend on one input of lists alone compute.

    Attributes:
        given: the input.
    """

    def __init__(self, module: GraphModule, given: ListInput, written: Set[Node]) -> None:
        self.given = given
        self._written = written
        generator = torch.Generator().manual_seed(0)
        num_rows = min(2 * (max(given.longest) + 1), _MOST_ROWS)
        each = [
            torch.linspace(0, longest, num_rows, dtype=torch.float64).long()
            for longest in given.longest
        ]
        order = [torch.randperm(num_rows, generator=generator) for _ in each]
        self._lengths = torch.stack([a[b] for a, b in zip(each, order, strict=True)])
        self._values, self._weights = self._made_up_ids(int(self._lengths.sum()))
        self._usable = len(self._values) > 0 and not given.nodes & written
        self._lists = _Run(module, given, self._lengths, self._values, self._weights)
        # Counts of ids are told apart by large numbers, which int32 still holds the sum of.
        most = (2**31 - 1) // (4 * len(given.longest))
        large = torch.randint(1, most, (len(given.longest), 4), generator=generator)
        self._counted = _runs_of_features(large.sum(1).tolist())
        nothing = torch.empty(int(large.sum()), dtype=self._values.dtype, device="meta")
        self._large = _Run(module, given, large, nothing, nothing.float())

    def _made_up_ids(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw ids that all differ, and weights; none where so many are too many."""
        dtype = fake(self.given.values).dtype
        largest = _LARGEST.get(dtype, 0)
        step = largest // max(count, 1) if count <= _MOST_IDS else 0
        numbers = torch.arange(count if step else 0)
        return (numbers * step).to(dtype), 1.0 + numbers / (2 * _MOST_IDS)

    def source(self, lookup: Lookup) -> ListSource | None:
        """Return which feature's lists a bag reads; None where it reads something else."""
        if lookup.form != "bag" or lookup.offsets is None:
            return None
        ids, edges = self._run(lookup.indices), self._run(lookup.offsets)
        if not isinstance(ids, Tensor) or not isinstance(edges, Tensor):
            return None
        if not lookup.include_last:
            edges = torch.cat([edges, torch.tensor([ids.numel()])])
        for feature, (values, lengths) in enumerate(self._of_features(self._values)):
            ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            if _equal(edges, ends) and _equal(ids, values):
                weights = self._weights_of(lookup, feature)
                found = lookup.weights is None or weights is not None
                return ListSource(self.given, feature, weights) if found else None
        return None

    def _weights_of(self, lookup: Lookup, feature: int) -> Node | None:
        if lookup.weights is None or len(self.given.longest) == 1:
            return lookup.weights  # of one feature they lie as its ids do
        found = self._run(lookup.weights)
        wanted, _ = self._of_features(self._weights)[feature]
        return self.given.weights if isinstance(found, Tensor) and _equal(found, wanted) else None

    def features_counted(self, number: Node) -> range | None:
        """Return the features whose ids a number counts; None where it says something else."""
        if not self._usable or not self._follows(number):
            return None
        features = self._counted.get(self._large.value(number))
        if features is None:
            return None
        count = int(self._lengths[features.start : features.stop].sum())
        return features if self._lists.value(number) == count else None

    def _run(self, node: Node) -> Any:
        return self._lists.value(node) if self._usable and self._follows(node) else None

    def _of_features(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cut what lies one for each id into what belongs to each feature, with its lengths."""
        pieces = torch.split(flat, self._lengths.sum(1).tolist())
        return list(zip(pieces, self._lengths, strict=True))

    def _follows(self, node: Node) -> bool:
        """Tell whether a node's numbers depend on the lists alone, their ids being only moved."""
        seen: set[Node] = set()
        pending = [node]
        while pending:
            each = pending.pop()
            if each in seen or each.target is aten.sym_size.int:
                continue
            foreign = each.op == "placeholder" and each not in self.given.nodes
            if foreign or each.op == "call_module" or each in self._written:
                return False
            seen.add(each)
            pending += each.all_input_nodes
        carriers: set[Node | None] = {self.given.values, self.given.weights}
        for each in node.graph.nodes:
            if each in seen and any(source in carriers for source in each.all_input_nodes):
                if each.target not in _MOVES:
                    return False
                carriers.add(each)
        return True


def _runs_of_features(counts: Sequence[int]) -> dict[int, range]:
    """Map the ids of each feature, and of the first ones together, to which features those are."""
    ends = itertools.accumulate(counts, initial=0)
    runs = [(end, range(stop)) for stop, end in enumerate(ends)]
    runs += [(count, range(k, k + 1)) for k, count in enumerate(counts)]
    seen = Counter(number for number, _ in runs)
    seen[counts[0]] -= 1  # the first feature alone is both
    return {number: features for number, features in runs if seen[number] == 1}


class _Run(MadeUpRun):
    """Computes nodes on one set of made-up lists, each once."""

    def __init__(
        self,
        module: GraphModule,
        given: ListInput,
        lengths: Tensor,
        values: Tensor,
        weights: Tensor,
    ) -> None:
        known: dict[Node, Any] = {given.values: values, given.lengths: lengths.flatten()}
        if given.weights is not None:
            known[given.weights] = weights
        super().__init__(module, known)
        self._num_rows = lengths.shape[1]
        self._num_lists: Any = fake(given.lengths).shape[0]

    def stand_in(self, node: Node) -> Tensor:
        """Stand in for another input, of which only sizes are read."""
        (batch,) = self._num_lists.node.expr.free_symbols
        sizes: Any = fake(node).shape
        known = {batch: self._num_rows}
        shape = [s if isinstance(s, int) else int(s.node.expr.subs(known)) for s in sizes]
        return torch.empty(shape, dtype=fake(node).dtype, device="meta")


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.double(), right.double())
