"""A folder at a URL that is written, too: a run's, with its checkpoints.

`checkpoint` keeps runs in one. The ideas: what is asked is asked again as long as it may pass, as
`Remote` does for shards; a large file goes up in parts, each of which is tried again by itself; a
file counts as written once the store says that it has as many bytes. No store renames atomically
but all of them put one object atomically, so a marker that is written last is a commit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from llmfoundry.data.fetch import remote_errors
from llmfoundry.data.fetch.download import DamagedError, Remote
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_path
from llmfoundry.retry import backoff, retry

Made = TypeVar("Made")

_FIRST_PAUSE_S = 0.5
_PART = 16 << 20  # bytes of a request
_MOST_PARTS = 10_000  # S3's
_THREADS = 8  # requests at a time of a file
_CREATE_REFUSED = (409, 412)  # what stores answer where an object is there already
_READ_ONLY = ("https", "hf")


class ExistsError(Exception):
    """An object that was to be made is there already."""


class ObjectStore(Remote):
    """A folder at a URL, to read and to write; names are paths within it."""

    def __init__(self, url: str, options: FetchOptions, *, key: str) -> None:
        """At `url`; nothing is asked of it yet.

        Args:
            url: the folder.
            options: how it is asked: rights, attempts, patience.
            key: the recipe's, which names the folder.

        Raises:
            UserError: the protocol is not known, or its package or a setting is missing.
        """
        try:
            super().__init__(
                url,
                storage_options={"file": {"auto_mkdir": True}, **options.storage_options},
                retry=options.retry,
                timeout=options.timeout,
                key=key,
            )
        except UserError as error:
            lines = (f"{key}: {line.replace('data.remote', key)}" for line in error.problems)
            raise UserError(*lines) from error

    def check_writable(self) -> None:
        """Refuse what only can be read.

        Raises:
            UserError: it is a web server or a hub.
        """
        if self._backend.kind in _READ_ONLY:
            raise UserError(
                f"{self._key}: {self.url} cannot be written; write an object store's address"
                " (s3, gs, az, oci), or a folder of this machine"
            )

    def folders(self, name: str) -> list[str]:
        """The names of the folders in a folder; none where it is not there."""
        found = self._ask_names(name, lambda files, path: files.ls(path, detail=True))
        return sorted(entry for entry, facts in found.items() if facts["type"] == "directory")

    def files(self, name: str = "", *, skip: Sequence[str] = ()) -> dict[str, int]:
        """Bytes of every file below a folder, by its name in this one; `skip` folders at its top.

        Raises:
            UserError: the store cannot be asked.
        """
        if not skip:
            found = self._ask_names(name, lambda files, path: files.find(path, detail=True))
            prefix = f"{name}/" if name else ""
            self._check_names(found)
            return {
                f"{prefix}{file}": int(facts["size"] or 0)
                for file, facts in found.items()
                if facts["type"] == "file" and file and not file.endswith("/")
            }
        top = self._ask_names(name, lambda files, path: files.ls(path, detail=True))
        self._check_names(top)
        sizes: dict[str, int] = {}
        for entry, facts in top.items():
            if facts["type"] == "file" and entry and not entry.endswith("/"):
                sizes[entry] = int(facts["size"] or 0)
            elif facts["type"] == "directory" and entry.strip("/") not in skip:
                sizes |= self.files(entry.strip("/"))
        return sizes

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where it is not there.

        Raises:
            UserError: the store cannot be asked.
        """
        path = self._path(name)

        def ask() -> int | None:
            files = self._fresh()
            try:
                facts = files.info(path)
            except FileNotFoundError:
                return None
            return int(facts["size"] or 0) if facts["type"] == "file" else None

        return self._persist(name, ask)

    def write(self, name: str, data: bytes, *, new: bool = False) -> None:
        """Write a small file.

        Args:
            name: its path.
            data: its content.
            new: it must not be there yet; not every store looks and writes in one.

        Raises:
            ExistsError: it is there.
            UserError: it cannot be written.
        """
        path, mode = self._path(name), {"mode": "create"} if new else {}

        def put() -> None:
            files = self._backend.file_system()
            try:
                files.pipe_file(path, data, **mode, **self._patience(files, len(data)))
            except Exception as error:
                if new and _says_exists(error):
                    raise ExistsError(name) from error
                raise

        self._persist(name, put)

    def upload(self, name: str, path: Path) -> None:
        """Write a file of this machine; it may be of any size, and may only grow meanwhile.

        Raises:
            UserError: it cannot be written.
            OSError: it cannot be read.
        """
        size = path.stat().st_size
        if size <= _PART:
            data = path.read_bytes()
            size = len(data)
            self.write(name, data)
        elif self._backend.protocol == "s3":
            self._upload_parts(name, path, size)
        else:
            files, target = self._backend.file_system(), self._path(name)
            patience = self._patience(files, size)
            self._persist(name, lambda: files.put_file(str(path), target, **patience))
        found = self.size(name)
        if found != size:
            raise UserError(
                f"{self._where(name)}: has {found} bytes after {size} were sent; the store or what"
                " is before it loses data"
            )

    def download(self, name: str, path: Path, n_bytes: int) -> None:
        """Fetch a file, atomically, in several requests at a time.

        Raises:
            UserError: it cannot be had.
            DamagedError: it is shorter than `n_bytes`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, partial.open("wb") as file:

            def fetch(start: int) -> None:
                place, end = start, min(start + _PART, n_bytes)
                while place < end:
                    part = self.part(name, place, end - place)
                    if not part:
                        raise DamagedError(f"ends after {place} bytes of {n_bytes}")
                    os.pwrite(file.fileno(), part, place)
                    place += len(part)

            _all_at_once(fetch, range(0, n_bytes, _PART))

    def delete(self, names: Iterable[str]) -> None:
        """Remove files; those that are not there are no error.

        Raises:
            UserError: the store refuses.
        """
        paths = [self._path(name) for name in names]
        files = self._backend.file_system()
        if not paths:
            return

        def remove() -> None:
            if self._backend.protocol == "s3" and not any(set("*?[") & set(p) for p in paths):
                files.rm(paths)
                return
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(path)
                if self._backend.protocol == "file":  # in which empty folders are something
                    with contextlib.suppress(OSError):
                        for above in Path(path).parents:
                            above.rmdir()

        self._persist(names_of(paths), remove)

    def _upload_parts(self, name: str, path: Path, size: int) -> None:
        """By S3's parts: a part that fails is sent again, not the file."""
        files = self._backend.file_system()
        bucket, key, _ = files.split_path(self._path(name))
        where = {"Bucket": bucket, "Key": key}
        step = max(_PART, -(-size // _MOST_PARTS))

        def call(operation: str, **arguments: Any) -> Any:
            patience = self._patience(files, step)
            return self._persist(
                name, lambda: files.call_s3(operation, **where, **arguments, **patience)
            )

        upload = call("create_multipart_upload")["UploadId"]

        def send(start: int) -> dict[str, Any]:
            number = start // step + 1
            with path.open("rb") as file:
                file.seek(start)
                body = file.read(min(step, size - start))
            sent = call("upload_part", UploadId=upload, PartNumber=number, Body=body)
            return {"PartNumber": number, "ETag": sent["ETag"]}

        try:
            parts = _all_at_once(send, range(0, size, step))
            call("complete_multipart_upload", UploadId=upload, MultipartUpload={"Parts": parts})
        except Exception:
            with contextlib.suppress(Exception):  # what is left costs money, and is no file
                files.call_s3("abort_multipart_upload", **where, UploadId=upload)
            if self.size(name) != size:  # the answer to the last call may be what was lost
                raise

    def _ask_names(self, name: str, ask: Callable[[Any, str], Any]) -> dict[str, dict[str, Any]]:
        """What a listing gives, by the names within the folder that is listed."""
        path = self._path(name)

        def find() -> dict[str, dict[str, Any]]:
            files = self._fresh()
            try:
                found = ask(files, path)
            except FileNotFoundError as error:
                if remote_errors.is_no_bucket(error):
                    raise
                return {}
            rows = found.values() if isinstance(found, dict) else found
            prefix = path.strip("/") + "/"
            return {
                row["name"].strip("/").removeprefix(prefix): row
                for row in rows
                if row["name"].strip("/").startswith(prefix)
            }

        return self._persist(name, find)

    def _check_names(self, names: Iterable[str]) -> None:
        """Refuse what would lead out of the folder into which it is fetched."""
        for name in names:
            if ".." in name.split("/") or name.startswith("/") or not name.isprintable():
                raise UserError(f"{self._where('')}: {name!r} cannot be the name of a run's file")

    def _where(self, name: str) -> str:
        return f"{self._key}: {super()._where(name)}"

    def _path(self, name: str) -> str:
        return f"{self._backend.root}/{name}" if name else self._backend.root

    def _fresh(self) -> Any:
        """The file system, which forgets what it was given earlier."""
        files = self._backend.file_system()
        files.invalidate_cache()
        return files

    def _patience(self, files: Any, size: int) -> dict[str, float]:
        """Bounds a call that may take longer the more it sends."""
        if not files.async_impl:
            return {}
        return {"timeout": self._timeout * max(1, -(-size // _PART))}

    def _persist(self, name: str, call: Callable[[], Made]) -> Made:
        """What `call` gives, tried again where that may help."""

        def again(error: Exception, failures: int) -> float:
            if isinstance(error, ExistsError):
                raise error
            if failures > self._retry or not remote_errors.is_passing(error):
                raise self._failed(name, error, failures) from error
            return backoff(failures, first=_FIRST_PAUSE_S)

        return retry(call, again=again)


def names_of(paths: Sequence[str]) -> str:
    """A few paths for a message."""
    last = paths[0].rpartition("/")[2]
    return last if len(paths) == 1 else f"{last} and {len(paths) - 1} others"


def _says_exists(error: BaseException) -> bool:
    return isinstance(error, FileExistsError) or remote_errors.status(error) in _CREATE_REFUSED


def _all_at_once(work: Callable[[int], Made], starts: Iterable[int]) -> list[Made]:
    """The results of all, in order; the first error once those that run have ended."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="store") as pool:
        futures = [pool.submit(work, start) for start in starts]
        try:
            return [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
