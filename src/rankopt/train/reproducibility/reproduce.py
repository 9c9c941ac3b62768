"""Train again by run.json, and say whether the same weights came out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file
from torch import Tensor

from rankopt.data.splits import Splits, open_splits
from rankopt.errors import DataError, InputError, Problem, UsageError
from rankopt.models.card import ModelCard
from rankopt.train.distributed.ranks import Ranks
from rankopt.train.loop import train
from rankopt.train.reproducibility.describe import hash_of_hashes, hash_split, hash_tensors
from rankopt.train.reproducibility.differences import Difference, find_differences
from rankopt.train.reproducibility.run_manifest import RunManifest, read_run
from rankopt.train.state import CHECKPOINT_NAME, OPTIMIZER_NAME

_GIVE_DATA = "Name the rows of then with --data PATH."


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NeChange(_Frozen):
    """Best validation NE of both runs."""

    then: float
    now: float
    change: float
    """Relative; above 0 is worse."""


class WeightChange(_Frozen):
    """How the weights of both runs differ; sizes are None where those of then are gone."""

    num_tensors: int
    differing: tuple[str, ...]
    """Names of tensors, in the module's order."""
    largest: float | None = None
    """Largest absolute difference of a value."""
    relative: float | None = None
    """Norm of the difference over the norm of the weights of then."""
    worst: str | None = None
    """The tensor that the largest difference is in."""


class Reproduction(_Frozen):
    """What training again gave."""

    run: str
    out: str | None
    """Where the second run was written; None where it was not kept."""
    verdict: Literal["pass", "fail"]
    """pass: the weights are the same, bit for bit."""
    reasons: tuple[str, ...]
    ne: NeChange
    weights: WeightChange
    differences: tuple[Difference, ...]
    """Between the runs' code, environment and data, the likeliest cause first."""


def reproduce(
    run: str | Path,
    out: str | Path | None = None,
    *,
    data: str | Path | None = None,
    save_optimizer: bool = False,
    overwrite: bool = False,
    command: str = "rankopt.train.reproducibility.reproduce.reproduce",
    progress: Callable[[str], None] = lambda line: None,
    ranks: Ranks | None = None,
) -> Reproduction:
    """Train again exactly as a manifest says, and compare.

    Card, recipe and settings are those in the manifest, whatever their files say today; threads are
    as many as then.

    Args:
        run: the folder of an earlier run, or its run.json.
        out: the folder to write the new run to; a temporary one when None.
        data: where the rows are now; they must be the same.
        save_optimizer: as for `train`.
        overwrite: replace what `out` holds.
        command: what to write into the new run.json as the command that was run.
        progress: called with one line per step.
        ranks: the processes that train together, as many as then, each of which calls this; they
            need an `out` that all of them see.

    Raises:
        UsageError: several ranks without `out`.
        InputError: the manifest cannot be read; or the run cannot be tried, since its data or the
            checkpoint it started from are gone or have changed, or it was made by other ranks.
    """
    file, manifest = read_run(run)
    card = manifest.model_card()
    recipe = manifest.training_recipe()
    joined = ranks or Ranks.alone()
    if out is None and not joined.is_alone:
        raise UsageError(problems=[Problem("--out", "is required where several ranks train")])
    splits = _same_rows(file, manifest, card, data, joined)
    start = None if manifest.start is None else Path(manifest.start.path).parent
    settings = manifest.settings.model_copy(update={"num_threads": manifest.machine.num_threads})
    with tempfile.TemporaryDirectory(prefix="rankopt-reproduce-") as folder:
        target = Path(folder) / "run" if out is None else Path(out)
        progress(f"training {card.name} as {file} says")
        result = train(
            card,
            splits,
            target,
            settings,
            progress,
            recipe=recipe,
            start=start,
            save_optimizer=save_optimizer,
            overwrite=overwrite,
            command=command,
            ranks=joined,
        )
        again = read_run(result.out)[1]
        weights = _compare_weights(file, manifest, again, result.out)
    ne = NeChange(
        then=manifest.outcome.best_ne,
        now=again.outcome.best_ne,
        change=again.outcome.best_ne / manifest.outcome.best_ne - 1,
    )
    differences = tuple(find_differences(manifest, again))
    same = not weights.differing
    return Reproduction(
        run=str(file),
        out=None if out is None else str(out),
        verdict="pass" if same else "fail",
        reasons=tuple(_reasons(ne, weights, differences)),
        ne=ne,
        weights=weights,
        differences=differences,
    )


