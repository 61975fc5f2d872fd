"""Classification of failed requests: transient or permanent, and the message for the user.

`store.Store` calls `is_passing` and `remote_problem`. Each library has its own exceptions, but each
stores the HTTP status in an attribute of the exception or of its cause. The class name provides
the rest. The text of an obstore error is parsed once, into a `RequestError`. An unknown error is
permanent, so that it is reported at once and not after minutes of retries.
"""

from __future__ import annotations

import errno
import http.client
import re
import urllib.error
from collections.abc import Iterator
from contextlib import suppress

from llmfoundry.retry import DeadlineExceeded

_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 529})
_THROTTLED_STATUS = frozenset({429, 503, 509})
_PASSING_CODES = frozenset({"RequestTimeout"})  # of S3, with status 400
_LONGEST_ANSWER = 1 << 14  # bytes read of a web server's error page
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
    """Failed request to a bucket.

    Attributes:
        status: HTTP status; None: no response.
        operation_name: S3 permission that the request needs, such as GetObject.
        attempts: number of attempts made by the library.
        kind: kind of connection error, such as Timeout; "": none.
        error_code: error code of the store, such as ExpiredToken; "": none.
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
    """Parse the text of an obstore error: a line about the request, then a dump of its causes."""
    text, _, causes = str(error).partition("\n\nDebug source:")

    # status and reason phrase
    status_line = re.search(r"status code: (\d{3}) ?([\w ]*)", text)
    status = int(status_line[1]) if status_line else _STATUS_OF.get(type(error).__name__)
    phrase = status_line[2].strip() if status_line else ""
    if "redirect without LOCATION" in text:
        status = 301

    # without a status: kind of the connection error
    kind = ""
    failure = re.search(r"HttpError \{\s+kind: (\w+)", causes)
    if status is None and failure:
        is_late = "TimedOut" in causes or "timed out" in causes
        kind = "Timeout" if is_late else failure[1]

    retries = re.search(r"after (\d+) retries", text)
    return RequestError(
        _reason(text, causes, phrase),
        status=status,
        operation=operation,
        attempts=int(retries[1]) + 1 if retries else 1,
        kind=kind,
        error_code=_code_in(text),
    )


def answer_of_web(error: urllib.error.HTTPError) -> Exception:
    """Return the error of a web server, or a RequestError if its body has a store's error code.

    Signed URLs of a store are read as web addresses.
    """
    if error.code == 416:  # the caller reads the file size from the headers of this error
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
    match = re.search(r"<Code>([^<]*)</Code>", text)
    return match[1].strip() if match else ""


def _reason(text: str, causes: str, phrase: str) -> str:
    """Return the reason of an error: the store's code and message, or the operating system's.

    Args:
        text: error text, which contains the body of the response.
        causes: dump of the causes.
        phrase: reason phrase of the HTTP status.
    """
    message = re.search(r"<Message>([^<\n]*)", text) or re.search(r'"message": ?"([^"]*)"', text)
    words = [*filter(None, [_code_in(text), message[1].strip() if message else ""])]
    if words or phrase:
        return ": ".join(dict.fromkeys(words or [phrase]))
    details = re.findall(r'message: "([^"]+)"', causes)
    details = details or re.findall(r"\b(Incomplete\w+)", causes)
    summary = text.partition("\n")[0].rpartition(" - ")[2]
    return f"{summary} ({details[-1]})" if details else summary


def is_past_end(error: BaseException) -> bool:
    """Return whether the requested range begins after the end of the file."""
    return status(error) == 416


def is_missing(error: BaseException) -> bool:
    """Return whether the file does not exist."""
    http_status = status(error)
    if http_status is not None:
        return http_status == 404
    return any(isinstance(e, FileNotFoundError | IsADirectoryError) for e in _chain(error))


def is_no_bucket(error: BaseException) -> bool:
    """Return whether the bucket itself is missing."""
    return _says(error, _NO_BUCKET)


def is_passing(error: BaseException) -> bool:
    """Return whether the error is transient: the same request may succeed later."""
    for e in _chain(error):  # the outermost exception with a verdict decides
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
    """Return the store's error code of an obstore or botocore exception; "" if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    return str(getattr(error, "error_code", ""))


def is_timeout(error: BaseException) -> bool:
    """Return whether nothing, or too little, arrived within the timeout."""
    # The class name is checked as well: some libraries do not derive from TimeoutError.
    return any(
        isinstance(e, TimeoutError | DeadlineExceeded)
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
    """Return one line with the cause of an error and what to do about it.

    Args:
        error: exception of a library.
        kind: kind of the store: s3, gs …
        attempts: number of attempts.
        timeout: data.download_timeout, seconds.
        bucket: requested bucket.
        key: recipe key that names the store.
    """
    of_stream = " (or the stream's)" if key == DATA_KEY else ""

    # credentials, and errors with a known code
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

    # missing or forbidden
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

    # transient, and all else
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


# Advice by error code, from the documentation of S3 and Azure, where the status alone misleads.
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
    """Return advice for an error with a known error code; None if its status decides."""
    codes = map(code_of, _chain(error))
    code = next(filter(None, codes), "")
    if code.startswith("KMS.") or (code == "AccessDenied" and _says(error, ("kms:",))):
        return _KMS
    if code == "AccessDenied" and _says(error, ("request has expired",)):
        return _SIGNED_EXPIRED
    return _ADVICE.get(code)


def in_one_line(error: BaseException) -> str:
    """Return the class and text of an error, without secrets in URLs."""
    text = _SECRET.sub(lambda match: match[1] or "?…", " ".join(str(error).split()))
    name = type(error).__name__
    if isinstance(error, RequestError):
        return text[:300]
    return f"{name}: {text[:300]}" if text else name


def _refusal(error: BaseException) -> str:
    """Return the error and the refused operation.

    Without the permission to list, S3 reports a missing file as forbidden.
    """
    operations = (getattr(e, "operation_name", None) for e in _chain(error))
    operation = next(filter(None, operations), "")
    if operation.startswith("List"):
        return f"{in_one_line(error)}, to {operation}: listing is a permission of its own"
    if operation:
        return (
            f"{in_one_line(error)}, to {operation}; without the permission to list, a store answers"
            " so for a missing file too"
        )
    return in_one_line(error)


def _says(error: BaseException, words: tuple[str, ...]) -> bool:
    """Return whether the class or text of the error or of its causes contains one of `words`."""
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
        or str(e).startswith("Forbidden: ")  # gcsfs drops the status
        for e in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or of its causes; None if there is none."""
    for e in _chain(error):
        http_status = _own_status(e)
        if http_status is not None:
            return http_status
    return None


def _own_status(error: BaseException) -> int | None:
    """Return the HTTP status in an attribute of this exception alone."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        candidates = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")]
    else:
        candidates = [getattr(response, "status_code", None)]
    candidates += [getattr(error, name, None) for name in ("status", "status_code", "code")]
    return next((s for s in candidates if isinstance(s, int) and 300 <= s < 600), None)
