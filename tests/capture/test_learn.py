"""Sizes and kinds of what a part takes and gives are learned by running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from capture.split_net import bundle_of
from rankopt.artifact.contract import contract_of, random_features
from rankopt.capture.learn import fit
from rankopt.capture.parts import Size, Unknown
from rankopt.models.card import ModelCard
from rankopt.models.serving import EagerModel


class Jagged(nn.Module):
    """Takes a KeyedJaggedTensor, gives as many rows as ids, and as many steps as the longest."""

    def forward(self, kjt: Any, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = kjt["a"]
        if ids.values().sum() > 10:
            values = values * 2
        steps = torch.zeros(len(lengths), int(lengths.max()))
        return values[:, :4], lengths + ids.lengths(), steps + 1


class JaggedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8)
        self.part = Jagged()
        self.again = self.part
        self.lin = nn.Linear(4, 1)

    def forward(self, kjt: Any, seen_values: Tensor, seen_lengths: Tensor) -> Tensor:
        rows = self.table(seen_values)
        first, counts, steps = self.part(kjt, rows, seen_lengths)
        second, _, _ = self.again(kjt, rows, seen_lengths)
        result: Tensor = self.lin(first + second).sum() + counts + steps.sum(1)
        return result


JAGGED = ModelCard.model_validate(
    {
        "name": "jagged",
        "factory": "net.py:make",
        "inputs": [
            {
                "name": "kjt",
                "kind": "kjt",
                "features": [
                    {"key": "a", "column": "a", "num_ids": 9, "max_length": 4},
                    {"key": "b", "column": "b", "num_ids": 9, "max_length": 4},
                ],
            },
            {
                "name": "seen",
                "kind": "ragged_ids",
                "column": "seen",
                "num_ids": 30,
                "max_length": 6,
                "layout": "values_lengths",
            },
        ],
        "outputs": [{"name": "click", "label": "label"}],
    }
)


@pytest.mark.filterwarnings("ignore:.*is deprecated")  # torchrec's own
def test_a_part_takes_jagged_tensors_and_may_lie_in_two_places() -> None:
    model = JaggedNet()
    bundle, notes = bundle_of(JAGGED, model)
    assert [note.split(" stays")[0] for note in notes] == ["`part` (Jagged)"]
    calls = bundle.parts["part"].calls
    assert len(calls) == 2
    assert calls[0].outputs[2].shape[1] == Unknown(0)
    assert model.again is model.part
    traced_again = bundle.edit(lambda graph: None)
    for num_rows in (1, 2, 7, 65):
        generator = torch.Generator().manual_seed(num_rows)
        features = random_features(contract_of(JAGGED), num_rows, generator)
        wanted = EagerModel(JAGGED, model)(features)["click"]
        torch.testing.assert_close(traced_again.run(features)["click"], wanted)


@given(
    st.lists(st.integers(0, 40), min_size=3, max_size=7),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_a_size_is_expressed_by_what_is_known(row: list[int], times: int, plus: int) -> None:
    known = [(Size(0, 1), row)]
    values = [times * each + plus for each in row]
    fitted = fit(values, known)
    if isinstance(fitted, Size):
        source = [torch.empty(0, each) for each in row]
        assert [fitted.value([each], []) for each in source] == values
    else:
        assert len(set(values)) == 1
        assert fitted == values[0]


def test_a_size_that_depends_on_data_is_unknown() -> None:
    assert fit([3, 2, 5, 1], [(Size(0, 0), [7, 5, 11, 3])]) is None
