"""What a module shows of its inputs without being called: features it was built from, tables.

Libraries are known by the attributes their models carry, never by importing them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from rankopt.capture.preflight import is_layout
from rankopt.jobs.card_draft import Entry

DEFAULT_LENGTH = 50
"""For lists whose length nothing tells."""
_KJT_NAME = re.compile(r"sparse|kjt|jagged|id_?list", re.IGNORECASE)


def parameters_of(module: nn.Module) -> list[inspect.Parameter]:
    """List the parameters of `forward` that a card can fill."""
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter for parameter in parameters if parameter.kind in named]


def required_parameters(module: nn.Module) -> list[str]:
    """Name the parameters of `forward` without a default."""
    return [p.name for p in parameters_of(module) if p.default is p.empty]


def feature_objects(module: nn.Module) -> dict[str, Any]:
    """Find the feature descriptions that a module was built from, by name.

    They are objects with a `name` and a size, held in lists by the module or a part of it.
    """
    found: dict[str, Any] = {}
    for part in module.modules():
        for value in vars(part).values():
            if not isinstance(value, list | tuple):
                continue
            for item in value:
                name = getattr(item, "name", None)
                sized = any(hasattr(item, key) for key in ("vocabulary_size", "vocab_size"))
                numeric = any(hasattr(item, key) for key in ("dimension", "embed_dim"))
                if isinstance(name, str) and (sized or numeric):
                    found.setdefault(name, item)
    return found


def packed_input(module: nn.Module) -> Entry | None:
    """Read the layout of a packed matrix from a module that declares one.

    DeepCTR-Torch's models hold `feature_index`, {name: (first place, one past the last)}.
    """
    declared = getattr(module, "feature_index", None)
    names = required_parameters(module)
    if not is_layout(declared) or not declared or len(names) != 1:
        return None
    objects = feature_objects(module)
    lists: dict[str, str] = {}
    for name, item in objects.items():
        length_name = getattr(item, "length_name", None)
        if length_name:
            lists.setdefault(length_name, name)
    columns: list[Entry] = []
    for name, (start, stop) in sorted(declared.items(), key=lambda pair: pair[1][0]):
        columns += _packed_columns(module, name, stop - start, objects.get(name), lists)
    return Entry(name="features", kind="packed", argument=names[0], columns=columns)


def _packed_columns(
    module: nn.Module, name: str, width: int, item: Any, lists: Mapping[str, str]
) -> list[Entry]:
    if name in lists:
        return [Entry(length_of=lists[name])]
    num_ids = getattr(item, "vocabulary_size", None) or _rows_of_table(module, name)
    if num_ids is not None and (hasattr(item, "maxlen") or width > 1):
        return [Entry(name=name, num_ids=num_ids, length=width)]
    if num_ids is not None:
        return [Entry(name=name, num_ids=num_ids)]
    if width == 1:
        return [Entry(name=name)]
    first, *rest = [Entry(name=f"{name}_{place}") for place in range(width)]
    return [first.doubt(f"the columns of the {width} numbers of {name!r}"), *rest]


def _rows_of_table(module: nn.Module, name: str) -> int | None:
    table = getattr(module, "embedding_dict", {})
    if isinstance(table, nn.ModuleDict) and name in table:
        return int(getattr(table[name], "num_embeddings", 0)) or None
    return None


def keyed_inputs(module: nn.Module) -> list[Entry] | None:
    """Read the inputs of a module that takes {feature name: tensor}.

    Torch-RecHub's models hold lists of features, each with a `name`, and for ids a `vocab_size`.
    """
    objects = feature_objects(module)
    if len(required_parameters(module)) != 1:
        return None
    if not any(hasattr(item, "vocab_size") for item in objects.values()):
        return None
    return [_keyed_input(name, item) for name, item in objects.items()]


def _keyed_input(name: str, item: Any) -> Entry:
    legal = re.sub(r"\W", "_", name)
    renamed = {} if legal == name else {"argument": name}
    num_ids = getattr(item, "vocab_size", None)
    if num_ids is None:
        width = int(getattr(item, "embed_dim", 1))
        columns = [name] if width == 1 else [f"{name}_{place}" for place in range(width)]
        entry = Entry(name=legal, kind="dense", columns=columns, **renamed)
        return entry if width == 1 else entry.doubt(f"the columns of its {width} numbers")
    if not hasattr(item, "pooling"):
        given = {"columns": [name]} if renamed else {}
        return Entry(name=legal, kind="ids", num_ids=num_ids, **renamed, **given)
    entry = Entry(
        name=legal,
        kind="ragged_ids",
        column=name,
        num_ids=num_ids,
        max_length=DEFAULT_LENGTH,
        layout="padded",
        **renamed,
    )
    if getattr(item, "padding_idx", None):
        entry["padding_id"] = item.padding_idx
    return entry.doubt("max_length").doubt("pad_side, on which the padding stands")


def kjt_input(module: nn.Module) -> Entry | None:
    """Read the KeyedJaggedTensor that a module's embedding collections take."""
    features: dict[str, Entry] = {}
    weighted = False
    for part in module.modules():
        configs = getattr(part, "embedding_bag_configs", None) or getattr(
            part, "embedding_configs", None
        )
        if not callable(configs):
            continue
        is_weighted = getattr(part, "is_weighted", None)
        weighted |= bool(is_weighted()) if callable(is_weighted) else False
        for config in configs():
            for key in config.feature_names:
                features[key] = Entry(key=key, column=key, num_ids=config.num_embeddings)
    argument = _kjt_parameter(module)
    if not features or argument is None:
        return None
    entry = Entry(name="sparse", kind="kjt", argument=argument, features=list(features.values()))
    if weighted:
        for key, feature in features.items():
            feature["weights_column"] = f"{key}_weight"
        entry.doubt("the columns of the weights")
    return entry.doubt("max_length of each feature, 1 when left out")


def _kjt_parameter(module: nn.Module) -> str | None:
    parameters = parameters_of(module)
    annotated = [p.name for p in parameters if "KeyedJaggedTensor" in str(p.annotation)]
    named = [p.name for p in parameters if _KJT_NAME.search(p.name)]
    required = required_parameters(module)
    candidates = annotated or named or (required if len(required) == 1 else [])
    return candidates[0] if len(candidates) == 1 else None


def table_sizes(module: nn.Module) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and width of every embedding table."""
    for name, part in module.named_modules():
        rows = getattr(part, "num_embeddings", None)
        width = getattr(part, "embedding_dim", None)
        if isinstance(rows, int) and isinstance(width, int):
            yield name, rows, width
