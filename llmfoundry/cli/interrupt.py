"""Ctrl-C while a script still imports its modules: exit status 130, without a traceback.

`script.py` imports this module first. Its function `run` handles Ctrl-C itself from then on.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

_print_error = sys.excepthook


def _end_quietly(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Exit with status 130 on Ctrl-C; print any other uncaught error as before."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    _print_error(kind, error, trace)


sys.excepthook = _end_quietly
