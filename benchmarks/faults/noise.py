"""Bad data: rows of noise, which nothing that was learned foretells, in the place of some rows."""

from __future__ import annotations

from collections.abc import Callable, Container

import numpy as np

from llmfoundry.data.make_batch import Row
from llmfoundry.data.sources import OrderedStream


def reading_noise(places: Container[int]) -> Callable[[OrderedStream, int], Row]:
    """What reads as `OrderedStream.read` does now, but for these rows of the source."""
    read = OrderedStream.read

    def spoilt(stream: OrderedStream, place: int) -> Row:
        row = read(stream, place)
        if place not in places:
            return row
        noise = np.random.default_rng(place).integers(128, 256, len(row.ids))
        return row._replace(ids=noise.astype(row.ids.dtype))

    return spoilt
