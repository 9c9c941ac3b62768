"""Small instances of every plain reference model, with inputs of any batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rankopt.models.dcnv2 import DCNv2
from rankopt.models.deepfm import DeepFM
from rankopt.models.din import DIN
from rankopt.models.dlrm import DLRM
from rankopt.models.hstu import HSTU

HISTORY = 4
NUM_ITEMS = 20


@dataclass(frozen=True)
class Case:
    """A model and how to make its inputs; `lengths` asks for histories of those lengths."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int, Sequence[int] | None], dict[str, Tensor]]


def flat_inputs(num_rows: int, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    return {
        "dense": torch.randn(num_rows, 3, generator=generator),
        "sparse": torch.randint(0, 6, (num_rows, 4), generator=generator),
    }


def history_inputs(num_rows: int, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    given = (
        list(lengths) if lengths is not None else [row % (HISTORY + 2) for row in range(num_rows)]
    )
    return {
        "item": torch.randint(0, NUM_ITEMS, (num_rows,), generator=generator),
        "history_values": torch.randint(1, NUM_ITEMS, (sum(given),), generator=generator),
        "history_lengths": torch.tensor(given),
    }


def din_inputs(num_rows: int, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + 1)
    genres = [0 if lengths is not None else 1 + row % 3 for row in range(num_rows)]
    return history_inputs(num_rows, lengths) | {
        "user": torch.randint(0, 5, (num_rows, 2), generator=generator),
        "item_features": torch.randint(0, 3, (num_rows, 1), generator=generator),
        "genres_values": torch.randint(0, 4, (sum(genres),), generator=generator),
        "genres_lengths": torch.tensor(genres),
    }


def hstu_inputs(num_rows: int, lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows + 1)
    context = torch.randint(0, 5, (num_rows, 2), generator=generator)
    return history_inputs(num_rows, lengths) | {"context": context}


def small_dlrm() -> DLRM:
    return DLRM([6] * 4, num_dense=3, embedding_dim=8, bottom_mlp=(8,), top_mlp=(16,))


def small_dcnv2() -> DCNv2:
    return DCNv2(
        [6] * 4, num_dense=3, embedding_dim=8, bottom_mlp=(8,), cross_rank=4, top_mlp=(16,)
    )


def small_deepfm() -> DeepFM:
    return DeepFM([6] * 4, num_dense=3, embedding_dim=8, deep_mlp=(16,))


def small_din(**options: object) -> DIN:
    settings = {"embedding_dim": 8, "history_length": HISTORY, "attention_mlp": (8, 4)} | options
    return DIN(NUM_ITEMS, [5, 5], num_item_feature_ids=[3], num_genres=4, top_mlp=(8,), **settings)


def small_hstu() -> HSTU:
    model = HSTU(NUM_ITEMS, num_context_ids=[5, 5], embedding_dim=8, history_length=HISTORY)
    with torch.no_grad():
        for block in model.blocks:  # zero at the start, which would hide a wrong index
            block.position_bias.normal_()
    return model


CASES = {
    "dlrm": Case(small_dlrm, flat_inputs),
    "dcnv2": Case(small_dcnv2, flat_inputs),
    "deepfm": Case(small_deepfm, flat_inputs),
    "din": Case(small_din, din_inputs),
    "din-dice": Case(lambda: small_din(activation="dice"), din_inputs),
    "din-softmax": Case(lambda: small_din(softmax=True), din_inputs),
    "hstu": Case(small_hstu, hstu_inputs),
}
