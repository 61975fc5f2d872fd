"""Common Crawl's WET files: the plain text of web pages, a record a page; called by `readers`.

The format is WARC 1.0 (ISO 28500): a line `WARC/1.0`, header lines, an empty line, as many bytes
as Content-Length specifies, two line ends. Records of type `conversion` hold a page, others are
about the file. Small enough to read here rather than by a library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from llmfoundry.data.preparation.read.open_files import CHUNK, Input, as_file, decode
from llmfoundry.errors import UserError

_LONGEST_LINE = 1 << 16
_MOST_HEADERS = 1 << 10  # lines of a record; Common Crawl's have about ten


def read_wet(source: Input) -> Iterator[tuple[int, str]]:
    """Yield (number of the record from 1, text of its page).

    Raises:
        UserError: the file is not WET, ends too early, or has too long a page; names the record.
    """
    record = 0
    with as_file(source.unpacked()) as file:
        while first := file.readline(_LONGEST_LINE):
            if not first.strip():
                continue  # the line ends after a record
            record += 1
            where = f"{source.name}: record {record}"
            if not first.startswith(b"WARC/"):
                raise UserError(
                    f"{where}: begins with {first[:20]!r}, not WARC/; download it again"
                )
            headers = _headers(file, where)
            length, is_page = _length(headers, where), headers.get("warc-type") == "conversion"
            if is_page and length > source.longest:
                raise source.too_long(where)
            content = []
            while length:  # no more memory than there are bytes, whatever length is named
                part = file.read(min(length, CHUNK))
                if not part:
                    raise UserError(f"{where}: the file ends within it; download it again")
                length -= len(part)
                content += [part] if is_page else []
            if is_page:
                yield record, decode(where, b"".join(content))


def _headers(file: BinaryIO, where: str) -> dict[str, str]:
    """Up to the empty line; names in lower case."""
    headers: dict[str, str] = {}
    while (line := file.readline(_LONGEST_LINE)).strip():
        name, _, value = line.decode("utf-8", "replace").partition(":")
        headers[name.strip().lower()] = value.strip()
        if len(headers) > _MOST_HEADERS:
            raise UserError(f"{where}: has no end of headers; download the file again")
    if not line:
        raise UserError(f"{where}: the file ends within its headers; download it again")
    return headers


def _length(headers: dict[str, str], where: str) -> int:
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 20):
        raise UserError(f"{where}: Content-Length is {length[:40]!r}; download the file again")
    return int(length)
