"""The training lookups beyond their parity grid: bits, threads, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from rankopt.kernels import ops
from rankopt.kernels.registry import KERNELS
from rankopt.kernels.train_lookup import table_lookup
from rankopt.kernels.train_lookup_cases import (
    TRAIN_STEP_CASES,
    TrainLookupCase,
    train_step_arguments,
)

SOME_STEPS = [
    TrainLookupCase(500, 40, form, optimizer=optimizer, num_tables=num_tables)
    for form in ("single", "weighted", "padded", "one_id")
    for optimizer in ("adagrad", "rowwise_adagrad", "sgd")
    for num_tables in (1, 5)
]


@pytest.mark.parametrize("case", SOME_STEPS, ids=str)
def test_a_step_gives_the_same_bits_on_any_threads_and_instruction_set(case) -> None:
    arguments = train_step_arguments(case)
    results = []
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            results.append(KERNELS["table_step"](*arguments))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("case", [c for c in TRAIN_STEP_CASES if c.num_uses > 1], ids=str)
def test_a_step_is_not_two_steps(case) -> None:
    """Gradients of several lookups are added up before the optimizer squares them."""
    arguments = train_step_arguments(case)
    tables, states, *calls = arguments[:6]
    together = KERNELS["table_step"](*arguments)
    for k in range(case.num_uses):
        one = [part[k : k + 1] for part in calls]
        torch.ops.rankopt.table_step(tables, states, *one, *arguments[6:])
    apart = torch.cat([part.flatten() for part in (*tables, *states)])
    linear_or_none = case.optimizer == "sgd" or case.form == "empty"
    assert torch.allclose(together, apart, atol=1e-5) is linear_or_none


def test_a_table_of_more_rows_than_one_digit_is_sorted_whole() -> None:
    tables = [torch.zeros(5_000_000, 1)]
    ids = torch.tensor([[4_999_999], [1], [2_049], [4_194_305], [1], [4_999_999]])
    grads = torch.tensor([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])
    empty = torch.empty(0, dtype=torch.int64), torch.empty(0)
    torch.ops.rankopt.table_step(
        tables, [], [ids], [empty[0]], [empty[1]], [grads], False, -1, 2, 1.0, 0.0
    )
    expected = {1: 18.0, 2_049: 4.0, 4_194_305: 8.0, 4_999_999: 33.0}
    assert {int(i): -float(tables[0][i]) for i in tables[0].nonzero()[:, 0]} == expected


@pytest.mark.parametrize("bad", [-1, 10, 2**62])
def test_an_id_out_of_range_is_refused_and_changes_nothing(bad) -> None:
    tables = [torch.ones(20, 4), torch.ones(10, 4)]
    ids = torch.tensor([[0, 1], [3, bad]])
    with pytest.raises(IndexError, match=rf"table 1: ids must lie in \[0, 10\); got {bad}"):
        table_lookup(tables, ids)
    with pytest.raises(IndexError, match=f"table 1: .* got {bad}"):
        torch.ops.rankopt.table_step(
            tables, [], [ids], [torch.empty(0)], [torch.empty(0)], [torch.ones(2, 8)],
            False, -1, 2, 1.0, 0.0,
        )  # fmt: skip
    assert all(bool((table == 1).all()) for table in tables)


@pytest.mark.parametrize(
    ("ids", "offsets", "weights"),
    [
        (torch.tensor([[0]]), torch.empty(0), torch.empty(0)),
        (torch.tensor([[0, 1]], dtype=torch.int32), torch.empty(0), torch.empty(0)),
        (torch.tensor([0, 1]), torch.tensor([0, 3, 2]), torch.empty(0)),
        (torch.tensor([0, 1]), torch.tensor([0, 1, 3]), torch.empty(0)),
        (torch.tensor([0, 1]), torch.tensor([0, 1]), torch.empty(0)),
        (torch.tensor([0, 1]), torch.tensor([0, 1, 2]), torch.ones(3)),
    ],
    ids=["columns", "int32", "descending", "past the end", "odd", "weights"],
)
def test_calls_that_do_not_fit_are_refused(ids, offsets, weights) -> None:
    with pytest.raises(RuntimeError, match="table_lookup: "):
        table_lookup([torch.ones(5, 3), torch.ones(5, 3)], ids, offsets, weights)
