"""`ChatSandbox`: the Jinja environment of chat templates, which are a stranger's programs.

What transformers adds to Jinja for them is here too; beyond its sandbox, which lets a loop run for
ever and a text grow without end, loops and calls are counted and texts bounded.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

STEPS = 2_000_000  # loop iterations and calls of one rendering: about a second
LONGEST = 1 << 26  # characters or items of any value that an expression makes
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_WIDE = re.compile(r"%[^a-zA-Z%]*(\*|\d{5,})")  # a format that pads to a width
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
    """Compiles templates; `begin` before each rendering."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
        )
        self._left = STEPS
        self.filters.update(tojson=_tojson, center=_center, _count=_count, _join=_join)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]  # would make text of any length at no cost

    def begin(self) -> None:
        """Count the steps of a rendering from here."""
        self._left = STEPS

    def step(self) -> None:
        """Count one.

        Raises:
            SecurityError: there were too many.
        """
        self._left -= 1
        if self._left < 0:
            raise SecurityError(f"more than {STEPS:,} steps; it may have no end")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Have each iteration counted, and each joining of texts with ~ bounded."""
        template = super()._parse(source, name, filename)
        for loop in list(template.find_all(nodes.For)):
            count = nodes.ExprStmt(_filtered(nodes.Const(0), "_count"))
            loop.body.insert(0, count.set_lineno(loop.lineno).set_environment(self))
        for joined in list(template.find_all(nodes.Concat)):
            joined.nodes = [_filtered(nodes.List(joined.nodes), "_join")]
            joined.set_lineno(joined.lineno).set_environment(self)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call; counted, and none that pads a text to any width."""
        __self.step()
        name = getattr(__obj, "__name__", "")
        if name in _PADDING and any(isinstance(a, int) and a > LONGEST for a in args):
            raise SecurityError(f"{name} to more than {LONGEST:,} characters")
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product, power, sum or format of values that stay within bounds."""
        sizes = [_size(left), _size(right)]
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and (sizes[0] > 1000 or sizes[1] > 64):
            raise SecurityError("a power of large numbers")
        if operator == "*" and (sizes[0] * sizes[1] > LONGEST and not numbers):
            raise SecurityError(f"more than {LONGEST:,} characters")
        if operator == "+" and (sum(sizes) > LONGEST and not numbers):
            raise SecurityError(f"more than {LONGEST:,} characters")
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise SecurityError("a format with a width")
        return super().call_binop(context, operator, left, right)


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 0


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


@pass_context  # so that it is not computed when the template is compiled
def _count(context: Context, value: Any) -> Any:
    assert isinstance(context.environment, ChatSandbox)
    context.environment.step()
    return value


@pass_context
def _join(context: Context, parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > LONGEST:
        raise SecurityError(f"more than {LONGEST:,} characters")
    return "".join(texts)


def _center(value: Any, width: int = 80) -> str:
    return str(value).center(min(width, 10_000))


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
