from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rankopt.content import list_content
from rankopt.errors import InputError, RankoptError, UsageError
from rankopt.sharding.collectives import Collectives, MessageTime
from rankopt.sharding.topology import Topology, load_topology

GOOD: dict[str, Any] = {
    "device": "cuda",
    "num_hosts": 1,
    "ranks_per_host": 8,
    "hbm_gib": 80,
    "host_memory_gib": 2048,
    "bandwidth_gb_per_s": {
        "hbm": 3350,
        "host_memory": 75,
        "host_to_device": 55,
        "intra_host": 450,
        "inter_host": 50,
    },
}


def written(folder: Path, **changes: Any) -> Path:
    raw = json.loads(json.dumps(GOOD)) | {k: v for k, v in changes.items() if k != "bandwidth"}
    raw["bandwidth_gb_per_s"] |= changes.get("bandwidth", {})
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(raw))
    return file


def curve(*points: tuple[int, float]) -> Collectives:
    messages = tuple(
        MessageTime(size_bytes=s, p50_ns=t, lowest_ns=t, highest_ns=t, num_samples=3)
        for s, t in points
    )
    return Collectives(collective="all_to_all", within_host=True, messages=messages)


def test_every_shipped_topology_is_sound() -> None:
    names = [path.stem for path in list_content("benchmarks/topologies")]
    assert {"8xh100", "2x8xa100", "2-cpu-hosts"} <= set(names)
    for name in names:
        assert load_topology(name).name == name


@pytest.mark.parametrize(("name", "ranks"), [("8xh100", 8), ("2x8xa100", 16)])
def test_gpu_topologies_state_80_gb_cards_and_host_memory(name: str, ranks: int) -> None:
    topology = load_topology(name)
    assert topology.world_size == ranks
    assert topology.hbm_bytes == math.floor(79.6 * 2**30 * 0.85)
    assert topology.host_bytes == math.floor(2048 * 2**30 * 0.9 / 8)
    assert topology.host_of(ranks - 1) == topology.num_hosts - 1


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean '8xh100'"):
        load_topology("8xh10")


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    bandwidth = {"hbm": -1, "intra_host": 0, "inter_host": float("inf"), "hmb": 3}
    file = written(tmp_path, num_hosts=0, hbm_gib=-80, bandwidth=bandwidth, name="mine")
    with pytest.raises(UsageError) as caught:
        load_topology(file)
    text = str(caught.value)
    for where in (
        "num_hosts", "hbm_gib", "bandwidth_gb_per_s.hbm:", "bandwidth_gb_per_s.intra_host",
        "bandwidth_gb_per_s.inter_host", "bandwidth_gb_per_s.hmb", "name",
    ):  # fmt: skip
        assert where in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bandwidth": {"host_to_device": 5000}}, "host_to_device (5000) is above hbm"),
        ({"bandwidth": {"inter_host": 900}}, "inter_host (900) is above intra_host (450)"),
        ({"bandwidth": {"hbm": 3.35e12}}, "bandwidth_gb_per_s.hbm"),
        ({"device": "cpu"}, "device cpu has no hbm_gib"),
        ({"hbm_gib": None}, "device cuda needs hbm_gib"),
        ({"reserved": {"hbm": 1.0}}, "reserved.hbm"),
        ({"host_memory_gib": 85_899_345_920}, "host_memory_gib"),
        ({"hbm_gib": 1e-300}, "leave no byte to a rank"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_topology(written(tmp_path, **changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1, 2]", "device: [", "just words"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"mine\.yaml"):
        load_topology(file)


def test_stated_bandwidths_are_bytes_a_second_of_a_rank() -> None:
    topology = load_topology("2x8xa100")
    assert topology.bandwidth("all_to_all", within_host=True) == 300e9
    assert topology.bandwidth("all_to_all", within_host=False) == 25e9
    # All adapters of a host at once, at most what the links within it carry.
    assert topology.bandwidth("all_reduce", within_host=False) == 200e9


def test_measured_times_are_read_off_between_the_sizes() -> None:
    measured = curve((1_000, 500.0), (2_000, 600.0), (10_000, 1_400.0))
    assert measured.time_ns(0) == 0
    assert measured.time_ns(1) == 500
    assert measured.time_ns(1_500) == 550
    assert measured.time_ns(2_000) == 600
    assert measured.time_ns(6_000) == 1_000
    # Beyond the largest message its rate holds.
    assert measured.time_ns(20_000) == pytest.approx(2_800)


def test_a_topology_takes_in_a_measurement(tmp_path: Path) -> None:
    document = {
        "made_at": "now",
        "device": "cuda",
        "backend": "nccl",
        "world_size": 8,
        "num_hosts": 1,
        "collectives": [curve((1_000, 500.0), (2_000, 600.0)).model_dump()],
    }
    (tmp_path / "measured.json").write_text(json.dumps(document))
    topology = load_topology(written(tmp_path, collectives="measured.json"))
    assert topology.bandwidth("all_to_all", within_host=True) == pytest.approx(2_000 / 600e-9)
    assert topology.bandwidth("all_to_all", within_host=False) == 50e9
    assert topology.bandwidth("all_reduce", within_host=True) == 450e9

    (tmp_path / "measured.json").write_text(json.dumps(document | {"device": "cpu"}))
    with pytest.raises(InputError, match="must be the topology's, cuda; got 'cpu'"):
        load_topology(written(tmp_path, collectives="measured.json"))
    (tmp_path / "measured.json").write_text("{")
    with pytest.raises(InputError, match="rankopt diagnose --collectives"):
        load_topology(written(tmp_path, collectives="measured.json"))


def test_sizes_of_a_measurement_rise() -> None:
    with pytest.raises(ValueError, match="must rise"):
        curve((2_000, 1.0), (1_000, 1.0))


def test_a_topology_survives_its_own_json() -> None:
    topology = load_topology("8xh100")
    again = Topology.model_validate(topology.model_dump(mode="json"))
    assert again.bandwidth_gb_per_s == topology.bandwidth_gb_per_s


@given(
    raw=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*GOOD, *GOOD["bandwidth_gb_per_s"], "reserved", "name", "x"]),
                inner,
                max_size=6,
            )
        ),
        max_leaves=12,
    ),
    part=st.sampled_from(["", *GOOD, "reserved", "collectives", "lookups", "dense_tflop_per_s"]),
)
def test_a_topology_written_by_hand_is_read_or_refused_by_its_file(raw: Any, part: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(yaml.safe_dump({**GOOD, part: raw} if part else raw))
        found, said = read_or_refused(file)
        assert found is not None or folder in said
        if found is not None:
            assert min(found.world_size, found.host_bytes) > 0
            assert found.hbm_bytes >= 0


def read_or_refused(file: Path) -> tuple[Topology | None, str]:
    try:
        return load_topology(file), ""
    except RankoptError as error:
        return None, str(error)


@given(text=st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "mine.yaml"
        file.write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(RankoptError, match=r"mine\.yaml"):
            load_topology(file)
