"""Detect values that are too small among comparable measurements; pure functions of numbers.

There are two one-sided rules. Floor: the value is less than the hardware must reach. Robust outlier
(Iglewicz and Hoaglin, 1993): z = 0.6745 (x - median) / MAD is beyond 3.5, and the distance from the
median is large enough to matter. With z alone, the slowest of four equal machines would be reported
every other time. With the distance alone, noise would be reported. x is the logarithm of a rate,
because rates differ by factors: a link that is a hundred times slower than noisy links is found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")

MOST_Z = 3.5
CHANCE = 1e-3  # probability of a false positive among all values; raises z for many values
LEAST = 4  # values needed for a comparison; fewer are only compared with the floor
LEAST_SPREAD = 0.01  # minimum standard deviation, as a share of the median


@dataclass(frozen=True)
class Outlier(Generic[Name]):
    """A value that is too small.

    Attributes:
        name: name of the measured object.
        value: the measurement; larger is better.
        usual: median of all values; None: too few values.
        limit: the value is below this limit.
        is_floor: whether the limit is the hardware's floor instead of a comparison.
    """

    name: Name
    value: float
    usual: float | None
    limit: float
    is_floor: bool

    @property
    def share(self) -> float:
        """Value as a share of the median, or of the limit without a median."""
        return self.value / (self.usual or self.limit or math.inf)


def too_small(
    values: Mapping[Name, float],
    *,
    effect: float,
    floor: float | None = None,
    spread: float = LEAST_SPREAD,
) -> list[Outlier[Name]]:
    """Return values below the floor, or far below the other values.

    Args:
        values: values of one kind of hardware; larger is better. A value that is not finite
            counts as 0.
        effect: minimum distance from the median that matters, as a share of the median.
        floor: value that each must reach; None: not known.
        spread: minimum standard deviation to assume, as a share of the median.
    """
    known = {name: value if math.isfinite(value) else 0.0 for name, value in values.items()}
    limit, usual = usual_limit(known.values(), effect=effect, spread=spread)
    outliers = []
    for name, value in known.items():
        if floor is not None and value < floor:
            outliers.append(Outlier(name, value, usual, floor, is_floor=True))
        elif limit is not None and value < limit:
            outliers.append(Outlier(name, value, usual, limit, is_floor=False))
    return outliers


def usual_limit(
    values: Iterable[float], *, effect: float, spread: float = LEAST_SPREAD
) -> tuple[float | None, float | None]:
    """Return the limit below which a value is an outlier, and the median; None: too few values."""
    known = [value for value in values if value > 0]
    if len(known) < LEAST:
        return None, None
    logs = [math.log(value) for value in known]
    median, sigma = statistics.median(logs), max(robust_sigma(logs), spread)
    most_z = max(MOST_Z, statistics.NormalDist().inv_cdf(1 - CHANCE / len(logs)))
    limit = min(median - most_z * sigma, median + math.log1p(-effect))
    return math.exp(limit), math.exp(median)


def robust_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation, estimated by the median absolute deviation (MAD)."""
    median = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - median) for value in values)
