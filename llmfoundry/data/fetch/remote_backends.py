"""Which file system a URL means, with which settings.

`remote.Remote` asks once for a folder. One idea: everything is decided by the URL, the recipe's
`data.storage_options` and the environment's variables that LLM Foundry read, so that its users'
recipes and machines work as they are. What storage_options say goes before the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import fsspec

from llmfoundry.errors import UserError, import_optional, one_line

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az", "http": "https"}
_PACKAGES = {
    "s3": "s3fs",
    "oci": "s3fs",
    "gs": "gcsfs",
    "az": "adlfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
}

_made: dict[tuple[int, str, str], Any] = {}


@dataclass(frozen=True)
class Backend:
    """A folder in the words of fsspec.

    Attributes:
        kind: the protocol as a user knows it, aliases made one: oci stays oci.
        protocol: fsspec's; oci is s3.
        root: the folder, as the file system names it.
        options: what the file system is made with.
    """

    kind: str
    protocol: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bucket(self) -> str:
        """The first part of `root`."""
        return self.root.lstrip("/").partition("/")[0]

    def file_system(self) -> Any:
        """This process' file system, one for all folders with the same settings."""
        return _file_system(self.protocol, json.dumps(self.options, sort_keys=True))


def without_secrets(url: str) -> str:
    """A URL without what is secret in it: user and password, and what follows a question mark."""
    scheme, separator, path = url.partition("://")
    kind = _ALIASES.get(scheme, scheme)
    host, slash, rest = path.partition("/")
    user, at, after = host.rpartition("@")
    # Of oci:// and abfss:// what stands before @ is a bucket.
    if at and (kind not in ("oci", "az") or ":" in user):
        host = after
    if kind in ("https", "az"):
        rest = rest.partition("?")[0]
    return f"{scheme}{separator}{host}{slash}{rest}"


def backend_for(url: str, storage_options: Mapping[str, Any], timeout: float) -> Backend:
    """The backend of a folder at a URL.

    Args:
        url: PROTOCOL://PATH, without a slash at its end.
        storage_options: what the file systems take, by protocol.
        timeout: seconds without progress, for those libraries that take it.

    Raises:
        UserError: no such protocol, or its package or a setting is missing.
    """
    scheme, _, path = url.partition("://")
    kind = _ALIASES.get(scheme, scheme)
    names = [scheme, kind, *(name for name, means in _ALIASES.items() if means == kind)]
    given = dict(next((storage_options[n] for n in names if n in storage_options), {}))
    _check_package(kind, url)
    if kind == "oci":
        return _s3(kind, _oci_bucket(path), {**_oci(url, path, given), **given}, timeout)
    if kind == "s3":
        return _s3(kind, path, {**_s3_environment(path), **given}, timeout)
    if kind == "gs" and "GCS_KEY" in os.environ and not given:
        return _s3(kind, path, _gcs_hmac(), timeout)
    if kind == "az":
        url, environment = _azure(scheme, path)
        given = {**environment, **given}
    protocol = "az" if scheme == "azure" else scheme
    try:
        known = fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: {one_line(error)}; check data.remote") from error
    root = known._strip_protocol(url)
    return Backend(kind, protocol, root, {**known._get_kwargs_from_urls(url), **given})


def _check_package(kind: str, url: str) -> None:
    package = _PACKAGES.get(kind)
    if package is not None:
        import_optional(package, f"{url}: {kind}://", package=package)


def _s3(kind: str, path: str, options: Mapping[str, Any], timeout: float) -> Backend:
    options = dict(options)
    patience = {"connect_timeout": timeout, "read_timeout": timeout}
    once = {"retries": {"total_max_attempts": 1}}  # trying again is our part
    options["config_kwargs"] = {**patience, **once, **options.get("config_kwargs", {})}
    return Backend(kind, "s3", path, options)


