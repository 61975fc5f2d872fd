"""Writes docs/keys/: every key of a recipe, from the typed sections that check it.

    python docs/generate_keys.py          after a key, its default or its meaning changed

Types, defaults, ranges, choices and meanings are what `--help` prints (`cli/help.py`); the unit
of a number stands in its meaning. tests/test_docs.py compares the committed pages.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from llmfoundry.cli.command_line import CommandLine  # noqa: E402
from llmfoundry.cli.help import default_text, item_name, type_text  # noqa: E402
from llmfoundry.recipe.finetune import FinetuneRecipe  # noqa: E402
from llmfoundry.recipe.schema import MOST_INT, Choice, Key, Range, Schema  # noqa: E402
from llmfoundry.recipe.train import TrainRecipe  # noqa: E402

NOTE = "<!-- python docs/generate_keys.py writes this page; the texts are in llmfoundry/recipe/ -->"
HEAD = f"""# Keys of a recipe

{NOTE}

A key is written in a recipe's YAML or on the command line, `optimizer.lr=1e-3`; the same text is
printed by `python scripts/train.py --help optimizer`. `null` stands for unset. The unit of a number
stands in its meaning. Durations are `100ba` (steps), `2e9tok` (tokens), `1ep` (passes over the
data), `500sp` (samples) and `0.1dur` (of the run). NAME and `[N]` are yours. A group's YAML may
have another value than the default: `python scripts/train.py RECIPE --cfg job` prints a recipe with
all its values.

| page | keys | what |
|---|---|---|
"""


class Page(NamedTuple):
    """A page: its title, what it is about, and the text of its keys."""

    title: str
    about: str
    text: str

    @property
    def count(self) -> int:
        """How many keys it has."""
        return len(re.findall("^### ", self.text, re.MULTILINE))


def pages() -> dict[str, str]:
    """Every page by its name in docs/keys/."""
    train, finetune = Schema.of(TrainRecipe).keys, Schema.of(FinetuneRecipe).keys
    own = {name: key for name, key in finetune.items() if _is_new(key, train)}
    found = {"run": Page("Keys of a run", "Length, batches, saving, resuming.", _values(train))}
    found |= {name: _page(key, name) for name, key in train.items() if key.section is not None}
    found |= {
        f"finetune-{name}" if name in train else name: _page(
            key, f"{name} of finetune.py" if name in train else name
        )
        for name, key in own.items()
        if key.section is not None
    }
    found["finetune"] = Page("Keys of finetune.py", "Beside those of a run.", _values(own))
    text = "".join(_scripts({*train, *finetune}))
    found["scripts"] = Page("Keys of scripts", "Of those that do not train.", text)
    rows = (
        f"| [{page.title}]({name}.md) | {page.count} | {_escaped(page.about)} |\n"
        for name, page in found.items()
    )
    return {"README.md": HEAD + "".join(rows)} | {
        f"{name}.md": "\n\n".join(
            (f"# {page.title}", NOTE, _escaped(page.about), page.text.rstrip() + "\n")
        )
        for name, page in found.items()
    }


def _is_new(key: Key, known: dict[str, Key]) -> bool:
    """Whether fine-tuning has a key that training has not, or has as another section."""
    return key.name not in known or known[key.name].section is not key.section


def _page(key: Key, title: str) -> Page:
    """The page of a section."""
    assert key.section is not None
    text = "".join(_section(key.section, key.name))
    return Page(title, key.section.meaning, text)


def _values(keys: dict[str, Key]) -> str:
    return "## Keys\n\n" + "".join(
        _entry(key, name) for name, key in keys.items() if key.section is None
    )


def _section(schema: Schema, dotted: str, about: str = "") -> Iterator[str]:
    """A section's keys under a heading, and then each section below it."""
    yield f"## `{dotted}`\n\n" + f"{_escaped(about)}\n\n" * bool(about)
    below: list[tuple[str, Schema, str]] = []
    for key in schema.keys.values():
        name = f"{dotted}.{key.name}"
        if key.section is not None:
            condition = key.explanation(name).removesuffix(key.meaning)
            below.append((name, key.section, f"{condition}{key.section.meaning}"))
            continue
        yield _entry(key, name)
        if key.item is not None and key.item is not schema:
            below.append((f"{name}{item_name(key)}", key.item, key.item.meaning))
    for name, section, about in below:
        yield from _section(section, name, about)


