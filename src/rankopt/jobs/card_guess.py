"""Guess inputs that nothing declares, by trying: which kinds run, and up to which ids.

Shapes: B rows, W columns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rankopt.capture.call import NUM_ROWS, ModuleCall, largest_fit
from rankopt.capture.columns import Column, columns_of, made_up_rows
from rankopt.jobs.card_batch import Leaf, is_jagged
from rankopt.jobs.card_draft import Entry, draft_card
from rankopt.jobs.card_look import DEFAULT_LENGTH, table_sizes
from rankopt.models.inputs import MAX_FLOAT_ID

_MOST_TRIES = 3000
_LIST_WORD = re.compile(r"hist|seq|list|past|recent|items$|genres", re.IGNORECASE)
_NUMBER_WORD = re.compile(r"dense|float|numer|contin|price|real", re.IGNORECASE)
_ID_WORD = re.compile(r"sparse|ids?$|categ|cat$|index", re.IGNORECASE)
_LENGTHS = (5, 10, 20, 30, 100, 200)
_LONGEST = 512
_RAGGED = {"_lengths": "values_lengths", "_offsets": "values_offsets"}


def guessed_inputs(
    module: nn.Module, leaves: Sequence[Leaf], call: str, known: Sequence[Entry] = ()
) -> list[Entry] | None:
    """Find inputs with which a module runs.

    Args:
        module: in eval mode.
        leaves: the tensors that `forward` takes.
        call: the card's `call`.
        known: inputs that are known already, in place of the leaves of their arguments.

    Returns:
        One entry per leaf; None when nothing that was tried runs.
    """
    taken = {entry.get("argument", entry["name"]): entry for entry in known}
    choices = [
        [taken[leaf.path]] if leaf.path in taken else list(_candidates(module, leaf, leaves))
        for leaf in leaves
    ]
    choices = [options for options in choices if options]
    for chosen in itertools.islice(itertools.product(*choices), _MOST_TRIES):
        if inputs_run(module, chosen, call):
            for entry in chosen:
                path = entry.get("argument", entry["name"])
                # What has neither a declaration nor a tensor behind it just happens to run.
                if path not in taken and all(leaf.value is None for leaf in leaves):
                    entry.doubt("its kind; nothing declares it, but the module runs so")
            return list(chosen)
    return None


def inputs_run(module: nn.Module, inputs: Sequence[Entry], call: str) -> bool:
    """Tell whether a module runs with inputs as drafted."""
    try:
        card = draft_card({"name": "draft", "factory": "x:y", "call": call, "inputs": inputs})
        ModuleCall(card, module).raw(made_up_rows(card, NUM_ROWS, 1))
    except Exception:  # the card or the module refuses it: not this one
        return False
    return True


def list_lengths(module: nn.Module) -> list[int]:
    """Return lengths to try for padded lists: a usual one, then the longest that can be meant.

    A module with a table of positions takes lists up to its length, often with the candidate as
    one more place; so the longest that runs is the one it was built for.
    """
    sizes = {size for tensor in module.parameters() for size in tensor.shape}
    near = {size - less for size in sizes for less in (0, 1) if 2 <= size - less <= _LONGEST}
    return [DEFAULT_LENGTH, *sorted({*_LENGTHS, *near}, reverse=True)]


def _candidates(module: nn.Module, leaf: Leaf, leaves: Sequence[Leaf]) -> Iterator[Entry]:
    """Yield what a leaf may be, the likeliest first; nothing for a part of another leaf."""
    paths = {other.path for other in leaves}
    stem, values, _ = leaf.path.rpartition("_values")
    ending = next((end for end in _RAGGED if f"{stem}{end}" in paths), None) if values else None
    if ending is not None:
        yield _ragged(leaf, stem, _RAGGED[ending], f"{stem}_weights" in paths)
        return
    for end in (*_RAGGED, "_weights"):
        if leaf.path.endswith(end) and f"{leaf.path.removesuffix(end)}_values" in paths:
            return
    if leaf.value is not None:
        yield from _of_value(leaf)
        return
    yield from _of_name(module, leaf)


def _entry(leaf: Leaf, **fields: Any) -> Entry:
    entry = Entry(name=leaf.name, **fields)
    if leaf.name != leaf.path:
        entry["argument"] = leaf.path
    return entry


def _ragged(leaf: Leaf, stem: str, layout: str, weighted: bool) -> Entry:
    named = Leaf(stem, leaf.value)
    entry = _entry(named, kind="ragged_ids", column=named.name, max_length=DEFAULT_LENGTH)
    if layout != "values_lengths":
        entry["layout"] = layout
    if weighted:
        entry["weights_column"] = f"{named.name}_weights"
    if isinstance(leaf.value, Tensor) and leaf.value.dtype != torch.int64:
        entry["dtype"] = str(leaf.value.dtype).removeprefix("torch.")
    return entry.doubt("max_length")


def _of_value(leaf: Leaf) -> Iterator[Entry]:
    """Yield what a tensor of a batch may be."""
    value = leaf.value
    if is_jagged(value):
        yield _of_jagged(leaf)
        return
    width = value.shape[1] if value.dim() == 2 else 0
    if value.dim() not in (1, 2):
        return
    if value.is_floating_point():
        if width:
            places = [Entry(name=_numbered(leaf.name, i, width)) for i in range(width)]
            yield _entry(leaf, kind="packed", columns=places)
        else:
            yield _entry(leaf, kind="ids", dtype="float32")
            yield _entry(leaf, kind="dense", columns=[leaf.name])
        return
    dtype = {} if value.dtype == torch.int64 else {"dtype": "int32"}
    if width == 1:
        yield _entry(leaf, kind="ids", keep_width=True, **dtype)
    elif width:
        columns = [_numbered(leaf.name, i, width) for i in range(width)]
        yield _entry(leaf, kind="ids", columns=columns, **dtype)
    else:
        yield _entry(leaf, kind="ids", **dtype)


def _of_jagged(leaf: Leaf) -> Entry:
    keys = leaf.value.keys()
    longest = leaf.value.lengths().view(len(keys), -1).max(1).values.tolist()
    features = []
    for key, length in zip(keys, longest, strict=True):
        feature = Entry(key=key, column=key)
        if length > 1:
            feature["max_length"] = int(length)
            feature.doubt("max_length; the batch's longest is taken")
        if leaf.value.weights_or_none() is not None:
            feature["weights_column"] = f"{key}_weight"
        features.append(feature)
    return _entry(leaf, kind="kjt", features=features)


def _numbered(name: str, index: int, width: int) -> str:
    return name if width == 1 else f"{name}_{index}"


def _of_name(module: nn.Module, leaf: Leaf) -> Iterator[Entry]:
    """Yield what a parameter may be, by its name and the module's shapes."""
    tables = list(table_sizes(module))
    words = set(re.split(r"[\W_]+", leaf.path.lower())) - {"id", "ids", "x"}
    is_table = any(words & set(re.split(r"[\W_]+", name.lower())) for name, _, _ in tables)
    ids, lists, numbers = (
        list(_id_candidates(leaf, len(tables))),
        list(_list_candidates(module, leaf)),
        list(_dense_candidates(module, leaf, tables)),
    )
    if _NUMBER_WORD.search(leaf.path):
        yield from numbers
    elif _LIST_WORD.search(leaf.path):
        yield from (*lists, *ids)
    elif is_table or _ID_WORD.search(leaf.path):
        yield from (*ids, *lists)
    else:
        yield from (*ids, *lists, *numbers)


