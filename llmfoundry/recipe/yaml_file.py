"""Strict reading of YAML files, with the line of each key.

The rules are stricter than YAML 1.1 to reveal mistakes: a duplicate key is an error; only true and
false are booleans (so the group choice `eval: off` is a text); dates, times (12:30) and numbers
that begin with 0 stay texts; keys are texts. The content of a file is bounded, so that a few
kilobytes cannot expand to gigabytes (anchors of anchors) or form a cycle (anchors that contain
themselves).
"""

from __future__ import annotations

import functools
import os
import re
import stat
from pathlib import Path
from typing import Any

import yaml

from llmfoundry.errors import UserError
from llmfoundry.recipe.paths import show

MOST_BYTES = 1 << 20  # of a file; a whole recipe has a hundredth
MOST_CHARACTERS = 1 << 22  # of its values, those behind an anchor counted each time
DEEPEST = 40  # lists and mappings within each other
_STR, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_TAGS = {f"tag:yaml.org,2002:{n}" for n in ("str", "int", "float", "bool", "null", "seq", "map")}


class _Loader(yaml.SafeLoader):
    """SafeLoader with the rules above."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Report the location of a scalar that its tag or form does not allow."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _error(node, f"{node.value!r} cannot be read as {kind}") from error


def _plain(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{pattern})$")


_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if rule[0].rsplit(":", 1)[1] in ("null", "merge")]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", _plain("true|True|TRUE|false|False|FALSE"), list("tTfF")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    _plain("[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    _plain(
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in the file at `path`; empty for an empty file.

    Raises:
        UserError: the file cannot be read, is not YAML, or holds no mapping: `path:line: why`.
    """
    node = _node(path)
    if node is None:
        return {}
    try:
        content = _Loader("").construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(yaml_problem(error, path)) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{show(path)}:1: holds no keys; a recipe is lines of `key: value`")
    return content


def _node(path: Path) -> yaml.Node | None:
    """Return the bounded YAML tree of a file; None for an empty file."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{show(path)}: is not a file; a device or a pipe cannot be a recipe")
        if status.st_size > MOST_BYTES:
            raise UserError(
                f"{show(path)}: has {status.st_size:,} bytes; a recipe has at most {MOST_BYTES:,}"
            )
        return _compose(path.read_bytes())
    except OSError as error:
        raise UserError(f"{show(path)}: {error.strerror}") from error
    except RecursionError:
        raise UserError(f"{show(path)}: is nested more than {DEEPEST} deep; flatten it") from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(yaml_problem(error, path)) from error


@functools.lru_cache(maxsize=64)  # the same file is read for its values, defaults and lines
def _compose(text: bytes) -> yaml.Node | None:
    """Return the checked YAML tree of a text; None: the text is empty."""
    node = _Loader(text).get_single_node()
    if node is not None:
        _measure(node, {}, 0)
    return node


def _measure(node: yaml.Node, sizes: dict[int, int | None], depth: int) -> int:
    """Return the number of characters to which `node` expands.

    Args:
        node: a node of the tree.
        sizes: sizes of the visited nodes, by id; None for a node that contains this one.
        depth: number of nodes around it.

    Raises:
        yaml.MarkedYAMLError: the node is too large or too deep, contains itself, or has a duplicate
            key, or a key or tag that recipes do not allow.
    """
    # a node that an alias has repeated, and the checks of a new node
    if id(node) in sizes:
        size = sizes[id(node)]
        if size is None:
            raise _error(node, "an anchor here holds itself; write the values out")
        return size
    if depth > DEEPEST:
        raise _error(node, f"is nested more than {DEEPEST} deep; flatten it")
    if node.tag not in _TAGS and node.tag != _MERGE:
        raise _error(node, f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')} has no use here")

    # add up the size of its value, items or pairs; None marks a node that is not finished
    sizes[id(node)] = None
    size = 1
    if isinstance(node, yaml.ScalarNode):
        size += len(node.value)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_measure(item, sizes, depth + 1) for item in node.value)
    else:
        seen = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error(key, "a key here is a list or a mapping; a key is a text")
            if key.tag != _MERGE:  # a merge key `<<` may occur twice
                key.tag = _STR
                if key.value in seen:
                    raise _error(key, f"key '{key.value}' is given twice; remove one")
            seen.add(key.value)
            size += _measure(key, sizes, depth + 1) + _measure(value, sizes, depth + 1)
    if size > MOST_CHARACTERS:
        raise _error(node, f"its anchors unfold to more than {MOST_CHARACTERS:,} characters")
    sizes[id(node)] = size
    return size


def _error(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    """Return an error with the line of a node."""
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def yaml_problem(error: Exception, path: Path) -> str:
    """Return a YAML error as `path:line: problem`."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return f"{show(path)}: is not a YAML text; {str(error).splitlines()[0]}"
    problem = getattr(error, "problem", None) or getattr(error, "context", "")
    return f"{show(path)}:{mark.line + 1}: {problem}"


def line_of(path: Path, key: str) -> int | None:
    """Return the line, from 1, of a dotted key in the file at `path`; None if it is not there."""
    node = _node(path)
    line = None
    for part in key.split("."):
        if not isinstance(node, yaml.MappingNode):
            return None
        matches = [(k, v) for k, v in node.value if k.value == part]
        if not matches:
            return None
        key_node, node = matches[-1]  # keys that << merges come before the mapping's own keys
        line = key_node.start_mark.line + 1
    return line
