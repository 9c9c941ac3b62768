"""Every way to read rows of a table becomes a lookup that the passes know, exactly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from capture.layers import canonical, layers, operators, random
from passes.lookups import Lookups, bag, check_scores, lookups_card, rows, total
from passes.zoo import seeded
from rankopt.bundle import ModelBundle
from rankopt.passes.lookups import find_lookups

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
