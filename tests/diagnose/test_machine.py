"""The machine's peaks: real rates, in a sensible order, kept and measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rankopt.diagnose import machine
from rankopt.kernels import ops
from rankopt.units import BYTES_PER_KIB, BYTES_PER_MIB


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Measure little, and keep it in a cache of its own."""
    monkeypatch.setattr(machine, "NUM_SAMPLES", 5)
    monkeypatch.setattr(machine, "SAMPLE_S", 0.002)
    monkeypatch.setattr(machine, "READ_BYTES", (256 * BYTES_PER_KIB, 64 * BYTES_PER_MIB))
    monkeypatch.setattr(machine, "GATHER_BYTES", (64 * BYTES_PER_KIB, 64 * BYTES_PER_MIB))
    monkeypatch.setattr(machine, "ROW_BYTES", (36, 256))
    monkeypatch.setattr(machine, "cache_dir", lambda: tmp_path)
    return tmp_path


def test_peaks_are_positive_and_in_order(small: Path) -> None:
    found = machine.machine_peaks(1)
    assert found.num_threads == 1
    assert found.isa == ops.current_isa()
    # One core does at least a gigaflop, and nothing made of silicon does a petaflop.
    for peak in (found.int8, found.fp32, *([found.bf16] if found.bf16 else [])):
        assert 1e9 < peak.lowest_per_s <= peak.median_per_s <= peak.per_s < 1e15
    if found.isa == "avx512_vnni":
        assert found.int8.per_s > 1.5 * found.fp32.per_s
    small_buffer, large_buffer = found.reads
    assert small_buffer.peak.per_s > 1e9
    assert small_buffer.peak.per_s > 0.8 * large_buffer.peak.per_s
    rate = {(g.row_bytes, g.working_set_bytes, g.distribution): g.peak.per_s for g in found.gathers}
    assert len(rate) == 8
    near, far = 64 * BYTES_PER_KIB, 64 * BYTES_PER_MIB
    # Rows at random places in memory are no faster than rows in a cache.
    assert rate[256, near, "uniform"] > 0.8 * rate[256, far, "uniform"]
    assert rate[256, near, "uniform"] > 1e8


@pytest.mark.parametrize("isa", ops.supported_isas())
def test_every_instruction_set_has_its_loops(isa: str) -> None:
    ops.set_isa(isa)
    run = torch.ops.rankopt
    # The best of some: each is so short that other work on the machine may hit it whole.
    for kind in ("fp32", "int8"):
        assert max(run.peak_compute(kind, 10_000) for _ in range(20)) > 1e8
    buffer = torch.ones(100_003, dtype=torch.uint8)
    assert max(run.peak_read(buffer, 3) for _ in range(20)) > 1e8
    storage = torch.ones(1_000, dtype=torch.uint8)
    for size in (0, 1, 3, 4, 31, 64, 65, 127, 130):
        offsets = torch.tensor([0, 1000 - size, 17, 17])
        assert run.peak_gather(storage, offsets, torch.tensor([size])) >= 0
        all_sizes, dims = torch.full((4,), size), torch.tensor([1, 16, 70, 3])
        out = torch.full((100,), -1.0)
        places = torch.tensor([1, 2, 20, -1])
        assert run.peak_gather_write(storage, offsets, all_sizes, places, dims, out) >= 0
        assert bool((out[[0, *range(18, 20), *range(90, 100)]] == -1).all())
        assert bool((out[[1, *range(2, 18), *range(20, 90)]] != -1).all())
        content = torch.arange(1000).to(torch.uint8)
        copied = torch.full((4, size + 3), 255, dtype=torch.uint8)
        assert run.peak_gather_copy(content, offsets, torch.tensor([size]), copied) >= 0
        wanted = torch.stack([content[at : at + size] for at in offsets.tolist()])
        assert torch.equal(copied[:, :size], wanted)
        assert bool((copied[:, size:] == 255).all())
    sizes = torch.tensor([1, 36, 130])
    assert run.peak_gather(storage, torch.tensor([999, 3, 5]), sizes) >= 0
    assert run.peak_gather(storage, torch.empty(0, dtype=torch.int64), sizes[:1]) >= 0


