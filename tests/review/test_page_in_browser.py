"""Open the page the way a person does: from a file, with no network, at two widths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from rankopt.review.judge import judge
from rankopt.review.report import write_report
from review.samples import GATES, draft, ne, undefined

CHROMIUM = next(
    (path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path),
    None,
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium to open the page")

# The frames give the page its width; the probe reads what was drawn once all of them have loaded.
PROBE = """<!doctype html><body>
<iframe id="f390" src="report.html" style="width:390px;height:800px"></iframe>
<iframe id="f1280" src="report.html" style="width:1280px;height:800px"></iframe>
<pre id="found"></pre>
<script>
addEventListener("load", () => setTimeout(() => {
  const found = {};
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument;
    const width = frame.clientWidth;
    found[frame.id] = {
      plots: page.querySelectorAll(".plot").length,
      drawn: [...page.querySelectorAll(".plot")].filter((p) => p.querySelector("svg path")).length,
      wide: [...page.querySelectorAll(".plot svg")].filter(
        (s) => s.getBoundingClientRect().right > width + 1).length,
      overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
      scrolled: [...page.querySelectorAll("[aria-label^=Quality]")].filter(
        (t) => t.scrollWidth > t.clientWidth + 1).length,
      injected: page.querySelectorAll("img").length,
      verdict: page.querySelector(".verdict .word").innerText,
    };
  }
  document.getElementById("found").textContent = JSON.stringify(found);
}, 1500));
</script></body>"""


def open_page(folder: Path, profile: Path) -> tuple[dict, str]:
    (folder / "probe.html").write_text(PROBE, encoding="utf-8")
    done = subprocess.run(
        [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--allow-file-access-from-files", "--enable-logging=stderr",
            f"--user-data-dir={profile}", "--virtual-time-budget=15000", "--dump-dom",
            (folder / "probe.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, flags=re.S)
    assert found, done.stderr[-2_000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(unescape(found.group(1))), console


def test_plots_are_drawn_without_errors_or_sideways_scrolling(tmp_path: Path):
    model = "<img src=x onerror=alert(1)>" + "a_long_name_" * 12
    hostile = draft(model=model, quality={**draft().quality, "ne": ne(0.004)})
    write_report(judge(hostile, GATES), tmp_path)
    found, console = open_page(tmp_path, tmp_path / "profile")
    assert console == ""
    for width in ("f390", "f1280"):
        del found[width]["scrolled"]
        assert found[width] == {
            "plots": 5, "drawn": 5, "wide": 0, "overflow": 0, "injected": 0,
            "verdict": "\u2715 Fail",
        }  # fmt: skip


def test_three_outputs_of_seven_metrics_fit_the_page(tmp_path: Path):
    why = "no group with a positive row has 11 rows or more, so its value is the same in any order"
    quality = {
        f"{output}.{name}": undefined(why) if name == "hr@10" else ne()
        for output in ("click", "love", "buy")
        for name in ("ne", "log_loss", "auc", "calibration", "gauc", "ndcg@10", "hr@10")
    }
    write_report(judge(draft(quality=quality, outputs=("click", "love", "buy")), GATES), tmp_path)
    found, console = open_page(tmp_path, tmp_path / "profile")
    assert console == ""
    for width in ("f390", "f1280"):
        assert found[width]["plots"] == found[width]["drawn"] == 7
        assert (found[width]["wide"], found[width]["overflow"]) == (0, 0)
    # On a desktop no table of quality needs to be scrolled sideways.
    assert found["f1280"]["scrolled"] == 0