def _id_candidates(leaf: Leaf, num_tables: int) -> Iterator[Entry]:
    yield _entry(leaf, kind="ids")
    yield _entry(leaf, kind="ids", keep_width=True)
    for width in range(2, num_tables + 1):
        columns = [_numbered(leaf.name, i, width) for i in range(width)]
        yield _entry(leaf, kind="ids", columns=columns).doubt("the names and number of columns")


def _list_candidates(module: nn.Module, leaf: Leaf) -> Iterator[Entry]:
    for length in list_lengths(module):
        entry = _entry(
            leaf, kind="ragged_ids", column=leaf.name, max_length=length, layout="padded"
        )
        yield entry.doubt("max_length").doubt("pad_side, on which the padding stands")


def _dense_candidates(
    module: nn.Module, leaf: Leaf, tables: Sequence[tuple[str, int, int]]
) -> Iterator[Entry]:
    """Try the widths that linear layers take, alone or beside some embeddings."""
    widths: dict[int, None] = {}
    taken = {0, *itertools.accumulate(width for _, _, width in tables)}
    for part in module.modules():
        width = getattr(part, "in_features", None)
        if isinstance(width, int):
            widths |= dict.fromkeys(width - used for used in sorted(taken) if width > used)
    for width in (1, *widths):
        columns = [_numbered(leaf.name, i, width) for i in range(width)]
        yield _entry(leaf, kind="dense", columns=columns).doubt("the columns' names")


