"""What a card's inputs become when the module is called, and what a wrong card is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankopt.errors import CardError
from rankopt.models.build import check_forward_signature
from rankopt.models.card import ModelCard, load_card
from rankopt.models.serving import ServingModule, pad

OUTPUTS = [{"name": "click", "label": "label"}]


def card_of(*inputs: dict[str, Any], call: str = "keywords") -> ModelCard:
    return ModelCard.model_validate(
        {"name": "m", "factory": "m:M", "inputs": inputs, "outputs": OUTPUTS, "call": call}
    )


class Recorder(nn.Module):
    """Remembers what it was called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.args, self.kwargs = args, kwargs
        return torch.zeros(3)


def called_with(card: ModelCard, *tensors: Tensor) -> Recorder:
    recorder = Recorder()
    ServingModule(card, recorder)(*tensors)
    return recorder


USER = {"kind": "ids", "name": "user", "num_ids": 9}
PRICE = {"kind": "dense", "name": "price", "columns": ["p"]}
IDS, PRICES = torch.tensor([1, 2, 3]), torch.ones(3, 1)


class TestCallForms:
    def test_positional_keeps_the_order_of_the_card(self) -> None:
        seen = called_with(card_of(PRICE, USER, call="positional"), PRICES, IDS)
        assert [value is tensor for value, tensor in zip(seen.args, (PRICES, IDS), strict=True)]
        assert seen.args[0] is PRICES
        assert seen.args[1] is IDS
        assert seen.kwargs == {}

    def test_list_is_one_argument(self) -> None:
        seen = called_with(card_of(PRICE, USER, call="list"), PRICES, IDS)
        assert len(seen.args) == 1
        assert isinstance(seen.args[0], list)
        assert seen.args[0][1] is IDS

    def test_dict_is_one_argument(self) -> None:
        seen = called_with(card_of(PRICE, USER, call="dict"), PRICES, IDS)
        assert list(seen.args[0]) == ["price", "user"]

    def test_dots_lead_into_containers_and_numbers_make_lists(self) -> None:
        nested = card_of(
            USER | {"argument": "batch.sparse.1"},
            USER | {"name": "item", "argument": "batch.sparse.0"},
            PRICE | {"argument": "batch.dense"},
        )
        other = torch.tensor([4, 5, 6])
        seen = called_with(nested, IDS, other, PRICES)
        assert list(seen.kwargs) == ["batch"]
        assert seen.kwargs["batch"]["sparse"][0] is other
        assert seen.kwargs["batch"]["sparse"][1] is IDS
        assert seen.kwargs["batch"]["dense"] is PRICES


class TestSignature:
    class TwoArguments(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b

    class Batch(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return batch

    def test_positional_of_the_wrong_number_is_told(self) -> None:
        (problem,) = check_forward_signature(card_of(USER, call="positional"), self.TwoArguments())
        assert "1 arguments by position" in problem.what
        fits = card_of(USER, PRICE, call="positional")
        assert check_forward_signature(fits, self.TwoArguments()) == []

    def test_a_list_needs_one_parameter(self) -> None:
        (problem,) = check_forward_signature(card_of(USER, call="list"), self.TwoArguments())
        assert "list" in problem.what

    def test_two_inputs_may_share_a_container_but_not_a_place(self) -> None:
        inside = [USER | {"argument": "batch.a"}, PRICE | {"argument": "batch.b"}]
        assert check_forward_signature(card_of(*inside), self.Batch()) == []
        same = [USER | {"argument": "batch.a"}, PRICE | {"argument": "batch.a"}]
        (problem,) = check_forward_signature(card_of(*same), self.Batch())
        assert "passes already" in problem.what


@pytest.mark.parametrize("side", ["end", "start"])
def test_padding_equals_a_loop_over_rows(side: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        lengths = torch.randint(0, 6, (5,), generator=generator)
        values = torch.randint(1, 100, (int(lengths.sum()),), generator=generator)
        padded = pad(values, lengths, 5, -1, side)
        start = 0
        for row, length in enumerate(lengths.tolist()):
            own = values[start : start + length].tolist()
            filler = [-1] * (5 - length)
            assert padded[row].tolist() == (own + filler if side == "end" else filler + own)
            start += length


def test_float_ids_reach_the_module_as_floats() -> None:
    card = card_of(
        USER | {"dtype": "float32"},
        {
            "kind": "ragged_ids", "name": "seen", "column": "seen", "num_ids": 9,
            "max_length": 2, "layout": "padded", "dtype": "float32",
        },
    )  # fmt: skip
    values, lengths = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 2])
    seen = called_with(card, IDS.float(), values, lengths)
    assert seen.kwargs["user"].dtype == torch.float32
    assert seen.kwargs["seen"].tolist() == [[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]]


PACKED = {
    "kind": "packed",
    "name": "X",
    "columns": [{"name": "user", "num_ids": 9}, {"name": "seen", "num_ids": 9, "length": 3}],
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"width": 5}, "width is 5, but the columns take 4 places"),
        ({"columns": [{"num_ids": 9}]}, "needs either name or length_of"),
        ({"columns": [{"name": "a", "length_of": "b"}]}, "needs either name or length_of"),
        ({"columns": [{"name": "a", "length": 3}]}, "a list (length) needs num_ids"),
        (
            {"columns": [{"name": "a", "num_ids": 3}, {"length_of": "a"}]},
            "length_of must be one of the lists",
        ),
        ({"columns": [{"name": "a"}, {"name": "a"}]}, "must have different names"),
        ({"columns": [{"name": "a", "num_ids": (1 << 24) + 1}]}, "16777216"),
        ({"columns": []}, "columns"),
    ],
)
def test_a_wrong_column_map_is_refused(tmp_path: Any, change: dict[str, Any], told: str) -> None:
    import yaml

    raw = {"name": "m", "factory": "m:M", "inputs": [PACKED | change], "outputs": OUTPUTS}
    file = tmp_path / "card.yaml"
    file.write_text(yaml.safe_dump(raw))
    with pytest.raises(CardError) as caught:
        load_card(file)
    assert told in str(caught.value)
    assert "inputs[0]" in str(caught.value)


def test_ids_beyond_what_float32_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="holds no larger id exactly"):
        card_of(USER | {"num_ids": (1 << 24) + 1, "dtype": "float32"})


def test_ids_take_the_column_of_their_own_name() -> None:
    (item,) = card_of(USER).inputs
    assert item.data_columns == ("user",)
