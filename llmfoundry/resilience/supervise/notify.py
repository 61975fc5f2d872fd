"""Where a supervisor's decisions go: events.jsonl, standard error, a webhook, MLflow, a store.

`supervisor.py` calls `Reporter` for all that it sees and decides, and at the end `send_to_mlflow`
and `send_to_store`. The idea: what cannot be written or does not answer must not keep the
supervisor from its work. A disk may be full, a terminal closed, a server away: each receiver is
tried for a limited time, and none of them raises.

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

ANSWER_SECONDS, RETRY_SECONDS = 10.0, 3.0  # for an answer; before the second try
WEBHOOK_SECONDS = 25.0  # for all of it
FINAL_SECONDS = 60.0  # an import of MLflow takes 2 to 10, a request of its 20 at most
_BUSY = (429, 500, 502, 503, 504)  # HTTP statuses that a moment later may be others


class Reporter:
    """The events of a run, standard error, and a webhook."""

    def __init__(self, config: SuperviseConfig, folder: Path) -> None:
        """For the run of a folder."""
        self._config, self._folder = config, folder
        self._was_there = False
        self._notifier: threading.Thread | None = None

    def report(
        self, kind: str, what: str, action: str, step: int | None = None, **more: Any
    ) -> dict[str, Any]:
        """Add it to the run's events, and print it; the event, empty if it cannot be written."""
        event = self._add(kind, what, action, step, more)
        if kind != "start":
            done = more.get("done") or (action if action != "none" else "")
            print_stderr(f"supervise: {what}" + f"; {done}" * bool(done))
        return event

    def _add(
        self, kind: str, what: str, action: str, step: int | None, more: dict[str, Any]
    ) -> dict[str, Any]:
        if self._was_there and not self._folder.is_dir():
            return {}  # a new folder would be in the way of the one that is brought back
        with suppress(OSError):  # the disk may be what failed
            event = add_event(self._folder, kind, what, step=step, action=action, **more)
            self._was_there = True
            return event
        return {}

    def notify(self, text: str, event: dict[str, Any]) -> None:
        """Post to the webhook while the run is restarted: no answer holds nothing up."""
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
        """Wait until the last post has arrived or failed, at most WEBHOOK_SECONDS."""
        if self._notifier is not None:
            self._notifier.join()


def print_stderr(line: str) -> None:
    """Print a line on standard error, if there is one and it takes it."""
    with suppress(OSError, ValueError):  # a full disk; a stream that is closed
        print(line, file=sys.stderr, flush=True)


def post_to_webhook(webhook: str, form: str | None, text: str, event: Mapping[str, Any]) -> str:
    """Post a line, and in the form json the event that it is about; empty, or why it failed.

    Whoever knows a webhook's address may post to it, so that no part of it is ever shown. `form`:
    one of the recipe's WEBHOOK_FORMS; None: by the URL's host.
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
    """The form that an address takes, by its host; slack where the host is not known.

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


def _body(form: str, text: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """What a receiver takes."""

    def short(most: int) -> str:
        return text if len(text) <= most else f"{text[: most - 1]}…"

    if form == "slack":  # reads <...> as links and mentions, and truncates at 40,000 characters
        return {"text": escape(short(4000), quote=False)}
    if form == "discord":  # refuses more than 2000 characters
        return {"content": short(2000), "allowed_mentions": {"parse": []}}
    if form == "json":
        return {"text": text, "event": public_texts(event)}
    assert form == "teams"  # whose workflows take adaptive cards alone
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": [{"type": "TextBlock", "text": short(4000), "wrap": True}],
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _reason(error: Exception) -> str:
    """Why, without any part of the address."""
    if isinstance(error, urllib.error.HTTPError):
        with error:
            lines = error.read(200).decode(errors="replace").strip().splitlines()
        # The answer is shown if it is a word such as Slack's `no_service`, and not a page.
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
    """Elsewhere a request would arrive without its content, and perhaps with a secret."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(request: urllib.request.Request, *handlers: urllib.request.BaseHandler) -> None:
    """Send an HTTP request, once more where the receiver is busy; no redirection is followed.

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


# The run's own processes send events to MLflow and to the store (`loggers/background_queue.py`,
# `checkpoint/record_sync.py`); after the last decision there are none, so that the supervisor has a
# process of its own send it: a store that does not answer holds nobody up, and the supervisor,
# which lives for days, imports neither.


def send_to_mlflow(logger: LoggerConfig, folder: Path, status: str) -> str:
    """Send the tags of a run that has ended; empty, or why MLflow does not have them.

    `status`: finished, failed or killed, for an MLflow run that is still marked as running.
    """
    if not logger.mlflow or not (folder / RUN_ID_FILE).is_file():
        return ""
    facts = {"uri": logger.tracking_uri, "folder": str(folder.absolute()), "status": status}
    return _send_by_process("MLflow", {"mlflow": facts})


def send_to_store(url: str, options: FetchOptions, folder: Path) -> str:
    """Send the events, and what else is in the run's working copy; empty, or why that failed."""
    facts = {"url": url, "options": asdict(options), "folder": str(folder.absolute())}
    return _send_by_process(public(url), {"store": facts})


def _send_by_process(receiver: str, message: dict[str, Any]) -> str:
    process = start_module(
        __name__,
        stdin=subprocess.PIPE,  # no address on a command line, which everybody sees
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        output, _ = process.communicate(json.dumps(message), timeout=FINAL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: it may hang in a file system
        return f"{receiver} lacks the last decision: no answer in {FINAL_SECONDS:.0f} s"
    if process.returncode:
        why = output.strip() or f"status {process.returncode}"
        return f"{receiver} lacks the last decision: {why}"
    return ""


def main() -> int:
    """Send the message on standard input; the exit status."""
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
    paths = [local / EVENTS, *(path for name in FOLDERS for path in local.glob(f"{name}/**/*"))]
    for path in paths:
        name = path.relative_to(local).as_posix()
        if path.is_file() and sizes.get(name) != path.stat().st_size:
            store.upload(name, path)


if __name__ == "__main__":
    sys.exit(main())
