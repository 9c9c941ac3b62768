"""Split export: which modules stay eager, and which models are not split."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from capture.split_net import CARD, Made, rows, split
from rankopt.capture.parts import Size
from rankopt.errors import ArtifactError
from rankopt.models.card import ModelCard


def test_each_part_is_the_smallest_module_that_torch_refuses(made: Made) -> None:
    assert list(made.bundle.parts) == ["boost", "selected", "tower.halve"]
    assert [len(part.calls) for part in made.bundle.parts.values()] == [2, 1, 1]
    notes = [note for note in made.bundle.capture if "stays eager" in note]
    assert len(notes) == 3
    note = notes[0]
    assert note.startswith(
        "`boost` (Boost) stays eager: data-dependent branch: `if x.max() > 1000:`"
    )
    assert "split_test_layers.py:" in note
    assert str(made.folder.parent) not in note


def test_the_model_is_left_as_it_was(made: Made) -> None:
    kinds = {name: type(child).__name__ for name, child in made.model.named_modules()}
    assert kinds["boost"] == "Boost"
    assert kinds["tower.halve"] == "Halve"
    assert not any(module._forward_pre_hooks for module in made.model.modules())


def test_weights_of_parts_are_no_constants_of_the_graph(made: Made) -> None:
    names = set(made.bundle.constants)
    assert "model.tower.lin.weight" in names
    assert not [name for name in names if "scale" in name or "inner" in name]
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    assert made.bundle.size_bytes == weights + 3 * 8  # a handle per part


# What can be no part, and what shapes are learned. Nothing is compiled below.


class Around(nn.Module):
    """A table and a layer around some module."""

    def __init__(self, inner: nn.Module, table: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8) if table else None
        self.inner = inner

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        x = dense if self.table is None else self.table(ids) + dense
        result: Tensor = self.inner(x)
        return result.sum(1)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.lin(x)
        return x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x.mul_(2)
        return x


class Steps(nn.Module):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.cell = Branch()
        self.num_steps = num_steps

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_steps):
            x = self.cell(x)
        return x


class RootBranch(Around):
    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return super().forward(ids, dense) if dense.sum() > 0 else dense.sum(1)


class Doubled(nn.Module):
    """Gives 2 B + 1 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return torch.cat([x, x, x[:1]])


class Wrapped(nn.Module):
    """Needs the rows of its part to be known."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return x + result[: x.shape[0]]


PLAIN = ModelCard.model_validate(CARD)


def paths(model: nn.Module) -> list[str] | None:
    found = split(PLAIN, model)
    return None if found is None else [part.path for part in found.parts.values()]


def test_a_part_that_writes_to_its_input_goes_outward() -> None:
    assert paths(Around(InPlace())) is None
    inner = nn.Sequential(nn.Linear(8, 8), InPlace())
    assert paths(Around(inner)) == ["inner"]


def test_a_part_that_is_called_often_goes_outward() -> None:
    assert paths(Around(Steps(3))) == ["inner.cell"]
    assert paths(Around(Steps(20))) == ["inner"]


def test_the_model_itself_is_not_split() -> None:
    assert paths(RootBranch(nn.Linear(8, 8))) is None


def test_a_part_that_is_the_whole_model_is_no_part() -> None:
    assert paths(Around(Branch(), table=False)) is None


def test_sizes_that_follow_from_the_rows_stay_known() -> None:
    found = split(PLAIN, Around(Wrapped(Doubled())))
    assert found is not None
    (part,) = found.parts.values()
    assert part.path == "inner.inner"
    assert part.calls[0].outputs[0].shape == (Size(0, 0, 2, 1, 1), 8)


def test_the_parts_forget_their_module_with_the_bundle() -> None:
    found = split(PLAIN, Around(Branch()))
    assert found is not None
    run = found.program.module(check_guards=False)
    inputs = [rows(PLAIN, 3)[name] for name in PLAIN.tensor_names]
    run(*inputs)
    del found
    gc.collect()
    with pytest.raises(ArtifactError, match="was released"):
        run(*inputs)
