"""Time int8 layers and lookups against the machine's peaks and fbgemm, and write the table.

    scripts/kernels.py measure    capture the models, time their calls in turns, write the result
    scripts/kernels.py table      write the table of docs/kernels.md from the result
    scripts/kernels.py check      exit 1 when the result is damaged or the table is not that of it

Nothing else should run on the machine. All arms of a comparison share one process: what is compared
is one operator on the same memory, not the settings of an engine.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_calls import Calls, Dense, Layer, Lookups, calls_of, rewritten
from kernel_peers import (
    Sample,
    at_peak,
    fbgemm_dense,
    fbgemm_lookups,
    gathered,
    gathered_and_copied,
    gathered_and_written,
    rows_of,
    timed,
)
from kernel_rows import KernelResult, KernelRow, KernelSettings, read_settings, table
from result_page import ROOT, ResultPage, act, result_parser

from rankopt.bench.backend import KEPT_MEMORY
from rankopt.bench.peers.suite import load_suite
from rankopt.bench.peers.weights import model_card
from rankopt.bench.plan import physical_cores_available
from rankopt.bench.rows_file import RowsFile, write_rows
from rankopt.bench.schedule import turn_order
from rankopt.bench.stats import paired_speedup
from rankopt.data.encode import load_rows
from rankopt.data.splits import open_splits
from rankopt.diagnose.machine import machine_peaks
from rankopt.diagnose.profile import Clock
from rankopt.diagnose.roofline import Limits
from rankopt.diagnose.schema import MachinePeaks
from rankopt.diagnose.timing import windows_of
from rankopt.errors import RankoptError
from rankopt.models.card import ModelCard
from rankopt.units import NS_PER_S

SETTINGS = ROOT / "benchmarks" / "kernels.yaml"
RESULT = ROOT / "benchmarks" / "results" / "kernels.json"
SEED = 7


class _Found:
    """The distinct operators of all models, each with how often which model calls it."""

    def __init__(self) -> None:
        self.dense: dict[tuple[Any, ...], tuple[str, int, Dense | Layer, dict[str, int]]] = {}

    def add(self, model: str, batch_size: int, call: Dense) -> None:
        self._add(model, batch_size, call if len(call.layers) > 1 else call.layers[0], 1)
        if len(call.layers) > 1:
            for layer in call.layers:
                self._add(model, batch_size, layer, 0)

    def _add(self, model: str, batch_size: int, call: Dense | Layer, count: int) -> None:
        layers = call.layers if isinstance(call, Dense) else (call,)
        if not any(layer.is_int8 for layer in layers):
            return
        key = (batch_size, *(layer.signature for layer in layers))
        _, _, _, calls = self.dense.setdefault(key, (model, batch_size, call, {}))
        calls[model] = calls.get(model, 0) + count


class _Bench:
    """Times operators in turns."""

    def __init__(self, settings: KernelSettings, machine: MachinePeaks, clock: Clock) -> None:
        self.settings, self.machine, self.clock = settings, machine, clock

    def dense(
        self, model: str, batch_size: int, call: Dense | Layer, calls: dict[str, int]
    ) -> KernelRow:
        layers = call.layers if isinstance(call, Dense) else (call,)
        num_operations = sum(layer.num_operations for layer in layers)
        widths = [layers[0].x.shape[-1], *(layer.layer.num_outputs for layer in layers)]
        moved = sum(layer.layer.packed.nbytes for layer in layers)
        moved += 4 * layers[0].num_rows * (widths[0] + widths[-1])
        names = [layer.name for layer in layers]
        return self._row(
            ours=timed([call.call()], self.clock),
            peak=at_peak(layers),
            fbgemm=timed([fbgemm_dense(call)], self.clock),
            work=num_operations,
            bytes_ns=moved / self.machine.read_per_s(moved) * NS_PER_S,
            kind="chain" if len(layers) > 1 else "layer",
            model=model,
            layer=names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
            shape=" - ".join(map(str, widths)),
            calls=calls,
            batch_size=batch_size,
            num_rows=layers[0].num_rows,
        )

    def lookup(self, model: str, batch_size: int, index: int, call: Lookups) -> KernelRow | None:
        rows = [each for each in rows_of(call) if each.offsets.numel()]
        if len(rows) != len(call.arguments):  # where no batch has an id, nothing is read
            return None
        sizes = sorted(set(rows[0].row_bytes.tolist()))
        store = call.arguments[0][0].nbytes
        return self._row(
            ours=timed(call.calls(), self.clock),
            peak=gathered_and_copied(rows),
            read_peak=gathered(rows),
            write_peak=gathered_and_written(call, rows),
            fbgemm=timed(fbgemm_lookups(call), self.clock),
            work=statistics.mean(each.num_bytes for each in rows),
            bytes_ns=None,
            kind="lookup",
            model=model,
            layer=f"{call.name} {index}",
            shape=f"rows of {', '.join(map(str, sizes))} bytes out of {store / 1e6:.3g} MB",
            calls={model: 1},
            batch_size=batch_size,
            num_rows=round(statistics.mean(each.offsets.numel() for each in rows)),
        )

    def _row(
        self,
        *,
        ours: Sample,
        peak: Sample,
        fbgemm: Sample,
        read_peak: Sample | None = None,
        write_peak: Sample | None = None,
        work: float,
        bytes_ns: float | None,
        **what: Any,
    ) -> KernelRow:
        others = {"read_fraction": read_peak, "write_fraction": write_peak}
        given = {name: arm for name, arm in others.items() if arm is not None}
        arms = [ours, peak, fbgemm, *given.values()]
        blocks = self._in_turns(arms, what["batch_size"])
        against_peak = paired_speedup(blocks[1], blocks[0])
        against_fbgemm = paired_speedup(blocks[2], blocks[0])
        p50_ns, fraction = against_fbgemm.candidate_p50_ns, against_peak.speedup
        limit_ns = fraction * p50_ns
        limits = Limits(
            limit_ns if bytes_ns is not None else None,
            limit_ns if bytes_ns is None else bytes_ns,
            None,
        )
        achieved = work / p50_ns * NS_PER_S
        return KernelRow(
            **what,
            p50_ns=p50_ns,
            achieved_per_s=achieved,
            peak_per_s=achieved / fraction,
            fraction=fraction,
            ci_low=against_peak.ci_low,
            ci_high=against_peak.ci_high,
            **{
                name: paired_speedup(samples, blocks[0]).speedup
                for name, samples in zip(given, blocks[3:], strict=True)
            },
            fbgemm_p50_ns=against_fbgemm.control_p50_ns,
            ratio_to_fbgemm=against_fbgemm.speedup,
            ratio_ci_low=against_fbgemm.ci_low,
            ratio_ci_high=against_fbgemm.ci_high,
            bound=limits.bound(p50_ns),
            num_samples=against_fbgemm.num_samples,
            num_blocks=against_fbgemm.num_blocks,
        )

    @torch.inference_mode()
    def _in_turns(self, arms: Sequence[Sample], batch_size: int) -> list[list[list[float]]]:
        for arm in arms:
            self._turn(arm)
        blocks: list[list[list[float]]] = [[] for _ in arms]
        gc.collect()
        gc.disable()
        try:
            for block in range(self.settings.num_blocks):
                for position in turn_order(len(arms), batch_size, block, SEED):
                    blocks[position].append(self._turn(arms[position]))
        finally:
            gc.enable()
        return blocks

    def _turn(self, arm: Sample) -> list[float]:
        """Call an arm until its turn is over; the first call finds the other arms' caches."""
        arm()
        samples: list[float] = []
        begun = time.perf_counter_ns()
        while (
            len(samples) < self.settings.min_calls
            or time.perf_counter_ns() - begun < self.settings.block_duration_ns
        ):
            samples.append(max(arm(), 1.0))
        return samples


