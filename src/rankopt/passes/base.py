"""What a pass is.

A pass is a frozen value: the same class is the YAML schema and the Python API. It knows how to
check itself and how to rewrite a bundle; timing, drift, bytes and keep-or-drop belong to the
pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from rankopt.errors import Problem
from rankopt.review.schema import MeasuredChoice

if TYPE_CHECKING:
    from rankopt.bundle import ModelBundle
    from rankopt.environment import Environment
    from rankopt.models.card import ModelCard

Purpose = Literal["latency", "bytes", "requests", "artifact"]


@dataclass
class PassContext:
    """What the pipeline hands to a pass, and where the pass says what it left alone.

    Attributes:
        environment: the machine that the artifact is for.
        workdir: a folder for files that outlive the call.
        notes: one sentence per thing the pass did not do, and why.
        choices: what an earlier run chose (`passes.json`), to be taken as it stands.
        chosen: what the pass chooses now by timing, by layer; kept in its record.
        batch_sizes: where that is timed.
        plain: the plain form as the pass has left it, while the pass rewrites the one with
            `request_index`; both read one copy of the tables, so this one follows that one.
    """

    environment: Environment
    workdir: Path
    notes: list[str] = field(default_factory=list)
    choices: Mapping[str, MeasuredChoice] = field(default_factory=dict)
    chosen: dict[str, MeasuredChoice] = field(default_factory=dict)
    batch_sizes: tuple[int, ...] = (1, 512)
    plain: ModelBundle | None = None

    def note(self, text: str) -> None:
        self.notes.append(text)


class Pass(BaseModel):
    """One step of a recipe.

    Class attributes:
        kind: the YAML key, the file's name and the registry's key.
        purpose: what the pass is for; the pipeline drops it when its interval shows that it fails
            this (`bytes` passes are judged on the latency of the whole candidate instead,
            `requests` passes on calls of whole requests).
        requires, forbids, provides: facts about the bundle; order is checked from these alone.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: ClassVar[str]
    purpose: ClassVar[Purpose] = "latency"
    requires: ClassVar[frozenset[str]] = frozenset()
    forbids: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """List what makes the pass impossible here, without any torch work."""
        return []

    @property
    def needs_rows(self) -> bool:
        """Whether what the pass does depends on the values of real rows, not on weights alone."""
        return False

    @property
    def device(self) -> str:
        """Where what the pass makes runs."""
        return "cpu"

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Return a new bundle, or the same object when there was nothing to do."""
        raise TypeError(f"{type(self).__name__} defines no apply()")
