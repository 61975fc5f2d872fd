"""Chat templates that have no end, take all memory, or reach for what they may not have."""

from __future__ import annotations

_NS = "{% set ns = namespace(n=3, x='aa', l=[1]) %}"
_ROUNDS = "{% for i in range(99) %}"
_END = "{% endfor %}"

HOSTILE = {
    # no end
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}a" + 2 * _END,
    "recursive loop": "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "macro calls itself twice": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "squares": _NS + _ROUNDS + "{% set ns.n = ns.n * ns.n %}" + _END,
    "power": "{{ 10 ** (10 ** 10) }}",
    "power in a constant": "{% set x = 9 ** (9 ** 9) %}",
    "shift by powers": "{{ (2 ** 30000000) ** 300 }}",
    "slice": "{{ [1]|slice(999999999)|list }}",
    "replace doubles": _NS + _ROUNDS + "{% set ns.x = ns.x.replace('a', 'aa') %}" + _END,
    "replace filter doubles": _NS + _ROUNDS + "{% set ns.x = ns.x|replace('a', 'aa') %}" + _END,
    "tojson of nested lists": _NS + _ROUNDS + "{% set ns.l = [ns.l, ns.l] %}" + _END
    + "{{ ns.l|tojson }}",
    "string of nested lists": _NS + _ROUNDS + "{% set ns.l = [ns.l, ns.l] %}" + _END
    + "{{ ns.l|string }}",
    "nested lists are equal": _NS + _NS.replace("ns", "ms") + _ROUNDS
    + "{% set ns.l = [ns.l, ns.l] %}{% set ms.l = [ms.l, ms.l] %}" + _END + "{{ ns.l == ms.l }}",
    "sum of ranges": "{% for i in range(99999) %}{{ range(99999)|sum }}" + _END,
    "sort of ranges": "{% for i in range(99999) %}{{ range(99999)|sort|length }}" + _END,
    "unique of ranges": "{% for i in range(99999) %}{{ range(99999)|unique|list|length }}" + _END,
    "product of loops by call": "{% macro m(n) %}{% for i in range(99) %}{% if n %}{{ m(n - 1) }}"
    "{% endif %}{% endfor %}{% endmacro %}{{ m(20) }}",
    "groupby in loops": "{% for i in range(99999) %}{{ range(9999)|groupby('real')|length }}"
    + _END,
    "wordwrap": "{{ ('a ' * 9999999)|wordwrap(1) }}",
    "urlize": "{{ ('www.a.' * 9999999)|urlize }}",
    "number of digits": "{{ (10 ** 4000000)|string|length }}{{ 7 ** 9999999 % 10 }}",
    # memory
    "padded by format": "{{ '{:>9999999999}'.format('a') }}",
    "padded by nested format": "{{ '{:>{w}}'.format('a', w=9999999999) }}",
    "padded by percent": "{{ '%(a)9999999999s' % {'a': 1} }}",
    "padded number": "{{ '%999999999d' % 1 }}{{ '%999999999d' % 1 }}",
    "format filter": "{{ '%9999999999s'|format('a') }}",
    "indent": "{{ 'a\n'|indent(9999999999, true) }}",
    "indent of tojson": "{{ [[[1]]]|tojson(indent=9999999999) }}",
    "batch": "{{ [1]|batch(9999999999, 0)|list|length }}",
    "join": "{{ range(99999)|join('a' * 999999)|length }}",
    "join of many": "{{ ('a' * 99999999)|join('bbbbbbbbbbbbbbbb')|length }}",
    "product of text": "{{ 'a' * 10 ** 10 }}",
    "product of list": "{{ ([1] * 10 ** 10)|length }}",
    "text doubles": _NS + _ROUNDS + "{% set ns.x = ns.x ~ ns.x %}" + _END,
    "list doubles": _NS + _ROUNDS + "{% set ns.l = ns.l + ns.l %}" + _END,
    "center": "{{ 'a'.center(10 ** 12) }}",
    "center filter": "{{ 'a'|center(10 ** 12) }}",
    "ljust": "{{ 'a'.ljust(10 ** 12) }}",
    "zfill": "{{ 'a'.zfill(10 ** 12) }}",
    "expandtabs": "{{ ('\t' * 999).expandtabs(10 ** 9) }}",
    "lipsum": "{{ lipsum(n=10 ** 6) }}",
    "long text": "{{ 'a' * 60000000 }}",
    "encode": "{{ ('a' * 400000000).encode('utf-32') }}",
    # depth
    "deep expression": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep list": "{{ " + "[" * 50000 + "]" * 50000 + " }}",
    "deep call": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}  # fmt: skip
"""By what they do."""

REFUSED = {
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "messages change": "{{ messages.append(3) }}",
    "another file": "{% include '/etc/passwd' %}",
    "an exception": "{{ raise_exception('roles must alternate') }}",
    "division": "{{ 1 / 0 }}",
    "nothing there": "{{ messages[0].nothing.there }}",
}
"""Those that end at once, with a reason."""
