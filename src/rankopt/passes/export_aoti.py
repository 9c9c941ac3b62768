"""export_aoti: one compiled package with a dynamic batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.bundle import GpuSettings, ModelBundle
from rankopt.content import find, read_yaml
from rankopt.environment import Environment
from rankopt.errors import Problem, RecipeError
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass, PassContext, Purpose
from rankopt.problems import problems_of_validation


class ExportTarget(BaseModel):
    """A YAML file in `export/`: what the compiled code is for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    summary: str = ""
    device: Literal["cpu", "cuda"]
    inductor: dict[str, Any] = Field(default_factory=dict)
    """Options of torch._inductor.config, patched for this one compile."""
    tf32: bool = False
    """cuda: multiply fp32 matrices in TF32 (10 bits of mantissa); recorded in the manifest."""
    graph_batch: int = Field(default=256, ge=0)
    """cuda: batches up to this are captured as CUDA graphs and replayed; 0 captures none."""


class ExportAoti(Pass):
    """Compile the graph with AOTInductor.

    Weights stay outside the library. The artifact counts as built only after a fresh process has
    loaded it and its outputs agreed with the graph's.

    Example:
        ```yaml
        - export_aoti: {target: aoti-cpu}
        ```
    """

    kind: ClassVar[str] = "export_aoti"
    purpose: ClassVar[Purpose] = "artifact"
    forbids: ClassVar[frozenset[str]] = frozenset({"artifact"})
    provides: ClassVar[frozenset[str]] = frozenset({"artifact"})

    target: str = "aoti-cpu"
    """A file in `export/`, by name or path."""
    inductor: dict[str, Any] = Field(default_factory=dict)
    """More compiler options, over the target's."""

    def check(self, environment: Environment, card: ModelCard | None) -> list[Problem]:
        """List what rules the target out on this machine."""
        try:
            target = load_target(self.target)
        except RecipeError as error:
            found = error.problems or (Problem("", str(error).rstrip(".")),)
            return [Problem("target", p.what, self.target, p.hint) for p in found]
        problems = []
        if environment.compiler is None:
            problems.append(
                Problem(
                    "target",
                    "needs a C++ compiler, and none is on the path",
                    hint="Install one (apt-get install g++) or set CXX.",
                )
            )
        if target.device == "cuda":
            problems += _gpu_problems(self.target, environment)
        return problems

    @property
    def device(self) -> str:
        """The target's device."""
        return load_target(self.target).device

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Put the target's compiler options on the bundle; `write_artifact` compiles."""
        target = load_target(self.target)
        return replace(
            bundle,
            inductor_options={**bundle.inductor_options, **target.inductor, **self.inductor},
            provided=bundle.provided | self.provides,
            device=target.device,
            gpu=GpuSettings(target.tf32, target.graph_batch) if target.device == "cuda" else None,
        )


def _gpu_problems(target: str, environment: Environment) -> list[Problem]:
    """Say what is missing for a GPU, without importing torch."""
    problems = []
    build = environment.libraries.get("torch", "none")
    if not environment.gpus:
        problems.append(
            Problem(
                "target",
                f"needs an NVIDIA GPU, and this machine has none (torch {build})",
                target,
                "Build it on the machine that serves, or take target: aoti-cpu.",
            )
        )
    if "triton" not in environment.libraries:
        problems.append(
            Problem(
                "target",
                f"needs triton, which torch's CUDA builds bring along (torch {build} is installed)",
                target,
                "Install a CUDA build of torch: make setup does where it finds a GPU.",
            )
        )
    return problems


def load_target(name: str) -> ExportTarget:
    """Read an export target.

    Raises:
        RecipeError: it is not there or breaks the schema.
    """
    file = find("export", name, error=RecipeError)
    try:
        return ExportTarget.model_validate(read_yaml(file, RecipeError))
    except ValidationError as error:
        problems = problems_of_validation(str(file), error, ExportTarget)
        raise RecipeError(problems=problems) from error
