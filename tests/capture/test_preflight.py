"""A card checked against its module in plain PyTorch: what is wrong is found, with its field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rankopt.capture.preflight import check_module
from rankopt.capture.scores import ends_with_sigmoid
from rankopt.errors import CardError
from rankopt.models.card import ModelCard

USER = {"name": "user_id", "num_ids": 50}
ITEM = {"name": "item_id", "num_ids": 120}
PRICE = {"name": "price"}
SEEN = {"name": "seen", "num_ids": 120, "length": 4}
LENGTH = {"length_of": "seen"}
PROBABILITY = {"label": "label", "activation": "probability"}


class Packed(nn.Module):
    """A click model over one packed matrix: user, item, price, seen items and their number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item = nn.Embedding(50, 4), nn.Embedding(120, 4)
        self.top = nn.Linear(9, 1)

    def forward(self, X: Tensor) -> Tensor:
        ids = X.long()
        seen = self.item(ids[:, 3:7]) * (torch.arange(4) < ids[:, 7:]).unsqueeze(2)
        parts = [self.user(ids[:, 0]), self.item(ids[:, 1]) + seen.sum(1), X[:, 2:3]]
        return torch.sigmoid(self.top(torch.cat(parts, 1)))


class Lookup(nn.Module):
    """Scores one id column by a table, read in a way that the test chooses."""

    def __init__(self, read: Callable[[Tensor, Tensor], Tensor], rows: int = 10) -> None:
        super().__init__()
        self.read = read
        self.table = nn.Parameter(torch.randn(rows, 3, generator=torch.Generator().manual_seed(0)))

    def forward(self, item: Tensor) -> Tensor:
        return self.read(item, self.table).sum(1)


