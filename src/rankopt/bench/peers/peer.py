"""What a peer is: a way to serve a card's model, with a small space of documented settings.

To add one: write a file beside this with a subclass of `Peer`, add its line to `PEERS` in
registry.py (another package: an entry point of the group `rankopt.peers`), name it in a suite.
Modules of peers import their engine inside methods, since a suite is checked where no engine is
installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict

from rankopt.errors import RankoptError
from rankopt.models.card import KjtInput, ModelCard, RaggedIdsInput, load_card

if TYPE_CHECKING:
    from torch import nn

    from rankopt.bench.arms import ArmCallable

Setting = dict[str, Any]
"""One point of a peer's search space; JSON values."""


class PeerError(RankoptError):
    """A peer cannot serve a model: it is missing, refuses the model, or died."""


class PeerJob(BaseModel):
    """What every step of a peer is given; a value that travels between processes.

    Attributes:
        card: the model card's file.
        checkpoint: the trained weights.
        checkpoint_sha256: of that file, hex.
        num_threads: the thread budget.
        batch_sizes: what will be timed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    card: Path
    checkpoint: Path
    checkpoint_sha256: str
    num_threads: int
    batch_sizes: tuple[int, ...]

    def load_card(self) -> ModelCard:
        return load_card(self.card)

    def build_module(self) -> nn.Module:
        """Build the card's module with its trained weights."""
        from rankopt.models.build import build_module

        return build_module(self.load_card(), self.checkpoint)


class Peer(BaseModel):
    """One way to serve; its fields, set in the suite, span the settings that are tried."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: ClassVar[str]
    """The key in suites, and the arm's name in results."""
    title: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()
    """Modules to be found before anything else is tried."""
    distributions: ClassVar[tuple[str, ...]] = ("torch",)
    """Releases that the prepared files depend on."""
    mixes: ClassVar[bool] = True
    """False where one process can hold one setting only, so one serves all batch sizes."""
    has_files: ClassVar[bool] = False
    """True where `prepare` writes something."""

    def missing_packages(self) -> tuple[str, ...]:
        """Name the modules that are not installed."""
        return tuple(name for name in self.packages if find_spec(name) is None)

    def why_not(self, card: ModelCard) -> str | None:
        """Say why the peer does not apply to a card; None where it does."""
        return None

    def settings(self, card: ModelCard) -> list[Setting]:
        """List the settings to try, the documented default first."""
        return [{}]

    def file_settings(self, setting: Setting) -> Setting:
        """Return the part of a setting that the prepared files depend on."""
        return setting

    def files_key(self, job: PeerJob, setting: Setting) -> Mapping[str, Any]:
        """Name whatever else the prepared files depend on; JSON."""
        return {}

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Export, quantise, compile: write what `load` needs. Runs once, in its own process."""

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Return the callable to time. Runs in the arm's process, its thread counts set."""
        raise PeerError(f"peer {self.kind!r} has no way to load a model.")


def product_of(choices: Mapping[str, Iterable[Any]]) -> list[Setting]:
    """Cross the choices of several keys, the first of each first."""
    values = itertools.product(*choices.values())
    return [dict(zip(choices, point, strict=True)) for point in values]


def has_bags(card: ModelCard) -> bool:
    """Tell whether a batch's tensors vary in size for a given number of rows."""
    return any(isinstance(item, RaggedIdsInput | KjtInput) for item in card.inputs)


def without_trace(said: str) -> str:
    """Cut what a worker said down to what failed and the error itself.

    The trace between them names files of this machine, which say nothing to a reader elsewhere.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not any(line.startswith("Traceback") for line in lines):
        return said
    error = lines[-1].partition(" (originally from")[0]
    return f"{lines[0]} {error}"[:600]


def first_lines(error: BaseException, limit: int = 3) -> str:
    """Write an error as its type and the first lines of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:limit])}"[:600]
