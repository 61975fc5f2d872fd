"""Settings of obstore for the buckets of S3, Google and Azure.

Entry point: `BUCKET_SETTINGS`, one function per protocol, which `store_clients` calls. Each
function translates the options of fsspec's file systems (s3fs, gcsfs, adlfs) and the environment
to options of obstore, and finds the login.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from llmfoundry.data.store_address import Address
from llmfoundry.errors import UserError, import_optional
from llmfoundry.files import parse_json, read_guarded


@dataclass
class BucketSettings:
    """Constructor arguments of an obstore store."""

    config: dict[str, Any] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    provider: Callable[[], dict[str, Any]] | None = None


# Options of fsspec's file systems that have no meaning for obstore.
_WITHOUT_MEANING = re.compile(
    r"anon|asynchronous|cache_\w+|default_\w+|listings_\w+|loop|max_concurrency|skip_instance_cache"
    r"|use_listings_cache|use_ssl|version_aware|\w+_timeout|retries|project|access|consistency"
    r"|check_connection|session_kwargs|timeout|account_host|assume_container_exists|blocksize"
)


def _translated(
    address: Address, options: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Rename fsspec options to obstore's names and drop those without meaning for obstore.

    Raises:
        UserError: an option is a mapping or a list. obstore rejects other unknown options itself.
    """
    renamed = {names.get(name, name): value for name, value in options.items()}
    translated: dict[str, Any] = {}
    for name, value in renamed.items():
        if value is not None and not _WITHOUT_MEANING.fullmatch(name):
            translated[name] = value
    for name, value in translated.items():
        if isinstance(value, Mapping | list):
            raise UserError(
                f"data.storage_options.{address.kind}.{name}: is not known; write obstore's names,"
                " or fsspec's for keys, endpoint and region"
            )
    return translated


def _s3(address: Address) -> BucketSettings:
    """Return obstore's settings for an S3 bucket, from s3fs options and the environment."""
    # s3fs passes botocore's options in three nested mappings
    options = dict(address.options)
    client = dict(options.pop("client_kwargs", None) or {})
    boto_config = dict(options.pop("config_kwargs", None) or {})
    extra = dict(options.pop("s3_additional_kwargs", None) or {})
    profile = options.pop("profile", None)
    settings = BucketSettings(client=_tls(client.pop("verify", options.pop("verify", None))))
    if proxies := boto_config.pop("proxies", None):
        settings.client["proxy_url"] = next(iter(proxies.values()))
    style = (boto_config.pop("s3", None) or {}).get("addressing_style")
    style = options.pop("addressing_style", style)
    unsigned = options.get("anon") or boto_config.pop("signature_version", None) == "unsigned"
    if options.pop("requester_pays", False) or extra.pop("RequestPayer", None):
        options["request_payer"] = True
    config = _translated(address, {**client, **extra, **options}, _S3_NAMES)
    if unsigned:
        config["skip_signature"] = True

    # region: options, then environment, then ~/.aws, then the bucket's own
    session = _s3_login(config, settings, address, profile) if not unsigned else None
    environment = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    region = config.get("region") or environment or (session and session.region_name)
    if not region and not config.get("endpoint"):
        region = _region_of(address.bucket)
    config["region"] = region or "us-east-1"

    # endpoint
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
    settings.config = config
    return settings


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
    """Return the client options of TLS; `verify` is False or a file of trusted certificates."""
    if verify is False:
        return {"allow_invalid_certificates": True}
    verify = verify if isinstance(verify, str) else os.environ.get("AWS_CA_BUNDLE")
    return {"root_certificate": _settings_file(Path(verify))} if verify else {}


def _settings_file(path: Path) -> bytes:
    """Read a local file that a setting names.

    Raises:
        UserError: it cannot be read. A FileNotFoundError would look like a file missing in the
            store.
    """
    try:
        return read_guarded(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}; check"
            " data.storage_options and the environment's variables"
        ) from error


def _s3_login(
    config: dict[str, Any], settings: BucketSettings, address: Address, profile: str | None
) -> Any:
    """Set the credential provider of `settings`.

    Args:
        config: options in obstore's names. Keys are removed from it.
        settings: gets the provider.
        address: address of the bucket.
        profile: profile of ~/.aws; None: keys of the options or the environment go first.

    Returns:
        The boto3 session; None if the options or the environment have the keys.

    Raises:
        NoCredentialsError: no credentials were found (botocore's class).
    """
    names = ("access_key_id", "secret_access_key", "token")
    keys = {name: config.pop(name, None) for name in names}
    if profile is None and not keys["access_key_id"]:
        variables = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
        keys = {n: os.environ.get(v) for n, v in zip(names, variables, strict=True)}
    if keys["access_key_id"] and keys["secret_access_key"]:
        # Without a provider, obstore adds the environment's token to the keys of the recipe.
        # YAML parses a key of digits as a number, hence str.
        login = {name: None if value is None else str(value) for name, value in keys.items()}
        settings.provider = lambda: {**login, "expires_at": None}
        return None
    boto3 = import_optional("boto3", f"{address.kind}:// without keys", extra="s3")
    session = boto3.Session(profile_name=profile)
    if session.get_credentials() is None:  # ~/.aws, single sign-on, roles, the machine's
        raise import_optional("botocore.exceptions", address.kind).NoCredentialsError
    auth = import_optional("obstore.auth.boto3", address.kind)
    settings.provider = auth.Boto3CredentialProvider(session, ttl=timedelta(minutes=5))
    return session


