from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.sharding.checksums import BLOCK_ROWS, Checksum, block_checksums, checksum

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip


def table(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * 20
    return (values > 0) if dtype is torch.bool else values.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(row=st.integers(0, 9), column=st.integers(0, 5))
def test_any_cut_adds_up_to_the_whole(dtype: torch.dtype, row: int, column: int) -> None:
    whole = table(9, 5, dtype)
    parts = [
        checksum(whole[rows, columns], rows.start, columns.start)
        for rows in (slice(0, row), slice(row, 9))
        for columns in (slice(0, column), slice(column, 5))
    ]
    assert sum(parts, Checksum()) == checksum(whole)


def test_every_changed_bit_of_a_value_changes_it() -> None:
    whole = table(6, 3)
    before = checksum(whole)
    for bit in range(32):
        changed = whole.clone()
        changed.view(torch.int32)[4, 1] ^= (1 << bit) if bit < 31 else -(1 << 31)
        assert checksum(changed) != before


def test_swapped_rows_columns_and_signs_of_zero_change_it() -> None:
    whole = table(6, 3)
    assert checksum(whole[[1, 0, 2, 3, 4, 5]]) != checksum(whole)
    assert checksum(whole[:, [1, 0, 2]]) != checksum(whole)
    assert checksum(torch.tensor([[-0.0]])) != checksum(torch.tensor([[0.0]]))


def test_blocks_start_at_the_same_rows_whatever_the_part() -> None:
    whole = table(BLOCK_ROWS + 10, 1)
    first, second = block_checksums(whole)
    tail = block_checksums(whole[BLOCK_ROWS - 3 :], BLOCK_ROWS - 3)
    assert len(tail) == 2
    assert tail[1] == second
    assert checksum(whole[: BLOCK_ROWS - 3]) + tail[0] == first


def test_it_is_written_and_read_back() -> None:
    one = checksum(table(2, 2))
    assert Checksum.parse(str(one)) == one
    assert len(str(one)) == 32
