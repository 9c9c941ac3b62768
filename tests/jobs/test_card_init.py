"""A first card: what looking at a module tells is right, and what it cannot tell is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rankopt.errors import CardError, DataError, InputError, OutputExistsError
from rankopt.jobs.card_draft import Entry, all_doubts, written
from rankopt.jobs.card_init import FirstCard, init_card
from rankopt.models.card import ModelCard, load_card

NET = '''
from collections import OrderedDict, namedtuple

import torch
from torch import nn

Sparse = namedtuple("Sparse", "name vocabulary_size")
Dense = namedtuple("Dense", "name dimension")
VarLen = namedtuple("VarLen", "name vocabulary_size maxlen length_name")


class DeepCtr(nn.Module):
    """Declares its packed input as DeepCTR-Torch's models do."""

    def __init__(self, empty=True):
        super().__init__()
        self.empty = empty
        self.feature_index = OrderedDict(
            user=(0, 1), price=(1, 2), seen=(2, 6), seen_length=(6, 7), item=(7, 8), vector=(8, 10)
        )
        self.columns = [
            Sparse("user", 50), Dense("price", 1), VarLen("seen", 120, 4, "seen_length"),
            Sparse("item", 120), Dense("vector", 2),
        ]
        self.embedding_dict = nn.ModuleDict(
            {"user": nn.Embedding(50, 4), "item": nn.Embedding(120, 4)}
        )
        self.top = nn.Linear(11, 1)

    def forward(self, X):
        if not self.empty and int(X[:, 6].min()) == 0:
            raise ValueError("an empty list")
        ids = X.long()
        item = self.embedding_dict["item"]
        seen = item(ids[:, 2:6]) * (torch.arange(4) < ids[:, 6:7]).unsqueeze(2)
        parts = [self.embedding_dict["user"](ids[:, 0]), item(ids[:, 7]) + seen.sum(1)]
        return torch.sigmoid(self.top(torch.cat([*parts, X[:, 1:2], X[:, 8:10]], 1)))


class Feature:
    def __init__(self, name, vocab_size=None, pooling=None, padding_idx=None, embed_dim=4):
        self.name, self.embed_dim = name, embed_dim
        if vocab_size:
            self.vocab_size, self.padding_idx = vocab_size, padding_idx
        if pooling:
            self.pooling = pooling


class Hub(nn.Module):
    """Takes a dict and holds feature lists, as Torch-RecHub's models do."""

    def __init__(self, places=None):
        super().__init__()
        self.ids = [Feature("user", 50), Feature("item", 120)]
        self.rest = [Feature("seen", 120, "mean", 0), Feature("price", embed_dim=1)]
        sizes = {"user": 50, "item": 120}
        self.tables = nn.ModuleDict({k: nn.Embedding(n, 4) for k, n in sizes.items()})
        self.position = nn.Embedding(places, 4) if places else None
        self.top = nn.Linear(9, 2)

    def forward(self, x):
        seen = self.tables["item"](x["seen"])
        if self.position is not None:
            seen = seen + self.position(torch.arange(seen.shape[1]))
        item = self.tables["item"](x["item"].long()) + seen.mean(1)
        joined = torch.cat([self.tables["user"](x["user"]), item, x["price"]], 1)
        logits = self.top(joined)
        return torch.sigmoid(logits[:, :1]), logits[:, 1:]


class Plain(nn.Module):
    """Declares nothing: embedding tables and linear layers."""

    def __init__(self, users=50):
        super().__init__()
        self.user_table, self.left, self.right = (nn.Embedding(n, 4) for n in (users, 30, 40))
        self.bag = nn.EmbeddingBag(25, 4, mode="sum")
        self.top = nn.Linear(19, 1)

    def forward(self, user, sparse, dense, seen_values, seen_offsets):
        parts = [self.user_table(user), self.left(sparse[:, 0]), self.right(sparse[:, 1])]
        parts += [self.bag(seen_values, seen_offsets[:-1]), dense]
        return self.top(torch.cat(parts, 1)).squeeze(1)


class Matrix(nn.Module):
    """One float matrix, and nothing that says what is in it."""

    def __init__(self, first=30, third=7):
        super().__init__()
        self.first, self.third = nn.Embedding(first, 4), nn.Embedding(third, 4)
        self.top = nn.Linear(9, 1)

    def forward(self, x):
        ids = x.long()
        return self.top(torch.cat([self.first(ids[:, 0]), self.third(ids[:, 2]), x[:, 1:2]], 1))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.items, self.users = nn.Embedding(20, 4), nn.Embedding(9, 4)

    def forward(self, batch, weight):
        pooled = self.items(batch["seen"]).mean(1) * self.users(batch["user"][0].long())
        return {"ctr": torch.sigmoid(pooled.sum(1)), "gmv": pooled.sum(1) + weight[:, 0]}


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(20, 4)

    def forward(self, item):
        return self.items(item).repeat(1, 2).squeeze().sum(1)


