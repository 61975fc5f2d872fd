"""What a place for metrics is, to whoever sends a run there: a session, and what opens it.

`mlflow_session`, `prometheus_session` and their like make a `LogTarget`; a `BackgroundWriter` uses
it from a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from llmfoundry.redaction import public

PATIENCE_WHILE_AWAY = 5.0  # seconds after training, for a place that fails


@dataclass(frozen=True)
class MetricPoint:
    """One value of one metric."""

    name: str
    value: float
    milliseconds: int
    batch: int


@dataclass(frozen=True)
class Samples:
    """Texts that the model wrote after `batch` batches: (prompt, continuation) each."""

    batch: int
    milliseconds: int
    texts: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class RunFacts:
    """A run apart from its metrics.

    `first_batch` steps were made by earlier processes; what was sent of later ones is repeated.
    `began` is in milliseconds since 1970. `params` are the recipe's, by dotted key.
    """

    name: str
    folder: Path
    first_batch: int
    began: int
    params: Mapping[str, Any]
    tags: Mapping[str, str]


class Session(Protocol):
    """An open run. A method may raise whatever its store raises; it is then called again."""

    @property
    def max_points(self) -> int:
        """Of one `send`."""

    def steps(self, name: str) -> Container[int]:
        """The batches for which the place has a value of a metric."""

    def send(self, points: Sequence[MetricPoint]) -> None:
        """Write metrics, all or none."""

    def samples(self, samples: Samples) -> None:
        """Keep what the model wrote."""

    def upload(self, path: Path) -> None:
        """Keep a text file with the run."""

    def end(self, status: str) -> None:
        """Close the run: finished, failed or killed."""


@dataclass(frozen=True)
class LogTarget:
    """Where a run goes: how messages call it, and what opens it.

    `open` gets a function that prints a line. `begin_anew` is called once, where a run starts from
    its first batch in a folder that may hold an earlier one's traces. `is_permanent`: whether an
    error would come again. `patience_while_away`: seconds after training for a place that fails.
    `tag` gives a session's run tags, which replace those of the same names; None: it has none.
    `is_store`: it keeps what it gets; else it shows what is now, and nothing is made up for later.
    """

    label: str
    open: Callable[[RunFacts, Callable[[str], None]], Session]
    begin_anew: Callable[[Path], None] = lambda folder: None
    is_permanent: Callable[[Exception], bool] = lambda error: False
    patience_while_away: float = PATIENCE_WHILE_AWAY
    tag: Callable[[Any, Mapping[str, str]], None] | None = None
    is_store: bool = True


def milliseconds() -> int:
    """Since 1970."""
    return int(time.time() * 1000)


def describe(error: Exception) -> str:
    """The first line of an error, without passwords, at most 200 characters."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text.split(": Max retries exceeded")[0]  # what follows repeats the address
    return public(text if len(text) <= 200 else text[:197] + "...")
