"""Split export: what torch.export refuses stays eager, and scores are the same."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from passes.zoo import apply_passes
from rankopt.artifact.build import write_artifact
from rankopt.artifact.contract import contract_of, random_features
from rankopt.artifact.manifest import MANIFEST, PASSES, damaged_files, read_manifest
from rankopt.artifact.refresh import refresh_artifact
from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import ModelBundle, build_bundle
from rankopt.capture.diagnose import quiet_torch
from rankopt.capture.export import trace, trace_example
from rankopt.capture.learn import fit
from rankopt.capture.parts import Size, Unknown
from rankopt.capture.split import SplitExport, export_split
from rankopt.environment import collect_environment
from rankopt.errors import ArtifactError
from rankopt.jobs.decisions import write_choices
from rankopt.models.build import build_module
from rankopt.models.card import ModelCard, load_card
from rankopt.models.serving import EagerModel, ServingModule
from rankopt.passes.base import PassContext
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.recipe import parse_recipe
from rankopt.review.schema import PassRecord
from rankopt.runtime import load_artifact

LAYERS = '''
import torch
from torch import nn


class Boost(nn.Module):
    """Branches on the rows, gives nested results, and is called twice."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Linear(dim, dim)

    def forward(self, x, *, limit=0.0):
        if x.max() > 1000:
            raise ValueError("a value is far too large")
        if x.mean().item() > limit:
            return {"out": self.scale(x), "extra": (x[:, :2], None)}
        return {"out": -self.scale(x), "extra": (2 * x[:, :2], None)}
