"""What --help prints."""

from __future__ import annotations

from pathlib import Path

from recipe_front import Front

from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.tasks import ConvertRecipe


def test_help_lists_flags_groups_recipes_and_keys(front: Front) -> None:
    got = front("--help")
    assert got.status == 0 and got.out.startswith("What it does.\n")
    for group in YAMLS.iterdir():
        if group.is_dir():
            choices = ", ".join(sorted(file.stem for file in group.glob("*.yaml")))
            assert f"  {group.name:<9}  {choices}\n" in got.out
    for recipe in YAMLS.glob("*.yaml"):
        assert recipe.name in got.out
    assert "recipe/train.py" in got.out and "device_train_microbatch_size" in got.out


def test_help_on_a_recipe_shows_its_header(front: Front, tmp_path: Path) -> None:
    recipe = tmp_path / "my.yaml"
    recipe.write_text("# Trains nothing much.\n#   python train.py my.yaml\nseed: 1 # not this\n")
    out = front(recipe, "--help").out
    assert "  Trains nothing much.\n    python train.py my.yaml\n" in out
    assert "not this" not in out


def test_help_on_a_section_explains_every_key_of_it(front: Front) -> None:
    out = front("--help", "model").out
    assert "  model.n_heads: int = 16\n      Query heads.\n" in out
    assert "  model.head_dim: int | null = null\n" in out
    assert "  model.attn_config  (section, 19 keys)\n" in out
    assert front("model.attn_config", "--help").out.count(" = ") == 17


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
