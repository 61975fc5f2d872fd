"""A file at a URL as a seekable one: each request is for what is about to be read.

`preparation.files` reads corpora so, and a checkpoint's reader the tensors that a process needs.
"""

from __future__ import annotations

import io
from typing import Any, Protocol

from llmfoundry.errors import UserError

_BUFFER = 8 << 20  # bytes of a request


class Parts(Protocol):
    """A folder whose files are read part by part.

    Attributes:
        url: for messages.
    """

    url: str

    def part(self, name: str, start: int, n_bytes: int) -> bytes:
        """At most `n_bytes` from `start` on; none after the end."""


def open_parts(folder: Parts, name: str, size: int) -> io.BufferedReader:
    """A file of known size, to read at any place."""
    return io.BufferedReader(_RemoteFile(folder, name, size), _BUFFER)


class _RemoteFile(io.RawIOBase):
    def __init__(self, folder: Parts, name: str, size: int) -> None:
        self._folder, self._name, self._size = folder, name, size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = start + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        left = min(len(buffer), self._size - self._place)
        if left <= 0:
            return 0
        data = self._folder.part(self._name, self._place, left)
        if not data:
            raise UserError(
                f"{self._folder.url}/{self._name}: ends after {self._place} bytes of"
                f" {self._size}; it changed while it was read: start again"
            )
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)
