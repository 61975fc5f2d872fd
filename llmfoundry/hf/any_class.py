"""A model of transformers back to a folder, by its own `save_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from llmfoundry.hf.card import CardInfo, write_card
from llmfoundry.hf.transformers_models.causal_lm import HFCausalLM
from llmfoundry.hf.write import DTYPES, SHARD_BYTES, copy_tokenizer, stop_ids, whole_or_nothing
from llmfoundry.models.decoder import Decoder


def save_class(
    model: HFCausalLM,
    tokenizer_folder: Path,
    output: Path,
    *,
    dtype: str,
    card: CardInfo,
    shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a folder that transformers loads; experts as the class's published files have them.

    Args:
        model: with its weights, whole on this process; it is cast in place.
        tokenizer_folder: tokenizer.json and what belongs to it.
        output: must not exist, or be empty.
        dtype: of the written weights: fp32, bf16 or fp16.
        card: what the model card says.
        shard_bytes: size of a weight file, at most.

    Returns:
        The class's name.

    Raises:
        UserError: the output is not empty.
    """
    hf = model.hf.to(DTYPES[dtype])
    hf.config.dtype = DTYPES[dtype]
    hf.config.use_cache = True  # which training had turned off
    name = type(hf).__name__
    with whole_or_nothing(output) as folder:
        _stop_at(getattr(hf, "generation_config", None), stop_ids(tokenizer_folder))
        hf.save_pretrained(folder, max_shard_size=shard_bytes)
        copy_tokenizer(tokenizer_folder, folder)
        write_card(folder / "README.md", card, cast(Decoder, model), architecture=name, dtype=dtype)
    return name


def _stop_at(config: Any, ids: int | list[int]) -> None:
    """Have generations end at these too; a class that generates nothing has no configuration."""
    if config is not None:
        known, more = (n if isinstance(n, list) else [n] for n in (config.eos_token_id, ids))
        stops = [*dict.fromkeys(n for n in (*known, *more) if n is not None)]
        config.eos_token_id = stops if len(stops) > 1 else stops[0]
