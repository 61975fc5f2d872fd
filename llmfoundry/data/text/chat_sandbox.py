"""Jinja environment of chat templates, with the additions of transformers.

Entry point: `ChatSandbox`. It does not limit loops or the length of a text. `chat_template.py`
therefore runs untrusted templates in a child process.
"""

from __future__ import annotations

import datetime
import json
import secrets
from typing import Any

import jinja2.debug  # noqa: F401 (imported by Jinja when a template fails, too late in a child)
from jinja2 import meta, nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_NONCE = secrets.token_hex(8)  # random, so that no message can contain a mark
BEGIN, END = f"\ue010{_NONCE}\ue011", f"\ue012{_NONCE}\ue013"
"""Marks around a {% generation %} block until `chat_template.rendered` removes them."""


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: text of the assistant, which is in the loss."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse a block that renders its text between BEGIN and END."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Sandbox that compiles templates and hides Python attributes; it sets no limits."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
        )
        self.filters.update(tojson=_tojson)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def variables_of(self, text: str) -> set[str]:
        """Return the variables that a source reads and does not set."""
        return meta.find_undeclared_variables(self.parse(text))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
