"""Every shipped YAML: recipes and groups compose and build; one of each family trains two steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.builders.model import build_root
from llmfoundry.cli.commands.prepare_data import prepare_data
from llmfoundry.cli.commands.train import train
from llmfoundry.models.counts import parameter_count
from llmfoundry.plan.fit import guess_vocab_size
from llmfoundry.recipe.before_training import PrepareRecipe
from llmfoundry.recipe.checks import Duration
from llmfoundry.recipe.load import checked
from llmfoundry.recipe.loss import DISTILL
from llmfoundry.recipe.paths import YAMLS
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe
from llmfoundry.recipe.typed import to_dict, to_yaml
from tests.tiny import losses, write_recipe

RECIPES = sorted(YAMLS.glob("*.yaml"))
TRAINED = (  # whose models and optimizers have every choice that any recipe makes
    *("quickstart", "dbrx-tiny", "llama-1b", "mpt-125m", "starcoder2-3b"),
    *("dbrx-18b", "mpt-7b-128k", "deepseek-tiny", "quickstart-ema", "quickstart-distill"),
)
FINETUNING = ("scaling", "finetune", "adapter", "preference")  # tests/test_finetune_recipes.py's
GROUPS = [
    path
    for path in sorted(YAMLS.glob("*/*.yaml"))
    if path.parent.name not in FINETUNING and path != YAMLS / "data" / "preference.yaml"
]
NEEDED = {  # what a group leaves to the user
    "data/chat": ["data.paths=[rows.jsonl]"],
    "data/prompt_response": ["data.paths=[rows.jsonl]"],
    "data/files": ["data.paths=[README.md]"],
    "data/jsonl": ["data.paths=[README.md]"],
    "data/mds": ["data.remote=s3://bucket/c4"],
    "tokenizer/huggingface": ["tokenizer.path=gpt2"],
    "data/huggingface": ["data.dataset=someone/something"],
}


def shrunk(recipe: Path, folder: Path) -> TrainRecipe:
    """The same kinds of everything, two layers and two steps, on text that is there."""
    write_recipe(folder)
    overrides = [
        f"save_folder={folder / 'run'}",
        "model.d_model=32",
        "model.n_layers=2",
        "model.n_heads=2",
        "model.vocab_size=null",
        "max_seq_len=64",
        "max_duration=2ba",
        "global_train_batch_size=4",
        "log_interval=1ba",
        "tokenizer=train",
        "tokenizer.vocab_size=300",
        "data=files",
        f"data.paths=[{folder / 'corpus'}]",
        "data.validation_fraction=0.2",
        f"data.cache_folder={folder / 'cache'}",
        "eval=validation",
        "logger=none",
        "parallel.context_parallel_degree=1",  # more are in tests/distributed
    ]
    model = checked(TrainRecipe, recipe).model
    if model.ffn_config.ffn_hidden_size is not None:
        overrides.append("model.ffn_config.ffn_hidden_size=64")
    if model.attn_config.kv_n_heads is not None:
        overrides.append("model.attn_config.kv_n_heads=1")
    if model.ffn_config.first_k_dense_replace is not None:
        overrides.append("model.ffn_config.first_k_dense_replace=1")
    if model.attn_config.sliding_window_size != -1:
        overrides.append("model.attn_config.sliding_window_size=20")
    return checked(TrainRecipe, recipe, overrides)


@pytest.mark.parametrize(
    "recipe",
    [p if p.stem in TRAINED else pytest.param(p, marks=pytest.mark.slow) for p in RECIPES],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains_two_steps(recipe: Path, tmp_path: Path) -> None:
    shrunken = shrunk(recipe, tmp_path).resolve()
    if shrunken.loss.name == DISTILL:
        teach(shrunken, tmp_path)
    train(shrunken)
    assert sorted(losses(tmp_path / "run")) == [1, 2]


def teach(recipe: ResolvedTrainRecipe, folder: Path) -> None:
    """Store the tokens of a teacher, a run without one, next to those of a recipe."""
    (folder / "teacher.yaml").write_text(to_yaml(recipe.user_recipe))
    path, save = folder / "teacher.yaml", f"save_folder={folder / 'teacher'}"
    train(checked(TrainRecipe, path, ["loss=cross_entropy", save]).resolve())
    prepare_data(checked(PrepareRecipe, path, [f"teacher={folder / 'teacher'}"]).resolve())


def test_what_any_recipe_chooses_one_that_is_trained_chooses() -> None:
    """By each key of model, optimizer, schedule and layout; numbers are no choice."""
    chosen: dict[str, set[tuple[str, object]]] = {}
    for path in RECIPES:
        recipe = to_dict(checked(TrainRecipe, path).resolve())
        sections = {name: recipe[name] for name in ("model", "optimizer", "schedule", "parallel")}
        chosen[path.stem] = {*choices(sections)}
    trained = set().union(*(chosen[name] for name in TRAINED))
    assert {name: found - trained for name, found in chosen.items() if found - trained} == {}


def choices(section: dict[str, Any], within: str = "") -> Iterator[tuple[str, object]]:
    """Keys of a section and of those in it, with what is not a number, a duration or a list."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from choices(value, f"{within}{key}.")
        elif (value is None or isinstance(value, bool | str)) and not key.startswith("t_"):
            yield within + key, value


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_builds_its_model(path: Path) -> None:
    recipe = checked(TrainRecipe, path).resolve()
    recipe.model.fill(vocab_size=guess_vocab_size(recipe.tokenizer))
    assert len(build_root(recipe).model.blocks) == recipe.model.n_layers


