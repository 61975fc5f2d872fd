"""What a failed request means: whether it may pass, and the line that a user reads.

`store.Store` asks. One idea: no two libraries agree on exceptions, but each keeps the HTTP status
somewhere, on the error or on what caused it, and a class name has the rest; obstore's text is read
once, into a `RequestError`. What is not known to pass counts as lasting: an error is shown at once
rather than after minutes.
"""

from __future__ import annotations

import errno
import http.client
import re
import urllib.error
from collections.abc import Iterator
from contextlib import suppress

from llmfoundry.retry import Late

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 529})
_THROTTLED_STATUS = frozenset({429, 503, 509})
_PASSING_CODES = frozenset({"RequestTimeout"})  # S3's, with status 400
_LONGEST_ANSWER = 1 << 14  # bytes of a web server's error
_PASSING_ERRNO = frozenset(
    {errno.EBUSY, errno.EAGAIN, errno.EREMOTEIO, errno.ETIMEDOUT, errno.ENETUNREACH, errno.ENETDOWN}
    | {errno.EHOSTUNREACH, errno.EHOSTDOWN}
)
_PASSING_NAMES = frozenset(
    # http.client, socket, then httpx, requests, urllib3
    {"IncompleteRead", "gaierror", "TransportError", "ConnectionError", "Timeout"}
    | {"ChunkedEncodingError", "ProtocolError"}
)
_CREDENTIAL_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "ProfileNotFound",
        "SSOTokenLoadError",
        "UnauthorizedSSOTokenError",
        "TokenRetrievalError",
        "GoogleAuthError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
        "GatedRepoError",
        "LocalTokenNotFoundError",
    }
)
# S3, Google, Azure
_NO_BUCKET = (
    "nosuchbucket",
    "bucket does not exist",
    "containernotfound",
    "container does not exist",
)
_SECRET = re.compile(r"(://)[^/\s@'\"]+:[^/\s@'\"]*@|(?<=\w)\?[^\s'\"]*=[^\s'\"]*")
DATA_KEY = "data.remote"
_OTHER_REGION = ("permanentredirect", "authorizationheadermalformed")


class RequestError(Exception):
    """A request to a bucket that failed.

    Attributes:
        status: HTTP's; None: there was no answer.
        operation_name: what was asked for, as S3's permissions are called.
        attempts: that the library made.
        kind: what went wrong with the connection; Timeout is one.
        error_code: the store's own name of the error, such as ExpiredToken; "": it gave none.
    """

    def __init__(
        self,
        text: str,
        *,
        status: int | None,
        operation: str,
        attempts: int,
        kind: str,
        error_code: str = "",
    ) -> None:
        super().__init__(text)
        self.error_code = error_code
        self.status, self.operation_name = status, operation
        self.attempts, self.kind = attempts, kind


_STATUS_OF = {
    "FileNotFoundError": 404,
    "PermissionDeniedError": 403,
    "UnauthenticatedError": 401,
    "AlreadyExistsError": 409,
    "PreconditionError": 412,
}


def answer_of(error: Exception, *, operation: str) -> RequestError:
    """What obstore's text says: its first line names the request, what follows the causes."""
    text, _, causes = str(error).partition("\n\nDebug source:")
    found = re.search(r"status code: (\d{3}) ?([\w ]*)", text)
    status = int(found[1]) if found else _STATUS_OF.get(type(error).__name__)
    if "redirect without LOCATION" in text:
        status = 301
    kind = ""
    if status is None and (failure := re.search(r"HttpError \{\s+kind: (\w+)", causes)):
        late = "TimedOut" in causes or "timed out" in causes
        kind = "Timeout" if late else failure[1]
    tried = re.search(r"after (\d+) retries", text)
    return RequestError(
        _reason(text, causes, found[2].strip() if found else ""),
        status=status,
        operation=operation,
        attempts=int(tried[1]) + 1 if tried else 1,
        kind=kind,
        error_code=_code_in(text),
    )


def answer_of_web(error: urllib.error.HTTPError) -> Exception:
    """The error of a web server; of a store behind a signed address with what the store says."""
    if error.code == 416:  # whose headers have the file's size
        return error
    with suppress(OSError, http.client.HTTPException):
        text = error.read(_LONGEST_ANSWER).decode(errors="replace")
        if code := _code_in(text):
            return RequestError(
                _reason(text, "", error.reason),
                status=error.code,
                operation="",
                attempts=1,
                kind="",
                error_code=code,
            )
    return error


