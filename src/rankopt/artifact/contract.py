"""The input contract of an artifact: what a call must bring, and how a broken call is explained.

Every call is checked by one C++ pass over the inputs (`kernels/csrc/contract.cpp`, about a
microsecond). Only when that says no does the code here look again, slowly, to say what is wrong.

Shapes: B rows, L ids of all rows together, F features of a KeyedJaggedTensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from rankopt.errors import Problem, nearest
from rankopt.models.card import (
    DenseInput,
    IdsInput,
    Input,
    KjtInput,
    ModelCard,
    PackedInput,
    RaggedIdsInput,
)
from rankopt.models.id_ranges import LARGEST_FLOAT
from rankopt.models.inputs import IdType, OutOfRange, PadSide

Role = Literal["dense", "ids", "values", "lengths", "weights", "packed"]
_ROLES: tuple[Role, ...] = ("dense", "ids", "values", "lengths", "weights", "packed")
_SCALAR_TYPES = {"float32": 6, "int64": 4, "int32": 3}
"""c10::ScalarType as integers."""
_POLICIES: tuple[OutOfRange, ...] = ("error", "clamp", "hash")
_TORCH = {"float32": torch.float32, "int64": torch.int64, "int32": torch.int32}


class PackedList(BaseModel):
    """A list inside a packed matrix: which columns hold it, how it is padded, where its length is.

    Attributes:
        start, stop: its columns.
        length_column: the column that holds its length; None where none does.
        at_least: the least length that column may hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    start: int
    stop: int
    padding_id: int = 0
    pad_side: PadSide = "end"
    length_column: int | None = None
    at_least: int = 0


