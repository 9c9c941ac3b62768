"""Describe a run for its manifest: code, machine, rows, weights."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rankopt
from rankopt._version import __version__
from rankopt.data.encode import wanted_columns
from rankopt.data.identity import Hashed, format_of, hash_rows, hashed_as, num_rows
from rankopt.data.rowsource import RowSource
from rankopt.data.splits import Splits
from rankopt.environment import collect_environment
from rankopt.hashes import FileRecord, sha256_file
from rankopt.models.build import resolve_factory
from rankopt.models.card import ModelCard
from rankopt.models.checkpoint import read_checkpoint
from rankopt.recipe import Recipe, dump_recipe
from rankopt.sharding.manifest import read_manifest
from rankopt.train.reproducibility.determinism import arithmetic, environment_variables
from rankopt.train.reproducibility.run_manifest import (
    Code,
    DataRecord,
    Machine,
    Outcome,
    RunManifest,
    SplitRecord,
)
from rankopt.train.settings import TrainSettings
from rankopt.train.state import CHECKPOINT_NAME, OPTIMIZER_NAME

_SOURCES = (".py", ".cpp", ".h", ".cu", ".j2")


class RunDescription:
    """What a run depends on, taken down before its first step; `manifest` adds the outcome.

    Args:
        card: what is trained.
        splits: its rows; they are hashed here, before anything can change them.
        settings: as run.
        recipe: training passes, or None.
        start: the folder of the run that this one goes on from, or None.
        command: the command line, or what stands for it.
    """

    def __init__(
        self,
        card: ModelCard,
        splits: Splits,
        settings: TrainSettings,
        recipe: Recipe | None,
        start: Path | None,
        command: str,
    ) -> None:
        self._card, self._settings, self._recipe = card, settings, recipe
        self._command = command
        self._splits = splits.by_name
        self._given = splits.given
        self._hashes = {
            name: hash_split(card, source, hashed_as(source))
            for name, source in self._splits.items()
        }
        self._code = describe_code(card)
        self._start = None if start is None else start_record(start, CHECKPOINT_NAME)
        self._optimizer = None if start is None else start_record(start, OPTIMIZER_NAME)

    def identity(self, *, save_optimizer: bool) -> dict[str, Any]:
        """Describe, as JSON, what must be equal for a killed run to go on to the same weights."""
        records = {"weights": self._start, "optimizer": self._optimizer}
        found = {
            "settings": self._settings.model_dump(mode="json"),
            "card": self._card.model_dump(mode="json", exclude={"train", "checkpoint"}),
            "code": self._code.module,
            "recipe": None if self._recipe is None else dump_recipe(self._recipe),
            "data": self._hashes,
            "start": {name: record and record.sha256 for name, record in records.items()},
            "save_optimizer": save_optimizer,
        }
        result: dict[str, Any] = json.loads(json.dumps(found, default=str))
        return result

    def manifest(self, metrics: Mapping[str, Any], checkpoint: Path) -> RunManifest:
        """Join what the run began with and what came of it.

        Args:
            metrics: of metrics.json.
            checkpoint: the weights, as they were written.
        """
        card, ranks = self._card, metrics["ranks"]
        weights = hash_weights(checkpoint)
        return RunManifest(
            made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            command=self._command,
            code=self._code,
            machine=describe_machine(ranks["world_size"], ranks["launcher"]),
            card=card.model_dump(mode="json", exclude_none=True),
            card_folder=str(card.folder.resolve()),
            card_file=str(card.path) if card.path else None,
            recipe=None if self._recipe is None else dump_recipe(self._recipe),
            settings=self._settings,
            seeds=dict.fromkeys(("torch", "numpy", "python", "rows"), self._settings.seed),
            data=DataRecord(
                given=self._given,
                splits={
                    name: SplitRecord(
                        path=source.name,
                        format=format_of(source),
                        num_rows=self._count(name, source, metrics),
                        hashed=hashed_as(source),
                        sha256=self._hashes[name],
                    )
                    for name, source in self._splits.items()
                },
            ),
            start=self._start,
            start_optimizer=self._optimizer,
            outcome=Outcome(
                best_ne=min(float(point["validation_ne"]) for point in metrics["curve"]),
                test=metrics["test"],
                curve=tuple(metrics["curve"]),
                num_rows_seen=metrics["num_rows_seen"],
                weights=weights,
                weights_sha256=hash_of_hashes(weights),
            ),
        )

    def _count(self, name: str, source: RowSource, metrics: Mapping[str, Any]) -> int:
        """Count a split's rows, by what the run saw of them where it saw all."""
        if source.num_rows is not None:
            return source.num_rows
        if name != "train":
            return int(next(iter(metrics[name].values()))["num_rows"])
        if self._settings.evaluations_per_epoch == 1:
            return int(metrics["curve"][0]["num_rows_seen"])
        return num_rows(source, wanted_columns(self._card, source.column_names(), source.name))


