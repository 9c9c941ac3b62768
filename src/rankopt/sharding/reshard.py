"""Cut a checkpoint anew: any world size and plan to any other, or to one file, and back.

Every row is read once and written once, a few at a time, so memory does not grow with the tables.
Checksums are added up on the way: a source that carries them is checked as it is read, and the
result carries its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from rankopt.errors import CheckpointError, Problem, UsageError
from rankopt.output import check_free_space, staged_file, staged_output
from rankopt.sharding.checksums import BLOCK_ROWS, Checksum
from rankopt.sharding.integrity import damaged_parts, expected_blocks, records_of, steps
from rankopt.sharding.layout import Layout, TargetTensor, lay_out
from rankopt.sharding.manifest import (
    MANIFEST,
    TensorRecord,
    manifest_file,
    write_manifest,
)
from rankopt.sharding.opening import open_checkpoint
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.stored import (
    SAFETENSORS_SUFFIX,
    TORCH_SUFFIXES,
    StoredCheckpoint,
    optimizer_file,
)
from rankopt.sharding.writing import (
    FolderWriter,
    SafetensorsWriter,
    TorchWriter,
    Writer,
    manifest_of,
)
from rankopt.units import format_bytes


class RankShare(BaseModel):
    """What one rank holds of the new checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    num_shards: int
    size_bytes: int


class Resharded(BaseModel):
    """What was done."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    out: str
    world_size: int
    num_tensors: int
    size_bytes: int
    checked: bool
    """Whether the source carried checksums, and so was checked while it was read."""
    ranks: tuple[RankShare, ...]
    checksums: dict[str, str]
    """Of each tensor; equal to the source's, however it is cut."""
    notes: tuple[str, ...]


