"""The breakdown of planted models: who dominates, what adds up, what bounds whom."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from diagnose import planted
from rankopt.bench.rows_file import RowsFile, write_rows
from rankopt.diagnose.breakdown import Subject, break_down
from rankopt.diagnose.machine import machine_peaks
from rankopt.diagnose.process import where_time_goes
from rankopt.diagnose.profile import CompiledProfile, EagerProfile, Notes, Site
from rankopt.diagnose.quantise import quantise_ns
from rankopt.diagnose.rows_read import rows_read
from rankopt.diagnose.schema import BatchRow, GatherPeak, MachinePeaks, ReadPeak
from rankopt.diagnose.timing import Effort, timing, windows_of
from rankopt.diagnose.twin import build_twin
from rankopt.errors import EnvironmentProblem, UsageError
from rankopt.kernels.packing import pack_linear_int8
from rankopt.models.build import build_module
from rankopt.models.serving import EagerModel
from rankopt.runtime import load_artifact
from rankopt.units import NS_PER_MS

BATCH = 256
EFFORT = Effort(num_blocks=4, block_ns=10 * NS_PER_MS, warm_up_ns=5 * NS_PER_MS)


def machine() -> MachinePeaks:
    """Make peaks up: what is tested here must not hang on this machine."""
    rate = {"median_per_s": 1e9, "lowest_per_s": 1e9, "num_samples": 1}
    return MachinePeaks(
        fingerprint="x", cpu_model=None, isa="scalar", num_threads=1, made_at="now",
        int8={"per_s": 1e12, **rate}, fp32={"per_s": 1e11, **rate}, bf16=None,
        reads=(ReadPeak(working_set_bytes=1 << 30, peak={"per_s": 1e11, **rate}),),
        gathers=(
            GatherPeak(
                row_bytes=36, working_set_bytes=1, distribution="zipf",
                peak={"per_s": 1e9, **rate},
            ),
        ),
    )  # fmt: skip


def artifact_subject(folder: Path) -> Subject:
    plain = load_artifact(planted.artifact())
    twin, sites = build_twin(planted.artifact(), folder / "twin")
    return Subject("planted", "artifact", plain, CompiledProfile(twin, sites), ())


def eager_subject() -> Subject:
    model = EagerModel(planted.card(), build_module(planted.card(), allow_random=True))
    return Subject("planted", "eager", model, EagerProfile(model), ())


def broken_down(subject: Subject, folder: Path, batch: int = BATCH) -> BatchRow:
    torch.set_num_threads(1)
    rows = RowsFile(write_rows(planted.rows(), folder / "rows.safetensors"))
    with torch.inference_mode():
        return break_down(subject, windows_of(rows, batch), batch, machine(), EFFORT)


def check_sums(row: BatchRow) -> None:
    parts = {part.part: part for part in row.parts}
    total = sum(part.time.p50_ns for part in row.parts)
    assert row.unexplained_share == pytest.approx(1 - total / row.whole.p50_ns)
    operators = sum(operator.time.p50_ns for operator in row.operators)
    overhead = parts["framework overhead"].time.p50_ns
    # A sum of medians is not the median of the sum, least of all on a busy machine.
    assert operators + overhead == pytest.approx(total, rel=0.25)
    assert row.parts == tuple(sorted(row.parts, key=lambda part: -part.time.p50_ns))
    for part in row.parts:
        assert part.share == pytest.approx(part.time.p50_ns / row.whole.p50_ns)
        assert part.num_operators == sum(o.part == part.part for o in row.operators)


def test_the_dense_part_of_the_planted_artifact_dominates(tmp_path: Path) -> None:
    row = broken_down(artifact_subject(tmp_path), tmp_path)
    check_sums(row)
    assert row.parts[0].part == "dense"
    assert row.parts[0].time.p50_ns > 0.4 * sum(part.time.p50_ns for part in row.parts)
    assert row.overhead_inside_p50_ns is not None
    chain = max(row.operators, key=lambda operator: operator.time.p50_ns)
    assert (chain.name, chain.layer) == ("mlp_int8", "first_packed")
    width = planted.WIDTH
    assert chain.num_operations == 2 * BATCH * (planted.NUM_INPUTS * width + width**2 + width)
    expected = chain.num_operations / chain.time.p50_ns * 1e9
    assert chain.operations_per_s == pytest.approx(expected)
    assert chain.of_operations_peak == pytest.approx(expected / 1e12)
    assert chain.quantise_p50_ns is not None
    assert 0 <= chain.quantise_p50_ns < 0.5 * chain.time.p50_ns
    (lookup,) = (operator for operator in row.operators if operator.part == "lookup")
    # Rows of two fp32 tables alone, without ids and what comes out.
    assert lookup.bytes_per_s == pytest.approx(
        BATCH * 2 * planted.DIM * 4 / lookup.time.p50_ns * 1e9
    )
    assert lookup.gather_bytes_per_s is not None


def test_the_same_holds_for_the_eager_module(tmp_path: Path) -> None:
    row = broken_down(eager_subject(), tmp_path)
    check_sums(row)
    assert row.parts[0].part == "dense"
    assert row.overhead_inside_p50_ns is None
    names = [operator.name for operator in row.operators]
    # What an operator calls itself is its own: no addmm inside a linear.
    assert names.count("aten::linear") == 3
    assert "aten::addmm" not in names
    assert not any("profile" in name for name in names)
    lookups = [operator for operator in row.operators if operator.name == "aten::embedding"]
    assert len(lookups) == 2
    assert all(operator.gather_bytes_per_s for operator in lookups)


class Settling(nn.Module):
    """Run one operator more from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.called = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.called:
            x = x + 1
        self.called = True
        return x + 1


