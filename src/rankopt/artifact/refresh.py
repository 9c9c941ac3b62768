"""Put new weights into an artifact: the kept passes run again, the compiler does not.

The compiled graph reads its weights by name from `weights/`, so retraining needs new constants and
no new code, as long as the passes make constants of the same names, types and shapes from the new
checkpoint. That is checked here, and the result is run in a fresh process like any artifact: values
that the compiler had drawn into the code would show there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rankopt.artifact.build import make_checks, now, without_handles
from rankopt.artifact.constants import write_constants
from rankopt.artifact.manifest import (
    CHECKS,
    CONSTANTS,
    MANIFEST,
    PASSES,
    REQUEST_CHECKS,
    REQUEST_CONSTANTS,
    ConstantEntry,
    Manifest,
    card_of,
    damaged_files,
    read_manifest,
)
from rankopt.artifact.parts import PARTS, mismatches, write_parts
from rankopt.artifact.requests import named_for_requests, write_request_checks
from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.export import trace_example
from rankopt.capture.parts import EagerPart, parts_in
from rankopt.environment import collect_environment
from rankopt.errors import ArtifactError, Problem
from rankopt.hashes import sha256_file
from rankopt.jobs.decisions import read_passes
from rankopt.kernels.build import load_kernels
from rankopt.kernels.ops import current_isa
from rankopt.models.build import build_model
from rankopt.output import staged_output
from rankopt.passes.base import PassContext
from rankopt.passes.forms import apply_to_forms
from rankopt.runtime import check_machine, load_operators

AGAIN = "Build it anew: rankopt optimize RECIPE --model CARD --checkpoint CHECKPOINT --out DIR"


def refresh_artifact(
    artifact: str | Path,
    checkpoint: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a copy of an artifact with the weights of another checkpoint of the same model.

    No data is needed: the graph is traced on made-up rows that keep the contract.

    Args:
        artifact: the compiled artifact; it is left as it is.
        checkpoint: the new weights.
        out: the folder of the new artifact.
        overwrite: replace an artifact that `out` holds.
        progress: told one line per step.

    Returns:
        `out`.

    Raises:
        ArtifactError: the artifact is damaged or not for this machine; or the new weights lead to
            other constants than the compiled graph reads.
        CheckpointError: the checkpoint cannot be read or is of another model.
        OutputExistsError: `out` holds a result and `overwrite` is False.
    """
    source, target = Path(artifact), Path(out)
    manifest = read_manifest(source)
    check_machine(source, manifest)
    damaged = damaged_files(source, manifest)
    if damaged:
        raise ArtifactError(
            f"{source}: {'; '.join(damaged)}. Refresh a whole copy: its compiled code is kept."
        )
    with staged_output(target, overwrite=overwrite, needed_bytes=_size_bytes(manifest)) as stage:
        bundle = _rebuild(source, manifest, checkpoint, stage, progress)
        constants = _matching_constants(source, manifest, bundle)
        parts = _matching_parts(source, manifest, bundle)
        progress("writing the weights")
        for name in (*manifest.files, PASSES):
            if name not in (CONSTANTS, CHECKS, REQUEST_CHECKS) and not name.startswith(f"{PARTS}/"):
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, stage / name)
        _write_weights(stage, manifest, bundle, constants, parts)
        progress("proving the artifact in a fresh process")
        verification = verify_artifact(stage)
        if not verification.passed:
            raise ArtifactError(
                f"{source}: with the new weights its compiled code does not give what the passes "
                f"made of them ({'; '.join(verification.problems)}), so nothing was written. "
                + AGAIN
            )
    return target


def _size_bytes(manifest: Manifest) -> int:
    return manifest.size_bytes + manifest.code_bytes


