"""Reads YAML for the front: values with strict rules, and the line on which a key stands.

Stricter than YAML 1.1 where that hides mistakes: a key given twice is an error; only true and false
are booleans (so the group choice `eval: off` is a text), and dates stay texts.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.paths import show


class _Loader(yaml.SafeLoader):
    """SafeLoader with the rules above."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Refuse a key that this mapping has already (merge keys << may repeat one)."""
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key '{key.value}' is given twice; remove one",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0].rsplit(":", 1)[1] not in ("bool", "timestamp")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF")
)


def read(path: Path) -> dict[str, Any]:
    """The mapping in the file at `path`; empty for an empty file.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds no mapping: `path:line: why`.
    """
    try:
        content = yaml.load(path.read_bytes(), _Loader)
    except OSError as error:
        raise UserError(f"{show(path)}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(explain(error, path)) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{show(path)}:1: holds no keys; a recipe is lines of `key: value`")
    return {str(key): value for key, value in content.items()}


def explain(error: Exception, path: Path) -> str:
    """A YAML error as `path:line: problem`."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"{show(path)}: is not a YAML text; {str(error).splitlines()[0]}"
    problem = getattr(error, "problem", None) or getattr(error, "context", "")
    return f"{show(path)}:{mark.line + 1}: {problem}"


def line_of(path: Path, key: str) -> int | None:
    """The line, from 1, on which dotted `key` stands in the file at `path`; None without it."""
    node = yaml.compose(path.read_bytes(), _Loader)
    line = None
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            return None
        found = [(k, v) for k, v in node.value if k.value == part]
        if not found:
            return None
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line
