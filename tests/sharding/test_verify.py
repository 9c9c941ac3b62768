"""What differs or is damaged is named: the table, the rows and the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rankopt.errors import CheckpointError
from rankopt.sharding.checksums import BLOCK_ROWS
from rankopt.sharding.opening import open_checkpoint
from rankopt.sharding.reshard import reshard
from rankopt.sharding.verify import verify

TABLE = "embedding_bags.t.weight"
ROWS = BLOCK_ROWS * 2 + 40


@pytest.fixture
def whole(tmp_path: Path) -> dict[str, torch.Tensor]:
    state = {TABLE: torch.randn(ROWS, 4), "top.weight": torch.randn(5, 3)}
    torch.save(state, tmp_path / "one.pt")
    reshard(tmp_path / "one.pt", tmp_path / "three", 3)
    return state


def values_at(checkpoint: Path, row: int) -> tuple[Path, int]:
    """Find the file and the first byte of a row of the table."""
    tensor = open_checkpoint(checkpoint).tensors[TABLE]
    for index, piece in enumerate(tensor.pieces):
        if piece.row_offset <= row < piece.rows[1]:
            tensor.read_piece(index, piece.row_offset, piece.row_offset + 1)
            at = tensor.places[index] if piece.archived else piece.start
            return piece.file, at + (row - piece.row_offset) * 16
    raise AssertionError(row)


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 8]))


def test_the_same_tables_are_the_same_however_cut(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    done = verify(tmp_path / "one.pt", tmp_path / "three")
    assert done.same
    assert done.largest == 0.0
    assert done.num_checked == 2
    assert any("one.pt carries no checksums" in note for note in done.notes)


def test_a_damaged_shard_is_named(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    row = ROWS - 3
    file, at = values_at(tmp_path / "three", row)
    flip(file, at)
    (found,) = verify(tmp_path / "three").differences
    assert found.kind == "damaged"
    assert found.tensor == TABLE
    assert found.files == (str(file),)
    assert found.row_start is not None
    assert found.row_stop is not None
    assert found.row_start <= row < found.row_stop
    assert found.row_stop - found.row_start <= BLOCK_ROWS
    assert str(file) in found.message
    both = verify(tmp_path / "one.pt", tmp_path / "three").differences
    assert [(item.kind, item.row_start) for item in both if item.kind == "values"] == [
        ("values", row)
    ]


@pytest.mark.parametrize("keep", [0, 100, 0.5])
def test_a_truncated_shard_is_named(
    tmp_path: Path, whole: dict[str, torch.Tensor], keep: float
) -> None:
    file, _ = values_at(tmp_path / "three", 0)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep) if keep < 1 else int(keep)])
    found = verify(tmp_path / "three").differences
    assert [(item.kind, item.tensor) for item in found] == [("damaged", TABLE)]
    assert "truncated" in found[0].message
    assert file.name in found[0].message
    with pytest.raises(CheckpointError, match="truncated"):
        reshard(tmp_path / "three", tmp_path / "x", 2)
    assert not verify(tmp_path / "one.pt", tmp_path / "three").same


def test_a_missing_shard_is_named(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    file, _ = values_at(tmp_path / "three", ROWS - 1)
    file.unlink()
    (found,) = verify(tmp_path / "three").differences
    assert "missing" in found.message
    assert found.files == (str(file),)
    assert found.row_stop == ROWS


def test_an_archive_that_is_none_any_more(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    file, _ = values_at(tmp_path / "three", 0)
    file.write_bytes(b"\0" * file.stat().st_size)
    (found,) = verify(tmp_path / "three").differences
    assert "no longer an archive" in found.message


def test_a_wrong_checksum_is_told(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "three" / "shards.json"
    record = open_checkpoint(tmp_path / "three").manifest
    assert record is not None
    first = record.tensors[0].pieces[0].checksums[0]
    file.write_text(file.read_text().replace(first, "0" * 32))
    assert [item.kind for item in verify(tmp_path / "three").differences] == ["damaged"]
    file.write_text("{")
    with pytest.raises(CheckpointError, match=r"shards\.json"):
        verify(tmp_path / "three")


def test_differences_are_told_by_rows(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    changed = {name: value.clone() for name, value in whole.items()}
    changed[TABLE][10:12] += 1.0
    changed[TABLE][BLOCK_ROWS - 1 : BLOCK_ROWS + 1, 2] += 0.25
    torch.save(changed, tmp_path / "other.pt")
    found = verify(tmp_path / "three", tmp_path / "other.pt").differences
    spans = [(item.row_start, item.row_stop) for item in found]
    assert spans == [(10, 12), (BLOCK_ROWS - 1, BLOCK_ROWS + 1)]
    assert all(any(name.endswith("other.pt") for name in item.files) for item in found)
    assert found[0].largest == pytest.approx(1.0, abs=1e-5)
    assert verify(tmp_path / "three", tmp_path / "other.pt", tolerance=1.01).same
    loose = verify(tmp_path / "three", tmp_path / "other.pt", tolerance=0.5)
    assert [(item.row_start, item.row_stop) for item in loose.differences] == [(10, 12)]


def test_many_scattered_rows_are_told_as_one_span(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    changed = {**whole, TABLE: whole[TABLE].clone()}
    changed[TABLE][::100] += 1
    torch.save(changed, tmp_path / "other.pt")
    (found,) = verify(tmp_path / "one.pt", tmp_path / "other.pt").differences
    assert found.num_rows == -(-ROWS // 100)
    assert found.row_start == 0


def test_nan_and_the_sign_of_zero_are_compared_bit_for_bit(tmp_path: Path) -> None:
    torch.save({"a": torch.tensor([[float("nan"), 0.0]])}, tmp_path / "a.pt")
    torch.save({"a": torch.tensor([[float("nan"), -0.0]])}, tmp_path / "b.pt")
    assert verify(tmp_path / "a.pt", tmp_path / "a.pt").same
    assert not verify(tmp_path / "a.pt", tmp_path / "b.pt").same
    assert verify(tmp_path / "a.pt", tmp_path / "b.pt", tolerance=1e-9).same
    torch.save({"a": torch.tensor([[1.0, 0.0]])}, tmp_path / "c.pt")
    (found,) = verify(tmp_path / "a.pt", tmp_path / "c.pt", tolerance=10).differences
    assert found.largest is None


def test_other_tables_shapes_and_dtypes(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    torch.save({TABLE: whole[TABLE][:5], "new": torch.zeros(2)}, tmp_path / "other.pt")
    found = verify(tmp_path / "one.pt", tmp_path / "other.pt").differences
    assert {(item.kind, item.tensor) for item in found} == {
        ("shape", TABLE), ("missing", "top.weight"), ("missing", "new"),
    }  # fmt: skip
    torch.save({**whole, TABLE: whole[TABLE].half()}, tmp_path / "half.pt")
    (found_dtype,) = verify(tmp_path / "one.pt", tmp_path / "half.pt").differences
    assert found_dtype.kind == "dtype"
    assert verify(tmp_path / "one.pt", tmp_path / "half.pt", tolerance=0.01).same


def test_quantised_rows_are_within_half_a_step(tmp_path: Path) -> None:
    rows = torch.rand(300, 16)
    torch.save({"t": rows}, tmp_path / "fp32.pt")
    import fbgemm_gpu  # noqa: F401 - registers the operators

    pack = torch.ops.fbgemm
    for name, packed, tolerance in (
        ("int8", pack.FloatToFused8BitRowwiseQuantized(rows), 1 / 255 / 1.9),
        ("int4", pack.FloatToFusedNBitRowwiseQuantizedSBHalf(rows, 4), 1 / 15 / 1.9),
    ):
        torch.save({"t": packed}, tmp_path / f"{name}.pt")
        reshard(tmp_path / f"{name}.pt", tmp_path / name, 2)
        assert verify(tmp_path / "fp32.pt", tmp_path / name, tolerance=tolerance).same
        assert not verify(tmp_path / "fp32.pt", tmp_path / name, tolerance=tolerance / 3).same
        (found,) = verify(tmp_path / "fp32.pt", tmp_path / name).differences
        assert found.kind == "shape"


def test_weights_alone_beside_a_training_checkpoint(
    tmp_path: Path, whole: dict[str, torch.Tensor]
) -> None:
    state = {TABLE: {"t.momentum1": torch.rand(ROWS)}}
    torch.save({"model": whole, "optimizer": {"state": state}}, tmp_path / "run.pt")
    done = verify(tmp_path / "run.pt", tmp_path / "three")
    assert done.same
    assert any("no optimizer state was compared" in note for note in done.notes)


def test_what_cannot_be_opened_is_an_error(tmp_path: Path, whole: dict[str, torch.Tensor]) -> None:
    (tmp_path / "three" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        verify(tmp_path / "three")
    (tmp_path / "short.pt").write_bytes((tmp_path / "one.pt").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="truncated"):
        verify(tmp_path / "short.pt")
    (tmp_path / "short.safetensors").write_bytes(b"\x99" * 20)
    with pytest.raises(CheckpointError, match="safetensors"):
        verify(tmp_path / "short.safetensors")
    shutil.copy(tmp_path / "one.pt", tmp_path / "one.onnx")
    with pytest.raises(CheckpointError, match="must be"):
        verify(tmp_path / "one.onnx")


def test_a_missing_value_is_named(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(3)}, "step": 5}, tmp_path / "run.pt")
    reshard(tmp_path / "run.pt", tmp_path / "one", 1)
    assert verify(tmp_path / "one").same
    (file,) = (f for f in (tmp_path / "one").glob("*.distcp") if f.name == "__0_1.distcp")
    file.unlink()
    (found,) = verify(tmp_path / "one").differences
    assert "__0_1.distcp: step: is missing" in found.message
