"""The encoded rows on disk: written once by the driver, mapped by every arm.

Flat feature tensors say all there is to know about rows: `name` has one entry per row,
`name.values` with `name.lengths` (and `name.weights`) hold bags, feature-major when there are
several features. So a worker needs neither the card nor a data library, whose thread pools would
be one more thing that differs between arms.

Shapes: B rows of a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rankopt.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    from torch import Tensor


class FlatRows(Protocol):
    """What `rankopt.data.encode.Rows` has, as far as timing cares."""

    @property
    def features(self) -> Mapping[str, Tensor]: ...

    @property
    def num_rows(self) -> int: ...


def write_rows(rows: FlatRows, path: Path) -> Path:
    """Write the feature tensors of some rows, beside and renamed.

    Raises:
        DataError: there are no rows.
        EnvironmentProblem: the disk is full or not writable.
    """
    from safetensors.torch import save_file

    if rows.num_rows < 1:
        raise DataError("no rows to run the arms on; an A/B needs at least one.")
    tensors = {name: tensor.contiguous() for name, tensor in rows.features.items()}
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, metadata={"num_rows": str(rows.num_rows)})
        part.replace(path)
    except Exception as error:  # safetensors raises its own type for a full disk
        part.unlink(missing_ok=True)
        raise EnvironmentProblem(f"{path}: rows cannot be written: {error}") from error
    return path


class RowsFile:
    """Rows of a file, picked by number."""

    def __init__(self, path: Path) -> None:
        from safetensors import safe_open

        from rankopt.data.rows import Rows

        with safe_open(path, framework="pt") as stream:
            num_rows = int(stream.metadata()["num_rows"])
            features = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
        bags = {
            name.removesuffix(".lengths"): tensor.numel() // num_rows
            for name, tensor in features.items()
            if name.endswith(".lengths")
        }
        self._rows = Rows(features, labels={}, clusters=None, num_rows=num_rows, bags=bags)

    @property
    def num_rows(self) -> int:
        return self._rows.num_rows

    def window(self, start: int, num_rows: int) -> dict[str, Tensor]:
        """Copy `num_rows` rows from `start` on, going round at the end.

        Copies are freshly allocated, so every arm reads equally aligned memory.
        """
        import torch

        rows_B = torch.arange(start, start + num_rows) % self.num_rows
        return self._rows.take(rows_B).features
