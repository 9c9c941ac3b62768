"""The working folder of a run: what is refused, what is kept, what a full disk or a signal does."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rankopt.data.splits import open_splits
from rankopt.data.synthetic import generate
from rankopt.errors import EnvironmentProblem, Interrupted, OutputExistsError, UsageError
from rankopt.recipe import parse_recipe
from rankopt.sharding import checkpoint
from rankopt.train import loop
from rankopt.train.fault_tolerance.goodput import goodput
from rankopt.train.fault_tolerance.journal import read_journal
from rankopt.train.settings import TrainSettings
from rankopt.train.step import Step
from train import run_killed

SETTINGS = TrainSettings.model_validate(
    {**run_killed.BASE, "epochs": 1, "evaluations_per_epoch": 2, "patience": 9}
)
EVERY = 7


class StopError(Exception):
    """Stands for whatever ends a process."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    (path / "net.py").write_text(run_killed.NET)
    generate(run_killed.DATA, path / "data")
    return path


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    return train(folder, tmp_path_factory.mktemp("undisturbed") / "out").out


def train(folder, out, settings=SETTINGS, card=None, splits=None, **options):
    card = card or run_killed.card_of(folder)
    splits = splits or open_splits(card, folder / "data")
    return loop.train(card, splits, out, settings, **options)


def stop_after(num_steps, monkeypatch, do=None):
    """Have the process end, or do something, when so many steps are done."""
    real, calls = Step.timed, []

    def timed(self, batch):
        if len(calls) == num_steps and do is None:
            raise StopError
        calls.append(1)
        if len(calls) == num_steps and do is not None:
            do()
        return real(self, batch)

    monkeypatch.setattr(Step, "timed", timed)


@pytest.fixture
def stopped(folder, tmp_path, monkeypatch):
    """Return where a run was stopped after 17 steps, of which 14 are in its checkpoint."""
    with monkeypatch.context() as patch:
        stop_after(17, patch)
        with pytest.raises(StopError):
            train(folder, tmp_path / "out", checkpoint_every=EVERY)
    return tmp_path / "out"


def same(first, second):
    weights = [load_file(out / "checkpoint.safetensors") for out in (first, second)]
    curves = [json.loads((out / "metrics.json").read_text())["curve"] for out in (first, second)]
    equal = all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    return equal and curves[0] == curves[1]


def test_only_the_last_checkpoint_and_the_best_weights_are_kept(folder, stopped, monkeypatch):
    partial = stopped.with_name("out.partial")
    assert not stopped.exists()
    kept = ["best-15", "journal.jsonl", "last", "lock", "resume.json"]  # evaluated after step 15
    assert sorted(path.name for path in partial.iterdir()) == kept
    stop_after(11, monkeypatch)
    with pytest.raises(StopError):
        train(folder, stopped, checkpoint_every=EVERY, resume=True)
    assert sorted(path.name for path in partial.iterdir()) == kept
    monkeypatch.undo()
    done = train(folder, stopped, resume=True)
    assert done.metrics["goodput"]["num_redone_steps"] == 3 + 4


def test_a_stopped_run_is_not_thrown_away_by_running_it_again(folder, stopped, undisturbed):
    with pytest.raises(OutputExistsError, match=r"out\.partial.*has not ended.* --resume") as told:
        train(folder, stopped, checkpoint_every=EVERY)
    assert "--overwrite" in str(told.value)
    lines = []
    # The interval is that of the run.
    done = train(folder, stopped, resume=True, progress=lines.append)
    assert lines[0] == "goes on after step 14"
    assert same(stopped, undisturbed)
    told = done.metrics["goodput"]
    assert (told["num_restarts"], told["num_redone_steps"]) == (1, 3)
    assert told == goodput(read_journal(stopped / "journal.jsonl"))
    assert [path.name for path in stopped.parent.iterdir()] == ["out"]


def test_overwrite_begins_anew(folder, stopped, undisturbed):
    done = train(folder, stopped, checkpoint_every=EVERY, overwrite=True)
    assert done.metrics["goodput"]["num_restarts"] == 0
    assert same(stopped, undisturbed)
    assert not stopped.with_name("out.partial").exists()


def test_resume_without_a_run_begins_one_and_needs_an_interval(folder, tmp_path, undisturbed):
    with pytest.raises(UsageError, match=r"no run to go on with.*--checkpoint-every"):
        train(folder, tmp_path / "out", resume=True)
    assert list(tmp_path.iterdir()) == []
    train(folder, tmp_path / "out", checkpoint_every=EVERY, resume=True)
    assert same(tmp_path / "out", undisturbed)


