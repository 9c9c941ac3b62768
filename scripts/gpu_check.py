"""What `scripts/gpu_check.sh` runs: a look at the machine, the GPU tests, a short peer bench."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

NEEDED = ("numpy", "pydantic", "yaml", "psutil", "safetensors", "triton", "pytest", "hypothesis")
NEEDED_BY_INT8 = "fbgemm_gpu"
SUITE = "benchmarks/peers-gpu.yaml"


def look() -> tuple[dict[str, Any], str | None]:
    """Describe the machine, and say why nothing can run there; None where it can."""
    if importlib.util.find_spec("torch") is None:
        return {}, f"{sys.executable} has no torch"
    import torch

    found: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__}
    if not torch.cuda.is_available():
        return found, f"torch {torch.__version__} sees no NVIDIA GPU"
    found["gpu"] = torch.cuda.get_device_name()
    found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = "fetch them elsewhere with: scripts/gpu_check.sh --collect"
        return found, f"{', '.join(missing)} not installed; {hint}"
    import triton

    found["triton"] = triton.__version__
    found["int8"] = importlib.util.find_spec(NEEDED_BY_INT8) is not None
    return found, None


def run_tests(seconds: float) -> dict[str, Any]:
    """Run tests/gpu and count; workers compile kernels side by side where xdist is there."""
    with tempfile.TemporaryDirectory() as name:
        report = Path(name) / "report.xml"
        command = [sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider"]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", "8"]
        begun = time.monotonic()
        try:
            done = subprocess.run(command, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"ran past {seconds:g} seconds", "passed": False}
        result: dict[str, Any] = {"exit": done.returncode, "passed": done.returncode == 0}
        result["seconds"] = round(time.monotonic() - begun)
        if report.is_file():
            result |= _count(report)
        return result


def _count(report: Path) -> dict[str, Any]:
    cases = list(ET.parse(report).getroot().iter("testcase"))
    broken = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [case.find("skipped") for case in cases]
    reasons = {(each.get("message") or "").strip() for each in skipped if each is not None}
    return {
        "num_tests": len(cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in broken][:40],
        "skipped": sorted(reasons),
    }


def run_bench(seconds: float) -> dict[str, Any]:
    """Run the short suite; its rows, or why there are none."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "peers.json"
        start = "from rankopt.cli.main import main; import sys; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", start, "bench", SUITE, "--out", str(out)]
        try:
            done = subprocess.run(
                command, timeout=seconds, check=False, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return {"error": f"ran past {seconds:g} seconds"}
        if not out.is_file():
            return {"error": "\n".join((done.stderr or done.stdout).splitlines()[-12:])}
        result = json.loads(out.read_text(encoding="utf-8"))
        return {key: result.get(key) for key in ("rows", "summary", "not_run") if key in result}


def main() -> int:
    """Look, test, bench; print one line of JSON."""
    test_seconds, bench_seconds = (float(value) for value in sys.argv[1:3])
    machine, why_not = look()
    summary: dict[str, Any] = {"machine": machine, "skipped": why_not}
    if why_not is None:
        summary["tests"] = run_tests(test_seconds)
        summary["bench"] = run_bench(bench_seconds)
    print(json.dumps(summary))
    # No GPU is no failure; a GPU whose tests could not start is one.
    if why_not is None:
        return 0 if summary["tests"]["passed"] else 1
    return 0 if "gpu" not in machine else 1


if __name__ == "__main__":
    sys.exit(main())