def hash_split(card: ModelCard, source: RowSource, hashed: Hashed) -> str:
    """Hash the rows of a split, by the columns that the card reads where values count."""
    return hash_rows(source, wanted_columns(card, source.column_names(), source.name), hashed)


def start_record(folder: Path, name: str) -> FileRecord | None:
    """Hash a file of an earlier run; None where it wrote none."""
    file = folder / name
    return FileRecord.of(file) if file.is_file() else None


def describe_code(card: ModelCard) -> Code:
    """Hash rankopt's sources and the module's."""
    return Code(
        rankopt_version=__version__,
        git_commit=collect_environment().git_commit,
        rankopt_sha256=package_hash(Path(rankopt.__file__).parent),
        module=module_sources(card),
    )


def describe_machine(world_size: int, launcher: str) -> Machine:
    """Describe the machine and this process's way of computing."""
    return Machine(
        environment=collect_environment().model_dump(mode="json"),
        variables=environment_variables(),
        arithmetic=arithmetic(),
        num_threads=torch.get_num_threads(),
        world_size=world_size,
        launcher=launcher,
    )


def package_hash(root: Path) -> str:
    """Hash the sources of a package by their places and contents."""
    files = sorted(f for f in root.rglob("*") if f.suffix in _SOURCES and f.is_file())
    lines = [f"{file.relative_to(root).as_posix()} {sha256_file(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def module_sources(card: ModelCard) -> dict[str, str]:
    """Hash the factory's file, and what is loaded from its folder or below: it may import those.

    rankopt's own are left out, since its sources have a hash of their own; so are installed
    packages that happen to lie below.

    Returns:
        Path from the factory's folder -> sha256.
    """
    factory = factory_file(card)
    if factory is None:
        return {}
    folder = factory.parent
    loaded = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = {Path(file).resolve() for file in loaded if file and file.endswith(".py")}
    apart = [Path(rankopt.__file__).resolve().parent]
    apart += [
        place
        for name in (sys.prefix, sys.base_prefix)
        if (place := Path(name).resolve()).is_relative_to(folder)
    ]
    beside = {
        file
        for file in files
        if file.is_relative_to(folder) and not any(file.is_relative_to(place) for place in apart)
    }
    chosen = sorted(file for file in {factory, *beside} if file.is_file())
    return {file.relative_to(folder).as_posix(): sha256_file(file) for file in chosen}


def factory_file(card: ModelCard) -> Path | None:
    """Return the file that defines the card's factory; None where it has no Python source."""
    try:
        found = inspect.getsourcefile(inspect.unwrap(resolve_factory(card)))
    except TypeError:  # compiled code
        return None
    return None if found is None else Path(found).resolve()


def hash_weights(checkpoint: Path) -> dict[str, str]:
    """Hash each tensor of a checkpoint; of a folder that ranks wrote, take its own checksums."""
    shards = read_manifest(checkpoint) if checkpoint.is_dir() else None
    if shards is not None:
        return {record.key: record.checksum for record in shards.tensors}
    return hash_tensors(read_checkpoint(checkpoint).state)


def hash_tensors(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash each tensor by type, shape and bytes, whatever its device or strides."""
    found = {}
    for name, tensor in state.items():
        plain = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{plain.dtype} {list(plain.shape)}\n".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found


def hash_of_hashes(weights: Mapping[str, str]) -> str:
    """Join the hashes of tensors, in the order of their names."""
    lines = "\n".join(f"{name} {digest}" for name, digest in sorted(weights.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
