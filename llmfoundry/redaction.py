"""Mask secrets in printed and saved text: passwords, keys, signed URLs.

Text that may contain parts of a recipe is passed through `public`, and values of a recipe through
`public_values`. A secret is recognized by its location: the values of `storage_options`, the URL of
a `webhook`, and the password, signature or token in any URL. `hide` collects the values at these
locations, and they are then masked in all texts, including messages of other libraries. An
interpolation such as `${oc.env:NAME}` is not a secret and is kept.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any
from urllib.parse import quote, unquote

MASK = "***"
OPTIONS = "storage_options"
_WHOLE = ("webhook",)  # keys whose complete URL is a secret
# names and values (Google's login methods) in storage_options that are not secrets
_OPEN_NAMES = re.compile(
    r"account_name|addressing_style|anon|endpoint(_url)?|mode|namespace|profile|project|timeout"
    r"|region(_name)?|requester_pays|signature_version|use_ssl|verify|version_aware"
    r"|(default_)?(block_size|cache_type)|(connect|read)_timeout|max_\w+"
)
_OPEN_VALUES = ("", "anon", "browser", "cache", "cloud", "google_default")
_SHORTEST = 8  # minimum characters of a secret that is masked in all texts

# references to a secret that do not contain it: ${oc.env:NAME}, ${another.key}
_REFERENCE = r"\$\{(?:oc\.env:\w+(?:,\s*null)?|oc\.decode:\$\{oc\.env:\w+\}|[A-Za-z_][\w.\[\]]*)\}"
_IS_REFERENCE = re.compile(rf"(?:{_REFERENCE})+")
_DEFAULT = re.compile(r"(\$\{oc\.env:\w+),(?!\s*null\}).*\}", re.DOTALL)
_NAMES = (
    r"(?:sig|signature|tokens?|secret|password|passwd|pwd|credentials?|key(?:_?id)?|jwt"
    r"|auth|authorization)"
)


def _places(end: str) -> list[re.Pattern[str]]:
    """Return patterns of secrets in URLs: group 1 precedes the secret, group 2 is the secret.

    A user name without a password is a token in http URLs, but a container in az:// and oci://.
    Passwords of databases may contain a slash (SQLAlchemy's rule).

    Args:
        end: characters that end a secret in a query string.
    """
    user = r"(?:\$\{[^{}\s]*\}|(?!\$\{)[^/@:\s])*"
    database = r"(?:postgres\w*|mysql|mariadb|mssql|oracle)(?:\+\w+)?"
    return [
        re.compile(rf"({database}://{user}:)([^@\s]+)(?=@)"),
        re.compile(rf"(://{user}:)((?:{_REFERENCE}|[^/\s])*)(?=@)"),
        re.compile(rf"(https?://)((?:{_REFERENCE}|[^/@:\s])+)(?=@)", re.IGNORECASE),
        re.compile(rf"([?&;#][\w.%-]*{_NAMES}=)((?:{_REFERENCE}|[^{end}])+)", re.IGNORECASE),
    ]


_IN_TEXT = _places(r"&\s#\"'<>,;)\]}\\|")
_IN_VALUE = _places(r"&\s#")  # for a value that is a URL
_SECRET_VARIABLE = re.compile(rf"\$\{{oc\.env:(\w*{_NAMES})\b", re.IGNORECASE)
_IN_CODE = [
    re.compile(
        rf"((?:\b|_){_NAMES}[\"']?\s*[:=]\s*[\"'])([^\"'\s<${{][^\"'\s]{{7,}})", re.IGNORECASE
    ),
    re.compile(rf"(\b[A-Z0-9_]*{_NAMES.upper()}=)([\w./+-]{{8,}})"),
    re.compile(r"\b((?:hf_|sk-|gh[po]_|glpat-|xox[bp]-|dapi|AKIA))([\w-]{16,})"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)([^-]+)"),
]
"""Patterns of secrets in code and settings: assignments to such names, and known token prefixes."""
_known: list[str] = []
"""Collected secrets, longest first."""


def public(text: str) -> str:
    """Return `text` with every secret replaced by `***`."""
    for secret in _known:
        text = text.replace(secret, MASK)
    return _masked(text, _IN_TEXT)


def public_code(text: str) -> str:
    """Mask secrets in code and settings, including assignments such as `api_key = "..."`."""
    return _masked(public(text), _IN_CODE)


def public_texts(values: Any) -> Any:
    """Apply `public` to all strings in nested values."""
    if isinstance(values, Mapping):
        return {key: public_texts(item) for key, item in values.items()}
    if isinstance(values, list | tuple):
        return [public_texts(item) for item in values]
    return public(values) if isinstance(values, str) else values


def public_values(values: Any) -> Any:
    """Mask the secrets among a recipe's plain values; interpolations are kept as written."""
    return _public(values, name="", inside=False)


def masked_keys(values: Any) -> Iterator[str]:
    """Yield the dotted key of each value in which `public_values` has masked a secret."""
    for key, value, is_secret in _leaves(values):
        if is_secret:
            if value == MASK:
                yield key
        elif isinstance(value, str):
            matches = [match for pattern in _IN_VALUE for match in pattern.finditer(value)]
            if any(match[2] == MASK for match in matches):
                yield key


def hide(values: Any) -> None:
    """Collect the secrets among a recipe's values, to mask them in all texts from now on."""
    for _, value, is_secret in _leaves(values):
        if isinstance(value, bool) or value is None:
            continue
        text = str(value)
        _add(text if is_secret else "")
        for pattern in _IN_VALUE:
            for match in pattern.finditer(text):
                _add(match[2])
        for match in _SECRET_VARIABLE.finditer(text):
            _add(os.environ.get(match[1], ""))


def hide_variables(names: Iterable[str]) -> None:
    """Collect the values of environment variables, to mask them in all texts from now on."""
    for name in names:
        _add(os.environ.get(name, ""))


def hide_override(word: str) -> None:
    """Collect the secrets in a word of the command line (`hide`)."""
    key, _, text = word.partition("=")
    hide({_secret_name(key): text} if _secret_name(key) else text)


def public_override(word: str) -> str:
    """Mask the secrets in a word of the command line."""
    key, _, _ = word.partition("=")
    return f"{key}={MASK}" if _secret_name(key) else public(word)


def _secret_name(key: str) -> str:
    """Return the part of a dotted key that makes its complete value a secret; empty: none."""
    parts = key.lstrip("+~").split(".")
    return OPTIONS if OPTIONS in parts else parts[-1] if parts[-1] in _WHOLE else ""


def names_a_secret(variable: str) -> bool:
    """Return whether the name of an environment variable indicates a secret."""
    return re.search(rf"(?:^|_){_NAMES}$", variable, re.IGNORECASE) is not None


def mask_tracebacks() -> None:
    """Mask secrets in the tracebacks of uncaught errors from now on."""

    def show(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.stderr.write(public("".join(traceback.format_exception(kind, error, trace))))

    def show_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_type is not SystemExit:
            show(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = show, show_thread


def _public(value: Any, *, name: str, inside: bool) -> Any:
    inside = inside or name == OPTIONS
    if isinstance(value, Mapping):
        return {key: _public(item, name=str(key), inside=inside) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_public(item, name=name, inside=inside) for item in value]
    if not _is_secret(value, name=name, inside=inside):
        return _masked(value, _IN_VALUE) if isinstance(value, str) else value
    text = _DEFAULT.sub(r"\1}", str(value))  # of `${oc.env:NAME,a secret}` the first half
    return text if _IS_REFERENCE.fullmatch(text) else MASK


def _leaves(value: Any, key: str = "", *, name: str = "", inside: bool = False) -> Iterator[Any]:
    """Yield (dotted key, value, whether the complete value is a secret) of all leaf values."""
    inside = inside or name == OPTIONS
    if isinstance(value, Mapping):
        for part, item in value.items():
            dotted = f"{key}.{part}" if key else str(part)
            yield from _leaves(item, dotted, name=str(part), inside=inside)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{key}[{i}]", name=name, inside=inside)
    else:
        yield key, value, _is_secret(value, name=name, inside=inside)


def _is_secret(value: Any, *, name: str, inside: bool) -> bool:
    is_open = value is None or isinstance(value, bool) or value in _OPEN_VALUES
    if name in _WHOLE:
        return not is_open
    return inside and not is_open and _OPEN_NAMES.fullmatch(name) is None


def _masked(text: str, places: list[re.Pattern[str]]) -> str:
    for place in places:
        text = place.sub(_replaced, text)
    return text


def _replaced(found: re.Match[str]) -> str:
    return found[0] if _IS_REFERENCE.fullmatch(found[2]) else found[1] + MASK


def _add(secret: str) -> None:
    """Add a secret to the collected ones, also in its URL-encoded and decoded forms."""
    if MASK in secret or "${" in secret:
        return
    spelled = {text for text in (secret, unquote(secret), quote(secret, safe="")) if text}
    new = {text for text in spelled if len(text) >= _SHORTEST}
    _known[:] = sorted({*_known, *new}, key=len, reverse=True)
