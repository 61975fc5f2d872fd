"""A part of a file of a web server, as long as bytes keep coming.

`remote.Remote` asks web servers by this, other stores by fsspec. One idea: many a server knows no
ranges and answers with the whole file; so the answer is read as it comes, and its size says nothing
about how long that may take.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fsspec.asyn import sync


def http_part(
    files: Any, url: str, start: int, end: int, *, timeout: float, step: int, most: int
) -> bytes:
    """The bytes from `start` to before `end`, or to the file's end.

    Args:
        files: fsspec's file system.
        url: of the file.
        start: 0 is the file's first byte.
        end: the first byte that is not wanted.
        timeout: seconds; for the server's answer, and for each `step` bytes of it.
        step: bytes.
        most: bytes to take from `start` on, beyond `end`, of a server that sends the whole file.

    Raises:
        TimeoutError: the server is too slow.
        Exception: whatever fsspec and aiohttp raise.
    """
    return bytes(sync(files.loop, _get, files, url, start, end, timeout, step, most))


async def _get(
    files: Any, url: str, start: int, end: int, timeout: float, step: int, most: int
) -> bytearray:
    session = await files.set_session()
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    options = {**files.kwargs, "headers": {**files.kwargs.get("headers", {}), **headers}}
    request = session.get(files.encode_url(url), **options)
    answer = await asyncio.wait_for(request.__aenter__(), timeout)
    try:
        files._raise_not_found_for_status(answer, url)
        skip, wanted = (0, end - start) if answer.status == 206 else (start, most)
        found = bytearray()
        while len(found) < wanted:
            size = min(step, skip + wanted - len(found))
            chunk = await asyncio.wait_for(_filled(answer.content, size), timeout)
            if not chunk:
                break
            found += chunk[skip:]
            skip = max(0, skip - len(chunk))
        return found
    finally:
        answer.close()  # also where the server keeps sending


async def _filled(stream: Any, n_bytes: int) -> bytearray:
    """The next bytes; fewer only at the end."""
    found = bytearray()
    while len(found) < n_bytes and (chunk := await stream.read(n_bytes - len(found))):
        found += chunk
    return found
