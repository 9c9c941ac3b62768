"""zentorch: AMD's backend of `torch.compile` for EPYC CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerJob, Setting, has_bags, product_of
from rankopt.bench.peers.torch_compile import compiled_model
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable


class Zentorch(Peer):
    """`torch.compile(backend="zentorch")`, weights frozen or not.

    Example:
        ```yaml
        - zentorch: {freezing: [true, false], dynamic: [false, true]}
        ```
    """

    kind: ClassVar[str] = "zentorch"
    title: ClassVar[str] = "zentorch"
    packages: ClassVar[tuple[str, ...]] = ("zentorch", "deprecated")
    distributions: ClassVar[tuple[str, ...]] = ("torch", "zentorch")

    mixes: ClassVar[bool] = False

    freezing: tuple[bool, ...] = Field(default=(True, False), min_length=1)
    dynamic: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """False compiles anew for every batch size; a card with lists of ids is always dynamic."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        dynamic = (True,) if has_bags(card) else self.dynamic
        return product_of({"freezing": self.freezing, "dynamic": dynamic})

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Compile at the first call of each shape, which is in the warm-up."""
        import torch._inductor.config as inductor
        import zentorch  # noqa: F401 - registers the backend

        # The backend takes no options; this process holds one setting of it.
        inductor.freezing = setting["freezing"]
        return compiled_model(job, "zentorch", dynamic=setting["dynamic"], options=None)
