"""What differs between two runs that should have given the same weights, likeliest cause first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rankopt.train.reproducibility.run_manifest import RunManifest

_ARITHMETIC_LIBRARIES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "triton", "numpy")
_MACHINE = ("isa", "cpu_model", "architecture", "num_physical_cores", "gpus")
_REST = ("python", "compiler", "compiler_version", "os")


class Difference(BaseModel):
    """One thing that is not as it was."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    of: Literal["code", "environment", "data"]
    what: str
    then: str | None
    now: str | None

    def __str__(self) -> str:
        return f"{self.of}: {self.what} was {self.then or 'absent'}, is {self.now or 'absent'}"


def find_differences(then: RunManifest, now: RunManifest) -> Iterator[Difference]:
    """List what differs, in the order in which it is likely to have changed the weights.

    First the module and rankopt itself, then what does the sums (threads, libraries, instruction
    sets, variables), then the rest of the machine, then where the rows lie: their content is known
    to be the same.
    """
    yield from _code(then, now)
    yield from _environment(then, now)
    for name, record in then.data.splits.items():
        yield from _changed("data", f"path of {name}", record.path, now.data.splits[name].path)


def _code(then: RunManifest, now: RunManifest) -> Iterator[Difference]:
    yield from _mappings("code", "module's ", then.code.module, now.code.module)
    old, new = then.outcome.weights, now.outcome.weights
    if old.keys() != new.keys():
        changed = sorted(old.keys() ^ new.keys())
        yield Difference(
            of="code",
            what=f"the list of tensors ({', '.join(changed[:5])})",
            then=f"{len(old)} tensors",
            now=f"{len(new)} tensors",
        )
    elif list(old) != list(new):
        # The factory went by the order of a set, which Python's hash seed decides.
        first = next(i for i, pair in enumerate(zip(old, new, strict=True)) if pair[0] != pair[1])
        what = "the order in which the factory makes its tensors (PYTHONHASHSEED?), first"
        yield Difference(of="code", what=what, then=list(old)[first], now=list(new)[first])
    if then.code.rankopt_sha256 != now.code.rankopt_sha256:
        yield Difference(
            of="code",
            what="rankopt",
            then=_version(then),
            now=_version(now),
        )


def _version(run: RunManifest) -> str:
    commit = f", commit {run.code.git_commit}" if run.code.git_commit else ""
    return f"{run.code.rankopt_version}{commit}, sources {run.code.rankopt_sha256[:12]}"


def _environment(then: RunManifest, now: RunManifest) -> Iterator[Difference]:
    one, two = then.machine, now.machine
    yield from _changed("environment", "number of threads", one.num_threads, two.num_threads)
    yield from _changed("environment", "number of ranks", one.world_size, two.world_size)
    yield from _changed("environment", "launcher", one.launcher, two.launcher)
    old, new = (dict(each.environment.get("libraries", {})) for each in (one, two))
    for name in _ARITHMETIC_LIBRARIES:
        yield from _changed("environment", name, old.pop(name, None), new.pop(name, None))
    yield from _mappings("environment", "", one.arithmetic, two.arithmetic)
    yield from _mappings("environment", "$", one.variables, two.variables)
    for name in _MACHINE:
        yield from _changed(
            "environment", name, one.environment.get(name), two.environment.get(name)
        )
    old.pop("rankopt", None), new.pop("rankopt", None)
    yield from _mappings("environment", "", old, new)
    for name in _REST:
        yield from _changed(
            "environment", name, one.environment.get(name), two.environment.get(name)
        )


def _mappings(
    of: Literal["code", "environment"], prefix: str, then: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*then, *now]):
        yield from _changed(of, f"{prefix}{name}", then.get(name), now.get(name))


def _changed(
    of: Literal["code", "environment", "data"], what: str, then: Any, now: Any
) -> Iterator[Difference]:
    if then != now:
        yield Difference(of=of, what=what, then=_text(then), now=_text(now))


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
