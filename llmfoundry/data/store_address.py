"""Resolution of a URL to a store and its settings.

Entry point: `address_of`, which `store.Store` calls once per folder. The settings come from the
URL, `data.storage_options` and the environment variables of LLM Foundry, so that recipes and
machines of LLM Foundry users work unchanged. `storage_options` take precedence over the
environment. They have the names of fsspec's file systems; `store_clients` translates the names.
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
"""Optional dependencies of this project (extras) for each kind of bucket."""


@dataclass(frozen=True)
class Address:
    """Location and settings of a folder in a store.

    Attributes:
        kind: protocol of the URL, with aliases unified; oci stays oci.
        protocol: protocol of the requests: s3 for oci and for gs with an HMAC key.
        root: path of the folder in the store; begins with the bucket.
        options: options of the client.
        timeout: seconds.
        retry: attempts after a failed one.
    """

    kind: str
    protocol: str
    root: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    retry: int = 5

    @property
    def bucket(self) -> str:
        """Return the first part of `root`."""
        return self.root.lstrip("/").partition("/")[0]

    @property
    def endpoint(self) -> str:
        """Return the URL of a server other than the protocol's default; "" if there is none."""
        return self.options.get("endpoint_url") or ""


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query string."""
    scheme, separator, path = url.partition("://")
    kind = _ALIASES.get(scheme, scheme)
    host, slash, rest = path.partition("/")
    user, at, after = host.rpartition("@")
    # In oci:// and abfss:// URLs, the part before @ is a bucket.
    if at and (kind not in ("oci", "az") or ":" in user):
        host = after
    if kind in ("https", "az"):
        rest = rest.partition("?")[0]
    return f"{scheme}{separator}{host}{slash}{rest}"


_SIGNED = re.compile(
    r"x-(amz|goog)-[\w-]+|signature|expires|awsaccesskeyid|googleaccessid|policy|key-pair-id"
    r"|sig|s[eptrv]|spr|sip|ss|srt|sk(oid|tid|t|e|s|v)",  # short names that begin with s: Azure
    re.IGNORECASE,
)
_SIGNATURES = {"x-amz-signature", "x-goog-signature", "signature", "sig"}


def without_signature(url: str) -> str:
    """Return a URL without its signature, which differs for each copy of the same link."""
    path, _, query = url.partition("?")
    parts = query.split("&")
    names = [part.partition("=")[0] for part in parts]
    if not url.startswith(("https://", "http://")) or _SIGNATURES.isdisjoint(map(str.lower, names)):
        return url
    unsigned = [p for p, name in zip(parts, names, strict=True) if not _SIGNED.fullmatch(name)]
    return "?".join([path, "&".join(unsigned)]) if unsigned else path


def address_of(url: str, options: FetchOptions) -> Address:
    """Resolve a URL.

    Args:
        url: PROTOCOL://PATH, without a trailing slash.
        options: storage options, timeout and number of retries.

    Raises:
        UserError: the protocol is unknown, or its package or a setting is missing.
    """
    # options of the URL's protocol, which the recipe may list under any alias
    scheme, _, path = url.partition("://")
    kind = _ALIASES.get(scheme, scheme)
    options_by_kind = options.storage_options
    names = [scheme, kind, *(name for name, means in _ALIASES.items() if means == kind)]
    name = next((n for n in names if n in options_by_kind), kind)
    if not isinstance(options_by_kind.get(name, {}), Mapping):
        raise UserError(f"data.storage_options.{name}: must be a mapping, such as {{anon: true}}")
    own_options = dict(options_by_kind.get(name, {}))
    if kind in EXTRAS:
        import_optional("obstore", f"{url}: {kind}://", extra=EXTRAS[kind])

    def address(protocol: str, root: str, settings: Mapping[str, Any]) -> Address:
        return Address(kind, protocol, root, settings, options.timeout, options.retry)

    # buckets and web servers
    if kind == "oci":
        endpoint = _oci(url, path, own_options)  # removes the namespace from own_options
        return address("s3", _oci_bucket(path), {**endpoint, **own_options})
    if kind == "s3":
        return address("s3", path, {**_s3_environment(path), **own_options})
    if kind == "gs" and "GCS_KEY" in os.environ and not own_options:
        return address("s3", path, _gcs_hmac())
    if kind == "gs":
        return address("gs", path, own_options)
    if kind == "az":
        path, environment = _azure_account(scheme, path)
        return address("az", path, {**environment, **own_options})
    if kind == "https":
        return address("https", url, own_options)

    # other protocols: file systems of fsspec
    try:
        known = fsspec.get_filesystem_class(scheme)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: {one_line(error)}; check data.remote") from error
    in_url = known._get_kwargs_from_urls(url)
    defaults = {"auto_mkdir": True} if kind == "file" else {}
    return address(scheme, known._strip_protocol(url), {**defaults, **in_url, **own_options})


def _s3_environment(path: str) -> dict[str, Any]:
    """Return the S3 settings of the environment."""
    settings: dict[str, Any] = {}
    endpoint = os.environ.get("S3_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        settings["endpoint_url"] = endpoint
    paying = os.environ.get("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "").split(",")
    if path.partition("/")[0] in [bucket.strip() for bucket in paying]:
        settings["requester_pays"] = True
    return settings


def _oci_bucket(path: str) -> str:
    """Return `bucket@namespace/path` without the namespace."""
    bucket, slash, rest = path.partition("/")
    return bucket.partition("@")[0] + slash + rest


def _oci(url: str, path: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the endpoint of Oracle's S3 interface; remove namespace and region from `options`."""
    in_url = path.partition("/")[0].partition("@")[2]
    namespace = options.pop("namespace", None) or in_url or os.environ.get("OCI_NAMESPACE")
    region = options.pop("region", None) or os.environ.get("OCI_REGION")
    if "endpoint_url" in options:
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
    """Return the settings of Google's S3 interface, for the HMAC keys of LLM Foundry."""
    return {
        "endpoint_url": "https://storage.googleapis.com",
        "key": os.environ["GCS_KEY"],
        "secret": os.environ.get("GCS_SECRET"),
        "client_kwargs": {"region_name": "auto"},
    }


def _azure_account(scheme: str, path: str) -> tuple[str, dict[str, Any]]:
    """Return container/path of a URL and the Azure settings of the environment.

    The URL may contain the account.
    """
    path = path.partition("?")[0]
    account = os.environ.get("AZURE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    first, _, rest = path.partition("/")
    if scheme == "azure":
        account, path = account or first.partition(".")[0], rest
    elif "@" in first:
        container, _, host = first.partition("@")
        account, path = host.partition(".")[0], f"{container}/{rest}".rstrip("/")
    settings = {"account_name": account} if account else {}
    for name, variables in _AZURE_ENVIRONMENT.items():
        value = next((os.environ[v] for v in variables if v in os.environ), None)
        if value is not None:
            settings[name] = value
    return path, settings


_AZURE_ENVIRONMENT = {
    "account_key": ("AZURE_ACCOUNT_ACCESS_KEY", "AZURE_STORAGE_ACCOUNT_KEY"),
    "connection_string": ("AZURE_STORAGE_CONNECTION_STRING",),
    "sas_token": ("AZURE_STORAGE_SAS_TOKEN",),
    "tenant_id": ("AZURE_STORAGE_TENANT_ID",),
    "client_id": ("AZURE_STORAGE_CLIENT_ID",),
    "client_secret": ("AZURE_STORAGE_CLIENT_SECRET",),
}
