"""Trained parameters of a fine-tuned run: an adapter, or all parameters except those of `freeze`.

Entry points: `adapt`, which `build_trainer` calls on the meta device, and `begin_adapter`, once the
base has its weights. `models.adapter` knows which parameters belong to an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmfoundry.builders.model import weight_dtype
from llmfoundry.builders.new_rows import init_new_rows
from llmfoundry.errors import UserError
from llmfoundry.files import read_object
from llmfoundry.loggers.console import format_gib as memory_text
from llmfoundry.models.adapter import (
    BASE,
    adapter_table,
    add_adapter,
    base_difference,
    base_sample,
    fill_adapter_from,
    freeze_parts,
    init_adapter,
    tensor_sample,
)
from llmfoundry.models.adapter_targets import matches, plan_adapter
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.low_rank import LowRank
from llmfoundry.models.quantized import narrow_frozen, quantize_frozen
from llmfoundry.recipe.adapter import NEW
from llmfoundry.recipe.finetune import FinetuneRecipe, ResolvedFinetuneRecipe
from llmfoundry.recipe.model import HFModelConfig
from llmfoundry.recipe.paths import find_file
from llmfoundry.recipe.train import ResolvedTrainRecipe, TrainRecipe

FOLDER = "adapter"
"""Folder of the adapter, in peft's format, inside a checkpoint."""


def has_adapter(recipe: TrainRecipe) -> bool:
    """Return whether a run trains an adapter."""
    return isinstance(recipe, FinetuneRecipe) and recipe.adapter.name != "none"


def adapt(
    model: Decoder,
    recipe: ResolvedTrainRecipe,
    *,
    note: Callable[[str], None] = lambda line: None,
    checkpoint: Path | None = None,
) -> None:
    """Turn a base, on the meta device, into the model to train: adapter, frozen parameters.

    Args:
        model: the base.
        recipe: resolved recipe, with the shape of the base.
        note: reports what was adapted, frozen or quantized.
        checkpoint: checkpoint that the run resumes from; None: it begins.

    Raises:
        UserError: a name matches nothing, or an adapter does not fit.
    """
    _choose_trained(model, recipe, note, checkpoint)  # first, because it adds parameters
    _hold_frozen(model, recipe, note)


def _choose_trained(
    model: Decoder,
    recipe: ResolvedTrainRecipe,
    note: Callable[[str], None],
    checkpoint: Path | None,
) -> None:
    """Add the recipe's adapter, or freeze the parameters that it names."""
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return
    if recipe.adapter.name == "lora" and isinstance(recipe.model, HFModelConfig):
        _add_to_class(model, recipe, note, checkpoint)
    elif recipe.adapter.name == "lora":
        _check_experts(recipe)
        _add(model, recipe, checkpoint)
        for line in adapter_table(model):
            note(line)
    elif recipe.freeze:
        frozen = freeze_parts(model, recipe.freeze)
        names = dict(model.named_parameters())
        size = sum(names[name].numel() for name in frozen)
        total = sum(p.numel() for p in names.values())
        note(f"freeze: {len(frozen)} of {len(names)} tensors, {size:,} of {total:,} parameters")


def _hold_frozen(
    model: Decoder,
    recipe: ResolvedTrainRecipe,
    note: Callable[[str], None],
) -> None:
    """Store the frozen weights below an adapter in as few bits as the recipe allows.

    Matrices are stored in the dtype of matmuls, or in 4 bits. Parameters that `freeze` names keep
    their dtype: they are part of the model that is saved.
    """
    if not isinstance(recipe, ResolvedFinetuneRecipe) or recipe.adapter.name == "none":
        return
    if recipe.precision == "amp_bf16":
        narrow_frozen(model, torch.bfloat16)
    if recipe.base.quantize == "nf4":
        if isinstance(recipe.model, HFModelConfig):
            raise UserError(
                "model.quantize: nf4 is for models that the decoder holds, and transformers' class"
                f" holds {recipe.base.pretrained}; write none"
            )
        before = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        count = quantize_frozen(model, double=recipe.base.double_quantize is not False)
        after = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        note(
            f"model.quantize: {count} matrices in 4 bits; frozen weights take"
            f" {memory_text(after / 2**30)} in place of {memory_text(before / 2**30)}"
        )


