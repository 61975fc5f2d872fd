"""What a supervisor reports, and where: the run's events first, then standard error, the webhook.

`supervisor.py` calls it for all that it sees and decides. The idea: what cannot be written must not
keep the supervisor from its work. A disk may be full, a terminal closed, a folder gone; each of the
three is tried, and none of them raises.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmfoundry.checkpoint.remote_events import FOLDERS
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.events import NAME as EVENTS
from llmfoundry.events import add_event
from llmfoundry.loggers.background_queue import describe
from llmfoundry.loggers.mlflow_logger import RUN_ID_FILE, tag_ended
from llmfoundry.recipe.front.paths import ROOT
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.resilience.supervise import WEBHOOK_FORMS, SuperviseConfig
from llmfoundry.redaction import hide, public, public_texts
from llmfoundry.retry import Late, within


class Reporter:
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
            print_stderr(f"supervise: {what}" + f"; {done}" * bool(done))
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
        """Wait until the last line is told, or not; `post_to_webhook` has a limit of time."""
        if self._notifier is not None:
            self._notifier.join()


def print_stderr(line: str) -> None:
    """Print a line on standard error, if there is one and it takes it."""
    with suppress(OSError, ValueError):  # a full disk; a stream that is closed
        print(line, file=sys.stderr, flush=True)


def _post(webhook: str, form: str | None, text: str, event: dict[str, Any]) -> None:
    problem = post_to_webhook(webhook, form, text, event)
    if problem:
        print_stderr(problem)


# --- from llmfoundry.resilience.supervise.notify: A decision to a webhook, in the form that its
# receiver takes.
#
# The supervisor calls `post_to_webhook`. The idea: it is told or not told within seconds, whoever
# does not answer; and a webhook's address lets whoever knows it in, so that nothing of it is ever
# said.


_WEBHOOK_SECONDS = 25.0  # seconds


def post_to_webhook(webhook: str, form: str | None, text: str, event: Mapping[str, Any]) -> str:
    """Post a text; empty, or why it did not get there, without the address.

    Args:
        webhook: the URL.
        form: one of WEBHOOK_FORMS; None: by the URL's host.
        text: a line.
        event: the line of events.jsonl that it is about, which the form json has too.
    """
    try:
        body = json.dumps(_BODIES[form or form_of(webhook)](public(text), event)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "llmfoundry"}
        request = urllib.request.Request(webhook, data=body, headers=headers)
        within(_WEBHOOK_SECONDS, lambda: send(request))
    except (OSError, ValueError, http.client.HTTPException, Late) as error:
        return f"supervise.webhook: nobody was told: {_reason(error)}"
    return ""


def form_of(webhook: str) -> str:
    """The form that an address takes, as its host says; slack where it says nothing.

    Mattermost, Rocket.Chat and Google Chat take Slack's {"text": ...} too.
    """
    host = (urlsplit(webhook).hostname or "").removesuffix(".")
    for name, hosts in _HOSTS.items():
        if any(host == known or host.endswith(f".{known}") for known in hosts):
            return name
    return "slack"


_HOSTS = {
    "discord": ("discord.com", "discordapp.com"),
    "teams": ("webhook.office.com", "logic.azure.com", "powerplatform.com", "powerautomate.com"),
}


def _slack(text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Slack reads <...> as links and calls to people; longer texts it cuts at 40,000 characters."""
    text = _cut(text, 4000)
    return {"text": text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")}


def _discord(text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Discord refuses more than 2000 characters, and calls nobody if told so."""
    return {"content": _cut(text, 2000), "allowed_mentions": {"parse": []}}


def _teams(text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Teams' workflows take adaptive cards alone."""
    block = {"type": "TextBlock", "text": _cut(text, 4000), "wrap": True}
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [block],
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _json(text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    return {"text": text, "event": public_texts(event)}


_BODIES: dict[str, Callable[[str, Mapping[str, Any]], dict[str, Any]]] = {
    "slack": _slack,
    "discord": _discord,
    "teams": _teams,
    "json": _json,
}
assert tuple(_BODIES) == WEBHOOK_FORMS


def _reason(error: Exception) -> str:
    """Why, in words that cannot hold a part of the address."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            said = error.read(200).decode(errors="replace").strip().splitlines()
        word = said[0] if said and _is_word(said[0]) else error.reason
        return f"status {error.code} ({word})"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, TimeoutError | Late) else type(error).__name__


def _is_word(text: str) -> bool:
    """Whether an answer is a word such as Slack's `no_service`, and not a page."""
    return len(text) <= 40 and text.replace("_", "").isalpha()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# --- from llmfoundry.resilience.supervise.request: A request that is sent where it is addressed, or
# nowhere: to a webhook, or to a cluster's API.
#
# `notify` and `kubernetes` call `send`. What fails is theirs to tell, each in its words.


ANSWER_SECONDS, RETRY_SECONDS = 10.0, 3.0  # seconds: for an answer, before the second try
_BUSY = (429, 500, 502, 503, 504)  # which may take it a moment later


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Elsewhere it would arrive without its content, and perhaps with a secret."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(request: urllib.request.Request, *handlers: urllib.request.BaseHandler) -> None:
    """Send it, once more where the receiver is busy, and follow no redirection.

    Raises:
        OSError: nobody answers, or (an HTTPError) the receiver does not take it.
        ValueError: it has no address.
        HTTPException: the address cannot be one, or the answer is no HTTP.
    """
    opener = urllib.request.build_opener(_NoRedirect, *handlers)
    try:
        opener.open(request, timeout=ANSWER_SECONDS).close()
    except urllib.error.HTTPError as error:
        if error.code not in _BUSY:
            raise
        error.close()
        time.sleep(RETRY_SECONDS)
        opener.open(request, timeout=ANSWER_SECONDS).close()


# --- from llmfoundry.resilience.supervise.final_event: The last decision of a supervised run to
# where its record is: MLflow, and the store of a URL.
#
# The run's own processes send events there (`loggers/background_queue.py`, `checkpoint/mirror.py`); after
# the last decision there are none. The supervisor calls `send_to_mlflow` and `send_to_store`,
# which have it
# sent by a process: a store that does not answer holds nobody up, and the supervisor stays small.
#
#     python -m llmfoundry.resilience.supervise.notify    # what to send is on standard input


FINAL_SECONDS = 60.0  # seconds; an import of MLflow takes 2 to 10, a request of its 20 at most


def send_to_mlflow(logger: LoggerConfig, folder: Path, status: str) -> str:
    """Send the tags of a run that has ended; empty, or why MLflow does not have them.

    Args:
        logger: filled.
        folder: the run's.
        status: finished, failed or killed: how it ended, if MLflow still believes that it runs.
    """
    if not logger.mlflow or not (folder / RUN_ID_FILE).is_file():
        return ""
    told = {"uri": logger.tracking_uri, "folder": str(folder.absolute()), "status": status}
    return _send_by_process("MLflow", {"mlflow": told})


def send_to_store(url: str, options: FetchOptions, folder: Path) -> str:
    """Send the events, and what else was written beside a run; empty, or why they are not there.

    Args:
        url: the run's.
        options: how its store is spoken to.
        folder: the working copy.
    """
    told = {"url": url, "options": asdict(options), "folder": str(folder.absolute())}
    return _send_by_process(public(url), {"store": told})


def _send_by_process(place: str, told: dict[str, Any]) -> str:
    paths = [str(ROOT), os.environ.get("PYTHONPATH")]
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.PIPE,  # no address on a command line, which everybody sees
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        said, _ = process.communicate(json.dumps(told), timeout=FINAL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: it may hang in a file system
        return f"{place} lacks the last decision: no answer in {FINAL_SECONDS:.0f} s"
    if process.returncode:
        why = said.strip() or f"status {process.returncode}"
        return f"{place} lacks the last decision: {why}"
    return ""


def main() -> int:
    """Send what standard input says; the exit status."""
    told = json.load(sys.stdin)
    hide({"storage_options": told.get("store", {}).get("options", {}).get("storage_options")})
    hide([value for section in told.values() for value in section.values()])
    try:
        for name, section in told.items():
            _ACTIONS[name](section)
    except Exception as error:
        with suppress(OSError):
            print(public(describe(error)), flush=True)
        return 1
    return 0


def _to_mlflow(told: dict[str, Any]) -> None:
    tag_ended(told["uri"], Path(told["folder"]), told["status"])


def _to_store(told: dict[str, Any]) -> None:
    from llmfoundry.checkpoint.remote_run import CHECKPOINTS
    from llmfoundry.data.fetch.object_store import ObjectStore

    store = ObjectStore(told["url"], FetchOptions(**told["options"]), key="save_folder")
    sizes, folder = store.files(skip=(CHECKPOINTS,)), Path(told["folder"])
    paths = [folder / EVENTS, *(path for name in FOLDERS for path in folder.glob(f"{name}/**/*"))]
    for path in paths:
        name = path.relative_to(folder).as_posix()
        if path.is_file() and sizes.get(name) != path.stat().st_size:
            store.upload(name, path)


_ACTIONS: dict[str, Callable[[dict[str, Any]], None]] = {
    "mlflow": _to_mlflow,
    "store": _to_store,
}


if __name__ == "__main__":
    sys.exit(main())