class Never(nn.Module):
    def forward(self, left, right):
        raise ValueError("never")
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def card_of(first: FirstCard, folder: Path) -> ModelCard:
    """Read a card back from disk as `load_card` does."""
    file = folder / "read-back.yaml"
    file.write_text(first.text)
    return load_card(file)


def plain(card: ModelCard) -> list[dict[str, Any]]:
    return [item.model_dump(exclude_defaults=True) for item in card.inputs]


def test_a_declared_layout_is_taken_whole(folder: Path) -> None:
    first = init_card("net.py:DeepCtr")
    card = card_of(first, folder)
    assert first.missing == ()
    (item,) = card.inputs
    assert item.kind == "packed"
    assert item.argument == "X"
    assert [column.model_dump(exclude_defaults=True) for column in item.columns] == [
        {"name": "user", "num_ids": 50},
        {"name": "price"},
        {"name": "seen", "num_ids": 120, "length": 4},
        {"length_of": "seen"},
        {"name": "item", "num_ids": 120},
        {"name": "vector_0"},
        {"name": "vector_1"},
    ]
    assert card.outputs[0].activation == "probability"
    assert card.min_batch == 1
    doubts = "inputs[0].columns[5]: the columns of the 2 numbers of 'vector'"
    assert doubts in first.doubts
    assert "{name: vector_0}  # could not tell: the columns of" in first.text


def test_lists_that_must_not_be_empty_are_marked(folder: Path) -> None:
    card = card_of(init_card("net.py:DeepCtr", config={"empty": False}), folder)
    assert card.inputs[0].kind == "packed"
    assert [c.at_least for c in card.inputs[0].columns if c.length_of] == [1]
    assert card.config == {"empty": False}


def test_feature_lists_become_inputs_of_a_dict(folder: Path) -> None:
    first = init_card("net.py:Hub")
    card = card_of(first, folder)
    assert card.call == "dict"
    assert plain(card) == [
        {"name": "user", "kind": "ids", "num_ids": 50, "columns": ("user",)},
        {"name": "item", "kind": "ids", "num_ids": 120, "columns": ("item",)},
        {
            "name": "seen",
            "kind": "ragged_ids",
            "column": "seen",
            "num_ids": 120,
            "max_length": 50,
            "layout": "padded",
        },
        {"name": "price", "kind": "dense", "columns": ("price",)},
    ]
    assert [(o.index, o.activation) for o in card.outputs] == [(0, "probability"), (1, "logit")]
    assert "inputs[2]: max_length" in first.doubts


def test_the_longest_list_that_a_table_of_positions_takes_is_found(folder: Path) -> None:
    card = card_of(init_card("net.py:Hub", config={"places": 17}), folder)
    assert card.inputs[2].kind == "ragged_ids"
    assert card.inputs[2].max_length == 17


def test_a_batch_tells_lengths_and_padding_and_gives_its_label_away(folder: Path) -> None:
    seen = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4], [0, 7, 8, 9]])
    features = {"user": torch.tensor([[1], [2], [3]]).squeeze(1), "item": torch.tensor([4, 5, 6])}
    batch = ({**features, "seen": seen, "price": torch.rand(3, 1)}, torch.ones(3))
    torch.save(batch, folder / "batch.pt")
    first = init_card("net.py:Hub", batch=folder / "batch.pt")
    item = card_of(first, folder).inputs[2]
    assert item.kind == "ragged_ids"
    assert (item.max_length, item.pad_side) == (4, "start")
    assert not any(doubt.startswith("inputs[2]") for doubt in first.doubts)


@settings(max_examples=15)
@given(users=st.integers(2, 5000))
def test_what_nothing_declares_is_found_by_trying(
    tmp_path_factory: pytest.TempPathFactory, users: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "plain.py").write_text(NET)
    first = init_card(f"{folder / 'plain.py'}:Plain", config={"users": users})
    assert first.missing == ()
    user, sparse, dense, seen = card_of(first, folder).inputs
    assert user.kind == sparse.kind == "ids"
    assert user.num_ids == users
    assert sparse.num_ids == (30, 40)
    assert dense.kind == "dense"
    assert len(dense.columns) == 3
    assert seen.kind == "ragged_ids"
    assert (seen.layout, seen.num_ids) == ("values_offsets", 25)
    assert sum("its kind; nothing declares it" in doubt for doubt in first.doubts) == 4


