"""Pool rows that were looked up before, for bags that a lookup call cannot pool.

Shapes: L ids of all bags, D width of a row, B bags.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from rankopt.passes.emit import Emitter
from rankopt.passes.graph import arguments, aten, fake, schema_values
from rankopt.passes.lookups import Lookup

_POOL = aten._embedding_bag_forward_only.default
"""`embedding_bag` itself fixes the number of rows while tracing, once it is given a padding row."""


def bags_of_rows(module: GraphModule, lookups: Sequence[Lookup]) -> int:
    """Split each bag that no call can pool into a lookup of its rows and a bag over those.

    The rows [L, D] can then be stored like any others. Empty bags, weights and the order of ids are
    left to `embedding_bag` as before.

    Returns:
        How many bags were split.
    """
    chosen = [lk for lk in lookups if lk.form == "bag" and lk.unbatched and not lk.refusal]
    emitter = Emitter(module)
    for lookup in chosen:
        _split(emitter, lookup)
    return len(chosen)


def _split(emitter: Emitter, lookup: Lookup) -> None:
    operator, call = lookup.operator, emitter.call
    values = schema_values(operator)
    with emitter.before(operator):
        rows = call(aten.embedding.default, arguments(operator)[0], lookup.indices)
        count = call(aten.sym_size.int, lookup.indices, 0)
        options = {"dtype": fake(lookup.indices).dtype, "device": torch.device("cpu")}
        ids = call(aten.arange.default, count, **options)
        if lookup.padding_idx is not None:
            # A row of its own in front of the others stands for the one that is left out.
            rows = call(aten.constant_pad_nd.default, rows, [0, 0, 1, 0], 0.0)
            left_out = call(aten.eq.Scalar, lookup.indices, lookup.padding_idx)
            following = call(aten.add.Tensor, ids, 1)
            ids = call(aten.masked_fill.Scalar, following, left_out, 0)
            values["padding_idx"] = 0
        values["weight"], values["indices"] = rows, ids
    names = [argument.name for argument in _POOL._schema.arguments]
    values["padding_idx"] = -1 if values.get("padding_idx") is None else values["padding_idx"]
    operator.target = _POOL
    operator.args, operator.kwargs = tuple(values[name] for name in names), {}
