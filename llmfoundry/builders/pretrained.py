"""Pretrained model of a fine-tuning run: its shape, tokenizer and weights.

Entry point: `open_base`, which `cli/commands/train.py` calls first. `build_trainer` then builds and
fills the model.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from llmfoundry.builders.adapter import FOLDER, BaseCheck, adapt, check_base, has_adapter
from llmfoundry.builders.model import build_root
from llmfoundry.builders.registry import find_address
from llmfoundry.checkpoint.load import load_tensors, load_weights, read_table
from llmfoundry.checkpoint.object_storage import find_run, is_url
from llmfoundry.checkpoint.storage import Checkpoint, Storage, is_checkpoint
from llmfoundry.checkpoint.verify import ChecksumSelection, find_checkpoint
from llmfoundry.data.file_spec import FetchOptions
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.collectives import on_all_ranks, on_each_machine, on_rank0
from llmfoundry.distributed.process_group import ALONE, World
from llmfoundry.errors import UserError
from llmfoundry.models.adapter import is_added, merge_into, merged_tensor
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.init import grown, padded_rows
from llmfoundry.models.quantized import as_held, is_quantized, place, quantized_shapes
from llmfoundry.models.tensor_parallel import all_stacked_rows
from llmfoundry.ops.shard_layout import assign, full_tensor
from llmfoundry.recipe.adapter import PretrainedConfig
from llmfoundry.recipe.attention import ATTN_IMPLS, drop_former_scaling
from llmfoundry.recipe.checks import nearest, one_of
from llmfoundry.recipe.finetune import FinetuneRecipe, ResolvedFinetuneRecipe, load_run
from llmfoundry.recipe.model import HF_CAUSAL_LM, HFModelConfig, ModelConfig, ResolvedModelConfig
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.schema import Schema
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.recipe.typed import Problem, build, dump, flat, know_secrets, require, to_dict
from llmfoundry.recipe.yaml_file import read_yaml

if TYPE_CHECKING:
    from llmfoundry.hf.peft.read import ReadAdapter
    from llmfoundry.models.lazy_tensors import LazyTensor

TRUST = "LLMFOUNDRY_TRUST_REMOTE_CODE"
"""Environment variable: 1 runs the code of models that were trained with trust_remote_code."""
MODEL = "model.yaml"
"""File with the model's shape, next to the recipe of a fine-tuned run, which lacks the shape."""


ReadOne = Callable[[Decoder, str], Tensor]


@dataclass(frozen=True)
class PretrainedModel:
    """A pretrained model.

    Attributes:
        config: its shape, resolved.
        tokenizer: its tokenizer.
        fill: writes its weights into a model of that shape, full or sharded; all ranks call it.
        summary: line to log: the model, and its representation.
        read: returns one tensor by name that `fill` would write into a model, which may be on the
            meta device; None: a class of transformers.
        may_grow: whether rows may be added for tokens that its tokenizer gains.
    """

    config: ResolvedModelConfig
    tokenizer: Tokenizer
    fill: Callable[[Decoder], None]
    summary: str
    read: ReadOne | None = None
    may_grow: bool = False


def open_base(
    recipe: ResolvedFinetuneRecipe, world: World, *, note: Callable[[str], None]
) -> PretrainedModel:
    """Open the model that a run begins with; its shape becomes the recipe's `model`.

    Args:
        recipe: resolved recipe. Names of registered versions in the user's recipe are replaced by
            the addresses of the weights, also in the run's recipe.yaml, because an alias may move.
        world: this process.
        note: reports checkpoints that are skipped.

    Raises:
        UserError: the model does not exist or does not fit the recipe.
    """
    # replace names of registered versions by addresses
    user_recipe = recipe.user_recipe
    look = partial(find_address, world=world, uri=user_recipe.logger.tracking_uri, note=note)
    recipe.base.pretrained = look(str(recipe.base.pretrained), "model.pretrained")
    if recipe.adapter.pretrained is not None:
        address = look(recipe.adapter.pretrained, "adapter.pretrained")
        recipe.adapter.pretrained = user_recipe.adapter.pretrained = address

    # open the model
    asked = recipe.base
    options = FetchOptions.from_config(recipe.data)
    pretrained = open_pretrained(asked, world, note=note, options=options)
    pretrained = replace(pretrained, may_grow=asked.resize_embeddings)

    # adapt its shape to the recipe
    config = pretrained.config
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
    recipe.model = config
    return pretrained


