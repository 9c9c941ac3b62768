"""The three files of a diagnosis, and what they must not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankopt.diagnose.report import to_html, to_markdown, write_diagnosis
from rankopt.diagnose.schema import (
    BatchRow,
    Diagnosis,
    GatherPeak,
    MachinePeaks,
    OperatorRow,
    PartRow,
    Peak,
    ReadPeak,
    Timing,
)

HOSTILE = "</script><b>|x"


def peak(per_s: float) -> Peak:
    return Peak(per_s=per_s, median_per_s=per_s * 0.9, lowest_per_s=per_s / 2, num_samples=9)


def time(p50_ns: float, *, supported: bool = True) -> Timing:
    ends = (p50_ns * 0.9, p50_ns * 1.1) if supported else (None, None)
    return Timing(p50_ns=p50_ns, ci_low_ns=ends[0], ci_high_ns=ends[1], num_samples=100)


def diagnosis() -> Diagnosis:
    dense = PartRow(
        part="dense", time=time(60_000.0), share=0.6, num_operators=1, operations_per_s=5e11,
        bytes_per_s=1e10, of_operations_peak=0.5, of_bytes_peak=0.1, bound="operations",
    )  # fmt: skip
    overhead = PartRow(
        part="framework overhead", time=time(41_000.0, supported=False), share=0.41,
        num_operators=0, operations_per_s=None, bytes_per_s=None, of_operations_peak=None,
        of_bytes_peak=None, bound="overhead",
    )  # fmt: skip
    operator = OperatorRow(
        name="linear_int8", part="dense", layer=HOSTILE, shapes="float32[1, 2]",
        time=time(60_000.0), num_operations=30_000_000, num_bytes=600_000, operations_per_s=5e11,
        bytes_per_s=1e10, peak="int8", of_operations_peak=0.5, of_bytes_peak=0.1,
        bound="operations", of_bound=0.5, quantise_p50_ns=1_500.0,
    )  # fmt: skip
    batch = BatchRow(
        model=HOSTILE, subject="artifact", batch_size=64, whole=time(100_000.0),
        parts=(dense, overhead), operators=(operator,), unexplained_share=-0.01,
        overhead_inside_p50_ns=20_000.0, clocks_p50_ns=200.0, parameter_bytes=600_000,
        notes=("a note",),
    )  # fmt: skip
    machine = MachinePeaks(
        fingerprint="f", cpu_model="cpu", isa="avx2", num_threads=2, made_at="now",
        int8=peak(1e12), fp32=peak(2e11), bf16=None,
        reads=(ReadPeak(working_set_bytes=1 << 20, peak=peak(1e11)),),
        gathers=(
            GatherPeak(
                row_bytes=36, working_set_bytes=1 << 20, distribution="zipf", peak=peak(1e10)
            ),
        ),
    )  # fmt: skip
    return Diagnosis(
        made_at="2026-01-01", model=HOSTILE, subject="artifact", source="x", num_threads=2,
        machine=machine, batches=(batch,), data={"origin": HOSTILE}, environment={"os": "Linux"},
        notes=("made-up ids",), reproduce="rankopt diagnose x",
    )  # fmt: skip


def test_three_files_are_written_and_the_json_reads_back(tmp_path: Path) -> None:
    paths = write_diagnosis(diagnosis(), tmp_path)
    assert {path.name for path in paths.values()} == {
        "diagnose.json",
        "diagnose.md",
        "diagnose.html",
    }
    assert Diagnosis.model_validate_json(paths["json"].read_bytes()) == diagnosis()
    first = json.loads(paths["json"].read_text())["batches"][0]["parts"][0]
    assert (first["part"], first["share"], first["bound"]) == ("dense", 0.6, "operations")


def test_every_figure_of_a_part_stands_in_both_texts() -> None:
    for text in (to_markdown(diagnosis()), to_html(diagnosis())):
        for word in (
            "60 us (54 us to 66 us)", "60.0%", "500 GOP/s", "50%", "10 GB/s", "operations",
            "41 us (too few calls for an interval)", "not counted", "1.5 us of it quantising",
            "-1.0%", "a note", "made-up ids", "2 threads, avx2", "rankopt diagnose x",
        ):  # fmt: skip
            assert word in text, word


def test_names_cannot_break_out_of_page_or_table() -> None:
    page, text = to_html(diagnosis()), to_markdown(diagnosis())
    assert HOSTILE not in page
    assert "<b>" not in page.split("<script>")[0]
    assert HOSTILE not in text
    tables = [line for line in text.splitlines() if line.startswith("|")]
    widths = [line.replace("\\|", "").count("|") for line in tables]
    # Every row of a table is as wide as its headings.
    for before, after, line in zip(widths, widths[1:], tables[1:], strict=False):
        assert after == before or not line.startswith("| ---"), line


def test_the_page_is_whole_by_itself() -> None:
    page = to_html(diagnosis())
    assert 'id="shares-figure"' in page
    assert 'id="limits-figure"' in page
    assert "Content-Security-Policy" in page
    assert "src=" not in page.split("<script>")[0]


@pytest.mark.parametrize("share", [float("nan"), float("inf")])
def test_what_is_not_a_number_never_reaches_the_json(share: float, tmp_path: Path) -> None:
    batch = diagnosis().batches[0].model_copy(update={"unexplained_share": share})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_diagnosis(diagnosis().model_copy(update={"batches": (batch,)}), tmp_path)
