"""The tables of a model and nothing else: what a plan is measured on.

torchrec shards its own collections alone, and a plan is of tables that may not exist yet. So the
tables are put into collections of their own, on the meta device, and the plan is rewritten to name
them; each rank then allocates its parts and nothing more.

Shapes: B rows of a rank's batch, L ids of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.tables import Table

PRIME = 2_654_435_761
"""Knuth's multiplier: popular ids then lie anywhere in a table, as they do in a hashed one."""


@dataclass(frozen=True)
class Group:
    """Tables that one collection can hold.

    Attributes:
        path: the module that holds them.
        tables: in the order of the model.
    """

    path: str
    tables: tuple[Table, ...]

    @property
    def pooled(self) -> bool:
        return self.tables[0].pooled

    @property
    def weighted(self) -> bool:
        return self.tables[0].weighted


def groups(tables: Sequence[Table]) -> tuple[Group, ...]:
    """Deal tables to the collections that hold them, or would."""
    held: dict[str, list[Table]] = {}
    for table in tables:
        # A name with dots would be that of a module within a module.
        held.setdefault(table.collection.replace(".", "_") or "root", []).append(table)
    return tuple(Group(path, tuple(members)) for path, members in held.items())


def stand_in(tables: Sequence[Table]) -> nn.Module:
    """Build the collections on the meta device."""
    module = nn.Module()
    meta = torch.device("meta")
    for group in groups(tables):
        collection: nn.Module
        if group.pooled:
            collection = EmbeddingBagCollection(
                tables=[EmbeddingBagConfig(**_shape(table)) for table in group.tables],
                is_weighted=group.weighted,
                device=meta,
            )
        else:
            configs = [EmbeddingConfig(**_shape(table)) for table in group.tables]
            collection = EmbeddingCollection(tables=configs, device=meta)
        module.add_module(group.path, collection)
    return module


def plan_of_stand_in(plan: ShardPlan, tables: Sequence[Table]) -> ShardPlan:
    """Rewrite where a plan's tables lie."""
    paths = {table.name: group.path for group in groups(tables) for table in group.tables}
    moved = tuple(
        table.model_copy(update={"path": paths[table.name], "key": table.name})
        for table in plan.tables
    )
    return plan.model_copy(update={"tables": moved})


def batches(
    tables: Sequence[Table], batch_size: int, zipf: float, generator: torch.Generator
) -> Iterator[dict[str, KeyedJaggedTensor]]:
    """Draw the ids of batches without end, by the path of their collection.

    A row brings each table's mean number of ids: as many to every row where it is whole, else one
    more to some.

    Args:
        tables: of the model.
        batch_size: B.
        zipf: exponent of the law that ids follow; 0: all alike.
        generator: source of chance.
    """
    while True:
        yield {group.path: _jagged(group, batch_size, zipf, generator) for group in groups(tables)}


def _jagged(
    group: Group, batch_size: int, zipf: float, generator: torch.Generator
) -> KeyedJaggedTensor:
    lengths, values = [], []
    for table in group.tables:
        least = math.floor(table.ids_per_row)
        more = torch.rand(batch_size, generator=generator) < table.ids_per_row - least
        lengths.append(least + more.long())
        values.append(draw_ids(table.num_rows, int(lengths[-1].sum()), zipf, generator))
    ids = torch.cat(values)
    return KeyedJaggedTensor(
        keys=[table.name for table in group.tables],
        values=ids,
        lengths=torch.cat(lengths),
        weights=torch.rand(len(ids), generator=generator) if group.weighted else None,
    )


def draw_ids(num_rows: int, count: int, zipf: float, generator: torch.Generator) -> Tensor:
    """Draw ids below `num_rows`, popular ones by Zipf's law over rows in mixed order.

    Args:
        num_rows: of the table.
        count: how many.
        zipf: exponent; 0: all alike.
        generator: source of chance.
    """
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    if zipf == 0 or num_rows == 1:
        return (share * num_rows).long().clamp_(max=num_rows - 1)
    # The inverse of the power law's integral; its head is a little heavier than the sum's.
    if zipf == 1:
        ranks = torch.exp(share * math.log(num_rows + 1.0))
    else:
        power = 1.0 - zipf
        ranks = (1 + share * ((num_rows + 1.0) ** power - 1)) ** (1 / power)
    ids: Tensor = (ranks.long().clamp_(1, num_rows) - 1) * PRIME % num_rows
    return ids


def _shape(table: Table) -> dict[str, object]:
    return {
        "name": table.name,
        "embedding_dim": table.dim,
        "num_embeddings": table.num_rows,
        "feature_names": [table.name],
    }