def measure(settings_file: Path, page: ResultPage, models: Sequence[str]) -> int:
    """Capture every model, time all its calls, write the result; 1 where a model failed."""
    settings = read_settings(settings_file)
    suite = load_suite(settings_file.parent / settings.suite).chosen(models)
    num_threads = settings.num_threads or physical_cores_available()
    torch.set_num_threads(num_threads)
    _say("measuring what this machine can do")
    clock = Clock()
    machine = machine_peaks(num_threads, again=True)
    bench, found = _Bench(settings, machine, clock), _Found()
    rows: list[KernelRow] = []
    not_run: dict[str, str] = {}
    for model in suite.models:
        _say(f"{model.name}: capturing")
        try:
            captured = _captured(model_card(suite, model), settings)
        except RankoptError as error:  # the other models can still be measured
            not_run[model.name] = " ".join(str(error).split())
            continue
        _say(f"{model.name}: timing lookups")
        for batch_size, calls in captured:
            for call in calls.dense:
                found.add(model.name, batch_size, call)
            for index, lookup in enumerate(calls.lookups):
                row = bench.lookup(model.name, batch_size, index, lookup)
                rows += [row] if row is not None else []
    _say(f"timing {len(found.dense)} layers and chains")
    rows += [bench.dense(*item) for item in found.dense.values()]
    content = {
        "isa": machine.isa,
        "num_threads": num_threads,
        "settings": settings.model_dump(mode="json"),
        "machine": machine.model_dump(mode="json"),
        "rows": [row.model_dump(mode="json") for row in rows],
        "not_run": not_run,
    }
    page.write(**content)
    KernelResult.model_validate(page.read())
    for name, reason in not_run.items():
        _say(f"not run: {name}: {reason}")
    return 1 if not_run else 0


def _captured(card: ModelCard, settings: KernelSettings) -> Sequence[tuple[int, Calls]]:
    bundle = rewritten(card, settings.recipe)
    most = max(settings.batch_sizes) * settings.num_windows
    rows = load_rows(card, open_splits(card).test, limit=most, with_labels=False)
    with tempfile.TemporaryDirectory(prefix="rankopt-kernels-") as folder:
        file = RowsFile(write_rows(rows, Path(folder) / "rows.safetensors"))
    return [
        (size, calls_of(bundle, windows_of(file, size)[: settings.num_windows]))
        for size in settings.batch_sizes
    ]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _with_kept_memory() -> None:
    """Start again with malloc's settings of the bench's arms, which it reads when it is loaded."""
    missing = {name: value for name, value in KEPT_MEMORY.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | missing)


def main() -> int:
    """Read the command line."""
    parser = result_parser(__doc__)
    parser.add_argument("--settings", type=Path, default=SETTINGS)
    parser.add_argument("--models", nargs="+", default=[])
    parser.add_argument("--result", type=Path, help="write here, and leave the page alone")
    given = parser.parse_args()
    if given.action == "measure":
        _with_kept_memory()
    page = ResultPage(
        result=given.result or RESULT,
        page=ROOT / "docs" / "kernels.md",
        command="python scripts/kernels.py measure",
        table=table,
        script="scripts/kernels.py",
        marker="kernels",
    )
    run = partial(measure, given.settings, page, given.models)
    if given.result is None or given.action == "check":
        return act(given.action, [page], run)
    status = run() if given.action == "measure" else 0
    print(table(page.read()))
    return status


if __name__ == "__main__":
    sys.exit(main())
