"""`scripts/prepare_data.py`: a recipe's tokenizer and token shards, without training."""

from __future__ import annotations

from llmfoundry.build.job import filled
from llmfoundry.data.prepare import prepare
from llmfoundry.data.tokenizer import build_tokenizer
from llmfoundry.recipe.train import TrainRecipe


def prepare_data(recipe: TrainRecipe) -> None:
    """Fill the cache that `scripts/train.py` reads for the same recipe."""
    recipe = filled(recipe)
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.data, progress=True)
    prepared = prepare(recipe.data, tokenizer, progress=True)
    print(prepared.summary)
    rows = prepared.train.n_rows(recipe.max_seq_len)
    print(f"{rows:,} training rows of {recipe.max_seq_len:,} tokens")