def open_pretrained(
    asked: PretrainedConfig,
    world: World,
    *,
    note: Callable[[str], None],
    options: FetchOptions | None = None,
) -> PretrainedModel:
    """Open the model that `model.pretrained` names. `options`: storage options of its store."""
    assert asked.pretrained is not None
    if is_url(asked.pretrained):
        place = find_run(asked.pretrained, "model.pretrained", options=options)
        return _open_run(asked, place, world, note)
    try:
        folder = find_file(asked.pretrained, "model.pretrained")
    except UserError:
        if asked.pretrained.startswith((".", "/", "~", "runs/")):
            raise
        folder = _download(asked.pretrained, asked.revision, world)
        return open_folder(folder, asked, note, world)
    if asked.revision is not None:
        raise UserError(f"model.revision: {folder} is a folder, not a hub id; remove it")
    if is_checkpoint(folder):
        return _open_run(asked, Checkpoint.at(folder), world, note)
    if on_rank0(world, Storage(folder).checkpoints):
        return _open_run(asked, Storage(folder), world, note)
    return open_folder(folder, asked, note, world)


def base_of(asked: PretrainedConfig, checkpoint: Path) -> PretrainedConfig:
    """Return the base of an adapter's run, even if both were moved together.

    A relative path that does not exist is searched from each parent folder of the run. `check_base`
    later compares the weights.
    """
    assert asked.pretrained is not None, "checked by the recipe"
    path = Path(asked.pretrained).expanduser()
    if is_url(asked.pretrained) or path.is_absolute():
        return asked
    try:
        find_file(path, "model.pretrained")
    except UserError:
        for above in checkpoint.absolute().parents:
            if (above / path).is_dir():
                return replace(asked, pretrained=str(above / path))
    return asked


def _download(name: str, revision: str | None, world: World) -> Path:
    """Download a model from the hub, once per machine."""
    from llmfoundry.hf.read_folder import hf_folder

    fetch = partial(hf_folder, name, revision=revision, key="model.pretrained")
    return on_all_ranks(world, lambda: on_each_machine(world, fetch, patient=True))


def _open_run(
    pretrained: PretrainedConfig,
    place: Storage | Checkpoint,
    world: World,
    note: Callable[[str], None],
) -> PretrainedModel:
    checkpoint = find_checkpoint(place, note=note, sums=ChecksumSelection.WEIGHTS, world=world)
    if checkpoint is None:
        raise UserError(
            f"model.pretrained: {place} holds no complete checkpoint; write a run's folder"
        )
    folder = checkpoint.folder

    def read_run() -> tuple[Tokenizer, ResolvedModelConfig, TrainRecipe]:
        model = read_model(checkpoint, pretrained.config_overrides)
        return Tokenizer.load(folder / "tokenizer"), model, load_run(folder / "recipe.yaml")

    tokenizer, config, run_recipe = on_rank0(world, read_run)
    know_secrets(run_recipe)
    config.fill(vocab_size=tokenizer.vocab_size)
    if pretrained.name not in ("auto", config.name):
        raise UserError(
            f"model.name: {pretrained.name}, but {folder} is of a run of {config.name}; write auto,"
            " or the folder that scripts/convert.py to=hf makes of it"
        )
    if isinstance(run_recipe, FinetuneRecipe) and has_adapter(run_recipe):
        if isinstance(config, HFModelConfig):
            raise UserError(
                f"model.pretrained: {folder} is an adapter on a model of transformers' class; merge"
                " it first by scripts/convert.py to=hf, and write its output"
            )
        base = open_pretrained(base_of(run_recipe.model, folder), world, note=note)
        checkpoint_config = copy.deepcopy(config)  # keeps the number of rows of the checkpoint

        def merge(model: Decoder) -> None:
            merge_run(model, base, folder, run_recipe, checkpoint_config)

        how = (
            f"its adapter merged into {run_recipe.model.pretrained}, loaded into the native decoder"
        )
        read = MergedRun(base, folder, run_recipe, checkpoint_config).read
        return PretrainedModel(config, tokenizer, merge, f"{folder}, {how}", read)
    rows = config.vocab_size

    def fill(model: Decoder) -> None:
        fill_from_run(model, checkpoint, rows, world)

    holder = "transformers' class" if isinstance(config, HFModelConfig) else "the native decoder"
    read = partial(read_from_run, checkpoint, cache(partial(read_table, checkpoint)), rows)
    return PretrainedModel(config, tokenizer, fill, f"{folder}, loaded into {holder}", read)


