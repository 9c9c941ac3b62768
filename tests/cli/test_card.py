"""`rankopt card init` as a user types it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankopt.models.card import load_card

Cli = Callable[..., Any]

NET = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, rows, width=4):
        super().__init__()
        self.item_table = nn.Embedding(rows, width)

    def forward(self, item):
        return torch.sigmoid(self.item_table(item).sum(1))


class Never(nn.Module):
    def forward(self, left):
        raise ValueError("never")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_card_is_written_and_what_it_could_not_tell_is_listed(cli: Cli, folder: Path) -> None:
    result = cli("card", "init", "net.py:Net", "--config", "rows=12", "--out", "card.yaml")
    assert result.exit_code == 0, result.stderr
    card = load_card(folder / "card.yaml")
    assert (card.inputs[0].kind, card.inputs[0].num_ids) == ("ids", 12)
    assert card.config == {"rows": 12}
    assert "could not tell:\n" in result.stdout
    assert "  outputs[0]: the label's column\n" in result.stdout
    assert result.stdout.endswith("card: card.yaml (complete; check what it guessed)\n")
    again = cli("card", "init", "net.py:Net", "--config", "rows=12", "--out", "card.yaml")
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


def test_without_out_stdout_is_the_card_alone(cli: Cli, folder: Path) -> None:
    (folder / "config.yaml").write_text("{rows: 9, width: 2}")
    result = cli("card", "init", "net.py:Net", "--config", "config.yaml", "--config", "rows=12")
    assert result.exit_code == 0, result.stderr
    (folder / "piped.yaml").write_text(result.stdout)
    assert load_card(folder / "piped.yaml").config == {"rows": 12, "width": 2}
    assert "could not tell:" in result.stderr


def test_json_holds_the_text_and_the_lists(cli: Cli, folder: Path) -> None:
    result = cli("card", "init", "net.py:Never", "--json", "--out", "card.yaml")
    told = json.loads(result.stdout)
    assert told["text"] == (folder / "card.yaml").read_text()
    assert told["complete"] is False
    assert told["missing"][0].startswith("card: inputs[0]")
    assert any("its kind" in doubt for doubt in told["could_not_tell"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["net.py:Nett"], "net.py has no 'Nett'. Did you mean 'Net'"),
        (["net.py:Net"], "config.rows: is required by the factory"),
        (["net.py:Net", "--config", "rows=[1"], "--config rows=[1: is neither KEY=VALUE nor YAML"),
        (["net.py:Net", "--config", "none.yaml"], "--config none.yaml: is neither"),
        (["net.py:Net", "--config", "=3"], "--config =3: must hold names and values"),
        (["net.py:Net", "--config", "rows=3", "--data", "no.csv"], "no.csv"),
        (["net.py:Net", "--config", "rows=3", "--batch", "no.pt"], "no.pt: cannot be read"),
        (["no.py:Net"], "no.py does not exist"),
        (["Net"], "factory"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    cli: Cli, folder: Path, arguments: list[str], expected: str
) -> None:
    result = cli("card", "init", *arguments, "--out", "card.yaml")
    assert result.exit_code == 2, result.stderr
    assert expected in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "card.yaml").exists()
