"""eager: the card's module in plain PyTorch, which quality is judged against."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankopt.bench.peers.peer import Peer, PeerJob, Setting
from rankopt.models.card import ModelCard

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


class EagerGpu(Peer):
    """Plain PyTorch on the GPU, inputs copied there and scores back in each call."""

    kind: ClassVar[str] = "pytorch_gpu"
    title: ClassVar[str] = "eager PyTorch on the GPU"

    def why_not(self, card: ModelCard) -> str | None:
        """Say that there is no GPU."""
        return no_gpu()

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Build the module and move it."""
        from rankopt.models.serving import EagerModel

        return EagerModel(job.load_card(), job.build_module(), "cuda")


def no_gpu() -> str | None:
    """Say why no GPU can be used; None where one can. Does not import torch."""
    from rankopt.environment import collect_environment

    environment = collect_environment()
    if environment.gpus:
        return None
    return f"needs an NVIDIA GPU; torch {environment.libraries.get('torch')} has none here"
