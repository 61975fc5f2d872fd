"""Webhooks get every decision in their form; where they do not, their address is not shown."""

from __future__ import annotations

import errno
import html
import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from llmfoundry.events import read_events
from llmfoundry.recipe.resilience import SuperviseConfig
from llmfoundry.resilience.supervise import notify
from llmfoundry.resilience.supervise.attempt import make_ends_folder
from llmfoundry.resilience.supervise.notify import form_of, post_to_webhook
from tests.resilience.test_supervisor import Place

SECRET = "T0/B0/kanarie"
EVENT = {"kind": "decision", "what": "rank 1 at http://me:pass@host hangs", "action": "restart"}


class Hook:
    """A webhook on loopback with answers to give, and what it received."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.answers: list[tuple[int, str]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                hook.received.append(json.loads(body))
                status, said = hook.answers.pop(0) if hook.answers else (200, "ok")
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", said)
                self.end_headers()
                self.wfile.write(said.encode())

            do_GET = do_POST

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/{SECRET}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    made = Hook()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_each_receiver_gets_what_it_takes(hook: Hook) -> None:
    text = "run <!channel> & co: http://me:pass@host" + "x" * 50_000
    for form in (None, "discord", "teams", "json"):
        assert post_to_webhook(hook.url, form, text, EVENT) == ""
    slack, discord, teams, plain = hook.received
    # docs.slack.dev: &, < and > are escaped, or `<!channel>` would call everybody.
    assert slack["text"].startswith("run &lt;!channel&gt; &amp; co: http://me:***@host")
    assert len(html.unescape(slack["text"])) == 4000 and [*slack] == ["text"]
    # discord.com/developers: content has at most 2000 characters.
    assert len(discord["content"]) == 2000
    assert discord["allowed_mentions"] == {"parse": []}
    # learn.microsoft.com: a message with one attachment, an adaptive card.
    (card,) = teams["attachments"]
    assert teams["type"] == "message"
    assert card["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert card["content"]["body"][0]["text"].startswith("run <!channel>")
    assert plain["event"]["what"] == "rank 1 at http://me:***@host hangs"
    assert "pass@" not in json.dumps(hook.received)


def test_the_form_goes_by_the_host() -> None:
    addresses = {
        "https://hooks.slack.com/services/x": "slack",
        "https://discord.com/api/webhooks/1/x": "discord",
        "https://prod-1.westeurope.logic.azure.com:443/workflows/x": "teams",
        "https://acme.webhook.office.com/webhookb2/x": "teams",
        "https://notdiscord.com/x": "slack",
        "http://10.0.0.1/hooks/x": "slack",
    }
    assert {url: form_of(url) for url in addresses} == addresses


def test_one_that_is_busy_is_asked_again(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_SECONDS", 0.0)
    hook.answers = [(429, "rate_limited")]
    assert post_to_webhook(hook.url, None, "x", EVENT) == ""
    hook.answers = [(503, ""), (503, "")]
    assert post_to_webhook(hook.url, None, "x", EVENT).endswith("status 503 (Service Unavailable)")
    assert len(hook.received) == 4


def test_what_fails_is_reported_without_the_address(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.answers = [(404, "no_service"), (400, f"<html>{hook.url}"), (302, hook.url)]
    reported = [post_to_webhook(hook.url, None, "x", EVENT) for _ in range(3)]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        reported.append(
            post_to_webhook(f"http://127.0.0.1:{closed.getsockname()[1]}/{SECRET}", None, "x", {})
        )
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(notify, "WEBHOOK_SECONDS", 0.3)
        port = silent.getsockname()[1]
        reported.append(post_to_webhook(f"http://127.0.0.1:{port}/{SECRET}", None, "x", {}))
    reported.append(post_to_webhook(f"http://host/{SECRET} x\n", None, "x", {}))
    reported.append(post_to_webhook(f"http://[::1/{SECRET}", None, "x", {}))
    assert [line.removeprefix("supervise.webhook: nobody was notified: ") for line in reported] == [
        "status 404 (no_service)",
        "status 400 (Bad Request)",
        "status 302 (Found)",
        "Connection refused",
        "no answer within 0.3 s",
        "InvalidURL",
        "ValueError",
    ]
    assert len(hook.received) == 3  # nobody followed the redirection


def test_a_webhook_gets_every_decision_and_may_be_away(tmp_path: Path, hook: Hook) -> None:
    place = Place(tmp_path)
    assert place.supervise(["killed"], webhook=hook.url) == 0
    first, second = [message["text"] for message in hook.received]
    assert "attempt 1 ended: unknown: " in first and first.endswith("; restart")
    assert "attempt 2 ended: the run is complete; finish" in second
    hook.server.shutdown()
    hook.server.server_close()
    assert place.supervise([], webhook=hook.url) == 0  # nobody listens any more
    assert "supervise.webhook: nobody was notified: Connection refused" in place.said
    assert "kanarie" not in place.said + json.dumps([*read_events(place.run)])


@pytest.mark.parametrize("log", ["full", "closed", "none", "disk"])
def test_where_nothing_can_be_written_the_run_is_still_restarted_and_reported(
    tmp_path: Path, hook: Hook, log: str
) -> None:
    """A log on a full disk, a pipe whose reader has left, no standard error, a full run folder."""
    place = Place(tmp_path)
    read, write = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    target = {"full": full, "closed": write, "none": subprocess.DEVNULL, "disk": full}[log]
    if log == "disk":
        (place.run / "events.jsonl").symlink_to("/dev/full")
    plan, config = ["killed"], {"webhook": hook.url}
    process = place.start(plan, stdout=target, stderr=target, no_stderr=log == "none", **config)
    os.close(write)
    os.close(full)
    process.communicate(timeout=100)
    assert process.returncode == 0
    first, second = [message["text"] for message in hook.received]
    assert first.endswith("; restart") and second.endswith("the run is complete; finish")
    if log != "disk":
        assert place.decisions() == [("unknown", "restart"), ("done", "finish")]


def test_a_full_disk_leaves_the_last_words_of_processes_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", refuse)
    found = make_ends_folder(tmp_path / "supervise", 1, tmp_path / "beats" / "0")
    assert found == tmp_path / "beats" / "0-ends"


def test_a_supervisor_that_fails_itself_reports_the_webhook(tmp_path: Path, hook: Hook) -> None:
    place = Place(tmp_path)
    assert place.supervise([], webhook=hook.url, launch=["nosuchprogram"]) == 1
    (message,) = hook.received
    assert "the supervisor failed: supervise.launch: 'nosuchprogram' cannot" in message["text"]
    assert [event["action"] for event in place.events("decision")] == ["stop"]


@pytest.mark.parametrize("url", ["hooks/x", "ftp://h/x", "http://", "http://h/a b", "http://[::1"])
def test_what_is_no_address_is_refused_without_showing_it(url: str) -> None:
    (line,) = SuperviseConfig(webhook=url).check()
    assert line == "supervise.webhook: is not a URL; write one that begins with https://"


def test_a_form_without_a_webhook_has_no_effect() -> None:
    (line,) = SuperviseConfig(webhook_form="teams").check()
    assert line.startswith("supervise.webhook_form") and "without supervise.webhook" in line
