"""The model that a fine-tuning run begins with: what it is, and how its weights come in.

`commands/train.py` opens it before anything else, `build_trainer` makes and fills the model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmfoundry.builders.adapters.adapter import has_adapter
from llmfoundry.builders.job import with_defaults
from llmfoundry.builders.weights.hf_folder import Pretrained, open_folder
from llmfoundry.builders.weights.run_weights import fill_from_run, merge_run
from llmfoundry.checkpoint.load import is_checkpoint, list_checkpoints
from llmfoundry.checkpoint.remote_run import find_run, is_url, named
from llmfoundry.checkpoint.verify import Sums, find_checkpoint
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.launch import World, on_rank0
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write
from llmfoundry.hf.config.settings import check_layers
from llmfoundry.hf.read import hf_folder
from llmfoundry.models.decoder import Decoder
from llmfoundry.recipe.architecture.attention import ATTN_IMPLS
from llmfoundry.recipe.architecture.hf_model import HF_CAUSAL_LM, HFModelConfig
from llmfoundry.recipe.architecture.model import ModelConfig
from llmfoundry.recipe.architecture.pretrained import PretrainedConfig
from llmfoundry.recipe.front.paths import find_file
from llmfoundry.recipe.front.typed import Problem, build, dump, flat, know_secrets, require, to_dict
from llmfoundry.recipe.front.yamlfile import read
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe, load_run
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.values.checks import nearest, one_of

TRUST = "LLMFOUNDRY_TRUST_REMOTE_CODE"
"""An environment variable: 1 runs the code of models that were trained with trust_remote_code."""
MODEL = "model.yaml"
"""Beside a fine-tuned run's recipe: the shape of its model, which the recipe does not tell."""


def resolve(
    written: FinetuneRecipe, world: World, *, note: Callable[[str], None]
) -> tuple[FinetuneRecipe, Pretrained]:
    """A filled copy whose `model` is the pretrained model's shape, and that model.

    Args:
        written: checked, unfilled.
        world: this process.
        note: reports checkpoints that are passed over.

    Raises:
        UserError: there is no such model, or it does not fit the recipe.
    """
    recipe = with_defaults(written)
    assert isinstance(recipe, FinetuneRecipe)
    asked = recipe.model
    options = FetchOptions.from_config(recipe.data)
    pretrained = open_pretrained(asked, world, note=note, options=options)
    config = pretrained.config
    assert config.max_seq_len is not None
    if config.learned_pos_emb and recipe.max_seq_len > config.max_seq_len:
        raise UserError(
            f"max_seq_len: {recipe.max_seq_len}, but {asked.pretrained} has learned positions for"
            f" {config.max_seq_len} tokens; write at most that"
        )
    config.max_seq_len = max(config.max_seq_len, recipe.max_seq_len)
    if isinstance(config, HFModelConfig):
        config.hf_attn_impl = asked.attn_impl or config.hf_attn_impl
    else:
        config.attn_config.attn_impl = asked.attn_impl or "auto"
        problems = [*one_of("model.attn_impl", config.attn_config.attn_impl, ATTN_IMPLS)]
        if problems:
            raise UserError(*problems)
    recipe.model = config  # type: ignore[assignment]
    return recipe, pretrained


def open_pretrained(
    asked: PretrainedConfig,
    world: World,
    *,
    note: Callable[[str], None],
    options: FetchOptions | None = None,
) -> Pretrained:
    """The model that `model.pretrained` names; `options`: how a store is asked, if it is in one.

    Raises:
        UserError: there is none, or it cannot be held.
    """
    assert asked.pretrained is not None
    if is_url(asked.pretrained):
        folder = find_run(asked.pretrained, "model.pretrained", options=options)
        return _open_run(asked, folder, world, note)
    try:
        folder = find_file(asked.pretrained, "model.pretrained")
    except UserError:
        if asked.pretrained.startswith((".", "/", "~", "runs/")):
            raise
        folder = _download(asked.pretrained, asked.revision, world)
        return open_folder(folder, asked, note, world)
    if asked.revision is not None:
        raise UserError(f"model.revision: {folder} is a folder, not a hub id; remove it")
    if is_checkpoint(folder) or on_rank0(world, lambda: list_checkpoints(folder)):
        return _open_run(asked, folder, world, note)
    return open_folder(folder, asked, note, world)


def base_of(written: FinetuneRecipe, checkpoint: Path) -> PretrainedConfig:
    """What an adapter's run began with, also where both were copied to another place together.

    A relative path that is not there is looked for from each folder above the run; that it is the
    right base is checked by its numbers (`check_base`).
    """
    asked = written.model
    assert asked.pretrained is not None, "checked by the recipe"
    given = Path(asked.pretrained).expanduser()
    if is_url(asked.pretrained) or given.is_absolute():
        return asked
    try:
        find_file(given, "model.pretrained")
    except UserError:
        for above in checkpoint.absolute().parents:
            if (above / given).is_dir():
                return replace(asked, pretrained=str(above / given))
    return asked


