"""What a run prints: a banner, one line a logged step, notes, tables, samples, what comes next.

The trainer calls it on every rank; only the main one prints. The idea: a line is plain text of
fixed columns first and color, if the stream is a terminal, is laid over it last, so a log file
holds exactly what the screen shows and no control characters. Below it: numbers as people read
them, which pages and other reports use too. A number is scaled after rounding, so that no text ever
shows `1000.0k` or `60s`.
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
WIDTH = 80  # of a terminal that nobody has made wider


class Console:
    """Prints a run. `stream` is standard output unless another is given."""

    def __init__(self, *, is_main: bool = True, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_main = is_main
        self._is_terminal = self._stream.isatty()
        self._color = self._is_terminal and not os.environ.get("NO_COLOR")
        self._seen: set[str] = set()

    def banner(self, rows: Iterable[tuple[str, str]]) -> None:
        """What is about to run: label and value a row, such as ("parameters", "12.3M").

        Values are wrapped at WIDTH, on a screen and in a file alike.
        """
        rows = list(rows)
        room = WIDTH - 4 - max((len(label) for label, _ in rows), default=0)
        wrap = partial(textwrap.fill, width=room, break_long_words=False, break_on_hyphens=False)
        lines = ((label, map(wrap, printable(value).split("\n"))) for label, value in rows)
        self._block([(label, "\n".join(parts)) for label, parts in lines], rule=True)

    def step(self, batch: int, metrics: Mapping[str, float], *, total: int) -> None:
        """The line of one logged step out of `total`; quantities that are unknown are left out."""
        cells = step_cells(batch, metrics, total=total)
        # A column that was shown once stays, so that a missing value does not shift the others.
        self._seen |= {label for label, text in cells if text.strip()}
        shown = [(label, text) for label, text in cells if label in self._seen]
        if self._is_terminal:
            shown = fit(shown, width=shutil.get_terminal_size().columns)
        line = "  ".join(self._paint_cell(label, text) for label, text in shown)
        self._print(line.rstrip())

    def table(self, text: str) -> None:
        """A ready-made table, such as the gauntlet's."""
        self._print("\n" + printable(public(text).strip("\n")) + "\n")

    def samples(self, batch: int, samples: Sequence[tuple[str, str]]) -> None:
        """Texts that the model wrote: (prompt, continuation) each."""
        self._print(self._paint(f"\nsamples after {batch} batch{'' if batch == 1 else 'es'}", BOLD))
        for prompt, text in samples:
            first, *rest = printable((prompt + text).rstrip()).split("\n")
            self._print("\n".join([f"  > {first}", *(f"    {line}" for line in rest)]))
        self._print("")

    def note(self, text: str) -> None:
        """Something that the run decided or did."""
        self._print(self._paint(self._fold(f"  {printable(public(text))}"), DIM))

    def warn(self, text: str) -> None:
        """Something that went wrong and did not stop the run."""
        self._print(self._paint(self._fold(f"  warning: {printable(public(text))}"), YELLOW))

    def finish(self, rows: Iterable[tuple[str, str]]) -> None:
        """The last words: the report, the checkpoint, the commands that come next."""
        self._block(rows, rule=False)

    def _block(self, rows: Iterable[tuple[str, str]], *, rule: bool) -> None:
        rows = [(printable(label), printable(public(value))) for label, value in rows]
        width = max((len(label) for label, _ in rows), default=0)
        lines = []
        for label, value in rows:
            first, *rest = value.split("\n")
            lines.append(f"  {self._paint(label.ljust(width), DIM)}  {first}")
            lines.extend(f"  {' ' * width}  {line}" for line in rest)
        self._print("\n".join(["", *lines, ""] if rule else ["", *lines]))

    def _fold(self, text: str) -> str:
        """Lines between words on a terminal, which would break them anywhere; a file has one."""
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
        """Write and flush; a console that went away (a closed pipe) does not end training."""
        if not self._is_main:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except OSError:
            self._is_main = False


def step_cells(batch: int, metrics: Mapping[str, float], *, total: int) -> list[tuple[str, str]]:
    """The columns of a step's line as (label, padded text); a missing value is all blanks.

    Those that appear only once speed is known come last, so that the earlier ones never move.
    """
    digits = len(str(total))
    rate = next((v for name, v in metrics.items() if name.startswith("lr-")), None)
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
    """`text` with its control characters, escape sequences among them, made visible."""
    return "".join(
        c if c == "\n" or c.isprintable() else "    " if c == "\t" else ascii(c)[1:-1]
        for c in text.replace("\r\n", "\n")
    )


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
    """Three or four digits and a decimal suffix: 950, 12.3k, 1.40M, 2.00G."""
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
    """Memory given in GiB: 812 MiB, 1.2 GiB, 79.3 GiB."""
    if not math.isfinite(gib):
        return str(gib)
    if gib * 1024 < 999.5:
        return f"{gib * 1024:.0f} MiB"
    if gib < 999.95:
        return f"{gib:.1f} GiB"
    return f"{gib / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """The two largest units: 0.4s, 45s, 3m12s, 1h04m, 2d03h."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def number(value: float, *, digits: int = 4) -> str:
    """`digits` significant digits without needless zeros; very small or large as 6e-04."""
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
    """A share of one in percent with one decimal: 41.2%."""
    return f"{share * 100:.1f}%"


def _three_digits(scaled: float) -> str:
    """1.40, 12.3, 123: three digits for a number in [0.9995, 999.5)."""
    decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
    return f"{scaled:.{decimals}f}"


def _exponent(value: float, digits: int) -> str:
    """6e-04 for 0.0006: mantissa without needless zeros."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{exponent}"
