"""Save and load the sharded state of a training run: whole or not at all, and in the background.

Every rank writes its own shards into a folder beside the checkpoint; when all have, the first rank
writes the index and the checksums and renames the folder. A save that is killed leaves the last
checkpoint as it was. Checksums are of each shard's own rows, so no rank sees more than it holds.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult

from rankopt.errors import CheckpointError, Problem, RankoptError
from rankopt.models.dcp import SafeReader, check_shards, read_index
from rankopt.output import recover_folder, replace_folder
from rankopt.sharding.checksums import BLOCK_ROWS, Checksum, block_checksums
from rankopt.sharding.manifest import (
    MANIFEST,
    PieceRecord,
    ShardsManifest,
    TensorRecord,
    write_manifest,
)

State = dict[str, Any]


def training_state(model: Any, optimizer: Any = None, **extra: Any) -> State:
    """Collect what a run needs to go on; the weights stand under `model`.

    Args:
        model: a module or a DistributedModelParallel.
        optimizer: such as `model.fused_optimizer`, or any other with a state dict.
        extra: plain values and tensors, such as `step=1000`.
    """
    state = {"model": model.state_dict(), **extra}
    if optimizer is not None:
        state["optimizer"] = optimizer.state_dict()
    return state


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, future: Future[Any], folder: Path) -> None:
        self._future, self._folder = future, folder
        self._waited = False

    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is in its place.

        Raises:
            CheckpointError: a rank could not write; the last checkpoint is as it was. Told once.
        """
        if not self._waited:
            self._waited = True
            _told(self._folder, "cannot be written", self._future.result)


class ShardedCheckpoint:
    """A checkpoint folder that all ranks write and read together.

    Args:
        folder: where; replaced by each save.
        process_group: of the ranks, with a CPU backend. Where None and the process group is set
            up, a gloo group is made, so that saves in the background do not mix with the step's
            collectives: then every rank has to come here. Without a process group one process
            saves alone.
    """

    def __init__(self, folder: str | Path, *, process_group: Any = None) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self._alone = not (distributed.is_available() and distributed.is_initialized())
        self._group = process_group
        if self._group is None and not self._alone:
            self._group = distributed.new_group(backend="gloo")
        self._pending: PendingSave | None = None

    def save(self, state: State) -> None:
        """Write the state; returns when it is on the disk and in its place.

        Raises:
            CheckpointError: a rank could not write; the last checkpoint is as it was.
        """
        self.wait()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        _told(
            self.folder,
            "cannot be written",
            lambda: save(
                state,
                storage_writer=_AtomicWriter(self.folder),
                process_group=self._group,
                no_dist=self._alone,
            ),
        )

    def save_async(self, state: State) -> PendingSave:
        """Copy the state now and write the copy in the background; one save at a time.

        Raises:
            CheckpointError: the save before this one failed.
        """
        self.wait()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        future: Any = async_save(
            state,
            storage_writer=_AtomicWriter(self.folder),
            process_group=self._group,
            no_dist=self._alone,
        )
        self._pending = PendingSave(future, self.folder)
        return self._pending

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def load(self, state: State) -> State:
        """Read into the tensors of a state, in place, and return it; values are replaced.

        Whatever was written by any number of ranks is cut as the state is. Only row-wise optimizer
        state of tables that were or are cut by columns has to be resharded first.

        Raises:
            CheckpointError: it is missing, damaged, or does not hold what the state asks for.
        """
        self.wait()
        first = self._alone or distributed.get_rank(self._group) == 0
        if first and not self.folder.exists():
            recover_folder(self.folder)
        if not self._alone:
            distributed.barrier(self._group)
        reader = SafeReader(str(self.folder))
        if not (self.folder / ".metadata").is_file():
            what = "is not a torch.distributed.checkpoint folder: it holds no .metadata"
            raise CheckpointError(problems=[Problem(str(self.folder), what)])
        metadata = read_index(self.folder, reader)
        check_shards(self.folder, metadata)
        _told(
            self.folder,
            "cannot be read into this state",
            lambda: load(
                state,
                storage_reader=reader,
                planner=_SafeLoadPlanner(),
                process_group=self._group,
                no_dist=self._alone,
            ),
        )
        return state