def _code_in(text: str) -> str:
    found = re.search(r"<Code>([^<]*)</Code>", text)
    return found[1].strip() if found else ""


def _reason(text: str, causes: str, phrase: str) -> str:
    """A store's own words, else the system's."""
    message = re.search(r"<Message>([^<\n]*)", text) or re.search(r'"message": ?"([^"]*)"', text)
    words = [*filter(None, [_code_in(text), message[1].strip() if message else ""])]
    if words or phrase:
        return ": ".join(dict.fromkeys(words or [phrase]))
    why = re.findall(r'message: "([^"]+)"', causes) or re.findall(r"\b(Incomplete\w+)", causes)
    last = text.partition("\n")[0].rpartition(" - ")[2]
    return f"{last} ({why[-1]})" if why else last


def is_past_end(error: BaseException) -> bool:
    """Whether the request was for bytes beyond the file's end."""
    return status(error) == 416


def is_missing(error: BaseException) -> bool:
    """Whether there is no such file."""
    found = status(error)
    missing = any(isinstance(e, FileNotFoundError | IsADirectoryError) for e in _chain(error))
    return found == 404 or (missing and found is None)


def is_no_bucket(error: BaseException) -> bool:
    """Whether what is missing is the bucket, rather than something in it."""
    return _says(error, _NO_BUCKET)


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later."""
    for e in _chain(error):  # the outermost that has one decides
        if is_timeout(e) or not _PASSING_NAMES.isdisjoint(_names(e)):
            return True
        if isinstance(e, RequestError) and e.kind:
            return True
        if isinstance(e, ConnectionError) or getattr(e, "errno", None) in _PASSING_ERRNO:
            return True
        if isinstance(e, FileNotFoundError | PermissionError):
            return False
        if code_of(e) in _PASSING_CODES:
            return True
        status = _own_status(e)
        if status is not None:
            return status in _PASSING_STATUS
    return False


def code_of(error: BaseException) -> str:
    """The store's name of an error, of obstore's and of botocore's; "": it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "error_code", ""))


def is_timeout(error: BaseException) -> bool:
    """Whether nothing, or too little, arrived in time."""
    # By name too: other libraries' are not Python's own.
    return any(
        isinstance(e, TimeoutError | Late)
        or "Timeout" in type(e).__name__
        or (isinstance(e, RequestError) and e.kind == "Timeout")
        for e in _chain(error)
    )


def remote_problem(
    error: BaseException,
    *,
    kind: str,
    attempts: int,
    timeout: float,
    bucket: str = "",
    key: str = DATA_KEY,
) -> str:
    """The cause and what to do about it, in one line.

    Args:
        error: what a library raised.
        kind: of the store: s3, gs …
        attempts: that were made.
        timeout: seconds, data.download_timeout.
        bucket: that was asked.
        key: the recipe's, which names the store.
    """
    of_stream = " (or the stream's)" if key == DATA_KEY else ""
    if any(not _CREDENTIAL_NAMES.isdisjoint(_names(e)) for e in _chain(error)):
        return f"{in_one_line(error)}; give credentials, {_how_to(kind)}"
    if (advice := _advice(error)) is not None:
        return f"{in_one_line(error)}; {advice.format(how=_how_to(kind), key=key)}"
    if kind == "s3" and (status(error) == 301 or _says(error, _OTHER_REGION)):
        return (
            f"the bucket {bucket} is in another region ({in_one_line(error)}); write"
            f" data.storage_options: {{{kind}: {{client_kwargs: {{region_name: …}}}}}}, or set"
            " AWS_DEFAULT_REGION"
        )
    if is_missing(error):
        if is_no_bucket(error):
            return (
                f"there is no bucket {bucket or 'of that name'}; check its name in"
                f" {key}{of_stream}, and that the endpoint and the account are those that have it"
            )
        more = f"{of_stream} and data.split" if of_stream else ""
        return f"is not there; check {key}{more}, or upload it again"
    if _is_refused(error):
        return f"access is refused ({_refusal(error)}); check the credentials, {_how_to(kind)}"
    tried = f"after {attempts} attempts" if attempts > 1 else "at the first attempt"
    if status(error) in _THROTTLED_STATUS:
        return (
            f"the store asks for fewer requests ({in_one_line(error)}), also {tried};"
            " write a data.requests_per_second, or a larger data.download_retry"
        )
    if is_timeout(error):
        return (
            f"no answer, or less than 256 kB of it, within {timeout:g} s, {tried}; check the"
            " network and the address, or write a larger data.download_timeout"
        )
    if is_passing(error):
        return (
            f"{in_one_line(error)}, {tried}; check the network and the address, or write a larger"
            " data.download_retry"
        )
    return f"{in_one_line(error)}; check {key} and data.storage_options"


