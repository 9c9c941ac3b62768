"""The second form of a call: request-level inputs once for each request, and a map to candidates.

Its compiled program lies beside the plain one and reads the same stored constants; only what a
split layer needs is stored on top. Which form a call is in shows by `request_index`.

Shapes: R requests, B candidates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rankopt.artifact.contract import InputContract, encode_contract, explain
from rankopt.artifact.manifest import (
    REQUEST_CHECKS,
    REQUEST_CONSTANTS,
    ConstantEntry,
    Manifest,
    RequestForm,
)
from rankopt.bundle import ModelBundle
from rankopt.capture.export import MAX_BATCH
from rankopt.capture.requests import REQUEST_INDEX, random_requests
from rankopt.errors import ArtifactError, Problem

CHECK_SIZES = ((1,), (2, 1, 4), (64,))
"""Candidates of each request in the calls that an artifact is checked on."""
CHECK_SEED = 20_240_301


class RequestContract:
    """What a call of the second form must bring.

    Args:
        inputs: the contract of the plain form.
        max_batch: most requests, and most candidates.
    """

    def __init__(self, inputs: Sequence[InputContract], max_batch: int) -> None:
        self.names = (*(entry.name for entry in inputs), REQUEST_INDEX)
        index = InputContract(name=REQUEST_INDEX, role="ids", dtype="int64", upper=(MAX_BATCH,))
        self._shared = [entry for entry in inputs if entry.request_level]
        self._own = [*(entry for entry in inputs if not entry.request_level), index]
        self._specs = [encode_contract(part) for part in (self._shared, self._own)]
        self._places = [
            [self.names.index(entry.name) for entry in part] for part in (self._shared, self._own)
        ]
        rows = next(e for e in self._shared if e.role not in ("values", "weights"))
        self._rows_at, self._groups = self.names.index(rows.name), rows.groups
        self._max_batch = max_batch

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Tell whether inputs in the order of `names` keep the contract."""
        ops = torch.ops.rankopt
        for places, spec in zip(self._places, self._specs, strict=True):
            part = [inputs[at] for at in places]
            if not ops.inputs_fit.default(part, spec, self._max_batch, 1):
                return False
        num_requests = inputs[self._rows_at].shape[0] // self._groups
        good: bool = ops.request_index_fits.default(inputs[-1], num_requests)
        return good

    def explain(self, features: Mapping[str, Tensor]) -> list[Problem]:
        """List everything in which a call breaks the contract."""
        problems = [
            *explain(self._shared, features, self._max_batch),
            *explain(self._own, features, self._max_batch),
        ]
        if problems:
            return problems
        num_requests = features[self.names[self._rows_at]].shape[0] // self._groups
        index = features[REQUEST_INDEX]
        bad = ((index < 0) | (index >= num_requests)).nonzero()
        if len(bad):
            at = int(bad[0])
            problems.append(
                Problem(
                    f"input {REQUEST_INDEX}[{at}]",
                    f"must name one of the {num_requests} requests, 0 to {num_requests - 1}",
                    int(index[at]),
                    f"{len(bad)} candidates name none.",
                )
            )
        return problems


def request_form(bundle: ModelBundle, entries: Sequence[ConstantEntry]) -> RequestForm:
    """Describe the second form of a bundle for the manifest."""
    from rankopt.passes.quantize_dense import fbgemm_layers

    other = bundle.requests
    if other is None or other.operations is None:
        raise ValueError("the bundle has no second form")
    count = other.operations
    return RequestForm(
        constants=tuple(entry for entry in entries if entry.name.startswith(REQUEST_CONSTANTS)),
        packed_for_fbgemm=fbgemm_layers(other.program.module(check_guards=False)),
        counted_candidates=count.candidates,
        operations=count.left,
        operations_before=count.before,
    )


def require_requests(folder: Path, manifest: Manifest) -> None:
    """Refuse an artifact without the second form.

    Raises:
        ArtifactError: says how to get it.
    """
    if manifest.requests is None:
        raise ArtifactError(
            f"{folder}: takes no {REQUEST_INDEX}: build it with the pass hoist_requests."
        )


def named_for_requests(constants: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the second form's constants under the names they are stored by."""
    return {f"{REQUEST_CONSTANTS}{name}": value for name, value in constants.items()}


def write_request_checks(bundle: ModelBundle, folder: Path) -> None:
    """Store made-up requests and the scores of the bundle's second form for them."""
    from rankopt.artifact.contract import contract_of

    other = bundle.requests
    if other is None:
        return
    tensors: dict[str, Tensor] = {}
    for number, sizes in enumerate(CHECK_SIZES):
        generator = torch.Generator().manual_seed(CHECK_SEED + number)
        _, features = random_requests(contract_of(bundle.card), sizes, generator)
        scores = other.run(features)
        tensors |= {f"{number}/input/{name}": value for name, value in features.items()}
        tensors |= {f"{number}/output/{name}": value for name, value in scores.items()}
    save_file(
        {name: value.contiguous().clone() for name, value in tensors.items()},
        folder / REQUEST_CHECKS,
    )


def request_checks(folder: Path) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Read what `write_request_checks` stored: features and scores of each call."""
    stored = load_file(folder / REQUEST_CHECKS)
    calls = []
    for number in sorted({int(name.split("/")[0]) for name in stored}):
        parts: list[dict[str, Tensor]] = []
        for kind in ("input", "output"):
            start = f"{number}/{kind}/"
            parts.append(
                {
                    name.removeprefix(start): value
                    for name, value in stored.items()
                    if name.startswith(start)
                }
            )
        calls.append((parts[0], parts[1]))
    return calls


def request_constants(manifest: Manifest, mapped: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the second form's constants by the names its program reads."""
    return {
        name.removeprefix(REQUEST_CONSTANTS): value
        for name, value in mapped.items()
        if manifest.requests is not None and name.startswith(REQUEST_CONSTANTS)
    }
