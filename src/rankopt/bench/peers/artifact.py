"""rankopt: the artifact that a recipe makes of the model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

import rankopt
from rankopt.bench.peers.peer import Peer, PeerJob, Setting, product_of
from rankopt.environment import collect_environment
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable

ARTIFACT = "artifact"
"""Of a setting's files, the artifact's folder."""


class RankoptArtifact(Peer):
    """`rankopt optimize RECIPE`, its passes kept or dropped on this machine.

    Example:
        ```yaml
        - rankopt: {recipes: [serve-int8]}
        ```
    """

    kind: ClassVar[str] = "rankopt"
    title: ClassVar[str] = "rankopt"
    has_files: ClassVar[bool] = True

    recipes: tuple[str, ...] = Field(default=("serve-int8",), min_length=1)

    def settings(self, card: ModelCard) -> list[Setting]:
        """One setting per recipe."""
        return product_of({"recipe": self.recipes})

    def files_key(self, job: PeerJob, setting: Setting) -> Mapping[str, Any]:
        """Build anew when the recipe, rankopt itself, the machine or the threads change."""
        from rankopt.recipe import load_recipe

        return {
            "recipe": load_recipe(setting["recipe"]).model_dump(mode="json"),
            "source": source_digest(),
            "machine": collect_environment().fingerprint(),
            "num_threads": job.num_threads,
        }

    def prepare(self, job: PeerJob, setting: Setting, folder: Path) -> None:
        """Run the recipe."""
        from rankopt.jobs.optimize import optimize

        optimize(
            setting["recipe"],
            job.load_card(),
            job.checkpoint,
            out=folder / ARTIFACT,
            num_threads=job.num_threads,
            progress=lambda line: print(line, flush=True),
        )

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Load the artifact."""
        from rankopt.runtime import load_artifact

        assert folder is not None
        artifact: ArmCallable = load_artifact(folder / ARTIFACT)
        return artifact


def source_digest() -> str:
    """Hash rankopt's own code, C++ included."""
    package = Path(rankopt.__file__).parent
    total = hashlib.sha256()
    for suffix in ("*.py", "*.cpp", "*.h"):
        for file in sorted(package.rglob(suffix)):
            total.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes())
    return total.hexdigest()
