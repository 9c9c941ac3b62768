"""Products with a constant become linear layers, however they are spelled, exactly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from capture.layers import WIDTH, Layers, canonical, check, layers, operators, random
from passes.zoo import seeded
from rankopt.capture.canonical import canonicalise

PRODUCTS: dict[
    str, tuple[Callable[[Any, Tensor], Tensor], Mapping[str, Tensor], tuple[int, int]]
] = {
    "matmul": (lambda m, x: x.matmul(m.w), {"w": random(WIDTH, 5)}, (5, WIDTH)),
    "one-output": (lambda m, x: x.matmul(m.w), {"w": random(WIDTH, 1)}, (1, WIDTH)),
    "vector": (lambda m, x: (x @ m.w)[:, None], {"w": random(WIDTH)}, (1, WIDTH)),
    "transposed": (lambda m, x: x @ m.w.t(), {"w": random(5, WIDTH)}, (5, WIDTH)),
    "permuted": (lambda m, x: x @ m.w.permute(1, 0), {"w": random(5, WIDTH)}, (5, WIDTH)),
    "from-the-left": (lambda m, x: m.w @ x.unsqueeze(2), {"w": random(5, WIDTH)}, (5, WIDTH)),
    "on-columns": (lambda m, x: m.w @ x.t(), {"w": random(5, WIDTH)}, (5, WIDTH)),
    "left-of-many": (
        lambda m, x: m.w @ x.view(-1, 4, 3),
        {"w": random(5, 4)},
        (5, 4),
    ),
    "mm": (lambda m, x: torch.mm(x, m.w), {"w": random(WIDTH, 5)}, (5, WIDTH)),
    "addmm": (
        lambda m, x: torch.addmm(m.b, x, m.w),
        {"w": random(WIDTH, 5), "b": random(5, seed=4)},
        (5, WIDTH),
    ),
    "linear-on-a-view": (
        lambda m, x: functional.linear(x, m.w.t()),
        {"w": random(WIDTH, 5)},
        (5, WIDTH),
    ),
    "three-dims": (lambda m, x: x.view(-1, 4, 3).matmul(m.w), {"w": random(3, 5)}, (5, 3)),
    "tensordot": (
        lambda m, x: torch.tensordot(x.view(-1, 4, 3), m.w, dims=([-1], [0])),
        {"w": random(3, 5)},
        (5, 3),
    ),
    "tensordot-inner": (
        lambda m, x: torch.tensordot(x.view(-1, 4, 3), m.w, dims=([1], [1])),
        {"w": random(5, 4)},
        (5, 4),
    ),
    "tensordot-of-two-dims": (
        lambda m, x: torch.tensordot(x.view(-1, 4, 3), m.w, dims=2),
        {"w": random(4, 3, 2, 5)},
        (10, WIDTH),
    ),
    "tensordot-from-the-left": (
        lambda m, x: torch.tensordot(m.w, x.view(-1, 4, 3), dims=([0], [2])).movedim(1, 0),
        {"w": random(3, 5)},
        (5, 3),
    ),
    "einsum": (
        lambda m, x: torch.einsum("btk,kn->btn", x.view(-1, 4, 3), m.w),
        {"w": random(3, 5)},
        (5, 3),
    ),
    "einsum-without-result": (
        lambda m, x: torch.einsum("bk,kn", x, m.w),
        {"w": random(WIDTH, 5)},
        (5, WIDTH),
    ),
    "inner": (lambda m, x: torch.inner(x, m.w), {"w": random(5, WIDTH)}, (5, WIDTH)),
    "einsum-of-experts": (
        lambda m, x: torch.einsum("eio,bi->beo", m.w, x),
        {"w": random(3, WIDTH, 5)},
        (15, WIDTH),
    ),
    "einsum-reordered": (
        lambda m, x: torch.einsum("btk,nk->nbt", x.view(-1, 4, 3), m.w).movedim(1, 0),
        {"w": random(5, 3)},
        (5, 3),
    ),
    "conv1d": (
        lambda m, x: functional.conv1d(x.view(-1, 4, 3), m.w, m.b),
        {"w": random(5, 4, 1), "b": random(5, seed=4)},
        (5, 4),
    ),
    "conv2d": (
        lambda m, x: functional.conv2d(x.view(-1, 2, 2, 3), m.w),
        {"w": random(5, 2, 1, 1)},
        (5, 2),
    ),
    "conv-over-everything": (
        lambda m, x: functional.conv1d(x.view(-1, 4, 3), m.w, m.b),
        {"w": random(5, 4, 3), "b": random(5, seed=4)},
        (5, WIDTH),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_constant_is_a_linear_layer(name: str) -> None:
    score, constants, shape = PRODUCTS[name]
    model = Layers(score, **constants)
    bundle, notes = canonical(model)
    (linear,) = layers(bundle).values()
    assert tuple(linear.weight.shape) == shape
    # The name tells which constant it was, and the constant is stored once.
    assert linear.layer == "w"
    stored = sum(value.numel() for value in constants.values())
    assert sum(value.numel() for value in bundle.constants.values()) == stored
    check(model, bundle)
    linear_anyway = name == "linear-on-a-view"
    assert (
        "1 x product with a constant matrix written as a linear layer" in notes
    ) != linear_anyway


@pytest.mark.parametrize(
    "score",
    [
        lambda m, x: x.view(-1, 3, 4).movedim(1, 0).bmm(m.w.view(3, 4, 5)).movedim(1, 0),
        lambda m, x: torch.addmm(m.w[0], x, m.w, beta=0.5),
        lambda m, x: functional.conv1d(x.view(-1, 4, 3), m.w.view(5, 4, 3), padding=1),
        lambda m, x: functional.conv1d(x.view(-1, 4, 3), m.w.view(5, 4, 3)[..., :2]),
        lambda m, x: functional.conv1d(x.view(-1, 4, 3), m.w.view(-1)[:8].view(4, 2, 1), groups=2),
        lambda m, x: torch.einsum("bik,ikn->bin", x.view(-1, 3, 4), m.w.view(3, 4, 5)),
        lambda m, x: torch.einsum("bk,kn->b", x, m.w).unsqueeze(1),
        lambda m, x: torch.einsum("...k,kn->...n", x, m.w),
    ],
    ids=[
        "batched",
        "scaled-addmm",
        "padded-conv",
        "sliding-conv",
        "grouped-conv",
        "batched-einsum",
        "summed-einsum",
        "einsum-with-dots",
    ],
)
def test_what_is_no_plain_product_stays_exact(score: Any) -> None:
    model = Layers(score, w=random(WIDTH, 5))
    bundle, _ = canonical(model)
    assert layers(bundle) == {}
    check(model, bundle, 1e-4)


@given(
    x_dims=st.permutations(range(3)),
    w_dims=st.permutations(range(3)),
    num=st.integers(1, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=12)
def test_any_contraction_with_a_constant_is_a_linear_layer(
    x_dims: list[int], w_dims: list[int], num: int, seed: int
) -> None:
    sizes = (7, 3, 4)
    picked = [dim for dim in x_dims if dim != 0][:num]  # never the batch
    shape = [5, 6, 2]
    for x_dim, w_dim in zip(picked, w_dims, strict=False):
        shape[w_dim] = sizes[x_dim]
    contracted = w_dims[: len(picked)]
    model = Layers(
        lambda m, x: torch.tensordot(x.view(-1, 3, 4), m.w, dims=(picked, contracted)),
        w=random(*shape, seed=seed),
    )
    bundle, _ = canonical(model)
    assert len(layers(bundle)) == 1
    check(model, bundle, 1e-4)


def test_slices_of_one_weight_become_layers_of_their_own() -> None:
    """As DCN-Mix holds the experts of a layer in one tensor."""
    model = Layers(
        lambda m, x: torch.cat([m.u[e] @ (m.v[e].t() @ x.unsqueeze(2)) for e in range(3)], 1),
        u=random(3, 6, 4),
        v=random(3, WIDTH, 4),
    )
    bundle, notes = canonical(model)
    assert sorted(layers(bundle)) == ["u_0", "u_1", "u_2", "v_0", "v_1", "v_2"]
    assert bundle.size_bytes == 4 * (3 * 6 * 4 + 3 * WIDTH * 4)
    assert "6 x result of constants computed once" in notes
    check(model, bundle)


def test_attention_reads_its_projections_as_linear_layers() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)

        def forward(self, dense: Tensor) -> Tensor:
            own = dense.view(-1, 3, 4)
            other = own.tanh()
            crossed, _ = self.attention(own, other, other)
            vectors: Tensor = self.encoder(crossed)
            return vectors.flatten(1).sum(1)

    model = seeded(Attention)
    bundle, _ = canonical(model)
    names = list(layers(bundle))
    assert [name for name in names if name.startswith("attention")] == [
        "attention.in_proj_weight_0",
        "attention.in_proj_weight_1",
        "attention.out_proj",
    ]
    assert len(names) == 3 + 4
    assert bundle.size_bytes == sum(p.nbytes for p in model.parameters())
    check(model, bundle)


def test_a_product_with_one_term_is_a_multiplication() -> None:
    model = Layers(lambda m, x: x.unsqueeze(2) @ x[:, :3].unsqueeze(1))
    bundle, notes = canonical(model)
    assert operators(bundle)["matmul"] == 0
    assert "1 x product of one term written as a multiplication" in notes
    check(model, bundle, 1e-4)


def test_rewriting_a_second_time_changes_nothing() -> None:
    for name in ("conv1d", "einsum-of-experts", "addmm", "from-the-left"):
        score, constants, _ = PRODUCTS[name]
        once, _ = canonical(Layers(score, **constants))
        notes: list[str] = []

        def rewrite(module: GraphModule, notes: list[str] = notes) -> None:
            notes.extend(canonicalise(module))

        twice = once.edit(rewrite)
        assert notes == []
        assert operators(twice) == operators(once)
        assert twice.constants.keys() == once.constants.keys()
