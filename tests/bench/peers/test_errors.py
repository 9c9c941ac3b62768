"""What a result file says of a peer that failed."""

from __future__ import annotations

from rankopt.bench.peers.peer import without_trace

TRACE = """arm 'x-0': predict failed:
Traceback (most recent call last):
  File "/somewhere/worker.py", line 104, in answer
    return "value", method(*args)
RuntimeError: indices must be contiguous (originally from f API call failed at /elsewhere/ops.h)
"""


def test_a_trace_is_cut_down_to_what_failed_and_the_error() -> None:
    said = without_trace(TRACE)
    assert said == "arm 'x-0': predict failed: RuntimeError: indices must be contiguous"


def test_an_error_without_a_trace_stays() -> None:
    assert without_trace("does not apply: no bags") == "does not apply: no bags"
