"""scripts/kernels.py: what it measures is what the models call, and its peers do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import small
from rankopt.bench.peers.suite import load_suite
from rankopt.kernels.lookup import (
    MEAN,
    SUM,
    PlanRow,
    encode_plan,
    lookup_rows,
    lookup_sequences,
)
from rankopt.kernels.mlp import MlpLayer
from rankopt.kernels.packing import pack_linear_int8
from rankopt.models.card import load_card
from rankopt.recipe import load_recipe
from rankopt.tables import TYPE_CODES, pack_batch


@pytest.fixture
def scripts(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of scripts/."""
    monkeypatch.syspath_prepend(str(checkout / "scripts"))

    def load(name: str) -> Any:
        return __import__(name)

    return load


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write settings of a few milliseconds and a suite of the small model."""
    folder = tmp_path_factory.mktemp("kernels")
    card = small.model(tmp_path_factory.getbasetemp()) / "card.yaml"
    suite = {"models": [{"name": "small", "card": str(card)}], "arms": ["eager"]}
    (folder / "suite.yaml").write_text(yaml.safe_dump(suite))
    content = {
        "suite": "suite.yaml",
        "recipe": "serve-int8",
        "batch_sizes": [4, 300],
        "num_threads": 1,
        "num_blocks": 3,
        "block_duration_ns": 200_000,
        "num_windows": 2,
        "goals": {"batch_sizes": [300], "of_int8_peak": 0.6, "against_fbgemm": 1.0},
    }
    (folder / "settings.yaml").write_text(yaml.safe_dump(content))
    return folder / "settings.yaml"


def test_a_small_model_is_measured(checkout: Path, settings: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    page = (checkout / "docs" / "kernels.md").read_bytes()
    command = [sys.executable, "scripts/kernels.py", "measure", "--settings", settings]
    done = subprocess.run(
        [*command, "--result", out], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert {"made_at", "environment", "command", "rows", "settings", "machine"} <= set(result)
    assert (result["num_threads"], result["not_run"]) == (1, {})

    rows = {(row["kind"], row["shape"], row["batch_size"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    # The small net: 3 * 8 + 4 inputs, 32 hidden units, one output, which the recipe leaves in fp32.
    dense = {key: row for key, row in rows.items() if key[0] != "lookup"}
    shapes = {"28 - 32": 28 * 32, "28 - 32 - 1": 28 * 32 + 32}
    assert {key[1:] for key in dense} == {(shape, size) for shape in shapes for size in (4, 300)}
    for (kind, shape, batch_size), row in dense.items():
        done_ops = row["achieved_per_s"] * row["p50_ns"] / 1e9
        assert done_ops == pytest.approx(2 * batch_size * shapes[shape])
        assert row["calls"] == {"small": 1 if kind == "chain" else 0}
        assert row["num_rows"] == batch_size
    assert [row["num_rows"] for key, row in rows.items() if key[0] == "lookup" and key[2] == 4]
    for row in rows.values():
        assert row["fraction"] == pytest.approx(row["achieved_per_s"] / row["peak_per_s"])
        assert row["ci_low"] < row["fraction"] < row["ci_high"]
        assert (row["write_fraction"] is None) == (row["kind"] != "lookup")
        assert row["ratio_ci_low"] < row["ratio_to_fbgemm"] < row["ratio_ci_high"]
        assert row["ratio_to_fbgemm"] == pytest.approx(row["fbgemm_p50_ns"] / row["p50_ns"])
    assert "Batch 300:" in done.stdout
    assert "| small |" in done.stdout
    assert (checkout / "docs" / "kernels.md").read_bytes() == page


def test_what_is_shipped_covers_the_peer_suite(
    scripts: Callable[[str], Any], checkout: Path
) -> None:
    file = checkout / "benchmarks" / "kernels.yaml"
    shipped = scripts("kernel_rows").read_settings(file)
    suite = load_suite(file.parent / shipped.suite)
    assert suite.path == (checkout / "benchmarks" / "peers.yaml").resolve()
    assert set(shipped.goals.batch_sizes) <= set(shipped.batch_sizes) == set(suite.plan.batch_sizes)
    assert load_recipe(shipped.recipe).name == "serve-int8"


def test_a_bag_is_written_with_its_last_row(scripts: Callable[[str], Any]) -> None:
    code = TYPE_CODES["int8"]
    rows = [
        PlanRow(SUM, 0, 9, 4, code, 1, source=0),
        PlanRow(MEAN, 0, 9, 4, code, 5, source=1, offsets=2, length=0),
    ]
    inputs = [torch.tensor([3, 4, 5]), torch.tensor([1, 2, 3, 4]), torch.tensor([0, 3, 3])]
    pooled = scripts("kernel_peers").PLACES["lookup_rows"]
    places, dims, shape = pooled(torch.empty(0), encode_plan(rows), inputs, 3, 9)
    assert places.tolist() == [1, 10, 19, -1, -1, 5, 18 + 5]
    assert dims.tolist() == [4] * 7
    assert shape == (3, 9)


def test_fbgemms_layers_compute_what_ours_do(scripts: Callable[[str], Any], settings: Path) -> None:
    measured, peers = scripts("kernels"), scripts("kernel_peers")
    card = load_card(small.model(settings.parent.parent) / "card.yaml")
    chosen = scripts("kernel_rows").read_settings(settings)
    _, (size, many) = measured._captured(card, chosen)
    [chain] = many.dense
    assert [layer.num_rows for layer in chain.layers] == [size, size]
    ours = chain.call()()
    alone = chain.layers[0].x
    for layer in chain.layers:
        assert torch.equal(layer.x, alone)
        alone = layer.call()()
        theirs = peers.fbgemm_dense(layer)()
        assert float((theirs - alone).norm() / alone.norm()) < 0.05
    assert torch.equal(alone, ours)
    theirs = peers.fbgemm_dense(chain)()
    assert float((theirs - ours).norm() / ours.norm()) < 0.05
    [lookup] = many.lookups
    assert len(lookup.arguments) == chosen.num_windows
    assert not torch.equal(lookup.calls()[0](), lookup.calls()[1]())


def _tables() -> tuple[torch.Tensor, list[Any]]:
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(rows, dim, generator=generator) for rows, dim in ((50, 8), (30, 16))]
    batch, store = pack_batch(["a", "b"], weights, ["int8", "int8"])
    return store, list(batch.slots)


def test_fbgemms_lookups_read_what_ours_do(scripts: Callable[[str], Any]) -> None:
    calls, peers = scripts("kernel_calls"), scripts("kernel_peers")
    store, (a, b) = _tables()
    code = TYPE_CODES["int8"]
    plan = encode_plan(
        [
            PlanRow(SUM, a.offset, a.num_rows, 8, code, 0, 0, 1),
            PlanRow(SUM, b.offset, b.num_rows, 16, code, 8, 0, 2, 2),
            PlanRow(MEAN, b.offset, b.num_rows, 16, code, 24, 1, 0, 0, 2),
            PlanRow(MEAN, a.offset, a.num_rows, 8, code, 40, 0, 0),
        ]
    )
    ids = torch.randint(30, (5, 4))
    lists, starts = torch.randint(30, (9,)), torch.tensor([0, 2, 2, 3, 7])
    given = (store, plan, [ids, lists, starts], 5, 48)
    call = calls.Lookups("lookup_rows", torch.ops.rankopt.lookup_rows.default, (given,))
    ours = lookup_rows(*given)
    [run] = peers.fbgemm_lookups(call)
    sums, means = run()
    theirs = torch.cat([sums[:, :24], means, sums[:, 24:]], 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    [read] = peers.rows_of(call)
    assert read.num_bytes == 5 * (12 + 2 * 20 + 12) + 9 * 20

    row = PlanRow(SUM, a.offset, a.num_rows, 8, code, 0, 0)
    given = (store, encode_plan([row, PlanRow(SUM, a.offset, 50, 8, code, 0, 1)]))
    inputs = [torch.randint(50, (7, 3)), torch.randint(50, (11,))]
    call = calls.Lookups(
        "lookup_sequences", torch.ops.rankopt.lookup_sequences.default, ((*given, inputs, 8),)
    )
    [run] = peers.fbgemm_lookups(call)
    [theirs] = run()
    ours = lookup_sequences(*given, inputs, 8)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    [read] = peers.rows_of(call)
    assert read.num_bytes == (21 + 11) * 12


def test_a_peak_is_what_the_machine_measures(scripts: Callable[[str], Any]) -> None:
    calls, peers = scripts("kernel_calls"), scripts("kernel_peers")
    torch.set_num_threads(1)
    packed = pack_linear_int8(torch.ones(64, 64, dtype=torch.int8))
    layer = MlpLayer(packed, torch.ones(64), None, None, 64)
    once, twice = (
        peers.at_peak([calls.Layer("l", torch.ones(rows, 64), layer, 7)]) for rows in (512, 1024)
    )
    # The best of many: others use this machine too.
    rate = max(float(torch.ops.rankopt.peak_compute("int8", 20_000)) for _ in range(50))
    expected_ns = 2 * 512 * 64 * 64 / rate * 1e9
    assert min(once() for _ in range(50)) == pytest.approx(expected_ns, rel=0.5)
    assert min(twice() for _ in range(50)) == pytest.approx(2 * expected_ns, rel=0.5)