def _same_rows(
    file: Path, manifest: RunManifest, card: ModelCard, data: str | Path | None, ranks: Ranks
) -> Splits:
    """Open the rows, and refuse a run that cannot be the same; everything is listed.

    Raises:
        InputError: data, ranks or the checkpoint to start from are not those of then.
    """
    problems = [*_ranks(file, manifest, ranks), *_start(file, manifest)]
    try:
        splits = open_splits(card, manifest.data.given if data is None else data)
    except DataError as error:
        problems += [
            Problem(p.where, p.what, p.got, f"{p.hint or ''} {_GIVE_DATA}".strip())
            for p in error.problems
        ]
        raise DataError(problems=problems) from error
    problems += _changed_rows(file, manifest, card, splits)
    if problems:
        raise InputError(problems=problems)
    return splits


def _changed_rows(
    file: Path, manifest: RunManifest, card: ModelCard, splits: Splits
) -> Iterator[Problem]:
    found = splits.by_name
    known = manifest.data.splits
    for name in sorted(known.keys() ^ found.keys()):
        what = f"the run had {'no ' if name in found else ''}{name} rows"
        yield Problem(f"{file}: data.splits.{name}", what, hint=_GIVE_DATA)
    for name, record in known.items():
        if name not in found:
            continue
        source = found[name]
        digest = hash_split(card, source, record.hashed)
        if digest != record.sha256:
            what = (
                f"{source.name} holds other rows than the run saw in {record.path}: "
                f"sha256 of their {record.hashed} must be {record.sha256}"
            )
            yield Problem(f"{file}: data.splits.{name}", what, digest, _GIVE_DATA)


def _ranks(file: Path, manifest: RunManifest, ranks: Ranks) -> Iterator[Problem]:
    """Refuse another number of ranks: sums would be split among others."""
    wanted, here = manifest.machine.world_size, ranks.world_size
    if here != wanted:
        hint = f"Start it with {wanted} ranks: `torchrun --nproc-per-node {wanted} -m rankopt ...`."
        yield Problem(f"{file}: machine.world_size", f"must be {wanted}", here, hint)


def _start(file: Path, manifest: RunManifest) -> Iterator[Problem]:
    hint = "The run went on from it; put it back."
    for name in ("start", "start_optimizer"):
        record = getattr(manifest, name)
        problem = None if record is None else record.problem(f"{file}: {name}", hint)
        if problem is not None:
            yield problem
    if manifest.start is not None and manifest.start_optimizer is None:
        added = Path(manifest.start.path).with_name(OPTIMIZER_NAME)
        if added.exists():
            what = f"{added} was not there then, and would be loaded"
            yield Problem(f"{file}: start", what, hint="Move it away.")


def _compare_weights(file: Path, then: RunManifest, now: RunManifest, folder: Path) -> WeightChange:
    old, new = then.outcome.weights, now.outcome.weights
    names = list(dict.fromkeys([*old, *new]))
    differing = tuple(name for name in names if old.get(name) != new.get(name))
    change = WeightChange(num_tensors=len(names), differing=differing)
    kept = file.parent / CHECKPOINT_NAME
    if not differing or not kept.is_file() or old.keys() != new.keys():
        return change
    before, after = load_file(kept), load_file(folder / CHECKPOINT_NAME)
    if hash_of_hashes(hash_tensors(before)) != then.outcome.weights_sha256:
        return change  # the checkpoint was replaced since
    if any(before[name].shape != after[name].shape for name in differing):
        return change
    return change.model_copy(update=_sizes(before, after))


def _sizes(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, float | str]:
    largest = {
        name: float((after[name].double() - value.double()).abs().max())
        for name, value in before.items()
        if value.numel()
    }
    squares = [
        torch.stack([(after[n].double() - v.double()).square().sum(), v.double().square().sum()])
        for n, v in before.items()
    ]
    apart, whole = torch.stack(squares).sum(0).sqrt().tolist()
    worst = max(largest, key=lambda name: largest[name])
    return {
        "largest": largest[worst],
        "relative": apart / whole if whole else float("inf"),
        "worst": worst,
    }


def _reasons(
    ne: NeChange, weights: WeightChange, differences: tuple[Difference, ...]
) -> Iterator[str]:
    if not weights.differing:
        yield f"all {weights.num_tensors} tensors are the same, bit for bit"
        if differences:
            yield f"{len(differences)} things differ from then, and made no difference"
        return
    text = f"{len(weights.differing)} of {weights.num_tensors} tensors differ"
    if weights.largest is not None:
        text += f", by up to {weights.largest:.3g} ({weights.worst}), {weights.relative:.3g} of all"
    else:
        text += f": {', '.join(weights.differing[:5])}"
    yield text
    yield f"best validation NE {ne.now:.6f}, then {ne.then:.6f} ({ne.change:+.3%})"
    if not differences:
        yield (
            "nothing that is recorded differs: the module may go by something that is not seeded, "
            "such as time, threads of its own or the order of a set"
        )
