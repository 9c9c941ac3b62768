"""Measure how much memory resharding takes: 1 -> 4 -> 3 -> 1 ranks, and everything compared.

A checkpoint of random tables is written, resharded by the command line three times, each in a
process of its own, and compared with the first. The memory is the peak of that process above what
the same process takes for a checkpoint of a few rows.

    python scripts/reshard_memory.py [--gib 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rankopt.sharding.stored import saved_bytes
from rankopt.units import BYTES_PER_GIB

NUM_TABLES = 4
DIM = 64
_CHILD = """
import json, resource, sys
from rankopt.cli.main import main
code = main(sys.argv[1:])
if code:
    sys.exit(code)
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def main() -> None:
    """Measure and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where there is room for four of them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        print(json.dumps(measure(Path(name), arguments.gib), indent=2))


def measure(folder: Path, gib: float) -> dict[str, object]:
    """Reshard a checkpoint of that size to and fro."""
    write(folder / "tiny.safetensors", 8)
    rows = int(gib * BYTES_PER_GIB) // (NUM_TABLES * (DIM + 1) * 4)
    write(folder / "one.safetensors", rows)
    # To a folder and back: what each loads of torch counts as the baseline.
    there, _ = run(folder / "tiny.safetensors", folder / "tiny", 4)
    back_again, _ = run(folder / "tiny", folder / "tiny.pt", 1)
    baseline = max(there, back_again)
    steps = []
    chain = ("one.safetensors", 1), ("four", 4), ("three", 3), ("back.safetensors", 1)
    for (source, _), (out, ranks) in itertools.pairwise(chain):
        peak, seconds = run(folder / source, folder / out, ranks)
        steps.append(
            {"out": out, "ranks": ranks, "above_baseline_bytes": peak - baseline, "s": seconds}
        )
    one, back = folder / "one.safetensors", folder / "back.safetensors"
    same = subprocess.run(
        [sys.executable, "-m", "rankopt", "shard", "verify", str(one), str(back)],
        check=False,
        capture_output=True,
    )
    return {
        "checkpoint_bytes": one.stat().st_size,
        "baseline_bytes": baseline,
        "steps": steps,
        "same": same.returncode == 0,
    }


def run(source: Path, out: Path, ranks: int) -> tuple[int, float]:
    """Reshard in a process of its own; its peak in bytes, and how long it took."""
    started = time.monotonic()
    options = "shard", "reshard", str(source), "--world-size", str(ranks), "--out", str(out)
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *options], check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    peak = json.loads(done.stdout.splitlines()[-1])["peak"]
    return int(peak), round(time.monotonic() - started, 1)


def write(file: Path, rows: int) -> None:
    """Write tables and their row-wise optimizer state, a block of rows at a time."""
    generator = torch.Generator().manual_seed(0)
    names = [f"embedding_bags.t{i}.weight" for i in range(NUM_TABLES)]
    states = [(("optimizer", "state", name, "momentum1"), name) for name in names]
    paths = {".".join(path): path for path, _ in states}
    objects = {"step": (("step",), _text(saved_bytes(3)))}
    header: dict[str, object] = {
        "__metadata__": {
            "rankopt.paths": json.dumps({n: ("model", n) for n in names} | paths),
            "rankopt.objects": json.dumps(objects),
        }
    }
    start = 0
    for name, shape in [(n, (rows, DIM)) for n in names] + [(k, (rows,)) for k in paths]:
        end = start + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
        start = end
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for first in range(0, start, 1 << 24):
            size = min(1 << 24, start - first) // 4
            stream.write(memoryview(torch.randn(size, generator=generator).numpy()))


def _text(content: bytes) -> str:
    import base64

    return base64.b64encode(content).decode()


if __name__ == "__main__":
    main()
