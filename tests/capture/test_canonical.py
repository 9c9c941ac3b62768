"""The forms of an exported graph: every spelling becomes the one the passes know, exactly."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

from passes.lookups import Lookups, bag, check_scores, lookups_card, rows, total
from passes.zoo import SIZES, card, exact, features_of, largest_error, make_bundle, seeded
from rankopt.bundle import ModelBundle
from rankopt.capture.canonical import canonicalise
from rankopt.passes.graph import Linear, find_linears
from rankopt.passes.lookups import find_lookups

WIDTH = 12
FP32 = 1e-5
"""fp32 sums of a dozen terms in another order than PyTorch's."""


class Layers(nn.Module):
    """Some constants, and what a score is made of."""

    def __init__(self, score: Callable[[Any, Tensor], Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.score = score
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    def forward(self, dense: Tensor) -> Tensor:
        return self.score(self, dense).flatten(1).sum(1)


def dense_card() -> Any:
    columns = [f"c{index}" for index in range(WIDTH)]
    return card("layers", {"kind": "dense", "name": "dense", "columns": columns})


def random(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.4


def canonical(model: nn.Module, model_card: Any = None) -> tuple[ModelBundle, tuple[str, ...]]:
    """Export and rewrite; the model's own weights must stay as they were."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bundle = make_bundle(model_card or dense_card(), model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    return bundle, bundle.capture


def check(model: nn.Module, bundle: ModelBundle, allowed: float = FP32) -> None:
    for batch, _ in SIZES:
        features = features_of(bundle.card, batch)
        error = largest_error(bundle.run(features), exact(bundle.card, model, features))
        assert error < allowed, f"batch {batch}: {error}"


def layers(bundle: ModelBundle) -> dict[str, Linear]:
    found = find_linears(bundle.program.module(check_guards=False))
    return {linear.layer: linear for linear in found}


def operators(bundle: ModelBundle) -> Counter[str]:
    nodes = bundle.program.graph.nodes
    names = (str(n.target).removeprefix("aten.") for n in nodes if n.op == "call_function")
    return Counter(name.partition(".")[0] for name in names)


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


def normalised(num: int, seed: int = 5) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(num)
    norm.running_mean = random(num, seed=seed)
    norm.running_var = random(num, seed=seed + 1).abs() + 0.3
    norm.weight.data = random(num, seed=seed + 2) + 1
    norm.bias.data = random(num, seed=seed + 3)
    return norm


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_goes_into_the_layer_before_it(biased: bool, affine: bool) -> None:
    norm = normalised(5)
    if not affine:
        norm.weight = norm.bias = None  # type: ignore[assignment]
    model = seeded(
        lambda: Layers(
            lambda m, x: m.act(m.norm(m.layer(x))),
            layer=nn.Linear(WIDTH, 5, bias=biased),
            norm=norm,
            act=nn.ReLU(inplace=True),
        )
    )
    bundle, notes = canonical(model)
    (linear,) = layers(bundle).values()
    assert linear.slope == 0.0
    assert linear.layer == "layer"
    assert operators(bundle) == Counter(linear=1, relu=1, flatten=1, sum=1)
    assert len(bundle.constants) == 2
    assert "1 x batch normalisation folded into the layer before it" in notes
    check(model, bundle)


def test_batch_norm_over_channels_of_a_sequence_is_folded_through_the_transposes() -> None:
    model = seeded(
        lambda: Layers(
            lambda m, x: m.norm(m.layer(x.view(-1, 3, 4)).transpose(1, 2)).transpose(1, 2).relu(),
            layer=nn.Linear(4, 5),
            norm=normalised(5),
        )
    )
    bundle, _ = canonical(model)
    assert "batch_norm" not in operators(bundle)
    check(model, bundle)


@pytest.mark.parametrize(
    "score",
    [
        lambda m, x: m.norm(m.layer(x)) + m.layer(x.tanh()),
        lambda m, x: (lambda y: m.norm(y) + y)(m.layer(x)),
        lambda m, x: m.norm(m.layer(x).view(-1, 5, 1)) @ m.layer(x).view(-1, 1, 5),
        lambda m, x: m.norm(m.layer(x).view(-1, 5, 1).expand(-1, -1, 2)),
        lambda m, x: m.norm(x[:, :5]) + m.layer(x),
    ],
    ids=["layer-twice", "two-readers", "twice-and-3d", "expanded", "norm-of-an-input"],
)
def test_batch_norm_stays_where_folding_would_change_something_else(score: Any) -> None:
    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5), norm=normalised(5)))
    bundle, notes = canonical(model)
    assert operators(bundle)["batch_norm"] == 1
    assert not any("normalisation" in note for note in notes)
    check(model, bundle, 1e-4)


def test_batch_norm_of_layers_with_tied_weights_stays() -> None:
    model = seeded(
        lambda: Layers(
            lambda m, x: m.norm(m.layer(x)) + m.other(x.tanh()),
            layer=nn.Linear(WIDTH, 5),
            other=nn.Linear(WIDTH, 5),
            norm=normalised(5),
        )
    )
    model.other.weight = model.layer.weight
    bundle, _ = canonical(model)
    assert operators(bundle)["batch_norm"] == 1
    check(model, bundle)


def test_a_bias_that_two_layers_share_is_folded_into_one_of_them_alone() -> None:
    model = seeded(
        lambda: Layers(
            lambda m, x: m.norm(m.layer(x)) + m.other(x.tanh()),
            layer=nn.Linear(WIDTH, 5),
            other=nn.Linear(WIDTH, 5),
            norm=normalised(5),
        )
    )
    model.other.bias = model.layer.bias
    bundle, _ = canonical(model)
    assert "batch_norm" not in operators(bundle)
    check(model, bundle)


@pytest.mark.parametrize(
    ("score", "taken"),
    [
        (lambda m, x: x @ m.w + m.b, True),
        (lambda m, x: m.b + x @ m.w, True),
        (lambda m, x: m.w.t() @ x.unsqueeze(2) + m.b.unsqueeze(1), True),
        (lambda m, x: (x @ m.w).unsqueeze(1) + m.b, True),
        (lambda m, x: x @ m.w + m.b.sum().view(1), True),
        (lambda m, x: x @ m.w - m.b, True),
        (lambda m, x: m.b - x @ m.w, False),
        (lambda m, x: torch.add(x @ m.w, m.b, alpha=2), False),
        (lambda m, x: (x @ m.w)[:, :, None] + m.b, False),
        (lambda m, x: (lambda y: (y + m.b) * y)(x @ m.w), False),
    ],
    ids=[
        "after",
        "before",
        "column",
        "unsqueezed",
        "one-number",
        "subtracted",
        "subtracted-from",
        "alpha",
        "other-dim",
        "read-twice",
    ],
)
def test_a_constant_after_a_product_is_its_bias(score: Any, taken: bool) -> None:
    model = Layers(score, w=random(WIDTH, 5), b=random(5, seed=4))
    bundle, _ = canonical(model)
    (linear,) = layers(bundle).values()
    assert (linear.bias is not None) == taken
    check(model, bundle, 1e-4)


@pytest.mark.parametrize(
    ("score", "slope"),
    [
        (lambda m, x: m.layer(x).relu(), 0.0),
        (lambda m, x: torch.relu_(m.layer(x)), 0.0),
        (lambda m, x: m.layer(x).view(-1, 5, 1).relu(), 0.0),
        (lambda m, x: functional.leaky_relu(m.layer(x).unsqueeze(1), 0.2), 0.2),
        (lambda m, x: functional.leaky_relu_(m.layer(x.unsqueeze(1)), 0.2), 0.2),
        (lambda m, x: m.layer(x).reshape(-1, 5, 1).relu_(), 0.0),
        (lambda m, x: m.prelu(m.layer(x).unsqueeze(1)), "model.prelu.weight"),
        (lambda m, x: m.wide(m.layer(x)), "model.wide.weight"),
        (lambda m, x: m.wide(m.layer(x).unsqueeze(2)), None),
        (lambda m, x: (lambda y: y.unsqueeze(1).relu() + y.sum())(m.layer(x)), None),
        (lambda m, x: m.layer(x)[:, :3].relu(), None),
    ],
    ids=[
        "direct",
        "in-place",
        "view",
        "leaky",
        "leaky-in-place",
        "reshape-in-place",
        "prelu",
        "prelu-per-channel",
        "prelu-per-channel-moved",
        "read-twice",
        "sliced",
    ],
)
def test_an_activation_stands_right_behind_its_layer(score: Any, slope: float | str | None) -> None:
    wide = nn.PReLU(5)
    wide.weight.data = random(5).abs()
    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5), prelu=nn.PReLU(), wide=wide))
    bundle, _ = canonical(model)
    (linear,) = layers(bundle).values()
    assert linear.slope == slope
    check(model, bundle, 1e-4)


def test_dropout_and_writes_in_place_leave_nothing_behind() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 5)
            self.drop = nn.Dropout(0.4)

        def forward(self, dense: Tensor) -> Tensor:
            score = dense.new_zeros(dense.shape[0], 1)
            score += self.drop(torch.relu_(self.layer(self.drop(dense)))).sum(1, keepdim=True)
            score += dense[:, :1]
            return score.squeeze(1)

    model = seeded(Summed)
    bundle, notes = canonical(model)
    assert "2 x dropout outside training removed" in notes
    assert operators(bundle)["relu_"] == operators(bundle)["add_"] == 0
    check(model, bundle)


def test_a_write_that_somebody_else_sees_stays_one() -> None:
    def score(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        seen = y[:, :2]
        torch.relu_(y)
        return y.sum(1, keepdim=True) + seen

    model = seeded(lambda: Layers(score, layer=nn.Linear(WIDTH, 5)))
    bundle, _ = canonical(model)
    check(model, bundle)


def test_dropout_in_training_mode_is_left() -> None:
    model = Layers(lambda m, x: functional.dropout(x, 0.5, training=True))
    bundle, notes = canonical(model)
    assert operators(bundle)["dropout"] == 1
    assert notes == ()


def test_small_results_of_constants_are_computed_once_and_large_ones_are_not() -> None:
    model = Layers(
        lambda m, x: x * m.gate.softmax(0) + (m.big[:, None] * m.big).sum(0)[:WIDTH] + m.big.mean(),
        gate=random(WIDTH),
        big=random(700),
    )
    bundle, _ = canonical(model)
    assert "softmax" not in operators(bundle)
    assert bundle.size_bytes <= 2 * 4 * 700
    check(model, bundle, 1e-4)
    spread = Layers(
        lambda m, x: (m.row.exp() * m.column).sum(1) * x[:, :1],
        row=random(700),
        column=random(700, 1),
    )
    bundle, _ = canonical(spread)
    # 700 x 700 would be 1.9 MB in place of 5.6 KB.
    assert bundle.size_bytes < 10_000
    check(spread, bundle, 1e-4)


def test_a_weight_made_of_two_constants_is_named_after_the_larger() -> None:
    """Weight normalisation, as torch.nn.utils.weight_norm writes it."""
    model = Layers(
        lambda m, x: functional.linear(x, m.v * (m.a / m.v.norm(dim=1, keepdim=True))),
        v=random(5, WIDTH),
        a=random(5, 1),
    )
    bundle, _ = canonical(model)
    assert list(layers(bundle)) == ["v"]
    assert bundle.size_bytes == 4 * 5 * WIDTH
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


def test_a_graph_with_nothing_to_do_is_left_as_it_is() -> None:
    model = seeded(lambda: Layers(lambda m, x: m.layer(x).relu(), layer=nn.Linear(WIDTH, 5)))
    bundle, notes = canonical(model)
    assert notes == ()
    assert operators(bundle) == Counter(linear=1, relu=1, flatten=1, sum=1)


# --- lookups ---


def lookup_forms(bundle: ModelBundle) -> list[tuple[str, str]]:
    found = find_lookups(bundle.program.module(check_guards=False))
    return [(lookup.table, lookup.form) for lookup in found]


LookupScore = Callable[[Any, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Tables(Lookups):
    """Tables that are bare parameters."""

    def __init__(self, score: LookupScore, **tables: Tensor) -> None:
        super().__init__(score)
        for name, table in tables.items():
            self.register_parameter(name, nn.Parameter(table, requires_grad=False))


@pytest.mark.parametrize(
    ("score", "forms"),
    [
        (lambda m, u, n, v, s, r: total(m.t[u]), [("t", "single")]),
        (lambda m, u, n, v, s, r: total(m.t[r]), [("t", "sequence")]),
        (lambda m, u, n, v, s, r: total(m.t[u - 7]), [("t", "single")]),
        (lambda m, u, n, v, s, r: total(m.t[-u]), [("t", "single")]),
        (lambda m, u, n, v, s, r: total(m.t[torch.add(u % 3, u % 5, alpha=-1)]), [("t", "single")]),
        (lambda m, u, n, v, s, r: total(m.t.index_select(0, u)), [("t", "single")]),
        (lambda m, u, n, v, s, r: total(m.t.gather(0, n.long().expand(-1, 8))), [("t", "single")]),
        (
            lambda m, u, n, v, s, r: total(m.t.gather(0, u[:, None].expand(-1, 8))),
            [("t", "single")],
        ),
        (
            lambda m, u, n, v, s, r: m.bias[u] + m.bias[r].sum(1),
            [("bias", "single"), ("bias", "sequence")],
        ),
        (lambda m, u, n, v, s, r: total(m.t.detach()[u]), [("t", "single")]),
        (
            lambda m, u, n, v, s, r: (
                total(functional.embedding(u % 5, m.t[10:20]))
                + total(functional.embedding(u % 7, m.t[:12]))
            ),
            [("t", "single"), ("t", "single")],
        ),
        (
            lambda m, u, n, v, s, r: total(
                functional.embedding_bag(v % 5, m.t[10:20], s, mode="sum", padding_idx=2)
            ),
            [("t", "bag")],
        ),
        (
            lambda m, u, n, v, s, r: (
                total(functional.embedding(u, m.t[:, :3])) + total(functional.embedding(u, m.t))
            ),
            [("t", "single"), ("t", "single")],
        ),
        (
            lambda m, u, n, v, s, r: (
                total(functional.embedding(u, m.t[:, :3]))
                + total(functional.embedding(r, m.t[:, 3:]))
            ),
            [("t_0", "single"), ("t_1", "sequence")],
        ),
        (
            lambda m, u, n, v, s, r: total(functional.embedding(u, m.t * 2)),
            [("t", "single")],
        ),
    ],
    ids=[
        "indexed",
        "indexed-sequence",
        "maybe-negative",
        "negative",
        "difference",
        "index-select",
        "gather-cast",
        "gather",
        "one-dim",
        "detached",
        "row-blocks",
        "row-block-bag",
        "columns-and-whole",
        "all-columns-in-two",
        "scaled-table",
    ],
)
def test_rows_read_in_any_way_are_lookups(score: LookupScore, forms: list[tuple[str, str]]) -> None:
    model = Tables(score, t=random(30, 8), bias=random(30, seed=9))
    bundle, _ = canonical(model, lookups_card())
    assert sorted(lookup_forms(bundle)) == sorted(forms)
    stored = sum(v.nbytes for n, v in bundle.constants.items() if v.is_floating_point())
    assert stored <= 30 * 8 * 4
    check_scores(model, bundle)


@pytest.mark.parametrize(
    "score",
    [
        lambda m, u, n, v, s, r: total(m.t[u, u % 8][:, None]),
        lambda m, u, n, v, s, r: total(m.t[:, u % 8].t()),
        lambda m, u, n, v, s, r: total(m.t.index_select(1, u % 8).t()),
        lambda m, u, n, v, s, r: total(m.t.gather(0, r + 0)),
        lambda m, u, n, v, s, r: total(m.t.gather(1, (u % 8)[None, :].expand(30, -1)).t()),
        lambda m, u, n, v, s, r: total(m.t.view(5, 6, 8)[u % 5]),
        lambda m, u, n, v, s, r: m.t[(m.t[:, 0] * 3).long().abs() % 30].sum() + u,
    ],
    ids=["pairs", "columns", "select-columns", "single-values", "gather-columns", "blocks", "none"],
)
def test_reads_of_anything_but_whole_rows_stay_exact(score: LookupScore) -> None:
    model = Tables(score, t=random(30, 8))
    bundle, _ = canonical(model, lookups_card())
    check_scores(model, bundle)


def test_rows_of_max_norm_tables_are_scaled_once() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(user))
                + total(m.b(values, starts))
                + total(m.a(recent))
                + total(m.c(user))
            ),
            a=rows(max_norm=0.7),
            b=bag(max_norm=1.1, norm_type=1.0, mode="max", padding_idx=2),
            c=rows(),
        )
    )
    bundle, notes = canonical(model, lookups_card())
    assert "a, b: rows scaled to max_norm once, not at every lookup" in notes
    assert operators(bundle)["embedding_renorm_"] == operators(bundle)["detach"] == 0
    assert all(lookup.refusal is None for lookup in find_lookups(bundle.program.module()))
    check_scores(model, bundle)


def test_a_max_norm_table_that_is_also_read_unscaled_is_left() -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(user)) + total(functional.embedding(recent, m.a.weight))
            ),
            a=rows(max_norm=0.7),
        )
    )
    _, notes = canonical(copy.deepcopy(model), lookups_card())
    assert any(note.startswith("a: rows are scaled to max_norm while scoring") for note in notes)


@pytest.mark.parametrize("include_last", [False, True])
def test_a_mean_that_leaves_out_padding_is_a_sum_over_the_rest(include_last: bool) -> None:
    def score(m: Any, u: Tensor, n: Tensor, v: Tensor, s: Tensor, r: Tensor) -> Tensor:
        offsets = torch.cat([s, s.new_full((1,), v.shape[0])]) if include_last else s
        return total(m.a(v, offsets)) + total(m.b(r))

    model = seeded(
        lambda: Lookups(
            score,
            a=bag(mode="mean", padding_idx=3, include_last_offset=include_last),
            b=bag(mode="mean", padding_idx=0),
        )
    )
    bundle, notes = canonical(model, lookups_card())
    assert "2 x bag with a padding row written as a sum" in notes
    found = find_lookups(bundle.program.module(check_guards=False))
    assert [(lookup.mode, lookup.unbatched) for lookup in found] == [("sum", None)] * 2
    check_scores(model, bundle)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_that_another_lookup_reads_becomes_weights(mode: str) -> None:
    model = seeded(
        lambda: Lookups(
            lambda m, user, narrow, values, starts, recent: (
                total(m.a(values, starts)) + total(m.b(user))
            ),
            a=bag(mode=mode, padding_idx=3),
            b=rows(),
        )
    )
    model.b.weight = model.a.weight
    bundle, _ = canonical(model, lookups_card())
    found = find_lookups(bundle.program.module(check_guards=False))
    assert [lookup.unbatched for lookup in found] == [None, None]
    assert [lookup.weights is not None for lookup in found if lookup.form == "bag"] == [True]
    check_scores(model, bundle)


def test_a_tied_table_is_neither_copied_nor_transposed() -> None:
    model = Tables(
        lambda m, u, n, v, s, r: (
            total(functional.embedding(u, m.t) @ m.t.t()[:, :])
            + total(functional.embedding(u, m.t)[:, :8] @ m.t[:8])
        ),
        t=random(30, 8),
    )
    bundle, _ = canonical(model, lookups_card())
    assert bundle.size_bytes <= 30 * 8 * 4 * 5 // 4 + 8 * 8 * 4
    check_scores(model, bundle)
    model = Tables(
        lambda m, u, n, v, s, r: (
            total(m.t[u][:, :, None].mT @ m.t.t()) + total(m.p[r] @ m.q[u][:, :, None])
        ),
        t=random(30, 8),
        p=random(30, 8, seed=4),
        q=random(30, 8, seed=5),
    )
    bundle, _ = canonical(model, lookups_card())
    (linear,) = layers(bundle).values()
    assert linear.tied
    assert linear.layer == "t"
    assert bundle.size_bytes == 3 * 30 * 8 * 4
    check_scores(model, bundle)