class Forward(nn.Module):
    """Any function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1, _weight=torch.linspace(-3, 3, 10)[:, None])
        self.function = function

    def forward(self, item: Tensor) -> Any:
        return self.function(self.table(item))


def card(inputs: list[dict[str, Any]], *outputs: dict[str, Any], **rest: Any) -> ModelCard:
    return ModelCard.model_validate(
        {
            "name": "m",
            "factory": "net:make",
            "inputs": inputs,
            "outputs": outputs or ({"label": "label"},),
            **rest,
        }
    )


def packed(*columns: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": "x", "argument": "X", "kind": "packed", "columns": list(columns)}]


def ids(name: str = "item", num_ids: int = 10, **rest: Any) -> dict[str, Any]:
    return {"name": name, "kind": "ids", "num_ids": num_ids, **rest}


def dense(*columns: str) -> dict[str, Any]:
    return {"name": "dense", "kind": "dense", "columns": list(columns)}


def refusal(model_card: ModelCard, module: nn.Module) -> list[str]:
    with pytest.raises(CardError) as caught:
        check_module(model_card, module.eval())
    return [str(problem).removeprefix("card 'm': ") for problem in caught.value.problems]


SOUND = card(packed(USER, ITEM, PRICE, SEEN, LENGTH), PROBABILITY)


def test_a_sound_card_has_nothing_to_tell() -> None:
    assert check_module(SOUND, Packed().eval()) == ()


def test_the_module_is_called_and_never_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("copied")

    module = Packed().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    monkeypatch.setattr(Packed, "__deepcopy__", refuse, raising=False)
    monkeypatch.setattr(Packed, "__reduce_ex__", refuse)
    check_module(SOUND, module)
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_every_column_at_anothers_place_is_named() -> None:
    problems = refusal(card(packed(ITEM, PRICE, USER, SEEN, LENGTH), PROBABILITY), Packed())
    assert len(problems) == 2
    assert problems[0].startswith(
        "inputs[0].columns[0]: 'item_id': ids up to 119 do not fit the table that the module reads "
        "them from (user, 50 rows). The largest that fits is 49."
    )
    assert problems[1].startswith("inputs[0].columns[1]: 'price': its real numbers are used as ids")
    assert all("Columns may be in the wrong order" in problem for problem in problems)


def test_tables_of_one_size_are_told_apart_by_the_layout_the_module_declares() -> None:
    module = Packed()
    module.user = nn.Embedding(120, 4)
    module.feature_index = {"user_id": (0, 1), "item_id": (1, 2), "seen": (3, 7)}
    wide_user = {**USER, "num_ids": 120}
    right = card(packed(wide_user, ITEM, PRICE, SEEN, LENGTH), PROBABILITY)
    assert check_module(right, module.eval()) == ()
    swapped = card(packed(ITEM, wide_user, PRICE, SEEN, LENGTH), PROBABILITY)
    assert refusal(swapped, module) == [
        "inputs[0].columns[0]: 'item_id' must stand at place 1, where the module's feature_index "
        "has it; got 'place 0'.",
        "inputs[0].columns[1]: 'user_id' must stand at place 0, where the module's feature_index "
        "has it; got 'place 1'.",
    ]


READS = {
    "embedding": F.embedding,
    "bag": lambda ids, table: F.embedding_bag(ids[:, None], table, mode="sum"),
    "index": lambda ids, table: table[ids],
    "index_select": lambda ids, table: table.index_select(0, ids),
    "gather": lambda ids, table: table.gather(0, ids[:, None].expand(-1, 3)),
    "one_hot": lambda ids, table: F.one_hot(ids, len(table)).float() @ table,
    "offset": lambda ids, table: table[ids + 2],
}


@pytest.mark.parametrize("name", READS)
def test_however_a_table_is_read_its_size_is_found(name: str) -> None:
    num_ids = 8 if name == "offset" else 10
    assert check_module(card([ids(num_ids=num_ids)]), Lookup(READS[name]).eval()) == ()
    (problem,) = refusal(card([ids(num_ids=num_ids + 1)]), Lookup(READS[name]))
    assert problem.startswith(f"inputs[0].num_ids: 'item': ids up to {num_ids} do not fit")
    assert f"The largest that fits is {num_ids - 1}." in problem


@settings(max_examples=40)
@given(rows=st.integers(1, 3000), excess=st.integers(1, 100_000))
def test_the_largest_id_that_fits_is_exact(rows: int, excess: int) -> None:
    (problem,) = refusal(card([ids(num_ids=rows + excess)]), Lookup(F.embedding, rows))
    assert f"ids up to {rows + excess - 1} do not fit" in problem
    assert f"The largest that fits is {rows - 1}." in problem


def test_a_check_in_the_authors_own_code_counts_and_is_named() -> None:
    def guarded(ids: Tensor, table: Tensor) -> Tensor:
        if int(ids.max()) > 6:
            raise ValueError("item beyond the catalogue")
        return table[ids]

    (problem,) = refusal(card([ids()]), Lookup(guarded))
    assert "The largest that fits is 6." in problem
    assert "ValueError at " in problem
    assert 'raise ValueError("item beyond the catalogue")' in problem


class Lists(nn.Module):
    def __init__(self, **layout: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(30, 1, mode="sum", include_last_offset=True)
        self.table = nn.Embedding(30, 1)

    def forward(
        self,
        items: Tensor | None = None,
        items_values: Tensor | None = None,
        items_offsets: Tensor | None = None,
    ) -> Tensor:
        if items is not None:
            return self.table(items).sum((1, 2))
        return self.bag(items_values, items_offsets).squeeze(1)


@pytest.mark.parametrize("layout", ["padded", "values_offsets"])
def test_ragged_ids_are_probed(layout: str) -> None:
    item = {"name": "items", "kind": "ragged_ids", "column": "seen", "max_length": 3}
    assert check_module(card([{**item, "layout": layout, "num_ids": 30}]), Lists().eval()) == ()
    (problem,) = refusal(card([{**item, "layout": layout, "num_ids": 31}]), Lists())
    assert problem.startswith("inputs[0].num_ids: 'seen': ids up to 30 do not fit")


def test_each_key_of_a_keyed_jagged_tensor_is_probed() -> None:
    from rankopt.models.dlrm_torchrec import DLRMTorchrec

    module = DLRMTorchrec(
        ["a", "b", "c"], [9, 5, 7], num_dense=2, embedding_dim=4, bottom_mlp=(4,), top_mlp=(4,)
    )

    def made(*num_ids: int) -> ModelCard:
        features = [
            {"key": key, "column": key.upper(), "num_ids": rows, "max_length": length}
            for key, rows, length in zip("abc", num_ids, (1, 3, 2), strict=True)
        ]
        return card([dense("I1", "I2"), {"name": "sparse", "kind": "kjt", "features": features}])

    assert check_module(made(9, 5, 7), module.eval()) == ()
    problems = refusal(made(9, 6, 8), module)
    assert [problem.partition(":")[0] for problem in problems] == [
        "inputs[1].features[1].num_ids",
        "inputs[1].features[2].num_ids",
    ]
    assert "'B': ids up to 5 do not fit" in problems[0]


@pytest.mark.parametrize(
    ("given_dtype", "read", "expected"),
    [
        ("float32", F.embedding, "int64"),
        ("int32", lambda ids, table: F.one_hot(ids, 10).float() @ table, "int64"),
        ("int64", lambda ids, table: ids[:, None] @ table[:1], "float32"),
    ],
)
def test_a_wrong_dtype_is_named_with_the_one_that_runs(
    given_dtype: str, read: Callable[[Tensor, Tensor], Tensor], expected: str
) -> None:
    (problem,) = refusal(card([ids(dtype=given_dtype)]), Lookup(read))
    wanted = f"inputs[0].dtype: must be {expected}, with which the module runs ('item')"
    assert problem.startswith(f"{wanted}; got {given_dtype!r}.")


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def forward(self, left: Tensor, right: Tensor, dense: Tensor) -> Tensor:
        return (self.table(left) * self.table(right) + dense).sum(1)


def test_all_wrong_dtypes_are_named_and_no_right_one() -> None:
    inputs = [
        ids("left", dtype="float32"),
        ids("right", dtype="float32"),
        {"name": "dense", "kind": "dense", "columns": ["a", "b"]},
    ]
    problems = refusal(card(inputs), TwoTables())
    assert [problem.partition(":")[0] for problem in problems] == [
        "inputs[0].dtype",
        "inputs[1].dtype",
    ]


def test_real_numbers_given_for_ids_are_named() -> None:
    inputs = [{"name": "item", "kind": "dense", "columns": ["item"]}]
    (problem,) = refusal(card(inputs), Lookup(lambda ids, table: F.embedding(ids, table)[:, 0]))
    assert problem.startswith("inputs[0].kind: must be ids of dtype int64")


def two_tasks(score: Tensor) -> Tensor:
    return torch.cat([torch.sigmoid(score), score], 1)


def test_a_task_that_is_not_there_is_named() -> None:
    outputs = [
        {"name": "click", "label": "click", "index": 0, "activation": "probability"},
        {"name": "like", "label": "like", "index": 2},
    ]
    (problem,) = refusal(card([ids()], *outputs), Forward(two_tasks))
    assert problem.startswith("outputs[1].index: must be one of 0 to 1 (columns of")
    assert "got 2" in problem


def test_a_task_that_is_not_used_is_told() -> None:
    output = {"name": "click", "label": "click", "index": 0, "activation": "probability"}
    (note,) = check_module(card([ids()], output), Forward(two_tasks).eval())
    assert "returns 2 scores per row and the card names 1; not used: index 1" in note
    last = {**output, "name": "like", "index": -1, "activation": "logit"}
    assert check_module(card([ids()], output, last), Forward(two_tasks).eval()) == ()


@pytest.mark.parametrize(
    ("function", "output", "expected"),
    [
        (two_tasks, {}, "outputs[0]: must be one score per row, [B] or [B, 1]"),
        (lambda s: {"a": s, "b": s}, {}, "outputs[0].index: is required, since the module returns"),
        (lambda s: {"a": s}, {"index": "A"}, "outputs[0].index: must be one of 'a'; got 'A'"),
        (lambda s: (s, s), {"index": 2}, "outputs[0].index: must be one of 0 to 1; got 2"),
        (lambda s: (s > 0).long(), {}, "outputs[0]: must be floating-point scores; got 'int64'"),
        (lambda s: s[:1], {}, "outputs[0]: must be one score per row (64 rows); got [1]"),
        (
            lambda s: s,
            {"activation": "probability"},
            "outputs[0].activation: 'probability' needs scores in [0, 1]; got '-2.333 to 3'. "
            "This looks like a logit: set activation: logit.",
        ),
    ],
)
def test_what_an_output_gets_wrong_is_named(
    function: Callable[[Tensor], Any], output: dict[str, Any], expected: str
) -> None:
    (problem,) = refusal(card([ids()], {"label": "label", **output}), Forward(function))
    assert expected in problem


def test_all_problems_come_at_once() -> None:
    outputs = [{"name": "a", "label": "a", "index": 3}, {"name": "b", "label": "b", "index": 4}]
    problems = refusal(card([ids(num_ids=11)], *outputs), Forward(two_tasks))
    fields = [problem.partition(":")[0] for problem in problems]
    assert fields == ["inputs[0].num_ids", "outputs[0].index", "outputs[1].index"]


def test_a_logit_that_is_a_probability_is_told() -> None:
    (note,) = check_module(card([ids()]), Forward(torch.sigmoid).eval())
    assert "outputs[0].activation: all 64 scores of 'score' come out of a sigmoid" in note
    # A logit that just happens to lie in [0, 1] is none.
    assert check_module(card([ids()]), Forward(lambda s: s / 10 + 0.5).eval()) == ()


def test_real_rows_decide_on_activations_when_given() -> None:
    module = Forward(lambda s: s).eval()
    probability = card([ids()], PROBABILITY)
    assert check_module(probability, module, {"item": torch.tensor([5, 6, 5])}) == ()
    with pytest.raises(CardError, match="looks like a logit"):
        check_module(probability, module, {"item": torch.tensor([5, 0])})


def test_a_misspelled_argument_is_named() -> None:
    problems = refusal(card([ids("itme")]), Forward(lambda s: s))
    assert problems[0] == (
        "inputs[0] (itme): passes 'itme', which forward does not take. Did you mean 'item'?"
    )
    assert "nothing passes 'item', which forward requires" in problems[1]


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.table(batch["user"]) + self.table(batch["item"])


@pytest.mark.parametrize(
    ("way", "module", "expected"),
    [
        ("keywords", Batch(), "dict"),
        ("positional", Batch(), "dict"),
        ("dict", TwoTables(), "keywords"),
        ("list", TwoTables(), "keywords"),
    ],
)
def test_a_wrong_call_is_named_with_the_one_that_runs(
    way: str, module: nn.Module, expected: str
) -> None:
    inputs = [ids("user"), ids("item")]
    if expected == "keywords":
        inputs = [ids("left"), ids("right"), dense("a", "b")]
    problems = refusal(card(inputs, call=way), module)
    assert problems[0].startswith(f"call: must be {expected}") or problems[0].startswith(
        f"call: {way!r} needs a forward"
    )


def test_a_key_that_nothing_passes_is_named() -> None:
    (problem,) = refusal(card([ids("user"), ids("itme")], call="dict"), Batch())
    assert problem.startswith(
        "inputs: nothing passes 'item', which the module reads. Did you mean 'itme'?"
    )
    assert 'self.table(batch["item"])' in problem


def test_anything_else_names_the_authors_line_and_what_was_given() -> None:
    inputs = [ids("left"), ids("right"), dense("a", "b", "c")]
    (problem,) = refusal(card(inputs), TwoTables())
    assert "inputs: the module raised RuntimeError: The size of tensor a (2)" in problem
    assert f"{__file__}:" in problem
    assert "`return (self.table(left) * self.table(right) + dense).sum(1)`" in problem
    assert "left int64 [4], right int64 [4], dense float32 [4, 3]" in problem


def test_code_that_cannot_score_one_row_is_told() -> None:
    (problem,) = refusal(card([ids()]), Forward(lambda s: s.repeat(1, 2).squeeze()[:, 0]))
    assert "min_batch: must be 2" in problem
    assert "cannot score one row: too many indices" in problem


def test_code_that_cannot_take_an_empty_list_is_told() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(30, 1)

        def forward(self, items_values: Tensor, items_lengths: Tensor) -> Tensor:
            if int(items_lengths.min()) == 0:
                raise ValueError("no last item")
            return self.table(items_values[items_lengths.cumsum(0) - 1]).squeeze(1)

    item = {"name": "items", "kind": "ragged_ids", "column": "c", "num_ids": 30, "max_length": 3}
    (note,) = check_module(card([item]), Last().eval())
    assert "cannot take an empty list: no last item" in note


def test_columns_that_are_not_read_are_told() -> None:
    class Lazy(Packed):
        def forward(self, X: Tensor) -> Tensor:
            return torch.sigmoid(self.top(self.user(X[:, 0].long()).repeat(1, 3)[:, :9]))

    (note,) = check_module(SOUND, Lazy().eval())
    assert "may not read it: inputs[0].columns[1] (item_id), inputs[0].columns[2] (price)" in note
    assert "columns[0]" not in note


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (torch.sigmoid, True),
        (lambda x: torch.sigmoid(x).squeeze(1).clamp(1e-6, 1), True),
        (lambda x: two_tasks(x)[:, 0], False),
        (lambda x: torch.cat([torch.sigmoid(x), torch.sigmoid(2 * x)], 1)[:, 1], True),
        (lambda x: torch.sigmoid(x) * torch.sigmoid(3 * x), True),
        (lambda x: torch.sigmoid(x) * 3.0, False),
        (lambda x: torch.sigmoid(x) + 1, False),
        (lambda x: x.softmax(1), True),
        (lambda x: x, False),
        (lambda x: torch.sigmoid(x).detach(), None),
    ],
)
def test_a_sigmoid_is_seen_through_what_keeps_its_range(
    function: Callable[[Tensor], Tensor], expected: bool | None
) -> None:
    assert ends_with_sigmoid(function(torch.randn(4, 1, requires_grad=True) * 1.0)) is expected
