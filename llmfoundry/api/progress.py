"""What a training shows in a program: lines, as the command line prints, or a progress bar."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from llmfoundry.distributed.process_group import World
from llmfoundry.errors import UserError
from llmfoundry.loggers.console import Console, step_cells
from llmfoundry.recipe.checks import not_a_choice

SHOWS = ["auto", "lines", "bar", "nothing"]


def console_of(show: str) -> Callable[[World], Console]:
    """Return a function that makes the console of a process.

    Raises:
        UserError: `show` is none of SHOWS.
    """
    if show not in SHOWS:
        raise UserError(f"show: {not_a_choice(str(show), SHOWS)}")
    if show == "auto":
        show = "bar" if in_notebook() else "lines"
    consoles = {"lines": Console, "bar": BarConsole, "nothing": QuietConsole}
    return lambda world: consoles[show](is_main=world.is_main)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class QuietConsole(Console):
    """Console that prints warnings only."""

    def banner(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print nothing."""

    def step(self, batch: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Print nothing."""

    def table(self, text: str) -> None:
        """Print nothing."""

    def samples(self, batch: int, samples: Any) -> None:
        """Print nothing."""

    def note(self, text: str) -> None:
        """Print nothing."""

    def finish(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print nothing."""


class BarConsole(Console):
    """Console with a progress bar of tqdm in place of steps, and without notes and samples."""

    def __init__(self, *, is_main: bool = True) -> None:
        super().__init__(is_main=is_main)
        self._shown = is_main
        self._bar: Any = None

    def note(self, text: str) -> None:
        """Print nothing: a notebook's page would be full of what the report has."""

    def samples(self, batch: int, samples: Any) -> None:
        """Print nothing; samples.jsonl and the report have them."""

    def step(self, batch: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Move the bar, and write the loss, the speed and the remaining time beside it."""
        if not self._shown:
            return
        if self._bar is None:
            self._bar = _bar(batch - 1, total)
        self._bar.update(batch - self._bar.n)
        cells = dict(step_cells(batch, metrics, total=total))
        texts = (cells[name].strip() for name in ("loss", "bpb", "speed") if name in cells)
        self._bar.set_postfix_str(", ".join(filter(None, texts)))

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar(done: int, total: int) -> Any:
    """Return a bar: a widget in a notebook with ipywidgets, else text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that ipywidgets is missing
        from tqdm.auto import tqdm

    return tqdm(initial=done, total=total, unit="step", disable=False)