def train_new_rows(
    recipe: ResolvedFinetuneRecipe, new_ids: Sequence[int], note: Callable[[str], None]
) -> None:
    """Ensure that the rows of new tokens are trained.

    All new rows are equal at first. With an adapter, `adapter.trainable_token_indices: new` becomes
    their ids in the resolved and the user's recipe; if it is unset, embedding and head are trained
    in full, and are added to `adapter.modules_to_save` of both.

    Args:
        recipe: recipe of the run.
        new_ids: ids of the new tokens; may be empty.
        note: reports what is added to `adapter`.

    Raises:
        UserError: the rows cannot be trained, or there are none.
    """
    adapter, key = recipe.adapter, "adapter.trainable_token_indices"
    if not new_ids:
        if adapter.trainable_token_indices == NEW:
            raise UserError(f"{key}: new, but the recipe adds no tokens; remove it, or write ids")
        return

    # class of transformers
    if isinstance(recipe.model, HFModelConfig) and adapter.name == "none":
        return
    if isinstance(recipe.model, HFModelConfig) and not (
        adapter.trainable_token_indices or adapter.pretrained
    ):
        raise UserError(
            f"{key}: lora on a model of transformers' class trains the rows of new tokens alone;"
            f" write {NEW}, or leave out tokenizer.add_tokens, and write tokenizer.chat_template:"
            " zephyr, which adds none"
        )

    # full fine-tuning: the tables must not be frozen
    tied = recipe.model.tie_word_embeddings
    tables = ["wte"] if tied else ["wte", "lm_head"]
    if adapter.name == "none":
        frozen = [t for t in tables if any(matches(p, f"{t}.weight") for p in recipe.freeze)]
        if frozen:
            raise UserError(
                f"freeze: {frozen[0]} gains rows for new tokens, which must train; leave it out"
            )
        return

    # a pretrained adapter cannot be extended
    if adapter.pretrained is not None:
        from llmfoundry.hf.peft.names import read_config, saved_tables, trained_tokens

        folder = find_file(adapter.pretrained, "adapter.pretrained")
        written = read_config(folder)
        if isinstance(recipe.model, HFModelConfig):
            trains_tables = bool(written.get("modules_to_save"))
        else:
            trains_tables = {*tables} <= saved_tables(written, recipe.model)
        if trains_tables or {*new_ids} <= trained_tokens(folder, written):
            return
        raise UserError(
            "adapter.pretrained: does not train the rows of new tokens; merge it first by"
            " scripts/convert.py to=hf, and write its output as model.pretrained"
        )

    # a new adapter: train the rows of these tokens next to it
    if adapter.trainable_token_indices is not None:
        _train_rows_alone(recipe, new_ids)
        return

    _train_tables(recipe, tables, note)


def _train_tables(
    recipe: ResolvedFinetuneRecipe, tables: Sequence[str], note: Callable[[str], None]
) -> None:
    """Add `tables`, unless they train already, to `adapter.modules_to_save` of both recipes."""
    adapter = recipe.adapter
    targets = adapter.target_modules if isinstance(adapter.target_modules, list) else []
    trained = [*adapter.modules_to_save, *targets]
    missing = [table for table in tables if not any(matches(p, table) for p in trained)]
    if missing:
        adapter.modules_to_save = [*adapter.modules_to_save, *missing]
        recipe.user_recipe.adapter.modules_to_save = adapter.modules_to_save
        note(
            f"adapter.modules_to_save: {', '.join(missing)} trains whole as well, for the rows of"
            " new tokens"
        )


def _train_rows_alone(recipe: ResolvedFinetuneRecipe, new_ids: Sequence[int]) -> None:
    """Write the ids of new tokens in place of `new`, or check that the recipe's ids have them."""
    adapter, key = recipe.adapter, "adapter.trainable_token_indices"
    if adapter.trainable_token_indices == NEW:
        adapter.trainable_token_indices = [*new_ids]
        problems = [*adapter.check()]
        if problems:
            raise UserError(*problems)
        recipe.user_recipe.adapter.trainable_token_indices = [*new_ids]
    missing = sorted({*new_ids} - {*(adapter.trainable_token_indices or ())})
    if missing:
        raise UserError(f"{key}: leaves out the new token {missing[0]}, whose row must train")


def _add_to_class(
    model: Decoder,
    recipe: ResolvedFinetuneRecipe,
    note: Callable[[str], None],
    checkpoint: Path | None,
) -> None:
    from llmfoundry.hf.peft.class_adapter import add_to_class  # imports transformers, slowly

    folder = _folder(recipe, checkpoint)
    add_to_class(model, recipe, folder, dtype=weight_dtype(recipe.precision), note=note)


def _folder(recipe: ResolvedFinetuneRecipe, checkpoint: Path | None) -> Path | None:
    """Return the folder of adapter.pretrained, or a checkpoint's copy of it; None: not set."""
    if recipe.adapter.pretrained is None:
        return None
    saved_adapter = None if checkpoint is None else checkpoint / FOLDER
    return saved_adapter or find_file(recipe.adapter.pretrained, "adapter.pretrained")


