"""Clients of remote stores: obstore for buckets, the standard library for HTTP, fsspec otherwise.

`store.Store` calls the client of its address. A client tries each request once, and the store
retries it. obstore has Rust threads that do not survive a fork, so a process that was forked after
a bucket request raises an error.
"""

from __future__ import annotations

import base64
import errno
import http.client
import json
import os
import re
import stat
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Protocol, cast
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import fsspec

from llmfoundry.data.store_address import EXTRAS, Address
from llmfoundry.data.store_errors import RequestError, answer_of, answer_of_web
from llmfoundry.errors import UserError, import_optional
from llmfoundry.files import parse_json, read_guarded
from llmfoundry.retry import within

STEP = 1 << 18  # bytes that have to come within the timeout
_FIRST_PAUSE = timedelta(seconds=0.5)  # between two attempts at a part of an upload
_LONGEST_PAUSE = timedelta(seconds=30)
_LONGEST_ATTEMPT = timedelta(minutes=10)  # a signature holds for 15
_PARTS = 8  # requests at a time of an upload

_made: dict[tuple[int, str], Client] = {}
_first_pid = 0  # of the process whose obstore has begun


@dataclass(frozen=True)
class Entry:
    """A file or a folder of a listing.

    Attributes:
        name: as the store names it, with its bucket.
        size: bytes; None: not known.
        version: another after a change.
    """

    name: str
    size: int | None = None
    version: str = ""
    is_folder: bool = False


class LocalFileError(Exception):
    """A file of this machine that was to be sent cannot be read; its cause says why."""


class Client(Protocol):
    """What is asked of a store. A path begins with the bucket.

    Attributes:
        steady: `read` ends what makes no progress, so parts may be of any size.
    """

    steady: bool

    def read(self, path: str, start: int, end: int, most: int) -> Iterable[bytes]:
        """The bytes from `start` to before `end`; at most `most`, of one that sends all it has."""

    def info(self, path: str) -> Entry:
        """One file or folder; what says 404 is raised if there is none."""

    def entries(self, path: str, *, deep: bool) -> list[Entry]:
        """What is in a folder, or all files below it; where none is there: nothing, or a 404."""

    def put(self, path: str, data: bytes, *, new: bool) -> None:
        """A file; `new`: which is not there yet."""

    def upload(self, path: str, file: Path, size: int, part: int) -> None:
        """The first `size` bytes of a large file of this machine, `part` bytes a request."""

    def delete(self, paths: list[str]) -> None:
        """Files; those that are not there are no error."""


def client_of(address: Address) -> Client:
    """This process' client, one for all folders with the same settings."""
    # A forked child cannot use its parent's threads and sockets, so each process has its own.
    bucket = address.bucket if address.protocol in _BUCKETS else ""
    settings = [address.protocol, bucket, address.options, address.timeout, address.retry]
    key = (os.getpid(), json.dumps(settings, sort_keys=True, default=str))
    if key not in _made:
        # Of two threads one wins; the loser's has no connection yet.
        kind = Bucket if bucket else Web if address.protocol == "https" else FileSystem
        _made.setdefault(key, kind(address))
    return _made[key]


def steady(chunks: Iterable[bytes], timeout: float) -> Iterator[bytes]:
    """The chunks of an answer, as long as `STEP` bytes, or its end, come within the timeout.

    Raises:
        TimeoutError: too little came.
    """
    began, size = time.monotonic(), 0
    for chunk in chunks:
        size += len(chunk)
        if time.monotonic() - began > timeout:
            raise TimeoutError
        if size >= STEP:
            began, size = time.monotonic(), 0
        yield chunk


# ---------------------------------------------------------------- S3, Google and Azure: obstore


