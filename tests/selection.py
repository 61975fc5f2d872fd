"""Which cases of a parametrised test CI has time for; `make test-slow` runs the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(fast: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, all but `fast` marked slow.

    Raises:
        AssertionError: one of `fast` is not a case.
    """
    cases = list(cases)
    assert all(case in cases for case in fast), f"{fast}: not all are of {cases}"
    return [case if case in fast else pytest.param(case, marks=pytest.mark.slow) for case in cases]
