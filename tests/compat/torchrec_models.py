"""The classes of torchrec.models on synthetic clicks, trained through TrainPipelineSparseDist.

This file is what a user of torchrec has anyway: `build` is the factory that the cards name, `train`
shards the model with DistributedModelParallel (one rank, gloo) and saves its state_dict. Nothing
here knows rankopt.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

DIM = 32
DENSE = [f"I{number}" for number in range(1, 9)]
IDS = {f"C{number}": 10_000 for number in range(1, 9)}
LISTS = {"R1": 5_000}


def build(model: str) -> nn.Module:
    """Build one class by name."""
    tables = [
        EmbeddingBagConfig(
            name=f"t_{name}",
            embedding_dim=DIM,
            num_embeddings=size,
            feature_names=[name],
            pooling=PoolingType.MEAN if name in LISTS else PoolingType.SUM,
        )
        for name, size in {**IDS, **LISTS}.items()
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    if model == "SimpleDeepFMNN":
        return SimpleDeepFMNN(len(DENSE), bags, hidden_layer_size=128, deep_fm_dimension=64)
    shape: dict[str, Any] = {
        "dense_in_features": len(DENSE),
        "dense_arch_layer_sizes": [256, DIM],
        "over_arch_layer_sizes": [256, 128, 1],
    }
    if model == "DLRM_DCN":
        return DLRM_DCN(bags, **shape, dcn_num_layers=3, dcn_low_rank_dim=64)
    if model == "DLRM_Projection":
        branches = {"interaction_branch1_layer_sizes": [128, 4 * DIM]}
        branches["interaction_branch2_layer_sizes"] = [128, 4 * DIM]
        return DLRM_Projection(bags, **shape, **branches)
    return DLRM(bags, **shape)


class Batch(Pipelineable):
    """Dense values, ids and labels of one step."""

    def __init__(self, dense: Tensor, sparse: KeyedJaggedTensor, labels: Tensor) -> None:
        self.dense, self.sparse, self.labels = dense, sparse, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """Move every part."""
        parts = (self.dense, self.sparse, self.labels)
        return Batch(*[part.to(device=device, non_blocking=non_blocking) for part in parts])

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the stream is done with it."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory."""
        return Batch(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())


class WithLoss(nn.Module):
    """A model and its loss, as the pipeline calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        gives_probabilities = isinstance(model, SimpleDeepFMNN)
        self.loss = nn.BCELoss() if gives_probabilities else nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the loss, and logits and labels."""
        logits = self.model(batch.dense, batch.sparse).squeeze(-1)
        loss = self.loss(logits, batch.labels)
        return loss, (logits.detach(), batch.labels)


def batches(frame: pd.DataFrame, batch_size: int = 512) -> Iterator[Batch]:
    """Cut a frame into batches."""
    names = [*IDS, *LISTS]
    for start in range(0, len(frame), batch_size):
        part = frame.iloc[start : start + batch_size]
        lists = [part[name].to_list() if name in LISTS else part[name].to_numpy() for name in names]
        bags = [[np.atleast_1d(bag) for bag in column] for column in lists]
        lengths = torch.tensor([len(bag) for column in bags for bag in column])
        values = torch.from_numpy(np.concatenate([bag for column in bags for bag in column]))
        sparse = KeyedJaggedTensor(keys=names, values=values.long(), lengths=lengths)
        dense = torch.from_numpy(part[DENSE].to_numpy("float32"))
        yield Batch(dense, sparse, torch.from_numpy(part["label"].to_numpy("float32")))


def train(model: str, frame: pd.DataFrame, folder: Path) -> Path:
    """Train one rank through the sparse pipeline and save the model's state_dict."""
    torch.manual_seed(0)
    store = f"file://{folder.resolve()}/rendezvous"
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        device = torch.device("cpu")
        net = build(model)
        tables = net.sparse_arch.embedding_bag_collection.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.05})
        sharded = DistributedModelParallel(WithLoss(net), device=device)
        optimizer = torch.optim.Adam(sharded.parameters(), lr=0.002)
        pipeline = TrainPipelineSparseDist(sharded, optimizer, device)
        steps = batches(frame)
        while True:
            try:
                pipeline.progress(steps)
            except StopIteration:
                break
        return _save(sharded, folder)
    finally:
        dist.destroy_process_group()
        (folder / "rendezvous").unlink(missing_ok=True)


def _save(sharded: DistributedModelParallel, folder: Path) -> Path:
    whole = {}
    for name, value in sharded.state_dict().items():
        if isinstance(value, ShardedTensor):  # of which this rank holds all
            full = torch.empty(value.size())
            value.gather(0, full)
            value = full
        whole[name.removeprefix("model.")] = value.detach().clone()
    path = folder / "model.pt"
    torch.save(whole, path)
    return path
