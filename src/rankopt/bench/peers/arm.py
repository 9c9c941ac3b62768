"""A peer as an arm of a timing run: what the worker loads.

An arm may hold several settings, each for some batch sizes: a peer's best number of threads at
batch 1 is not that at batch 2048, and who deploys it would choose too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rankopt.bench.arms import ArmSpec
from rankopt.bench.peers.peer import Peer, PeerJob, Setting
from rankopt.bench.peers.registry import find_peer

if TYPE_CHECKING:
    from torch import Tensor

    from rankopt.bench.arms import ArmCallable

KIND = "peer"


def peer_arm(
    label: str,
    peer: Peer,
    job: PeerJob,
    settings: Sequence[tuple[Setting, Path | None]],
    by_batch: Mapping[int, int] | None = None,
) -> ArmSpec:
    """Describe a peer with chosen settings.

    Args:
        label: the arm's name.
        peer: how it serves.
        job: the model, its weights, the thread budget.
        settings: each setting with its prepared files.
        by_batch: batch size -> position in `settings`; needed where there are several.
    """
    options = {
        "peer": peer.kind,
        "config": peer.model_dump(mode="json"),
        "job": job.model_dump(mode="json"),
        "settings": [[s, str(folder) if folder else None] for s, folder in settings],
        "by_batch": {str(size): position for size, position in (by_batch or {}).items()},
    }
    return ArmSpec(label=label, kind=KIND, options=options)


def load_peer_arm(spec: ArmSpec) -> ArmCallable:
    """Load a peer in its worker.

    Raises:
        PeerError: the peer cannot serve the model.
    """
    options = spec.options
    peer = find_peer(options["peer"]).model_validate(options["config"])
    job = PeerJob.model_validate(options["job"])
    if spec.num_threads:
        job = job.model_copy(update={"num_threads": spec.num_threads})
    loaded = [
        peer.load(job, setting, Path(folder) if folder else None)
        for setting, folder in options["settings"]
    ]
    if len(loaded) == 1:
        return loaded[0]
    by_batch = {int(size): loaded[position] for size, position in options["by_batch"].items()}
    return _by_batch_size(by_batch, *_row_count(job))


def _row_count(job: PeerJob) -> tuple[str, int]:
    """Name a tensor whose first dim tells the rows of a batch, and how many entries a row has."""
    from rankopt.models.card import KjtInput, RaggedIdsInput

    first = job.load_card().inputs[0]
    if isinstance(first, KjtInput):
        return f"{first.name}.lengths", len(first.features)
    if isinstance(first, RaggedIdsInput):
        return f"{first.name}.lengths", 1
    return first.name, 1


def _by_batch_size(by_batch: Mapping[int, ArmCallable], name: str, per_row: int) -> ArmCallable:
    sizes = sorted(by_batch)
    table: dict[int, ArmCallable] = {size * per_row: run for size, run in by_batch.items()}

    def run(features: dict[str, Tensor]) -> dict[str, Tensor]:
        length = features[name].shape[0]
        chosen = table.get(length)
        if chosen is None:  # a size that was not searched: that of the next larger one
            rows = length // per_row
            chosen = by_batch[next((size for size in sizes if size >= rows), sizes[-1])]
        return chosen(features)

    return run