def test_an_error_before_the_first_checkpoint_leaves_nothing(folder, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(StopError):
            train(folder, tmp_path / "out", checkpoint_every=EVERY)
    assert list(tmp_path.iterdir()) == []


def test_a_run_goes_on_as_it_began_and_every_difference_is_named(folder, stopped, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "net.py").write_text(run_killed.NET + "\n# another\n")
    (other / "checkpoint.safetensors").write_bytes(b"weights to start with")
    options = run_killed.DATA.model_copy(update={"seed": 5, "num_train": 2_900})
    generate(options, other / "data")
    raw = run_killed.card_of(other).model_dump(mode="json")
    card = run_killed.card_of(other).model_validate({**raw, "config": {"dim": 4}})
    settings = SETTINGS.model_copy(update={"learning_rate": 0.5, "seed": 3})
    passes = [{"train_accumulate": {"parts": 2}}]
    with pytest.raises(UsageError) as told:
        train(
            other,
            stopped,
            settings,
            card,
            recipe=parse_recipe({"name": "x", "passes": passes}, where="x"),
            start=other,
            save_optimizer=True,
            checkpoint_every=EVERY,
            resume=True,
        )
    named = {problem.where for problem in told.value.problems}
    assert named >= {
        "settings.learning_rate",
        "settings.seed",
        "card.config.dim",
        "card.factory",
        "code.net.py",
        "recipe.passes[0].train_accumulate.parts",
        "data.train",
        "data.validation",
        "start.weights",
        "save_optimizer",
    }
    assert "settings.batch_size" not in named
    text = str(told.value)
    assert "settings.learning_rate: must be 0.02, as in the run that" in text
    assert "got '0.5'" in text
    # Nothing was lost by asking.
    assert train(folder, stopped, resume=True).metrics["goodput"]["num_restarts"] == 1


def test_a_folder_in_use_is_refused(folder, stopped):
    lock = stopped.with_name("out.partial") / "lock"
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'a+'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(EnvironmentProblem, match="in use by another process"):
            train(folder, stopped, resume=True)
    finally:
        other.communicate()
    assert stopped.with_name("out.partial").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_run_after_a_checkpoint_of_that_step(
    folder, tmp_path, monkeypatch, undisturbed, number
):
    out = tmp_path / "out"
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_after(17, patch, lambda: os.kill(os.getpid(), number))
        with pytest.raises(Interrupted) as told:
            train(folder, out, checkpoint_every=100)
    assert told.value.exit_code == 130
    name = signal.Signals(number).name
    assert f"stopped by {name} after step 17; the checkpoint of step 17" in str(told.value)
    assert "--resume" in str(told.value)
    assert signal.getsignal(number) is before
    done = train(folder, out, checkpoint_every=100, resume=True)
    assert done.metrics["goodput"]["num_redone_steps"] == 0
    assert same(out, undisturbed)


@pytest.mark.parametrize("which", [1, 2, 3])
def test_a_signal_within_an_evaluation_has_it_done_again(
    folder, tmp_path, monkeypatch, undisturbed, which
):
    out = tmp_path / "out"
    real, calls = loop.judge, []

    def judge(*args, **kwargs):
        calls.append(1)
        if len(calls) == which:  # within the epoch, at its end, of the final weights
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "judge", judge)
        with pytest.raises(Interrupted):
            train(folder, out, checkpoint_every=100)
    done = train(folder, out, checkpoint_every=100, resume=True)
    assert done.metrics["goodput"]["num_redone_steps"] == 0
    assert same(out, undisturbed)


def full_disk(monkeypatch, name, calls_that_fail):
    real, calls = getattr(checkpoint._AtomicWriter, name), []

    def called(*args, **kwargs):
        calls.append(1)
        if len(calls) in calls_that_fail:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kwargs)

    monkeypatch.setattr(checkpoint._AtomicWriter, name, called)


@pytest.mark.parametrize("name", ["write_data", "finish"])
def test_a_full_disk_costs_checkpoints_and_not_the_run(
    folder, tmp_path, monkeypatch, undisturbed, name
):
    lines = []
    with monkeypatch.context() as patch:
        # Saves: step 7, 14, best of 15, 21; the best is tried again before the state of 21.
        full_disk(patch, name, {2, 3, 4})
        stop_after(24, patch)
        with pytest.raises(StopError):
            train(folder, tmp_path / "out", checkpoint_every=EVERY, progress=lines.append)
    failed = [line for line in lines if "not written" in line]
    assert "checkpoint of step 14 was not written, that of step 7 stays" in failed[0]
    assert "No space left on device" in failed[0]
    assert len(failed) == 3
    lines.clear()
    done = train(folder, tmp_path / "out", resume=True, progress=lines.append)
    assert lines[0] == "goes on after step 7"
    assert done.metrics["goodput"]["num_redone_steps"] == 17
    assert same(tmp_path / "out", undisturbed)
    errors = [e for e in read_journal(tmp_path / "out" / "journal.jsonl") if "error" in e]
    assert {event["step"] for event in errors} == {14, 15, 21}


