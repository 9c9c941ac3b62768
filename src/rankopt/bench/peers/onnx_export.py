"""The card's model as an ONNX file, exported once for every engine that reads one.

Shapes in this module: B bags, L ids of all bags, D embedding dim.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankopt.bench.peers.peer import PeerError, PeerJob
from rankopt.capture.export import trace
from rankopt.data.cache import cached_folder
from rankopt.environment import installed_libraries
from rankopt.models.serving import ServingModule

MODEL = "model.onnx"
OPSET = 20
PACKAGES = ("onnx", "onnxscript")


class GatheredBags(nn.Module):
    """`nn.EmbeddingBag` in operators that every engine has a kernel for.

    ONNX has no pooled lookup: the exporter writes a loop over the bags, one by one. A gather with a
    sum, or with a scatter where bags differ in length, is what an engine can run well.
    """

    def __init__(self, bag: nn.EmbeddingBag) -> None:
        super().__init__()
        if bag.mode == "max":
            raise PeerError("an EmbeddingBag of mode 'max' has no ONNX form here.")
        self.weight = bag.weight
        self.mean = bag.mode == "mean"
        self.padding_id = bag.padding_idx
        self.include_last_offset = bag.include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        ids = input  # torchrec passes it by EmbeddingBag's own name
        if ids.dim() == 2 and ids.shape[1] == 1 and self.padding_id is None:
            rows = F.embedding(ids[:, 0], self.weight)
            return rows if per_sample_weights is None else rows * per_sample_weights
        rows = F.embedding(ids, self.weight)
        factor = torch.ones_like(ids, dtype=rows.dtype)
        if self.padding_id is not None:
            factor = factor * (ids != self.padding_id)
        count = factor
        if per_sample_weights is not None:
            factor = factor * per_sample_weights
        rows = rows * factor.unsqueeze(-1)
        if ids.dim() == 2:
            total_BD, count_B = rows.sum(dim=1), count.sum(dim=1)
        else:
            total_BD, count_B = self._scatter(rows, count, offsets)
        return total_BD / count_B.clamp(min=1).unsqueeze(1) if self.mean else total_BD

    def _scatter(
        self, rows_LD: Tensor, count_L: Tensor, offsets: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if offsets is None:
            raise PeerError("an EmbeddingBag over a list needs offsets.")
        starts_B = offsets[:-1] if self.include_last_offset else offsets
        num_ids = rows_LD.shape[0]
        # Bag of each id: how many bags have begun by then. An empty last bag begins at L.
        begun = torch.zeros(num_ids + 1, dtype=torch.int64)
        begun = begun.scatter_add(0, starts_B, torch.ones_like(starts_B))
        bag_L = begun.cumsum(0)[:num_ids] - 1
        width = rows_LD.shape[1]
        total_BD = torch.zeros(starts_B.shape[0], width).scatter_add(
            0, bag_L.unsqueeze(1).expand(-1, width), rows_LD
        )
        count_B = torch.zeros(starts_B.shape[0]).scatter_add(0, bag_L, count_L)
        return total_BD, count_B


def with_gathered_bags(module: nn.Module) -> nn.Module:
    """Replace every `nn.EmbeddingBag` in a module, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.EmbeddingBag):
            setattr(module, name, GatheredBags(child))
        else:
            with_gathered_bags(child)
    return module


def exported_onnx(job: PeerJob) -> Path:
    """Return the model's ONNX file, exporting it the first time."""
    card = job.load_card()
    key = {
        "card": card.model_dump(mode="json"),
        "checkpoint": job.checkpoint_sha256,
        "libraries": installed_libraries(("torch", "onnx", "onnxscript")),
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    return cached_folder("peers-onnx", key, lambda folder: _export(job, folder)) / MODEL


def _export(job: PeerJob, folder: Path) -> None:
    card = job.load_card()
    serving = ServingModule(card, with_gathered_bags(job.build_module())).eval()
    program = trace(serving, card)
    torch.onnx.export(
        program,
        (),
        folder / MODEL,
        dynamo=True,
        optimize=True,
        opset_version=OPSET,
        input_names=list(card.tensor_names),
        output_names=[output.name for output in card.outputs],
        external_data=True,
        verbose=False,
    )
