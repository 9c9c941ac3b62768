"""torch_int8: PyTorch's own dynamic int8, module by module, in eager mode."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from rankopt.bench.peers.peer import Peer, PeerJob, Setting, product_of
from rankopt.models.card import ModelCard

if TYPE_CHECKING:
    from rankopt.bench.arms import ArmCallable


class TorchInt8(Peer):
    """`torch.ao.quantization.quantize_dynamic` on linear layers, and on tables where asked.

    Example:
        ```yaml
        - torch_int8: {engine: [x86, onednn], tables: [true, false]}
        ```
    """

    kind: ClassVar[str] = "torch_int8"
    title: ClassVar[str] = "PyTorch dynamic int8"

    engine: tuple[Literal["x86", "fbgemm", "onednn"], ...] = Field(
        default=("x86", "onednn"), min_length=1
    )
    tables: tuple[bool, ...] = Field(default=(False, True), min_length=1)
    """Hold `nn.EmbeddingBag` tables in 8 bits too."""

    def settings(self, card: ModelCard) -> list[Setting]:
        """Cross the choices."""
        return product_of({"engine": self.engine, "tables": self.tables})

    def load(self, job: PeerJob, setting: Setting, folder: Path | None) -> ArmCallable:
        """Quantise the module's layers, weights per channel; takes a second."""
        import torch
        from torch import nn
        from torch.ao import quantization

        from rankopt.models.serving import EagerModel

        torch.backends.quantized.engine = setting["engine"]
        spec: dict[Any, Any] = {nn.Linear: quantization.per_channel_dynamic_qconfig}
        if setting["tables"]:
            spec[nn.EmbeddingBag] = quantization.float_qparams_weight_only_qconfig
        quantised = quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            job.build_module(), spec
        )
        for module in quantised.modules():
            if isinstance(module, torch.ao.nn.quantized.EmbeddingBag):
                # Its kernel refuses a column of a matrix of ids.
                module.register_forward_pre_hook(_contiguous)
        return EagerModel(job.load_card(), quantised)


def _contiguous(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item.contiguous() if hasattr(item, "contiguous") else item for item in arguments)
