"""The peer suite: which models, which arms with which settings, how much to time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rankopt.bench.peers.goals import Goals
from rankopt.bench.peers.peer import Peer
from rankopt.bench.peers.registry import find_peer, peer_kinds
from rankopt.bench.plan import BenchPlan
from rankopt.errors import Problem, UsageError, nearest
from rankopt.problems import problems_of_validation
from rankopt.units import parse_fraction

RANKOPT = "rankopt"
EAGER = "eager"


class SuiteModel(BaseModel):
    """One model: a card, trained when its weights are in neither the card nor the cache."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    card: str
    """A file, or the name of one in models/."""
    checkpoint: str | None = None
    """Relative to the suite; the card's own, or a trained one, when None."""


class PeerSuite(BaseModel):
    """What `rankopt bench` measures.

    Example:
        ```yaml
        models:
          - {name: dlrm, card: dlrm-synthetic}
        arms:
          - eager
          - aoti: {freezing: [true, false]}
          - rankopt: {recipes: [serve-int8]}
        ne_margin: 0.1%
        plan: {batch_sizes: [1, 64], min_blocks: 8, max_blocks: 12}
        goals: {best_peer: {geometric_mean: 1.6}}
        ```
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    models: tuple[SuiteModel, ...] = Field(min_length=1)
    arms: tuple[Peer, ...] = Field(min_length=1)
    """Kinds, or `kind: {...}` with the choices to search."""
    plan: BenchPlan = Field(default_factory=BenchPlan)
    """Of the run that counts; its batch sizes and threads are those of the suite."""
    search: BenchPlan = Field(default_factory=lambda: BenchPlan(min_blocks=4, max_blocks=4))
    """How much to time when an arm's settings are compared; batch sizes and threads of `plan`."""
    ne_margin: float = Field(default=0.001, gt=0)
    """How much worse an arm's NE may be than eager's, as a share; judged by its interval."""
    prepare_timeout_s: float = Field(default=900.0, gt=0)
    """What exporting, quantising or compiling one setting may take."""
    breakdown: bool = True
    """After a model's arms are timed, say where the time of rankopt's goes."""
    goals: Goals = Goals()
    """What the ratios are held against; cells that miss it are listed."""
    path: Path | None = Field(default=None, exclude=True)

    @field_validator("ne_margin", mode="before")
    @classmethod
    def _read_share(cls, value: Any) -> Any:
        return parse_fraction(value) if isinstance(value, str) else value

    def chosen(
        self,
        models: Sequence[str] = (),
        batch_sizes: Sequence[int] = (),
        arms: Sequence[str] = (),
    ) -> PeerSuite:
        """Return the suite cut down to what is named; nothing named leaves all.

        Raises:
            UsageError: a name is not in the suite, or a batch size is not positive.
        """
        problems = _unknown("--models", models, [model.name for model in self.models])
        problems += _unknown("--arms", arms, [arm.kind for arm in self.arms])
        problems += [
            Problem("--batch-sizes", "must be at least 1", size) for size in batch_sizes if size < 1
        ]
        if problems:
            raise UsageError(problems=problems)
        plan = self.plan
        if batch_sizes:
            plan = plan.model_copy(update={"batch_sizes": tuple(dict.fromkeys(batch_sizes))})
        kept = {
            "models": tuple(m for m in self.models if not models or m.name in models),
            "arms": tuple(a for a in self.arms if not arms or a.kind in arms),
            "plan": plan,
        }
        return self.model_copy(update=kept)

    @property
    def search_plan(self) -> BenchPlan:
        update = {"batch_sizes": self.plan.batch_sizes, "num_threads": self.plan.num_threads}
        return self.search.model_copy(update=update)


def _unknown(flag: str, given: Sequence[str], known: Sequence[str]) -> list[Problem]:
    return [
        Problem(flag, "must name what the suite holds", name, nearest(name, known))
        for name in given
        if name not in known
    ]


def load_suite(path: str | Path) -> PeerSuite:
    """Read a suite; a bare name is looked for in the `benchmarks` folder.

    Raises:
        UsageError: the file is missing, is not YAML, or breaks the schema; every problem is listed.
    """
    from rankopt.content import find, read_yaml

    file = find("benchmarks", path, error=UsageError)
    raw = read_yaml(file, UsageError)
    if not isinstance(raw, dict):
        raise UsageError(problems=[Problem(str(file), "must be a mapping", type(raw).__name__)])
    problems: list[Problem] = []
    raw = dict(raw)
    arms = _read_arms(str(file), raw.get("arms"), problems)
    raw["arms"] = arms or (_Placeholder(),)
    if "path" in raw:
        problems.append(Problem(f"{file}: path", "is not a known key"))
        del raw["path"]
    try:
        suite = PeerSuite.model_validate(raw)
    except ValidationError as error:
        problems += problems_of_validation(str(file), error, PeerSuite)
        raise UsageError(problems=problems) from error
    names = [model.name for model in suite.models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        problems.append(Problem(f"{file}: models", "must have different names", twice))
    if problems:
        raise UsageError(problems=problems)
    return suite.model_copy(update={"path": file.resolve()})


class _Placeholder(Peer):
    """Stands in for arms that could not be read, so that the rest of the file is checked too."""

    kind = "placeholder"
    title = ""


def _read_arms(where: str, given: Any, problems: list[Problem]) -> tuple[Peer, ...]:
    if not isinstance(given, list) or not given:
        what = "must be a list of peers, each a kind or `kind: {...}`"
        hint = f"Known: {', '.join(peer_kinds())}."
        problems.append(Problem(f"{where}: arms", what, given, hint))
        return ()
    arms: list[Peer] = []
    for index, item in enumerate(given):
        arm = _read_arm(where, f"arms[{index}]", item, problems)
        if arm is not None and any(arm.kind == other.kind for other in arms):
            problems.append(Problem(f"{where}: arms[{index}]", "stands twice", arm.kind))
        elif arm is not None:
            arms.append(arm)
    return tuple(arms)


def _read_arm(where: str, prefix: str, item: Any, problems: list[Problem]) -> Peer | None:
    if isinstance(item, str):
        item = {item: {}}
    if not isinstance(item, dict) or len(item) != 1:
        what = "must be a kind, or one `kind: {...}`"
        problems.append(Problem(f"{where}: {prefix}", what, item))
        return None
    [(kind, settings)] = item.items()
    try:
        peer = find_peer(str(kind))
    except UsageError as error:
        problems.append(Problem(f"{where}: {prefix}", str(error).rstrip(".")))
        return None
    try:
        return peer.model_validate(settings or {})
    except ValidationError as error:
        problems += problems_of_validation(where, error, peer, f"{prefix}.{kind}")
        return None
