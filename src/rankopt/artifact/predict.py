"""Score a file with an artifact: rows stream in, a parquet of row_id and probabilities streams out.

Shapes: N rows read at a time, cut into calls of at most `batch_size`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rankopt.artifact.manifest import card_of, read_manifest
from rankopt.data.encode import encode
from rankopt.data.files import CsvSource
from rankopt.data.rows import Rows
from rankopt.data.rowsource import BATCH_ROWS, RowSource, numbered_batches
from rankopt.data.splits import open_for_card
from rankopt.errors import ArtifactError, DataError, Problem, UsageError
from rankopt.models.card import ModelCard
from rankopt.output import staged_file
from rankopt.runtime import LoadedArtifact, load_artifact

if TYPE_CHECKING:
    import pandas as pd
    import ray.data

    Data = str | Path | pd.DataFrame | ray.data.Dataset | RowSource
    """A file or folder, a DataFrame, a Ray Dataset or a reader."""

ROW_ID = "row_id"


def predict_file(
    artifact: str | Path,
    data: Data,
    out: str | Path,
    *,
    batch_size: int = 512,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> int:
    """Score every row of `data` and write a parquet file, whole or not at all.

    The file has `row_id` (the data's own column of that name where it has one, else 0, 1, ...) and
    one column of probabilities per output, float64, in the order of the data. Labels are not read.

    Args:
        artifact: the artifact folder.
        data: the rows.
        out: the parquet file.
        batch_size: rows of one call; the last may have fewer.
        overwrite: replace a file that `out` names.
        progress: told how many rows are done.

    Returns:
        The number of rows.

    Raises:
        ArtifactError: the artifact is damaged or not for this machine.
        DataError: no rows, a missing column, or a value that the card does not allow.
        UsageError: `batch_size` is larger than the artifact takes.
        OutputExistsError: `out` exists and `overwrite` is False.
    """
    folder = Path(artifact)
    manifest = read_manifest(folder)
    if not manifest.min_batch <= batch_size <= manifest.max_batch:
        what = f"must be {manifest.min_batch} to {manifest.max_batch}"
        problem = Problem("batch_size", what, batch_size)
        raise UsageError(problems=[problem])
    if any(entry.name == ROW_ID for entry in manifest.outputs):
        raise ArtifactError(
            f"{folder}: an output is called {ROW_ID!r}, which the rows' numbers need. Rename it in "
            "the model card and build the artifact again."
        )
    card = card_of(manifest)
    with staged_file(Path(out), overwrite=overwrite) as partial:
        source = open_for_card(card, data)
        num_rows = _write(
            partial, _tables(load_artifact(folder), card, source, batch_size), progress
        )
        if not num_rows:
            hint = "Give data with at least one row."
            raise DataError(problems=[Problem(source.name, "holds no rows", hint=hint)])
    return num_rows


def _write(file: Path, tables: Iterator[pa.Table], progress: Callable[[str], None]) -> int:
    """Write tables of one schema as row groups; return how many rows there were."""
    writer: Any = None
    num_rows = 0
    try:
        for table in tables:
            if writer is None:
                writer = pq.ParquetWriter(file, table.schema)
            writer.write_table(table.cast(writer.schema))
            num_rows += table.num_rows
            progress(f"{num_rows:,} rows")
    finally:
        if writer is not None:
            writer.close()
    return num_rows


def _tables(
    artifact: LoadedArtifact, card: ModelCard, source: RowSource, batch_size: int
) -> Iterator[pa.Table]:
    columns = list(card.data_columns)
    id_type = _id_type(source)
    if id_type is not None and ROW_ID not in columns:
        columns.append(ROW_ID)
    # Larger than a call, since each table becomes a row group: thousands of small ones read slowly.
    for batch, numbers in numbered_batches(source, columns, max(batch_size, BATCH_ROWS)):
        if not batch.num_rows:
            continue
        rows = encode(card, batch, with_labels=False, source_name=source.name, row_numbers=numbers)
        ids = pa.array(numbers) if id_type is None else batch.column(ROW_ID).cast(id_type)
        yield pa.table({ROW_ID: ids, **_probabilities(artifact, rows, batch_size)})


def _probabilities(artifact: LoadedArtifact, rows: Rows, batch_size: int) -> dict[str, pa.Array]:
    """Score N rows in calls of `batch_size`; one float64 array [N] per output."""
    outputs = artifact.manifest.outputs
    parts: dict[str, list[torch.Tensor]] = {entry.name: [] for entry in outputs}
    for start in range(0, rows.num_rows, batch_size):
        stop = min(start + batch_size, rows.num_rows)
        # A call of too few rows reaches back over rows that are scored already.
        first = max(0, min(start, stop - artifact.manifest.min_batch))
        scores = artifact(rows.slice(first, stop).features)
        for entry in outputs:
            # In float64, as the A/B judges them: a logit of 20 is not yet 1 there.
            wide = scores[entry.name][start - first :].double()
            parts[entry.name].append(torch.sigmoid(wide) if entry.activation == "logit" else wide)
    return {name: pa.array(torch.cat(found).numpy()) for name, found in parts.items()}


def _id_type(source: RowSource) -> Any:
    """Return the type of the data's own row ids; None when it has none.

    A csv file brings text: where every id is a whole number as it would be written, it becomes one.
    """
    if ROW_ID not in source.column_names():
        return None
    batches = (batch for batch in source.batches([ROW_ID]) if batch.num_rows)
    first = next(batches, None)
    if first is None:
        return pa.int64()
    found = first.column(0).type
    if not isinstance(source, CsvSource):
        return found
    return pa.int64() if all(_is_whole(b.column(0)) for b in [first, *batches]) else found


def _is_whole(text: Any) -> bool:
    try:
        back = text.cast(pa.int64()).cast(pa.string())
    except pa.ArrowInvalid:
        return False
    # "007" would lose its zeros.
    return bool(pc.all(pc.equal(back, text), min_count=0).as_py())
