"""What a supervisor reports, and where: the run's events first, then standard error, the webhook.

`supervisor.py` calls it for all that it sees and decides. The idea: what cannot be written must not
keep the supervisor from its work. A disk may be full, a terminal closed, a folder gone; each of the
three is tried, and none of them raises.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from llmfoundry.events import add_event
from llmfoundry.recipe.resilience.supervise import SuperviseConfig
from llmfoundry.resilience.supervise.notify import notify


class Record:
    """The events of a run, standard error, and a webhook."""

    def __init__(self, config: SuperviseConfig, folder: Path) -> None:
        """For the run of a folder."""
        self._config, self._folder = config, folder
        self._was_there = False
        self._notifier: threading.Thread | None = None

    def tell(
        self, kind: str, what: str, action: str, step: int | None = None, **more: Any
    ) -> dict[str, Any] | None:
        """Add it to the run's events, and print it; the line, None if it cannot be written."""
        event = self._add(kind, what, action, step, more)
        if kind != "start":
            done = more.get("done") or (action if action != "none" else "")
            say(f"supervise: {what}" + f"; {done}" * bool(done))
        return event

    def _add(
        self, kind: str, what: str, action: str, step: int | None, more: dict[str, Any]
    ) -> dict[str, Any] | None:
        if self._was_there and not self._folder.is_dir():
            return None  # a new folder would be in the way of the one that is brought back
        with suppress(OSError):  # the disk may be what failed
            event = add_event(self._folder, kind, what, step=step, action=action, **more)
            self._was_there = True
            return event
        return None

    def notify(self, text: str, event: dict[str, Any]) -> None:
        """Tell the webhook, beside the restart: who does not answer holds nothing up."""
        self.notified()
        webhook, form = self._config.webhook, self._config.webhook_form
        if webhook:
            self._notifier = threading.Thread(target=_post, args=(webhook, form, text, event))
            self._notifier.daemon = True
            self._notifier.start()

    def notified(self) -> None:
        """Wait until the last line is told, or not; `notify` has a limit of time."""
        if self._notifier is not None:
            self._notifier.join()


def say(line: str) -> None:
    """Print a line on standard error, if there is one and it takes it."""
    with suppress(OSError, ValueError):  # a full disk; a stream that is closed
        print(line, file=sys.stderr, flush=True)


def _post(webhook: str, form: str | None, text: str, event: dict[str, Any]) -> None:
    problem = notify(webhook, form, text, event)
    if problem:
        say(problem)
