"""Which of many like measurements are worse than the others: pure numbers in, names out.

Two rules, both of them one-sided. A floor: less than what the hardware must reach. A robust outlier
(Iglewicz and Hoaglin, 1993): z = 0.6745 (x - median) / MAD beyond 3.5, and further from the median
than an effect that matters. The idea: z alone names the slowest of four equal machines every other
time, and the effect alone names what is in the noise; both together name neither. Rates differ by
factors, so x is a rate's logarithm: a link that is a hundred times slower than noisy ones is found.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Name = TypeVar("Name")

MOST_Z = 3.5
CHANCE = 1e-3  # that any of the values, all of them sound, is beyond z: of many z is greater
LEAST = 4  # values, to know what is usual; of fewer only the floor says something
LEAST_SPREAD = 0.01  # of the median: a MAD of 0 is chance, no instrument repeats better


@dataclass(frozen=True)
class Outlier(Generic[Name]):
    """A value that is too small, where more is better.

    Attributes:
        name: whose.
        value: it.
        usual: the median of all; None where there are too few.
        limit: what it is below.
        is_floor: whether `limit` is the hardware's, rather than the others'.
    """

    name: Name
    value: float
    usual: float | None
    limit: float
    is_floor: bool

    @property
    def share(self) -> float:
        """Of what is usual, else of the limit."""
        return self.value / (self.usual or self.limit or math.inf)


def too_small(
    values: Mapping[Name, float],
    *,
    effect: float,
    floor: float | None = None,
    spread: float = LEAST_SPREAD,
) -> list[Outlier[Name]]:
    """Values below the floor, or far below the others; a value that is not a number is 0.

    Args:
        values: of one kind of hardware, more being better.
        effect: the share of the median by which a value must be smaller to matter.
        floor: what each must reach, where that is known.
        spread: least standard deviation, as a share of the median, that is taken for granted.
    """
    known = {name: value if math.isfinite(value) else 0.0 for name, value in values.items()}
    limit, usual = usual_limit(known.values(), effect=effect, spread=spread)
    found = []
    for name, value in known.items():
        if floor is not None and value < floor:
            found.append(Outlier(name, value, usual, floor, is_floor=True))
        elif limit is not None and value < limit:
            found.append(Outlier(name, value, usual, limit, is_floor=False))
    return found


def usual_limit(
    values: Iterable[float], *, effect: float, spread: float = LEAST_SPREAD
) -> tuple[float | None, float | None]:
    """Below which a value is an outlier, and the median; None where there are too few values."""
    known = [value for value in values if value > 0]
    if len(known) < LEAST:
        return None, None
    logs = [math.log(value) for value in known]
    median, sigma = statistics.median(logs), max(robust_sigma(logs), spread)
    most_z = max(MOST_Z, statistics.NormalDist().inv_cdf(1 - CHANCE / len(logs)))
    limit = min(median - most_z * sigma, median + math.log1p(-effect))
    return math.exp(limit), math.exp(median)


def robust_sigma(values: Sequence[float]) -> float:
    """The standard deviation of normal values, by their median absolute deviation (MAD)."""
    median = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - median) for value in values)