'''

NET = """
import torch
from torch import nn

from split_test_layers import Boost


class Selected(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, dim)

    def forward(self, x, rows):
        kept = x[x[:, 0] > 0.3]
        if kept.shape[0] == 0:
            return kept, rows
        return self.inner(kept), rows


class Halve(nn.Module):
    def forward(self, x):
        while x.abs().max() > 0.5:
            x = x / 2
        return x


class Tower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.halve = Halve()
        self.lin = nn.Linear(dim, dim)

    def forward(self, x):
        return self.lin(self.halve(x))


class Net(nn.Module):
    def __init__(self, num_ids=50, dim=8):
        super().__init__()
        self.table = nn.Embedding(num_ids, dim)
        self.boost = Boost(dim)
        self.selected = Selected(dim)
        self.tower = Tower(dim)
        self.top = nn.Linear(2 * dim + 2, 1)

    def forward(self, ids, dense):
        x = self.table(ids)
        first = self.boost(x)
        second = self.boost(dense, limit=0.1)
        rows, count = self.selected(dense, dense.shape[0])
        mixed = first["out"] + second["out"] + rows.sum(0, keepdim=True) / count
        both = torch.cat([mixed, self.tower(x), first["extra"][0]], 1)
        return self.top(both).squeeze(1)


def make(**config):
    torch.manual_seed(0)
    return Net(**config)
"""

CARD: dict[str, Any] = {
    "name": "split",
    "factory": "split_test_net.py:make",
    "inputs": [
        {"name": "ids", "kind": "ids", "num_ids": 50},
        {"name": "dense", "kind": "dense", "columns": list("abcdefgh")},
    ],
    "outputs": [{"name": "click", "label": "label"}],
}


@dataclass(frozen=True)
class Made:
    """The model, what became of it, and where."""

    card: ModelCard
    model: nn.Module
    bundle: ModelBundle
    folder: Path


def split(card: ModelCard, model: nn.Module) -> SplitExport | None:
    serving = ServingModule(card, model.eval())
    with pytest.raises(Exception) as caught, quiet_torch():  # noqa: PT011 (any type of torch's)
        trace(serving, card)
    return export_split(serving, card, lambda module: trace(module, card), caught.value)


def bundle_of(card: ModelCard, model: nn.Module) -> tuple[ModelBundle, tuple[str, ...]]:
    found = split(card, model)
    assert found is not None
    bundle = ModelBundle(card, found.program, trace_example(card), parts=found.parts)
    return bundle, found.notes


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Compile the model, once."""
    root = tmp_path_factory.mktemp("split")
    (root / "split_test_net.py").write_text(NET)
    (root / "split_test_layers.py").write_text(LAYERS)
    (root / "card.yaml").write_text(json.dumps(CARD))
    card = load_card(root / "card.yaml")
    model = build_module(card, allow_random=True)
    bundle = build_bundle(card, model, trace_example(card))
    context = PassContext(collect_environment(), root)
    folder = root / "artifact"
    write_artifact(ExportAoti().apply(bundle, context), folder, control_size_bytes=1)
    recipe = parse_recipe(
        {"name": "plain", "passes": [{"export_aoti": {}}], "gates": {"quality": {"ne": "0.1%"}}},
        where="recipe",
    )
    record = PassRecord(kind="export_aoti", changed=True, kept=True, reason="as planned")
    write_choices(folder / PASSES, recipe, card, [record])
    return Made(card, model, bundle, folder)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made.folder, tmp_path / "copy"))


def rows(card: ModelCard, num_rows: int, shift: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
    """Make rows up; a shift takes branches on the mean, and selections, the other way."""
    generator = torch.Generator().manual_seed(seed)
    features = random_features(contract_of(card), num_rows, generator)
    return features | {"dense": features["dense"] + shift}


def eager(made: Made, features: dict[str, Tensor]) -> Tensor:
    return EagerModel(made.card, made.model)(features)["click"]


BATCHES = pytest.mark.parametrize("num_rows", [1, 2, 7, 513])
SHIFTS = pytest.mark.parametrize("shift", [-5.0, 0.0, 2.0])


def test_each_part_is_the_smallest_module_that_torch_refuses(made: Made) -> None:
    assert list(made.bundle.parts) == ["boost", "selected", "tower.halve"]
    assert [len(part.calls) for part in made.bundle.parts.values()] == [2, 1, 1]
    notes = [note for note in made.bundle.capture if "stays eager" in note]
    assert len(notes) == 3
    note = notes[0]
    assert note.startswith(
        "`boost` (Boost) stays eager: data-dependent branch: `if x.max() > 1000:`"
    )
    assert "split_test_layers.py:" in note
    assert str(made.folder.parent) not in note


def test_the_model_is_left_as_it_was(made: Made) -> None:
    kinds = {name: type(child).__name__ for name, child in made.model.named_modules()}
    assert kinds["boost"] == "Boost"
    assert kinds["tower.halve"] == "Halve"
    assert not any(module._forward_pre_hooks for module in made.model.modules())


def test_weights_of_parts_are_no_constants_of_the_graph(made: Made) -> None:
    names = set(made.bundle.constants)
    assert "model.tower.lin.weight" in names
    assert not [name for name in names if "scale" in name or "inner" in name]
    weights = sum(parameter.nbytes for parameter in made.model.parameters())
    assert made.bundle.size_bytes == weights + 3 * 8  # a handle per part


@SHIFTS
@BATCHES
def test_the_graph_scores_as_the_model(made: Made, num_rows: int, shift: float) -> None:
    features = rows(made.card, num_rows, shift)
    torch.testing.assert_close(made.bundle.run(features)["click"], eager(made, features))


@SHIFTS
@BATCHES
def test_the_artifact_scores_as_the_model(made: Made, num_rows: int, shift: float) -> None:
    features = rows(made.card, num_rows, shift)
    artifact = load_artifact(made.folder)
    torch.testing.assert_close(artifact(features)["click"], eager(made, features))


def test_the_rows_take_both_sides_of_the_branches(made: Made) -> None:
    """Else the tests above would not compare what they are for."""
    low, high = (rows(made.card, 513, shift)["dense"] for shift in (-5.0, 2.0))
    assert low.mean() < 0.1 < high.mean()
    assert not (low[:, 0] > 0.3).any()
    assert (high[:, 0] > 0.3).sum() > 100


def test_a_fresh_process_proves_it(made: Made) -> None:
    found = verify_artifact(made.folder)
    assert found.passed, found.problems
    assert found.batch_sizes == (1, 2, 7, 64)


def test_the_manifest_lists_parts_and_their_files(made: Made) -> None:
    manifest = read_manifest(made.folder)
    entries = {entry.id: entry for entry in manifest.parts}
    assert set(entries) == {"boost", "selected", "tower.halve"}
    assert entries["selected"].module == "selected"
    assert entries["selected"].class_name == "Selected"
    assert "kept.shape[0] == 0" in entries["selected"].why
    assert sorted(manifest.part_code.values()) == [
        "parts/code/split_test_layers.py",
        "parts/code/split_test_net.py",
    ]
    inside = {f"parts/{path.name}" for path in (made.folder / "parts").glob("*.pt")}
    inside |= set(manifest.part_code.values())
    assert inside == {name for name in manifest.files if name.startswith("parts/")}
    assert damaged_files(made.folder, manifest) == []
    # Equal constants lie in the file once.
    constants = sum({entry.offset: entry.size_bytes for entry in manifest.constants}.values())
    parts = sum(part.size_bytes for part in made.bundle.parts.values())
    assert manifest.size_bytes == constants + parts


def test_passes_rewrite_what_lies_around_the_parts(made: Made) -> None:
    passes = (QuantizeEmbeddings(dtype="int8"), QuantizeDense(backend="native", min_inputs=1))
    quantised = apply_passes(made.bundle, *passes).bundle
    assert quantised.parts == made.bundle.parts
    assert quantised.size_bytes < made.bundle.size_bytes
    for num_rows in (1, 7, 64):
        features = rows(made.card, num_rows, 2.0)
        difference = quantised.run(features)["click"] - eager(made, features)
        assert 0 < difference.abs().max() < 0.1


def test_several_threads_may_call(made: Made) -> None:
    artifact = load_artifact(made.folder)
    batches = [rows(made.card, 1 + seed, seed % 3 - 1.0, seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda features: artifact(features)["click"].clone(), batches))
    for features, score in zip(batches, found, strict=True):
        torch.testing.assert_close(score, eager(made, features))


def test_an_error_of_a_part_is_told_and_the_artifact_lives_on(made: Made) -> None:
    artifact = load_artifact(made.folder)
    features = rows(made.card, 3)
    with pytest.raises(ArtifactError, match=r"part boost raised ValueError: a value is far too la"):
        artifact(features | {"dense": features["dense"] + 5000})
    torch.testing.assert_close(artifact(features)["click"], eager(made, features))


def _other_weights(made: Made, file: Path) -> nn.Module:
    other = build_module(made.card, allow_random=True)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    torch.save(other.state_dict(), file)
    return other


@pytest.fixture
def refreshed(made: Made, tmp_path: Path) -> Made:
    """Put other weights into the compiled artifact."""
    other = _other_weights(made, tmp_path / "other.pt")
    folder = refresh_artifact(made.folder, tmp_path / "other.pt", tmp_path / "refreshed")
    return replace(made, model=other, folder=folder)


def test_new_weights_reach_the_parts_and_two_artifacts_never_mix(
    made: Made, refreshed: Made
) -> None:
    old, new = load_artifact(made.folder), load_artifact(refreshed.folder)
    features = rows(made.card, 9, 0.5)
    wanted_old, wanted_new = eager(made, features), eager(refreshed, features)
    assert (wanted_old - wanted_new).abs().max() > 0.05
    for _ in range(2):
        torch.testing.assert_close(old(features)["click"], wanted_old)
        torch.testing.assert_close(new(features)["click"], wanted_new)
    old.close()
    torch.testing.assert_close(new(features)["click"], wanted_new)
    with pytest.raises(ArtifactError, match="was closed"):
        old(features)


def test_a_refresh_refuses_parts_that_changed(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _other_weights(made, tmp_path / "other.pt")

    def changed(card: ModelCard, model: nn.Module, sample: dict[str, Tensor]) -> ModelBundle:
        bundle = build_bundle(card, model, sample)
        halve = bundle.parts["tower.halve"]
        part = replace(halve, calls=halve.calls * 2)  # the same handle
        return replace(bundle, parts={**bundle.parts, part.id: part})

    monkeypatch.setattr("rankopt.artifact.refresh.build_bundle", changed)
    with pytest.raises(ArtifactError, match=r"part tower\.halve: must be a Halve"):
        refresh_artifact(made.folder, tmp_path / "other.pt", tmp_path / "refreshed")
    assert not (tmp_path / "refreshed").exists()


def edit(folder: Path, **changes: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | changes))


def test_a_damaged_part_is_not_run(copy: Path, tmp_path: Path) -> None:
    """Unpickling runs code, so the hash comes first."""
    witness = tmp_path / "ran"
    torch.save({"module": _Bomb(witness), "calls": ()}, copy / "parts/boost.pt")
    with pytest.raises(ArtifactError, match=r"boost\.pt: differs from its hash"):
        load_artifact(copy)
    assert not witness.exists()


class _Bomb:
    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.witness,)


def test_damaged_code_is_not_run(copy: Path) -> None:
    file = copy / "parts/code/split_test_net.py"
    file.write_text(file.read_text() + "\n# changed\n")
    with pytest.raises(ArtifactError, match=r"split_test_net\.py: differs from its hash"):
        load_artifact(copy)


def test_a_missing_package_is_named(copy: Path) -> None:
    edit(copy, part_packages={"a-package-nobody-has": "1.2"})
    with pytest.raises(ArtifactError, match=r"a-package-nobody-has: must be .?1\.2") as caught:
        load_artifact(copy)
    assert "pip install a-package-nobody-has==1.2" in str(caught.value)


def test_missing_code_is_named_in_a_fresh_process(copy: Path) -> None:
    edit(copy, part_code={})
    (problem,) = verify_artifact(copy).problems
    assert "whose code needs the package" in problem
    assert "Traceback" not in problem


# What can be no part, and what shapes are learned. Nothing is compiled below.


class Around(nn.Module):
    """A table and a layer around some module."""

    def __init__(self, inner: nn.Module, table: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8) if table else None
        self.inner = inner

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        x = dense if self.table is None else self.table(ids) + dense
        result: Tensor = self.inner(x)
        return result.sum(1)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = self.lin(x)
        return x


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x.mul_(2)
        return x


class Steps(nn.Module):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.cell = Branch()
        self.num_steps = num_steps

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.num_steps):
            x = self.cell(x)
        return x


class RootBranch(Around):
    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        return super().forward(ids, dense) if dense.sum() > 0 else dense.sum(1)


class Doubled(nn.Module):
    """Gives 2 B + 1 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = -x
        return torch.cat([x, x, x[:1]])


class Wrapped(nn.Module):
    """Needs the rows of its part to be known."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return x + result[: x.shape[0]]


PLAIN = ModelCard.model_validate(CARD)


def paths(model: nn.Module) -> list[str] | None:
    found = split(PLAIN, model)
    return None if found is None else [part.path for part in found.parts.values()]


def test_a_part_that_writes_to_its_input_goes_outward() -> None:
    assert paths(Around(InPlace())) is None
    inner = nn.Sequential(nn.Linear(8, 8), InPlace())
    assert paths(Around(inner)) == ["inner"]


def test_a_part_that_is_called_often_goes_outward() -> None:
    assert paths(Around(Steps(3))) == ["inner.cell"]
    assert paths(Around(Steps(20))) == ["inner"]


def test_the_model_itself_is_not_split() -> None:
    assert paths(RootBranch(nn.Linear(8, 8))) is None


def test_a_part_that_is_the_whole_model_is_no_part() -> None:
    assert paths(Around(Branch(), table=False)) is None


def test_sizes_that_follow_from_the_rows_stay_known() -> None:
    found = split(PLAIN, Around(Wrapped(Doubled())))
    assert found is not None
    (part,) = found.parts.values()
    assert part.path == "inner.inner"
    assert part.calls[0].outputs[0].shape == (Size(0, 0, 2, 1, 1), 8)


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


def test_the_parts_forget_their_module_with_the_bundle() -> None:
    found = split(PLAIN, Around(Branch()))
    assert found is not None
    run = found.program.module(check_guards=False)
    inputs = [rows(PLAIN, 3)[name] for name in PLAIN.tensor_names]
    run(*inputs)
    del found
    gc.collect()
    with pytest.raises(ArtifactError, match="was released"):
        run(*inputs)


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
