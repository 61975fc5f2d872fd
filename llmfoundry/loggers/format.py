"""Numbers as people read them: counts, sizes, durations.

A number is scaled after rounding, so that no text ever shows `1000.0k` or `60s`.
"""

from __future__ import annotations

import math

_STEPS = ("", "k", "M", "G", "T", "P", "E")


def count(value: float) -> str:
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


def size(gib: float) -> str:
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
