"""Adapters that are virtual tokens: what `adapter.py` does for them, on either kind of model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from llmfoundry.builders.job import weight_dtype
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.hf.peft.virtual import read_virtual
from llmfoundry.models.decoder import Decoder
from llmfoundry.models.shard_layout import assign
from llmfoundry.models.virtual_tokens import (
    NAME,
    VirtualTokens,
    add_virtual,
    init_virtual,
    longest_document,
    virtual_table,
)
from llmfoundry.recipe.architecture.adapter import PREFIX_TUNING
from llmfoundry.recipe.architecture.hf_model import HF_CAUSAL_LM, HFModelConfig
from llmfoundry.recipe.scripts.finetune import FinetuneRecipe


def add_virtual_tokens(
    model: Decoder, recipe: FinetuneRecipe, folder: Path | None, note: Callable[[str], None]
) -> None:
    """Put those of the recipe, or as many as in a folder, on a model on the meta device.

    Raises:
        UserError: the model has no place for them.
    """
    name, count = recipe.adapter.name, recipe.adapter.num_virtual_tokens
    if folder is not None:
        count = len(read_virtual(folder, name))
    assert count is not None, "the recipe was not filled"
    _check_model(model, recipe)
    add_virtual(model, VirtualTokens(name, count), dtype=weight_dtype(recipe.precision))
    longest = longest_document(model)
    if longest is not None and recipe.max_seq_len > longest:
        raise UserError(
            f"max_seq_len: {recipe.max_seq_len}, but the model has learned positions for"
            f" {longest + count} tokens, of which adapter.num_virtual_tokens takes {count}; write"
            f" at most {longest}"
        )
    for line in virtual_table(model):
        note(line)


def _check_model(model: Decoder, recipe: FinetuneRecipe) -> None:
    name = recipe.adapter.name
    if not isinstance(recipe.model, HFModelConfig):
        if name == PREFIX_TUNING:
            raise UserError(
                "adapter.name: prefix_tuning is for transformers' classes, and the decoder has lora"
                f" and prompt_tuning; write one of these, or model.name: {HF_CAUSAL_LM}"
            )
        return
    from llmfoundry.hf.transformers_models.prefix import check_prefix  # transformers takes seconds

    if name == PREFIX_TUNING:
        check_prefix(model)
    elif not model.takes("inputs_embeds"):  # type: ignore[operator]
        raise UserError(
            "adapter.name: prompt_tuning needs a class that takes embeddings in place of tokens,"
            f" and {type(model.hf).__name__} does not; write prefix_tuning, or lora"
        )


def begin_virtual(
    model: Decoder, recipe: FinetuneRecipe, folder: Path | None, tokenizer: Tokenizer
) -> None:
    """Fill them, of a base that has its weights: anew, or from a folder."""
    config, parameter = recipe.adapter, model.get_parameter(NAME)
    if folder is not None:
        values = read_virtual(folder, config.name)
        if values.shape != parameter.shape:
            raise UserError(
                f"adapter.pretrained: {folder} was made for another base model: its vectors have"
                f" {values.shape[1]} values, and would have {parameter.shape[1]} here"
            )
        assign(parameter, values.to(parameter.device))
        return
    begin: list[int] | None = None
    if config.prompt_tuning_init == "text":
        begin = tokenizer.encode(str(config.prompt_tuning_init_text))
    elif config.prompt_tuning_init == "sample_vocab":
        begin = []
    rows = tokenizer.vocab_size
    init_virtual(model, model.embedding_weight, recipe.seed, begin=begin, vocab=rows)
