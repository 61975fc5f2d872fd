"""`ChatSandbox`: the Jinja environment of chat templates, with what transformers adds to it.

It lets a loop run for ever and a text grow without end: `chat_template` runs templates of others in
a child process.
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

_NONCE = secrets.token_hex(8)  # so that no message can spell a mark
BEGIN, END = f"\ue010{_NONCE}\ue011", f"\ue012{_NONCE}\ue013"
"""What stands around a marked text until `chat_template.rendered` takes it out again."""


class _Generation(Extension):
    """{% generation %} … {% endgeneration %}: what the assistant wrote, which is learned."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """A block that gives its own text between BEGIN and END."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates; it hides Python's own attributes, and bounds nothing."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
        )
        self.filters.update(tojson=_tojson)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def variables_of(self, text: str) -> set[str]:
        """What a source reads and does not set."""
        return meta.find_undeclared_variables(self.parse(text))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML that Jinja's own has."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