def fit_vocabulary(
    config: ResolvedModelConfig, tokenizer: Tokenizer, asked: PretrainedConfig
) -> None:
    """Add rows, in place, for tokens that the model has no rows for, if the recipe allows it.

    Raises:
        UserError: there are such tokens and the recipe does not allow it, or it does without need.
    """
    rows = config.vocab_size
    if tokenizer.vocab_size <= rows:
        if asked.resize_embeddings:
            raise UserError(
                f"model.resize_embeddings: has no effect, as the embedding has {rows} rows for the"
                f" tokenizer's {tokenizer.vocab_size} tokens; remove it"
            )
        return
    if not asked.resize_embeddings:
        advice = "write true to add rows, which begin as the mean of the others"
        check_rows(config, tokenizer, "model.resize_embeddings", advice)
    config.vocab_size = padded_rows(tokenizer.vocab_size)
    if isinstance(config, HFModelConfig):
        config.hf_config["vocab_size"] = config.vocab_size


def check_rows(config: ResolvedModelConfig, tokenizer: Tokenizer, where: str, advice: str) -> None:
    """Raise a UserError that begins with `where` if a model lacks rows for tokens."""
    size, rows = tokenizer.vocab_size, config.vocab_size
    if size > rows:
        raise UserError(
            f"{where}: the tokenizer has {size} tokens, and the model {rows} rows; {advice}"
        )


def read_model(
    checkpoint: Checkpoint, overrides: Mapping[str, Any] | None = None
) -> ResolvedModelConfig:
    """Return the shape of a checkpoint's model, resolved except for the vocabulary.

    Args:
        checkpoint: checkpoint whose small files are on this machine.
        overrides: dotted or nested keys of the model section to change.

    Raises:
        UserError: an unknown key, or an invalid value.
    """
    folder = checkpoint.folder
    if (folder / MODEL).is_file():
        values, max_seq_len = read_yaml(folder / MODEL), None
    else:
        run_recipe = load_run(folder / "recipe.yaml")
        require(run_recipe, "model", "max_seq_len")
        values, max_seq_len = to_dict(run_recipe.model), run_recipe.max_seq_len
    drop_former_scaling(values, overrides or {})
    for key, value in flat(overrides or {}):
        _override(values, key, value)
    problems: list[Problem] = []
    schema = HFModelConfig if values.get("name") == HF_CAUSAL_LM else ResolvedModelConfig
    config = build(schema, values, problems)
    lines = [problem.line for problem in problems] or [*config.check("")]
    if lines:
        where = "model.config_overrides." if overrides else f"{checkpoint}: model."
        raise UserError(*(f"{where}{line}" for line in lines))
    if isinstance(config, HFModelConfig):
        from llmfoundry.hf.config_keys import check_layers

        check_layers(config.hf_config)
    if isinstance(config, HFModelConfig) and config.code and os.environ.get(TRUST) != "1":
        raise UserError(
            f"{folder}: its class is the Python code of {config.code}, which is not run; set"
            f" {TRUST}=1 in the environment if you trust it"
        )
    return config.resolve(max_seq_len=max_seq_len)


