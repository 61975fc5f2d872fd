"""Input files at URLs: which there are, and one of them as a seekable file.

`inputs` lists with it and `open_files` reads. Requests are those of `remote`: by parts, tried again
where that may help.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Mapping
from typing import Any

from llmfoundry.data.fetch import remote_errors
from llmfoundry.data.fetch.download import MissingError, Remote
from llmfoundry.data.fetch.remote_backends import Backend, backend_for
from llmfoundry.data.fetch.remote_file import open_parts
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.retry import backoff, retry


def list_url(
    url: str, options: FetchOptions, *, key: str = "data.paths"
) -> tuple[bool, list[tuple[str, int, str]]]:
    """What a URL of a file, a folder or a glob names.

    Args:
        url: see above.
        options: how it is asked for.
        key: what the recipe calls it.

    Returns:
        Whether it is one file; and of each file, sorted by name, its URL, size and version.

    Raises:
        MissingError: there is nothing.
        UserError: it cannot be reached.
    """
    backend = backend_for(url.rstrip("/"), options.storage_options, options.timeout)

    def again(error: Exception, failures: int) -> float:
        if failures <= options.retry and remote_errors.is_passing(error):
            return backoff(failures)
        line = remote_errors.remote_problem(
            error, kind=backend.kind, attempts=failures, timeout=options.timeout
        )
        kind = MissingError if remote_errors.is_missing(error) else UserError
        raise kind(f"{key}: {url}: {line}") from error

    found = retry(lambda: _find(backend), again=again)
    found = {name: entry for name, entry in found.items() if entry["type"] == "file"}
    if not found:
        raise MissingError(f"{key}: {url}: no file is there; correct the URL")
    base, root = url.rstrip("/"), backend.root
    if glob.has_magic(url):
        base, root = _before_magic(base), _before_magic(root)
    for name, entry in found.items():
        if entry.get("size") is None:  # it would be read as empty
            raise UserError(
                f"{key}: {url}: its server does not say how long {name} is; copy it here"
            )
    files = [
        (base + name.removeprefix(root), int(entry["size"]), _version(entry))
        for name, entry in sorted(found.items())
    ]
    return list(found) == [backend.root], files


def open_url(url: str, size: int, options: FetchOptions) -> io.BufferedReader:
    """A file of known size, to read at any place.

    Raises:
        UserError: the protocol is not known, or its package or a setting is missing.
    """
    folder, _, name = url.rpartition("/")
    remote = Remote(
        folder,
        storage_options=options.storage_options,
        retry=options.retry,
        timeout=options.timeout,
    )
    return open_parts(remote, name, size)


def _find(backend: Backend) -> dict[str, Mapping[str, Any]]:
    files, root = backend.file_system(), backend.root
    if glob.has_magic(root):
        return dict(files.glob(root, detail=True))
    if files.isdir(root):
        return dict(files.find(root, detail=True))
    return {root: files.info(root)}


def _before_magic(path: str) -> str:
    """The part of a glob that stands for itself."""
    return path[: min(path.find(c) for c in "*?[" if c in path)]


def _version(entry: Mapping[str, Any]) -> str:
    """A store's mark of a file, which is another after a change."""
    keys = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated")
    return str(next((entry[key] for key in keys if entry.get(key)), ""))
