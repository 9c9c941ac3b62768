"""What a graph's values are over packed tokens: the forms in which `packer` follows them.

Shapes: as in `packed`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node


class PackingError(Exception):
    """A rectangle that stays as it is, with the reason."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Tokens of a sequence, each with a vector of features.

    Attributes:
        tokens: context and ids, [T, width], or [T] for one feature without a dim.
        own: the token after them, [B, width]; None where there is none.
        num_before: C.
        of_rows: the [B, width] whose rows the tokens repeat, where they do.
        fill: of ids, the one at places without an id.
    """

    tokens: Node
    own: Node | None = None
    num_before: int = 0
    of_rows: Node | None = None
    fill: int | None = None


@dataclass(frozen=True, eq=False)
class Flags:
    """What is so of tokens with some ids, and whether it is of places without an id.

    Attributes:
        packed: bool [T].
    """

    packed: Packed
    absent: bool


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which pairs of tokens a mask [B, 1, S, S] shows, or hides, by the key's flag and by order."""

    keys: Flags
    causal: bool = False
    hides: bool = False


@dataclass(frozen=True, eq=False)
class Slices:
    """A vector of features split up: the whole, and where each part begins and ends."""

    whole: Packed
    bounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Heads:
    """Features laid out by head, [B, A, S, K], or [B, A, K, S] when `turned`."""

    packed: Packed
    num_heads: int
    turned: bool = False


@dataclass(frozen=True, eq=False)
class Scores:
    """Products of queries and keys, [B, A, S, S], and what was done to them since.

    Attributes:
        seen: which tokens are seen at all, bool [T]; None where all are.
    """

    queries: Packed
    keys: Packed
    num_heads: int
    score_scale: float = 1.0
    bias: Tensor | None = None
    activated: bool = False
    weight_scale: float = 1.0
    causal: bool | None = None
    seen: Packed | None = None


@dataclass(frozen=True, eq=False)
class Masked:
    """One number per token, zero where no id stands; [B, 1, H] when `row`."""

    packed: Packed
    row: bool = False


Value = Packed | Slices | Heads | Scores | Masked | Flags | Pairs