def test_more_threads_share_the_work() -> None:
    torch.set_num_threads(2)
    offsets = torch.randint(900, (5_000,), generator=torch.Generator().manual_seed(0))
    storage = torch.ones(1_000, dtype=torch.uint8)
    assert torch.ops.rankopt.peak_gather(storage, offsets, torch.tensor([100])) > 0


def test_bad_requests_are_refused() -> None:
    run, storage = torch.ops.rankopt, torch.ones(100, dtype=torch.uint8)
    for offset, size in ((96, 5), (-1, 4), (0, 101), (3, -1)):
        with pytest.raises(RuntimeError, match="outside the storage"):
            run.peak_gather(storage, torch.tensor([offset]), torch.tensor([size]))
    with pytest.raises(RuntimeError, match="one size or one a row"):
        run.peak_gather(storage, torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    out, one = torch.empty(8), torch.tensor([1])
    for place, dim in ((8, 1), (-2, 1), (4, 5), (0, -1)):
        given = torch.tensor([0]), one, torch.tensor([place]), torch.tensor([dim])
        with pytest.raises(RuntimeError, match="outside the result"):
            run.peak_gather_write(storage, *given, out)
    with pytest.raises(RuntimeError, match="one a row"):
        run.peak_gather_write(storage, torch.tensor([0, 1]), one, one, one, out)
    with pytest.raises(RuntimeError, match="longer than a row of out"):
        run.peak_gather_copy(storage, one, torch.tensor([9]), out.view(torch.uint8)[None, :8])
    with pytest.raises(RuntimeError, match="one row for each"):
        run.peak_gather_copy(storage, one, one, storage.view(2, 50))
    with pytest.raises(RuntimeError, match="kind must be"):
        run.peak_compute("int4", 1)
    with pytest.raises(RuntimeError, match="at least 1"):
        run.peak_compute("fp32", 0)


def test_peaks_are_kept_until_measured_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.machine_peaks(1)
    (file,) = (small / "peaks").iterdir()
    assert machine.machine_peaks(1) == first
    with monkeypatch.context() as patch:
        patch.setattr(machine, "_measure", lambda *_: first.model_copy(update={"isa": "other"}))
        assert machine.machine_peaks(1).isa == first.isa
        assert machine.machine_peaks(1, again=True).isa == "other"
        assert machine.machine_peaks(1).isa == "other"
        # Another number of threads is another machine, and a damaged file none.
        machine.machine_peaks(2)
        assert len(list((small / "peaks").iterdir())) == 2
        file.write_text("{")
        assert machine.machine_peaks(1).isa == "other"


def test_ids_are_drawn_as_named() -> None:
    random = torch.Generator().manual_seed(0)
    uniform = machine.draw_ids(1_000, 50_000, "uniform", random)
    zipf = machine.draw_ids(1_000, 50_000, "zipf", random)
    for ids in (uniform, zipf):
        assert int(ids.min()) >= 0
        assert int(ids.max()) < 1_000
    most_uniform, most_zipf = (int(torch.bincount(ids).max()) for ids in (uniform, zipf))
    assert most_uniform < 100
    # By the power law the first of 1,000 rows takes about a tenth of the reads.
    assert 4_000 < most_zipf < 10_000
    assert len(zipf.unique()) > 900


def test_an_operator_is_held_against_the_buffer_that_fits() -> None:
    peaks = [machine.peak([rate]) for rate in (50.0, 20.0)]
    reads = tuple(
        machine.ReadPeak(working_set_bytes=size, peak=peak)
        for size, peak in zip((100, 1_000), peaks, strict=True)
    )
    held = machine.MachinePeaks.model_construct(reads=reads)
    assert held.read_per_s(50) == 50.0
    assert held.read_per_s(100) == 50.0
    assert held.read_per_s(101) == 20.0
    assert held.read_per_s(10**9) == 20.0