@settings(max_examples=15)
@given(first_rows=st.integers(2, 3000), third_rows=st.integers(2, 3000))
def test_ids_in_a_float_matrix_are_told_from_real_numbers(
    tmp_path_factory: pytest.TempPathFactory, first_rows: int, third_rows: int
) -> None:
    folder = tmp_path_factory.getbasetemp()
    (folder / "matrix.py").write_text(NET)
    torch.save(torch.zeros(3, 3), folder / "matrix.pt")
    config = {"first": first_rows, "third": third_rows}
    first = init_card(f"{folder / 'matrix.py'}:Matrix", config=config, batch=folder / "matrix.pt")
    (item,) = card_of(first, folder).inputs
    assert item.kind == "packed"
    assert [column.num_ids for column in item.columns] == [first_rows, None, third_rows]
    assert "inputs[0]: the columns' names" in first.doubts


def test_nested_containers_become_dotted_arguments(folder: Path) -> None:
    inner = {"seen": torch.randint(0, 20, (3, 6)), "user": [torch.tensor([1.0, 2.0, 3.0])]}
    batch = {"batch": inner, "weight": torch.rand(3, 1), "click": torch.ones(3)}
    torch.save(batch, folder / "batch.pt")
    first = init_card("net.py:Nested", batch="batch.pt")
    card = card_of(first, folder)
    assert [item.parameter for item in card.inputs] == ["batch.seen", "batch.user.0", "weight"]
    assert [item.kind for item in card.inputs] == ["ragged_ids", "ids", "dense"]
    assert [item.num_ids for item in card.inputs[:2]] == [20, 9]
    assert card.inputs[1].dtype == "float32"
    assert "inputs[0]: whether these are a padded list or 6 columns of kind ids" in first.doubts
    outputs = [(o.name, o.index, o.activation) for o in card.outputs]
    assert outputs == [("ctr", "ctr", "probability"), ("gmv", "gmv", "logit")]


def test_embedding_collections_give_a_keyed_jagged_tensor(folder: Path) -> None:
    from torchrec import KeyedJaggedTensor

    config = {"keys": ["a", "b"], "num_ids": [9, 5], "num_dense": 3, "embedding_dim": 4}
    config |= {"bottom_mlp": [8], "top_mlp": [8]}
    factory = "rankopt.models.dlrm_torchrec:DLRMTorchrec"
    first = init_card(factory, config=config)
    dense, sparse = card_of(first, folder).inputs
    assert dense.kind == "dense"
    assert len(dense.columns) == 3
    assert sparse.kind == "kjt"
    assert [(f.key, f.num_ids) for f in sparse.features] == [("a", 9), ("b", 5)]
    assert "inputs[1]: max_length of each feature, 1 when left out" in first.doubts

    jagged = KeyedJaggedTensor(
        keys=["b", "a"], values=torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([3, 0, 1, 1])
    )
    torch.save((torch.rand(2, 3), jagged), folder / "batch.pt")
    sparse = card_of(init_card(factory, config=config, batch="batch.pt"), folder).inputs[1]
    assert sparse.kind == "kjt"
    assert [(f.key, f.num_ids, f.max_length) for f in sparse.features] == [("b", 5, 3), ("a", 9, 1)]


def test_code_that_cannot_score_one_row_gets_a_min_batch(folder: Path) -> None:
    assert card_of(init_card("net.py:Single"), folder).min_batch == 2


def test_what_never_runs_is_written_down_as_far_as_it_is_known(folder: Path) -> None:
    first = init_card("net.py:Never", out="never.yaml")
    assert [p for p in first.missing if p.startswith("card: inputs[")] == list(first.missing)
    assert "- {name: left}  # could not tell: its kind, columns and num_ids" in first.text
    with pytest.raises(CardError, match=r"inputs\[1\]"):
        load_card(folder / "never.yaml")