def test_best_weights_that_could_not_be_written_are_written_later(
    folder, tmp_path, monkeypatch, undisturbed
):
    with monkeypatch.context() as patch:
        full_disk(patch, "finish", {3})
        stop_after(24, patch)
        with pytest.raises(StopError):
            train(folder, tmp_path / "out", checkpoint_every=EVERY)
    assert (tmp_path / "out.partial" / "best-15").is_dir()
    lines = []
    train(folder, tmp_path / "out", resume=True, progress=lines.append)
    assert lines[0] == "goes on after step 21"
    assert same(tmp_path / "out", undisturbed)


def test_a_damaged_checkpoint_is_told_and_not_trained_on(folder, stopped):
    shard = next((stopped.with_name("out.partial") / "last").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(Exception, match="is truncated") as told:
        train(folder, stopped, resume=True)
    assert told.value.exit_code == 2
    assert not stopped.exists()


def test_a_swap_cut_short_by_a_process_of_this_number_is_mended(folder, stopped, undisturbed):
    # In a container that starts again, processes get the numbers that their forerunners had.
    last = stopped.with_name("out.partial") / "last"
    last.rename(last.with_name(f"last.replaced-{os.getpid()}"))
    done = train(folder, stopped, checkpoint_every=EVERY, resume=True)
    assert done.metrics["goodput"]["num_redone_steps"] == 3
    assert same(stopped, undisturbed)


def test_torchruns_restart_goes_on_by_itself(folder, stopped, undisturbed, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    train(folder, stopped, checkpoint_every=EVERY)
    events = read_journal(stopped / "journal.jsonl")
    assert [event["cause"] for event in events if event["event"] == "restart"] == ["launcher"]
    assert same(stopped, undisturbed)


def test_workers_of_one_launch_go_on_by_themselves_and_others_do_not(
    folder, tmp_path, monkeypatch, undisturbed
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(17, patch)
        with pytest.raises(StopError):
            train(folder, out, checkpoint_every=EVERY, launch="one")
    for launch in ("another", None):
        with pytest.raises(OutputExistsError, match="--resume"):
            train(folder, out, checkpoint_every=EVERY, launch=launch)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    train(folder, out, checkpoint_every=EVERY)
    assert same(out, undisturbed)


def test_another_number_of_ranks_begins_draws_of_its_own(folder, stopped, monkeypatch):
    from rankopt.train.fault_tolerance import checkpoints

    drawn = []
    monkeypatch.setattr(checkpoints, "blank_state", lambda *_: {"0": {}, "1": {}})
    monkeypatch.setattr(checkpoints, "begin_draws", lambda *place: drawn.append(place))
    done = train(folder, stopped, resume=True)
    assert drawn == [(14, 0)]
    assert done.metrics["num_rows_seen"] == 3_000


def test_the_command_line(folder, tmp_path, cli, monkeypatch):
    card = run_killed.card_of(folder).model_dump(mode="json", exclude_defaults=True)
    train_settings = SETTINGS.model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "card.yaml").write_text(yaml.safe_dump({**card, "train": train_settings}))
    command = ["train", tmp_path / "card.yaml", "--data", folder / "data"]
    command += ["--out", tmp_path / "out", "--checkpoint-every", "7"]
    with monkeypatch.context() as patch:
        stop_after(12, patch, lambda: os.kill(os.getpid(), signal.SIGTERM))
        stopped = cli(*command)
    assert stopped.exit_code == 130
    assert "Go on with the same command and --resume" in stopped.stderr
    refused = cli(*command)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    differs = cli(*command, "--resume", "--seed", "4")
    assert differs.exit_code == 2
    assert "settings.seed: must be 0" in differs.stderr
    done = cli(*command, "--resume")
    assert done.exit_code == 0, done.stderr
    assert "goes on after step 12" in done.stderr
    assert "goodput " in done.stdout
    assert ", 1 restart, 0 steps done again: " in done.stdout
    assert cli(*command, "--checkpoint-every", "0").exit_code == 2