# What S3's and Azure's documents say of an error by its code, as far as its status says otherwise.
_EXPIRED = "the login has expired; log in again, or give new keys and their session token: {how}"
_ARCHIVED = "it is archived; restore it first, such as by `aws s3api restore-object`, or copy it"
_KMS = (
    "its key of AWS KMS cannot be used: ask for the permission kms:Decrypt (to write, also"
    " kms:GenerateDataKey), or enable the key"
)
_ADVICE = {
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes; set it (NTP)",
    "InvalidObjectState": _ARCHIVED,
    "BlobArchived": _ARCHIVED,
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidToken": "the session token is not of these keys; check the credentials, {how}",
    "InvalidAccessKeyId": "no account of this store has the access key; check it, {how}",
    "SignatureDoesNotMatch": "the secret is not that of the access key; check it, {how}",
}
_SIGNED_EXPIRED = "the signed address has expired; sign it again, and write the new one in {key}"


def _advice(error: BaseException) -> str | None:
    """What to do about an error that its code explains; None: its status decides."""
    code = next((code for e in _chain(error) if (code := code_of(e))), "")
    if code.startswith("KMS.") or (code == "AccessDenied" and _says(error, ("kms:",))):
        return _KMS
    if code == "AccessDenied" and _says(error, ("request has expired",)):
        return _SIGNED_EXPIRED
    return _ADVICE.get(code)


def in_one_line(error: BaseException) -> str:
    """The error's kind and words, without what is secret in a URL."""
    text = _SECRET.sub(lambda found: found[1] or "?…", " ".join(str(error).split()))
    name = type(error).__name__
    if isinstance(error, RequestError):
        return text[:300]
    return f"{name}: {text[:300]}" if text else name


def _refusal(error: BaseException) -> str:
    """What was refused; without the right to list, S3 reports a missing file as forbidden."""
    asked = next((op for e in _chain(error) if (op := getattr(e, "operation_name", None))), "")
    if asked.startswith("List"):
        return f"{in_one_line(error)}, to {asked}: listing is a permission of its own"
    if asked:
        return (
            f"{in_one_line(error)}, to {asked}; without the permission to list, a store answers"
            " so for a missing file too"
        )
    return in_one_line(error)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    return any(word in f"{type(e).__name__} {e}".lower() for e in _chain(error) for word in words)


def _how_to(kind: str) -> str:
    keys = {
        "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or ~/.aws/credentials, or, where all may"
        " read, data.storage_options: {s3: {anon: true}}",
        "oci": "data.storage_options: {oci: {key: …, secret: …}}, a customer secret key",
        "gs": "gcloud auth application-default login, or data.storage_options: {gs: {token: …}}",
        "az": "data.storage_options: {az: {account_name: …, account_key: …}}",
        "hf": "hf auth login, or the environment's HF_TOKEN",
    }
    return keys.get(kind, f"data.storage_options: {{{kind}: …}}")


def _is_refused(error: BaseException) -> bool:
    if status(error) in (401, 403):
        return True
    return any(
        isinstance(e, PermissionError)
        or not _CREDENTIAL_NAMES.isdisjoint(_names(e))
        or str(e).startswith("Forbidden: ")  # gcsfs, without the status
        for e in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def status(error: BaseException) -> int | None:
    """The HTTP status behind an error."""
    return next((s for e in _chain(error) if (s := _own_status(e)) is not None), None)


def _own_status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        found = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        found = [getattr(response, "status_code", None)]
    found += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((s for s in found if isinstance(s, int) and 300 <= s < 600), None)
