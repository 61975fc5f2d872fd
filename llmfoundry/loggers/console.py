"""Console output of a run: banner, one line per logged step, notes, tables, samples, summary.

Entry point: `Console`. The trainer calls it on every rank; only the main rank prints. A line is
formatted as plain text with fixed columns. Color is added last, and only on a terminal. A log file
therefore has the text of the screen without control characters.

The functions below the class format numbers for people; pages and reports use them too. They scale
a number after rounding, so that no text shows `1000.0k` or `60s`.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TextIO

from llmfoundry.redaction import public

BOLD, DIM, YELLOW = "1", "2", "33"
WIDTH = 80  # characters of a banner line: the default width of a terminal


class Console:
    """Console of a run. `stream` defaults to standard output."""

    def __init__(self, *, is_main: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_main = is_main
        self._is_terminal = self._stream.isatty()
        self._color = self._is_terminal and not os.environ.get("NO_COLOR")
        self._seen: set[str] = set()

    def banner(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print the description of the run: rows of label and value, ("parameters", "12.3M").

        Values are wrapped at WIDTH, on a terminal and in a file.
        """
        rows = list(rows)
        room = WIDTH - 4 - max((len(label) for label, _ in rows), default=0)
        wrap = partial(textwrap.fill, width=room, break_long_words=False, break_on_hyphens=False)
        wrapped_rows = []
        for label, value in rows:
            wrapped_lines = [wrap(line) for line in printable(value).split("\n")]
            wrapped_rows.append((label, "\n".join(wrapped_lines)))
        self._block(wrapped_rows, rule=True)

    def step(self, batch: int, metrics: Mapping[str, float], *, total: int) -> None:
        """Print the line of step `batch` of `total`; unknown quantities are omitted."""
        cells = step_cells(batch, metrics, total=total)
        # a column stays once it was printed, so that a missing value does not shift the others
        self._seen |= {label for label, text in cells if text.strip()}
        columns = [(label, text) for label, text in cells if label in self._seen]
        if self._is_terminal:
            columns = fit(columns, width=shutil.get_terminal_size().columns)
        line = "  ".join(self._paint_cell(label, text) for label, text in columns)
        self._print(line.rstrip())

    def table(self, text: str) -> None:
        """Print a formatted table, such as the scores of the gauntlet."""
        self._print("\n" + printable(public(text).strip("\n")) + "\n")

    def samples(self, batch: int, samples: Sequence[tuple[str, str]]) -> None:
        """Print generated texts: (prompt, continuation) each."""
        self._print(self._paint(f"\nsamples after {batch} batch{'' if batch == 1 else 'es'}", BOLD))
        for prompt, text in samples:
            indented = printable((prompt + text).rstrip()).replace("\n", "\n    ")
            self._print(f"  > {indented}")
        self._print("")

    def note(self, text: str) -> None:
        """Print a decision or an action of the run."""
        self._print(self._paint(self._fold(f"  {printable(public(text))}"), DIM))

    def warn(self, text: str) -> None:
        """Print a failure that does not end the run."""
        self._print(self._paint(self._fold(f"  warning: {printable(public(text))}"), YELLOW))

    def finish(self, rows: Iterable[tuple[str, str]]) -> None:
        """Print the summary of the finished run: report, checkpoint, next commands."""
        self._block(rows, rule=False)

    def close(self) -> None:
        """End what moves; there is nothing here. Called when the run has ended, however."""

    def _block(self, rows: Iterable[tuple[str, str]], *, rule: bool) -> None:
        """Print rows of label and value in two columns; `rule` adds an empty line below."""
        rows = [(printable(label), printable(public(value))) for label, value in rows]
        width = max((len(label) for label, _ in rows), default=0)
        lines = []
        for label, value in rows:
            first, *rest = value.split("\n")
            lines.append(f"  {self._paint(label.ljust(width), DIM)}  {first}")
            lines.extend(f"  {' ' * width}  {line}" for line in rest)
        self._print("\n".join(["", *lines, ""] if rule else ["", *lines]))

    def _fold(self, text: str) -> str:
        """Break a text between words on a terminal; in a file it stays one line."""
        if not self._is_terminal:
            return text
        fold = textwrap.TextWrapper(
            shutil.get_terminal_size().columns,
            subsequent_indent=" " * 4,
            break_long_words=False,
            break_on_hyphens=False,
        )
        return "\n".join(map(fold.fill, text.split("\n")))

    def _paint_cell(self, label: str, text: str) -> str:
        if label == "loss":
            return self._paint(text, BOLD)
        return self._paint(text, DIM) if label in ("lr", "memory", "grad") else text

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._color else text

    def _print(self, text: str) -> None:
        """Write a line and flush; a closed pipe does not end training."""
        if not self._is_main:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:
            self._is_main = False


