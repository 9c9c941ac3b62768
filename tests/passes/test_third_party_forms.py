"""Forms that other people's models come in, from capture through every pass to the artifact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from passes.test_fuse_embeddings import num_calls, num_plain_lookups
from passes.truth import read_rows
from passes.zoo import (
    BATCHES,
    FILLS,
    SIZES,
    apply_passes,
    card,
    exact,
    features_of,
    ids,
    largest_error,
    make_bundle,
    ragged,
    seeded,
)
from rankopt.artifact.build import write_artifact
from rankopt.bundle import ModelBundle
from rankopt.models.card import ModelCard
from rankopt.passes.base import Pass
from rankopt.passes.export_aoti import ExportAoti
from rankopt.passes.fuse_embeddings import FuseEmbeddings
from rankopt.passes.graph import find_linears
from rankopt.passes.lookups import find_lookups
from rankopt.passes.quantize_dense import QuantizeDense
from rankopt.passes.quantize_embeddings import QuantizeEmbeddings
from rankopt.runtime import LoadedArtifact, load_artifact
from rankopt.tables import TableDtype, pack_rows

CLOSE = 1e-4
NUM_FIELDS, DIM, LENGTH = 5, 8, 4


class OneMatrix(nn.Module):
    """Ids and numbers in one float matrix, a table and a weight per field, as deepctr has it."""

    def __init__(self) -> None:
        super().__init__()
        fields = [f"f{index}" for index in range(NUM_FIELDS)]
        self.tables = nn.ModuleDict({name: nn.Embedding(20, DIM) for name in (*fields, "item")})
        self.firsts = nn.ModuleDict({name: nn.Embedding(20, 1) for name in fields})
        self.weight = nn.Parameter(torch.randn(3, 1) * 0.2)
        self.conv = nn.Conv1d(NUM_FIELDS + 1, 16, 1)
        width = (NUM_FIELDS + 1) * DIM + 3
        layers: list[nn.Module] = []
        for left, right in ((width, 32), (32, 16)):
            layers += [nn.Linear(left, right), nn.BatchNorm1d(right), nn.ReLU(inplace=True)]
            layers += [nn.Dropout(0.3)]
        self.deep = nn.Sequential(*layers, nn.Linear(16, 1, bias=False))

    def forward(self, inputs: Tensor) -> Tensor:
        ids = [inputs[:, index : index + 1].long() for index in range(NUM_FIELDS)]
        numbers = inputs[:, NUM_FIELDS : NUM_FIELDS + 3]
        history = inputs[:, NUM_FIELDS + 3 :].long()
        vectors = [self.tables[f"f{index}"](one) for index, one in enumerate(ids)]
        mask = (history != 0).to(inputs.dtype).unsqueeze(2)
        recent = (self.tables["item"](history) * mask).sum(1, keepdim=True)
        vectors.append(recent / (mask.sum(1, keepdim=True) + 1e-8))
        score = inputs.new_zeros(inputs.shape[0], 1)
        firsts = [self.firsts[f"f{index}"](one) for index, one in enumerate(ids)]
        score += torch.cat(firsts, -1).sum(-1)
        score += numbers.matmul(self.weight)
        fields = torch.cat(vectors, 1)
        score += torch.relu_(self.conv(fields)).sum((1, 2)).unsqueeze(1) * 0.1
        score += self.deep(torch.cat([fields.flatten(1), numbers], 1))
        return score.squeeze(1)


def one_matrix_card() -> ModelCard:
    columns: list[dict[str, Any]] = [
        {"name": f"f{index}", "num_ids": 20} for index in range(NUM_FIELDS)
    ]
    columns += [{"name": name} for name in ("x", "y", "z")]
    columns += [{"name": "history", "num_ids": 20, "length": LENGTH}]
    return card("one-matrix", {"kind": "packed", "name": "inputs", "columns": columns})


class ManyForms(nn.Module):
    """One table for all fields, bare tables, bags of every kind, ids read from rows, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.fields = nn.Embedding(30, DIM)
        self.register_buffer("starts", torch.tensor([0, 10, 20]))
        self.popularity = nn.Parameter(torch.randn(40))
        self.item = nn.Parameter(torch.randn(40, DIM))
        self.limited = nn.Embedding(40, DIM, max_norm=0.8)
        self.best = nn.EmbeddingBag(40, DIM, mode="max", padding_idx=3)
        self.mean = nn.EmbeddingBag(40, DIM, mode="mean", padding_idx=3)
        self.total = nn.EmbeddingBag(40, DIM, mode="sum")
        self.cluster = nn.Embedding(40, 2)
        self.of_cluster = nn.Embedding(16, DIM)
        self.place = nn.Embedding(LENGTH, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.experts = nn.Parameter(torch.randn(3, DIM, 8) * 0.3)
        self.gate = nn.Parameter(torch.randn(3))
        self.top = nn.Linear(10 * DIM + 1, 16)
        self.norm = nn.BatchNorm1d(16)
        self.score = nn.Parameter(torch.randn(16) * 0.3)

    def forward(
        self, item: Tensor, three: Tensor, recent: Tensor, bag_values: Tensor, bag_lengths: Tensor
    ) -> Tensor:
        starts = bag_lengths.cumsum(0) - bag_lengths
        many = self.fields(three + self.starts)
        sequence = self.limited(recent) + self.place(torch.arange(LENGTH)) + self.item[recent]
        attended, _ = self.attention(many, sequence, sequence, need_weights=False)
        experts = torch.einsum("bi,eio->beo", self.item[item], self.experts)
        cluster = self.cluster(item)[:, 0].long()
        vectors = [
            attended.flatten(1),
            many.sum(1),
            (experts * self.gate.softmax(0)[:, None]).sum(1),
            self.best(bag_values, starts),
            self.mean(bag_values, starts),
            self.total(bag_values, starts),
            # The table of the padded mean once more: its padding row is read here.
            functional.embedding(item, self.mean.weight),
            self.of_cluster(cluster),
            self.popularity[item].unsqueeze(1),
        ]
        hidden = self.norm(self.top(torch.cat(vectors, 1))).relu()
        score: Tensor = hidden @ self.score
        return score


def many_forms() -> nn.Module:
    model = ManyForms()
    # Whole numbers at both ends of what int8 holds: ids are cut from these rows.
    model.cluster.weight.data = (
        torch.stack([torch.arange(40) % 16, torch.full((40,), 255)], 1) * 1.0
    )
    return model


def many_forms_card() -> ModelCard:
    return card(
        "many-forms",
        ids("item", 40),
        {"kind": "ids", "name": "three", "columns": ["p", "q", "r"], "num_ids": 10},
        ragged("recent", 40, layout="padded", max_length=LENGTH),
        ragged("bag", 40),
    )


@dataclass(frozen=True)
class Form:
    card: ModelCard
    model: nn.Module
    bundle: ModelBundle
    tables: tuple[str, ...]


@cache
def form(name: str) -> Form:
    """Export one of the models, once."""
    make_card, make_model = {
        "one-matrix": (one_matrix_card, OneMatrix),
        "many-forms": (many_forms_card, many_forms),
    }[name]
    torch.manual_seed(11)
    model = seeded(make_model)
    if name == "many-forms":
        fresh = many_forms()
        model.cluster.weight.data = fresh.cluster.weight.data
    generator = torch.Generator().manual_seed(5)
    for child in model.modules():
        if isinstance(child, nn.BatchNorm1d):
            shape = child.running_mean.shape
            child.running_mean = torch.randn(shape, generator=generator) * 0.3
            child.running_var = torch.rand(shape, generator=generator) + 0.5
    model_card = make_card()
    bundle = make_bundle(model_card, model)
    found = find_lookups(bundle.program.module(check_guards=False))
    return Form(model_card, model, bundle, tuple(dict.fromkeys(lk.table for lk in found)))


def stored_as(made: Form, dtypes: Mapping[str, TableDtype]) -> nn.Module:
    """Put the rows that packed tables stand for into a copy of the model."""
    model = copy.deepcopy(made.model)
    for child in model.modules():
        if isinstance(child, nn.Embedding) and child.max_norm is not None:
            everything = torch.arange(child.num_embeddings)
            torch.embedding_renorm_(child.weight.data, everything, child.max_norm, 2.0)
            child.max_norm = None
    parameters = dict(model.named_parameters())
    for name, dtype in dtypes.items():
        parameter = parameters.get(name, parameters.get(f"{name}.weight"))
        assert parameter is not None, name
        weight = parameter.data.view(len(parameter), -1)
        rows = read_rows(pack_rows(weight, dtype), weight.shape[1], dtype)
        parameter.data = torch.from_numpy(rows).float().view(parameter.shape)
    return model


def dtypes_of(made: Form, asked: TableDtype) -> dict[str, TableDtype]:
    """What a table is stored in: of width 1 or 2, integers would save little or nothing."""
    found = find_lookups(made.bundle.program.module(check_guards=False))
    widths = {lookup.table: lookup.weight.shape[1] for lookup in found}
    finer: dict[int, TableDtype] = {1: "fp16"}
    if asked == "int4":
        finer[2] = "int4"
    return {name: finer.get(width, asked) for name, width in widths.items() if name != "place"}


def check(made: Form, bundle: ModelBundle, truth: nn.Module, allowed: float = CLOSE) -> None:
    for batch, fill in SIZES:
        features = features_of(made.card, batch, fill)
        error = largest_error(bundle.run(features), exact(made.card, truth, features))
        assert error < allowed, f"batch {batch}, fill {fill}: {error}"


FORMS = ("one-matrix", "many-forms")
PIPELINES: dict[str, tuple[Pass, ...]] = {
    "fuse": (FuseEmbeddings(),),
    "int8": (QuantizeEmbeddings(),),
    "fuse-int8": (FuseEmbeddings(), QuantizeEmbeddings()),
    "fp16": (QuantizeEmbeddings(dtype="fp16"),),
    "fuse-int4": (FuseEmbeddings(), QuantizeEmbeddings(dtype="int4")),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_scores_what_its_stored_rows_score(name: str, pipeline: str) -> None:
    made = form(name)
    asked: dict[str, TableDtype] = {"fuse": "fp32", "fp16": "fp16", "fuse-int4": "int4"}
    dtype = asked.get(pipeline, "int8")
    applied = apply_passes(made.bundle, *PIPELINES[pipeline])
    truth = stored_as(made, {} if dtype == "fp32" else dtypes_of(made, dtype))
    check(made, applied.bundle, truth)


def test_all_lookups_of_single_rows_become_one_call_per_concatenation() -> None:
    made = form("one-matrix")
    found = find_lookups(made.bundle.program.module(check_guards=False))
    assert len(found) == 2 * NUM_FIELDS + 1
    fused = apply_passes(made.bundle, FuseEmbeddings())
    assert num_calls(fused.bundle) == 2
    assert num_plain_lookups(fused.bundle) == 1
    assert fused.notes == ["tables.item: left alone, a lookup of it has nothing to join"]
    assert {slot.name for slot in fused.bundle.batches["tables"].slots} == {
        *(f"tables.f{index}" for index in range(NUM_FIELDS)),
        *(f"firsts.f{index}" for index in range(NUM_FIELDS)),
    }


def test_tables_of_width_one_stay_out_of_int8_with_the_reason() -> None:
    made = form("one-matrix")
    applied = apply_passes(made.bundle, FuseEmbeddings(), QuantizeEmbeddings())
    stored = {slot.name: slot.dtype for slot in applied.bundle.batches["tables"].slots}
    assert {stored[f"firsts.f{index}"] for index in range(NUM_FIELDS)} == {"fp16"}
    assert {stored[f"tables.f{index}"] for index in range(NUM_FIELDS)} == {"int8"}
    assert any("firsts.f0" in note and "5 bytes against 4" in note for note in applied.notes)


def test_every_table_and_layer_of_many_forms_is_found() -> None:
    made = form("many-forms")
    assert set(made.tables) == {
        *("fields", "popularity", "item", "limited", "best", "mean", "total", "cluster"),
        "of_cluster",
    }
    linears = find_linears(made.bundle.program.module(check_guards=False))
    assert {linear.layer for linear in linears} == {
        *("attention.in_proj_weight_0", "attention.in_proj_weight_1", "attention.out_proj"),
        *("experts", "top", "score"),
    }
    top = next(linear for linear in linears if linear.layer == "top")
    assert top.slope == 0.0  # batch norm gone, ReLU right behind
    # Nothing was stored twice for it.
    assert made.bundle.size_bytes <= sum(p.nbytes for p in made.model.parameters())


def test_a_bag_of_maxima_and_one_with_padding_keep_no_float_rows() -> None:
    made = form("many-forms")
    applied = apply_passes(made.bundle, FuseEmbeddings(), QuantizeEmbeddings())
    kept = [
        value
        for value in applied.bundle.constants.values()
        if value.dtype == torch.float32 and value.shape[:1] == (40,)
    ]
    assert kept == []
    (reason,) = [note for note in applied.notes if note.startswith("best: ")]
    assert reason.startswith("best: left alone, lookup calls pool by sum or mean")


@pytest.mark.parametrize("name", FORMS)
def test_layers_that_were_products_run_in_int8(name: str) -> None:
    made = form(name)
    applied = apply_passes(made.bundle, QuantizeDense(min_inputs=4))
    nodes = applied.bundle.program.graph.nodes
    names = [str(node.target) for node in nodes if node.op == "call_function"]
    wanted = {"one-matrix": 4, "many-forms": 6}[name]
    scales = [node.args[2] for node in nodes if "mlp_int8" in str(node.target)]
    in_chains = sum(scale is not None for chain in scales for scale in chain)
    assert sum("linear_int8" in target for target in names) + in_chains == wanted
    assert not any(target.startswith("aten.linear") for target in names)
    assert not any(target in ("aten.relu_.default", "aten.relu.default") for target in names)
    features = features_of(made.card, 513)
    truth = exact(made.card, stored_as(made, {}), features)["score"]
    error = applied.bundle.run(features)["score"].double() - truth
    assert float(error.square().mean().sqrt() / truth.std()) < 0.05


ARTIFACTS: dict[str, tuple[Pass, ...]] = {
    "many-forms": (FuseEmbeddings(), QuantizeEmbeddings()),
    "one-matrix": (FuseEmbeddings(), QuantizeEmbeddings(), QuantizeDense(min_inputs=4)),
}


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedArtifact]:
    """Compile a model of `ARTIFACTS`, once."""

    @cache
    def build(name: str) -> LoadedArtifact:
        made = form(name)
        bundle = apply_passes(made.bundle, *ARTIFACTS[name], ExportAoti()).bundle
        folder = tmp_path_factory.mktemp("forms") / name
        write_artifact(bundle, folder, control_size_bytes=made.bundle.size_bytes)
        return load_artifact(folder)

    return build


@pytest.mark.slow
def test_the_artifact_of_many_forms_is_exact_at_every_size(
    artifact_of: Callable[[str], LoadedArtifact],
) -> None:
    made, artifact = form("many-forms"), artifact_of("many-forms")
    truth_model = stored_as(made, dtypes_of(made, "int8"))
    for batch in BATCHES:
        for fill in FILLS:
            features = features_of(made.card, batch, fill)
            truth = exact(made.card, truth_model, features)
            error = largest_error(artifact(features), truth)
            assert error < CLOSE, f"batch {batch}, fill {fill}: {error}"


@pytest.mark.slow
def test_a_row_of_the_one_matrix_artifact_scores_the_same_bits_alone(
    artifact_of: Callable[[str], LoadedArtifact],
) -> None:
    made, artifact = form("one-matrix"), artifact_of("one-matrix")
    features = features_of(made.card, 33)
    together = artifact(features)["score"].clone()
    truth = exact(made.card, made.model, features)["score"]
    assert float((together.double() - truth).square().mean().sqrt() / truth.std()) < 0.05
    for row in range(33):
        alone = artifact({"inputs": features["inputs"][row : row + 1]})["score"]
        assert float(alone[0]) == float(together[row]), f"row {row}"
