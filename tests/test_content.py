from __future__ import annotations

from pathlib import Path

import pytest

from rankopt import content
from rankopt.errors import RecipeError, UsageError


@pytest.fixture
def roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Make a checkout and a wheel that share one name."""
    checkout, wheel = tmp_path / "checkout", tmp_path / "wheel"
    for root, names in (
        (checkout, ["recipes/serve-int8", "recipes/shared"]),
        (wheel, ["recipes/shared", "recipes/only-wheel", "benchmarks/topologies/8xh100"]),
    ):
        for name in names:
            path = root / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"from: {root.name}\n")
    monkeypatch.setattr(content, "content_roots", lambda: (checkout, wheel))
    monkeypatch.chdir(tmp_path)
    return checkout, wheel


@pytest.mark.parametrize(
    "name", ["serve-int8", "serve-int8.yaml", "recipes/serve-int8", "recipes/serve-int8.yaml"]
)
def test_find_accepts_a_name_with_or_without_folder_and_suffix(
    roots: tuple[Path, Path], name: str
) -> None:
    assert content.find("recipes", name) == roots[0] / "recipes" / "serve-int8.yaml"


def test_checkout_hides_the_wheel_and_the_wheel_fills_in(roots: tuple[Path, Path]) -> None:
    checkout, wheel = roots
    assert content.find("recipes", "shared") == checkout / "recipes" / "shared.yaml"
    assert content.find("recipes", "only-wheel") == wheel / "recipes" / "only-wheel.yaml"
    names = [content.content_name(path) for path in content.list_content("recipes")]
    assert names == ["only-wheel", "serve-int8", "shared"]


def test_an_explicit_path_comes_first(roots: tuple[Path, Path], tmp_path: Path) -> None:
    mine = tmp_path / "shared.yaml"
    mine.write_text("from: me\n")
    assert content.find("recipes", str(mine)) == mine
    assert content.find("recipes", "shared.yaml").read_text() == "from: me\n"


def test_subfolders_are_found_from_both_ends(roots: tuple[Path, Path]) -> None:
    expected = roots[1] / "benchmarks" / "topologies" / "8xh100.yaml"
    assert content.find("benchmarks", "topologies/8xh100") == expected
    assert content.find("benchmarks/topologies", "8xh100") == expected
    assert content.list_content("benchmarks/topologies") == [expected]


def test_an_unknown_name_lists_the_nearest_and_where_it_looked(roots: tuple[Path, Path]) -> None:
    with pytest.raises(RecipeError) as caught:
        content.find("recipes", "serve-int9", error=RecipeError)
    message = str(caught.value)
    assert "Did you mean 'serve-int8'" in message
    for root in roots:
        assert str(root / "recipes") in message


def test_a_folder_is_refused_with_what_it_holds(roots: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match=r"it holds serve-int8\.yaml, shared\.yaml"):
        content.find("recipes", str(roots[0] / "recipes"))


def test_an_unknown_kind_is_refused(roots: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="Did you mean 'recipes'"):
        content.list_content("recipe")


def test_this_checkout_is_found(checkout: Path) -> None:
    assert content.checkout_root() == checkout
    assert content.content_roots()[0] == checkout
