"""Load an artifact and score with it.

Takes and returns `dict[str, Tensor]`. With `request_index` among the features of an artifact built
for it, request-level inputs come once for each request. Weights are mapped from the artifact's
folder and shared by every process that loads it; inputs are checked against the contract on every
call.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankopt.artifact.constants import map_constants
from rankopt.artifact.contract import encode_contract, explain
from rankopt.artifact.gpu import GpuProgram, gpu_problems
from rankopt.artifact.judged import UnjudgedWarning, quality_with
from rankopt.artifact.manifest import (
    CONSTANTS,
    PROGRAM,
    REQUEST_PROGRAM,
    Manifest,
    read_manifest,
)
from rankopt.artifact.parts import load_parts
from rankopt.artifact.requests import RequestContract, request_constants
from rankopt.capture.parts import EagerPart, forget, take_failure
from rankopt.capture.requests import REQUEST_INDEX
from rankopt.environment import collect_environment
from rankopt.errors import ArtifactError, ContractError, Problem
from rankopt.kernels.build import load_kernels
from rankopt.kernels.ops import current_isa, schema_here


class LoadedArtifact:
    """A compiled model, ready to score. Calls from several threads take turns.

    Attributes:
        folder: where it lies.
        manifest: its contract.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._names = [entry.name for entry in manifest.inputs]
        self._outputs = [entry.name for entry in manifest.outputs]
        self._spec = encode_contract(manifest.inputs)
        self._max_batch = manifest.max_batch
        self._min_batch = manifest.min_batch
        self._lock = threading.Lock()
        self._is_gpu = manifest.target.device == "cuda"
        form = manifest.requests
        entries = (*manifest.constants, *(form.constants if form is not None else ()))
        mapped = map_constants(entries, folder / CONSTANTS)
        self._constants = {entry.name: mapped[entry.name] for entry in manifest.constants}
        self._request_constants = request_constants(manifest, mapped)
        parts = load_parts(folder, manifest)
        self._part_handles = [part.handle for part in parts.values()]
        for name, part in parts.items():
            self._constants[name] = torch.tensor([part.handle], dtype=torch.int64)
        packed = _pack_for_fbgemm(manifest.packed_for_fbgemm, self._constants)
        if form is not None:
            packed += _pack_for_fbgemm(form.packed_for_fbgemm, self._request_constants)
        self._release = weakref.finalize(self, _release_handles, packed, list(parts.values()))
        self._loader = self._open(PROGRAM, self._constants)
        self._requests: RequestContract | None = None
        if form is not None:
            self._requests = RequestContract(manifest.inputs, manifest.max_batch)
            self._request_loader = self._open(REQUEST_PROGRAM, self._request_constants)
        self._fits = torch.ops.rankopt.inputs_fit.default
        self._maps_ids = any(entry.out_of_range for entry in manifest.inputs)

    def __call__(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score B candidates.

        Args:
            features: the card's flat tensors by name; see `manifest.inputs` for their shapes. With
                `request_index` (int64 [B], the request of each candidate, in [0, R)) those that are
                request-level have R rows in place of B.

        Returns:
            One float tensor [B] per output, as the model says it (logit or probability).

        Raises:
            ContractError: the inputs break the contract; everything wrong is listed.
            ArtifactError: a part that stays eager raised, or the artifact was closed.
        """
        if not self._release.alive:
            raise ArtifactError(f"{self.folder}: was closed. Load it again.")
        if REQUEST_INDEX in features and REQUEST_INDEX not in self._names:
            return self._score_requests(features)
        try:
            inputs = [features[name] for name in self._names]
            if self._is_gpu:
                inputs = [given.cpu() for given in inputs]
            if self._maps_ids:
                inputs = torch.ops.rankopt.fitted_inputs(
                    inputs, self._spec, self._max_batch, self._min_batch
                )
                fits = len(inputs) > 0
            else:
                fits = self._fits(inputs, self._spec, self._max_batch, self._min_batch)
        except (KeyError, TypeError, RuntimeError):
            fits = False
        if not fits:
            self._refuse(features)
        with self._lock:
            try:
                scores = self._loader.boxed_run(inputs)
            except RuntimeError as error:
                self._explain_part(error)
                raise
        return dict(zip(self._outputs, scores, strict=True))

    def _score_requests(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        contract = self._requests
        if contract is None:
            hint = "Build it with the pass hoist_requests, or give every input a row per candidate."
            problem = Problem(f"input {REQUEST_INDEX}", "is not taken by this artifact", hint=hint)
            raise ContractError(f"{self.folder}: the call breaks the contract.", problems=[problem])
        try:
            inputs = [features[name] for name in contract.names]
            fits = contract.fits(inputs)
        except (KeyError, TypeError, AttributeError, IndexError, RuntimeError):
            fits = False
        if not fits:
            problems = contract.explain(features)
            problems = problems or [Problem("inputs", "break the artifact's contract")]
            raise ContractError(f"{self.folder}: the call breaks the contract.", problems=problems)
        with self._lock:
            scores = self._request_loader.boxed_run(inputs)
        return dict(zip(self._outputs, scores, strict=True))

    def close(self) -> None:
        """Free what was packed for this artifact; it cannot score afterwards."""
        with self._lock:
            self._release()

    def _explain_part(self, error: RuntimeError) -> None:
        """Say what a part raised: compiled code passes on neither its type nor its words."""
        if not self._part_handles:
            return
        said = take_failure(self._part_handles)
        if said is not None:
            raise ArtifactError(f"{self.folder}: {said}.") from error

    def _open(self, program: str, constants: dict[str, Tensor]) -> Any:
        """Open a compiled program and give it its weights, which a GPU gets a copy of."""
        if self._is_gpu:
            constants.update({name: value.cuda() for name, value in constants.items()})
        loader = _open_program(self.folder, program, alone=self._is_gpu)
        self._load_constants(loader, constants, program)
        if not self._is_gpu:
            return loader
        if program == REQUEST_PROGRAM:
            return GpuProgram(loader, self.manifest.target, len(self._names), 1)
        given = self.manifest.inputs
        rows = next(at for at, e in enumerate(given) if e.role not in ("values", "weights"))
        return GpuProgram(loader, self.manifest.target, rows, given[rows].groups)

    def _load_constants(
        self,
        loader: torch._C._aoti.AOTIModelPackageLoader,
        constants: dict[str, Tensor],
        program: str,
    ) -> None:
        try:
            loader.load_constants(constants, False, True, True)
        except RuntimeError as error:
            raise ArtifactError(
                f"{self.folder}: {program} reads other constants than {CONSTANTS} holds, so the "
                "two come from different artifacts. Copy the whole folder again."
            ) from error

    def _refuse(self, features: Mapping[str, Tensor]) -> None:
        problems = explain(self.manifest.inputs, features, self._max_batch, self._min_batch)
        if not problems:
            problems = [Problem("inputs", "break the artifact's contract")]
        raise ContractError(f"{self.folder}: the call breaks the contract.", problems=problems)


def _pack_for_fbgemm(
    layers: Mapping[str, tuple[str, str]], constants: dict[str, Tensor]
) -> list[int]:
    """Pack layers' weights and put the handles among the constants; returns the handles."""
    handles = []
    for handle, (weight, scale) in layers.items():
        packed = torch.ops.rankopt.fbgemm_pack(constants[weight], constants[scale])
        handles.append(packed)
        constants[handle] = torch.tensor([packed], dtype=torch.int64)
    return handles


def load_artifact(folder: str | Path) -> LoadedArtifact:
    """Load an artifact made by `rankopt optimize`.

    Warns:
        UnjudgedWarning: its quality was judged with another instruction set than kernels use here;
            the warning names both and the command that judges it again.

    Raises:
        ArtifactError: it is damaged, incomplete, or compiled for another machine.
        EnvironmentProblem: the kernels cannot be built here.
    """
    path = Path(folder).resolve()
    manifest = read_manifest(path)
    check_machine(path, manifest)
    load_operators(path, manifest)
    more = (REQUEST_PROGRAM,) if manifest.requests is not None else ()
    missing = [name for name in (PROGRAM, *more, CONSTANTS) if not (path / name).is_file()]
    if missing:
        raise ArtifactError(f"{path}: {' and '.join(missing)} is missing. Copy the whole folder.")
    size_bytes = (path / CONSTANTS).stat().st_size
    entries = [*manifest.constants, *(manifest.requests.constants if manifest.requests else ())]
    if any(entry.offset + entry.size_bytes > size_bytes for entry in entries):
        raise ArtifactError(
            f"{path / CONSTANTS}: is truncated ({size_bytes} bytes). Copy the folder again."
        )
    quality, why = quality_with(path, manifest, current_isa())
    if quality != "pass":
        warnings.warn(f"{path}: {why}", UnjudgedWarning, stacklevel=2)
    return LoadedArtifact(path, manifest)


def check_machine(path: Path, manifest: Manifest) -> None:
    """Refuse compiled code that this machine or this torch cannot run.

    Raises:
        ArtifactError: names what is missing.
    """
    here = collect_environment()
    target = manifest.target
    problems = gpu_problems(path, target) if target.device == "cuda" else []
    if target.architecture != here.architecture:
        problems.append(Problem(f"{path}: target", f"is {target.architecture}", here.architecture))
    lacking = sorted(set(target.isa) - set(here.isa))
    if lacking:
        problems.append(
            Problem(
                f"{path}: target",
                f"was compiled with {', '.join(lacking)}, which this CPU lacks",
                hint="Build it on the machine that serves: rankopt optimize ... --out DIR",
            )
        )
    wanted, found = manifest.libraries.get("torch"), here.libraries.get("torch")
    if wanted != found:
        problems.append(
            Problem(
                f"{path}: torch",
                f"must be {wanted}, with which it was compiled",
                found,
                f"Install it: pip install torch=={wanted}, or build the artifact again.",
            )
        )
    if problems:
        raise ArtifactError(problems=problems)


def load_operators(path: Path, manifest: Manifest) -> None:
    """Load the operator libraries that compiled code calls, before it is loaded itself.

    Raises:
        ArtifactError: an operator is gone or takes other arguments than when the code was compiled.
    """
    load_kernels()
    if "fbgemm" in manifest.operators:
        import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
    problems = [
        Problem(
            f"{path}: operators",
            f"was compiled for {schema}",
            schema_here(name) or f"no {name} in this version of rankopt",
            "Build it again with this version: rankopt optimize ... --out DIR",
        )
        for name, schema in manifest.operator_schemas.items()
        if schema != schema_here(name)
    ]
    if problems:
        raise ArtifactError(problems=problems)


def _open_program(
    folder: Path, program: str, *, alone: bool = False
) -> torch._C._aoti.AOTIModelPackageLoader:
    # `alone` leaves out the waiting between threads, which a CUDA graph cannot record.
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(folder / program), "model", alone, 1, -1)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise ArtifactError(
            f"{folder / program}: cannot be loaded: {first} "
            f"Check the files with: rankopt verify {folder}"
        ) from error


def _release_handles(handles: list[int], parts: list[EagerPart]) -> None:
    forget(parts)
    for handle in handles:
        torch.ops.rankopt.fbgemm_release(handle)
