"""Loopback addresses, and HTTP requests for them.

A server without an API key at a loopback address only answers requests whose Host header names a
loopback address. This protects against DNS rebinding, where a web page resolves its own host name
to 127.0.0.1.
"""

from __future__ import annotations

import ipaddress
import re

REFUSAL = "this server has no API key and answers to localhost alone; ask http://localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[0-9a-z.-]+)(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def is_loopback(host: str) -> bool:
    """Return whether a host is localhost or a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def names_loopback(header: str) -> bool:
    """Return whether a Host header names a loopback address; false for a malformed header."""
    match = _HOST.fullmatch(header)
    return match is not None and is_loopback(match[1].strip("[]").lower())