def _add(model: Decoder, recipe: ResolvedFinetuneRecipe, checkpoint: Path | None) -> None:
    from llmfoundry.hf.peft.names import splits_qkv
    from llmfoundry.hf.peft.read import read_adapter

    config, folder = recipe.adapter, _folder(recipe, checkpoint)
    if folder is None:
        plan = plan_adapter(model, config, split_qkv=splits_qkv(model.config))
        fully_trained = config.modules_to_save
        _check_pieces(recipe, plan)
    else:
        read = read_adapter(folder, model, dropout=config.lora_dropout or 0.0)
        plan, fully_trained = read.plan, read.modules_to_save
    add_adapter(model, plan, modules_to_save=fully_trained, dtype=weight_dtype(recipe.precision))


def _check_pieces(recipe: ResolvedFinetuneRecipe, plan: Mapping[str, LowRank]) -> None:
    """Raise a UserError if rows that `new_rows: pieces` sets are frozen, and would not be saved."""
    for table in ("wte", "lm_head"):
        if recipe.new_pieces and table in plan and not plan[table].tokens:
            raise UserError(
                f"model.new_rows: pieces sets rows of {table}, which is frozen below its low-rank"
                f" matrices; leave {table} out of adapter.target_modules, which trains it in full,"
                " or write new_rows: mean"
            )


def _check_experts(recipe: ResolvedFinetuneRecipe) -> None:
    impl = recipe.model.ffn_config.moe_impl
    if impl == "megablocks":
        raise UserError(
            "model.config_overrides.ffn_config.moe_impl: megablocks has no adapters; write"
            " grouped_mm"
        )


def begin_adapter(model: Decoder, recipe: ResolvedTrainRecipe) -> None:
    """Initialize the adapter, or load adapter.pretrained, and initialize the rows of new tokens.

    The base must have its weights. All ranks call this, because it may gather shards.

    Raises:
        UserError: the adapter belongs to another base.
    """
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return
    if recipe.adapter.name != "none":
        _fill_adapter(model, recipe)
    if recipe.new_pieces:
        init_new_rows(model, recipe.new_pieces)


def _fill_adapter(model: Decoder, recipe: ResolvedFinetuneRecipe) -> None:
    """Initialize the adapter, or load adapter.pretrained."""
    folder = _folder(recipe, None)
    if folder is not None:
        check_base(model, folder, "adapter.pretrained")
    if isinstance(recipe.model, HFModelConfig):
        from llmfoundry.hf.peft.class_adapter import begin_in_class

        begin_in_class(model, recipe, folder)
    else:
        init_adapter(model, recipe.seed)
        if folder is not None:
            from llmfoundry.hf.peft.read import read_adapter

            fill_adapter_from(model, read_adapter(folder, model, dropout=0.0).tensors)


def check_base(model: Decoder, folder: Path, key: str, *, rows: int | None = None) -> None:
    """Check that a model is the base of an adapter; all ranks call this, as it may gather shards.

    Args:
        model: model with its weights.
        folder: folder of the adapter.
        key: recipe key, for errors.
        rows: rows of embedding and head that belong to the base; None: all.

    Raises:
        UserError: the adapter's folder has samples of its base, which differ from this model.
    """
    check = BaseCheck(folder, key)
    if check.then is not None:
        check.compare(base_sample(model, frozen=False, rows=rows))


class BaseCheck:
    """Compares a base with the samples of weights in an adapter's folder.

    Attributes:
        then: samples of the adapter's base by tensor name; None: another library wrote the folder,
            and only names and shapes can be compared.
    """

    then: Any = None

    def __init__(self, folder: Path, key: str) -> None:
        """Read the samples.

        Args:
            folder: folder of the adapter.
            key: recipe key, for errors.

        Raises:
            UserError: they cannot be read.
        """
        self._folder, self._key = folder, key
        if (folder / BASE).exists():
            self.then = read_object(folder / BASE)

    def compare(self, now: Mapping[str, list[float]]) -> None:
        """Raise a UserError if the result of `base_sample` for a base differs."""
        different = base_difference(self.then, now)
        if different is not None:
            raise UserError(
                f"{self._key}: {self._folder} was made for another base model ({different}); write"
                " the one that it was made for as model.pretrained"
            )

    def check_names(self, names: Collection[str]) -> None:
        """Raise a UserError if the base has none of the sampled tensors."""
        if self.then and not self.then.keys() & names:
            self.compare({})

    def compare_tensor(self, name: str, tensor: Tensor, rows: int | None = None) -> None:
        """Compare one tensor in the model's representation, or its first `rows`."""
        if self.then is not None and name in self.then and tensor.is_floating_point():
            self.compare({name: tensor_sample(tensor, rows)})


def lora_plus_ratio(recipe: ResolvedTrainRecipe) -> float:
    """Return the ratio of the learning rates of an adapter's B and of all other parameters."""
    if not isinstance(recipe, ResolvedFinetuneRecipe):
        return 1.0
    return recipe.adapter.lora_plus_ratio or 1.0
