"""Score a file with an artifact: rows stream in, a parquet of row_id and probabilities streams out.

Shapes: N rows read at a time, cut into calls of at most `batch_size`; R requests of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from rankopt.artifact.manifest import Manifest, card_of, read_manifest
from rankopt.artifact.requests import require_requests
from rankopt.capture.requests import split_features
from rankopt.data.encode import encode
from rankopt.data.files import CsvSource
from rankopt.data.requests import RequestOrder, order_by_request, refuse_unshared
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
    requests: bool = False,
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
        requests: score through the form with `request_index`. Rows of one request, by the card's
            `request_key`, may stand anywhere; of those read together (65,536) the request-level
            inputs enter once, and must agree. A call holds whole requests where they fit.
        overwrite: replace a file that `out` names.
        progress: told how many rows are done.

    Returns:
        The number of rows.

    Raises:
        ArtifactError: the artifact is damaged, not for this machine, or has no such form.
        DataError: no rows, a missing column, a value that the card does not allow, or rows of one
            request that differ in a request-level input.
        UsageError: `batch_size` is larger than the artifact takes, or requests are asked for and
            the card names no `request_key`.
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
    key = _request_key(folder, manifest, card) if requests else None
    with staged_file(Path(out), overwrite=overwrite) as partial:
        source = open_for_card(card, data)
        num_rows = _write(
            partial, _tables(load_artifact(folder), card, source, batch_size, key), progress
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


def _request_key(folder: Path, manifest: Manifest, card: ModelCard) -> str:
    """Return the column that says which rows are of one request."""
    require_requests(folder, manifest)
    key = card.data.request_key
    if key is None:
        problem = Problem(
            f"{card.where}: data.request_key",
            "is required, since nothing else says which rows are of one request",
            hint="Name it in the card and build the artifact again, or score row by row.",
        )
        raise UsageError(problems=[problem])
    return key


def _tables(
    artifact: LoadedArtifact,
    card: ModelCard,
    source: RowSource,
    batch_size: int,
    key: str | None,
) -> Iterator[pa.Table]:
    columns = list(card.data_columns)
    id_type = _id_type(source)
    more = (ROW_ID if id_type is not None else None, key)
    columns += [name for name in more if name is not None and name not in columns]
    # Larger than a call, since each table becomes a row group: thousands of small ones read slowly.
    for batch, numbers in numbered_batches(source, columns, max(batch_size, BATCH_ROWS)):
        if not batch.num_rows:
            continue
        rows = encode(card, batch, with_labels=False, source_name=source.name, row_numbers=numbers)
        ids = pa.array(numbers) if id_type is None else batch.column(ROW_ID).cast(id_type)
        if key is None or rows.clusters is None:
            found = _probabilities(artifact, _plain_calls(artifact, rows, batch_size))
        else:
            order = order_by_request(rows.clusters)
            refuse_unshared(card, batch, rows, order, source.name, numbers)
            found = _probabilities(artifact, _request_calls(card, rows, order, batch_size))
            back = torch.from_numpy(np.argsort(order.rows))
            found = {name: values[back] for name, values in found.items()}
        yield pa.table({ROW_ID: ids, **{name: pa.array(v.numpy()) for name, v in found.items()}})


_Call = tuple[Mapping[str, Tensor], int]
"""Features, and how many of their first rows are scored already."""


def _plain_calls(artifact: LoadedArtifact, rows: Rows, batch_size: int) -> Iterator[_Call]:
    for start in range(0, rows.num_rows, batch_size):
        stop = min(start + batch_size, rows.num_rows)
        # A call of too few rows reaches back over rows that are scored already.
        first = max(0, min(start, stop - artifact.manifest.min_batch))
        yield rows.slice(first, stop).features, start - first


def _request_calls(
    card: ModelCard, rows: Rows, order: RequestOrder, batch_size: int
) -> Iterator[_Call]:
    """Yield calls in the order of the requests."""
    ordered, request = rows.take(order.rows), order.request
    for start, stop in order.calls(batch_size):
        _, first_R, index = np.unique(request[start:stop], return_index=True, return_inverse=True)
        features = ordered.slice(start, stop).features
        yield split_features(features, card, *map(torch.from_numpy, (first_R, index))), 0


def _probabilities(artifact: LoadedArtifact, calls: Iterable[_Call]) -> dict[str, Tensor]:
    """Score calls; one float64 tensor [N] per output, in their order."""
    outputs = artifact.manifest.outputs
    parts: dict[str, list[Tensor]] = {entry.name: [] for entry in outputs}
    for features, known in calls:
        scores = artifact(features)
        for entry in outputs:
            # In float64, as the A/B judges them: a logit of 20 is not yet 1 there.
            wide = scores[entry.name][known:].double()
            parts[entry.name].append(torch.sigmoid(wide) if entry.activation == "logit" else wide)
    return {name: torch.cat(found) for name, found in parts.items()}


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
