"""Every pass by its kind.

A pass of this package is one line below. A third party's comes through the entry point group
`rankopt.passes` (name = kind, value = `module:Class`); it cannot take a name that is taken.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points

from rankopt.errors import RecipeError, nearest
from rankopt.passes.base import Pass

PASSES: dict[str, str] = {
    "fuse_attention": "rankopt.passes.fuse_attention:FuseAttention",
    "drop_dead_positions": "rankopt.passes.drop_dead_positions:DropDeadPositions",
    "fuse_embeddings": "rankopt.passes.fuse_embeddings:FuseEmbeddings",
    "quantize_embeddings": "rankopt.passes.quantize_embeddings:QuantizeEmbeddings",
    "fuse_interaction": "rankopt.passes.fuse_interaction:FuseInteraction",
    "hoist_requests": "rankopt.passes.hoist_requests:HoistRequests",
    "quantize_dense": "rankopt.passes.quantize_dense:QuantizeDense",
    "precision": "rankopt.passes.precision:Precision",
    "export_aoti": "rankopt.passes.export_aoti:ExportAoti",
    "train_fuse_embeddings": "rankopt.passes.train_fuse_embeddings:TrainFuseEmbeddings",
    "train_precision": "rankopt.passes.train_precision:TrainPrecision",
    "train_compile": "rankopt.passes.train_compile:TrainCompile",
    "train_dense_optimizer": "rankopt.passes.train_dense_optimizer:TrainDenseOptimizer",
    "train_accumulate": "rankopt.passes.train_accumulate:TrainAccumulate",
    "train_checkpoint_activations": "rankopt.passes.train_checkpoint_activations:"
    "TrainCheckpointActivations",
    "train_pipeline": "rankopt.passes.train_pipeline:TrainPipeline",
    "train_dedup_ids": "rankopt.passes.train_dedup_ids:TrainDedupIds",
    "train_shard": "rankopt.passes.train_shard:TrainShard",
}

ENTRY_POINT_GROUP = "rankopt.passes"


@cache
def pass_kinds() -> dict[str, str]:
    """Map every known kind to the `module:Class` that implements it."""
    kinds = dict(PASSES)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in kinds:
            raise RecipeError(
                f"the entry point {point.value!r} offers the pass kind {point.name!r}, which "
                f"{kinds[point.name]!r} already is. Rename the one in the installed package."
            )
        kinds[point.name] = point.value
    return kinds


def pass_class(kind: str) -> type[Pass]:
    """Import the class of a pass kind.

    Raises:
        RecipeError: no such kind; the message names the nearest.
    """
    kinds = pass_kinds()
    if kind not in kinds:
        raise RecipeError(f"{kind!r} is no pass kind. {nearest(kind, kinds)}")
    module, _, name = kinds[kind].partition(":")
    found = getattr(importlib.import_module(module), name)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise RecipeError(f"{kinds[kind]} is registered as pass {kind!r} but is no rankopt Pass.")
    return found
