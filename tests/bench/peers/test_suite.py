from __future__ import annotations

import re

import pytest
import yaml

from rankopt.bench.peers.peer import Peer, has_bags
from rankopt.bench.peers.registry import PEERS, find_peer
from rankopt.bench.peers.suite import PeerSuite, load_suite
from rankopt.errors import UsageError
from rankopt.models.card import load_card

SMALL = {
    "models": [{"name": "small", "card": "dlrm-synthetic"}],
    "arms": ["eager", {"aoti": {"freezing": [True]}}],
}


def write(folder, **changes):
    file = folder / "suite.yaml"
    file.write_text(yaml.safe_dump(SMALL | changes))
    return file


ON_GPU = {"pytorch_gpu", "torch_tensorrt"}


def test_the_suite_that_ships_holds_every_peer_and_the_batch_sizes():
    suite = load_suite("peers")
    assert {arm.kind for arm in suite.arms} == set(PEERS) - ON_GPU
    assert {arm.kind for arm in load_suite("peers-gpu").arms} > ON_GPU
    assert suite.plan.batch_sizes == (1, 16, 64, 512, 2048)
    assert suite.ne_margin == pytest.approx(0.001)
    for model in suite.models:
        load_card(model.card)


@pytest.mark.parametrize("kind", PEERS)
def test_a_peer_lists_different_settings_for_every_model_of_the_suite(kind):
    suite = load_suite("peers-gpu" if kind in ON_GPU else "peers")
    peer = next(arm for arm in suite.arms if arm.kind == kind)
    for model in suite.models:
        settings = peer.settings(load_card(model.card))
        assert settings
        assert all(settings.count(setting) == 1 for setting in settings)


@pytest.mark.parametrize("kind", PEERS)
def test_the_sample_in_a_peers_docstring_is_sound(kind):
    peer = find_peer(kind)
    sample = re.search(r"```yaml\n(.*?)```", peer.__doc__ or "", re.S)
    if sample is None:
        assert set(peer.model_fields) == set()
        return
    [[item]] = [yaml.safe_load(sample[1])]
    assert peer.model_validate(item[kind])


def test_lists_of_ids_are_never_compiled_for_one_shape():
    suite = load_suite("peers")
    ragged = load_card("din-movielens")
    assert has_bags(ragged)
    assert not has_bags(load_card("dlrm-synthetic"))
    for kind in ("torch_compile", "zentorch"):
        peer = next(arm for arm in suite.arms if arm.kind == kind)
        assert all(setting["dynamic"] for setting in peer.settings(ragged))


def test_a_suite_is_cut_down_to_what_is_named(tmp_path):
    suite = load_suite(write(tmp_path)).chosen(batch_sizes=[64, 1, 64], arms=["eager"])
    assert suite.plan.batch_sizes == suite.search_plan.batch_sizes == (64, 1)
    assert [arm.kind for arm in suite.arms] == ["eager"]
    assert [model.name for model in suite.models] == ["small"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ["eagre"]}, "Did you mean 'eager'?"),
        ({"arms": [{"aoti": {"freezign": [True]}}]}, "Did you mean 'freezing'?"),
        ({"arms": [{"aoti": {"freezing": []}}]}, "arms[0].aoti.freezing"),
        ({"arms": [{"torch_int8": {"engine": ["qnnpack"]}}]}, "x86, fbgemm, onednn"),
        ({"arms": ["eager", "eager"]}, "stands twice"),
        ({"arms": []}, "must be a list of peers"),
        ({"arms": [["eager"]]}, "must be a kind"),
        ({"models": []}, "models"),
        ({"models": [{"name": "a b", "card": "x"}]}, "models[0].name"),
        ({"models": SMALL["models"] * 2}, "must have different names"),
        ({"plan": {"batch_sizes": [0]}}, "batch_sizes must be at least 1"),
        ({"ne_margin": "zero"}, "ne_margin"),
        ({"ne_margin": -1}, "ne_margin"),
        ({"path": "x"}, "is not a known key"),
        ({"margin": 1}, "ne_margin"),
    ],
)
def test_what_is_wrong_with_a_suite_is_said(tmp_path, changes, message):
    with pytest.raises(UsageError) as caught:
        load_suite(write(tmp_path, **changes))
    assert message in str(caught.value)
    assert "suite.yaml" in str(caught.value)


def test_all_problems_are_listed_at_once(tmp_path):
    with pytest.raises(UsageError) as caught:
        load_suite(write(tmp_path, arms=["eagre", "onnx"], models=[], surplus=1))
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("text", ["a: [", "- 1", ""])
def test_a_file_that_is_no_suite_is_refused(tmp_path, text):
    file = tmp_path / "suite.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"suite\.yaml"):
        load_suite(file)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ["smal"]}, "Did you mean 'small'?"),
        ({"arms": ["rankopt"]}, "--arms"),
        ({"batch_sizes": [0]}, "--batch-sizes"),
    ],
)
def test_names_that_the_suite_lacks_are_refused(tmp_path, given, message):
    with pytest.raises(UsageError) as caught:
        load_suite(write(tmp_path)).chosen(**given)
    assert message in str(caught.value)


def test_a_peer_of_another_package_is_found_by_its_entry_point(tmp_path, monkeypatch):
    from bench.peers.fake_peers import install

    install(tmp_path, monkeypatch)
    suite = load_suite(write(tmp_path, arms=["eager", {"fake_busy": {"busy_us": [5]}}]))
    assert isinstance(suite, PeerSuite)
    assert isinstance(suite.arms[1], Peer)
    assert suite.arms[1].settings(load_card("dlrm-synthetic")) == [{"busy_us": 5}]
