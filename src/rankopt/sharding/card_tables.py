"""Read the tables of a card's model without a weight: the module is built on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from rankopt.content import find, list_content, read_yaml
from rankopt.errors import CardError, Problem
from rankopt.models.build import make_module
from rankopt.models.card import (
    IdsInput,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
    load_card,
)
from rankopt.sharding.tables import (
    ModelTables,
    Precision,
    Table,
    is_tables_file,
    optimizer_of,
    parse_tables_file,
)

TABLES_FOLDER = "benchmarks/tables"
SMALL_VALUES = 1 << 20
"""With `only_large`, tensors of fewer values are real."""


def read_model_tables(source: ModelCard | str | Path) -> ModelTables:
    """Read what a model card, or a file that lists tables, holds.

    Raises:
        CardError: neither, no tables, or a module that cannot be built without its weights.
    """
    if isinstance(source, ModelCard):
        return card_tables(source)
    file = _find(source)
    raw = read_yaml(file, CardError)
    if is_tables_file(raw):
        return parse_tables_file(raw, file)
    return card_tables(load_card(file))


def card_tables(card: ModelCard) -> ModelTables:
    """Build a card's module on meta and list its tables.

    Raises:
        CardError: the factory cannot be run so, or the module has no table.
    """
    module = _build_on_meta(card)
    found = list(_holders(module))
    if not found:
        what = f"{type(module).__name__} has no embedding table: nothing is to be sharded"
        hint = "Tables are nn.Embedding, nn.EmbeddingBag and torchrec's collections."
        raise CardError(problems=[Problem(card.where, what, hint=hint)])
    lookups = _Lookups(card)
    tables = tuple(holder.table(lookups) for holder in found)
    inside = {id(parameter) for holder in found for parameter in holder.parameters}
    dense = sum(p.numel() for p in module.parameters() if id(p) not in inside)
    halves = [holder for holder in found if holder.dtype in {torch.float16, torch.bfloat16}]
    precision: Precision = "fp16" if len(halves) == len(found) else "fp32"
    return ModelTables(
        name=card.name,
        source=card.where,
        tables=tables,
        dense_parameters=dense,
        precision=precision,
        optimizer=optimizer_of(card.train),
        notes=lookups.notes(),
    )


def _find(source: str | Path) -> Path:
    try:
        return find("models", source, error=CardError)
    except CardError as error:
        names = {path.stem: path for path in list_content(TABLES_FOLDER)}
        name = Path(source).stem if str(source).endswith((".yaml", ".yml")) else str(source)
        if name.rpartition("/")[2] in names:
            return names[name.rpartition("/")[2]]
        raise error


class _OnMeta(TorchFunctionMode):
    """Put every new tensor on meta, whatever device the code names; moves stay on meta too."""

    def __init__(self, *, only_large: bool) -> None:
        super().__init__()
        self._only_large = only_large
        self._makers = _device_constructors()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in self._makers and not (
            self._only_large and _num_values(args, given) < SMALL_VALUES
        ):
            return func(*args, **{**given, "device": "meta"})
        if func in _MOVES and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            dtype = given.get("dtype") or next(
                (a for a in args if isinstance(a, torch.dtype)), None
            )
            return args[0] if dtype is None else args[0].type(dtype)
        return func(*args, **given)


_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}


def _num_values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    size = kwargs.get("size", args)
    if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)):
        size = size[0]
    total = 1
    for length in size:
        if not isinstance(length, int):
            break
        total *= length
    return total


def _build_on_meta(card: ModelCard) -> nn.Module:
    try:
        with _OnMeta(only_large=False):
            return make_module(card)
    except CardError as error:
        if not isinstance(error.__cause__, (NotImplementedError, RuntimeError, TypeError)):
            raise
    # Code that reads a value while it builds needs the small tensors; the tables stay on meta.
    try:
        with _OnMeta(only_large=True):
            return make_module(card)
    except CardError as error:
        hint = (
            "The module is built on the meta device, without a weight. List its tables in a file "
            "instead: name, num_rows, dim, ids_per_row (docs/sharding.md)."
        )
        problem = Problem(
            f"{card.where}: factory", "cannot be built without its weights", hint=hint
        )
        raise CardError(problems=[*error.problems, problem]) from error


@dataclass(frozen=True)
class _Holder:
    """One table as the module holds it."""

    path: str
    name: str
    num_rows: int
    dim: int
    kind: str
    """`bag`, `rows`, or `pooled` and `sequence` of torchrec's collections."""
    features: tuple[str, ...]
    dtype: torch.dtype
    parameters: tuple[torch.Tensor, ...]
    key: str | None = None

    def table(self, lookups: _Lookups) -> Table:
        ids_per_row, weighted = lookups.of(self)
        pooled = self.kind in {"bag", "pooled"} or (self.kind == "rows" and ids_per_row == 1)
        shape = self.num_rows, self.dim
        return Table(self.name, self.path, *shape, ids_per_row, pooled, weighted, self.key)


