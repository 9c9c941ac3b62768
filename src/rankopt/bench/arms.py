"""Arms of a timing run: what to load, told apart by kind.

An arm is anything that takes `dict[str, Tensor]` and returns `dict[str, Tensor]`. A kind is one
line in `ARM_LOADERS`; other packages add kinds through the entry point group `rankopt.arms`.
Nothing here imports torch: the driver never needs it, and a worker sets its thread counts first.
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from rankopt.errors import ArtifactError, CheckpointError, UsageError, nearest

if TYPE_CHECKING:
    from torch import Tensor

    ArmCallable = Callable[[dict[str, Tensor]], dict[str, Tensor]]

ENTRY_POINT_GROUP = "rankopt.arms"


class ArmSpec(BaseModel):
    """One arm, as a value that travels to a worker.

    Attributes:
        label: its name in records and reports, such as `control`.
        kind: a key of `ARM_LOADERS` or an entry point of the group `rankopt.arms`.
        card: the model card's file.
        checkpoint: overrides the card's own.
        artifact: the artifact folder.
        num_threads: the arm's own thread budget; the plan's when None.
        options: what a further kind needs, such as `request_size` of `requests`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    kind: str
    card: Path | None = None
    checkpoint: Path | None = None
    artifact: Path | None = None
    num_threads: int | None = Field(default=None, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)

    def paths(self) -> dict[str, Path]:
        """Name the files and folders that the arm reads: field -> path."""
        fields = {"card": self.card, "checkpoint": self.checkpoint, "artifact": self.artifact}
        return {name: path for name, path in fields.items() if path is not None}


def _load_eager(spec: ArmSpec) -> ArmCallable:
    from rankopt.models.build import build_module
    from rankopt.models.card import load_card
    from rankopt.models.serving import EagerModel

    if spec.card is None:
        raise UsageError(f"arm {spec.label!r}: kind 'eager' needs a model card.")
    card = load_card(spec.card)
    device = str(spec.options.get("device", "cpu"))
    return EagerModel(card, build_module(card, spec.checkpoint), device)


def _load_artifact(spec: ArmSpec) -> ArmCallable:
    from rankopt.runtime import load_artifact

    if spec.artifact is None:
        raise UsageError(f"arm {spec.label!r}: kind 'artifact' needs an artifact folder.")
    artifact: ArmCallable = load_artifact(spec.artifact)
    return artifact


ARM_LOADERS: dict[str, Callable[[ArmSpec], ArmCallable] | str] = {
    "eager": _load_eager,
    "artifact": _load_artifact,
    "peer": "rankopt.bench.peers.arm:load_peer_arm",
    "requests": "rankopt.bench.request_rows:load_requests",
    "training": "rankopt.train.arm:load_training",
}
"""Kind -> loader, or its `module:function`, which is imported in the worker only."""


def arm_kinds() -> tuple[str, ...]:
    """Name every kind that can be loaded, sorted."""
    return tuple(sorted({*ARM_LOADERS, *entry_points(group=ENTRY_POINT_GROUP).names}))


def loader_reference(kind: str) -> str:
    """Return a kind's loader as `module:function`, so that a fresh process can find it.

    Raises:
        UsageError: no such kind.
    """
    if kind in ARM_LOADERS:
        loader = ARM_LOADERS[kind]
        return loader if isinstance(loader, str) else f"{loader.__module__}:{loader.__qualname__}"
    found = entry_points(group=ENTRY_POINT_GROUP, name=kind)
    if not found:
        raise UsageError(f"arm kind {kind!r} is not known. {nearest(kind, arm_kinds())}")
    return next(iter(found)).value


def load_arm(spec: ArmSpec, loader: str | None = None) -> ArmCallable:
    """Load an arm in this process.

    Args:
        spec: what to load.
        loader: `module:function`; looked up by `spec.kind` when None.

    Raises:
        UsageError: the kind is unknown, or a path that it needs is not given.
        RankoptError: whatever the kind's loader finds wrong with the files.
    """
    module, _, name = (loader or loader_reference(spec.kind)).partition(":")
    function: Callable[[ArmSpec], ArmCallable] = getattr(importlib.import_module(module), name)
    return function(spec)


def resolve_arm(spec: ArmSpec) -> ArmSpec:
    """Make an arm's paths absolute, fill in the card's own checkpoint, and check that all exist.

    Raises:
        UsageError: the kind is unknown.
        CardError: the card cannot be found or read.
        CheckpointError: the checkpoint is not there.
        ArtifactError: the artifact folder is not there.
    """
    loader_reference(spec.kind)
    update: dict[str, Path] = {}
    checkpoint = spec.checkpoint
    if spec.card is not None:
        from rankopt.models.card import load_card

        card = load_card(spec.card)
        update["card"] = card.path or spec.card
        if checkpoint is None and card.checkpoint and spec.artifact is None:
            checkpoint = card.folder / card.checkpoint
    if checkpoint is not None:
        if not checkpoint.exists():
            raise CheckpointError(f"arm {spec.label!r}: checkpoint {checkpoint} is not there.")
        update["checkpoint"] = checkpoint.resolve()
    if spec.artifact is not None:
        if not spec.artifact.is_dir():
            raise ArtifactError(
                f"arm {spec.label!r}: artifact {spec.artifact} is not a folder. "
                "Build it with: rankopt optimize RECIPE --model CARD --out DIR"
            )
        update["artifact"] = spec.artifact.resolve()
    return spec.model_copy(update=update)


def arm_identity(spec: ArmSpec) -> dict[str, Any]:
    """Describe an arm by content, not by path: equal identities mean the same arm.

    A resumed run compares these, so a checkpoint rewritten in place is seen.
    """
    files = {name: hash_path(path) for name, path in spec.paths().items()}
    if spec.card is not None and (factory := factory_file(spec.card)) is not None:
        files["factory"] = hash_path(factory)
    return {
        "label": spec.label,
        "kind": spec.kind,
        "num_threads": spec.num_threads,
        "options": spec.options,
        "sha256": files,
    }


def factory_file(card_path: Path) -> Path | None:
    """Return the Python file that a card's factory lives in, when it names a file."""
    from rankopt.models.card import load_card

    card = load_card(card_path)
    code = card.factory.rpartition(":")[0]
    file = card.folder / code
    return file.resolve() if code.endswith(".py") and file.is_file() else None


def hash_path(path: Path) -> str:
    """Hash a file, or a folder's relative names and contents (sha256, hex)."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    total = hashlib.sha256()
    for file in sorted(item for item in path.rglob("*") if item.is_file()):
        total.update(os.fsencode(file.relative_to(path)) + b"\0" + hash_path(file).encode())
    return total.hexdigest()
