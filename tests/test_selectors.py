"""Selectors: the first rule that matches decides, and a rule that matches nothing is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankopt.errors import SelectorError
from rankopt.selectors import Rule, matches, resolve

NAMES = ["tables.user", "tables.item", "first_order.user", "top.0"]


def choose(*rules: tuple[str, str], names: list[str] = NAMES) -> dict[str, str]:
    made = [Rule[str](select=select, use=use) for select, use in rules]
    return resolve(names, made, "default", where="pass.rules", noun="table")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("tables.user", "tables.user", True),
        ("user", "tables.user", True),
        ("user", "model.tables.user", True),
        ("tables.*", "model.tables.user", True),
        ("*.user", "tables.user", True),
        ("us?r", "tables.user", True),
        ("[tu]*", "tables.user", True),
        ("tables", "tables.user", False),  # a leading part alone names no table
        ("ser", "tables.user", False),
        ("User", "tables.user", False),
        ("user.tables", "tables.user", False),
    ],
)
def test_a_pattern_means_a_name_from_any_dot_on(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_names_that_no_rule_selects_take_the_default() -> None:
    assert choose(("top.*", "fp32")) == {
        "tables.user": "default",
        "tables.item": "default",
        "first_order.user": "default",
        "top.0": "fp32",
    }


def test_the_first_rule_that_matches_decides() -> None:
    chosen = choose(("tables.user", "int4"), ("user", "fp16"), ("*", "fp32"))
    assert chosen == {
        "tables.user": "int4",
        "tables.item": "fp32",
        "first_order.user": "fp16",
        "top.0": "fp32",
    }


def test_every_rule_that_matches_nothing_is_listed_with_the_nearest_names() -> None:
    with pytest.raises(SelectorError) as caught:
        choose(("usr", "int4"), ("top.*", "fp32"), ("tables.itm", "int4"))
    assert str(caught.value).splitlines() == [
        "pass.rules[0].select: matches no table of this model; got 'usr'. Did you mean 'user'?",
        "pass.rules[2].select: matches no table of this model; got 'tables.itm'. "
        "Did you mean 'tables.item' or 'tables.user'?",
    ]


def test_a_rule_on_a_model_without_names_is_an_error() -> None:
    with pytest.raises(SelectorError, match="None are known"):
        choose(("*", "int4"), names=[])
    assert choose(names=[]) == {}


parts = st.text("ab_0", min_size=1, max_size=3)
dotted = st.lists(parts, min_size=1, max_size=3).map(".".join)


@given(names=st.lists(dotted, min_size=1, max_size=6, unique=True), data=st.data())
def test_each_name_gets_exactly_one_setting(names: list[str], data: st.DataObject) -> None:
    selects = data.draw(st.lists(st.sampled_from(names), max_size=3))
    rules = [(select, str(index)) for index, select in enumerate(selects)]
    chosen = choose(*rules, names=names)
    assert list(chosen) == names
    for name, use in chosen.items():
        ending = [use for select, use in rules if name == select or name.endswith(f".{select}")]
        assert use == (ending[0] if ending else "default")
