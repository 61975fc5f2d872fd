"""Report a supervisor's decisions: events.jsonl, standard error, webhook, MLflow, store.

`supervisor.py` uses `Reporter` for each observation and decision, and at the end `send_to_mlflow`
and `send_to_store`. A full disk, a closed terminal or a server that does not answer must not stop
the supervisor. Every receiver therefore has a time limit, and no function here raises.

    python -m llmfoundry.resilience.supervise.notify    # sends a final event, from standard input
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.events import CHECKPOINTS, FOLDERS, add_event
from llmfoundry.events import NAME as EVENTS
from llmfoundry.loggers.background_queue import describe
from llmfoundry.loggers.mlflow_logger import RUN_ID_FILE, tag_ended
from llmfoundry.processes import start_module
from llmfoundry.recipe.logger import LoggerConfig
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.redaction import hide, public, public_texts
from llmfoundry.retry import DeadlineExceeded, within

ANSWER_SECONDS, RETRY_SECONDS = 10.0, 3.0  # timeout of a request; pause before the retry
WEBHOOK_SECONDS = 25.0  # limit for a post with its retry
FINAL_SECONDS = 60.0  # importing MLflow takes 2 to 10, its request up to 20
_BUSY = (429, 500, 502, 503, 504)  # HTTP statuses that are retried


class Reporter:
    """Writer of a run's events to events.jsonl, standard error and a webhook."""

    def __init__(self, config: SuperviseConfig, folder: Path) -> None:
        """Create the reporter of the run in `folder`."""
        self._config, self._folder = config, folder
        self._was_there = False
        self._notifier: threading.Thread | None = None

    def report(
        self, kind: str, what: str, action: str, step: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Add an event to the run and print it.

        Args:
            kind: kind of the event.
            what: description of the event.
            action: the supervisor's reaction; "none": no reaction.
            step: step of the run; None: not known.
            more: further fields of the event.

        Returns:
            The event; empty if it could not be written.
        """
        event = self._add(kind, what, action, step, more)
        if kind != "start":
            reaction = more.get("done")
            if not reaction and action != "none":
                reaction = action
            line = f"supervise: {what}"
            if reaction:
                line += f"; {reaction}"
            print_stderr(line)
        return event

    def _add(
        self, kind: str, what: str, action: str, step: int | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        if self._was_there and not self._folder.is_dir():
            return {}  # the folder vanished; do not create a new one in its place
        with suppress(OSError):  # the disk may be full
            event = add_event(self._folder, kind, what, step=step, action=action, **more)
            self._was_there = True
            return event
        return {}

    def notify(self, text: str, event: dict[str, Any]) -> None:
        """Post to the webhook in a thread, so that the restart does not wait for it."""
        self.wait()
        if self._config.webhook:
            self._notifier = threading.Thread(target=self._post, args=(text, event), daemon=True)
            self._notifier.start()

    def _post(self, text: str, event: dict[str, Any]) -> None:
        assert self._config.webhook is not None
        problem = post_to_webhook(self._config.webhook, self._config.webhook_form, text, event)
        if problem:
            print_stderr(problem)

    def wait(self) -> None:
        """Wait until the last post was delivered or failed, at most WEBHOOK_SECONDS."""
        if self._notifier is not None:
            self._notifier.join()


def print_stderr(line: str) -> None:
    """Print a line to standard error; ignore failures."""
    with suppress(OSError, ValueError):  # a full disk; a closed stream
        print(line, file=sys.stderr, flush=True)


def post_to_webhook(webhook: str, form: str | None, text: str, event: Mapping[str, Any]) -> str:
    """Post a line to a webhook; return an error message, empty on success.

    A webhook's URL is a secret: anyone who knows it can post. No part of it is ever shown.

    Args:
        webhook: URL.
        form: one of the recipe's WEBHOOK_FORMS; None: chosen by the URL's host.
        text: the line.
        event: also posted in the form json.
    """
    try:
        body = json.dumps(_body(form or form_of(webhook), public(text), event)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "llmfoundry"}
        request = urllib.request.Request(webhook, data=body, headers=headers)
        within(WEBHOOK_SECONDS, lambda: send(request))
    except (OSError, ValueError, http.client.HTTPException, DeadlineExceeded) as error:
        return f"supervise.webhook: nobody was notified: {_reason(error)}"
    return ""


def form_of(webhook: str) -> str:
    """Return the form of a webhook by its host; slack for unknown hosts.

    Mattermost, Rocket.Chat and Google Chat accept Slack's {"text": ...} too.
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


def _body(form: str, text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON body of a post."""

    def truncated(limit: int) -> str:
        return text if len(text) <= limit else f"{text[: limit - 1]}…"

    if form == "slack":  # <...> would be a link or mention; truncates at 40,000 characters
        return {"text": escape(truncated(4000), quote=False)}
    if form == "discord":  # rejects more than 2000 characters
        return {"content": truncated(2000), "allowed_mentions": {"parse": []}}
    if form == "json":
        return {"text": text, "event": public_texts(event)}
    assert form == "teams"  # its workflows accept only adaptive cards
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "TextBlock", "text": truncated(4000), "wrap": True}],
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _reason(error: Exception) -> str:
    """Return why a request failed, without any part of the URL."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            lines = error.read(200).decode(errors="replace").strip().splitlines()
        # show the response if it is one word, such as Slack's `no_service`, and not a page
        is_word = lines and len(lines[0]) <= 40 and lines[0].replace("_", "").isalpha()
        return f"status {error.code} ({lines[0] if is_word else error.reason})"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (
        str(error) if isinstance(error, TimeoutError | DeadlineExceeded) else type(error).__name__
    )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that rejects redirects, which would drop the body and might leak a secret."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(request: urllib.request.Request, *handlers: urllib.request.BaseHandler) -> None:
    """Send an HTTP request. Retries once if the receiver is busy, and follows no redirects.

    Raises:
        OSError: there is no answer, or (HTTPError) the receiver rejects the request.
        ValueError: the URL has no host.
        HTTPException: the URL is not valid, or the answer is not HTTP.
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


# The ranks send events to MLflow and to the store (`loggers/background_queue.py`,
# `checkpoint/record_sync.py`). They have ended at the last decision, so the supervisor starts a
# process that sends it. A store that does not answer then does not block, and the supervisor does
# not import the libraries.


def send_to_mlflow(logger: LoggerConfig, folder: Path, status: str) -> str:
    """Send the tags of an ended run to MLflow; return an error message, empty on success.

    Args:
        logger: logger settings from the recipe.
        folder: folder of the run.
        status: finished, failed or killed, for an MLflow run that is still marked as running.
    """
    if not logger.mlflow or not (folder / RUN_ID_FILE).is_file():
        return ""
    facts = {"uri": logger.tracking_uri, "folder": str(folder.absolute()), "status": status}
    return _send_by_process("MLflow", {"mlflow": facts})


def send_to_store(url: str, options: FetchOptions, folder: Path) -> str:
    """Upload the run's events and record folders; return an error message, empty on success."""
    facts = {"url": url, "options": asdict(options), "folder": str(folder.absolute())}
    return _send_by_process(public(url), {"store": facts})


def _send_by_process(receiver: str, message: dict[str, Any]) -> str:
    """Send a message by a new process of this module; return an error message."""
    process = start_module(
        __name__,
        stdin=subprocess.PIPE,  # other users can read command lines, which must show no URL
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        output, _ = process.communicate(json.dumps(message), timeout=FINAL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait for it: it may hang in a file system
        return f"{receiver} lacks the last decision: no answer in {FINAL_SECONDS:.0f} s"
    if process.returncode:
        why = output.strip() or f"status {process.returncode}"
        return f"{receiver} lacks the last decision: {why}"
    return ""


def main() -> int:
    """Send the message read from standard input; return the exit status."""
    message = json.load(sys.stdin)
    hide({"storage_options": message.get("store", {}).get("options", {}).get("storage_options")})
    hide([value for facts in message.values() for value in facts.values()])
    try:
        if "mlflow" in message:
            facts = message["mlflow"]
            tag_ended(facts["uri"], Path(facts["folder"]), facts["status"])
        else:
            _upload_events(**message["store"])
    except Exception as error:
        with suppress(OSError):
            print(public(describe(error)), flush=True)
        return 1
    return 0


def _upload_events(url: str, options: dict[str, Any], folder: str) -> None:
    from llmfoundry.data.store import Store

    store, local = Store(url, FetchOptions(**options), key="save_folder"), Path(folder)
    sizes = store.files(skip=(CHECKPOINTS,))
    paths = [local / EVENTS]
    for name in FOLDERS:
        paths += local.glob(f"{name}/**/*")
    for path in paths:
        name = path.relative_to(local).as_posix()
        if path.is_file() and sizes.get(name) != path.stat().st_size:
            store.upload(name, path)


if __name__ == "__main__":
    sys.exit(main())
