"""Models of a few lines."""

from __future__ import annotations

from rankopt.sharding.tables import ModelTables, Table


def model_of(*tables: Table, dense_parameters: int = 1_000) -> ModelTables:
    return ModelTables("small", "small.yaml", tables, dense_parameters)
