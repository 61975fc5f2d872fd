"""Which store a URL means, and with which settings.

`store.Store` asks once for a folder. Everything is decided by the URL, the recipe's
`data.storage_options` and the environment's variables that LLM Foundry read, so that its users'
recipes and machines work as they are. What storage_options say goes before the environment. Their
names are those of fsspec's file systems; `store_clients` translates them for others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import fsspec

from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.errors import UserError, import_optional, one_line

_ALIASES = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az", "http": "https"}
EXTRAS = {"s3": "s3", "oci": "s3", "gs": "gcs", "az": "azure"}
"""Of ours, which bring what a kind of bucket needs."""


@dataclass(frozen=True)
class Address:
    """A folder in the words of its store.

    Attributes:
        kind: the protocol as a user knows it, aliases made one: oci stays oci.
        protocol: whose way of asking: oci is s3, and gs with an HMAC key.
        root: the folder, as the store names it; begins with the bucket.
        options: what the client is made with.
    """

    kind: str
    protocol: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    retry: int = 5

    @property
    def bucket(self) -> str:
        """The first part of `root`."""
        return self.root.lstrip("/").partition("/")[0]

    @property
    def endpoint(self) -> str:
        """A server other than the protocol's usual one."""
        return self.options.get("endpoint_url") or ""


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


_SIGNED = re.compile(
    r"x-(amz|goog)-[\w-]+|signature|expires|awsaccesskeyid|googleaccessid|policy|key-pair-id"
    r"|sig|s[eptrv]|spr|sip|ss|srt|sk(oid|tid|t|e|s|v)",  # those with s are Azure's
    re.IGNORECASE,
)
_SIGNATURES = {"x-amz-signature", "x-goog-signature", "signature", "sig"}


def without_signature(url: str) -> str:
    """A web address without what signs it: the same file has another signature the next time."""
    path, _, query = url.partition("?")
    parts = query.split("&")
    names = [part.partition("=")[0] for part in parts]
    if not url.startswith(("https://", "http://")) or _SIGNATURES.isdisjoint(map(str.lower, names)):
        return url
    kept = [p for p, name in zip(parts, names, strict=True) if not _SIGNED.fullmatch(name)]
    return "?".join([path, "&".join(kept)]) if kept else path


def address_of(url: str, options: FetchOptions) -> Address:
    """The address of a folder at a URL.

    Args:
        url: PROTOCOL://PATH, without a slash at its end.
        options: how it is asked.

    Raises:
        UserError: no such protocol, or its package or a setting is missing.
    """
    scheme, _, path = url.partition("://")
    kind = _ALIASES.get(scheme, scheme)
    every = options.storage_options
    names = [scheme, kind, *(name for name, means in _ALIASES.items() if means == kind)]
    name = next((n for n in names if n in every), kind)
    if not isinstance(every.get(name, {}), Mapping):
        raise UserError(f"data.storage_options.{name}: must be a mapping, such as {{anon: true}}")
    given = dict(every.get(name, {}))
    if kind in EXTRAS:
        import_optional("obstore", f"{url}: {kind}://", extra=EXTRAS[kind])

    def found(protocol: str, root: str, settings: Mapping[str, Any]) -> Address:
        return Address(kind, protocol, root, settings, options.timeout, options.retry)

    if kind == "oci":
        return found("s3", _oci_bucket(path), {**_oci(url, path, given), **given})
    if kind == "s3":
        return found("s3", path, {**_s3_environment(path), **given})
    if kind == "gs" and "GCS_KEY" in os.environ and not given:
        return found("s3", path, _gcs_hmac())
    if kind == "gs":
        return found("gs", path, given)
    if kind == "az":
        path, environment = _azure_account(scheme, path)
        return found("az", path, {**environment, **given})
    if kind == "https":
        return found("https", url, given)
    try:
        known = fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: {one_line(error)}; check data.remote") from error
    in_url = known._get_kwargs_from_urls(url)
    given = {**({"auto_mkdir": True} if kind == "file" else {}), **in_url, **given}
    return found(scheme, known._strip_protocol(url), given)


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


def _azure_account(scheme: str, path: str) -> tuple[str, dict[str, Any]]:
    """Container and path, and settings of the environment; a URL may name the account."""
    path = path.partition("?")[0]
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    first, _, rest = path.partition("/")
    if scheme == "azure":
        account, path = account or first.partition(".")[0], rest
    elif "@" in first:
        container, _, host = first.partition("@")
        account, path = host.partition(".")[0], f"{container}/{rest}".rstrip("/")
    found = {"account_name": account} if account else {}
    for name, variables in _AZURE_ENVIRONMENT.items():
        value = next((os.environ[v] for v in variables if v in os.environ), None)
        if value is not None:
            found[name] = value
    return path, found


_AZURE_ENVIRONMENT = {
    "account_key": ("AZURE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
    "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID",),
    "client_id": ("AZURE_STORAGE_CLIENT_ID",),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET",),
}
