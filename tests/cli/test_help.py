"""What --help prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmfoundry.cli.command_line import CommandLine
from llmfoundry.cli.help import help_text
from llmfoundry.command_text import as_called
from llmfoundry.errors import UserError
from llmfoundry.recipe.after_training import ConvertRecipe
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.paths import ROOT, YAMLS
from llmfoundry.recipe.schema import Key, Schema
from llmfoundry.recipe.train import TrainRecipe
from tests.front import Front
from tests.recipe.mutations import SCRIPTS, SOUND


def test_help_lists_flags_groups_recipes_and_keys(front: Front) -> None:
    got = front("--help")
    assert got.status == 0 and got.out.startswith("What it does.\n")
    for group in YAMLS.iterdir():
        if group.is_dir() and group.name not in ("scaling", "finetune", "adapter", "preference"):
            choices = ", ".join(sorted(file.stem for file in group.glob("*.yaml")))
            assert f" {group.name} {choices} " in " ".join(got.out.split())
    for recipe in YAMLS.glob("*.yaml"):
        assert recipe.name in got.out
    assert "recipe/train.py" in got.out and "device_train_microbatch_size" in got.out


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/*.py")), ids=lambda path: path.stem)
def test_help_fits_a_terminal(script: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the console command too, whose name is longer in torchrun's lines."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LLMFOUNDRY_CONSOLE", "1")
    docstring = ast.get_docstring(ast.parse(script.read_text()))
    assert docstring
    text = as_called(help_text(Schema.of(TrainRecipe), CommandLine(), docstring))
    assert max(map(len, text.splitlines())) <= width
    assert "recipe/train.py" in text  # which is a file, and no command
    words = as_called(docstring).split()
    assert text.replace("\\\n", " ").replace(" # ", " ").split()[: len(words)] == words


def test_help_on_a_recipe_shows_its_header(front: Front, tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("# Trains nothing much.\n#   python train.py my.yaml\nseed: 1 # not this\n")
    out = front(recipe, "--help").out
    assert "  Trains nothing much.\n    python train.py my.yaml\n" in out
    assert "not this" not in out


def test_a_sweeps_keys_are_explained_and_completed(front: Front) -> None:
    assert "random: n that are drawn" in front("--help", "sweep.how").out
    for word, rest in {
        "sweep=h": ["sweep=halving"],
        "sweep.f": ["sweep.factor="],
        "sw": ["sweep=", "sweep."],
    }.items():
        assert front("--complete", "quickstart", "-m", word).out.split() == rest


def test_help_on_a_section_explains_every_key_of_it(front: Front) -> None:
    out = front("--help", "model").out
    assert "  model.n_heads: int = 16\n      Query heads.\n" in out
    assert "  model.head_dim: int | null = null\n" in out
    assert "  model.attn_config  (section, 25 keys)\n" in out
    assert front("model.attn_config", "--help").out.count(" = ") == 23


def test_help_on_a_key_explains_it(front: Front) -> None:
    out = front("--help", "optimizer.lr").out
    assert out == "  optimizer.lr: float = 0.0006\n      Peak learning rate.\n"
    assert "written `from`" in front("--help", "from", schema=ConvertRecipe).out


def test_help_on_an_unknown_key_names_the_nearest(front: Front) -> None:
    assert front("--help", "modle").errors == ["unknown key 'modle'; did you mean 'model'?"]
    assert front("--help", "model.n_layres").errors == [
        "unknown key 'model.n_layres'; did you mean 'n_layers'?"
    ]
    assert front("--help", "a.b.c").errors == ["unknown key 'a.b.c'"]


def sections(schema: Schema, prefix: str = "", above: tuple[Schema, ...] = ()) -> Iterator[str]:
    """Every section of a recipe as `--help` takes it; those in lists and mappings by their key."""
    for name, key in schema.keys.items():
        section = key.section or key.item
        if section is not None and section not in above:
            yield f"{prefix}{name}"
            below = f"{prefix}{name}." if key.section else f"{prefix}{name}.x."
            yield from sections(section, below, (*above, section))


def entries(out: str) -> dict[str, str]:
    """What help says, by key."""
    parts = re.split(r"^  (?=\S)", out, flags=re.M)[1:]
    return {re.split(r"[: ]", part, maxsplit=1)[0]: " ".join(part.split()) for part in parts}


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_key_of_every_section_of_every_script_has_a_meaning(
    front: Front, script: str
) -> None:
    schema = Schema.of(SCRIPTS[script])
    for topic in sections(schema):
        key = schema.find(topic)
        assert key is not None
        item = "" if key.section else "[N]" if str(key.hint).startswith("list") else ".NAME"
        section = key.section or key.item
        assert section is not None
        got = front("--help", topic, schema=schema.cls)
        assert got.status == 0 and got.out.startswith((f"{topic}: ", f"  {topic}"))
        reported = entries(got.out)
        for name in section.keys:
            full = f"{topic}{item}.{name}"
            text = next(
                reported[as_told]
                for as_told in (full, f"{full}[N]", f"{full}.NAME")
                if as_told in reported
            )
            meaning = re.sub(r"^\S+(: [^=]* = \S+| \(section, \d+ keys\))", "", text)
            assert len(meaning.split()) >= 1 and not meaning.startswith(" choices:"), (topic, text)
    for name, key in schema.keys.items():
        text = entries(front("--help", name, schema=schema.cls).out).get(name)
        assert key.section or (text and len(text.split()) > 4), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_key_that_refuses_a_text_lists_those_that_it_takes(front: Front, script: str) -> None:
    """Each key is given a text that is none of its choices: the refusal and the help agree.

    Keys that training has, too, are tried there alone: they are fields of the same classes.
    """
    schema, found = SCRIPTS[script], 0
    tried = text_keys(TrainRecipe) if script != "train" else {}
    for key in (name for name, key in text_keys(schema).items() if tried.get(name) != key):
        try:
            checked(schema, None, [*SOUND.get(script, ["run_name=x"]), f"{key}=no-such-thing"])
        except UserError as error:
            lines = [line for line in error.problems if line.startswith(f"{key}: ")]
            listed = [m[1] for line in lines if (m := re.search(r"\(choices: (.*)\)$", line))]
            assert len(listed) == any("is not a choice" in line for line in lines), lines
            if listed:
                found += 1
                help = " ".join(front("--help", key, schema=schema).out.split())
                assert help.endswith(f" choices: {listed[0]}"), key
    least = {"train": 35, "finetune": 7, "eval": 1, "generate": 1, "chat": 1}
    assert found >= least.get(script, 0)


def text_keys(schema: type) -> dict[str, Key]:
    walked = Schema.of(schema).walk()
    return {name: key for name, key in walked if key.section is None and str in key.types}