def _s3_environment(path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    endpoint = os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        found["endpoint_url"] = endpoint
    paying = os.environ.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "").split(",")
    if path.partition("/")[0] in [bucket.strip() for bucket in paying]:
        found["requester_pays"] = True
    return found


def _oci_bucket(path: str) -> str:
    """`bucket@namespace/path` without its namespace."""
    bucket, slash, rest = path.partition("/")
    return bucket.partition("@")[0] + slash + rest


def _oci(url: str, path: str, given: dict[str, Any]) -> dict[str, Any]:
    """Oracle's S3 interface; takes namespace and region out of `given`."""
    in_url = path.partition("/")[0].partition("@")[2]
    namespace = given.pop("namespace", None) or in_url or os.environ.get("OCI_NAMESPACE")
    region = given.pop("region", None) or os.environ.get("OCI_REGION")
    if "endpoint_url" in given:
        return {}
    if not namespace or not region:
        missing = "region" if namespace else "namespace"
        raise UserError(
            f"{url}: the {missing} is not known; write data.storage_options:"
            f" {{oci: {{{missing}: …}}}} or set OCI_{missing.upper()}"
        )
    endpoint = f"https://{namespace}.compat.objectstorage.{region}.oraclecloud.com"
    return {"endpoint_url": endpoint, "client_kwargs": {"region_name": region}}


def _gcs_hmac() -> dict[str, Any]:
    """Google's S3 interface, for LLM Foundry's HMAC keys."""
    return {
        "endpoint_url": "https://storage.googleapis.com",
        "key": os.environ["GCS_KEY"],
        "secret": os.environ.get("GCS_SECRET"),
        "client_kwargs": {"region_name": "auto"},
    }


def _azure(scheme: str, path: str) -> tuple[str, dict[str, Any]]:
    """The URL for adlfs, and the environment's settings; azure:// begins with the account."""
    found = {}
    account = os.environ.get("AZURE_ACCOUNT_NAME")
    if scheme == "azure":
        host, _, path = path.partition("/")
        account = account or host.partition(".")[0]
    if account:
        found["account_name"] = account
    if "AZURE_ACCOUNT_ACCESS_KEY" in os.environ:
        found["account_key"] = os.environ["AZURE_ACCOUNT_ACCESS_KEY"]
    return f"{'az' if scheme == 'azure' else scheme}://{path}", found


def _file_system(protocol: str, options: str) -> Any:
    # A forked child cannot use its parent's event loop and sockets, so each process has its own.
    # Nothing is ever dropped: to close a parent's connections makes a child wait for seconds.
    key = (os.getpid(), protocol, options)
    if key not in _made:
        # Of two threads one wins; the loser's has no connection yet.
        _made.setdefault(key, _make(protocol, json.loads(options)))
    return _made[key]


def _make(protocol: str, settings: dict[str, Any]) -> Any:
    if protocol in ("http", "https"):
        import aiohttp

        # aiohttp's own bound, 300 s in all; a part of a file has ours.
        no_bound = aiohttp.ClientTimeout(total=None)
        settings["client_kwargs"] = {"timeout": no_bound, **settings.get("client_kwargs", {})}
    made = fsspec.filesystem(protocol, skip_instance_cache=True, **settings)
    _without_retries(protocol, made)
    return made


def _without_retries(protocol: str, made: Any) -> None:
    """Trying again is our part: a library that does so, too, waits longer than our timeout.

    Only s3fs has a setting. Where a release of the others has moved what is changed here, its own
    attempts come back, and an error that lasts is called a timeout.
    """
    if protocol == "s3":
        made.retries = 1
    elif hasattr(made, "_timeout_kwargs"):  # adlfs hands these on to each request
        made._timeout_kwargs["retry_total"] = 0
    elif protocol in ("gs", "gcs") and hasattr(made._request, "__wrapped__"):
        made._request = MethodType(made._request.__wrapped__, made)  # beneath gcsfs' decorator
