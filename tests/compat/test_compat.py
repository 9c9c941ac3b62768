"""The third-party models: their list, their cards, and the whole way for a few of them.

All of them, with trained weights and timings: `make compat`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from compat.suite import Entry, entries, recipe, slower
from rankopt.artifact.build import write_artifact
from rankopt.artifact.contract import contract_of, random_features
from rankopt.artifact.predict import predict_file
from rankopt.artifact.verify import verify_artifact
from rankopt.bundle import build_bundle
from rankopt.capture.preflight import check_module
from rankopt.environment import collect_environment
from rankopt.errors import CardError, ContractError
from rankopt.jobs.optimize import optimize
from rankopt.models.build import build_module, resolve_factory
from rankopt.models.card import ModelCard, load_card
from rankopt.models.serving import EagerModel
from rankopt.passes.base import PassContext
from rankopt.runtime import load_artifact

pytestmark = [
    # The libraries' own: attributes that they assign in forward, arrays that pandas lends them.
    pytest.mark.filterwarnings("ignore:The tensor attribute.*assigned during export"),
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
]

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "compat.json"
ENTRIES = {entry.name: entry for entry in entries()}
PACKAGES = {
    "deepctr-torch": "deepctr_torch",
    "torch-rechub": "torch_rechub",
    "torchrec": "torchrec",
}

CAPTURED = (
    "deepctr-torch-AutoInt",
    "deepctr-torch-DCNMix",
    "deepctr-torch-DIEN",
    "deepctr-torch-PLE",
    "torch-rechub-BST",
    "torch-rechub-DIEN",
    "torch-rechub-ESMM",
    "torch-rechub-FatDeepFFM",
    "torch-rechub-HSTUModel",
    "torchrec-DLRM_DCN",
)
COMPILED = (
    "deepctr-torch-DCNMix",
    "deepctr-torch-DIEN",
    "torch-rechub-MMOE",
    "torchrec-SimpleDeepFMNN",
)


def code_of(card: ModelCard) -> ModuleType:
    return sys.modules[resolve_factory(card).__module__]


def rows_like(card: ModelCard, num_rows: int = 600) -> pd.DataFrame:
    """Make up rows with the columns of MovieLens or of the synthetic clicks."""
    random = np.random.default_rng(0)
    code = code_of(card)
    label = random.integers(0, 2, num_rows)
    frame: dict[str, Any] = {"label": label, "loved": label * random.integers(0, 2, num_rows)}

    def lists(size: int, counts: np.ndarray) -> list[np.ndarray]:
        return [random.integers(1, size, count) for count in counts]

    if hasattr(code, "DENSE"):
        frame |= {name: random.standard_normal(num_rows) for name in code.DENSE}
        frame |= {name: random.integers(0, size, num_rows) for name, size in code.IDS.items()}
        frame["R1"] = lists(code.LISTS["R1"], random.integers(0, 21, num_rows))
        return pd.DataFrame(frame)
    frame |= {name: random.integers(1, size, num_rows) for name, size in code.SIZES.items()}
    counts = random.integers(0, 21, num_rows)
    frame["history"] = lists(code.SIZES["item_id"], counts)
    frame["history_genres"] = lists(code.SIZES["genre"], counts)
    frame["genres"] = lists(19, random.integers(1, 7, num_rows))
    return pd.DataFrame(frame)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a class with its library's own code, once for all tests of this file."""
    done: dict[str, tuple[ModelCard, Path]] = {}

    def get(name: str) -> tuple[ModelCard, Path]:
        if name not in done:
            card = load_card(ENTRIES[name].card_file)
            folder = tmp_path_factory.mktemp(name)
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                path = code_of(card).train(card.config["model"], rows_like(card), folder)
            done[name] = (card, path)
        return done[name]

    return get


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=lambda entry: entry.name)
def test_every_class_of_the_list_has_a_short_card(entry: Entry) -> None:
    assert len(entry.card_file.read_text(encoding="utf-8").splitlines()) <= 15
    card = load_card(entry.card_file)
    assert card.config == {"model": entry.model}
    assert version(entry.library) == entry.version