@pytest.fixture
def rows(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    users = np.sort(generator.integers(1, 50, 400))
    frame = pd.DataFrame(
        {
            "User": users,
            "item": generator.integers(1, 120, 400),
            "Seen": [list(range(1, 3 + user % 5)) for user in users],
            "price": generator.random(400),
            "is_click": generator.integers(0, 2, 400),
            "rating": generator.integers(1, 6, 400),
        }
    )
    frame.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def test_data_gives_columns_lengths_labels_and_request_level(folder: Path, rows: Path) -> None:
    first = init_card("net.py:Hub", data=rows, out=folder / "cards" / "hub.yaml")
    card = load_card(folder / "cards" / "hub.yaml")
    assert card.data_columns == ("User", "item", "Seen", "price")
    assert card.data.test == "../rows.parquet"
    assert card.factory == "../net.py:Hub"
    assert card.data.request_key == "User"
    assert [item.name for item in card.inputs if item.request_level] == ["user", "seen"]
    assert card.inputs[2].kind == "ragged_ids"
    assert card.inputs[2].max_length == 6
    assert card.outputs[0].label == "is_click"
    assert "outputs[0]: whether this is its label; it goes by the name" in first.doubts
    assert any(
        doubt.startswith("outputs[1]: its label. Columns of 0 and 1") for doubt in first.doubts
    )


def test_a_column_that_the_data_lacks_is_named_with_the_nearest(folder: Path, rows: Path) -> None:
    first = init_card("net.py:DeepCtr", data=rows)
    named = [d for d in first.doubts if "its column" in d]
    assert [d.partition(":")[0] for d in named] == ["inputs[0].columns[5]", "inputs[0].columns[6]"]
    assert "the data has no 'vector_0'. Known: Seen, User, is_click" in named[0]
    columns = card_of(first, folder).inputs[0].data_columns
    assert columns[:3] == ("User", "price", "Seen")


def test_a_folder_of_splits_is_named_split_by_split(folder: Path, rows: Path) -> None:
    (folder / "splits").mkdir()
    for name in ("train", "validation", "test"):
        (folder / "splits" / f"{name}.parquet").write_bytes(rows.read_bytes())
    data = card_of(init_card("net.py:Hub", data="splits"), folder).data
    assert (data.train, data.validation, data.test) == tuple(
        f"splits/{name}.parquet" for name in ("train", "validation", "test")
    )


def test_a_card_is_not_overwritten_unasked(folder: Path) -> None:
    (folder / "card.yaml").write_text("mine")
    with pytest.raises(OutputExistsError):
        init_card("net.py:Hub", out="card.yaml")
    assert (folder / "card.yaml").read_text() == "mine"
    init_card("net.py:Hub", out="card.yaml", overwrite=True)
    assert load_card(folder / "card.yaml").name == "card"


def test_a_checkpoint_must_fit_and_is_named(folder: Path) -> None:
    from rankopt.errors import CheckpointError
    from rankopt.models.build import make_module
    from rankopt.models.checkpoint import save_checkpoint

    card = card_of(init_card("net.py:Hub"), folder)
    save_checkpoint(make_module(card).state_dict(), folder / "w.safetensors")
    assert card_of(init_card("net.py:Hub", checkpoint="w.safetensors"), folder).checkpoint == (
        "w.safetensors"
    )
    with pytest.raises(CheckpointError):
        init_card("net.py:Plain", checkpoint="w.safetensors")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"junk", "cannot be read"),
        ({"left": torch.ones(2)}, "forward(item), does not run on it; got '{left: float32 [2]}'"),
        ({"left": Path("x")}, "holds a pathlib"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_batch_that_is_none_is_refused(folder: Path, content: Any, expected: str) -> None:
    if isinstance(content, bytes):
        (folder / "batch.pt").write_bytes(content)
    elif content is not None:
        torch.save(content, folder / "batch.pt")
    with pytest.raises(InputError) as caught:
        init_card("net.py:Single", batch="batch.pt", out="card.yaml")
    assert expected in str(caught.value)
    assert not (folder / "card.yaml").exists()


def test_what_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(CardError, match="Did you mean 'Hub'"):
        init_card("net.py:Hubb")
    with pytest.raises(DataError):
        init_card("net.py:Hub", data="none.parquet")


@given(
    name=st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=200),
    number=st.integers(),
)
def test_a_written_entry_reads_back(name: str, number: int) -> None:
    import yaml

    inner = Entry(name=name, num_ids=number).doubt("one").doubt("two")
    fields = Entry(
        name=name, config={"a": [name, number]}, inputs=[Entry(columns=[inner], kind=name)]
    )
    text = written(fields)
    assert yaml.safe_load(text) == {
        "name": name,
        "config": {"a": [name, number]},
        "inputs": [{"kind": name, "columns": [{"name": name, "num_ids": number}]}],
    }
    assert all_doubts(fields) == ["inputs[0].columns[0]: one", "inputs[0].columns[0]: two"]
    assert text.count("# could not tell: one; two") == 1
