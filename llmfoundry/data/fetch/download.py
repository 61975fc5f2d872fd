"""Files at a URL, by parts and with patience.

`shard_fetch` downloads with it and `ShardFolder` reads an index. fsspec does the talking, each of
its backends is a package of its own. One idea: a file is asked for part by part, so that each
request is short and what fails is one part, not the file. "No progress" is that 256 kB take longer
than the timeout: a larger part that does is asked for again as one of 256 kB, and only if that
takes too long, too, has a request failed. So a slow line passes and a trickle does not.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from llmfoundry.data.fetch import remote_errors
from llmfoundry.data.fetch.http_part import http_part
from llmfoundry.data.fetch.remote_backends import backend_for, without_secrets
from llmfoundry.errors import UserError
from llmfoundry.retry import backoff, retry

_PART = 16 << 20  # bytes of a request: at 100 MB/s its overhead is below a tenth
_SMALLEST_PART = 1 << 18  # what has to come within the timeout
_GROWTH = 4  # of the parts, once they come in less than half of that part of the timeout
_ENDLESS = 1 << 62
_BACKOFF_S = 0.5


class DamagedError(Exception):
    """A file that is not what its index specifies."""


class MissingError(UserError):
    """There is no such file, folder or bucket."""


class CancelledError(Exception):
    """The download is not wanted any more."""


class Remote:
    """A folder at a URL."""

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any],
        retry: int,
        timeout: float,
        before_request: Callable[[], float] = lambda: 0.0,
        key: str = remote_errors.DATA_KEY,
    ) -> None:
        """At `url`; nothing is asked of it yet.

        Args:
            url: the folder.
            storage_options: what the file systems take, by protocol.
            retry: attempts after a failure that may pass; any part that arrives counts them anew.
            timeout: seconds.
            before_request: called before each request; returns how many seconds to wait.
            key: the recipe's, which names the folder; for messages.

        Raises:
            UserError: the protocol is not known, or its package or a setting is missing.
        """
        self.url = without_secrets(url).rstrip("/")
        self._backend = backend_for(url.rstrip("/"), storage_options, timeout)
        self._key = key
        self._retry = retry
        self._timeout = timeout
        self._before_request = before_request
        self._part = _PART
        self._never = threading.Event()

    @property
    def identity(self) -> str:
        """What distinguishes this folder from any other, also of another endpoint; no secrets."""
        endpoint = self._backend.options.get("endpoint_url") or ""
        return f"{self.url} {without_secrets(endpoint)}".rstrip()

    def read(self, name: str, *, once: bool = False) -> bytes:
        """A complete file of unknown size; `once`: what fails is not retried.

        Raises:
            UserError: it is not there, or cannot be had.
        """
        for last in (False, True):
            target = io.BytesIO()
            try:
                self.fetch(name, target, n_bytes=None, once=once)
                break
            except DamagedError as error:
                if last:
                    raise UserError(
                        f"{self.url}/{name}: {error}, also when it was fetched again"
                    ) from error
        return target.getvalue()

    def fetch(
        self,
        name: str,
        target: IO[bytes],
        *,
        n_bytes: int | None,
        cancelled: threading.Event | None = None,
        once: bool = False,
    ) -> None:
        """Write a file to `target`, from its present position on.

        Args:
            name: path within the folder.
            target: it may hold a part of the file after an error.
            n_bytes: the size that it must have; None: unknown.
            cancelled: set by another thread to end this early.
            once: what fails is not tried again.

        Raises:
            UserError: it cannot be had.
            DamagedError: it is shorter or longer than `n_bytes`.
            CancelledError: as asked for.
        """
        offset = 0
        ended = False
        while not ended and (n_bytes is None or offset <= n_bytes):
            # A known size is reached by asking for a byte more: it shows a file that is too long.
            left = _ENDLESS if n_bytes is None else n_bytes - offset + 1
            part, asked = self._request(
                name, offset, left, cancelled or self._never, once=once, whole=True
            )
            target.write(part)
            offset += len(part)
            ended = not part or len(part) > asked  # a server without ranges sends all
            ended |= len(part) < asked and (n_bytes is None or offset == n_bytes)
        if n_bytes is not None and offset != n_bytes:
            raise DamagedError(
                f"ends after {offset} bytes, its index specifies {n_bytes}"
                if offset < n_bytes
                else f"is longer than the {n_bytes} bytes that its index specifies"
            )

    def part(self, name: str, start: int, n_bytes: int) -> bytes:
        """At most `n_bytes` from `start` on; none after the end.

        Raises:
            UserError: it cannot be had.
        """
        return self._request(name, start, n_bytes, self._never)[0]

    def _request(
        self,
        name: str,
        offset: int,
        left: int,
        cancelled: threading.Event,
        *,
        once: bool = False,
        whole: bool = False,
    ) -> tuple[bytes, int]:
        """Bytes from `offset` on, at most `left`; and how many were asked for.

        More than those come with `whole` only, of a server that sends whole files.
        """

        def ask() -> tuple[bytes, int]:
            if cancelled.wait(self._before_request()):
                raise CancelledError
            # With the byte more, so that a file of just this size is one request.
            size = min(left, self._part + 1)
            began = time.monotonic()
            try:
                most = left if whole else size
                part = self._ask(f"{self._backend.root}/{name}", offset, offset + size, most=most)
            except Exception as error:
                if remote_errors.is_past_end(error):
                    return b"", size
                if remote_errors.is_damaged(error):
                    raise DamagedError(remote_errors.in_one_line(error)) from error
                if remote_errors.is_timeout(error) and size > _SMALLEST_PART + 1:
                    self._part = _SMALLEST_PART
                    return ask()
                raise
            if (time.monotonic() - began) * _GROWTH < self._timeout / 2:
                self._part = min(_PART, _GROWTH * self._part)
            return part, size

        def again(error: Exception, failures: int) -> float:
            if isinstance(error, CancelledError | DamagedError):
                raise error
            most = 0 if once else self._retry
            if failures > most or not remote_errors.is_passing(error):
                raise self._failed(name, error, failures) from error
            return backoff(failures, first=_BACKOFF_S)

        return retry(ask, again=again, wait=cancelled.wait)

    def _ask(self, path: str, start: int, end: int, *, most: int) -> bytes:
        files, timeout = self._backend.file_system(), self._timeout
        if self._backend.kind == "https":
            return http_part(
                files, path, start, end, timeout=timeout, step=_SMALLEST_PART, most=most
            )
        if files.async_impl:
            return bytes(files.cat_file(path, start=start, end=end, timeout=timeout))
        return _within(timeout, lambda: bytes(files.cat_file(path, start=start, end=end)))

    def _failed(self, name: str, error: Exception, attempts: int) -> UserError:
        line = remote_errors.remote_problem(
            error,
            kind=self._backend.kind,
            attempts=attempts,
            timeout=self._timeout,
            bucket=self._backend.bucket,
            key=self._key,
        )
        kind = MissingError if remote_errors.is_missing(error) else UserError
        return kind(f"{self._where(name)}: {line}")

    def _where(self, name: str) -> str:
        """A file, as messages call it."""
        return f"{self.url}/{name}"


def _within(seconds: float, call: Callable[[], bytes]) -> bytes:
    """What `call` returns or raises, unless it takes too long: then it is left to itself."""
    answer: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def run() -> None:
        try:
            answer.put(call())
        except Exception as error:
            answer.put(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        found = answer.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise found
    return found