def reshard(
    checkpoint: str | Path,
    out: str | Path,
    world_size: int,
    *,
    plan: ShardPlan | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Resharded:
    """Write a checkpoint for another number of ranks.

    Args:
        checkpoint: a torch.distributed.checkpoint folder, a `.pt` or a `.safetensors` file.
        out: a folder, or one file of the two kinds for a world size of 1.
        world_size: how many ranks will read it.
        plan: where each table's parts go; None: each table in even blocks of rows.
        overwrite: replace an earlier result.
        progress: told which tensor is being written.

    Raises:
        CheckpointError: the checkpoint is damaged; the file, the tensor and the rows are named.
        UsageError: the plan is of another model or world size, or `out` is in the way.
        EnvironmentProblem: the disk is too full.
    """
    source, target = Path(checkpoint), Path(out)
    _check(source, target, world_size)
    stored = open_checkpoint(source)
    if stored.damage:
        raise CheckpointError(problems=[p for error in stored.damage[:10] for p in error.problems])
    layout = lay_out(stored, world_size, plan)
    with _writer(stored, layout, target, overwrite) as (writer, place):
        _copy(stored, layout, writer, progress)
        writer.finish()
        names = {place: target.name, optimizer_file(place): optimizer_file(target).name}
        manifest = manifest_of(layout.tensors, writer, world_size, names)
        if not target.suffix:
            write_manifest(manifest, place / MANIFEST)
    if target.suffix:
        write_manifest(manifest, manifest_file(target))
    return Resharded(
        source=str(source),
        out=str(target),
        world_size=world_size,
        num_tensors=len(layout.tensors),
        size_bytes=sum(tensor.size_bytes for tensor in layout.tensors),
        checked=stored.manifest is not None,
        ranks=_shares(layout.tensors, world_size),
        checksums={record.key: record.checksum for record in manifest.tensors},
        notes=(*layout.notes, *writer.notes),
    )


def _check(source: Path, target: Path, world_size: int) -> None:
    problems = []
    if world_size < 1:
        problems.append(Problem("--world-size", "must be at least 1", world_size))
    allowed = (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)
    if target.suffix and target.suffix not in allowed:
        what = f"must be a folder's name without a dot, or end in {', '.join(allowed)}"
        problems.append(Problem("--out", what, target.name))
    elif target.suffix and world_size > 1:
        problems.append(
            Problem("--out", "one file is for --world-size 1", target.name, "Name a folder.")
        )
    if source.resolve() == target.resolve():
        problems.append(Problem("--out", "must not be the checkpoint itself", str(target)))
    if problems:
        raise UsageError(problems=problems)


@contextmanager
def _writer(
    stored: StoredCheckpoint, layout: Layout, target: Path, overwrite: bool
) -> Iterator[tuple[Writer, Path]]:
    """Give a writer beside the target; it takes the target's place when the block ends well."""
    tensors, objects = layout.tensors, stored.objects
    needed_bytes = sum(tensor.size_bytes for tensor in tensors)
    if not target.suffix:
        with staged_output(target, overwrite=overwrite, needed_bytes=needed_bytes) as partial:
            yield FolderWriter(partial, tensors, objects), partial
        return
    with staged_file(target, overwrite=overwrite) as partial:
        check_free_space(partial.parent, needed_bytes)
        try:
            if target.suffix == SAFETENSORS_SUFFIX:
                beside = optimizer_file(partial)
                yield SafetensorsWriter(partial, tensors, objects, beside), partial
                manifest_file(target).unlink(missing_ok=True)
                optimizer_file(target).unlink(missing_ok=True)
                if beside.is_file():
                    note = f"everything but the weights: {optimizer_file(target)}"
                    layout.notes.append(note)
                    beside.replace(optimizer_file(target))
            else:
                yield TorchWriter(partial, tensors, objects), partial
                manifest_file(target).unlink(missing_ok=True)
        finally:
            optimizer_file(partial).unlink(missing_ok=True)


def _copy(
    stored: StoredCheckpoint, layout: Layout, writer: Writer, progress: Callable[[str], None]
) -> None:
    records = records_of(stored)
    for number, tensor in enumerate(layout.tensors, 1):
        size = format_bytes(tensor.size_bytes)
        progress(f"{tensor.key} ({size}), {number} of {len(layout.tensors)}")
        known = [(item, records.get(item.key)) for item in tensor.stored]
        plain = tensor.rows is tensor.stored[0]
        for item, record in known:
            if record is not None and not plain:
                for error in damaged_parts(item, record):
                    raise error
        _copy_rows(tensor, writer, known[0][1] if plain else None)


def _copy_rows(tensor: TargetTensor, writer: Writer, record: TensorRecord | None) -> None:
    places = writer.places(tensor.key)
    expected = {} if record is None else expected_blocks(record)
    row_bytes = tensor.num_columns * tensor.dtype.itemsize
    for start, stop in steps(tensor.num_rows, row_bytes):
        values = tensor.rows.read_rows(start, stop)
        for place in places:
            place.write(values, start)
        block = start // BLOCK_ROWS
        ends = stop == tensor.num_rows or stop % BLOCK_ROWS == 0
        if not ends or record is None or not tensor.num_columns:
            continue
        total = sum((place.blocks.get(block, Checksum()) for place in places), Checksum())
        if expected.get(block) != total:
            rows = block * BLOCK_ROWS, stop
            for error in damaged_parts(tensor.stored[0], record, rows):
                raise error
            where = f"{tensor.stored[0].pieces[0].file}: {tensor.key}"
            what = f"rows {rows[0]:,} to {stop - 1:,} changed while they were read"
            raise CheckpointError(problems=[Problem(where, what)])


def _shares(tensors: Sequence[TargetTensor], world_size: int) -> tuple[RankShare, ...]:
    counts, sizes = [0] * world_size, [0] * world_size
    for tensor in tensors:
        for cut in tensor.cuts:
            counts[cut.rank] += 1
            sizes[cut.rank] += cut.num_rows * cut.num_columns * tensor.dtype.itemsize
    return tuple(
        RankShare(rank=rank, num_shards=counts[rank], size_bytes=sizes[rank])
        for rank in range(world_size)
    )