def _entry(key: Key, dotted: str) -> str:
    """A key under its heading: type, default, range, meaning, choices."""
    facts = [f"`{type_text(key)}`" if key.item is None else f"sections `{dotted}{item_name(key)}`"]
    facts.append("required" if key.required else f"default `{default_text(key)}`")
    facts += [text for rule in key.rules if isinstance(rule, Range) and (text := _range(rule))]
    choice = key.rule(Choice)
    meanings = {} if choice is None else choice.meanings()
    if choice is not None and not meanings:
        names = ", ".join(f"`{name}`" for name in choice.options)
        facts.append(f"one of {names}" + f", or {choice.other}" * bool(choice.other))
    lines = [f"### `{dotted}`", ", ".join(facts), _escaped(key.explanation(dotted))]
    lines += ["\n".join(f"- `{name}`: {_escaped(text)}" for name, text in meanings.items())]
    return "\n\n".join(filter(None, lines)) + "\n\n"


def _range(rule: Range) -> str:
    """The numbers that a rule allows; "" for all of a type."""
    most = None if rule.most is None or rule.most >= MOST_INT else f"{rule.most:,.10g}"
    if rule.least is not None and most is not None:
        return f"{rule.least:g} to {most}"
    low = f"{rule.least:g} or more" if rule.least is not None else ""
    low = f"above {rule.above:g}" if rule.above is not None else low
    high = f"{most} or less" if most is not None else ""
    high = f"below {rule.below:g}" if rule.below is not None else high
    return " and ".join(part for part in (low, high) if part)


def _scripts(known: set[str]) -> Iterator[str]:
    """The keys of every other script; of those that take a training run's, their own."""
    for path in sorted((ROOT / "scripts").glob("*.py")):
        recipe, words = _recipe_of(path)
        if recipe is None or recipe in (TrainRecipe, FinetuneRecipe):
            continue
        is_training = issubclass(recipe, TrainRecipe)
        keys = Schema.of(recipe).keys.items()
        own = {name: key for name, key in keys if not (is_training and name in known)}
        yield f"## {path.stem}.py\n\n{words}" + " Beside a recipe's:" * is_training + "\n\n"
        for name, key in own.items():
            if key.section is None:
                yield _entry(key, name)
            elif name in known:
                yield f"### `{name}`\n\n{_escaped(key.meaning)} As in [{name}]({name}.md).\n\n"
            else:
                yield from _section(key.section, name, about=key.section.meaning)


def _recipe_of(script: Path) -> tuple[type[Any] | None, str]:
    """The recipe's type that a script gives to `run`, and the first line of its docstring."""
    names = runpy.run_path(str(script))
    given = re.search(r"^    run\((\w+),", script.read_text(), re.MULTILINE)
    recipe = None if given is None else names[given[1]]
    if recipe is not None and not isinstance(recipe, type):
        recipe = recipe(CommandLine())  # which decides by the recipe's file
    return recipe, _escaped((names["__doc__"] or "").splitlines()[0])


def _escaped(text: str) -> str:
    """A plain text, safe as Markdown in a paragraph or a table; `names` stay code."""
    parts = re.split(r"(`[^`]+`)", text)
    parts[::2] = [
        re.sub(r"([\\*|]|(?<!\w)_|_(?!\w))", r"\\\1", part).replace("<", "&lt;")
        for part in parts[::2]
    ]
    return "".join(parts)


def write(folder: Path) -> None:
    """Write all pages, and delete those of sections that are gone."""
    for old in folder.glob("*.md"):
        old.unlink()
    for name, text in pages().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(ROOT / "docs" / "keys")
