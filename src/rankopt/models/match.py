"""Match the keys of a checkpoint to a module's, strictly, and say readably what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from rankopt.errors import CheckpointError, Problem

WRAPPER_PREFIXES = {
    "module.": "DataParallel or DistributedDataParallel",
    "_orig_mod.": "torch.compile",
}
_MAX_LISTED = 8


@dataclass(frozen=True)
class MatchedState:
    """Tensors under the module's own names, and what was changed on the way.

    Attributes:
        state: one tensor for each key of the module's state dict, of the same shape.
        notes: one line for each thing done, such as a wrapper's prefix taken off.
    """

    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


def match_state_dict(module: nn.Module, state: Mapping[str, Tensor], where: str) -> MatchedState:
    """Match every key, both ways, with shapes.

    The prefix of a wrapper (`module.`, `_orig_mod.`) is taken off when every key carries it and
    the module's do not, and a note says so. No other name is guessed.

    Args:
        module: the model as its factory built it.
        state: the checkpoint's tensors.
        where: the checkpoint's path, for messages.

    Raises:
        CheckpointError: keys are missing, unexpected or of another shape; all are listed.
    """
    wanted = {name: value for name, value in module.state_dict().items() if _is_tensor(value)}
    found, notes = _strip_wrappers(dict(state), wanted, where)
    problems = _differences(found, wanted, where)
    if problems:
        raise CheckpointError(
            f"{where}: does not fit the model ({len(found)} tensors in the checkpoint, "
            f"{len(wanted)} in the model).",
            problems=problems,
        )
    cast = Counter(
        f"{str(found[name].dtype).removeprefix('torch.')} as "
        f"{str(wanted[name].dtype).removeprefix('torch.')}"
        for name in wanted
        if found[name].dtype != wanted[name].dtype
    )
    notes += [
        f"{where}: read {count} tensor(s) stored as {change}" for change, count in cast.items()
    ]
    return MatchedState(found, tuple(notes))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _strip_wrappers(
    state: dict[str, Tensor], wanted: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Tensor], list[str]]:
    notes: list[str] = []
    while state and wanted:
        prefix = next((p for p in WRAPPER_PREFIXES if _all_carry(state, p)), None)
        if prefix is None or _all_carry(wanted, prefix):
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
        notes.append(
            f"{where}: took the prefix {prefix!r} ({WRAPPER_PREFIXES[prefix]}) off all "
            f"{len(state)} keys"
        )
    return state, notes


def _all_carry(names: Iterable[str], prefix: str) -> bool:
    return all(name.startswith(prefix) for name in names)


def _differences(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str
) -> list[Problem]:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    problems = []
    if missing:
        names = [f"{name} {list(wanted[name].shape)}" for name in missing]
        problems.append(Problem(where, f"lacks {len(missing)} of the model's keys: {_list(names)}"))
    if unexpected:
        names = [f"{name} {list(found[name].shape)}" for name in unexpected]
        what = f"holds {len(unexpected)} keys that the model lacks: {_list(names)}"
        problems.append(Problem(where, what, hint=_prefix_hint(missing, unexpected)))
    problems += _mismatches(found, wanted, where)
    return problems


def _mismatches(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], where: str
) -> list[Problem]:
    problems = []
    both = [name for name in wanted if name in found]
    for name in both:
        if found[name].shape != wanted[name].shape:
            problems.append(
                Problem(
                    f"{where}: {name}",
                    f"must have the shape {list(wanted[name].shape)} that the card's config gives",
                    list(found[name].shape),
                    "Compare `config` of the card with that of the training run.",
                )
            )
        elif found[name].is_floating_point() != wanted[name].is_floating_point():
            problems.append(
                Problem(f"{where}: {name}", f"must be {wanted[name].dtype}", str(found[name].dtype))
            )
    if len(problems) > _MAX_LISTED:
        rest = len(problems) - _MAX_LISTED
        return [*problems[:_MAX_LISTED], Problem(where, f"and {rest} more do not fit")]
    return problems


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str | None:
    """Find the one prefix that explains the most keys, on either side."""
    extra = _common_prefix(unexpected, set(missing))
    if extra:
        prefix, count = extra
        return (
            f"{count} would match without the prefix {prefix!r}. Save them so: "
            f"{{k.removeprefix({prefix!r}): v for k, v in state.items()}}."
        )
    lacking = _common_prefix(missing, set(unexpected))
    if lacking:
        prefix, count = lacking
        return (
            f"{count} would match with the prefix {prefix!r} in front. Save them so: "
            f"{{{prefix!r} + k: v for k, v in state.items()}}."
        )
    return None


def _common_prefix(longer: list[str], shorter: set[str]) -> tuple[str, int] | None:
    counts: Counter[str] = Counter()
    for name in longer:
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in shorter:
                counts[".".join(parts[:cut]) + "."] += 1
    return counts.most_common(1)[0] if counts else None


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    rest = len(names) - _MAX_LISTED
    return f"{shown} and {rest} more" if rest > 0 else shown
