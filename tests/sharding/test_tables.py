from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from rankopt.errors import CardError
from rankopt.models.card import ModelCard, load_card
from rankopt.sharding.card_tables import card_tables, read_model_tables
from rankopt.sharding.tables import Table


def card_of(folder: Path, code: str, inputs: str = "") -> Path:
    """Write a module and its card."""
    (folder / "net.py").write_text("import torch\nfrom torch import nn\n" + dedent(code))
    card = folder / "card.yaml"
    lines = inputs or "- {name: a, kind: ids, columns: [a], num_ids: 10}"
    card.write_text(
        "name: mine\nfactory: net.py:make\noutputs: [{name: click, label: label}]\n"
        f"inputs:\n{lines}\n"
    )
    return card


def test_a_reference_model_lists_its_tables() -> None:
    model = read_model_tables("dlrm-synthetic")
    assert len(model.tables) == 26
    assert model.tables[0] == Table("tables_bags_0", "tables.bags.0", num_rows=20_000, dim=64)
    assert model.precision == "fp32"
    assert model.optimizer == "adam"
    from rankopt.models.build import make_module

    whole = sum(p.numel() for p in make_module(load_card("dlrm-synthetic")).parameters())
    tables = sum(table.num_values for table in model.tables)
    assert model.dense_parameters == whole - tables


def test_a_torchrec_model_lists_its_tables_by_their_names() -> None:
    model = read_model_tables("dlrm-torchrec-synthetic")
    assert [table.name for table in model.tables[:2]] == ["t_c1", "t_c2"]
    assert {table.path for table in model.tables} == {"tables"}
    assert all(table.pooled for table in model.tables)


def test_histories_count_their_longest_and_the_candidate() -> None:
    model = read_model_tables("din-movielens")
    by_name = {table.name: table for table in model.tables}
    card = load_card("din-movielens")
    rows = by_name["item"].num_rows
    history = next(x for x in card.inputs if x.kind == "ragged_ids" and x.num_ids == rows)
    assert by_name["item"].ids_per_row == history.max_length + 1
    assert not by_name["item"].pooled
    assert by_name["user_0"].ids_per_row == 1
    assert any("--ids-per-row" in note for note in model.notes)


BIG = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.big = nn.EmbeddingBag(2_000_000_000, 128, device="cpu")
        self.tied = nn.Embedding(1_000_000_000, 64)
        self.again = nn.Embedding(1_000_000_000, 64)
        self.again.weight = self.tied.weight
        nn.init.xavier_uniform_(self.big.weight)
        self.top = nn.Linear(128, 1)
        self.to("cpu")

def make():
    return Net()
"""


def test_a_terabyte_is_read_without_memory(tmp_path: Path) -> None:
    card = card_of(tmp_path, BIG)
    code = (
        "import resource; from rankopt.sharding.card_tables import read_model_tables;"
        f"model = read_model_tables({str(card)!r});"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "print([(t.name, t.num_rows) for t in model.tables], model.dense_parameters, peak)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    listed, peak_kib = done.stdout.rsplit(maxsplit=1)
    assert listed == "[('big', 2000000000), ('tied', 1000000000)] 129"
    assert int(peak_kib) < 2**20


def test_code_that_reads_small_values_while_it_builds_is_built(tmp_path: Path) -> None:
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            offsets = torch.arange(4).tolist()
            self.table = nn.Embedding(100_000_000, 10 + offsets[-1])

    def make():
        return Net()
    """
    (table,) = read_model_tables(card_of(tmp_path, code)).tables
    assert (table.num_rows, table.dim) == (100_000_000, 13)


def test_code_that_needs_its_weights_is_told_of_the_tables_file(tmp_path: Path) -> None:
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(100_000_000, 8)
            self.scale = float(self.table.weight.abs().max())

    def make():
        return Net()
    """
    with pytest.raises(CardError, match="cannot be built without its weights") as caught:
        read_model_tables(card_of(tmp_path, code))
    assert "num_rows, dim, ids_per_row" in str(caught.value)


def test_a_model_without_tables_is_refused(tmp_path: Path) -> None:
    code = """
    def make():
        return nn.Linear(3, 1)
    """
    with pytest.raises(CardError, match="Linear has no embedding table"):
        read_model_tables(card_of(tmp_path, code))


def test_an_unknown_card_names_the_nearest() -> None:
    with pytest.raises(CardError, match="Did you mean"):
        read_model_tables("dlrm-synthetc")


def test_weights_of_bags_and_features_reach_the_tables(tmp_path: Path) -> None:
    code = """
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    def make():
        return EmbeddingBagCollection([
            EmbeddingBagConfig(name="t-a", embedding_dim=8, num_embeddings=100,
                               feature_names=["f", "g"]),
            EmbeddingBagConfig(name="b", embedding_dim=8, num_embeddings=100, feature_names=["h"]),
        ], is_weighted=True)
    """
    inputs = dedent("""
    - kind: kjt
      name: x
      features:
        - {key: f, column: f, num_ids: 100, max_length: 5, weights_column: wf}
        - {key: g, column: g, num_ids: 100, weights_column: wg}
    """)
    model = read_model_tables(card_of(tmp_path, code, inputs))
    first, second = model.tables
    assert (first.name, first.ids_per_row, first.weighted) == ("t-a", 6.0, True)
    assert (second.ids_per_row, second.weighted) == (1.0, False)
    assert any("no input names the features of b" in note for note in model.notes)


def test_a_tables_file_is_a_model_that_exists_nowhere() -> None:
    model = read_model_tables("1tb")
    assert sum(table.num_values * 4 for table in model.tables) >= 10**12
    assert len({table.name for table in model.tables}) == len(model.tables) == 68
    assert model.dense_parameters == 20_000_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tables: []\nname: a", "tables"),
        ("tables: [{name: a, num_rows: 0, dim: 4, count: -1}]\nname: a", "count"),
        ("tables: [{name: a, num_rows: 3, dim: 4, rows: 1}]\nname: a", "rows"),
        ("tables: [{name: a, num_rows: 3, dim: 4}, {name: a, num_rows: 3, dim: 4}]\nname: a", "tw"),
        (
            "tables: [{name: a, num_rows: 3, dim: 4, count: 2}, {name: a_0, num_rows: 3, dim: 4}]\n"
            "name: a",
            "a_0",
        ),
    ],
)
def test_a_wrong_tables_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "tables.yaml"
    file.write_text(text)
    with pytest.raises(CardError, match=said):
        read_model_tables(file)


def test_lookups_are_overridden_by_name() -> None:
    card: ModelCard = load_card("din-movielens")
    model = card_tables(card).with_ids_per_row({"item": 12.5})
    assert {table.name: table.ids_per_row for table in model.tables}["item"] == 12.5
    with pytest.raises(CardError, match="--ids-per-row itme: names no table") as caught:
        model.with_ids_per_row({"itme": 1.0, "usr": 2.0})
    assert len(caught.value.problems) == 2
