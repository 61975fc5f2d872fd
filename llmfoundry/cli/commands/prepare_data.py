"""Command of `scripts/prepare_data.py`: build a recipe's tokenizer and shards, without torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.preparation.corpus import check_first_document
from llmfoundry.data.preparation.output_folder import OutputFolder
from llmfoundry.data.preparation.prepare import (
    ExecutionOptions,
    check_free,
    manifest_summary,
    prepare_corpus,
    prepare_to,
)
from llmfoundry.data.preparation.write_part import OutputFormat, token_output
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.recipe.before_training import (
    ResolvedPrepareConfig,
    ResolvedPrepareRecipe,
)
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.source import CORPORA, under_key
from llmfoundry.redaction import public


def prepare_data(recipe: ResolvedPrepareRecipe) -> None:
    """Write prepare.output, or fill the cache that `scripts/train.py` reads for the same recipe."""
    check_inputs_and_output(recipe)
    if recipe.teacher is not None:
        from llmfoundry.cli.teacher import ask_teacher  # imports torch; only needed here

        ask_teacher(recipe, partial(_write, recipe))
    elif recipe.prepare.output is None:
        _fill_cache(recipe)
    else:
        _write(recipe)


def check_inputs_and_output(recipe: ResolvedPrepareRecipe) -> None:
    """Check the corpora and the output folder, before a tokenizer is trained.

    A folder at a URL is checked when it is written.

    Raises:
        UserError: a corpus has no file, its first document cannot be read, or the folder holds
            other files.
    """
    for key, corpus in _corpora(recipe.data).items():
        if corpus.name in CORPORA and not corpus.is_supervised:
            with under_key(key):
                check_first_document(corpus)
    output = recipe.prepare.output
    if output is not None and "://" not in output:
        check_free(OutputFolder(_absolute(output), recipe.data.storage_options))


def _absolute(output: str) -> str:
    """Return a local folder as an absolute path, and a URL without a slash at its end."""
    return output.rstrip("/") if "://" in output else str(Path(output).expanduser().absolute())


def build_output(config: ResolvedPrepareConfig, tokenizer: Tokenizer) -> OutputFormat:
    """Return the output format of the resolved `prepare` section."""
    if config.format == "tokens":
        return token_output(tokenizer, shard_bytes=config.size_limit, hashes=tuple(config.hashes))
    output = OutputFormat(
        kind="mds-columns" if config.columns else f"mds-{config.column}",
        dtype="str",
        columns=tuple(config.columns.items()),
        shard_bytes=config.size_limit,
        hashes=tuple(config.hashes),
        eos_id=tokenizer.eos_id,
        compression=config.compression,
    )
    if not output.tokenizes:
        return output
    _check_dtype(str(config.dtype), tokenizer)
    if config.eos_text is None:  # the end of text, unless the tokenizer itself adds it
        around = (*tokenizer.bos_ids, *tokenizer.eos_ids)
        eos: tuple[int, ...] = () if tokenizer.eos_id in around else (tokenizer.eos_id,)
    else:
        eos = tuple(tokenizer.encode_chat(config.eos_text))
    return replace(
        output,
        dtype=f"ndarray:{config.dtype}",
        row=config.concat_tokens,
        bos=(*tokenizer.encode_chat(config.bos_text), *tokenizer.bos_ids),
        eos=(*tokenizer.eos_ids, *eos),
        no_wrap=bool(config.no_wrap),
    )


def _check_dtype(dtype: str, tokenizer: Tokenizer) -> None:
    """Check that the dtype can represent all ids, before any text is read.

    Raises:
        UserError: it cannot.
    """
    largest, last_id = np.iinfo(dtype).max, tokenizer.vocab_size - 1
    if last_id > largest:
        raise UserError(
            f"prepare.dtype: {dtype} holds ids up to {largest:,}, the tokenizer's go up to"
            f" {last_id:,}; write int32"
        )


def _fill_cache(recipe: ResolvedPrepareRecipe) -> None:
    """Prepare all corpora of the recipe in the cache folder."""
    data = recipe.data
    if data.streams and recipe.tokenizer.name == "train":
        from llmfoundry.builders.data import learning_corpus  # imports torch; only needed here

        data = learning_corpus(data)
    tokenizer = build_tokenizer(recipe.tokenizer, data, progress=True)
    for name, corpus in _corpora(recipe.data).items():
        with under_key(name):
            prepared = prepare_corpus(corpus, tokenizer, progress=True)
        print(public(prepared.summary).replace("data:", f"{name}:"))
        rows = prepared.train.n_rows(recipe.max_seq_len)
        print(f"{name}: {rows:,} training rows of {recipe.max_seq_len:,} tokens")


def _write(recipe: ResolvedPrepareRecipe) -> None:
    """Prepare the corpus in a folder or at a URL, and print how to train on it."""
    config, output = recipe.prepare, recipe.prepare.output
    assert output is not None
    tokenizer = build_tokenizer(recipe.tokenizer, recipe.data, progress=True)
    manifest = prepare_to(
        OutputFolder(_absolute(output), recipe.data.storage_options),
        recipe.data,
        tokenizer,
        output=build_output(config, tokenizer),
        execution=ExecutionOptions(recipe.data.num_workers, config.engine, progress=True),
        about={"licence": config.licence or "", "source": config.source or ""},
    )
    print(public(manifest_summary(manifest)))
    total = manifest.total
    if total.samples:
        print(f"data: {total.samples:,} samples of MDS")
    both = manifest.counts["validation"].documents and not config.columns
    how = "data=mds" if both else "data.name=shards data.split=train"
    print(public(f"data: in {output}; train: {how} data.remote={output}"))


def _corpora(data: DataConfig) -> dict[str, DataConfig]:
    """Return every corpus of the recipe by the key that its output lines begin with."""
    if not data.streams:
        return {"data": data}
    return {
        f"data.streams.{name}": data.alone(stream)
        for name, stream in data.streams.items()
        if stream.name in CORPORA
    }
