"""Secrets that must not be shown or saved: passwords, keys, signed addresses.

Whatever is printed or written and may hold a part of a recipe goes through `public` (a text) or
`public_values` (a recipe's values). The idea: a secret is known by its place. In a recipe these are
the values of `storage_options` and the address of a `webhook`, and in any text the password, the
signature or the token of an address. Values found at such places (`hide`) are masked wherever else
they turn up, in the message of another library too. An interpolation such as `${oc.env:NAME}` is
not a secret, and stays.
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
_WHOLE = ("webhook",)  # keys whose address has its secret in the path
# What stands below storage_options and is not a secret: these names, and these values (ways to log
# in at Google's).
_OPEN_NAMES = re.compile(
    r"account_name|addressing_style|anon|endpoint(_url)?|mode|namespace|profile|project|timeout"
    r"|region(_name)?|requester_pays|signature_version|use_ssl|verify|version_aware"
    r"|(default_)?(block_size|cache_type)|(connect|read)_timeout|max_\w+"
)
_OPEN_VALUES = ("", "anon", "browser", "cache", "cloud", "google_default")
_SHORTEST = 8  # characters of a secret that is looked for where no key names it

# What names a secret without holding it: ${oc.env:NAME}, ${another.key}.
_REFERENCE = r"\$\{(?:oc\.env:\w+(?:,\s*null)?|oc\.decode:\$\{oc\.env:\w+\}|[A-Za-z_][\w.\[\]]*)\}"
_IS_REFERENCE = re.compile(rf"(?:{_REFERENCE})+")
_DEFAULT = re.compile(r"(\$\{oc\.env:\w+),(?!\s*null\}).*\}", re.DOTALL)
_NAMES = (
    r"(?:sig|signature|tokens?|secret|password|passwd|pwd|credentials?|key(?:_?id)?|jwt"
    r"|auth|authorization)"
)


def _places(end: str) -> list[re.Pattern[str]]:
    """What stands before a secret in an address, and the secret; `end`: what ends one in a query.

    A user's name alone is a token to the web, and a container to az:// and oci://. Passwords of
    databases may have a slash (SQLAlchemy's rule).
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
_IN_VALUE = _places(r"&\s#")  # an address and nothing else
_SECRET_VARIABLE = re.compile(rf"\$\{{oc\.env:(\w*{_NAMES})\b", re.IGNORECASE)
_IN_CODE = [
    re.compile(
        rf"((?:\b|_){_NAMES}[\"']?\s*[:=]\s*[\"'])([^\"'\s<${{][^\"'\s]{{7,}})", re.IGNORECASE
    ),
    re.compile(rf"(\b[A-Z0-9_]*{_NAMES.upper()}=)([\w./+-]{{8,}})"),
    re.compile(r"\b((?:hf_|sk-|gh[po]_|glpat-|xox[bp]-|dapi|AKIA))([\w-]{16,})"),
    re.compile(r"(-----BEGIN [A-Z ]*PRIVATE KEY-----)([^-]+)"),
]
"""What a line of code or of settings may set a secret to, and what is one by its first letters."""
_known: list[str] = []
"""Longer ones first."""


def public(text: str) -> str:
    """`text` with every secret in it replaced by `***`."""
    for secret in _known:
        text = text.replace(secret, MASK)
    return _masked(text, _IN_TEXT)


def public_code(text: str) -> str:
    """As `public`, for code and settings, where a secret may stand as `api_key = "..."`."""
    return _masked(public(text), _IN_CODE)


def public_texts(values: Any) -> Any:
    """Plain values with `public` done to every text in them."""
    if isinstance(values, Mapping):
        return {key: public_texts(item) for key, item in values.items()}
    if isinstance(values, list | tuple):
        return [public_texts(item) for item in values]
    return public(values) if isinstance(values, str) else values


def public_values(values: Any) -> Any:
    """A recipe's plain values, interpolations as written, as they may be shown and saved."""
    return _public(values, name="", inside=False)


def masked_keys(values: Any) -> Iterator[str]:
    """The dotted key of every value in which `public_values` once replaced a secret."""
    for key, value, is_secret in _leaves(values):
        places = [] if is_secret or not isinstance(value, str) else _IN_VALUE
        if (is_secret and value == MASK) or any(
            found[2] == MASK for place in places for found in place.finditer(value)
        ):
            yield key


def hide(values: Any) -> None:
    """Mask the secrets among a recipe's values in every text from now on."""
    for _, value, is_secret in _leaves(values):
        if isinstance(value, bool) or value is None:
            continue
        text = str(value)
        _add(text if is_secret else "")
        for place in _IN_VALUE:
            for found in place.finditer(text):
                _add(found[2])
        for found in _SECRET_VARIABLE.finditer(text):
            _add(os.environ.get(found[1], ""))


def hide_variables(names: Iterable[str]) -> None:
    """Mask the values of environment variables in every text from now on."""
    for name in names:
        _add(os.environ.get(name, ""))


def hide_override(word: str) -> None:
    """As `hide`, for a word of the command line, which nobody has read yet."""
    key, _, text = word.partition("=")
    hide({_secret_name(key): text} if _secret_name(key) else text)


def public_override(word: str) -> str:
    """A word of the command line as it may be shown."""
    key, _, _ = word.partition("=")
    return f"{key}={MASK}" if _secret_name(key) else public(word)


def _secret_name(key: str) -> str:
    """The part of a word's dotted key for which all of its value is a secret; empty: none."""
    parts = key.lstrip("+~").split(".")
    return OPTIONS if OPTIONS in parts else parts[-1] if parts[-1] in _WHOLE else ""


def names_a_secret(variable: str) -> bool:
    """Whether an environment variable's name says that its value is a secret."""
    return re.search(rf"(?:^|_){_NAMES}$", variable, re.IGNORECASE) is not None


def mask_tracebacks() -> None:
    """From now on an error that nobody catches shows no secret either."""

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
    """Dotted key, value, and whether all of it is a secret: for every value but sections."""
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
    """Remember a secret as it is and as addresses spell it."""
    if MASK in secret or "${" in secret:
        return
    spelled = {text for text in (secret, unquote(secret), quote(secret, safe="")) if text}
    new = {text for text in spelled if len(text) >= _SHORTEST}
    _known[:] = sorted({*_known, *new}, key=len, reverse=True)
