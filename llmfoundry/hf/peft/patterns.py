"""Patterns of an adapter_config.json over names of modules: regular expressions, as in peft.

`read` matches by them, and `hf_adapter` lets peft do so. The one idea: names, which is what peft
itself writes, are looked up; any other expression of a file of others may never end, and is matched
in the bounded child, for peft beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from llmfoundry.bounded import run_bounded

_NAME = re.compile(r"[\w.\-]*")


def first_matches(patterns: Sequence[str], names: Sequence[str], *, file: str) -> dict[str, str]:
    """By name the first of alpha_pattern's keys that matches it by peft's rule, if any does.

    Args:
        patterns: each matches the end of a name, from a dot or the beginning on.
        names: of modules.
        file: that the patterns are from, for messages.

    Raises:
        UserError: a pattern is no regular expression, or takes too long.
    """
    if all(map(_NAME.fullmatch, patterns)):
        return _by_end(patterns, names)
    return run_bounded(partial(_by_expression, patterns), [names], file=file)[0]


def check_patterns(config: Mapping[str, Any], names: Sequence[str], *, file: str) -> None:
    """See that peft can match all patterns of a configuration with the modules of a model.

    Raises:
        UserError: a pattern is no regular expression, or takes too long.
    """
    expressions = [*_expressions(config)]
    if expressions:
        run_bounded(partial(_match_all, expressions), [names], file=file)


def ends(name: str) -> Iterator[str]:
    """A name, and what stands behind each of its dots."""
    while name:
        yield name
        name = name.partition(".")[2]


def _by_end(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    order = {pattern: n for n, pattern in enumerate(patterns)}
    found = {name: [end for end in ends(name) if end in order] for name in names}
    return {name: min(of_it, key=order.__getitem__) for name, of_it in found.items() if of_it}


def _by_expression(patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    compiled = {pattern: re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns}
    found = {name: next((p for p, c in compiled.items() if c.match(name)), None) for name in names}
    return {name: pattern for name, pattern in found.items() if pattern is not None}


def _expressions(config: Mapping[str, Any]) -> Iterator[str]:
    """What peft 0.18 gives to `re`, of patterns that are more than names."""
    forms = {"target_modules": "({})$", "exclude_modules": "({})$", "rank_pattern": r"(.*\.)?({})$",
             "alpha_pattern": r"(.*\.)?({})$", "modules_to_save": r"(^|.*\.){}($|\..*)",
             "layers_pattern": r"(?:^|.*?\.){}\.(?P<idx>\d+)\."}  # fmt: skip
    for key, form in forms.items():
        given = config.get(key)
        if isinstance(given, list) and key in ("target_modules", "exclude_modules"):
            continue  # compared as names
        for pattern in [given] if isinstance(given, str) else given or ():
            if isinstance(pattern, str) and not _NAME.fullmatch(pattern):
                yield form.replace("{}", pattern)


def _match_all(expressions: Sequence[str], names: Sequence[str]) -> None:
    for expression in expressions:
        for name in names:
            re.match(expression, name)
