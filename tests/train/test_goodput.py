"""Journals with planted shares, torn lines, and what any journal's shares add up to."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankopt.train.fault_tolerance.goodput import goodput, goodput_line, run_times
from rankopt.train.fault_tolerance.journal import Journal, read_journal

S = 1_000_000_000
BEGAN = 1_700_000_000 * S


def event(kind, at_s, began=BEGAN, **details):
    return {"t_ns": began + at_s * S, "event": kind, "at_ns": at_s * S, **details}


def steps(at_s, first, last, step_s, wait_s, began=BEGAN):
    return event(
        "steps", at_s, began, first=first, last=last, step_ns=step_s * S, wait_ns=wait_s * S
    )


UNDISTURBED = [
    event("start", 0),
    steps(15, 1, 10, 8, 2),  # 5 s of start-up before them
    event("evaluation", 20, duration_ns=4 * S),  # 1 s between is nobody's
    event("checkpoint", 22, duration_ns=2 * S),
    steps(33, 11, 20, 10, 1),
    event("evaluation", 37, duration_ns=4 * S),
    event("end", 40, num_steps=20, best_step=20),
]


def test_the_shares_of_a_planted_run_are_found():
    told = goodput(UNDISTURBED)
    assert told["times_ns"] == {
        "steps": 18 * S,
        "steps_after_best": 0,
        "redone_steps": 0,
        "data_wait": 3 * S,
        "evaluation": 8 * S,
        "checkpoint": 2 * S,
        "start_up": 5 * S,
        "down": 0,
        "other": 4 * S,
    }
    assert told["wall_ns"] == 40 * S
    assert told["goodput"] == 18 / 40
    assert (told["num_restarts"], told["num_redone_steps"]) == (0, 0)


def test_steps_after_the_weights_that_were_kept_are_not_in_them():
    told = goodput([*UNDISTURBED[:-1], event("end", 40, num_steps=20, best_step=10)])
    assert told["times_ns"]["steps"] == 8 * S
    assert told["times_ns"]["steps_after_best"] == 10 * S
    assert told["wall_ns"] == 40 * S


def test_a_kill_costs_the_steps_since_the_checkpoint_and_the_time_until_the_restart():
    later = BEGAN + 100 * S
    last = BEGAN + 200 * S
    journal = [
        event("start", 0),
        steps(12, 1, 10, 10, 1),
        event("checkpoint", 13, duration_ns=1 * S),
        steps(23, 11, 15, 9, 1),  # lost: the next process goes on after step 10
        event("restart", 0, later, cause="torchrun"),
        event("resume", 3, later, step=10),
        # It is killed too, after it began at step 11 and before another checkpoint.
        steps(10, 11, 12, 4, 2, later),
        event("restart", 0, last, cause="resume"),
        event("resume", 2, last, step=10),
        steps(32, 11, 20, 28, 1, last),
        event("evaluation", 40, last, duration_ns=8 * S),
        event("end", 40, last, num_steps=20, best_step=20),
    ]
    told = goodput(journal)
    assert told["times_ns"] == {
        "steps": 38 * S,
        "steps_after_best": 0,
        "redone_steps": 16 * S,
        "data_wait": 2 * S,
        "evaluation": 8 * S,
        "checkpoint": 1 * S,
        "start_up": (1 + 4 + 3) * S,
        "down": (100 - 23 + 100 - 10) * S,
        "other": 0,
    }
    assert told["wall_ns"] == 240 * S
    assert (told["num_restarts"], told["num_redone_steps"]) == (2, 7)
    line = goodput_line(told)
    assert line.startswith("goodput 15.8% of 240 s, 2 restarts, 7 steps done again: down 69.6%")
    assert "checkpoint 0.4%" in line
    assert "other" not in line


def test_a_process_killed_before_its_first_step_loses_nobodys_steps():
    later = BEGAN + 50 * S
    journal = [
        event("start", 0),
        steps(10, 1, 10, 10, 0),
        event("restart", 0, later),
        event("restart", 0, later + 10 * S),
        steps(5, 11, 20, 5, 0, later + 10 * S),
        event("end", 5, later + 10 * S, num_steps=20, best_step=20),
    ]
    told = goodput(journal)
    assert told["num_redone_steps"] == 0
    assert told["times_ns"]["steps"] == 15 * S
    assert told["times_ns"]["down"] == 50 * S


def test_a_range_of_steps_that_was_lost_in_part_is_divided():
    later = BEGAN + 20 * S
    journal = [
        event("start", 0),
        steps(10, 1, 10, 10, 0),
        event("restart", 0, later),
        steps(10, 7, 10, 10, 0, later),
        event("end", 10, later, num_steps=10, best_step=10),
    ]
    told = goodput(journal)
    assert told["num_redone_steps"] == 4
    assert told["times_ns"]["redone_steps"] == 4 * S
    assert told["times_ns"]["steps"] == 16 * S


def test_nothing_at_all_is_no_goodput():
    told = goodput([])
    assert told["goodput"] is None
    assert goodput_line(told) == "goodput: no time was measured"


EVENTS = st.one_of(
    st.fixed_dictionaries(
        {
            "event": st.just("steps"),
            "first": st.integers(0, 30),
            "last": st.integers(0, 30),
            "step_ns": st.integers(-5, 10**6),
            "wait_ns": st.integers(0, 10**6),
        }
    ),
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(["evaluation", "checkpoint"]),
            "duration_ns": st.integers(0, 10**6),
        }
    ),
    st.fixed_dictionaries(
        {
            "event": st.sampled_from(["start", "restart", "resume", "interrupted", "of others"]),
            "step": st.none() | st.integers(0, 30),
        }
    ),
    st.fixed_dictionaries({"event": st.just("end"), "best_step": st.none() | st.integers(0, 30)}),
)


@given(st.lists(st.tuples(EVENTS, st.integers(0, 10**7), st.integers(0, 10**9)), max_size=12))
def test_the_shares_of_any_journal_are_at_least_zero_and_add_up(drawn):
    journal = [{**one, "at_ns": at_ns, "t_ns": t_ns} for one, at_ns, t_ns in drawn]
    told = goodput(journal)
    assert all(value >= 0 for value in told["times_ns"].values())
    assert sum(told["times_ns"].values()) == told["wall_ns"]
    assert told["wall_ns"] == run_times(journal).wall_ns
    assert told["goodput"] is None or 0 <= told["goodput"] <= 1


@given(st.data())
def test_a_journal_cut_anywhere_keeps_its_whole_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("cut") / "journal.jsonl"
    whole = "".join(json.dumps(one) + "\n" for one in UNDISTURBED).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    num_whole = whole[:cut].count(b"\n")
    assert read_journal(path)[:num_whole] == UNDISTURBED[:num_whole]
    journal = Journal(path)
    journal.begin()
    assert (
        path.read_bytes()[: whole[:cut].rfind(b"\n") + 1] == whole[: whole[:cut].rfind(b"\n") + 1]
    )
    found = read_journal(path)
    assert found[-1]["event"] == ("restart" if num_whole else "start")
    assert len(found) == num_whole + 1


def test_steps_are_written_before_what_follows_them_and_about_once_a_second(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin()
    for number in (1, 2, 3):
        journal.add_step(number, 10, 1)
    assert [one["event"] for one in read_journal(path)] == ["start"]
    with journal.timed("evaluation", step=3) as found:
        found["note"] = "x"
    _, written, evaluation = read_journal(path)
    assert (written["first"], written["last"]) == (1, 3)
    assert (written["step_ns"], written["wait_ns"]) == (30, 3)
    assert evaluation["note"] == "x"
    assert evaluation["duration_ns"] <= evaluation["at_ns"]
    journal.add_step(4, 10, 1)
    journal._steps["since_ns"] -= 2 * S  # as if the first of them lay two seconds back
    journal.add_step(5, 10, 1)
    assert read_journal(path)[-1]["last"] == 5


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.begin()
    real = type(path).open

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), "open", full)
    journal.add("evaluation", duration_ns=1)
    monkeypatch.setattr(type(path), "open", real)
    assert len(read_journal(path)) == 1
    journal.add("end")
    assert [one["event"] for one in read_journal(path)] == ["start", "evaluation", "end"]
    other = tmp_path / "copy.jsonl"
    journal.copy(other)
    assert read_journal(other) == read_journal(path) == journal.events


@pytest.mark.parametrize("line", [b"[1]", b"{}", b'{"event": 3}', b"\xff\xfe", b"nonsense"])
def test_lines_that_are_no_events_are_left_out(tmp_path, line):
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event":"start","t_ns":1,"at_ns":0}\n' + line + b"\n")
    assert [one["event"] for one in read_journal(path)] == ["start"]
