"""A decision to a webhook, in the form that its receiver takes.

The supervisor calls `notify`. The idea: it is told or not told within seconds, whoever does not
answer; and a webhook's address lets whoever knows it in, so that nothing of it is ever said.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from llmfoundry.recipe.resilience.supervise import WEBHOOK_FORMS
from llmfoundry.redaction import public, public_texts
from llmfoundry.resilience.supervise.request import send
from llmfoundry.retry import Late, within

_PATIENCE = 25.0  # seconds


def notify(webhook: str, form: str | None, text: str, event: Mapping[str, Any]) -> str:
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
        within(_PATIENCE, lambda: send(request))
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