def test_a_model_that_does_other_things_from_call_to_call_is_refused(tmp_path: Path) -> None:
    model = Settling()

    def run(features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"click": model(features["dense"])}

    subject = Subject("settling", "eager", run, EagerProfile(run), ())
    with pytest.raises(EnvironmentProblem, match="other things from call to call"):
        broken_down(subject, tmp_path, batch=2)


def test_the_rows_that_a_lookup_reads_are_found(tmp_path: Path) -> None:
    subject = artifact_subject(tmp_path)
    features = planted.features(6)
    sites, notes = subject.profile.note(features)
    (read,) = (
        found
        for site, note in zip(sites, notes, strict=True)
        if (found := rows_read(site, note)) is not None
    )
    model = build_module(planted.card(), allow_random=True)
    tables = (model.user.weight, model.item.weight)
    expected = torch.cat([table[features["ids"][:, i]] for i, table in enumerate(tables)])
    size = planted.DIM * 4
    assert read.row_bytes.tolist() == [size] * 12
    got = torch.stack(
        [read.storage[start : start + size].clone().view(torch.float32) for start in read.offsets]
    )
    assert torch.equal(got, expected)
    assert read.num_bytes == 12 * size
    assert read.seconds() > 0


def test_only_wide_int8_layers_have_their_quantising_estimated(tmp_path: Path) -> None:
    sites, notes = artifact_subject(tmp_path).profile.note(planted.features(64))
    for site, note in zip(sites, notes, strict=True):
        estimate = quantise_ns(site, note)
        if site.name == "mlp_int8":
            assert estimate is not None
            assert estimate >= 0
        else:
            assert estimate is None


def layer_notes(num_outputs: int) -> Notes:
    packed = pack_linear_int8(torch.ones(num_outputs, 32, dtype=torch.int8))
    constants = [packed, torch.ones(num_outputs)]
    x = torch.zeros(64, 32, device="meta")
    return Notes(constants, [x], [], [num_outputs, 8, 0], [x, *constants])


def test_one_layers_quantising_is_estimated_unless_it_is_narrow() -> None:
    site = Site("linear_int8")
    assert quantise_ns(site, layer_notes(8)) is None
    wide = quantise_ns(site, layer_notes(256))
    assert wide is not None
    assert wide >= 0


def test_few_calls_have_no_interval() -> None:
    import numpy as np

    few = timing(np.arange(1.0, 6.0))
    assert (few.p50_ns, few.ci_low_ns, few.num_samples) == (3.0, None, 5)
    many = timing(np.arange(1.0, 102.0))
    assert many.ci_low_ns is not None
    assert many.ci_high_ns is not None
    assert many.ci_low_ns < many.p50_ns == 51.0 < many.ci_high_ns


def test_where_time_goes_in_a_fresh_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Peaks are measured once for the test run, by the process here: with little of everything.
    from rankopt.diagnose import machine as peaks

    monkeypatch.setattr(peaks, "GATHER_BYTES", (1 << 20,))
    monkeypatch.setattr(peaks, "NUM_SAMPLES", 3)
    machine_peaks(1)
    said: list[str] = []
    found = where_time_goes(
        planted.artifact(), None, planted.rows(), (1, 64), num_threads=1, quick=True,
        progress=said.append,
    )  # fmt: skip
    assert [row.batch_size for row in found] == [1, 64]
    assert said[-1] == "timing batch 64"
    for row in found:
        assert row.whole.num_samples >= 20
        assert {part.part for part in row.parts} >= {"dense", "lookup", "framework overhead"}
        json.dumps(row.model_dump(mode="json"), allow_nan=False)


def test_bad_requests_are_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match="an artifact folder or a model card"):
        where_time_goes(None, None, planted.rows())
    for sizes in ((), (0,), (1, -2)):
        with pytest.raises(UsageError, match="at least 1"):
            where_time_goes(planted.artifact(), None, planted.rows(), sizes)