PUBLISHED = {  # parameters; tokens of LLM Foundry's recipes, elsewhere 20 a parameter
    "mpt-125m": (125_311_488, 2.5e9),
    "mpt-350m": (355_985_408, 7.0e9),
    "mpt-760m": (760_470_528, 15.2e9),
    "mpt-1b": (1_315_950_592, 26.0e9),
    "mpt-3b": (2_651_837_440, 54.0e9),
    "mpt-7b": (6_658_859_008, 134e9),
    "mpt-13b": (12_853_954_560, 260e9),
    "mpt-30b": (29_975_214_080, 600e9),
    "mpt-70b": (64_862_437_376, 1.4e12),
    "mpt-7b-8k": (6_649_286_656, 134e9),
    "mpt-7b-32k": (6_649_286_656, 134e9),
    "mpt-7b-64k": (6_649_286_656, 134e9),
    "mpt-7b-128k": (6_649_286_656, 134e9),
    "gpt2-124m": (124_439_808, 2.5e9),
    "llama-1b": (1_235_814_400, 24.7e9),
    "llama-8b": (8_030_261_248, 160.6e9),
    "starcoder2-3b": (3_030_371_328, 60.6e9),
    "dbrx": (131_596_523_520, 12e12),  # tokens as published
    "dbrx-73b": (73_508_131_840, 1.47e12),
    "dbrx-35b": (35_653_357_568, 713e9),
    "dbrx-18b": (18_611_346_432, 372e9),
    "dbrx-9b": (9_169_635_328, 183e9),
    "dbrx-1b": (1_300_456_448, 26e9),
    "dbrx-mini": (376_549_888, 7.5e9),
    "deepseek-v2-lite": (15_706_484_224, 5.7e12),  # parameters and tokens as published
    "deepseek-v3": (671_026_404_352, 14.8e12),  # with 58 * 256 balancing biases 671,026,419,200
}


def test_every_recipe_of_a_published_size_is_counted() -> None:
    small = {"quickstart", "quickstart-ema", "quickstart-distill", "dbrx-tiny", "deepseek-tiny"}
    small |= {"pretrain"}
    assert {path.stem for path in RECIPES} - small == PUBLISHED.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_parameters_and_tokens(name: str) -> None:
    recipe = checked(TrainRecipe, YAMLS / f"{name}.yaml").resolve()
    parameters, tokens = PUBLISHED[name]
    assert parameter_count(recipe.model) == parameters
    batches = Duration.parse(recipe.max_duration)
    assert batches.unit == "ba"
    per_batch = recipe.global_train_batch_size * recipe.max_seq_len
    assert batches.value * per_batch == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize("group", GROUPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_group_composes_and_its_model_builds(group: Path) -> None:
    name = f"{group.parent.name}/{group.stem}"
    choice = f"{group.parent.name}={group.stem}"
    written = checked(TrainRecipe, YAMLS / "quickstart.yaml", [choice, *NEEDED.get(name, [])])
    recipe = written.resolve()
    recipe.model.fill(vocab_size=guess_vocab_size(recipe.tokenizer))
    root = build_root(recipe)
    assert {p.device.type for p in root.parameters()} == {"meta"}
    kinds = 2 if recipe.model.ffn_config.first_k_dense_replace else 1
    assert len({str(block) for block in root.model.blocks}) == kinds  # two stand for all
    del root.model.blocks[1:-1], root.model.layers[1:-1]
    hidden = root.model(torch.zeros(1, recipe.max_seq_len, dtype=torch.int64, device="meta"))
    assert hidden.shape == (1, recipe.max_seq_len, recipe.model.d_model)