def _told(folder: Path, what: str, work: Callable[[], Any]) -> None:
    """Turn what torch raises into a problem with a next step."""
    try:
        work()
    except RankoptError:
        raise
    # PyTorch wraps what the ranks raised, and its wrapper is no Exception.
    except (Exception, CheckpointException) as error:
        first: BaseException = error
        if isinstance(error, CheckpointException):
            first = next(iter(error.failures.values()))[0]
        if isinstance(first, RankoptError):
            raise first from error
        text = str(first).strip() or type(first).__name__
        hint = None
        if "size" in text.lower() and "mismatch" in text.lower():
            hint = "Cut it for this plan first: rankopt shard reshard ... --plan FILE."
        problem = Problem(str(folder), what, text.splitlines()[0][:300], hint)
        raise CheckpointError(problems=[problem]) from error


class _SafeLoadPlanner(DefaultLoadPlanner):
    """PyTorch's planner, with values read without running code that they may hold."""

    def create_local_plan(self) -> LoadPlan:
        # PyTorch takes keys that nobody asks for, such as other ranks', for signs of the format of
        # version 2.3, and then asks for keys of that format.
        if self.metadata is not None and self.state_dict.keys() <= _keys(self.metadata):
            return create_default_local_load_plan(self.state_dict, self.metadata)
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        if read_item.type != LoadItemType.BYTE_IO:
            raise ValueError(f"{read_item.dest_index.fqn} is a tensor")
        *parents, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for key in parents:
            place = place[key]
        place[last] = torch.load(value, weights_only=True)


def _keys(metadata: Metadata) -> set[str]:
    return set(metadata.state_dict_metadata)


class _AtomicWriter(FileSystemWriter):
    """PyTorch's writer into a folder beside the target, which takes its place at the end."""

    def __init__(self, target: Path) -> None:
        super().__init__(target.with_name(f"{target.name}.partial-save"))
        self._target = target
        self._partial = Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._partial.mkdir(parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # On the first rank, when all have planned and before any writes: what a killed save left.
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True, exist_ok=True)
        return super().prepare_global_plan(plans)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        written = super().write_data(plan, planner)
        results = written.wait()
        files = {result.index: result.storage_data.relative_path for result in results}
        records = [
            [item.index.fqn, _record(item, planner.resolve_data(item), files[item.index])]
            for item in plan.items
            if item.type != WriteItemType.BYTE_IO
        ]
        name = f".sums-{plan.storage_data.prefix}.json"
        (self._partial / name).write_text(json.dumps(records), encoding="utf-8")
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        pieces: dict[str, list[PieceRecord]] = {}
        for file in sorted(self._partial.glob(".sums-*.json")):
            for key, record in json.loads(file.read_text(encoding="utf-8")):
                pieces.setdefault(key, []).append(PieceRecord.model_validate(record))
            file.unlink()
        tensors = tuple(
            _tensor_record(key, entry, pieces.get(key, []))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        )
        manifest = ShardsManifest(block_rows=BLOCK_ROWS, world_size=len(results), tensors=tensors)
        write_manifest(manifest, self._partial / MANIFEST)
        replace_folder(self._target, self._partial)


def _record(item: WriteItem, values: Tensor | io.BytesIO, file: str) -> dict[str, Any]:
    data = item.tensor_data
    if data is None or not isinstance(values, Tensor):
        raise TypeError(f"{item.index.fqn} is no tensor")
    sizes, offsets = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    rows = values.detach().reshape(sizes[0] if sizes else 1, -1) if values.numel() else None
    row, column = (offsets[0] if offsets else 0), (offsets[1] if len(offsets) == 2 else 0)
    sums = [] if rows is None else block_checksums(rows, row, column)
    return {
        "file": file,
        "row_offset": row,
        "num_rows": sizes[0] if sizes else 1,
        "column_offset": column,
        "num_columns": torch.Size(sizes[1:]).numel(),
        "checksums": [str(one) for one in sums],
    }


def _tensor_record(
    key: str, entry: TensorStorageMetadata, pieces: list[PieceRecord]
) -> TensorRecord:
    total = sum((Checksum.parse(t) for piece in pieces for t in piece.checksums), Checksum())
    return TensorRecord(
        key=key,
        shape=tuple(entry.size),
        dtype=str(entry.properties.dtype).removeprefix("torch."),
        checksum=str(total),
        pieces=tuple(sorted(pieces, key=lambda p: (p.row_offset, p.column_offset))),
    )
