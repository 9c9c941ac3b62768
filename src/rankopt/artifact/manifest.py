"""manifest.json: what an artifact is, what it takes, what it needs, and the hash of every file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.artifact.contract import InputContract
from rankopt.errors import ArtifactError
from rankopt.hashes import FileRecord, sha256_file
from rankopt.models.card import ModelCard
from rankopt.problems import problems_of_validation

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
PROGRAM = "model.pt2"
CONSTANTS = "weights/constants.bin"
CHECKS = "checks.safetensors"
PASSES = "passes.json"
REQUEST_PROGRAM = "requests.pt2"
REQUEST_CHECKS = "request-checks.safetensors"
REQUEST_CONSTANTS = "requests/"
"""Begins the names of constants that the second form reads; equal bytes are stored once."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ConstantEntry(_Frozen):
    """One tensor in `weights/constants.bin`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    sha256: str


class PartEntry(_Frozen):
    """A submodule that the compiled graph calls and that runs as Python."""

    id: str
    module: str
    """Its path in the model, such as `interest_extractor`."""
    class_name: str
    file: str
    handle: str
    """The constant by which the graph names it, set anew whenever the artifact is loaded."""
    signature: str
    """Digest of the calls: compiled code fits parts of the same one alone."""
    why: str
    size_bytes: int


class RequestForm(_Frozen):
    """The form of a call that brings request-level inputs once, and `request_index`."""

    constants: tuple[ConstantEntry, ...]
    packed_for_fbgemm: dict[str, tuple[str, str]] = Field(default_factory=dict)
    counted_candidates: int
    """Candidates of the one request that operations were counted for."""
    operations: int
    """Multiply-adds of that call."""
    operations_before: int
    """Multiply-adds of the same candidates in the plain form."""


class OutputEntry(_Frozen):
    """One score: its name, and whether it is a logit or a probability."""

    name: str
    activation: Literal["logit", "probability"]


class Target(_Frozen):
    """The machine that the compiled code is for."""

    device: Literal["cpu", "cuda"]
    architecture: str
    isa: tuple[str, ...]
    """Instruction sets of the machine it was compiled on: the code may use any of them."""
    gpus: tuple[str, ...] = ()
    capability: str | None = None
    """Compute capability of the GPU it was compiled for, such as 9.0; code runs on no other."""
    tf32: bool | None = None
    """Whether fp32 matrices are multiplied in TF32; None on a CPU."""
    graph_batch: int = 0
    """Batches up to this are replayed as CUDA graphs."""


class Manifest(_Frozen):
    """The whole of manifest.json."""

    format_version: int = FORMAT_VERSION
    model: str
    recipe: str | None = None
    made_at: str
    target: Target
    inputs: tuple[InputContract, ...]
    outputs: tuple[OutputEntry, ...]
    max_batch: int
    min_batch: int = 1
    """Fewest rows of a call: the card's, where the module's own code cannot score a single one."""
    constants: tuple[ConstantEntry, ...]
    packed_for_fbgemm: dict[str, tuple[str, str]] = Field(default_factory=dict)
    """Handle constant -> its weight and scale constants, packed when the artifact is loaded."""
    requests: RequestForm | None = None
    """None where the artifact takes the plain form alone."""
    parts: tuple[PartEntry, ...] = ()
    """Submodules that stay eager. An artifact that has any needs Python, and their code."""
    part_code: dict[str, str] = Field(default_factory=dict)
    """Python module -> its source file under parts/, for code that is no installed package."""
    part_packages: dict[str, str] = Field(default_factory=dict)
    """Installed package -> version, of the parts' classes."""
    arithmetic: dict[str, str] = Field(default_factory=dict)
    """Layer -> int8, fp16, fp32 or fbgemm, where timing on the target machine chose."""
    capture: tuple[str, ...] = ()
    """What tracing the module assumed, left out or rewrote."""
    operators: tuple[str, ...]
    """Operator libraries to load first: `fbgemm`, `rankopt`."""
    operator_schemas: dict[str, str] = Field(default_factory=dict)
    """rankopt's operators in the compiled code -> their signatures then. The code calls their C
    entry points, and one argument more or less would be read from wherever the stack holds it."""
    judged_isa: str
    """The kernels' instruction set with which passes were judged and the artifact was checked.
    `judged/` has what was found with others."""
    libraries: dict[str, str]
    compiler_options: dict[str, Any]
    tolerance: float
    """Largest difference from the bundle's own outputs that the checks allow."""
    files: dict[str, str]
    """File -> sha256, of every file but this one and passes.json."""
    size_bytes: int
    """Bytes of weights/ and parts/: every stored copy of parameters and tables."""
    code_bytes: int
    control_size_bytes: int
    """Bytes of the eager model's parameters and buffers."""
    card: dict[str, Any]
    """The model card, so that data can be read for the artifact alone."""
    card_folder: str | None = None
    checkpoint: FileRecord | None = None
    """The weights that it was made of; None for random ones."""


def read_manifest(folder: Path) -> Manifest:
    """Read and check manifest.json.

    Raises:
        ArtifactError: there is none, it is damaged, or another version of rankopt wrote it.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ArtifactError(
            f"{folder}: holds no {MANIFEST}, so it is no rankopt artifact. "
            "Make one with: rankopt optimize RECIPE --model CARD --out DIR"
        )
    try:
        manifest = Manifest.model_validate_json(file.read_bytes())
    except ValidationError as error:
        problems = problems_of_validation(str(file), error, Manifest)
        raise ArtifactError(problems=problems) from error
    if manifest.format_version != FORMAT_VERSION:
        raise ArtifactError(
            f"{file}: has format {manifest.format_version}; this rankopt reads {FORMAT_VERSION}. "
            "Build the artifact again with this version."
        )
    return manifest


def damaged_files(folder: Path, manifest: Manifest) -> list[str]:
    """Name the files that are missing or differ from their hash, one sentence each."""
    found = []
    for name, expected in sorted(manifest.files.items()):
        file = folder / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif sha256_file(file) != expected:
            found.append(f"{name} differs from its hash in {MANIFEST}")
    return found


def card_of(manifest: Manifest) -> ModelCard:
    """Return the model card that an artifact carries, its relative paths still leading home."""
    card = ModelCard.model_validate(manifest.card)
    if manifest.card_folder is None:
        return card
    return card.model_copy(update={"path": Path(manifest.card_folder) / "card.yaml"})
