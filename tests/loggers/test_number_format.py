"""Numbers read as people write them, and never round into the next unit's digits."""

from __future__ import annotations

import math
import random
import re

import pytest

from llmfoundry.loggers.console import duration, format_gib, number, percent, short_count


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (1234, "1.23k"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_501, "1.00M"),
        (1_400_000, "1.40M"),
        (132_000_000_000, "132G"),
        (-12_345, "-12.3k"),
        (0.5, "0.5"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert short_count(value) == text


@pytest.mark.parametrize(
    ("gib", "text"),
    [(0.5, "512 MiB"), (1.2, "1.2 GiB"), (79.34, "79.3 GiB"), (2048, "2.0 TiB")],
)
def test_sizes(gib: float, text: str) -> None:
    assert format_gib(gib) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.4s"),
        (9.97, "10s"),
        (59.7, "1m00s"),
        (192, "3m12s"),
        (3599.6, "1h00m"),
        (3840, "1h04m"),
        (86_390, "1d00h"),
        (2 * 86_400 + 3 * 3600, "2d03h"),
        (math.inf, "inf"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0006, "6e-04"), (0.98765, "0.9877"), (12.0, "12"), (99999.6, "100000"),
     (1.5e9, "1.5e+09"), (0.12, "0.12")],
)  # fmt: skip
def test_significant_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_share_is_a_percentage() -> None:
    assert percent(0.4123) == "41.2%"


def test_random_numbers_read_back_within_their_digits() -> None:
    draw, units = random.Random(1), {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    for _ in range(2000):
        value = 10 ** draw.uniform(0, 16)
        match = re.fullmatch(r"([\d.]+)([kMGTP]?)", short_count(value))
        assert match, short_count(value)
        assert float(match[1]) < 1000
        assert float(match[1]) * units[match[2]] == pytest.approx(value, rel=0.006)
        assert float(number(value)) == pytest.approx(value, rel=6e-4)


def test_random_durations_read_back_within_their_smaller_unit() -> None:
    draw, seconds_of = random.Random(2), {"s": 1, "m": 60, "h": 3600, "d": 86400}
    for _ in range(2000):
        value = 10 ** draw.uniform(-1, 7)
        parts = re.findall(r"([\d.]+)([smhd])", duration(value))
        read = sum(float(n) * seconds_of[unit] for n, unit in parts)
        smallest = 0.1 if "." in duration(value) else seconds_of[parts[-1][1]]
        assert abs(read - value) <= smallest / 2 + 1e-9
        if len(parts) == 2:  # 1h04m, never 1h60m
            assert float(parts[1][0]) < seconds_of[parts[0][1]] / seconds_of[parts[1][1]]
