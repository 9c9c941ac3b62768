from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rankopt.models.layers import (
    MLP,
    Dice,
    DotInteraction,
    EmbeddingBags,
    FactorizationMachine,
    LowRankCross,
    make_activation,
    pad_ragged,
)


def test_dot_interaction_equals_a_loop_in_fp64():
    torch.manual_seed(0)
    fields = torch.randn(5, 7, 16)
    expected = [
        [float(row[i].double() @ row[j].double()) for i in range(7) for j in range(i)]
        for row in fields
    ]
    torch.testing.assert_close(DotInteraction(7)(fields), torch.tensor(expected))


def test_factorization_machine_equals_the_sum_over_pairs_in_fp64():
    torch.manual_seed(0)
    fields = torch.randn(4, 9, 8)
    wide = fields.double()
    expected = sum((wide[:, i] * wide[:, j]).sum(dim=1) for i in range(9) for j in range(i + 1, 9))
    torch.testing.assert_close(
        FactorizationMachine()(fields).double(), expected, rtol=1e-5, atol=1e-5
    )


def test_low_rank_cross_equals_its_formula_in_fp64():
    torch.manual_seed(0)
    cross = LowRankCross(width=6, rank=2, num_layers=3)
    x = torch.randn(5, 6)
    first = current = x.double()
    for down, up in zip(cross.down, cross.up, strict=True):
        weight = up.weight.double() @ down.weight.double()
        current = first * (current @ weight.T + up.bias.double()) + current
    torch.testing.assert_close(cross(x).double(), current, rtol=1e-5, atol=1e-5)


def test_embedding_bags_look_up_one_row_per_table():
    tables = EmbeddingBags([3, 5], 4)
    ids = torch.tensor([[2, 4], [0, 1]])
    expected = torch.stack(
        [torch.stack([tables.bags[t].weight[ids[b, t]] for t in range(2)]) for b in range(2)]
    )
    assert torch.equal(tables(ids), expected)


def test_dice_equals_its_formula_with_the_moments_of_the_batch():
    torch.manual_seed(0)
    dice = Dice(3).train()
    nn.init.constant_(dice.alpha, 0.25)
    x = torch.randn(50, 3, dtype=torch.float64)
    dice = dice.double()
    gate = torch.sigmoid((x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-8).sqrt())
    torch.testing.assert_close(dice(x), gate * x + (1 - gate) * 0.25 * x)


def test_mlp_leaves_the_last_layer_linear_unless_asked():
    assert isinstance(MLP((4, 8, 1))[-1], nn.Linear)
    assert isinstance(MLP((4, 8, 1), activate_last=True)[-1], nn.ReLU)


def test_unknown_activation_names_the_known_ones():
    with pytest.raises(ValueError, match="relu, prelu, dice, sigmoid, silu; got 'swish'"):
        make_activation("swish", 4)


_LISTS = st.lists(st.lists(st.integers(1, 99), max_size=7), min_size=1, max_size=6)


@settings(deadline=None, max_examples=80)
@given(rows=_LISTS, max_length=st.integers(1, 6), align=st.sampled_from(["left", "right"]))
def test_pad_ragged_equals_padding_row_by_row(rows, max_length, align):
    values = torch.tensor([i for row in rows for i in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in rows])

    padded, mask = pad_ragged(values, lengths, max_length, align=align)

    for row, ids, present in zip(rows, padded.tolist(), mask.tolist(), strict=True):
        kept = row[-max_length:]
        gap = max_length - len(kept)
        if align == "left":
            assert ids == kept + [0] * gap
            assert present == [True] * len(kept) + [False] * gap
        else:
            assert ids == [0] * gap + kept
            assert present == [False] * gap + [True] * len(kept)
