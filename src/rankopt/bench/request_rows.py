"""Rows that come as whole requests, and the arm that scores them as such.

Rows of a request stand together, `request_size` at a time, and agree in their request-level inputs:
a batch of that size is one request, for the plain call and for the one with `request_index`.

Shapes: R requests, B candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rankopt.bench.arms import ArmSpec
from rankopt.errors import UsageError
from rankopt.problems import problems_of_validation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rankopt.artifact.contract import InputContract
    from rankopt.data.rows import Rows
    from rankopt.models.card import ModelCard
    from rankopt.runtime import LoadedArtifact


class RequestOptions(BaseModel):
    """The options of an arm of kind `requests`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    request_size: int = Field(gt=0)
    """Candidates of a request; the last one of a batch may have fewer."""


class RequestArm:
    """An artifact that is called with request-level inputs once for each request.

    Features come as they do to every arm, with a row of each input per candidate. `prepare` takes
    them apart outside the timed calls, since a server has them apart to begin with.
    """

    def __init__(self, artifact: LoadedArtifact, request_size: int) -> None:
        from rankopt.artifact.manifest import card_of
        from rankopt.artifact.requests import require_requests

        require_requests(artifact.folder, artifact.manifest)
        self._artifact = artifact
        self._card = card_of(artifact.manifest)
        self._request_size = request_size

    def prepare(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Keep the request-level inputs of each request's first row."""
        import torch

        from rankopt.capture.requests import split_features

        num_rows = _num_rows(self._artifact.manifest.inputs, features)
        index = torch.arange(num_rows) // self._request_size
        return split_features(
            features, self._card, torch.arange(0, num_rows, self._request_size), index
        )

    def __call__(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score prepared features."""
        return self._artifact(features)


def load_requests(spec: ArmSpec) -> RequestArm:
    """Load an artifact as an arm of kind `requests`.

    Raises:
        UsageError: no artifact is named, or the options are wrong.
        ArtifactError: the artifact has no form with `request_index`.
    """
    from rankopt.runtime import load_artifact

    if spec.artifact is None:
        raise UsageError(f"arm {spec.label!r}: kind 'requests' needs an artifact folder.")
    try:
        options = RequestOptions.model_validate(spec.options)
    except ValidationError as error:
        where = f"arm {spec.label!r}: options"
        problems = problems_of_validation(where, error, RequestOptions)
        raise UsageError(problems=problems) from error
    return RequestArm(load_artifact(spec.artifact), options.request_size)


def _num_rows(contract: Sequence[InputContract], features: Mapping[str, Tensor]) -> int:
    entry = next(e for e in contract if e.role not in ("values", "weights"))
    return int(features[entry.name].shape[0]) // entry.groups


def whole_requests(
    rows: Rows, card: ModelCard, request_size: int, num_requests: int, seed: int = 0
) -> Rows:
    """Make requests of real rows: one row's request-level inputs, and drawn rows' candidates.

    Args:
        rows: of the card.
        card: says which inputs are request-level.
        request_size: candidates of each request.
        num_requests: how many requests.
        seed: decides which rows.
    """
    import torch

    from rankopt.data.rows import Rows

    generator = torch.Generator().manual_seed(seed)
    users = torch.randint(rows.num_rows, (num_requests,), generator=generator)
    shared = rows.take(users.repeat_interleave(request_size)).features
    drawn = torch.randint(rows.num_rows, (num_requests * request_size,), generator=generator)
    own = rows.take(drawn).features
    features: dict[str, torch.Tensor] = {}
    for item in card.inputs:
        chosen = shared if item.request_level else own
        features |= {name: chosen[name] for name in item.tensor_names}
    return Rows(features, {}, None, len(drawn), rows.bags)
