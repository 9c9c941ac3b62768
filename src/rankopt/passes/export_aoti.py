"""export_aoti: one compiled package with a dynamic batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.bundle import ModelBundle
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
    device: Literal["cpu"]
    inductor: dict[str, Any] = Field(default_factory=dict)
    """Options of torch._inductor.config, patched for this one compile."""


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
            load_target(self.target)
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
        return problems

    def apply(self, bundle: ModelBundle, context: PassContext) -> ModelBundle:
        """Put the target's compiler options on the bundle; `write_artifact` compiles."""
        target = load_target(self.target)
        return replace(
            bundle,
            inductor_options={**bundle.inductor_options, **target.inductor, **self.inductor},
            provided=bundle.provided | self.provides,
        )


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
