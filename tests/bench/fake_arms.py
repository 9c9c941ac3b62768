"""Arms whose speed, drift, spin and death are planted. Workers import this module by name."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import torch

from rankopt.bench.arms import ARM_LOADERS, ArmSpec

MODULE = "bench.fake_arms"


def register() -> None:
    """Make the fake kinds known to the driver; workers get their `module:function`."""
    for name in ("busy", "matmul", "spinner", "fragile", "broken", "odd_shape", "sent"):
        ARM_LOADERS[f"fake-{name}"] = f"{MODULE}:load_{name}"


def _score(features):
    return {"score": features["dense"].sum(dim=1)}


def load_busy(spec: ArmSpec):
    """Busy for `busy_us`, growing by `growth_per_s` of itself since monotonic `since_ns`."""
    busy_ns = spec.options.get("busy_us", 200) * 1_000
    growth = spec.options.get("growth_per_s", 0.0)
    since_ns = spec.options.get("since_ns", 0)

    def run(features):
        begun = time.perf_counter_ns()
        age_s = (time.monotonic_ns() - since_ns) / 1e9
        until = begun + busy_ns * (1 + growth * age_s)
        scores = _score(features)
        while time.perf_counter_ns() < until:
            pass
        return scores

    return run


def load_matmul(spec: ArmSpec):
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def run(features):
        return {"score": (features["dense"] @ weight).relu().sum(dim=1)}

    return run


def load_spinner(spec: ArmSpec):
    """As busy, while a thread of its own burns CPU for `spin_s` after the first call."""
    run = load_busy(spec)
    spin_s = spec.options["spin_s"]
    started = []

    def spin():
        until = time.monotonic() + spin_s
        while time.monotonic() < until:
            time.sleep(0.0005)
            pause = time.monotonic() + 0.002
            while time.monotonic() < pause:
                pass

    def spinning(features):
        if not started:
            started.append(threading.Thread(target=spin, daemon=True))
            started[0].start()
        return run(features)

    return spinning


def load_fragile(spec: ArmSpec):
    """Kill the own process, as the out-of-memory killer would, at call `die_at`; `times` times."""
    run = load_busy(spec)
    tally = Path(spec.options["tally"])
    calls = [0]

    def fragile(features):
        calls[0] += 1
        deaths = len(tally.read_text()) if tally.exists() else 0
        if calls[0] == spec.options["die_at"] and deaths < spec.options.get("times", 1):
            tally.write_text("x" * (deaths + 1))
            os.kill(os.getpid(), signal.SIGKILL)
        return run(features)

    return fragile


def load_broken(spec: ArmSpec):
    raise RuntimeError("weights are made of cheese")


def load_odd_shape(spec: ArmSpec):
    return lambda features: {"score": features["dense"]}


def load_sent(spec: ArmSpec):
    """Score with what stands in files that have to be sent; refuse the driver's own copies."""
    if spec.options["driver_folder"] in f"{spec.card} {spec.artifact}":
        raise RuntimeError(f"got the driver's paths: {spec.card}, {spec.artifact}")
    scale = float((spec.artifact / "weights" / "scale.txt").read_text())
    offset = float((spec.card.parent / "net.py").read_text().strip("# \n"))
    run = load_fragile(spec) if "tally" in spec.options else load_busy(spec)
    return lambda features: {"score": run(features)["score"] * scale + offset}
