"""The lookups of a module, told from its dense part: timed, counted, or cut off from it.

Found as `fused_tables` and the planner find tables: nn.Embedding, nn.EmbeddingBag and what holds
them (`EmbeddingBags`, torchrec's collections), whole or sharded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.models.layers import EmbeddingBags
from rankopt.train.breakdown.phase_clock import PhaseClock
from rankopt.train.breakdown.phases import Phase


class CannotCutError(Exception):
    """The result of a lookup is of a kind that cannot be cut off from its tables."""


@dataclass(frozen=True)
class Read:
    """One lookup: of T tables by ids [B, T], or of one table by any ids.

    Attributes:
        tables: float [rows, D] each.
        ids: of each table, flat.
        index_bytes: of ids, offsets and weights of ids.
        result_bytes: of the result.
    """

    tables: list[Tensor]
    ids: list[Tensor]
    index_bytes: int
    result_bytes: int


@dataclass
class Lookups:
    """What was found in a module, and what its next calls are to do beside looking up.

    Attributes:
        names: modules that look up.
        sharded: those among them whose tables lie on several ranks.
        tables: their weights.
        reads: lookups noted while `noting`.
        cuts: results handed on as leaves of the graph while `noting`.
    """

    clock: PhaseClock
    names: list[str] = field(default_factory=list)
    sharded: list[str] = field(default_factory=list)
    tables: list[nn.Parameter] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    cuts: list[Tensor] = field(default_factory=list)
    is_noting: bool = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is read, and hand results on without their history: no table is touched."""
        self.reads, self.cuts = [], []
        self.is_noting = True
        try:
            yield
        finally:
            self.is_noting = False

    def look_up(self, module: nn.Module, plain: Callable[..., Any], args: Any, rest: Any) -> Any:
        """Call a lookup, and note it."""
        result = plain(*args, **rest)
        read = _read_of(module, args, rest, result)
        if read is not None:
            self.reads.append(read)
        return self._cut(result)

    def _cut(self, result: Any) -> Any:
        if isinstance(result, Tensor):
            if not result.requires_grad:
                return result
            leaf = result.detach().requires_grad_()
            self.cuts.append(leaf)
            return leaf
        if isinstance(result, dict):
            return {key: self._cut(value) for key, value in result.items()}
        if hasattr(type(result), "wait"):  # torchrec hands on what is still being sent
            return self._cut(result.wait())
        if type(result).__name__ == "KeyedTensor":
            values = self._cut(result.values())
            return type(result)(result.keys(), result.length_per_key(), values, result.key_dim())
        raise CannotCutError(f"a lookup gives a {type(result).__name__}")


def watch_lookups(module: nn.Module, clock: PhaseClock) -> Lookups:
    """Have a module's lookups tell the clock when they run, in place.

    Call it after the passes of a recipe, which change what a lookup's forward is, and before the
    first step, when torch.compile looks at it.
    """
    found = Lookups(clock)
    collections = _collections()
    for name, part in module.named_modules():
        if hasattr(part, "compute_and_output_dist") and hasattr(part, "input_dist"):
            found.sharded.append(name)
            _wrap(found, part, "forward", "input_distribution")
            _wrap(found, part, "input_dist", "input_distribution")
            _wrap(found, part, "compute_and_output_dist", "lookup")
        elif isinstance(part, (nn.Embedding, nn.EmbeddingBag, EmbeddingBags, *collections)):
            if any(name.startswith(f"{outer}.") for outer in found.sharded):
                continue
            _wrap(found, part, "forward", "lookup")
        else:
            continue
        found.names.append(name)
        found.tables += part.parameters()
    return found


def _collections() -> tuple[type[nn.Module], ...]:
    """Return torchrec's collections where the module can hold one: torchrec is slow to import."""
    module = sys.modules.get("torchrec.modules.embedding_modules")
    if module is None:
        return ()
    return module.EmbeddingBagCollection, module.EmbeddingCollection


def _wrap(found: Lookups, module: Any, method: str, phase: Phase) -> None:
    plain = getattr(module, method)
    clock = found.clock

    def watched(*args: Any, **rest: Any) -> Any:
        if found.is_noting and method == "forward":
            return found.look_up(module, plain, args, rest)
        if not clock.enter(phase):
            return plain(*args, **rest)
        try:
            return plain(*args, **rest)
        finally:
            clock.leave()

    # A lookup that torch.compile was told to leave alone must stay so.
    is_left_alone = getattr(plain, "_torchdynamo_disable", False)
    setattr(module, method, torch.compiler.disable(watched) if is_left_alone else watched)  # type: ignore[no-untyped-call]


def _read_of(module: nn.Module, args: Any, rest: Any, result: Any) -> Read | None:
    """Describe a lookup; None for what holds others, which are noted themselves."""
    given = [value for value in (*args, *rest.values()) if isinstance(value, Tensor)]
    if not given or not isinstance(result, Tensor):
        return None
    if isinstance(module, EmbeddingBags) and hasattr(module, "group"):
        columns = list(given[0].reshape(-1, given[0].shape[-1]).unbind(dim=1))
        bags: list[Any] = list(module.bags)
        return Read([bag.weight for bag in bags], columns, _bytes(given[0]), _bytes(result))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        index_bytes = sum(map(_bytes, given))
        return Read([module.weight], [given[0].reshape(-1)], index_bytes, _bytes(result))
    return None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