def test_the_list_holds_the_libraries_whole() -> None:
    deepctr = importlib.import_module("compat.deepctr_models").models
    rechub = importlib.import_module("compat.rechub_models")
    classes = {
        "deepctr-torch": {name for name in vars(deepctr) if name[0].isupper() or name == "xDeepFM"},
        "torch-rechub": {*rechub.ranking.__all__, *rechub.multi_task.__all__, "HSTUModel"},
        "torchrec": {"DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN"},
    }
    for library, expected in classes.items():
        listed = {entry.model for entry in ENTRIES.values() if entry.library == library}
        assert listed == expected
    assert len(ENTRIES) >= 45


@pytest.mark.parametrize("name", CAPTURED)
def test_the_captured_graph_scores_as_the_library_does(name: str, trained: Any) -> None:
    card, checkpoint = trained(name)
    module = build_module(card, checkpoint)
    contract = contract_of(card)
    check_module(card, module)
    eager = EagerModel(card, module)
    bundle = build_bundle(card, module, random_features(contract, 3, torch.Generator()))
    for batch, fill in ((card.min_batch, 0.5), (3, 0.1), (40, 0.9)):
        features = random_features(contract, batch, torch.Generator().manual_seed(batch), fill=fill)
        expected, found = eager(features), bundle.run(features)
        for output, score in expected.items():
            torch.testing.assert_close(found[output], score, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def compiled(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Apply every pass of the recipe and compile, without timing: once for all tests."""
    done: dict[str, tuple[ModelCard, Path, Path]] = {}

    def get(name: str) -> tuple[ModelCard, Path, Path]:
        if name not in done:
            card, checkpoint = trained(name)
            folder = tmp_path_factory.mktemp("artifact") / name
            sample = random_features(contract_of(card), 64, torch.Generator().manual_seed(0))
            bundle = build_bundle(card, build_module(card, checkpoint), sample)
            context = PassContext(collect_environment(), folder.parent)
            for step in recipe().passes:
                bundle = step.apply(bundle, context)
            write_artifact(bundle, folder, control_size_bytes=bundle.size_bytes, recipe="all")
            done[name] = (card, checkpoint, folder)
        return done[name]

    return get


@pytest.mark.parametrize("name", COMPILED)
def test_the_artifact_agrees_with_the_library(name: str, compiled: Any) -> None:
    card, checkpoint, folder = compiled(name)
    proof = verify_artifact(folder)
    assert proof.passed, proof.problems
    artifact = load_artifact(folder)
    eager = EagerModel(card, build_module(card, checkpoint))
    contract = contract_of(card)
    for batch in (2, 7, 513):
        features = random_features(contract, batch, torch.Generator().manual_seed(batch))
        for output, score in eager(features).items():
            found = artifact(features)[output]
            # Weights after a few steps on made-up rows: scores hardly differ between rows, and what
            # int8 may change is a share of the layers' own scale.
            torch.testing.assert_close(found, score, rtol=0.0, atol=0.03)


def test_a_model_that_scores_no_single_row_has_an_artifact_that_says_so(
    compiled: Any, tmp_path: Path
) -> None:
    card, _, folder = compiled("deepctr-torch-DCNMix")
    artifact = load_artifact(folder)
    one = random_features(contract_of(card), 1, torch.Generator().manual_seed(0))
    with pytest.raises(ContractError, match="must have 2 to"):
        artifact(one)
    # The last call would be of one row: it reaches back over one that is scored already.
    out = tmp_path / "scores.parquet"
    assert predict_file(folder, rows_like(card, 17), out, batch_size=16) == 17
    assert pd.read_parquet(out)["like"].between(0, 1).sum() == 17


def wrong_cards() -> Iterator[Any]:
    """Cards with one mistake each, and the field that the error must name."""
    packed = yaml.safe_load(ENTRIES["deepctr-torch-DeepFM"].card_file.read_text())
    columns = packed["inputs"][0]["columns"]
    swapped = [columns[1], columns[0], *columns[2:]]
    narrow = columns[:-1]
    for name, wrong in (("swapped", swapped), ("narrow", narrow)):
        inputs = [packed["inputs"][0] | {"columns": wrong}]
        yield pytest.param("deepctr-torch-DeepFM", {"inputs": inputs}, "inputs[0]", id=name)
    larger = [columns[0] | {"num_ids": 945}, *columns[1:]]
    inputs = [packed["inputs"][0] | {"columns": larger}]
    field = "inputs[0].columns[0]"
    yield pytest.param("deepctr-torch-DeepFM", {"inputs": inputs}, field, id="larger")
    kjt = yaml.safe_load(ENTRIES["torchrec-DLRM_DCN"].card_file.read_text())
    features = kjt["inputs"][1]["features"]
    wrong_key = [features[0] | {"key": "C9"}, *features[1:]]
    inputs = [kjt["inputs"][0], kjt["inputs"][1] | {"features": wrong_key}]
    yield pytest.param("torchrec-DLRM_DCN", {"inputs": inputs}, "inputs", id="wrong key")
    inputs = [{"kind": "dense", "name": "dense", "columns": ["I1", "I2"]}, kjt["inputs"][1]]
    yield pytest.param("torchrec-DLRM_DCN", {"inputs": inputs}, "inputs", id="dense too narrow")
    hstu = yaml.safe_load(ENTRIES["torch-rechub-HSTUModel"].card_file.read_text())
    floats = [item | {"dtype": "float32"} for item in hstu["inputs"]]
    yield pytest.param("torch-rechub-HSTUModel", {"inputs": floats}, "dtype", id="dtype")
    tasks = yaml.safe_load(ENTRIES["deepctr-torch-PLE"].card_file.read_text())["outputs"]
    beyond = [tasks[0], tasks[1] | {"index": 2}]
    yield pytest.param("deepctr-torch-PLE", {"outputs": beyond}, "outputs[", id="task beyond")
    unnamed = [{k: v for k, v in tasks[0].items() if k != "index"}]
    yield pytest.param("deepctr-torch-PLE", {"outputs": unnamed}, "outputs[", id="task missing")


@pytest.mark.parametrize(("name", "change", "field"), list(wrong_cards()))
def test_a_wrong_card_fails_before_any_compile(
    name: str,
    change: dict[str, Any],
    field: str,
    trained: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card, checkpoint = trained(name)
    raw = yaml.safe_load(ENTRIES[name].card_file.read_text())
    code = (ENTRIES[name].card_file.parent / raw["factory"].partition(":")[0]).resolve()
    wrong = {**raw, **change, "factory": f"{code}:build", "data": {}}
    file = tmp_path / "card.yaml"
    file.write_text(yaml.safe_dump(wrong))

    def compile_nothing(*_: object, **__: object) -> None:
        pytest.fail("compiled although the card is wrong")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compile_nothing)
    with pytest.raises(CardError) as caught:
        optimize(recipe(), file, checkpoint, rows_like(card), out=tmp_path / "out")
    assert field in str(caught.value)
    assert not (tmp_path / "out").exists()


class TestCommittedResult:
    CONTENT: dict[str, Any] = json.loads(RESULT.read_text())
    ROWS: list[dict[str, Any]] = CONTENT["rows"]

    def test_every_class_of_the_list_was_measured(self) -> None:
        measured = [f"{row['library']}-{row['model']}" for row in self.ROWS]
        assert sorted(measured) == sorted(ENTRIES)
        assert self.CONTENT["not_measured"] == []

    def test_at_least_41_of_them_pass_and_the_rest_say_why(self) -> None:
        failed = [row for row in self.ROWS if not row["passing"]]
        assert len(self.ROWS) - len(failed) >= 41
        assert all(row["error"] or row["reasons"] for row in failed)

    def test_none_is_slower_than_its_own_eager_code(self) -> None:
        assert {row["model"]: slower(row) for row in self.ROWS if slower(row)} == {}

    def test_the_page_shows_the_result(self) -> None:
        import subprocess

        command = [sys.executable, str(ROOT / "scripts" / "compatibility.py"), "check"]
        assert subprocess.run(command, check=False).returncode == 0