def step_cells(batch: int, metrics: Mapping[str, float], *, total: int) -> list[tuple[str, str]]:
    """Return the columns of the line of a step as (label, padded text).

    A missing value is blank. Columns whose values are unknown during the first steps come last, so
    that the others never move.
    """
    digits = len(str(total))
    learning_rates = [value for name, value in metrics.items() if name.startswith("lr-")]
    rate = learning_rates[0] if learning_rates else None
    get = metrics.get
    return [
        ("step", f"{batch:>{digits}}/{total}"),
        ("loss", _cell("loss ", get("loss/train/total"), _fixed, 7)),
        ("accuracy", _cell("accuracy ", get("rewards/train/accuracies"), percent, 6)),
        ("margin", _cell("margin ", get("rewards/train/margins"), _short, 7)),
        ("bpb", _cell("bpb ", get("metrics/train/bits_per_byte"), _fixed, 6)),
        ("grad", _cell("grad ", get("l2_norm/grad/global"), _short, 7)),
        ("lr", _cell("lr ", rate, _rate, 7)),
        ("memory", _cell("", get("memory/peak_allocated_mem"), format_gib, 9)),
        ("speed", _cell("", get("throughput/tokens_per_sec"), short_count, 5, " tok/s")),
        ("mfu", _cell("mfu ", get("throughput/device/mfu"), percent, 5)),
        ("left", _cell("", get("time/remaining_estimate"), duration, 6, " left")),
    ]


def fit(cells: list[tuple[str, str]], *, width: int) -> list[tuple[str, str]]:
    """Drop the least important columns until the line fits a terminal of `width` characters."""
    for least in ("lr", "memory", "grad", "mfu", "bpb", "margin"):
        if sum(len(text) + 2 for _, text in cells) - 2 <= width:
            break
        cells = [cell for cell in cells if cell[0] != least]
    return cells


def printable(text: str) -> str:
    """Return `text` with tabs expanded and other control characters escaped, except newlines."""
    return "".join(map(_printable_character, text.replace("\r\n", "\n")))


def _printable_character(c: str) -> str:
    if c == "\n" or c.isprintable():
        return c
    return "    " if c == "\t" else ascii(c)[1:-1]


def _cell(
    label: str, value: float | None, form: Callable[[float], str], width: int, unit: str = ""
) -> str:
    if value is None:
        return " " * (len(label) + width + len(unit))
    return f"{label}{form(value):>{width}}{unit}"


def _fixed(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else _short(value)


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.01 <= abs(value) < 1000 else number(value, digits=3)


def _rate(value: float) -> str:
    return f"{value:.1e}"


_STEPS = ("", "k", "M", "G", "T", "P", "E")


def short_count(value: float) -> str:
    """Return a number as three or four digits and a decimal suffix: 950, 12.3k, 1.40M, 2.00G."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 999.5:
        return number(value, digits=3) if value != int(value) else str(int(value))
    scaled, step = abs(value), 0
    while scaled >= 999.5 and step < len(_STEPS) - 1:
        scaled, step = scaled / 1000, step + 1
    sign = "-" if value < 0 else ""
    return f"{sign}{_three_digits(scaled)}{_STEPS[step]}"


def format_gib(gib: float) -> str:
    """Return an amount of memory (in GiB) as text: 812 MiB, 1.2 GiB, 79.3 GiB."""
    if not math.isfinite(gib):
        return str(gib)
    if gib * 1024 < 999.5:
        return f"{gib * 1024:.0f} MiB"
    if gib < 999.95:
        return f"{gib:.1f} GiB"
    return f"{gib / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration as text, in its two largest units: 0.4s, 45s, 3m12s, 1h04m, 2d03h."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def number(value: float, *, digits: int = 4) -> str:
    """Return a number with `digits` significant digits, without trailing zeros.

    Numbers below 0.001 and from a million on are in scientific notation: 6e-04.
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return _exponent(value, digits)
    rounded = float(f"{value:.{digits}g}")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """Return a fraction as a percentage with one decimal: 41.2%."""
    return f"{share * 100:.1f}%"


def _three_digits(scaled: float) -> str:
    """Return a number in [0.9995, 999.5) with three digits: 1.40, 12.3, 123."""
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f}"


def _exponent(value: float, digits: int) -> str:
    """Return a number in scientific notation, the mantissa without trailing zeros: 6e-04."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{exponent}"
