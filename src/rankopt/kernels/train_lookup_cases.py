"""The grid on which the training lookups and their reference must agree.

Shapes: B bags, T tables, D columns of each, L ids of all bags, W = T * D.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rankopt.kernels.train_lookup import NO_OFFSETS, NO_WEIGHTS, OPTIMIZER_CODES, StepOptimizer

Form = Literal[
    "single",  # ids [B, T], columns of something wider
    "sum",  # lists, some of them empty
    "mean",
    "weighted",
    "empty",  # lists, all of them empty
    "padded",  # means with a padding id among the others
    "one_id",  # every bag names the same row
]
_ROWS_OF_TABLE = 23
_LEARNING_RATE, _EPS = 0.05, 1e-8


@dataclass(frozen=True)
class TrainLookupCase:
    """One lookup, or one step after `num_uses` lookups."""

    num_bags: int
    dim: int
    form: Form
    num_tables: int = 3
    optimizer: StepOptimizer = "adagrad"
    num_uses: int = 1
    nonfinite: bool = False

    def __str__(self) -> str:
        shape = f"{self.num_bags}x{self.num_tables}x{self.dim}"
        parts = (shape, self.form, self.optimizer, f"{self.num_uses}uses")
        return "-".join((*parts, "nonfinite" if self.nonfinite else "finite"))


_FORMS: tuple[Form, ...] = ("single", "sum", "mean", "weighted", "empty", "padded", "one_id")
_OPTIMIZERS: tuple[StepOptimizer, ...] = ("adagrad", "rowwise_adagrad", "sgd")


def _lookups() -> Iterator[TrainLookupCase]:
    for num_bags, dim, form in itertools.product((0, 1, 7, 200), (1, 3, 8, 33, 64), _FORMS):
        yield TrainLookupCase(num_bags, dim, form)
    yield TrainLookupCase(9, 16, "single", nonfinite=True)
    yield TrainLookupCase(9, 16, "mean", nonfinite=True)


def _steps() -> Iterator[TrainLookupCase]:
    for num_bags, dim, form, optimizer in itertools.product(
        (0, 1, 200), (1, 8, 33, 64), _FORMS, _OPTIMIZERS
    ):
        yield TrainLookupCase(num_bags, dim, form, optimizer=optimizer)
    for form, optimizer in itertools.product(_FORMS, _OPTIMIZERS):
        yield TrainLookupCase(31, 20, form, optimizer=optimizer, num_uses=3)
        yield TrainLookupCase(50, 16, form, optimizer=optimizer, num_tables=1)
        yield TrainLookupCase(5, 16, form, optimizer=optimizer, nonfinite=True)


TRAIN_LOOKUP_CASES: tuple[TrainLookupCase, ...] = tuple(_lookups())
TRAIN_STEP_CASES: tuple[TrainLookupCase, ...] = tuple(_steps())


class _Draw:
    def __init__(self, case: TrainLookupCase) -> None:
        self.case = case
        self.generator = torch.Generator().manual_seed(zlib.crc32(str(case).encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def tables(self) -> list[Tensor]:
        count = self.case.num_tables
        tables = [self.normal(_ROWS_OF_TABLE + index, self.case.dim) for index in range(count)]
        if self.case.nonfinite:
            for table in tables:
                table[0, 0], table[1] = torch.nan, torch.inf
        return tables

    def call(self) -> tuple[Tensor, Tensor, Tensor]:
        """Draw ids, offsets and weights."""
        case = self.case
        highest = 1 if case.form == "one_id" else _ROWS_OF_TABLE
        if case.form in ("single", "one_id"):
            shape = (case.num_bags, case.num_tables + 2)
            ids = torch.randint(0, highest, shape, generator=self.generator)
            return ids[:, 1:-1], NO_OFFSETS, NO_WEIGHTS
        longest = 0 if case.form == "empty" else 5
        count = case.num_bags * case.num_tables
        lengths = torch.randint(0, longest + 1, (count,), generator=self.generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(0, highest, (int(offsets[-1]),), generator=self.generator)
        weights = self.normal(len(ids)) if case.form == "weighted" else NO_WEIGHTS
        return ids, offsets, weights

    @property
    def options(self) -> tuple[bool, int]:
        return self.case.form in ("mean", "padded"), 2 if self.case.form == "padded" else -1


def train_lookup_arguments(case: TrainLookupCase) -> tuple[Any, ...]:
    """Draw the arguments of `table_lookup`."""
    draw = _Draw(case)
    return draw.tables(), *draw.call(), *draw.options


def train_lookup_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Allow the rounding of a bag's sum."""
    return 4e-6 * (1 + expected.abs().nan_to_num(posinf=0.0))


def train_step_arguments(case: TrainLookupCase) -> tuple[Any, ...]:
    """Draw the arguments of `table_step`."""
    draw = _Draw(case)
    tables = draw.tables()
    shapes = [t.shape[:1] if case.optimizer == "rowwise_adagrad" else t.shape for t in tables]
    # Sums of squares as a run in progress has them: from nothing, a sum of gradients that cancel
    # would be divided by its own rounding.
    states = [0.25 + torch.rand(shape, generator=draw.generator) for shape in shapes]
    calls = [draw.call() for _ in range(case.num_uses)]
    width = case.num_tables * case.dim
    grads = [draw.normal(case.num_bags, width + 3)[:, 1:-2] for _ in calls]
    if case.nonfinite and case.num_bags:
        grads[0][0] = torch.nan
    ids, offsets, weights = (list(part) for part in zip(*calls, strict=True))
    return (
        tables, [] if case.optimizer == "sgd" else states, ids, offsets, weights, grads,
        *draw.options, OPTIMIZER_CODES[case.optimizer], _LEARNING_RATE, _EPS,
    )  # fmt: skip


def train_step_allowance(arguments: tuple[Any, ...], expected: Tensor) -> Tensor:
    """Allow the rounding of sums of up to some hundred contributions to a row."""
    return 2e-5 * (1 + expected.abs().nan_to_num(posinf=0.0))