@dataclass
class _Settings:
    """What obstore makes a store with."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    provider: Callable[[], dict[str, Any]] | None = None


class Bucket:
    """A bucket, or container, of an object store."""

    steady = True

    def __init__(self, address: Address) -> None:
        global _first_pid
        _first_pid = _first_pid or os.getpid()
        if _first_pid != os.getpid():
            raise RuntimeError(
                "a forked process cannot use its parent's stores; start it by spawn or forkserver"
            )
        self._obstore: Any = import_optional("obstore", address.kind, extra=EXTRAS[address.kind])
        self._stores: Any = import_optional("obstore.store", address.kind)
        self._address = address
        self._settings = _BUCKETS[address.protocol](address)
        self._made: dict[tuple[int, float], Any] = {}
        # Google's S3 interface has no deletion of many.
        self._deletes_many = address.kind in ("s3", "oci")

    def read(self, path: str, start: int, end: int, most: int) -> Iterator[bytes]:  # noqa: D102
        with self._asked("GetObject"):
            # Whole parts of a slow line: what comes too slowly is ended by `steady`.
            store = self._store(0, self._address.timeout * (end - start + STEP) / STEP)
            answer = self._obstore.get(store, self._key(path), options={"range": (start, end)})
            chunks = map(bytes, answer.stream(min_chunk_size=1))
            yield from steady(chunks, self._address.timeout)

    def info(self, path: str) -> Entry:  # noqa: D102
        try:
            with self._asked("HeadObject"):
                found = self._obstore.head(self._once(), self._key(path))
        except RequestError as error:
            if error.status in (400, 403) and not error.error_code:
                self._raise_reason(path, error)
            raise
        return self._entry(found)

    def _raise_reason(self, path: str, error: RequestError) -> None:
        """An answer to HEAD has no words; that to GET says what was refused, if not the right."""
        try:
            list(self.read(path, 0, 1, 1))
        except RequestError as told:
            if told.error_code not in ("", "AccessDenied"):
                raise told from error

    def entries(self, path: str, *, deep: bool) -> list[Entry]:  # noqa: D102
        prefix = self._key(path) or None
        with self._asked("ListObjectsV2"):
            if deep:
                pages = self._obstore.list(self._once(), prefix)
                return [self._entry(found) for page in pages for found in page]
            found = self._obstore.list_with_delimiter(self._once(), prefix)
        bucket = self._address.bucket
        folders = [Entry(f"{bucket}/{n}", is_folder=True) for n in found["common_prefixes"]]
        return folders + [self._entry(one) for one in found["objects"]]

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        with self._asked("PutObject"):
            mode = "create" if new else "overwrite"
            key = self._key(path)
            self._obstore.put(self._once(), key, data, mode=mode, use_multipart=False)

    def upload(self, path: str, file: Path, size: int, part: int) -> None:
        """Each part that fails is sent again by itself."""
        store = self._store(self._address.retry, self._address.timeout * max(1, part / (16 << 20)))
        broken: list[OSError] = []

        def parts() -> Iterator[bytes]:
            try:
                with file.open("rb") as source:
                    for start in range(0, size, part):
                        yield source.read(min(part, size - start))
            except OSError as error:
                broken.append(error)
                raise

        with self._asked("PutObject"):
            try:
                self._obstore.put(
                    store,
                    self._key(path),
                    parts(),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=_PARTS,
                )
            except Exception:
                if broken:
                    raise LocalFileError from broken[0]
                raise

    def delete(self, paths: list[str]) -> None:  # noqa: D102
        keys = [self._key(path) for path in paths]
        with self._asked("DeleteObjects"):
            if self._deletes_many:
                self._obstore.delete(self._once(), keys)
                return
            for key in keys:
                with suppress(FileNotFoundError):
                    self._obstore.delete(self._once(), key)

    def _key(self, path: str) -> str:
        return path.partition("/")[2]

    def _entry(self, found: Mapping[str, Any]) -> Entry:
        version = found["e_tag"] or str(found["last_modified"])
        return Entry(f"{self._address.bucket}/{found['path']}", int(found["size"]), version)

    @contextmanager
    def _asked(self, operation: str) -> Iterator[None]:
        """Obstore's errors, each as an answer with a status."""
        try:
            yield
        except (FileNotFoundError, self._obstore.exceptions.BaseError) as error:
            named = operation if self._address.protocol == "s3" else ""
            raise answer_of(error, operation=named) from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # no Exception, and of no public module
                raise
            text = f"obstore cannot ask this address: {error}"
            raise RequestError(text, status=None, operation="", attempts=1, kind="") from error

    def _once(self) -> Any:
        """The store for short requests, each tried once: trying again is our part."""
        return self._store(0, self._address.timeout)

    def _store(self, retries: int, seconds: float) -> Any:
        """The store whose requests may last so long, and are tried again by the library."""
        if (retries, seconds) not in self._made:
            kinds = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
            patience = timedelta(seconds=self._address.timeout)
            backoff = {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2}
            made = getattr(self._stores, kinds[self._address.protocol])(
                self._address.bucket,
                config=self._settings.config,
                client_options={
                    "allow_http": True,
                    "connect_timeout": patience,
                    "read_timeout": patience,
                    "timeout": timedelta(seconds=seconds),
                    **self._settings.client,
                },
                retry_config={
                    "max_retries": retries,
                    "retry_timeout": _LONGEST_ATTEMPT,
                    "backoff": backoff,
                },
                **({"credential_provider": p} if (p := self._settings.provider) else {}),
            )
            self._made.setdefault((retries, seconds), made)
        return self._made[retries, seconds]


