"""Calls that are repeated, and calls that have a time limit."""

from __future__ import annotations

import random
import threading
import time

import pytest

from llmfoundry.retry import DeadlineExceeded, backoff, retry, within


def test_a_call_is_tried_until_it_succeeds_and_waits_in_between() -> None:
    asked: list[int] = []
    waited: list[float] = []

    def call() -> str:
        asked.append(len(asked))
        if len(asked) < 4:
            raise OSError(f"attempt {len(asked)}")
        return "answer"

    def again(error: Exception, failures: int) -> float:
        assert str(error) == f"attempt {failures}"
        return 10.0 * failures

    assert retry(call, again=again, wait=waited.append) == "answer"
    assert waited == [10.0, 20.0, 30.0] and len(asked) == 4


def test_what_is_not_to_be_tried_again_is_raised_with_its_cause() -> None:
    def again(error: Exception, failures: int) -> float:
        raise LookupError(f"given up after {failures}") from error

    with pytest.raises(LookupError, match="given up after 1") as caught:
        retry(lambda: 1 // 0, again=again)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # of no kind that passes
        retry(stop, again=again)


def test_waits_double_up_to_the_longest_however_long_it_lasts() -> None:
    plain = [backoff(n, first=1.0, longest=60.0, jitter=(1.0, 1.0)) for n in range(1, 9)]
    assert plain == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff(100_000, first=0.5, longest=30.0, jitter=(1.0, 1.0)) == 30.0


def test_waits_are_spread_and_move_no_seeded_draw() -> None:
    random.seed(17)
    expected = random.random()
    random.seed(17)
    waits = [backoff(3, first=0.5) for _ in range(400)]
    assert random.random() == expected
    assert 0 <= min(waits) < 0.1 and 1.9 < max(waits) <= 2.0


def test_a_call_that_hangs_is_given_up_on_and_one_that_fails_is_not() -> None:
    never, began = threading.Event(), time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"no answer within 0\.1 s"):
        within(0.1, never.wait)
    assert time.monotonic() - began < 20
    never.set()
    assert within(60, lambda: "made") == "made"
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)