def size_ids(module: nn.Module, fields: Entry) -> None:
    """Fill in every missing `num_ids` by finding the largest id that the module takes."""
    card = draft_card(fields)
    call = ModuleCall(card, module)
    rows = made_up_rows(card, NUM_ROWS, 1)
    # No id can be larger than the longest parameter; one that is was hashed or never read.
    sizes = [len(t) for t in (*module.parameters(), *module.buffers()) if t.dim()]
    largest = max(sizes, default=1)
    for index, entry in enumerate(fields["inputs"]):
        if not _is_open(entry):
            continue
        as_floats = entry["kind"] == "packed" or entry.get("dtype") == "float32"
        limit = min(largest, MAX_FLOAT_ID) if as_floats else largest
        own = [c for c in columns_of(card) if c.where.startswith(f"inputs[{index}]")]
        _SIZERS[entry["kind"]](entry, [_num_ids(call, rows, column, limit) for column in own])


def _is_open(entry: Entry) -> bool:
    if entry["kind"] == "kjt":
        return any("num_ids" not in feature for feature in entry["features"])
    if entry["kind"] == "packed":  # a layout that was read from the module tells its ids too
        return not any("num_ids" in c or "length_of" in c for c in entry["columns"])
    return entry["kind"] in ("ids", "ragged_ids") and "num_ids" not in entry


def _num_ids(call: ModuleCall, rows: dict[str, Tensor], column: Column, limit: int) -> int | None:
    try:
        call.raw(column.fill(rows, limit))
    except Exception:  # too large, as it should be
        return largest_fit(call, rows, column, limit) + 1
    return None


def _size_list(entry: Entry, found: list[int | None]) -> None:
    if "num_ids" in entry:
        return
    if found[0] is None:
        entry.doubt("num_ids; no id is refused")
    else:
        entry["num_ids"] = found[0]


def _size_columns(entry: Entry, found: list[int | None]) -> None:
    if None in found:
        entry.doubt("num_ids; not every column refuses an id that is too large")
        return
    entry["num_ids"] = found[0] if len(set(found)) == 1 else found
    if len(found) > 2 and len(set(found)) == 1:
        # One table for all of them is what a list looks like.
        names = entry.pop("columns")
        entry.update(kind="ragged_ids", column=entry["name"])
        entry.update(max_length=len(names), layout="padded")
        entry.doubt(f"whether these are a padded list or {len(names)} columns of kind ids")
        entry.doubt("pad_side")


def _size_features(entry: Entry, found: list[int | None]) -> None:
    for feature, num_ids in zip(entry["features"], found, strict=True):
        _size_list(feature, [num_ids])


def _size_packed(entry: Entry, found: list[int | None]) -> None:
    columns = entry["columns"]
    for column, num_ids in zip(columns, found, strict=True):
        if num_ids is not None:
            column["num_ids"] = num_ids
    if all(num_ids is None for num_ids in found):
        names = [column["name"] for column in columns]
        entry.update(kind="dense", columns=names)
    entry.doubt("the columns' names")


def _leave(entry: Entry, found: list[int | None]) -> None:
    """Real numbers have no ids."""


_SIZERS = {
    "dense": _leave,
    "ids": _size_columns,
    "ragged_ids": _size_list,
    "kjt": _size_features,
    "packed": _size_packed,
}
