"""Loading an artifact and scoring with it: contract, machine, weights, several at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from artifact.workshop import alter_weights, built, copy_of, edit_manifest, loaded, scores_of
from passes.zoo import features_of
from rankopt.artifact.manifest import CONSTANTS, PROGRAM, read_manifest
from rankopt.errors import ArtifactError, ContractError
from rankopt.runtime import LoadedArtifact, load_artifact


def rows(name: str, batch: int = 7) -> dict[str, Tensor]:
    return features_of(built(name).card, batch, 0.1)


def test_scores_are_named_float_vectors() -> None:
    scores = loaded("dlrm-native")(rows("dlrm-native"))
    assert list(scores) == ["score"]
    assert scores["score"].shape == (7,)
    assert scores["score"].dtype == torch.float32
    assert not scores["score"].requires_grad


def test_what_a_call_returned_is_not_overwritten_by_the_next() -> None:
    artifact = loaded("dlrm-native")
    first = artifact(rows("dlrm-native", 7))["score"]
    kept = first.clone()
    artifact(rows("dlrm-native", 513))
    artifact({name: value * 0 for name, value in rows("dlrm-native", 7).items()})
    assert torch.equal(first, kept)


def test_inputs_are_left_as_they_were() -> None:
    features = rows("zoo-mixed")
    before = {name: value.clone() for name, value in features.items()}
    loaded("zoo-mixed")(features)
    assert all(torch.equal(features[name], value) for name, value in before.items())


def test_further_features_are_ignored_and_order_is_of_no_matter() -> None:
    features = rows("zoo-mixed")
    turned = {name: features[name] for name in reversed(features)}
    turned["label"] = torch.ones(3)
    assert torch.equal(
        loaded("zoo-mixed")(turned)["score"], scores_of("zoo-mixed", features)["score"]
    )


def test_the_same_call_scores_the_same_bits_again() -> None:
    for name in ("zoo-fused-mixed", "din-fbgemm"):
        features = rows(name, 33)
        first = scores_of(name, features)["score"]
        for _ in range(5):
            assert torch.equal(scores_of(name, features)["score"], first)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: {**f, "dense": torch.randn(7, 5)}, r"input dense: .*\[B, 4\]; got \[7, 5\]"),
        (lambda f: {**f, "dense": f["dense"].double()}, "input dense: must be float32"),
        (lambda f: {**f, "sparse": f["sparse"] + 40}, r"input sparse\[0, 0\]: must be an id in"),
        (lambda f: {**f, "sparse": f["sparse"][:3]}, "input sparse: must have 7 rows"),
        (lambda f: {**f, "dense": None}, "input dense: must be a torch.Tensor"),
        (lambda f: {"sparse": f["sparse"]}, "input dense: is missing"),
        (lambda f: {name: value[:0] for name, value in f.items()}, "must have 1 to 65536 rows"),
    ],
)
def test_a_call_that_breaks_the_contract_is_refused(change: object, words: str) -> None:
    assert callable(change)
    artifact = loaded("dlrm-native")
    with pytest.raises(ContractError, match=words) as caught:
        artifact(change(rows("dlrm-native")))
    assert str(artifact.folder) in str(caught.value)
    assert caught.value.exit_code == 2
    # It still scores.
    assert torch.equal(
        artifact(rows("dlrm-native"))["score"],
        scores_of("dlrm-native", rows("dlrm-native"))["score"],
    )


def test_a_batch_beyond_the_contracts_largest_is_refused(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    edit_manifest(folder, max_batch=16)
    artifact = load_artifact(folder)
    assert artifact(rows("dlrm-native", 16))["score"].shape == (16,)
    with pytest.raises(ContractError, match="must have 1 to 16 rows; got 17"):
        artifact(rows("dlrm-native", 17))


def test_the_largest_batch_of_the_contract_runs() -> None:
    name = "dlrm-native"
    batch = read_manifest(built(name).folder).max_batch
    features = rows(name, 7)
    many = {key: value.repeat(batch // 7 + 1, 1)[:batch] for key, value in features.items()}
    scores = loaded(name)(many)["score"]
    assert scores.shape == (batch,)
    assert torch.equal(scores[:7], scores_of(name, features)["score"])
    assert torch.equal(scores[7:14], scores[:7])


def test_compiled_for_instructions_that_this_cpu_lacks_is_refused(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    target = read_manifest(folder).target.model_dump(mode="json")
    edit_manifest(folder, target={**target, "isa": [*target["isa"], "avx1024", "sve9"]})
    with pytest.raises(ArtifactError, match="compiled with avx1024, sve9, which this CPU lacks"):
        load_artifact(folder)
    edit_manifest(folder, target={**target, "isa": []})
    load_artifact(folder)


def test_another_architecture_and_another_torch_are_refused_together(tmp_path: Path) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    manifest = read_manifest(folder)
    target = manifest.target.model_dump(mode="json")
    edit_manifest(
        folder,
        target={**target, "architecture": "sparc64"},
        libraries={**manifest.libraries, "torch": "1.0.0"},
    )
    with pytest.raises(ArtifactError) as caught:
        load_artifact(folder)
    text = str(caught.value)
    assert "sparc64" in text
    assert "torch: must be 1.0.0" in text
    assert "pip install torch==1.0.0" in text


@pytest.mark.parametrize("missing", [PROGRAM, CONSTANTS])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ArtifactError, match=f"{missing} is missing"):
        load_artifact(folder)


@pytest.mark.parametrize("keep", [0, 100])
def test_truncated_weights_are_refused(tmp_path: Path, keep: int) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    raw = (folder / CONSTANTS).read_bytes()
    (folder / CONSTANTS).write_bytes(raw[:keep])
    with pytest.raises(ArtifactError, match="is truncated"):
        load_artifact(folder)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_package_is_refused_with_the_next_step(tmp_path: Path, share: float) -> None:
    folder = copy_of("dlrm-native", tmp_path)
    raw = (folder / PROGRAM).read_bytes()
    (folder / PROGRAM).write_bytes(raw[: int(len(raw) * share)])
    with pytest.raises(ArtifactError, match=r"model\.pt2: cannot be loaded.*(.|\n)*rankopt verify"):
        load_artifact(folder)


def test_a_package_of_another_model_is_refused(tmp_path: Path) -> None:
    """It would read constants that the folder does not hold."""
    folder = copy_of("dlrm-native", tmp_path)
    shutil.copy(built("din-native").folder / PROGRAM, folder / PROGRAM)
    with pytest.raises(ArtifactError):
        load_artifact(folder)


def test_another_path_than_a_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    file.write_text("x", encoding="utf-8")
    with pytest.raises(ArtifactError, match="no rankopt artifact"):
        load_artifact(file)


def test_weights_are_mapped_from_the_folder(tmp_path: Path) -> None:
    folder = copy_of("zoo-mixed", tmp_path)
    artifact = load_artifact(folder)
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no /proc here")
    assert str(folder / CONSTANTS) in maps.read_text(encoding="utf-8")
    assert artifact(rows("zoo-mixed"))["score"].shape == (7,)


def test_a_loaded_artifact_outlives_the_folder_it_came_from(tmp_path: Path) -> None:
    """A deployment renames a new folder over the old one while the old still serves."""
    folder = copy_of("zoo-mixed", tmp_path / "live")
    artifact = load_artifact(folder)
    features = rows("zoo-mixed")
    before = artifact(features)["score"].clone()
    following = copy_of("zoo-mixed", tmp_path / "next")
    alter_weights(following, lambda n, v: v * 3 if n.endswith("bias") else v)
    folder.rename(tmp_path / "old")
    following.rename(folder)
    assert torch.equal(artifact(features)["score"], before)
    shutil.rmtree(tmp_path / "old")
    assert torch.equal(artifact(features)["score"], before)
    assert not torch.equal(load_artifact(folder)(features)["score"], before)


def test_weights_renamed_over_the_mapped_ones_do_not_reach_a_loaded_artifact(
    tmp_path: Path,
) -> None:
    folder = copy_of("zoo-mixed", tmp_path)
    artifact = load_artifact(folder)
    features = rows("zoo-mixed")
    before = artifact(features)["score"].clone()
    alter_weights(folder, lambda n, v: v * 3 if n.endswith("bias") else v)
    assert torch.equal(artifact(features)["score"], before)
    assert not torch.equal(load_artifact(folder)(features)["score"], before)


@pytest.mark.parametrize("name", ["dlrm-native", "dlrm-fbgemm", "zoo-mixed"])
def test_other_weights_score_other_scores_and_never_stale_ones(name: str, tmp_path: Path) -> None:
    features = rows(name)
    original = scores_of(name, features)["score"]
    folder = copy_of(name, tmp_path)

    def other(constant: str, value: Tensor) -> Tensor:
        return value * 2 if value.is_floating_point() and value.dim() <= 1 else value

    alter_weights(folder, other)
    swapped = load_artifact(folder)(features)["score"]
    assert float((swapped - original).abs().max()) > 1e-3
    assert torch.equal(scores_of(name, features)["score"], original)
    # And back again, in the same place on disk.
    shutil.rmtree(folder)
    again = load_artifact(copy_of(name, tmp_path))
    assert torch.equal(again(features)["score"], original)


@pytest.mark.parametrize("name", ["dlrm-native", "dlrm-fbgemm"])
def test_two_artifacts_in_one_process_keep_their_weights_apart(name: str, tmp_path: Path) -> None:
    features = rows(name)
    folder = copy_of(name, tmp_path)
    alter_weights(folder, lambda n, v: v + 0.5 if n.endswith("bias") else v)
    other = load_artifact(folder)
    same = load_artifact(built(name).folder)
    expected = scores_of(name, features)["score"]
    for _ in range(3):
        assert torch.equal(same(features)["score"], expected)
        assert not torch.equal(other(features)["score"], expected)
    other.close()
    assert torch.equal(same(features)["score"], expected)


def handles(artifact: LoadedArtifact) -> list[int]:
    packed = artifact.manifest.packed_for_fbgemm
    return [int(artifact._constants[handle]) for handle in packed]


def is_released(handle: int) -> bool:
    try:
        torch.ops.rankopt.fbgemm_release(handle)
    except RuntimeError:
        return True
    return False


def test_closing_releases_what_was_packed_for_fbgemm() -> None:
    artifact = load_artifact(built("dlrm-fbgemm").folder)
    held = handles(artifact)
    assert len(set(held)) == 5
    assert 0 not in held
    artifact.close()
    assert all(is_released(handle) for handle in held)
    artifact.close()  # twice is once


def test_dropping_an_artifact_releases_it_too() -> None:
    artifact = load_artifact(built("dlrm-fbgemm").folder)
    held = handles(artifact)
    del artifact
    assert all(is_released(handle) for handle in held)


@pytest.mark.parametrize("name", ["dlrm-fbgemm", "dlrm-native"])
def test_a_closed_artifact_refuses_to_score(name: str) -> None:
    artifact = load_artifact(built(name).folder)
    artifact.close()
    with pytest.raises(ArtifactError, match="closed"):
        artifact(rows(name))


def test_threads_take_turns_and_get_their_own_scores() -> None:
    name = "din-fbgemm"
    artifact = loaded(name)
    calls = {batch: rows(name, batch) for batch in (1, 5, 33, 64)}
    expected = {batch: scores_of(name, features)["score"] for batch, features in calls.items()}
    wrong: list[int] = []

    def work(batch: int) -> None:
        for _ in range(20):
            same = torch.equal(artifact(calls[batch])["score"], expected[batch])
            wrong.extend([] if same else [batch])

    threads = [threading.Thread(target=work, args=(batch,)) for batch in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


FRESH = """
import json, sys
from safetensors.torch import load_file, save_file
import rankopt
scores = {}
for name in json.loads(sys.argv[2]):
    artifact = rankopt.load_artifact(sys.argv[1] + "/" + name)
    features = load_file(sys.argv[3] + "/" + name + ".in")
    scores[name] = artifact(features)["score"].contiguous()
save_file(scores, sys.argv[3] + "/out")
"""


@pytest.mark.slow
def test_a_fresh_process_scores_the_same_bits(tmp_path: Path) -> None:
    names = ["zoo-fused-mixed", "bags-int8", "dlrm-fbgemm", "din-native"]
    for name in names:
        save_file(rows(name, 33), tmp_path / f"{name}.in")  # compiles what is not there yet
    parent = built(names[0]).folder.parent
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(parent), json.dumps(names), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    out = load_file(tmp_path / "out")
    for name in names:
        assert torch.equal(out[name], scores_of(name, rows(name, 33))["score"]), name