def _override(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    schema = Schema.of(ModelConfig)
    if schema.find(key) is None:
        near = nearest(key, schema.keys)
        raise UserError(f"model.config_overrides.{key}: the model section has no such key{near}")
    for parent in parents:
        values = values.setdefault(parent, {}) or {}
    values[last] = value


def model_yaml(config: ResolvedModelConfig) -> str:
    """Return the shape of a fine-tuned model as text of the file `MODEL`."""
    return dump(to_dict(config))


def open_folder(
    folder: Path, asked: PretrainedConfig, note: Callable[[str], None], world: World = ALONE
) -> PretrainedModel:
    """Open a Hugging Face folder, in the native decoder if it can express the model.

    Otherwise the class of transformers is used. All ranks call this; rank 0 reads everything except
    the weights.

    Raises:
        UserError: neither can represent the model, or the one that the recipe requests cannot.
    """
    from llmfoundry.hf.config_keys import check_layers
    from llmfoundry.hf.read_folder import read_folder_config

    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists():
        raise UserError(
            f"model.pretrained: {folder} is an adapter; write it as adapter.pretrained, and the"
            " model that it was made for as model.pretrained"
        )
    written = on_rank0(world, lambda: read_folder_config(folder))
    code = _trusted_code(folder, written, asked, note)
    for key, value in asked.config_overrides.items():
        _override_hf(written, key, value, code)
    check_layers(written)
    tokenizer = on_rank0(world, lambda: Tokenizer.load(folder))
    reason = "model.name asks for it"
    if asked.name != HF_CAUSAL_LM and code is None:
        try:
            return _by_decoder(folder, written, tokenizer, note, world)
        except UserError as error:
            if asked.name != "auto":
                raise
            reason = error.problems[0].partition(" (can be:")[0]
    return _by_class(folder, written, asked, code, tokenizer, reason, note, world)


def _by_decoder(
    folder: Path,
    written: dict[str, Any],
    tokenizer: Tokenizer,
    note: Callable[[str], None],
    world: World,
) -> PretrainedModel:
    from llmfoundry.hf.read_folder import open_hf

    def read() -> tuple[ResolvedModelConfig, str]:
        with open_hf(folder, written=written, note=note) as opened:  # reads no weights
            return opened.config, opened.architecture

    config, name = on_rank0(world, read)

    def fill(model: Decoder) -> None:
        with open_hf(folder, written=written, note=lambda _: None) as again:
            fill_model(model, with_new_rows(model, again.state(), model.vocabulary()))

    @cache
    def tensors() -> dict[str, LazyTensor]:
        with open_hf(folder, written=written, note=lambda _: None) as again:
            return {tensor.name: tensor for tensor in again.tensors()}

    def read_one(model: Decoder, name: str) -> Tensor:
        value = tensors()[name].read()
        return grown(value, len(model.get_parameter(name))) if name in model.vocabulary() else value

    summary = f"{folder}, {name} loaded into the native decoder"
    return PretrainedModel(config, tokenizer, fill, summary, read_one)


def _by_class(
    folder: Path,
    written: dict[str, Any],
    pretrained: PretrainedConfig,
    code: str | None,
    tokenizer: Tokenizer,
    reason: str,
    note: Callable[[str], None],
    world: World,
) -> PretrainedModel:
    from llmfoundry.hf.class_weights import check_class, class_config
    from llmfoundry.hf.config_keys import without_quantization
    from llmfoundry.hf.read_folder import UNTIED

    if pretrained.quantize != "none":
        raise UserError(
            f"model.quantize: {pretrained.quantize} is the decoder's, which cannot hold this model"
            f" ({reason}); write none"
        )
    written = without_quantization(written)
    config = class_config(written, attn_impl=pretrained.attn_impl, code=code)
    if on_rank0(world, lambda: check_class(config, folder, note=note)):
        note(UNTIED.format(embedding="the embedding"))
        untied = {**written, "tie_word_embeddings": False}
        config = class_config(untied, attn_impl=pretrained.attn_impl, code=code)

    def fill(model: Decoder) -> None:
        fill_class(model, folder)

    named = written.get("architectures")
    kind = named[0] if isinstance(named, list) and named else written.get("model_type")
    summary = f"{folder}, {kind} loaded into transformers' class ({reason})"
    return PretrainedModel(config, tokenizer, fill, summary)


def fill_class(model: nn.Module, folder: Path) -> None:
    """Fill a model of transformers, full or sharded, from a checked folder."""
    from llmfoundry.hf.causal_lm import HFCausalLM
    from llmfoundry.hf.class_weights import class_tensors
    from llmfoundry.hf.read_folder import open_weights

    assert isinstance(model, HFCausalLM)
    with open_weights(folder) as weights:
        tensors = class_tensors(model, weights.names, weights.get, may_grow=True)
        grown = with_new_rows(model, tensors, model.vocabulary())
        fill_model(model, grown, computed=model.computed())


def _trusted_code(
    folder: Path, written: dict[str, Any], pretrained: PretrainedConfig, note: Callable[[str], None]
) -> str | None:
    """Return the folder if its code has to define the class; None: transformers defines it.

    Raises:
        UserError: only the folder has the code, and it is not trusted.
    """
    if "auto_map" not in written:
        if pretrained.trust_remote_code:
            raise UserError(
                f"model.trust_remote_code: has no effect, as {folder} brings no code; remove it"
            )
        return None
    if pretrained.trust_remote_code:
        return str(folder)
    from transformers import CONFIG_MAPPING  # a slow import

    if written.get("model_type") not in CONFIG_MAPPING:
        raise UserError(
            f"model.trust_remote_code: {folder} is a model of its own Python code (auto_map), which"
            " is not run; write true if you trust it"
        )
    note(f"{folder}: the Python code that it brings (auto_map) is not run")
    return None


def _override_hf(written: dict[str, Any], key: str, value: Any, code: str | None) -> None:
    """Change a key of config.json in place. Sections are merged, not replaced.

    Raises:
        UserError: neither config.json nor transformers' configuration has the key.
    """
    from llmfoundry.hf.architecture import OWN_TYPE
    from llmfoundry.hf.causal_lm import read_hf_config

    parts = key.split(".")
    if len(parts) > 1:
        return _override_hf(written, parts[0], _nested(parts[1:], value), code)
    known = dict(written)
    if written.get("model_type") != OWN_TYPE:
        known = {**read_hf_config(dict(written), code=code).to_dict(), **written}
    _merge(written, known, {key: value}, "model.config_overrides.")


def _nested(parts: list[str], value: Any) -> dict[str, Any]:
    return {parts[0]: value if len(parts) == 1 else _nested(parts[1:], value)}


def _merge(into: dict[str, Any], known: Mapping[str, Any], new: dict[str, Any], at: str) -> None:
    """Merge `new` into `into`, section by section; `known` are the possible keys."""
    from llmfoundry.hf.rope_keys import ROPES, SETTINGS

    if at.split(".")[-2] in ROPES:  # other keys than now, if another type of scaling is chosen
        known = dict.fromkeys(sorted(SETTINGS)) | dict(known)
    for key, value in new.items():
        if key not in known:
            raise UserError(
                f"{at}{key}: the model's config.json has no such key{nearest(key, known)}"
            )
        if isinstance(value, dict) and isinstance(known[key], dict) and known[key]:
            section = into.get(key) or dict(known[key])
            into[key] = dict(section)
            _merge(into[key], {**known[key], **section}, value, f"{at}{key}.")
        else:
            into[key] = value


def fill_from_run(model: Decoder, checkpoint: Checkpoint, rows: int, world: World) -> None:
    """Fill a model from a checkpoint whose embedding and head have `rows` rows."""
    names = model.vocabulary() & get_model_state_dict(model).keys()  # the first of tied tensors
    grows = [name for name in sorted(names) if len(model.get_parameter(name)) > rows]
    load_weights(checkpoint, model, world=world, left=grows)
    for name in grows:
        shape = model.get_parameter(name).shape
        saved_tensor = torch.empty(rows, *shape[1:])
        load_tensors({"model": {name: saved_tensor}}, checkpoint)
        fill_tensor(model, name, grown(saved_tensor, shape[0]))
    fill_quantized(model, checkpoint)


def read_from_run(
    checkpoint: Checkpoint, table: Callable[[], Metadata], rows: int, model: Decoder, name: str
) -> Tensor:
    """Return the tensor that `fill_from_run` would write; `table`: that of the checkpoint."""
    shape = dict(quantized_shapes(model)).get(name)
    if shape is not None:
        saved_tensor = torch.empty(shape)
    else:
        saved_tensor = torch.empty_like(tensor_of(model, name), device="cpu")
        if name in model.vocabulary() and len(saved_tensor) > rows:
            saved_tensor = torch.empty(rows, *saved_tensor.shape[1:])
    load_tensors({"model": {name: saved_tensor}}, checkpoint, table=table())
    return (
        grown(saved_tensor, len(model.get_parameter(name)))
        if name in model.vocabulary()
        else saved_tensor
    )


def tensor_of(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer by its name."""
    path, _, last = name.rpartition(".")
    tensor = getattr(model.get_submodule(path), last)
    assert isinstance(tensor, Tensor)
    return tensor


def merge_run(
    model: Decoder,
    base: PretrainedModel,
    folder: Path,
    user_recipe: FinetuneRecipe,
    config: ResolvedModelConfig,
) -> None:
    """Fill a model with an adapter's base, and add the adapter of a checkpoint.

    Args:
        model: model with allocated memory.
        base: base of the adapter's run.
        folder: checkpoint of that run.
        user_recipe: its recipe as written by the user.
        config: shape of its model.
    """
    refuse_quantized(model, folder)
    base.fill(model)
    check_base(model, folder / FOLDER, "model.pretrained", rows=config.vocab_size)
    run = MergedRun(base, folder, user_recipe, config)
    all_stacked = all_stacked_rows(model)
    for name, hold in run.held.items():
        parameter, stacked = model.get_parameter(name), all_stacked.get(name, ())
        assign(parameter, hold(full_tensor(parameter, stacked)), stacked)
    merge_into(model, run.adapter.plan, run.adapter.tensors, rows=config.vocab_size)


def refuse_quantized(model: Decoder, folder: Path) -> None:
    """Raise a UserError if a checkpoint's adapter would have to be merged into 4-bit weights."""
    if is_quantized(model):
        raise UserError(
            f"model.quantize: {folder} is an adapter, and is not added to weights of 4 bits; merge"
            " it first by scripts/convert.py to=hf, and write its output as model.pretrained"
        )


class MergedRun:
    """An adapter's run, and the tensors that `merge_run` computes, one at a time.

    Args:
        base: base of the run.
        folder: checkpoint of the run.
        user_recipe: its recipe as written by the user.
        config: shape of its model.
    """

    def __init__(
        self,
        base: PretrainedModel,
        folder: Path,
        user_recipe: FinetuneRecipe,
        config: ResolvedModelConfig,
    ) -> None:
        self._base, self._folder, self._user_recipe, self._config = (
            base,
            folder,
            user_recipe,
            config,
        )

    @cached_property
    def adapter(self) -> ReadAdapter:
        """The adapter of the checkpoint."""
        from llmfoundry.hf.peft.read import read_adapter

        with torch.device("meta"):
            plain = Decoder(self._config)
        return read_adapter(self._folder / FOLDER, plain, dropout=0.0)

    @cached_property
    def held(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Conversions of the base's tensors that the run stores in fewer bits, by name."""
        return dict(as_held(_trained(self._user_recipe, self._config, self._folder)))

    @cached_property
    def _check(self) -> BaseCheck:
        return BaseCheck(self._folder / FOLDER, "model.pretrained")

    def read(self, model: Decoder, name: str) -> Tensor:
        """Return the tensor that `merge_run` would write into the model."""
        refuse_quantized(model, self._folder)
        assert self._base.read is not None
        like = tensor_of(model, name)
        value = self._base.read(model, name).to(like.dtype)
        rows = self._config.vocab_size if name in model.vocabulary() else None
        self._check.compare_tensor(name, value, rows)
        value = self.held.get(name, lambda held: held)(value).to(like.dtype)
        plan, tensors = self.adapter.plan, self.adapter.tensors
        merged = merged_tensor(model, name, value, plan, tensors, rows=self._config.vocab_size)
        return merged.to(like.dtype)


def _trained(user_recipe: FinetuneRecipe, config: ResolvedModelConfig, folder: Path) -> Decoder:
    """Return the run's model on the meta device, with the representation used in training."""
    recipe = user_recipe.resolve()
    recipe.model = config
    model = build_root(recipe).model
    adapt(model, recipe, checkpoint=folder)
    return model


def fill_model(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], *, computed: Collection[str] = ()
) -> None:
    """Fill every parameter and buffer that `model` saves, full or sharded, one at a time.

    Args:
        model: model with allocated memory and the names of `tensors`; adapters are not changed.
        tensors: its complete state, as full tensors.
        computed: names that already have values, if `tensors` lacks them.

    Raises:
        UserError: a tensor to be quantized has values that are not finite.
    """
    left = {name for name in model.state_dict(keep_vars=True) if not is_added(name)}
    for name, tensor in tensors:
        fill_tensor(model, name, tensor)
        left.remove(name)
    left -= set(computed)
    assert not left, f"not filled: {sorted(left)}"


def fill_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Call `place` and convert its refusal to a UserError."""
    try:
        place(model, name, tensor)
    except ValueError as error:
        raise UserError(
            f"model.quantize: {name} {error}, and 4 bits are scaled by the largest; write none, or"
            " mend the weights"
        ) from error


def fill_quantized(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Fill the 4-bit weights from a checkpoint of a run; every rank reads for itself."""
    for name, shape in quantized_shapes(model):
        tensor = torch.empty(shape)
        load_tensors({"model": {name: tensor}}, checkpoint)
        fill_tensor(model, name, tensor)


def with_new_rows(
    model: nn.Module, tensors: Iterable[tuple[str, Tensor]], names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the state with embeddings and heads extended to the model's rows, as by `grown`.

    Args:
        model: model with the final number of rows.
        tensors: its state, one tensor at a time.
        names: tensors that may be extended.
    """
    names = set(names)
    for name, tensor in tensors:
        yield name, grown(tensor, len(model.get_parameter(name))) if name in names else tensor
