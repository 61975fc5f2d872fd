"""A request that is sent where it is addressed, or nowhere: to a webhook, or to a cluster's API.

`notify` and `kubernetes` call `send`. What fails is theirs to tell, each in its words.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Any

ANSWER, PAUSE = 10.0, 3.0  # seconds: for an answer, before the second try
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
        opener.open(request, timeout=ANSWER).close()
    except urllib.error.HTTPError as error:
        if error.code not in _BUSY:
            raise
        error.close()
        time.sleep(PAUSE)
        opener.open(request, timeout=ANSWER).close()