# What fsspec's file systems take and obstore has no use for.
_WITHOUT_MEANING = re.compile(
    r"anon|asynchronous|cache_\w+|default_\w+|listings_\w+|loop|max_concurrency|skip_instance_cache"
    r"|use_listings_cache|use_ssl|version_aware|\w+_timeout|retries|project|access|consistency"
    r"|check_connection|session_kwargs|timeout|account_host|assume_container_exists|blocksize"
)


def _translated(
    address: Address, options: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Options in obstore's words; what it does not know it refuses by name."""
    found = {names.get(name, name): value for name, value in options.items()}
    left = {n: v for n, v in found.items() if v is not None and not _WITHOUT_MEANING.fullmatch(n)}
    for name, value in left.items():
        if isinstance(value, Mapping | list):
            raise UserError(
                f"data.storage_options.{address.kind}.{name}: is not known; write obstore's names,"
                " or fsspec's for keys, endpoint and region"
            )
    return left


def _s3(address: Address) -> _Settings:
    given = dict(address.options)
    client = dict(given.pop("client_kwargs", None) or {})
    how = dict(given.pop("config_kwargs", None) or {})
    extra = dict(given.pop("s3_additional_kwargs", None) or {})
    profile = given.pop("profile", None)
    made = _Settings(client=_tls(client.pop("verify", given.pop("verify", None))))
    if proxies := how.pop("proxies", None):
        made.client["proxy_url"] = next(iter(proxies.values()))
    style = (how.pop("s3", None) or {}).get("addressing_style")
    style = given.pop("addressing_style", style)
    unsigned = given.get("anon") or how.pop("signature_version", None) == "unsigned"
    if given.pop("requester_pays", False) or extra.pop("RequestPayer", None):
        given["request_payer"] = True
    config = _translated(address, {**client, **extra, **given}, _S3_NAMES)
    if unsigned:
        config["skip_signature"] = True
    session = _s3_login(config, made, address, profile) if not unsigned else None
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = config.get("region") or environment or (session and session.region_name)
    if not region and not config.get("endpoint"):
        region = _region_of(address.bucket)
    config["region"] = region or "us-east-1"
    if (url := config.get("endpoint")) and not re.fullmatch(r"https?://[^\s/]\S*", str(url)):
        raise UserError(  # without the value, which may have a password
            f"data.storage_options.{address.kind}.endpoint_url: must be https://HOST or"
            " http://HOST; check it, or the environment's S3_ENDPOINT_URL and AWS_ENDPOINT_URL"
        )
    if style == "virtual":
        config["virtual_hosted_style_request"] = True
        if endpoint := config.get("endpoint"):
            scheme, _, host = endpoint.partition("://")
            config["endpoint"] = f"{scheme}://{address.bucket}.{host}"
    made.config = config
    return made


_S3_NAMES = {
    "endpoint_url": "endpoint",
    "key": "access_key_id",
    "secret": "secret_access_key",
    "username": "access_key_id",
    "password": "secret_access_key",
    "region_name": "region",
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "token",
    "ServerSideEncryption": "server_side_encryption",
    "SSEKMSKeyId": "sse_kms_key_id",
}


def _tls(verify: Any) -> dict[str, Any]:
    """Whose certificates are trusted: `verify` is False, or a file of them."""
    if verify is False:
        return {"allow_invalid_certificates": True}
    verify = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE")
    return {"root_certificate": _settings_file(Path(verify))} if verify else {}


def _settings_file(path: Path) -> bytes:
    """What a setting names; its absence is not that of a file in the store."""
    try:
        return read_guarded(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; check"
            " data.storage_options and the environment's variables"
        ) from error


def _s3_login(
    config: dict[str, Any], made: _Settings, address: Address, profile: str | None
) -> Any:
    """Give `made` what has the keys, out of `config` or elsewhere; the session of ~/.aws, if read.

    Raises:
        NoCredentialsError: there are none; botocore's.
    """
    names = ("access_key_id", "secret_access_key", "token")
    given = {name: config.pop(name, None) for name in names}
    if profile is None and not given["access_key_id"]:
        variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        given = {n: os.environ.get(v) for n, v in zip(names, variables, strict=True)}
    if given["access_key_id"] and given["secret_access_key"]:
        # By a function, or obstore would add the environment's token to keys of the recipe.
        # Of digits alone, YAML reads a key as a number.
        login = {name: None if value is None else str(value) for name, value in given.items()}
        made.provider = lambda: {**login, "expires_at": None}
        return None
    boto3 = import_optional("boto3", f"{address.kind}:// without keys", extra="s3")
    session = boto3.Session(profile_name=profile)
    if session.get_credentials() is None:  # ~/.aws, single sign-on, roles, the machine's
        raise import_optional("botocore.exceptions", address.kind).NoCredentialsError
    auth = import_optional("obstore.auth.boto3", address.kind)
    made.provider = auth.Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    return session


def _region_of(bucket: str) -> str | None:
    """Where a bucket of Amazon's is; it says so to anyone."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    headers: Any = {}
    try:
        with _opener.open(request, timeout=5) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        pass
    return headers.get("x-amz-bucket-region")


def _google(address: Address) -> _Settings:
    given = dict(address.options)
    token, made = given.pop("token", None), _Settings()
    endpoint = given.pop("endpoint_url", None) or os.environ.get("STORAGE_EMULATOR_HOST")
    if payer := given.pop("requester_pays", None):
        payer = given.get("project") if payer is True else payer
        if not payer:
            raise UserError(
                f"data.storage_options.{address.kind}.requester_pays: needs the project that pays;"
                " write its name in place of true, or as project"
            )
        made.client["default_headers"] = {"x-goog-user-project": str(payer)}
    made.config = _translated(address, given, {})
    if endpoint:
        made.config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"
    if token == "anon" or given.get("anon"):
        made.config["skip_signature"] = True
        # Of reads; an emulator is written with a login that asks nobody for a token.
        names = ("client_email", "private_key", "private_key_id")
        nobody = {"disable_oauth": True, **dict.fromkeys(names, "")}
        made.config["service_account_key"] = json.dumps(nobody)
    elif isinstance(token, Mapping):
        made.config["service_account_key"] = json.dumps(dict(token))
    else:
        is_named = token not in (None, "google_default", "cloud")
        place = token if is_named else os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if place:
            _google_login(made, Path(str(place)).expanduser())
    return made


def _google_login(made: _Settings, path: Path) -> None:
    """Use a file of a login: obstore knows keys and users, Google's own library the others."""
    try:
        kind = parse_json(_settings_file(path)).get("type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no login of Google's; check data.storage_options") from error
    if kind in ("service_account", "authorized_user"):
        made.config["application_credentials"] = str(path)
        return
    auth = import_optional("google.auth", f"{path}: {kind}", package="google-auth")
    import_optional("google.auth.transport.requests", str(path), package="requests")
    scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
    login, _ = auth.load_credentials_from_file(str(path), scopes=scopes)
    provider = import_optional("obstore.auth.google", str(path))
    made.provider = provider.GoogleCredentialProvider(login)


def _azure(address: Address) -> _Settings:
    given = dict(address.options)
    text = given.pop("connection_string", None) or ""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if "=" in part)
    host = given.get("account_host")
    found = {
        "account_name": parts.get("AccountName"),
        "account_key": parts.get("AccountKey"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint": parts.get("BlobEndpoint") or (f"https://{host}" if host else None),
    }
    known = {name: value for name, value in found.items() if value}
    made = _Settings(_translated(address, {**known, **given}, {"endpoint_url": "endpoint"}))
    keys = ("account_key", "access_key", "sas_token", "sas_key", "client_secret", "token")
    unknown = not any(name in made.config for name in keys)
    asked = str(os.environ.get("AZURE_STORAGE_ANON", "true")).lower() not in ("false", "0", "f")
    if given.get("anon", asked and unknown):
        made.config["skip_signature"] = True
    return made


_BUCKETS: dict[str, Callable[[Address], _Settings]] = {"s3": _s3, "gs": _google, "az": _azure}


# ---------------------------------------------------------------- web servers


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; another host does not get what logs in at the first one."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        if new is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            for name in ("Authorization", "Cookie"):
                new.remove_header(name)
        return new


_opener = urllib.request.build_opener(_Redirects)


class Web:
    """A web server: read by ranges, or whole where it knows none; its pages are the folders."""

    steady = True

    def __init__(self, address: Address) -> None:
        self._timeout = address.timeout
        client = address.options.get("client_kwargs") or {}
        self._headers = {**(client.get("headers") or {}), **(address.options.get("headers") or {})}

    def read(self, path: str, start: int, end: int, most: int) -> Iterator[bytes]:
        """Of a server that knows no ranges, `most` bytes rather than to `end`."""
        with self._open(path, {"Range": f"bytes={start}-{end - 1}"}) as answer:
            skip, wanted = (0, end - start) if answer.status == 206 else (start, most)
            for chunk in steady(_chunks(answer), self._timeout):
                part = chunk[skip : skip + wanted]
                skip, wanted = max(0, skip - len(chunk)), wanted - len(part)
                yield part
                if not wanted:
                    return  # also where the server keeps sending

    def info(self, path: str) -> Entry:
        """By the head of an answer: many a server has no answer to HEAD."""
        try:
            with self._open(path, {"Range": "bytes=0-0"}) as answer:
                size, headers = answer.getheader("Content-Length"), cast("Message", answer.headers)
                if answer.status == 206:
                    size = headers.get("Content-Range", "").rpartition("/")[2]
        except urllib.error.HTTPError as error:
            if error.code != 416:  # of an empty file
                raise
            size, headers = error.headers.get("Content-Range", "").rpartition("/")[2], error.headers
        version = headers.get("ETag") or headers.get("Last-Modified") or ""
        is_page = headers.get_content_type() == "text/html" and not _is_page_name(path)
        return Entry(path, int(size) if size and size.isdigit() else None, version, is_page)

    def entries(self, path: str, *, deep: bool) -> list[Entry]:
        """The links of a page to what is below it."""
        base = path.rstrip("/") + "/"
        with self._open(base, {}) as answer:
            page = b"".join(steady(_chunks(answer), self._timeout)).decode(errors="replace")
        links = _Links()
        links.feed(page)
        below = dict.fromkeys(urljoin(base, link).partition("#")[0] for link in links.found)
        found: list[Entry] = []
        for url in sorted(url for url in below if url.startswith(base) and url != base):
            if not url.endswith("/"):
                found.append(self.info(url) if deep else Entry(url))
            elif deep:
                found += self.entries(url, deep=True)
            else:
                found.append(Entry(url.rstrip("/"), is_folder=True))
        return found

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    def upload(self, path: str, file: Path, size: int, part: int) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    def delete(self, paths: list[str]) -> None:  # noqa: D102
        raise PermissionError("a web server cannot be written")

    @contextmanager
    def _open(self, url: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        url, login = _without_login(url)
        headers = {"Accept-Encoding": "identity", **login, **self._headers, **headers}
        request = urllib.request.Request(_quoted(url), headers=headers)
        try:
            answer = _opener.open(request, timeout=self._timeout)
        except urllib.error.HTTPError as error:
            raise answer_of_web(error) from None
        with answer:
            yield answer


class _Links(HTMLParser):
    """Where a page's links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _chunks(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    """What has come, as it comes.

    Raises:
        IncompleteRead: the connection ended before the answer.
    """
    while chunk := answer.read1(STEP):
        yield chunk
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)


def _is_page_name(url: str) -> bool:
    return urlsplit(url).path.lower().endswith((".html", ".htm"))


def _without_login(url: str) -> tuple[str, dict[str, str]]:
    """A URL without user and password, and the header that says them."""
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    if not at:
        return url, {}
    login = base64.b64encode(unquote(user).encode()).decode()
    return urlunsplit(parts._replace(netloc=host)), {"Authorization": f"Basic {login}"}


def _quoted(url: str) -> str:
    """With what may not stand in a request's line as %XX; what is quoted stays."""
    return quote(url, safe="%/:=&?~#+!$,;'@()*[]")


# ---------------------------------------------------------------- all others: fsspec


class FileSystem:
    """`hf://` by huggingface_hub, paths of this machine, and whatever else has such a package."""

    steady = False

    def __init__(self, address: Address) -> None:
        self._files = fsspec.filesystem(
            address.protocol, skip_instance_cache=True, **address.options
        )
        self._timeout = address.timeout
        self._is_here = address.kind == "file"

    def read(self, path: str, start: int, end: int, most: int) -> list[bytes]:  # noqa: D102
        if self._is_here and stat.S_ISFIFO(os.stat(path).st_mode):  # it would be waited for
            raise OSError(errno.EINVAL, "is a pipe, not a file", path)
        call = self._files.cat_file
        return [bytes(within(self._timeout, lambda: call(path, start=start, end=end)))]

    def info(self, path: str) -> Entry:  # noqa: D102
        self._files.invalidate_cache()
        return _row(self._files.info(path))

    def entries(self, path: str, *, deep: bool) -> list[Entry]:  # noqa: D102
        self._files.invalidate_cache()
        if deep:
            return list(map(_row, self._files.find(path, detail=True).values()))
        return list(map(_row, self._files.ls(path, detail=True)))

    def put(self, path: str, data: bytes, *, new: bool) -> None:  # noqa: D102
        self._files.pipe_file(path, data, **({"mode": "create"} if new else {}))

    def upload(self, path: str, file: Path, size: int, part: int) -> None:  # noqa: D102
        self._files.put_file(str(file), path)

    def delete(self, paths: list[str]) -> None:
        """Of this machine's empty folders, too: in an object store there are none."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._files.rm_file(path)
            with suppress(OSError):
                for above in Path(path).parents if self._is_here else ():
                    above.rmdir()


def _row(facts: Mapping[str, Any]) -> Entry:
    keys = ("ETag", "etag", "blob_id", "mtime", "LastModified", "last_modified", "updated")
    version = str(next((facts[key] for key in keys if facts.get(key)), ""))
    size = facts.get("size")
    is_folder = facts["type"] != "file"
    return Entry(facts["name"], None if size is None else int(size), version, is_folder)