def _download(name: str, revision: str | None, world: World) -> Path:
    """A hub id's files, fetched by one process of each machine."""
    import torch.distributed as dist

    def fetch() -> Path:
        return hf_folder(name, revision=revision, key="model.pretrained")

    failures: list[UserError | None] = [None]
    if world.local_rank == 0:
        try:
            fetch()
        except UserError as error:
            failures = [error]
    if world.size > 1:
        own, failures = failures[0], [None] * world.size
        dist.all_gather_object(failures, own)
    for failure in failures:
        if failure is not None:
            raise failure
    return fetch()  # which is there now


def _open_run(
    asked: PretrainedConfig, path: Path, world: World, note: Callable[[str], None]
) -> Pretrained:
    folder = find_checkpoint(path, note=note, sums=Sums.WEIGHTS, world=world)
    if folder is None:
        raise UserError(
            f"model.pretrained: {named(path)} holds no whole checkpoint; write a run's folder"
        )

    def read_run() -> tuple[Tokenizer, ModelConfig, TrainRecipe]:
        model = read_model(folder, asked.config_overrides)
        return Tokenizer.load(folder / "tokenizer"), model, load_run(folder / "recipe.yaml")

    tokenizer, config, written = on_rank0(world, read_run)
    know_secrets(written)
    config.fill(vocab_size=tokenizer.vocab_size)
    if asked.name not in ("auto", config.name):
        raise UserError(
            f"model.name: {asked.name}, but {folder} is of a run of {config.name}; write auto, or"
            " the folder that scripts/convert.py to=hf makes of it"
        )
    if has_adapter(written):
        assert isinstance(written, FinetuneRecipe)
        if isinstance(config, HFModelConfig):
            raise UserError(
                f"model.pretrained: {folder} is an adapter on a model of transformers' class; merge"
                " it first by scripts/convert.py to=hf, and write its output"
            )
        base = open_pretrained(base_of(written, folder), world, note=note)
        own = copy.deepcopy(config)  # which does not grow

        def merge(model: Decoder) -> None:
            merge_run(model, base, folder, written, own)

        how = f"{folder}, its adapter merged into {written.model.pretrained}, held by the decoder"
        return Pretrained(config, tokenizer, merge, how)
    rows = config.vocab_size
    assert rows is not None, "filled"

    def fill(model: Decoder) -> None:
        fill_from_run(model, folder, rows, world)

    holder = "transformers' class" if isinstance(config, HFModelConfig) else "the decoder"
    return Pretrained(config, tokenizer, fill, f"{folder}, held by {holder}")


def fit_vocabulary(config: ModelConfig, tokenizer: Tokenizer, asked: PretrainedConfig) -> None:
    """Add rows, in place, for the tokens that the model has none for, where that is asked.

    Raises:
        UserError: there are such tokens, and the recipe does not ask for rows; or it asks for them
            without need.
    """
    assert config.vocab_size is not None, "the model's own files say it"
    size, rows = tokenizer.vocab_size, config.vocab_size
    if size <= rows:
        if asked.resize_embeddings:
            raise UserError(
                f"model.resize_embeddings: has no effect, as the embedding has {rows} rows for the"
                f" tokenizer's {size} tokens; remove it"
            )
        return
    if not asked.resize_embeddings:
        raise UserError(
            f"model.resize_embeddings: the tokenizer has {size} tokens, and the model {rows} rows;"
            " write true to add rows, which begin as the mean of the others"
        )
    config.vocab_size = -(-size // 64) * 64
    if isinstance(config, HFModelConfig):
        config.hf_config["vocab_size"] = config.vocab_size


def read_model(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """The shape of a checkpoint's model, filled but for the vocabulary.

    Args:
        folder: the checkpoint's.
        overrides: dotted or nested keys of the model section to change.

    Raises:
        UserError: a key that the model section does not have, or a value that cannot be.
    """
    if (folder / MODEL).is_file():
        values, max_seq_len = read(folder / MODEL), None
    else:
        written = load_run(folder / "recipe.yaml")
        require(written, "model", "max_seq_len")
        values, max_seq_len = to_dict(written.model), written.max_seq_len
    for key, value in flat(overrides or {}):
        _override(values, key, value)
    problems: list[Problem] = []
    schema = HFModelConfig if values.get("name") == HF_CAUSAL_LM else ModelConfig
    config = build(schema, values, problems)
    lines = [problem.line for problem in problems] or [*config.check("")]
    if lines:
        where = "model.config_overrides." if overrides else f"{named(folder)}: model."
        raise UserError(*(f"{where}{line}" for line in lines))
    if isinstance(config, HFModelConfig):
        check_layers(config.hf_config)
    if isinstance(config, HFModelConfig) and config.code and os.environ.get(TRUST) != "1":
        raise UserError(
            f"{folder}: its class is the Python code of {config.code}, which is not run; set"
            f" {TRUST}=1 in the environment if you trust it"
        )
    config.fill(max_seq_len=max_seq_len)
    return config


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    schema = Schema.of(ModelConfig)
    if schema.find(key) is None:
        near = nearest(key, schema.keys)
        raise UserError(f"model.config_overrides.{key}: the model section has no such key{near}")
    for parent in parents:
        values = values.setdefault(parent, {}) or {}
    values[last] = value


def write_model(folder: Path, config: ModelConfig) -> None:
    """Write down a fine-tuned model's shape beside its recipe."""
    atomic_write(folder / MODEL, dump(to_dict(config)))
