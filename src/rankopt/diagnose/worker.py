"""The fresh process in which a model is looked into.

`python -m rankopt.diagnose.worker REQUEST RESULT`: thread counts are set before torch is imported,
so that nothing of the calling process reaches the times.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from rankopt.diagnose.schema import BatchRow, MachinePeaks
from rankopt.errors import EXIT_USAGE, ArtifactError, RankoptError

if TYPE_CHECKING:
    from torch import Tensor

    from rankopt.diagnose.breakdown import Subject
    from rankopt.models.card import ModelCard

PROGRESS = "progress: "
"""What a line of stderr begins with that is meant for a person."""


MIN_HISTORY = 8
"""Inputs whose lists are shorter count as bags."""


class Request(BaseModel):
    """What the process is asked for; either an artifact or a card."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    artifact: Path | None = None
    card: Path | None = None
    checkpoint: Path | None = None
    rows: Path
    batch_sizes: tuple[int, ...]
    num_threads: int
    quick: bool = False
    again: bool = False
    """Measure the machine's peaks even though they are known."""
    allow_random: bool = False


class Found(BaseModel):
    """What the process answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machine: MachinePeaks
    batches: tuple[BatchRow, ...]
    num_threads: int


def look(request: Request, workdir: Path) -> Found:
    """Do what is asked, in this process."""
    import torch

    from rankopt.bench.rows_file import RowsFile
    from rankopt.diagnose.breakdown import break_down
    from rankopt.diagnose.machine import machine_peaks
    from rankopt.diagnose.timing import QUICK, Effort, windows_of

    torch.set_num_threads(request.num_threads)
    _say("measuring what this machine can do")
    machine = machine_peaks(again=request.again, progress=_say)
    _say("loading the model")
    subject = _artifact(request, workdir) if request.artifact else _eager(request)
    rows = RowsFile(request.rows)
    batches = []
    for batch_size in request.batch_sizes:
        _say(f"timing batch {batch_size}")
        windows = windows_of(rows, batch_size)
        effort = QUICK if request.quick else Effort()
        with torch.inference_mode():
            _check_twin(request, subject, windows[0])
            batches.append(break_down(subject, windows, batch_size, machine, effort))
    return Found(machine=machine, batches=tuple(batches), num_threads=torch.get_num_threads())


def _artifact(request: Request, workdir: Path) -> Subject:
    from rankopt.artifact.manifest import card_of
    from rankopt.diagnose.breakdown import Subject
    from rankopt.diagnose.profile import CompiledProfile
    from rankopt.diagnose.twin import build_twin
    from rankopt.runtime import load_artifact

    if request.artifact is None:
        raise ValueError("no artifact was asked for")
    plain = load_artifact(request.artifact)
    _say("compiling the model's own code with clocks in it")
    twin, sites = build_twin(request.artifact, workdir / "twin")
    card = card_of(plain.manifest)
    profile = CompiledProfile(twin, sites)
    return Subject(card.name, "artifact", plain, profile, sequence_lengths(card))


def _eager(request: Request) -> Subject:
    from rankopt.diagnose.breakdown import Subject
    from rankopt.diagnose.profile import EagerProfile
    from rankopt.models.build import build_module
    from rankopt.models.card import load_card
    from rankopt.models.serving import EagerModel

    if request.card is None:
        raise ValueError("neither an artifact nor a card was asked for")
    card = load_card(request.card)
    model = EagerModel(
        card, build_module(card, request.checkpoint, allow_random=request.allow_random)
    )
    return Subject(card.name, "eager", model, EagerProfile(model), sequence_lengths(card))


def sequence_lengths(card: ModelCard) -> frozenset[int]:
    """Return how long an axis may be that is a history.

    A list may have single ids appended as further steps: context and target. An axis as long as
    there are features, with or without one for the dense ones, is no history but what a dot
    interaction works on, and short lists are bags.
    """
    from rankopt.models.card import IdsInput, KjtInput, RaggedIdsInput

    num_ids = sum(len(item.columns) for item in card.inputs if isinstance(item, IdsInput))
    num_features, longest = num_ids, []
    for item in card.inputs:
        if isinstance(item, RaggedIdsInput):
            num_features += 1
            longest.append(item.max_length)
        elif isinstance(item, KjtInput):
            num_features += len(item.features)
            longest += [feature.max_length or 0 for feature in item.features]
    histories = [length for length in longest if length >= MIN_HISTORY]
    found = {size for length in histories for size in range(length, length + num_ids + 2)}
    return frozenset(found - {num_features, num_features + 1})


def _check_twin(request: Request, subject: Subject, features: dict[str, Tensor]) -> None:
    """Refuse to time a twin that does not compute what the artifact does."""
    from rankopt.diagnose.profile import CompiledProfile, same_scores

    profile = subject.profile
    if not isinstance(profile, CompiledProfile):
        return
    if not same_scores(subject.run(features), profile.run(features)):
        raise ArtifactError(
            f"{request.artifact}: compiled again with clocks in it, its code gives other scores, "
            "so the clocks would not tell of this artifact. Build the artifact again here."
        )


def _say(text: str) -> None:
    print(f"{PROGRESS}{text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    """Answer one request; errors that are the reader's to mend go to stderr without a traceback."""
    request = Request.model_validate_json(Path(arguments[0]).read_bytes())
    result = Path(arguments[1])
    try:
        found = look(request, result.parent)
    except RankoptError as error:
        print(str(error), file=sys.stderr)
        return EXIT_USAGE
    result.write_text(found.model_dump_json(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
