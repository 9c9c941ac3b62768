"""eager: the card's module in plain PyTorch, which quality is judged against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankopt.bench.peers.peer import Peer, PeerJob, Setting

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable


class Eager(Peer):
    """Plain PyTorch under `torch.inference_mode`."""

    kind: ClassVar[str] = "eager"
    title: ClassVar[str] = "eager PyTorch"

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Build the module."""
        from rankopt.models.serving import EagerModel

        return EagerModel(job.load_card(), job.build_module())
