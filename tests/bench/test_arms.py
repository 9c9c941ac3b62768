from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from rankopt.bench.arms import (
    ArmSpec,
    arm_identity,
    arm_kinds,
    hash_path,
    load_arm,
    loader_reference,
    resolve_arm,
)
from rankopt.errors import ArtifactError, CheckpointError, UsageError

CARD = """
name: small
factory: net.py:Net
checkpoint: weights.pt
inputs: [{name: dense, kind: dense, columns: [a]}]
outputs: [{name: score, label: y}]
"""


@pytest.fixture
def card_file(tmp_path):
    (tmp_path / "net.py").write_text("Net = None\n")
    (tmp_path / "weights.pt").write_bytes(b"weights")
    file = tmp_path / "card.yaml"
    file.write_text(CARD)
    return file


def test_built_in_kinds_are_known_by_reference():
    assert {"eager", "artifact"} <= set(arm_kinds())
    assert loader_reference("eager").startswith("rankopt.bench.arms:")


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UsageError, match="'artifact'"):
        loader_reference("artefact")


@pytest.mark.parametrize("kind", ["eager", "artifact"])
def test_a_kind_without_its_file_is_refused(kind):
    with pytest.raises(UsageError, match=f"kind '{kind}' needs"):
        load_arm(ArmSpec(label="control", kind=kind))


def test_labels_are_safe_as_file_names():
    with pytest.raises(ValidationError):
        ArmSpec(label="../control", kind="eager")


def test_a_resolved_arm_names_the_cards_own_checkpoint(card_file):
    resolved = resolve_arm(ArmSpec(label="control", kind="eager", card=card_file))
    assert resolved.checkpoint == card_file.with_name("weights.pt").resolve()
    assert resolved.card.is_absolute()


def test_files_that_are_not_there_are_named(card_file, tmp_path):
    with pytest.raises(CheckpointError, match=r"gone\.pt is not there"):
        resolve_arm(
            ArmSpec(label="control", kind="eager", card=card_file, checkpoint=tmp_path / "gone.pt")
        )
    with pytest.raises(ArtifactError, match="rankopt optimize"):
        resolve_arm(ArmSpec(label="candidate", kind="artifact", artifact=tmp_path / "gone"))


@pytest.mark.parametrize("changed", ["weights.pt", "net.py", "card.yaml"])
def test_an_arms_identity_changes_with_any_of_its_files(card_file, changed):
    spec = resolve_arm(ArmSpec(label="control", kind="eager", card=card_file))
    before = arm_identity(spec)
    assert arm_identity(spec) == before
    file = card_file.with_name(changed)
    file.write_bytes(file.read_bytes() + b"\n# more")
    assert arm_identity(spec) != before


def test_a_folders_hash_covers_names_and_contents(tmp_path):
    folder = tmp_path / "artifact"
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "a").write_bytes(b"1")
    first = hash_path(folder)
    (folder / "weights" / "a").rename(folder / "weights" / "b")
    second = hash_path(folder)
    (folder / "weights" / "b").write_bytes(b"2")
    assert len({first, second, hash_path(folder)}) == 3


def test_an_eager_arm_scores_as_its_module_does(card_file):
    card_file.with_name("net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(1, 1)\n"
        "    def forward(self, dense):\n"
        "        return self.layer(dense).squeeze(1)\n"
    )
    weight, bias = torch.tensor([[3.0]]), torch.tensor([0.5])
    torch.save({"layer.weight": weight, "layer.bias": bias}, card_file.with_name("weights.pt"))
    run = load_arm(resolve_arm(ArmSpec(label="control", kind="eager", card=card_file)))
    scores = run({"dense": torch.tensor([[1.0], [-2.0]])})
    assert list(scores) == ["score"]
    torch.testing.assert_close(scores["score"], torch.tensor([3.5, -5.5]))
