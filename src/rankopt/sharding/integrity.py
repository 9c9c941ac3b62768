"""Compare what a checkpoint's files hold with its checksums, and name the part that is damaged."""

from __future__ import annotations

from collections.abc import Iterator

from rankopt.sharding.checksums import BLOCK_ROWS, Checksum, blocks, checksum
from rankopt.sharding.manifest import PieceRecord, TensorRecord
from rankopt.sharding.stored import DamagedPieceError, StoredCheckpoint, StoredTensor

STEP_BYTES = 32 << 20
"""How much is read at a time."""


def steps(num_rows: int, row_bytes: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Cut rows into what is read at a time; no step reaches over a block's end."""
    at_once = max(1, STEP_BYTES // max(1, row_bytes))
    for first, last in blocks(start, num_rows):
        for row in range(first, last, at_once):
            yield row, min(last, row + at_once)


def expected_blocks(record: TensorRecord) -> dict[int, Checksum]:
    """Add up the checksums of a tensor's pieces, block by block of whole rows."""
    expected: dict[int, Checksum] = {}
    for piece in record.pieces:
        for (start, _), text in zip(_blocks(piece), piece.checksums, strict=True):
            block = start // BLOCK_ROWS
            expected[block] = expected.get(block, Checksum()) + Checksum.parse(text)
    return expected


def records_of(checkpoint: StoredCheckpoint) -> dict[str, TensorRecord]:
    """Return the checksums of a checkpoint by tensor; empty where it carries none."""
    manifest = checkpoint.manifest
    if manifest is None or manifest.block_rows != BLOCK_ROWS:
        return {}
    return {record.key: record for record in manifest.tensors}


def damaged_parts(
    tensor: StoredTensor, record: TensorRecord, rows: tuple[int, int] | None = None
) -> Iterator[DamagedPieceError]:
    """Read a tensor and yield what its checksums do not agree with.

    Args:
        tensor: as it is stored.
        record: as its checksums say.
        rows: look only at blocks that touch these; None: at all of them.
    """
    by_place = {(p.row_offset, p.column_offset): p for p in record.pieces}
    for index, piece in enumerate(tensor.pieces):
        known = by_place.get((piece.row_offset, piece.column_offset))
        if known is None or (known.num_rows, known.num_columns) != (
            piece.num_rows,
            piece.num_columns,
        ):
            what = "is cut in another way than its checksums say"
            yield DamagedPieceError(piece.file, tensor.key, piece.rows, what)
            continue
        bad: list[tuple[int, int]] = []
        for (start, stop), text in zip(_blocks(known), known.checksums, strict=True):
            if rows is not None and (stop <= rows[0] or start >= rows[1]):
                continue
            try:
                found = _sum_of_piece(tensor, index, start, stop)
            except DamagedPieceError as error:
                yield error
                bad = []
                break
            if str(found) != text:
                if bad and bad[-1][1] == start:
                    bad[-1] = (bad[-1][0], stop)
                else:
                    bad.append((start, stop))
        for span in bad:
            what = "the values do not have the checksum that they were written with"
            yield DamagedPieceError(piece.file, tensor.key, span, what)


def _sum_of_piece(tensor: StoredTensor, index: int, start: int, stop: int) -> Checksum:
    piece = tensor.pieces[index]
    row_bytes = piece.num_columns * tensor.dtype.itemsize
    total = Checksum()
    for first, last in steps(stop - start, row_bytes, start):
        values = tensor.read_piece(index, first, last)
        total += checksum(values, first, piece.column_offset)
    return total


def _blocks(piece: PieceRecord) -> list[tuple[int, int]]:
    return list(blocks(piece.row_offset, piece.num_rows)) if piece.num_columns else []