def _holders(module: nn.Module) -> Iterator[_Holder]:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

    seen: set[int] = set()
    inside: list[str] = []
    names: set[str] = set()
    for path, child in module.named_modules(remove_duplicate=True):
        if any(not prefix or path.startswith(f"{prefix}.") for prefix in inside):
            continue
        if isinstance(child, (EmbeddingBagCollection, EmbeddingCollection)):
            inside.append(path)
            yield from _collection(path, child, names)
        elif isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and id(child.weight) not in seen:
            seen.add(id(child.weight))
            kind = "bag" if isinstance(child, nn.EmbeddingBag) else "rows"
            name = _unique(path or "table", names)
            rows, dim = child.weight.shape
            yield _Holder(path, name, rows, dim, kind, (name,), child.weight.dtype, (child.weight,))


def _collection(path: str, child: Any, names: set[str]) -> Iterator[_Holder]:
    is_bags = hasattr(child, "embedding_bag_configs")
    configs = child.embedding_bag_configs() if is_bags else child.embedding_configs()
    weights = child.embedding_bags if is_bags else child.embeddings
    for config in configs:
        weight = weights[config.name].weight
        yield _Holder(
            path=path,
            name=_unique(config.name, names, f"{path}.{config.name}"),
            num_rows=config.num_embeddings,
            dim=config.embedding_dim,
            kind="pooled" if is_bags else "sequence",
            features=tuple(config.feature_names),
            dtype=weight.dtype,
            parameters=(weight,),
            key=config.name,
        )


def _unique(name: str, names: set[str], otherwise: str | None = None) -> str:
    # torchrec keys its constraints by name, and a name with dots is not a table's there.
    chosen = name.replace(".", "_")
    if chosen in names and otherwise:
        chosen = otherwise.replace(".", "_")
    while chosen in names:
        chosen += "_"
    names.add(chosen)
    return chosen


class _Lookups:
    """How many ids a row brings to each table, as far as the card says it."""

    def __init__(self, card: ModelCard) -> None:
        self._features: dict[str, tuple[float, bool]] = {}
        self._lists: dict[int, list[tuple[float, bool]]] = {}
        self._singles: dict[int, int] = {}
        self._guessed: list[str] = []
        self._longest: list[str] = []
        for item in card.inputs:
            self._read(item)

    def _read(self, item: Any) -> None:
        if isinstance(item, KjtInput):
            for feature in item.features:
                self._features[feature.key] = (float(feature.max_length), item.weighted)
        elif isinstance(item, RaggedIdsInput):
            weighted = item.weights_column is not None
            self._lists.setdefault(item.num_ids, []).append((float(item.max_length), weighted))
        elif isinstance(item, IdsInput):
            for num_ids in item.ranges:
                self._singles[num_ids] = self._singles.get(num_ids, 0) + 1
        elif isinstance(item, PackedInput):
            for column in item.columns:
                if column.num_ids and column.length:
                    self._lists.setdefault(column.num_ids, []).append((float(column.length), False))

    def of(self, holder: _Holder) -> tuple[float, bool]:
        """Return the ids of a row and whether they carry weights."""
        if holder.kind in {"pooled", "sequence"}:
            known = [self._features[f] for f in holder.features if f in self._features]
            if any(length > 1 for length, _ in known):
                self._longest.append(holder.name)
            if not known:
                self._guessed.append(holder.name)
                return float(len(holder.features)), False
            return sum(length for length, _ in known), any(weighted for _, weighted in known)
        lists = self._lists.get(holder.num_rows, [])
        if not lists:
            return 1.0, False
        self._longest.append(holder.name)
        # A table of both a history and a candidate serves the one id more.
        single = 1.0 if holder.kind == "rows" and self._singles.get(holder.num_rows) else 0.0
        return sum(length for length, _ in lists) + single, any(w for _, w in lists)

    def notes(self) -> tuple[str, ...]:
        """Say what was assumed."""
        notes = []
        if self._longest:
            names = ", ".join(self._longest[:5]) + (" and others" if len(self._longest) > 5 else "")
            notes.append(
                f"lookups of {names}: the card's max_length, the most there can be; give the mean "
                "with --ids-per-row NAME=VALUE"
            )
        if self._guessed:
            notes.append(
                f"no input names the features of {', '.join(self._guessed[:5])}: one id a row"
            )
        return tuple(notes)
