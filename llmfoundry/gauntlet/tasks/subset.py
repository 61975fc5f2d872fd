"""Which rows are asked when not all can be: always the same ones, and of every category its share.

`Gauntlet` calls `row_order`; the first rows of the order, however many, are the subset. The idea:
rows are ordered by what they say, so that a subset is part of every larger one, and does not depend
on the order of the file, on the number of ranks or on chance.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence

from llmfoundry.gauntlet.questions import TaskRow


def row_order(rows: Sequence[TaskRow]) -> list[int]:
    """Indices of all rows, those to be asked first in front.

    In each category by a hash of the row; categories interleave in proportion to their rows.
    """
    categories: dict[str | None, list[tuple[bytes, int]]] = defaultdict(list)
    for i, row in enumerate(rows):
        categories[row.category].append((_digest(row), i))
    places = []
    for members in categories.values():
        for n, (digest, i) in enumerate(sorted(members)):
            places.append(((n + 0.5) / len(members), digest, i))
    return [i for _, _, i in sorted(places)]


def part_of(n: int, share: float) -> int:
    """How many of n rows a share of them is, at least one."""
    return min(n, max(1, math.ceil(share * n)))


def _digest(row: TaskRow) -> bytes:
    text = "\0".join((*row.contexts, *row.choices))
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
