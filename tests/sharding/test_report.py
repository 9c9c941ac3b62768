from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankopt.errors import OutputExistsError, UsageError
from rankopt.jobs.shard_plan import plan_shards, read_plan
from rankopt.sharding.page import figures, page_of
from rankopt.sharding.report import to_html, write_plan
from rankopt.sharding.schema import ShardPlan
from rankopt.sharding.topology import Topology
from rankopt.units import BYTES_PER_GIB


@pytest.fixture
def plan(tmp_path: Path, gpus: Topology) -> ShardPlan:
    file = tmp_path / "tables.yaml"
    file.write_text(
        "name: a<b>&model\ntables: [{name: <script>, num_rows: 3_600_000, dim: 64, count: 4}]\n"
    )
    return plan_shards(file, gpus, load_factors=(0.2,))


def test_a_plan_comes_back_as_it_was_written(plan: ShardPlan, tmp_path: Path) -> None:
    paths = write_plan(plan, tmp_path / "plan.json")
    assert paths["html"] == tmp_path / "plan.html"
    assert read_plan(paths["json"]) == plan
    assert "NaN" not in paths["json"].read_text()


def test_an_existing_plan_is_kept_unless_told(plan: ShardPlan, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    out.write_text("mine")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        write_plan(plan, out)
    assert out.read_text() == "mine"
    write_plan(plan, out, overwrite=True)
    assert read_plan(out) == plan
    with pytest.raises(UsageError, match="folder"):
        write_plan(plan, tmp_path)
    with pytest.raises(UsageError, match="JSON file"):
        write_plan(plan, tmp_path / "plan.html")


def test_figures_stack_to_what_each_rank_holds(plan: ShardPlan) -> None:
    drawn = {figure.key: figure for figure in figures(plan)}
    assert set(drawn) == {"memory-hbm", "memory-host", "step"}
    for rank in plan.ranks:
        stacked = sum(trace["y"][rank.rank] for trace in drawn["memory-hbm"].data)
        assert stacked == pytest.approx(rank.hbm.total_bytes / BYTES_PER_GIB, abs=1e-4)
        step_ms = sum(trace["y"][rank.rank] for trace in drawn["step"].data)
        assert step_ms == pytest.approx(rank.step_ns / 1e6, abs=1e-4)


def test_the_page_needs_nothing_else_and_escapes_names(plan: ShardPlan) -> None:
    html = to_html(plan)
    assert "<script>_0" not in html
    assert "&lt;script&gt;_0" in html
    assert "a&lt;b&gt;&amp;model" in html
    for figure in figures(plan):
        start = html.index(f'id="{figure.key}-figure">') + len(f'id="{figure.key}-figure">')
        assert json.loads(html[start : html.index("</script>", start)])["data"]
    assert 'src="http' not in html


def test_words_hold_every_rank_table_and_alternative(plan: ShardPlan) -> None:
    tables = {table.title: table for table in page_of(plan).tables}
    assert len(tables["Ranks"].rows) == plan.world_size
    assert len(tables["Tables"].rows) == plan.num_tables
    assert len(tables["Alternatives"].rows) == len(plan.alternatives)
    for table in tables.values():
        assert all(len(row) == len(table.headings) for row in table.rows)


@pytest.mark.parametrize("text", ["", "{}", '{"format_version": 2}', "[1]"])
def test_a_damaged_plan_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"plan\.json"):
        read_plan(file)
