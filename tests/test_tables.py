"""Packed rows: read back by an independent reading of fbgemm's format, and by fbgemm itself."""

from __future__ import annotations

from itertools import pairwise

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.truth import half_step, read_rows
from rankopt import tables
from rankopt.tables import (
    BITS,
    TYPE_CODES,
    TableDtype,
    pack_batch,
    pack_rows,
    range_refusal,
    refusal,
    row_bytes,
    table_weight,
    unpack_rows,
)

DTYPES: tuple[TableDtype, ...] = ("fp32", "fp16", "int8", "int4", "int2")
QUANTISED: tuple[TableDtype, ...] = ("int8", "int4", "int2")


def random_table(num_rows: int, dim: int, seed: int = 0, scale: float = 0.5) -> Tensor:
    return torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    num_rows=st.integers(1, 9),
    dim=st.integers(1, 40),
    seed=st.integers(0, 2**16),
    magnitude=st.sampled_from([1e-2, 0.5, 30.0]),
)
@settings(max_examples=80, deadline=None)
def test_rows_that_are_not_refused_read_back_as_an_independent_reader_does(
    dtype: TableDtype, num_rows: int, dim: int, seed: int, magnitude: float
) -> None:
    if dtype != "fp32" and refusal(dim, dtype) is not None:
        return
    weight = random_table(num_rows, dim, seed, magnitude)
    packed = pack_rows(weight, dtype)
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_rows, row_bytes(dim, dtype))
    ours, theirs = unpack_rows(packed, dim, dtype).double().numpy(), read_rows(packed, dim, dtype)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6 * magnitude)
    exact = weight.double().numpy()
    if dtype == "fp32":
        np.testing.assert_array_equal(theirs, exact)
    elif dtype == "fp16":
        np.testing.assert_array_equal(theirs, weight.half().double().numpy())
    else:
        assert (np.abs(theirs - exact) <= half_step(exact, BITS[dtype])).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_twice_changes_no_score(dtype: TableDtype) -> None:
    once = unpack_rows(pack_rows(random_table(20, 16), dtype), 16, dtype)
    twice = unpack_rows(pack_rows(once, dtype), 16, dtype)
    # The range of levels is used to its ends, so the second scale can differ by fp16 rounding only.
    torch.testing.assert_close(twice, once, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("value", [0.0, 0.25, -1.5])
def test_a_constant_row_stays_exact(dtype: TableDtype, value: float) -> None:
    weight = torch.full((2, 8), value)
    assert torch.equal(unpack_rows(pack_rows(weight, dtype), 8, dtype), weight)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_row_too_flat_for_an_fp16_scale_errs_by_no_more_than_its_range(
    dtype: TableDtype,
) -> None:
    weight = torch.full((1, 8), 0.5)
    weight[0, 3] += 1e-7
    error = (unpack_rows(pack_rows(weight, dtype), 8, dtype) - weight).abs().max()
    assert float(error) <= 2e-7


@pytest.mark.parametrize("dtype", DTYPES)
def test_fbgemm_reads_the_rows_that_we_packed(dtype: TableDtype) -> None:
    weight = random_table(6, 8, seed=3)
    batch, storage = pack_batch(["other", "t"], [random_table(3, 4), weight], ["int8", dtype])
    slot = batch.slot("t")
    widest = {name: slot.dim if name == dtype else 0 for name in TYPE_CODES}
    found = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function(
        storage,
        torch.empty(0, dtype=torch.uint8),
        torch.tensor([3], dtype=torch.int32),
        torch.tensor([slot.offset]),
        torch.tensor([TYPE_CODES[dtype]], dtype=torch.uint8),
        torch.tensor([0, slot.dim], dtype=torch.int32),
        slot.dim,
        widest["int2"],
        widest["int4"],
        widest["int8"],
        widest["fp16"],
        widest["fp32"],
        torch.arange(6),
        torch.arange(7),
        0,
        None,
        0,
        None,
        None,
        1,
    )
    expected = read_rows(pack_rows(weight, dtype), 8, dtype)
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "not all finite"),
        (float("inf"), "not all finite"),
        (float("-inf"), "not all finite"),
        (1e5, "exceeds fp16's range"),
        (-1e5, "exceeds fp16's range"),
        (65504.0, None),
        (-65504.0, None),
    ],
)
def test_the_range_of_a_table_is_that_of_its_worst_value(value: float, words: str | None) -> None:
    weight = random_table(5, 4)
    assert range_refusal(weight) is None
    weight[3, 2] = value
    reason = range_refusal(weight)
    assert (reason is None) == (words is None)
    assert words is None or words in str(reason)
    assert range_refusal(weight[:0]) is None


def test_a_batch_keeps_every_table_apart_and_aligned() -> None:
    names = [f"t{index}" for index in range(len(DTYPES))]
    weights = [random_table(5 + index, 8 * (index + 1), index) for index in range(len(DTYPES))]
    batch, storage = pack_batch(names, weights, DTYPES)
    assert storage.dtype == torch.uint8
    assert storage.dim() == 1
    spans = [(slot.offset, slot.offset + slot.size_bytes) for slot in batch.slots]
    assert all(start % 64 == 0 for start, _ in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= storage.numel() < spans[-1][1] + 64
    for name, weight, dtype in zip(names, weights, DTYPES, strict=True):
        expected = unpack_rows(pack_rows(weight, dtype), weight.shape[1], dtype)
        assert torch.equal(table_weight(batch, storage, name), expected)


def test_a_table_beyond_32_bits_is_packed_in_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_table(11, 8)
    whole = pack_rows(weight, "int8")
    # fbgemm indexes with 32 bits; a limit of three rows takes the same way as 2^31 elements would.
    monkeypatch.setattr(tables, "MAX_ELEMENTS", 25)
    assert torch.equal(pack_rows(weight, "int8"), whole)


@pytest.mark.parametrize("dtype", ["fp16", "int8", "int4", "int2"])
@pytest.mark.parametrize("dim", range(1, 41))
def test_a_type_is_refused_where_it_saves_nothing_or_does_not_fit(
    dtype: TableDtype, dim: int
) -> None:
    bits = BITS[dtype]
    head = 0 if dtype == "fp16" else 4
    impossible = dim * bits % 8 != 0 or dim * bits // 8 + head >= 4 * dim
    reason = refusal(dim, dtype)
    if impossible:
        assert reason is not None
    if dim % 8 == 0:  # every packing fits
        assert reason is None
    if reason is not None:
        assert dtype in reason
        assert f"D = {dim}" in reason


@pytest.mark.parametrize(
    ("dim", "dtype", "words"),
    [
        (1, "int8", "takes 5 bytes against 4"),
        (6, "int2", "int2 packs 4 values a byte"),
        (7, "int4", "int4 packs 2 values a byte"),
    ],
)
def test_the_refusal_says_why(dim: int, dtype: TableDtype, words: str) -> None:
    assert words in str(refusal(dim, dtype))