def _region_of(bucket: str) -> str | None:
    """Return the region of an AWS bucket, which AWS reports without credentials."""
    request = urllib.request.Request(f"https://s3.amazonaws.com/{bucket}", method="HEAD")
    headers: Any = {}
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
    except OSError:
        pass
    return headers.get("x-amz-bucket-region")


def _google(address: Address) -> BucketSettings:
    """Return obstore's settings for a Google bucket, from gcsfs options and the environment."""
    options = dict(address.options)
    token, settings = options.pop("token", None), BucketSettings()
    endpoint = options.pop("endpoint_url", None) or os.environ.get("STORAGE_EMULATOR_HOST")
    if payer := options.pop("requester_pays", None):
        payer = options.get("project") if payer is True else payer
        if not payer:
            raise UserError(
                f"data.storage_options.{address.kind}.requester_pays: needs the project that pays;"
                " write its name in place of true, or as project"
            )
        settings.client["default_headers"] = {"x-goog-user-project": str(payer)}
    settings.config = _translated(address, options, {})
    if endpoint:
        settings.config["base_url"] = endpoint if "://" in endpoint else f"http://{endpoint}"

    # login: none, a mapping, or a file
    if token == "anon" or options.get("anon"):
        settings.config["skip_signature"] = True
        # Only reads skip the signature. Writes to an emulator need a login without OAuth.
        names = ("client_email", "private_key", "private_key_id")
        empty_login = {"disable_oauth": True, **dict.fromkeys(names, "")}
        settings.config["service_account_key"] = json.dumps(empty_login)
    elif isinstance(token, Mapping):
        settings.config["service_account_key"] = json.dumps(dict(token))
    else:
        is_path = token not in (None, "google_default", "cloud")
        path = token if is_path else os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if path:
            _google_login(settings, Path(str(path)).expanduser())
    return settings


def _google_login(settings: BucketSettings, path: Path) -> None:
    """Log in with a credentials file.

    obstore reads service accounts and authorized users; google-auth reads all other types.
    """
    try:
        kind = parse_json(_settings_file(path)).get("type")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no login of Google's; check data.storage_options") from error
    if kind in ("service_account", "authorized_user"):
        settings.config["application_credentials"] = str(path)
        return
    auth = import_optional("google.auth", f"{path}: {kind}", package="google-auth")
    import_optional("google.auth.transport.requests", str(path), package="requests")
    scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
    login, _ = auth.load_credentials_from_file(str(path), scopes=scopes)
    provider = import_optional("obstore.auth.google", str(path))
    settings.provider = provider.GoogleCredentialProvider(login)


_FALSE = ("false", "0", "f")


def _azure(address: Address) -> BucketSettings:
    """Return obstore's settings for an Azure container, from adlfs options."""
    options = dict(address.options)
    text = options.pop("connection_string", None) or ""
    parts = dict(part.partition("=")[::2] for part in text.split(";") if "=" in part)
    host = options.get("account_host")
    connection = {
        "account_name": parts.get("AccountName"),
        "account_key": parts.get("AccountKey"),
        "sas_token": parts.get("SharedAccessSignature"),
        "endpoint": parts.get("BlobEndpoint") or (f"https://{host}" if host else None),
    }
    known = {name: value for name, value in connection.items() if value}
    names = {"endpoint_url": "endpoint"}
    settings = BucketSettings(_translated(address, {**known, **options}, names))

    # anonymous if there is no key, as in adlfs
    keys = ("account_key", "access_key", "sas_token", "sas_key", "client_secret", "token")
    has_key = any(name in settings.config for name in keys)
    may_be_anonymous = os.environ.get("AZURE_STORAGE_ANON", "true").lower() not in _FALSE
    if options.get("anon", may_be_anonymous and not has_key):
        settings.config["skip_signature"] = True
    return settings


BUCKET_SETTINGS: dict[str, Callable[[Address], BucketSettings]] = {
    "s3": _s3,
    "gs": _google,
    "az": _azure,
}
