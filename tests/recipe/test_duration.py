"""Durations and the clock, against counting in exact fractions."""

from __future__ import annotations

from fractions import Fraction

import pytest

from llmfoundry.recipe.checks import Clock, Duration, check_duration


def clock(max_duration: str = "100ba", *, batches_per_epoch: float = 12.5) -> Clock:
    """8 rows of 64 tokens a batch."""
    return Clock(8, 512, batches_per_epoch, Duration.parse(max_duration))


@pytest.mark.parametrize("text", ["10ba", "2000000000tok", "1ep", "500sp", "0.1dur", "1.5ep"])
def test_a_duration_is_written_as_it_was_read(text: str) -> None:
    assert str(Duration.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "10", "ba", "10 ba", "-1ba", "10baa", "1e3", "1.5tok", "infba"]
)
def test_what_is_no_duration_is_reported(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        Duration.parse(text)
    assert len(list(check_duration("key", text))) == 1


def test_a_length_of_itself_is_refused_where_it_cannot_be() -> None:
    assert list(check_duration("key", "0.5dur")) == []
    assert len(list(check_duration("key", "0.5dur", allow_dur=False))) == 1


@pytest.mark.parametrize(
    ("text", "batches"),
    [("7ba", 7), ("2e9tok", 2e9 / 512), ("20sp", 2.5), ("2ep", 25), ("0.25dur", 25)],
)
def test_every_unit_is_a_number_of_batches(text: str, batches: float) -> None:
    assert clock().batches(text) == pytest.approx(batches)


@pytest.mark.parametrize(
    ("text", "total"),
    [("7ba", 7), ("513tok", 2), ("512tok", 1), ("1ep", 13), ("2ep", 25), ("1sp", 1)],
)
def test_a_run_continues_until_its_duration_is_reached(text: str, total: int) -> None:
    assert clock(text).total == total


@pytest.mark.parametrize(
    ("share", "batches", "total"), [("0.07", 100, 7), ("0.14", 50, 7), ("0.29", 100, 29)]
)
def test_a_share_of_an_epoch_is_rounded_up_but_for_binary_fractions(
    share: str, batches: int, total: int
) -> None:
    """0.07 x 100 is 7.000000000000001 in binary fractions, and 0.29 x 100 is a little below 29."""
    assert float(share) * batches != total == Fraction(share) * batches
    assert clock(f"{share}ep", batches_per_epoch=batches).total == total
