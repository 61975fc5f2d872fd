"""A line to a webhook, in the form that Slack's incoming webhooks take."""

from __future__ import annotations

import json
import urllib.request

from llmfoundry.masking import public

_PATIENCE = 10.0  # seconds


def notify(webhook: str, text: str) -> str:
    """Post {"text": text}; empty, or why it did not get there. No secret is shown in either."""
    body = json.dumps({"text": public(text)}).encode()
    try:
        request = urllib.request.Request(
            webhook, data=body, headers={"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=_PATIENCE).close()
    except (OSError, ValueError) as error:
        return f"supervise.webhook: nobody was told: {public(str(error))}"
    return ""
