"""Supervised sources of the recipe's `data` section opened; called by `builders/data.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from llmfoundry.data.sources import ONLY, stream_key
from llmfoundry.data.supervised.pack import (
    PackedExamples,
    PackOptions,
    bad_lines,
    open_rows,
    summary,
)
from llmfoundry.data.supervised.prepare_rows import prepare_rows
from llmfoundry.data.supervised.source import SupervisedHeldOut, SupervisedSource, brings_others
from llmfoundry.data.supervised.store import Store
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.source import SourceConfig


@dataclass(frozen=True)
class OpenedRows:
    """A supervised source.

    Attributes:
        source: rows to train on.
        validation: those held out of it; None: none are.
        bytes_per_token: of the learned tokens.
        notes: lines for the user.
        bad_rows: those of them about rows that cannot be used and are left out.
    """

    source: SupervisedSource
    validation: SupervisedHeldOut | None
    bytes_per_token: float
    notes: list[str]
    bad_rows: list[str]


def open_supervised(
    name: str, source: SourceConfig, recipe: TrainRecipe, tokenizer: Tokenizer
) -> OpenedRows:
    """A source to train on, and what it holds out; every process calls it.

    Raises:
        UserError: its rows cannot be read, are not of their format, or do not fit the recipe.
    """
    config = recipe.data if name == ONLY else recipe.data.alone(source)
    held_out = config.validation_fraction if recipe.data.validation is None else 0.0
    store, packed, lines = _open(stream_key(name), config, recipe, tokenizer, held_out)
    supervised = config.supervised
    rows = SupervisedSource(
        name,
        store,
        packed,
        recipe.max_seq_len,
        per_sequence=supervised.loss == "sequences",
        with_others=brings_others(store, supervised),
    )
    validation = None
    if len(packed.held_out):
        validation = SupervisedHeldOut(store, packed.held_out, tokenizer, supervised)
    counts = packed.counts
    ratio = max(1, counts.learned_bytes) / max(1, counts.learned)
    return OpenedRows(rows, validation, ratio, lines, bad_lines(stream_key(name), store.facts))


def open_validation_rows(
    source: SourceConfig, recipe: TrainRecipe, tokenizer: Tokenizer
) -> tuple[SupervisedHeldOut, list[str], list[str]]:
    """The rows of data.validation, all to measure on; notes and bad_rows as in `OpenedRows`.

    Raises:
        UserError: as `open_supervised`.
    """
    config = recipe.data.alone(source)
    key = "data.validation"
    store, packed, lines = _open(key, config, recipe, tokenizer, 0.0)
    held_out = SupervisedHeldOut(store, np.sort(packed.members), tokenizer, config.supervised)
    return held_out, lines, bad_lines(key, store.facts)


def _open(
    key: str, config: DataConfig, recipe: TrainRecipe, tokenizer: Tokenizer, held_out: float
) -> tuple[Store, PackedExamples, list[str]]:
    config = replace(config)
    config.fill()
    store = prepare_rows(config, key, tokenizer, seed=recipe.seed)
    options = PackOptions(
        seq_len=recipe.max_seq_len,
        seed=recipe.seed,
        shuffle=config.shuffle,
        held_out=held_out,
        supervised=config.supervised,
        key=key,
    )
    packed = open_rows(store, options, tokenizer.token_bytes(), config.cache_folder)
    return store, packed, summary(key, store.facts, packed, options)
