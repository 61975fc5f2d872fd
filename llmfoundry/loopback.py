"""This machine's own addresses, and requests that name one of them.

A server without a key that listens at such an address answers to nothing else: a page in a browser
can have its own name point at 127.0.0.1 (DNS rebinding), and then sends that name as Host.
"""

from __future__ import annotations

import ipaddress
import re

REFUSAL = "this server has no API key and answers to localhost alone; ask http://localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z.-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Whether a host is localhost, or an address of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def names_loopback(header: str) -> bool:
    """Whether a Host header, as it was sent, names this machine; one that is malformed does not."""
    match = _HOST.fullmatch(header)
    return match is not None and is_loopback(match[1].strip("[]").lower())
