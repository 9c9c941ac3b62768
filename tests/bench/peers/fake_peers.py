"""Peers of another package, announced by an entry point, whose speed and faults are planted."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

MODULE = '''
import os
import time

from rankopt.bench.peers.peer import Peer
from rankopt.models.serving import EagerModel


class Busy(Peer):
    """The module, busy for so many microseconds more at every call."""

    kind = "fake_busy"
    title = "busy"
    busy_us: tuple[int, ...] = (0,)

    def settings(self, card):
        return [{"busy_us": value} for value in self.busy_us]

    def load(self, job, setting, folder):
        model = EagerModel(job.load_card(), job.build_module())

        def run(features):
            until = time.perf_counter_ns() + 1_000 * setting["busy_us"]
            scores = model(features)
            while time.perf_counter_ns() < until:
                pass
            return scores

        return run


class Wrong(Peer):
    """Instant, and the same score for every row."""

    kind = "fake_wrong"
    title = "wrong"

    def load(self, job, setting, folder):
        output = job.load_card().outputs[0].name
        return lambda features: {output: 0.1 + 0 * features["dense"][:, 0]}


class Filed(Peer):
    """Reads what it prepared; setting `bad` cannot be prepared."""

    kind = "fake_filed"
    title = "filed"
    has_files = True

    def settings(self, card):
        return [{"way": "bad"}, {"way": "good"}]

    def prepare(self, job, setting, folder):
        (folder / "half.txt").write_text("half")
        if setting["way"] == "bad":
            raise ValueError("cannot export this\\nand more lines")
        (folder / "whole.txt").write_text(str(job.num_threads))

    def load(self, job, setting, folder):
        assert (folder / "whole.txt").read_text() == str(job.num_threads)
        return EagerModel(job.load_card(), job.build_module())


class Dies(Peer):
    """Its engine ends the process that prepares."""

    kind = "fake_dies"
    title = "dies"
    has_files = True

    def prepare(self, job, setting, folder):
        print("the engine gave up", flush=True)
        os.abort()


class Broken(Peer):
    kind = "fake_broken"
    title = "broken"

    def load(self, job, setting, folder):
        raise RuntimeError("no kernel for this model")


class Missing(Peer):
    kind = "fake_missing"
    title = "missing"
    packages = ("no_such_engine",)
'''

KINDS = ("busy", "wrong", "filed", "dies", "broken", "missing")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the package on the path, as pip would; workers inherit the path."""
    site = folder / "site"
    info = site / "fake_peers_package-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / "fake_peers_package.py").write_text(textwrap.dedent(MODULE))
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: fake-peers-package\nVersion: 1.0\n"
    )
    points = "\n".join(f"fake_{k} = fake_peers_package:{k.capitalize()}" for k in KINDS)
    (info / "entry_points.txt").write_text(f"[rankopt.peers]\n{points}\n")
    monkeypatch.syspath_prepend(str(site))