class InputContract(BaseModel):
    """One flat tensor of an artifact's input.

    Attributes:
        width: columns of a [B, width] tensor; 0 for a flat one.
        groups: features that lie behind each other in a flat one (a KJT's F).
        upper: one past the largest id, per column or per group; 0 for a real number of a packed
            matrix.
        out_of_range: what becomes of ids that do not lie below `upper`, for each; empty where all
            of them are errors.
        columns: what stands in each column of a packed matrix.
        lists: the lists in a packed matrix.
        longest: longest list of a row, per group; for `lengths` alone.
        partner: the tensor it is checked with: lengths for values, values for weights.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    role: Role
    dtype: Literal["float32", "int64", "int32"]
    width: int = 0
    groups: int = 1
    upper: tuple[int, ...] = ()
    out_of_range: tuple[OutOfRange, ...] = ()
    longest: tuple[int, ...] = ()
    partner: str | None = None
    columns: tuple[str, ...] = ()
    lists: tuple[PackedList, ...] = ()
    request_level: bool = False

    @property
    def shape(self) -> tuple[str | int, ...]:
        """The shape in words, for people."""
        if self.role in ("values", "weights"):
            return ("L",)
        rows = "B" if self.groups == 1 else f"{self.groups} * B"
        return (rows, self.width) if self.width else (rows,)


def contract_of(card: ModelCard) -> tuple[InputContract, ...]:
    """Derive the contract from a card, in the order of `card.tensor_names`."""
    return tuple(entry for item in card.inputs for entry in _entries(item))


def _entries(item: Input) -> list[InputContract]:
    level = item.request_level
    if isinstance(item, DenseInput):
        width = len(item.columns)
        return [
            InputContract(
                name=item.name, role="dense", dtype="float32", width=width, request_level=level
            )
        ]
    if isinstance(item, IdsInput):
        flat = len(item.columns) == 1 and not item.keep_width
        return [
            InputContract(
                name=item.name,
                role="ids",
                dtype=item.dtype,
                width=0 if flat else len(item.columns),
                upper=item.ranges,
                out_of_range=_unless_errors([item.out_of_range] * len(item.ranges)),
                request_level=level,
            )
        ]
    if isinstance(item, PackedInput):
        return [_packed_entry(item)]
    return _ragged_entries(item)


def _packed_entry(item: PackedInput) -> InputContract:
    upper: list[int] = []
    policies: list[OutOfRange] = []
    names: list[str] = []
    for column in item.columns:
        policies += [column.out_of_range] * column.width
        if column.length_of is not None:
            upper.append((item.list_of(column).length or 0) + 1)
            names.append(f"length of {column.length_of}")
            continue
        name = str(column.name)
        upper += [column.num_ids or 0] * column.width
        names += [name] if column.length is None else [f"{name}[{i}]" for i in range(column.width)]
    return InputContract(
        name=item.name,
        role="packed",
        dtype="float32",
        width=item.num_places,
        upper=tuple(upper),
        out_of_range=_unless_errors(policies),
        columns=tuple(names),
        lists=_packed_lists(item),
        request_level=item.request_level,
    )


def _unless_errors(policies: Sequence[OutOfRange]) -> tuple[OutOfRange, ...]:
    return () if all(policy == "error" for policy in policies) else tuple(policies)


def _packed_lists(item: PackedInput) -> tuple[PackedList, ...]:
    placed = list(zip(item.columns, item.starts(), strict=True))
    holders = {str(column.length_of): (at, column) for column, at in placed if column.length_of}
    lists = []
    for column, start in placed:
        if column.length is None:
            continue
        at, holder = holders.get(str(column.name), (None, None))
        lists.append(
            PackedList(
                start=start,
                stop=start + column.length,
                padding_id=column.padding_id,
                pad_side=column.pad_side,
                length_column=at,
                at_least=holder.at_least if holder else 0,
            )
        )
    return tuple(lists)


def _ragged_entries(item: RaggedIdsInput | KjtInput) -> list[InputContract]:
    if isinstance(item, KjtInput):
        upper = tuple(feature.num_ids for feature in item.features)
        longest = tuple(feature.max_length for feature in item.features)
        policies = [feature.out_of_range for feature in item.features]
        dtype: IdType = "int64"
    else:
        upper, longest, dtype = (item.num_ids,), (item.max_length,), item.dtype
        policies = [item.out_of_range]
    values, lengths, *weights = item.tensor_names
    level = item.request_level
    entries = [
        InputContract(
            name=values,
            role="values",
            dtype=dtype,
            groups=len(upper),
            upper=upper,
            out_of_range=_unless_errors(policies),
            partner=lengths,
            request_level=level,
        ),
        InputContract(
            name=lengths,
            role="lengths",
            dtype="int64",
            groups=len(upper),
            longest=longest,
            request_level=level,
        ),
    ]
    entries += [
        InputContract(
            name=name, role="weights", dtype="float32", partner=values, request_level=level
        )
        for name in weights
    ]
    return entries


def encode_contract(contract: Sequence[InputContract]) -> Tensor:
    """Write the contract as the int64 vector that the C++ check reads."""
    names = [entry.name for entry in contract]
    fields: list[int] = []
    for entry in contract:
        fields += [
            _ROLES.index(entry.role),
            _SCALAR_TYPES[entry.dtype],
            entry.width,
            names.index(entry.partner) if entry.partner else -1,
            entry.groups,
            len(entry.upper),
            *entry.upper,
            len(entry.longest),
            *entry.longest,
            len(entry.out_of_range),
            *(_POLICIES.index(policy) for policy in entry.out_of_range),
        ]
    return torch.tensor(fields, dtype=torch.int64)


def explain(
    contract: Sequence[InputContract],
    features: Mapping[str, Tensor],
    max_batch: int,
    min_batch: int = 1,
) -> list[Problem]:
    """List everything in which a call breaks the contract; empty when it keeps it."""
    problems = _names(contract, features)
    if problems:
        return problems
    batch = None
    for entry in contract:
        value = features[entry.name]
        problems += _form(entry, value)
        if problems or entry.role in ("values", "weights"):
            continue
        rows = value.shape[0] // entry.groups
        batch = rows if batch is None else batch
        if rows != batch:
            problems.append(
                Problem(
                    f"input {entry.name}",
                    f"must have {batch} rows as the first input has",
                    rows,
                )
            )
    if not problems and batch is not None and not min_batch <= batch <= max_batch:
        problems.append(Problem("inputs", f"must have {min_batch} to {max_batch} rows", batch))
    if not problems:
        for entry in contract:
            problems += _values(entry, contract, features)
    return problems


def _names(contract: Sequence[InputContract], features: Mapping[str, Tensor]) -> list[Problem]:
    known = [entry.name for entry in contract]
    return [
        Problem(f"input {name}", "is missing", hint=nearest(name, features) if features else None)
        for name in known
        if name not in features
    ]


def _form(entry: InputContract, value: object) -> list[Problem]:
    where = f"input {entry.name}"
    if not isinstance(value, Tensor):
        return [Problem(where, "must be a torch.Tensor", type(value).__name__)]
    problems = []
    if value.dtype != _TORCH[entry.dtype]:
        got = str(value.dtype).removeprefix("torch.")
        problems.append(Problem(where, f"must be {entry.dtype}", got))
    flat = entry.width == 0
    wrong_width = not flat and value.dim() == 2 and value.shape[1] != entry.width
    if value.dim() != (1 if flat else 2) or wrong_width:
        shape = "[" + ", ".join(map(str, entry.shape)) + "]"
        problems.append(Problem(where, f"must have shape {shape}", list(value.shape)))
    elif entry.role not in ("values", "weights") and value.shape[0] % entry.groups:
        problems.append(
            Problem(where, f"must hold a multiple of {entry.groups} lengths", value.shape[0])
        )
    if not value.is_contiguous():
        problems.append(Problem(where, "must be contiguous", hint="Call .contiguous() on it."))
    if value.device.type != "cpu":
        problems.append(Problem(where, "must be on the CPU", str(value.device)))
    return problems


def _values(
    entry: InputContract, contract: Sequence[InputContract], features: Mapping[str, Tensor]
) -> list[Problem]:
    value = features[entry.name]
    where = f"input {entry.name}"
    if entry.role == "ids":
        upper, mapped = torch.tensor(entry.upper), _mapped(entry)
        if not entry.width:
            upper, mapped = upper[0], mapped[0]
        return _out_of_range(where, value, upper, mapped)
    if entry.role == "packed":
        return _packed_out_of_range(entry, value)
    if entry.role == "lengths":
        longest = torch.tensor(entry.longest).repeat_interleave(value.shape[0] // entry.groups)
        bad = ((value < 0) | (value > longest)).nonzero()
        if len(bad):
            at = int(bad[0])
            limit = int(longest[at])
            return [Problem(f"{where}[{at}]", f"must lie in [0, {limit}]", int(value[at]))]
    if entry.role == "weights" and entry.partner:
        expected = features[entry.partner].shape[0]
        if value.shape[0] != expected:
            return [Problem(where, f"must have one weight per id ({expected})", value.shape[0])]
    if entry.role == "values" and entry.partner:
        lengths = features[entry.partner]
        total = int(lengths.sum())
        if total != value.shape[0]:
            return [
                Problem(
                    where,
                    f"must hold as many ids as {entry.partner} adds up to ({total})",
                    value.shape[0],
                )
            ]
        if int(lengths.min()) < 0:
            return []
        per_group = lengths.view(entry.groups, -1).sum(1)
        upper = torch.tensor(entry.upper).repeat_interleave(per_group)
        return _out_of_range(where, value, upper, _mapped(entry).repeat_interleave(per_group))
    return []


def _mapped(entry: InputContract) -> Tensor:
    """Tell for each column or group whether ids out of range are mapped into it."""
    policies = entry.out_of_range or ("error",) * len(entry.upper)
    return torch.tensor([policy != "error" for policy in policies])


def _out_of_range(where: str, ids: Tensor, upper: Tensor, mapped: Tensor) -> list[Problem]:
    bad = _not_ids(ids, upper, mapped).nonzero()
    if not len(bad):
        return []
    at = tuple(int(index) for index in bad[0])
    limit = int(upper.expand_as(ids)[at])
    place = ", ".join(map(str, at))
    return [
        Problem(
            f"{where}[{place}]",
            f"must be an id in [0, {limit - 1}]",
            ids[at].item(),
            f"{len(bad)} ids are out of range.",
        )
    ]


def _packed_out_of_range(entry: InputContract, value: Tensor) -> list[Problem]:
    upper = torch.tensor(entry.upper)
    bad = (_not_ids(value, upper, _mapped(entry)) & (upper > 0)).nonzero()
    if not len(bad):
        return []
    row, column = (int(index) for index in bad[0])
    return [
        Problem(
            f"input {entry.name}[{row}, {column}] ({entry.columns[column]})",
            f"must be a whole number in [0, {entry.upper[column] - 1}]",
            float(value[row, column]),
            f"{len(bad)} values are out of range.",
        )
    ]


def _not_ids(values: Tensor, upper: Tensor, mapped: Tensor) -> Tensor:
    inside = (values >= 0) & (values < upper)
    if not values.is_floating_point():
        return ~(inside | mapped)
    whole = values == values.trunc()
    return ~(whole & (inside | (mapped & (values.abs() < LARGEST_FLOAT))))


def random_features(
    contract: Sequence[InputContract], batch: int, generator: torch.Generator, *, fill: float = 0.5
) -> dict[str, Tensor]:
    """Make inputs that keep the contract, without any real row.

    Args:
        contract: of the artifact.
        batch: B.
        generator: decides everything.
        fill: mean length of lists as a share of the longest; 0 makes every list empty.
    """
    features: dict[str, Tensor] = {}
    for entry in contract:
        if entry.role == "lengths":
            draw = torch.rand(entry.groups, batch, generator=generator) * 2 * fill
            longest = torch.tensor(entry.longest)[:, None]
            features[entry.name] = (draw * (longest + 1)).long().clamp(max=longest).flatten()
    for entry in contract:
        if entry.role == "dense":
            features[entry.name] = torch.randn(batch, entry.width, generator=generator)
        elif entry.role == "ids":
            upper = torch.tensor(entry.upper if entry.width else entry.upper[:1])
            shape = (batch, entry.width) if entry.width else (batch,)
            draw = torch.rand(shape, generator=generator, dtype=torch.float64)
            features[entry.name] = (draw * upper).long().to(_TORCH[entry.dtype])
        elif entry.role == "packed":
            features[entry.name] = _random_matrix(entry, batch, generator, fill)
        elif entry.role == "values" and entry.partner:
            per_group = features[entry.partner].view(entry.groups, -1).sum(1)
            upper = torch.tensor(entry.upper).repeat_interleave(per_group)
            draw = torch.rand(len(upper), generator=generator, dtype=torch.float64)
            features[entry.name] = (draw * upper).long().to(_TORCH[entry.dtype])
    for entry in contract:
        if entry.role == "weights" and entry.partner:
            count = len(features[entry.partner])
            features[entry.name] = torch.rand(count, generator=generator)
    return features


def _random_matrix(
    entry: InputContract, batch: int, generator: torch.Generator, fill: float
) -> Tensor:
    upper = torch.tensor(entry.upper)
    draw = torch.rand((batch, entry.width), generator=generator, dtype=torch.float64)
    reals = torch.randn((batch, entry.width), generator=generator)
    matrix = torch.where(upper > 0, (draw * upper).floor().float(), reals)
    for item in entry.lists:
        longest = item.stop - item.start
        share = torch.rand(batch, generator=generator) * 2 * fill
        lengths = (share * (longest + 1)).long().clamp(max=longest)
        place = torch.arange(longest)[None, :]
        if item.pad_side == "start":
            place = place.flip(1)
        span = matrix[:, item.start : item.stop]
        span[place >= lengths[:, None]] = float(item.padding_id)
        if item.length_column is not None:
            matrix[:, item.length_column] = lengths.clamp(min=item.at_least).float()
    return matrix
