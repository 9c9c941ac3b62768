"""torchrec_int8: torchrec's quantised EmbeddingBagCollection, the rest in eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rankopt.bench.peers.peer import Peer, PeerJob, Setting
from rankopt.models.card import KjtInput, ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable


class TorchrecInt8(Peer):
    """`torchrec.inference.modules.quantize_inference_model`: int8 tables in one fbgemm lookup."""

    kind: ClassVar[str] = "torchrec_int8"
    title: ClassVar[str] = "torchrec quantize_inference_model"
    packages: ClassVar[tuple[str, ...]] = ("torchrec",)

    def why_not(self, card: ModelCard) -> str | None:
        """Refuse models without torchrec's tables."""
        if any(isinstance(item, KjtInput) for item in card.inputs):
            return None
        return "does not apply: the model holds no torchrec EmbeddingBagCollection"

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Quantise the tables; takes a second."""
        from torchrec.inference.modules import quantize_inference_model

        from rankopt.models.serving import EagerModel

        return EagerModel(job.load_card(), quantize_inference_model(job.build_module()))
