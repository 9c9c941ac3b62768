"""What torch.export refuses is named: module, line, cause, next step."""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rankopt.capture.diagnose import ADVICE, Cause, Diagnosis, explain, quiet_torch
from rankopt.capture.export import trace
from rankopt.models.card import ModelCard
from rankopt.models.serving import ServingModule

CARD = ModelCard.model_validate(
    {
        "name": "diagnosed",
        "factory": "net.py:make",
        "inputs": [
            {"name": "x", "kind": "dense", "columns": ["a", "b", "c", "d"]},
            {
                "name": "seen",
                "kind": "ragged_ids",
                "column": "seen",
                "num_ids": 9,
                "max_length": 6,
                "layout": "values_lengths",
            },
        ],
        "outputs": [{"name": "click", "label": "label"}],
    }
)


class ItemBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if (x > 0).sum().item() > 3:  # culprit
            return x * 2
        return x


class Selected(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return x + kept[:1].sum(1)[:, None] + torch.msort(kept.flatten())[:4]  # culprit


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:  # culprit
            x = x / 2
        return x


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(7, 1)  # culprit


class FixedView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(28).view(7, 4)  # culprit


class LengthRead(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        rows = int(x.shape[0])  # culprit
        return x.view(rows, 4) * 2


class ToPython(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        steps = int(x[0, 0])  # culprit
        return x * max(steps, 1)


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.log1p(x.numpy()))  # culprit


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("absent")  # culprit


class Helper(nn.Module):
    """The line lies in a function that the module calls, and `self` has another name."""

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805
        return _pick(x)


def _pick(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x  # culprit-of-helper


class Tower(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), inner)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


class Net(nn.Module):
    def __init__(self, *towers: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({str(i): Tower(tower) for i, tower in enumerate(towers)})

    def forward(self, x: Tensor, seen_values: Tensor, seen_lengths: Tensor) -> Tensor:
        summed = torch.stack([tower(x) for tower in self.towers.values()]).sum((0, 2))
        return summed + seen_lengths + 0 * seen_values.sum()


class RootBranch(nn.Module):
    def forward(self, x: Tensor, seen_values: Tensor, seen_lengths: Tensor) -> Tensor:
        if seen_values.shape[0] == 20:  # culprit
            return x.sum(1)
        return x.sum(1) + seen_lengths


def diagnose(model: nn.Module, **options: Any) -> Diagnosis:
    serving = ServingModule(CARD, model.eval())
    with pytest.raises(Exception) as caught, quiet_torch():  # noqa: PT011 (any type of torch's)
        trace(serving, CARD)
    return explain(caught.value, serving, CARD, **options)


def line_of(marked: object, mark: str = "# culprit") -> int:
    """Find the line that is marked in a class or function."""
    lines, start = inspect.getsourcelines(marked)  # type: ignore[arg-type]
    return start + next(i for i, line in enumerate(lines) if line.rstrip().endswith(mark))


@pytest.mark.parametrize(
    ("culprit", "cause"),
    [
        (ItemBranch, "data-dependent branch"),
        (Selected, "data-dependent shape"),
        (Loop, "data-dependent branch"),
        (FixedBatch, "specialised dim"),
        (LengthRead, "specialised dim"),
        (FixedView, "specialised dim"),
        (ToPython, "tensor read into Python"),
        (Numpy, "unsupported operator"),
        (Raises, "other"),
    ],
)
def test_the_line_and_its_module_are_named(culprit: type[nn.Module], cause: Cause) -> None:
    found = diagnose(Net(culprit()), others=False)
    assert found.cause == cause
    assert (found.module, found.class_name) == ("towers.0.layers.1", culprit.__name__)
    assert (found.file, found.line) == (__file__, line_of(culprit))
    assert found.source is not None
    assert found.source in inspect.getsource(culprit)
    assert found.chain[-1] == "model.towers.0.layers.1"


def test_a_message_says_where_what_got_allowed_and_next() -> None:
    found = diagnose(Net(ItemBranch()), others=False)
    text = str(found)
    lines = [line.split(":")[0].strip() for line in text.splitlines()]
    assert lines[1:6] == ["where", "what", "got", "allowed", "next"]
    assert f"`towers.0.layers.1` (ItemBranch), {__file__}:{found.line}" in text
    assert "`if (x > 0).sum().item() > 3:  # culprit`" in text
    assert "u0 > 3" in text
    assert ADVICE["data-dependent branch"][1] in text
    assert "Traceback" not in text
    assert "TORCH_LOGS" not in text


def test_a_line_in_a_function_belongs_to_the_module_that_calls_it() -> None:
    found = diagnose(Net(Helper()), others=False)
    assert (found.class_name, found.line) == ("Helper", line_of(_pick, "# culprit-of-helper"))


@pytest.mark.parametrize("culprit", [FixedBatch, LengthRead])
def test_a_frozen_batch_is_said_in_the_cards_words(culprit: type[nn.Module]) -> None:
    found = diagnose(Net(culprit()), others=False)
    assert found.said == (
        "the number of rows B (dim 0 of x, seen.values, seen.lengths) was frozen at 7, the size of "
        "the traced rows"
    )


def test_the_model_itself_has_no_path() -> None:
    found = diagnose(RootBranch(), others=False)
    assert (found.module, found.class_name) == ("", "RootBranch")
    assert found.cause == "specialised dim"
    assert found.line == line_of(RootBranch)
    assert "seen" in found.said


def test_further_lines_are_listed() -> None:
    found = diagnose(Net(ItemBranch(), Helper()))
    assert found.class_name == "ItemBranch"
    places = [(place.file, place.line) for place in found.others]
    assert places == [(__file__, line_of(_pick, "# culprit-of-helper"))]
    assert f"also: {found.others[0]}" in str(found)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's search writes a log into the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    diagnose(Net(ItemBranch()))
    assert list(tmp_path.iterdir()) == []
    assert "TORCH_DTRACE" not in os.environ


def test_torch_is_quiet_meanwhile(capfd: pytest.CaptureFixture[str]) -> None:
    """A trace that fails prints its graph, and the search for the line traces again."""
    diagnose(Net(FixedBatch()))
    diagnose(Net(ItemBranch()))
    assert capfd.readouterr() == ("", "")