def _rebuild(
    source: Path,
    manifest: Manifest,
    checkpoint: str | Path,
    workdir: Path,
    progress: Callable[[str], None],
) -> ModelBundle:
    """Export the card's model with the new weights and replay the passes that were kept."""
    card = card_of(manifest)
    recipe, records = read_passes(source / PASSES)
    kinds = [record.kind for record in records]
    if kinds != [step.kind for step in recipe.passes]:
        raise ArtifactError(
            f"{source / PASSES}: its records ({kinds}) are not of its recipe. {AGAIN}"
        )
    for step, record in zip(recipe.passes, records, strict=True):
        if record.kept and step.needs_rows:
            raise ArtifactError(
                f"{source / PASSES}: {step.kind} was calibrated on rows with the old weights, and "
                f"new ones need rows again. {AGAIN}"
            )
    load_operators(source, manifest)
    load_kernels()
    progress("reading the weights")
    built = build_model(card, checkpoint)
    for note in built.notes:
        progress(note)
    progress("exporting the model")
    bundle = build_bundle(card, built.module, trace_example(card), built.checkpoint)
    environment = collect_environment()
    for step, record in zip(recipe.passes, records, strict=True):
        if record.kept and step.purpose != "artifact":
            progress(f"{step.kind}: rewriting")
            context = PassContext(environment, workdir, choices=record.choices)
            bundle = apply_to_forms(step, bundle, context)
    return bundle


def _matching_constants(source: Path, manifest: Manifest, bundle: ModelBundle) -> dict[str, Tensor]:
    """Return what the compiled graph reads, or say why the new weights do not fit it.

    The compiler leaves out constants that nothing reads, so the bundle may hold more.
    """
    available = bundle.constants
    entries = list(manifest.constants)
    if manifest.requests is not None:
        if bundle.requests is None:
            raise ArtifactError(
                f"{source}: with the new weights no pass makes the form with request_index. {AGAIN}"
            )
        entries += manifest.requests.constants
        available |= named_for_requests(bundle.requests.constants)
    problems = [
        problem for entry in entries if (problem := _mismatch(source, entry, available)) is not None
    ]
    if problems:
        raise ArtifactError(
            f"{source}: the new weights do not fit the compiled graph. {AGAIN}", problems=problems
        )
    return {entry.name: available[entry.name] for entry in entries}


def _matching_parts(source: Path, manifest: Manifest, bundle: ModelBundle) -> dict[str, EagerPart]:
    """Return the parts that the compiled graph calls, with the new weights."""
    parts = parts_in(bundle.program.module(check_guards=False), bundle.parts)
    problems = mismatches(source, manifest.parts, parts)
    if problems:
        raise ArtifactError(
            f"{source}: the new weights do not fit the compiled graph. {AGAIN}", problems=problems
        )
    return parts


def _mismatch(
    source: Path, entry: ConstantEntry, available: Mapping[str, Tensor]
) -> Problem | None:
    where = f"{source}: constant {entry.name}"
    if entry.name not in available:
        return Problem(where, "is read by the compiled graph, but the passes made none")
    value = available[entry.name]
    got = _form(str(value.dtype).removeprefix("torch."), tuple(value.shape))
    wanted = _form(entry.dtype, entry.shape)
    return None if got == wanted else Problem(where, f"must be {wanted}", got)


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {list(shape)}"


def _write_weights(
    stage: Path,
    manifest: Manifest,
    bundle: ModelBundle,
    constants: Mapping[str, Tensor],
    parts: Mapping[str, EagerPart],
) -> None:
    """Write constants, parts, checks, and a manifest with their hashes."""
    entries = write_constants(without_handles(constants, parts), stage / CONSTANTS)
    stored = write_parts(parts, stage)
    save_file(make_checks(bundle), stage / CHECKS)
    more: tuple[str, ...] = ()
    requests = manifest.requests
    if requests is not None:
        write_request_checks(bundle, stage)
        more = (REQUEST_CHECKS,)
        own = tuple(entry for entry in entries if entry.name.startswith(REQUEST_CONSTANTS))
        requests = requests.model_copy(update={"constants": own})
    written = (CONSTANTS, CHECKS, *more, *stored.files)
    changed = {name: sha256_file(stage / name) for name in written}
    kept = {
        name: digest for name, digest in manifest.files.items() if not name.startswith(f"{PARTS}/")
    }
    refreshed = manifest.model_copy(
        update={
            "made_at": now(),
            "constants": tuple(e for e in entries if not e.name.startswith(REQUEST_CONSTANTS)),
            "requests": requests,
            "files": {**kept, **changed},
            "parts": stored.entries,
            "part_code": dict(stored.code),
            "part_packages": dict(stored.packages),
            "judged_isa": current_isa(),
            "checkpoint": bundle.checkpoint,
        }
    )
    (stage / MANIFEST).write_text(refreshed.model_dump_json(indent=2) + "\n", encoding="utf-8")
