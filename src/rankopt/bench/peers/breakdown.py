"""Where the time of rankopt's own arm goes, looked into once no arm runs any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankopt.bench.peers.artifact import ARTIFACT
from rankopt.bench.peers.peer import Setting, without_trace
from rankopt.bench.peers.result import ModelPeaks, NotBrokenDown, TimeBreakdown
from rankopt.bench.rows_file import FlatRows
from rankopt.diagnose.process import look_into
from rankopt.diagnose.schema import BatchRow, MachinePeaks
from rankopt.errors import RankoptError


@dataclass(frozen=True)
class Breakdown:
    """What was found of one model, and what could not be."""

    rows: tuple[TimeBreakdown, ...] = ()
    peaks: ModelPeaks | None = None
    failed: tuple[NotBrokenDown, ...] = ()


def break_down_artifacts(
    model: str,
    chosen: Mapping[int, tuple[Setting, Path]],
    rows: FlatRows,
    num_threads: int,
    progress: Callable[[str], None],
) -> Breakdown:
    """Say where the time goes at each batch size; what fails is returned and never raised.

    The machine's peaks are measured anew, in the same process as the model.

    Args:
        model: its name.
        chosen: batch size -> the setting that the arm runs there, and that one's files.
        rows: the test rows, which calls are cut out of.
        num_threads: of the arm.
        progress: told one line per step.
    """
    found = Breakdown()
    for folder in dict.fromkeys(folder for _, folder in chosen.values()):
        sizes = [size for size, (_, files) in chosen.items() if files == folder]
        try:
            answer = look_into(
                folder / ARTIFACT,
                None,
                rows,
                sizes,
                num_threads=num_threads,
                again=True,
                progress=progress,
            )
        except (RankoptError, OSError, ValueError) as error:  # the times taken must not be lost
            failed = NotBrokenDown(
                model=model, batch_sizes=tuple(sizes), error=without_trace(str(error))
            )
            found = replace(found, failed=(*found.failed, failed))
            continue
        more = _rows(model, answer.batches, chosen)
        found = replace(found, rows=(*found.rows, *more), peaks=_peaks(model, answer.machine))
    order = list(chosen)
    in_order = sorted(found.rows, key=lambda row: order.index(row.batch_size))
    return replace(found, rows=tuple(in_order))


def _rows(
    model: str, batches: Sequence[BatchRow], chosen: Mapping[int, tuple[Setting, Path]]
) -> list[TimeBreakdown]:
    return [
        TimeBreakdown(
            model=model,
            batch_size=batch.batch_size,
            setting=dict(chosen[batch.batch_size][0]),
            whole=batch.whole,
            parts=batch.parts,
            unexplained_share=batch.unexplained_share,
            notes=batch.notes,
        )
        for batch in batches
    ]


def _peaks(model: str, machine: MachinePeaks) -> ModelPeaks:
    return ModelPeaks(
        model=model,
        isa=machine.isa,
        num_threads=machine.num_threads,
        int8_per_s=machine.int8.per_s,
        fp32_per_s=machine.fp32.per_s,
        bf16_per_s=machine.bf16.per_s if machine.bf16 is not None else None,
        read_bytes_per_s={read.working_set_bytes: read.peak.per_s for read in machine.reads},
    )
