"""The lookups beyond their parity grid: what they refuse, rows alone, threads, fbgemm's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import pytest
import torch
from torch import Tensor

from rankopt.kernels import ops
from rankopt.kernels.lookup import (
    COPY,
    MEAN,
    SUM,
    PlanRow,
    decode_plan,
    encode_plan,
    lookup_rows,
    lookup_sequences,
    lookup_traffic,
)
from rankopt.kernels.lookup_cases import LookupCase, lookup_arguments
from rankopt.tables import TYPE_CODES, TableDtype, pack_batch

NUM_ROWS, DIM = 10, 8


def one_table(dtype: TableDtype = "int8") -> tuple[Tensor, PlanRow]:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(NUM_ROWS, DIM, generator=generator)
    batch, store = pack_batch(["t"], [weight], [dtype])
    slot = batch.slots[0]
    return store, PlanRow(SUM, slot.offset, slot.num_rows, DIM, TYPE_CODES[dtype], 0, 0)


def look_up(store: Tensor, row: PlanRow, *inputs: Tensor, num_rows: int = 3) -> Tensor:
    return lookup_rows(store, encode_plan([row]), inputs, num_rows, DIM)


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([0, NUM_ROWS, 1]),
        torch.tensor([0, -1, 1]),
        torch.tensor([0, 2**62, 1]),
        torch.tensor([0, -5, 1], dtype=torch.int32),
        torch.tensor([0.0, torch.nan, 1.0]),
        torch.tensor([0.0, 1e30, 1.0]),
        torch.tensor([0.0, -1.0, 1.0]),
    ],
    ids=["past", "negative", "huge", "int32", "nan", "huge-float", "negative-float"],
)
def test_an_id_outside_of_the_table_is_refused(ids: Tensor) -> None:
    store, row = one_table()
    lists = replace(row, length=0, offsets=1)
    for isa in ops.supported_isas():
        ops.set_isa(isa)
        with pytest.raises(RuntimeError, match="lookup 0 lies outside of its table of 10 rows"):
            look_up(store, row, ids)
        with pytest.raises(RuntimeError, match="lies outside of its table"):
            look_up(store, lists, ids, torch.tensor([0, 1, 2]))
        with pytest.raises(RuntimeError, match="lies outside of its table"):
            lookup_sequences(store, encode_plan([row]), [ids], DIM)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": 3}, "names input 3 of 2"),
        ({"source": -1}, "names input -1 of 2"),
        ({"offset": 64}, "reaches past the store's"),
        ({"num_rows": 2**60}, "reaches past the store's"),
        ({"offset": -1}, "is damaged"),
        ({"storage": 5}, "is damaged"),
        ({"dim": 0}, "is damaged"),
        ({"dim": 4}, "fills 4 of 8 columns"),
        ({"out": 1}, "writes past the 8 columns"),
        ({"column": 1}, "takes columns 1 to 2 of 3 rows"),
        ({"length": 0, "offsets": 1}, "needs 3 offsets, or one more"),
        ({"weights": 1}, "needs 3 float32 weights"),
        ({"mode": COPY}, "must be float32"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(changes: dict[str, int], words: str) -> None:
    store, row = one_table()
    with pytest.raises(RuntimeError, match=words):
        look_up(store, replace(row, **changes), torch.tensor([1, 2, 3]), torch.ones(7))


@pytest.mark.parametrize("offsets", [[0, 2, 1], [-1, 0, 1], [0, 1, 9], [3, 3, 2]])
def test_offsets_that_do_not_ascend_are_refused(offsets: Sequence[int]) -> None:
    store, row = one_table()
    lists = replace(row, length=0, offsets=1)
    with pytest.raises(RuntimeError, match="the offsets of lookup 0 say"):
        look_up(store, lists, torch.tensor([1, 2, 3]), torch.tensor(offsets))


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1, 1, 0, 1, 0, 1], "do not add up to the 5 ids"),
        ([1, 1, 0, 1, 2, 1], "do not add up to the 5 ids"),
        ([1, -1, 2, 1, 1, 1], "one is negative"),
        ([2**63 - 1, 2**63 - 1, 7, 0, 0, 0], "one is negative"),
        ([1, 1, 1, 1, 1], r"reads feature 1 of 2 times 3 lengths; got \[5\]"),
        ([1, 1, 1, 1, 1, 0, 0, 0], r"reads feature 1 of 2 times 3 lengths; got \[8\]"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(lengths: Sequence[int], words: str) -> None:
    store, row = one_table()
    keyed = replace(row, length=0, offsets=1, column=1, groups=2)
    ids = torch.tensor([1, 2, 3, 4, 5])
    assert look_up(store, keyed, ids, torch.tensor([1, 1, 0, 1, 2, 0])).shape == (3, DIM)
    with pytest.raises(RuntimeError, match=words):
        look_up(store, keyed, ids, torch.tensor(lengths))


@pytest.mark.parametrize("changes", [{"groups": -1}, {"column": 2}, {"column": -1}])
def test_a_feature_that_lengths_do_not_have_is_refused(changes: dict[str, int]) -> None:
    store, row = one_table()
    keyed = replace(row, length=0, offsets=1, column=1, groups=2)
    with pytest.raises(RuntimeError, match="reads feature"):
        look_up(store, replace(keyed, **changes), torch.ones(6).long(), torch.ones(6).long())


def test_lengths_of_another_type_and_ids_in_every_other_place_are_read() -> None:
    store, row = one_table()
    keyed = replace(row, length=0, offsets=1, column=1, groups=2)
    ids, lengths = torch.arange(6), torch.tensor([1, 1, 0, 1, 2, 1])
    spread = torch.stack([ids, ids + 90], dim=1)[:, 0]
    found = look_up(store, keyed, spread, torch.stack([lengths, lengths], 1).int()[:, 0])
    assert torch.equal(found, look_up(store, keyed, ids, lengths))


def test_a_plan_reads_back() -> None:
    rows = [PlanRow(MEAN, 64, 10, 8, 2, 3, 1, 4, 0, 2, 5, 7), PlanRow(COPY, 0, 0, 5, 0, 11, 3)]
    assert decode_plan(encode_plan(rows)) == rows
    assert encode_plan([]).shape == (0, 12)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_row_is_the_same_alone_and_with_any_number_of_threads(dtype: TableDtype) -> None:
    store, plan, inputs, num_rows, width = lookup_arguments(
        LookupCase(3000, 64, dtype, "mixed", num_tables=8)
    )
    torch.set_num_threads(1)
    whole = lookup_rows(store, plan, inputs, num_rows, width)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert torch.equal(lookup_rows(store, plan, inputs, num_rows, width), whole)
    single = [row for row in decode_plan(plan) if row.length == 1 and row.mode != COPY]
    for row in single:
        ids = inputs[row.source]
        for at in (0, 1, 777, num_rows - 1):
            alone = lookup_rows(
                store, encode_plan([replace(row, source=0, out=0)]), [ids[at : at + 1]], 1, row.dim
            )
            assert torch.equal(alone[0], whole[at, row.out : row.out + row.dim])


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("form", ["sum", "mean", "weighted", "long"])
def test_bags_equal_fbgemms_to_rounding(dtype: TableDtype, form: str) -> None:
    store, plan, inputs, num_rows, width = lookup_arguments(
        LookupCase(65, 32, dtype, form, num_tables=1)  # type: ignore[arg-type]
    )
    (row,) = decode_plan(plan)
    ids, offsets = inputs[row.source].contiguous(), inputs[row.offsets]
    edges = torch.cat([offsets, torch.tensor([len(ids)])])
    widest = {name: width if name == dtype else 0 for name in TYPE_CODES}
    theirs = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        store,
        torch.empty(0, dtype=torch.uint8),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([row.offset]),
        torch.tensor([row.storage], dtype=torch.uint8),
        torch.tensor([0, width], dtype=torch.int32),
        width,
        *(widest[name] for name in ("int2", "int4", "int8", "fp16", "fp32")),
        ids,
        edges,
        row.mode,
        inputs[row.weights] if row.weights >= 0 else None,
        0,
        None,
        None,
        1,
    )
    ours = lookup_rows(store, plan, inputs, num_rows, width)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_traffic_counts_every_byte_once() -> None:
    rows = [
        PlanRow(COPY, 0, 0, 5, 0, 0, 0),
        PlanRow(SUM, 0, 10, 64, TYPE_CODES["int8"], 5, 1, 2),
        PlanRow(SUM, 0, 10, 16, TYPE_CODES["fp32"], 69, 2, 0, 0, 3, 4),
    ]
    ids = torch.zeros(100, 4, dtype=torch.int32)
    lists, offsets, weights = torch.zeros(350, dtype=torch.int64), torch.zeros(100), torch.ones(350)
    inputs = [torch.zeros(100, 5), ids, lists, offsets, weights]
    keyed = [PlanRow(SUM, 0, 10, 16, 0, 0, 0, k, 0, 1, groups=2) for k in (0, 1)]
    counted = lookup_traffic(encode_plan(keyed), [lists, torch.tensor([50, 100, 0, 200])], 2)
    assert counted.row_bytes == 350 * 16 * 4
    traffic = lookup_traffic(encode_plan(rows), inputs, 100)
    assert traffic.row_bytes == 100 * (64 + 4) + 350 * 16 * 4
    assert traffic.id_bytes == 100 * 4 + 350 * (8 + 4) + 100 * 8
    assert traffic.result_bytes == 100 * 4 * (5 + 5 + 64 + 16)
    assert traffic.total_bytes == traffic.row_bytes + traffic.id_bytes + traffic.result_bytes
