"""Every card that ships fits its model, its data and its module's forward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankopt.content import content_name, list_content
from rankopt.data.movielens import feature_sizes
from rankopt.data.synthetic import SyntheticOptions
from rankopt.models.build import check_forward_signature, make_module
from rankopt.models.card import DenseInput, IdsInput, KjtInput, RaggedIdsInput, load_card
from rankopt.models.serving import ServingModule

CARDS = {content_name(path): path for path in list_content("models")}
NUM_ROWS = 3


def largest_ids(card):
    """Inputs whose every id is the largest that the card allows."""
    features = {}
    for item in card.inputs:
        if isinstance(item, DenseInput):
            features[item.name] = torch.zeros(NUM_ROWS, len(item.columns))
        elif isinstance(item, IdsInput):
            ids = torch.tensor([size - 1 for size in item.ranges]).repeat(NUM_ROWS, 1)
            narrow = len(item.columns) == 1 and not item.keep_width
            features[item.name] = ids[:, 0] if narrow else ids
        elif isinstance(item, RaggedIdsInput):
            length = item.max_length
            features[f"{item.name}.values"] = torch.full((NUM_ROWS * length,), item.num_ids - 1)
            features[f"{item.name}.lengths"] = torch.full((NUM_ROWS,), length)
        else:
            last = [f.num_ids - 1 for f in item.features for _ in range(NUM_ROWS)]
            features[f"{item.name}.values"] = torch.tensor(last)
            features[f"{item.name}.lengths"] = torch.ones(len(last), dtype=torch.int64)
    return features


def ranges_of(card):
    """num_ids of each data column."""
    ranges = {}
    for item in card.inputs:
        if isinstance(item, IdsInput):
            ranges.update(zip(item.columns, item.ranges, strict=True))
        elif isinstance(item, RaggedIdsInput):
            ranges[item.column] = item.num_ids
        elif isinstance(item, KjtInput):
            ranges.update((f.column, f.num_ids) for f in item.features)
    return ranges


def test_every_reference_model_has_a_card():
    factories = {load_card(path).factory.rpartition(":")[2] for path in CARDS.values()}
    assert factories >= {"DLRM", "DCNv2", "DeepFM", "DIN", "HSTU", "DLRMTorchrec"}


@pytest.mark.parametrize("name", CARDS)
def test_the_module_takes_every_id_the_card_allows(name):
    card = load_card(Path(CARDS[name]))
    module = make_module(card).eval()
    assert check_forward_signature(card, module) == []
    features = largest_ids(card)
    with torch.inference_mode():
        (score,) = ServingModule(card, module)(*[features[name] for name in card.tensor_names])
    assert score.shape == (NUM_ROWS,)
    assert score.isfinite().all()


@pytest.mark.parametrize("name", CARDS)
def test_ranges_are_those_of_the_data(name):
    card = load_card(Path(CARDS[name]))
    ranges = ranges_of(card)
    if card.data.source == "movielens":
        sizes = feature_sizes()
    else:
        options = SyntheticOptions.model_validate(card.data.options)
        sizes = {f"C{index + 1}": size for index, size in enumerate(options.table_sizes)}
    assert ranges == {column: sizes[column] for column in ranges}
