"""Bad input gets a clear error, and nothing is lost.

Each case holds an earlier result where the new one would go, and asks for it to be replaced: the
verb must refuse with exit code 2 and one message that says where, what and what next, and the
earlier result must be there as it was.
"""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml

import small

Cli = Callable[..., Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.fixture(scope="module")
def model(root: Path) -> Path:
    return small.model(root)


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    return small.trained(root)


@pytest.fixture(scope="module")
def artifact(root: Path) -> Path:
    return small.artifact(root)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """Make a result that lies where the next one goes."""
    out = tmp_path / "results" / "out"
    out.mkdir(parents=True)
    (out / "report.json").write_text('{"verdict": "pass"}')
    (out / "notes.txt").write_text("mine")
    return out


def assert_untouched(out: Path) -> None:
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt", "report.json"]
    assert (out / "report.json").read_text() == '{"verdict": "pass"}'
    assert (out / "notes.txt").read_text() == "mine"


def assert_refused(result: Any, *fragments: str) -> None:
    assert result.exit_code == 2, result.stderr
    assert "Traceback" not in result.stderr
    for fragment in fragments:
        assert fragment in result.stderr


# checkpoints


def truncated(folder: Path, trained: Path) -> Path:
    whole = (trained / "checkpoint.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder / "cut.safetensors"


def truncated_pt(folder: Path, trained: Path) -> Path:
    torch.save({"a.weight": torch.zeros(1_000)}, folder / "whole.pt")
    (folder / "cut.pt").write_bytes((folder / "whole.pt").read_bytes()[:2_000])
    return folder / "cut.pt"


def of_another_model(folder: Path, trained: Path) -> Path:
    torch.save({"left.weight": torch.zeros(200, 16), "tower.bias": torch.ones(3)}, folder / "o.pt")
    return folder / "o.pt"


class Evil:
    """What a pickle may hold."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("code-from-a-checkpoint-ran",))


def with_code(folder: Path, trained: Path) -> Path:
    (folder / "evil.pt").write_bytes(pickle.dumps({"left.weight": Evil()}))
    return folder / "evil.pt"


def missing(folder: Path, trained: Path) -> Path:
    return folder / "nowhere.pt"


@pytest.mark.parametrize(
    ("make", "fragments"),
    [
        (truncated, ["cut.safetensors", "is truncated", "Copy or write it again"]),
        (truncated_pt, ["cut.pt", "is truncated", "Copy or write it again"]),
        (
            of_another_model,
            ["o.pt", "left.weight", "[200, 16]", "[200, 8]", "tower.bias", "right.weight"],
        ),
        (with_code, ["evil.pt", "would run code from the file", "state_dict()"]),
        (missing, ["nowhere.pt", "does not exist"]),
    ],
)
def test_a_checkpoint_that_cannot_be_used(
    cli: Cli,
    model: Path,
    trained: Path,
    earlier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path, Path], Path],
    fragments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = make(tmp_path, trained)
    result = cli(
        "optimize", model / "recipe.yaml", "--model", trained / "card.yaml",
        "--checkpoint", checkpoint, "--out", earlier, "--overwrite",
    )  # fmt: skip
    assert_refused(result, *fragments)
    assert_untouched(earlier)
    assert not (tmp_path / "code-from-a-checkpoint-ran").exists()


# data


def no_column(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.rename(columns={"I2": "I2_"})


def nan(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(I3=frame["I3"].where(frame.index % 8 != 0))  # some in each split


def out_of_range(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(C2=[200] * len(frame))


def list_out_of_range(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(R1=[[0, -1]] * len(frame))


def no_rows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.head(0)


def one_class(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(label=1)


def odd_label(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(label=0.5)


BAD_INPUTS = [
    (no_column, ["column 'I2'", "is missing", "Did you mean", "I2_"]),
    (nan, ["column 'I3', row", "must not be missing or NaN", "fill"]),
    (out_of_range, ["column 'C2', row", "must hold ids in [0, 200); got 200", "num_ids"]),
    (list_out_of_range, ["column 'R1', row", "must hold ids in [0, 200); got -1", "num_ids"]),
    (no_rows, ["holds no rows", "Give data with at least one row"]),
]
BAD_LABELS = [
    (one_class, ["column 'label'", "must hold both 0 and 1", "give rows of both"]),
    (odd_label, ["column 'label', row", "must be 0 or 1; got 0.5"]),
]


def bad_data(model: Path, tmp_path: Path, spoil: Callable[..., pd.DataFrame]) -> Path:
    frame = pd.read_parquet(model / "data" / "test.parquet").head(400)
    spoil(frame).to_parquet(tmp_path / "bad.parquet")
    return tmp_path / "bad.parquet"


@pytest.mark.parametrize(("spoil", "fragments"), BAD_INPUTS)
def test_optimize_refuses_data_the_card_does_not_allow(
    cli: Cli,
    model: Path,
    trained: Path,
    earlier: Path,
    tmp_path: Path,
    spoil: Callable[..., pd.DataFrame],
    fragments: list[str],
) -> None:
    data = tmp_path / "folder"
    data.mkdir()
    bad_data(model, data, spoil).rename(data / "validation.parquet")
    pd.read_parquet(model / "data" / "test.parquet").to_parquet(data / "test.parquet")
    result = cli(
        "optimize", model / "recipe.yaml", "--model", trained / "card.yaml", "--data", data,
        "--out", earlier, "--overwrite",
    )  # fmt: skip
    assert_refused(result, "validation.parquet", *fragments)
    assert_untouched(earlier)


@pytest.mark.parametrize(("spoil", "fragments"), [*BAD_INPUTS, *BAD_LABELS])
def test_ab_refuses_data_that_cannot_be_judged(
    cli: Cli,
    model: Path,
    trained: Path,
    artifact: Path,
    earlier: Path,
    tmp_path: Path,
    spoil: Callable[..., pd.DataFrame],
    fragments: list[str],
) -> None:
    result = cli(
        "ab", "--control", trained / "card.yaml", "--candidate", artifact, "--local",
        "--data", bad_data(model, tmp_path, spoil), "--plan", model / "plan.yaml",
        "--out", earlier, "--overwrite",
    )  # fmt: skip
    assert_refused(result, "bad.parquet", *fragments)
    # A run that failed may be resumed: what it left lies beside, the earlier result as it was.
    for partial in earlier.parent.glob("out.partial-*"):
        assert not (partial / "report.json").exists()
    assert (earlier / "report.json").read_text() == '{"verdict": "pass"}'
    assert (earlier / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(("spoil", "fragments"), BAD_INPUTS)
def test_predict_refuses_data_the_card_does_not_allow(
    cli: Cli,
    model: Path,
    artifact: Path,
    tmp_path: Path,
    spoil: Callable[..., pd.DataFrame],
    fragments: list[str],
) -> None:
    data, out = bad_data(model, tmp_path, spoil), tmp_path / "results" / "scores.parquet"
    out.parent.mkdir()
    out.write_text("earlier")
    result = cli("predict", artifact, "--data", data, "--out", out, "--overwrite")
    assert_refused(result, "bad.parquet", *fragments)
    assert [path.name for path in out.parent.iterdir()] == ["scores.parquet"]
    assert out.read_text() == "earlier"


def test_data_that_is_not_there_or_no_parquet(
    cli: Cli, model: Path, artifact: Path, tmp_path: Path
) -> None:
    result = cli("predict", artifact, "--data", model / "data" / "tset.parquet", "--out", "s.pq")
    assert_refused(result, "no such file or folder", "test.parquet")
    (tmp_path / "cut.parquet").write_bytes(b"PAR1 and then nothing")
    result = cli("predict", artifact, "--data", tmp_path / "cut.parquet", "--out", "s.pq")
    assert_refused(result, "cut.parquet", "is not readable as parquet")


# cards, recipes, folders


def optimize(cli: Cli, model: Path, card: Path, out: Path, *more: Any) -> Any:
    arguments = ("optimize", model / "recipe.yaml", "--model", card, "--out", out, *more)
    return cli(*arguments)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"factory": "net.py:mak"}, ["factory", "net.py", "'mak'", "make"]),
        ({"factory": "nett.py:make"}, ["factory", "nett.py", "net.py"]),
        ({"factory": "no.such.package:make"}, ["factory", "no module 'no' is installed"]),
        ({"config": {"num_idz": 200}}, ["config", "num_idz"]),
        ({"inputs": small.CARD["inputs"][:2]}, ["seen_values"]),
    ],
)
def test_a_card_that_names_what_is_not_there(
    cli: Cli,
    model: Path,
    trained: Path,
    earlier: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    fragments: list[str],
) -> None:
    card = small.write_model(tmp_path / "model", **changes)
    more = ("--checkpoint", trained / "checkpoint.safetensors", "--data", model / "data")
    result = optimize(cli, model, card, earlier, *more, "--overwrite")
    assert_refused(result, *fragments)
    assert_untouched(earlier)


def test_every_problem_of_a_recipe_before_anything_is_read(
    cli: Cli, earlier: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "bad.yaml"
    steps = [{"quantize_embeddings": {"dtype": "int3"}}, "quantise_dense", "export_aoti"]
    recipe.write_text(yaml.safe_dump({"name": "bad", "passes": steps, "objectiv": "bytes"}))
    card = small.write_model(tmp_path / "model", factory="net.py:nothing")
    result = cli("optimize", recipe, "--model", card, "--out", earlier, "--overwrite")
    assert_refused(
        result,
        "bad.yaml: passes[0].quantize_embeddings.dtype: must be one of",
        "bad.yaml: passes[1].quantise_dense: is not a known pass. Did you mean 'quantize_dense'",
        "bad.yaml: objectiv: is not a known key. Did you mean 'objective'",
    )
    assert "nothing" not in result.stderr
    assert_untouched(earlier)


def test_a_selector_that_matches_nothing(
    cli: Cli, trained: Path, artifact: Path, earlier: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    rule = {"select": "lfet", "use": "int4"}
    steps = ["fuse_embeddings", {"quantize_embeddings": {"rules": [rule]}}, "export_aoti"]
    recipe.write_text(yaml.safe_dump({"name": "r", "passes": steps}))
    result = cli(
        "optimize", recipe, "--model", trained / "card.yaml", "--out", earlier, "--overwrite",
        "--choices", artifact / "passes.json",
    )  # fmt: skip
    assert_refused(result, "matches no table of this model; got 'lfet'", "Did you mean 'left'")
    assert_untouched(earlier)


def test_a_result_that_is_there_is_not_replaced_unasked(
    cli: Cli, model: Path, trained: Path, artifact: Path, earlier: Path
) -> None:
    card = trained / "card.yaml"
    checkpoint = ("--checkpoint", trained / "checkpoint.safetensors")
    for arguments in (
        ("optimize", model / "recipe.yaml", "--model", card),
        ("run", model / "recipe.yaml", "--model", card, "--plan", model / "plan.yaml"),
        ("ab", "--control", card, "--candidate", artifact, "--plan", model / "plan.yaml"),
        ("refresh", artifact, *checkpoint),
    ):
        result = cli(*arguments, "--out", earlier)
        assert_refused(result, str(earlier), "already holds something", "--overwrite")
        assert_untouched(earlier)


def test_what_is_no_artifact(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for verb in (["verify", trained], ["predict", trained, "--data", "x", "--out", "y"]):
        assert_refused(cli(*verb), "holds no manifest.json", "rankopt optimize")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "manifest.json").write_text('{"format_version": 1}')
    assert_refused(cli("verify", damaged), "manifest.json: model: is required")


def test_choices_of_another_recipe(
    cli: Cli, model: Path, trained: Path, artifact: Path, earlier: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\npasses: [quantize_dense, export_aoti]\n")
    arguments = ("optimize", recipe, "--model", trained / "card.yaml", "--out", earlier)
    found = cli(*arguments, "--choices", artifact / "passes.json", "--overwrite")
    assert_refused(found, "choices are for the passes", "quantize_dense")
    found = cli(*arguments, "--choices", artifact / "manifest.json", "--overwrite")
    assert_refused(found, "manifest.json", "no passes.json")
    assert_untouched(earlier)


# a full disk, a kill


def test_a_disk_that_fills_up(
    cli: Cli,
    trained: Path,
    artifact: Path,
    earlier: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rankopt.artifact import refresh

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(refresh, "write_constants", full)
    checkpoint = trained / "checkpoint.safetensors"
    result = cli("refresh", artifact, "--checkpoint", checkpoint, "--out", earlier, "--overwrite")
    assert_refused(result, "the disk is full; nothing was changed there", "another disk")
    assert_untouched(earlier)


def test_a_kill_leaves_no_half_result_and_the_next_run_tidies_up(
    cli: Cli, model: Path, trained: Path, artifact: Path, earlier: Path, tmp_path: Path
) -> None:
    arguments = [
        "optimize", model / "recipe.yaml", "--model", trained / "card.yaml", "--out", earlier,
        "--choices", artifact / "passes.json", "--overwrite",
    ]  # fmt: skip
    log = tmp_path / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "rankopt", *map(str, arguments)],
            stderr=stream,
            stdout=stream,
            start_new_session=True,  # so that the compiler's processes can be killed with it
        )
    try:
        deadline = time.monotonic() + 120
        while "compiling" not in log.read_text() and time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL
    [partial] = earlier.parent.glob("out.partial-*")
    assert partial.is_dir()
    assert (earlier / "report.json").read_text() == '{"verdict": "pass"}'
    assert not (earlier / "manifest.json").exists()
    # The next run of any kind removes what was left, even one that fails itself.
    again = cli(*arguments, "--checkpoint", tmp_path / "nowhere.pt")
    assert_refused(again, "nowhere.pt")
    assert_untouched(earlier)
