"""Every command that the project shows, in heads of YAMLs, scripts' docstrings and READMEs.

They are found by their form, so that a new one is tried too; each must compose and pass every check
of its recipe, where nothing is there that it names (`my/chats.jsonl`). tests/test_readme.py runs
those of READMEs.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from llmfoundry.errors import UserError
from llmfoundry.recipe.finetune import FinetuneRecipe
from llmfoundry.recipe.load import checked, read
from llmfoundry.recipe.paths import ROOT, YAMLS
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import to_yaml
from tests.plugin_tables import tables_as_before

COMMAND = re.compile(
    r"(?:(?:srun|torchrun|python) [^\n`]*?(?<![\w/])scripts/(\w+)\.py"
    r"|(?<![\w/-])(?<!import )llmfoundry (\w+))(?![\w/])([^\n`]*)"
)
END = re.compile(r"\s{2,}|\s#|\s?[;|]|\s(?:>|&&)\s")  # what follows is no argument
NO_FRONT = {"gpu_check"}  # it takes no recipe: tests/benchmarks/test_gpu_check.py
CONSOLE = {"cp", "ls", "completion"}  # the console's own: tests/cli/test_console.py
INSTEAD = {"RECIPE": "quickstart"}  # of words that a reader replaces
VALUE = r"(?:\[[^\]]*\]|[^\s;,\[]*[^\s;,.:\[])"
FRAGMENT = re.compile(rf"(?<![\w.=/])[a-z]+=[\w.-]*\w(?: \[?[a-z][\w.]*={VALUE})*")
PARTNERS = (  # of settings that the head of a group's choice shows without a recipe
    (TrainRecipe, YAMLS / "quickstart.yaml"),
    (FinetuneRecipe, YAMLS / "finetune" / "quickstart-sft.yaml"),
    (FinetuneRecipe, YAMLS / "finetune" / "quickstart-dpo.yaml"),
)


class Example(NamedTuple):
    """A command: a script and its arguments."""

    script: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.script} {' '.join(self.words)}"


def comment_of(path: Path) -> str:
    """The comments of a YAML file, which stand on lines of their own."""
    lines = path.read_text().splitlines()
    return "\n".join(line.lstrip("#").removeprefix(" ") for line in lines if line.startswith("#"))


SPECIAL = re.compile(r"(?<!\S)[~=]|[][*?(){}]")
"""Characters that zsh, the default shell of macOS, expands or refuses outside of quotes."""


def texts() -> Iterator[tuple[str, str]]:
    """Each place that shows commands, and its text."""
    for path in sorted(YAMLS.rglob("*.yaml")):
        yield str(path.relative_to(ROOT)), comment_of(path)
    for path in sorted((ROOT / "scripts").glob("*.py")):
        yield str(path.relative_to(ROOT)), ast.get_docstring(ast.parse(path.read_text())) or ""
    for top in ("", "docs", "yamls", "llmfoundry", "eval", "benchmarks", "scripts"):
        for path in sorted((ROOT / top).glob("**/*.md" if top else "*.md")):
            if path.name != "CHANGELOG.md":  # what was once
                yield str(path.relative_to(ROOT)), path.read_text()


def calls(text: str) -> Iterator[tuple[str, str]]:
    """The script and the arguments of each command in a text, as they are printed."""
    for match in COMMAND.finditer(text.replace("\\\n", " ")):
        yield match[1] or match[2], END.split(match[3])[0].rstrip(".,:)")


def examples(text: str) -> Iterator[Example]:
    """The commands in a text."""
    for script, arguments in calls(text):
        words = shlex.split(arguments)
        if words and script not in NO_FRONT | CONSOLE:  # else a script is only named
            yield Example(script, tuple(INSTEAD.get(w, w) for w in words))


TEXTS = dict(texts())
BY_PLACE = {place: list(dict.fromkeys(examples(text))) for place, text in TEXTS.items()}
SEEN: set[Example] = set()
for found in BY_PLACE.values():  # each is tried where it is first shown
    found[:] = [example for example in found if example not in SEEN]
    SEEN.update(found)


@cache
def saved_quickstart() -> str:
    """The recipe that a run of the quickstart saves."""
    return to_yaml(read(TrainRecipe, YAMLS / "quickstart.yaml")[0])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A newcomer's folder: the repository's, a copy of a recipe, and a run."""
    for name in ("scripts", "yamls", "eval", "docs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my.yaml").write_bytes((YAMLS / "quickstart.yaml").read_bytes())
    (plugin,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "llmfoundry/README.md").read_text(), re.S
    )
    (tmp_path / "my_file.py").write_text(plugin)
    run = tmp_path / "runs" / "quickstart" / "recipe.yaml"
    run.parent.mkdir(parents=True)
    run.write_text(saved_quickstart())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with tables_as_before():
        yield tmp_path


def answer(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What is wrong with an example; empty: it composes."""
    flags = [] if "--help" in example.words else ["--cfg", "job"]
    words = [word for word in example.words if word != "-m"]
    if "-m" in example.words:  # its first point
        words = [re.sub(r"(=[^,\[]+),.*", r"\1", word) for word in words]
    monkeypatch.setattr(sys, "argv", [f"scripts/{example.script}.py", *words, *flags])
    try:
        runpy.run_path(f"scripts/{example.script}.py", run_name="__main__")
    except SystemExit as end:
        return f"{example}: exit status {end.code}: {capsys.readouterr().err}"
    printed = capsys.readouterr().out
    return "" if printed.count("\n") >= 2 else f"{example}: printed {printed!r}"


def test_they_are_found() -> None:
    assert len(SEEN) > 130
    shown = {example.script for example in SEEN}
    there = {path.stem for path in (ROOT / "scripts").glob("*.py")} - NO_FRONT
    assert shown == there, "each script is shown, and what is shown is a script"
    recipes = {
        str(p.relative_to(ROOT)) for p in (*YAMLS.glob("*.yaml"), *YAMLS.glob("finetune/*.yaml"))
    }
    for recipe in recipes:
        assert recipe in {word for example in SEEN for word in example.words}, recipe


@pytest.mark.parametrize("place", [place for place, found in BY_PLACE.items() if found])
def test_every_command_composes(
    place: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = [answer(example, monkeypatch, capsys) for example in BY_PLACE[place]]
    assert [line for line in problems if line] == []


@pytest.mark.parametrize("place", [place for place, found in BY_PLACE.items() if found])
def test_every_command_means_the_same_in_zsh(place: str) -> None:
    unquoted = [re.sub(r"'[^']*'|\"[^\"]*\"", "", words) for _, words in calls(TEXTS[place])]
    assert [arguments for arguments in unquoted if SPECIAL.search(arguments)] == []


def fragments() -> Iterator[tuple[str, str]]:
    """Settings in the heads of groups' choices, such as `data=chat data.paths=[my/chats.jsonl]`."""
    for path in sorted(YAMLS.glob("*/*.yaml")):
        group = path.parent.name
        text = comment_of(path).replace("\n", " ")
        for match in FRAGMENT.findall(COMMAND.sub("", text)):
            if match.startswith(f"{group}="):
                yield f"{group}/{path.name}", match


def test_every_setting_that_a_choice_shows_composes(folder: Path) -> None:
    tried = list(fragments())
    assert len(tried) > 8
    for place, fragment in tried:
        words = re.sub(r"\[(?=\w+\.\w+=)", "", fragment).split(" ")
        problems: list[str] = []
        for script, recipe in PARTNERS:
            try:
                checked(script, recipe, words)
                break
            except UserError as error:
                problems += error.problems
        else:
            pytest.fail(f"{place}: {fragment}: {problems}")
