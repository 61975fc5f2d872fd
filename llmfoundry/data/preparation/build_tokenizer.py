"""Construction of a recipe's tokenizer: trained, downloaded or read from a folder.

Entry point: `build_tokenizer`, which `builders/` and `prepare_data` call. Trained and downloaded
tokenizers are stored in the cache folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.partition import make_split, training_sample
from llmfoundry.data.preparation.prepared_folder import build_once, cache_key
from llmfoundry.data.text.bounded_backend import with_bounds
from llmfoundry.data.text.bpe import (
    END_OF_TEXT,
    WORDS,
    bytes_backend,
    tiktoken_backend,
    train_backend,
)
from llmfoundry.data.text.tokenizer import Tokenizer, check_tokenizer, no_end_of_text
from llmfoundry.errors import UserError, import_optional
from llmfoundry.recipe.data import DataConfig, TokenizerConfig

_VERSION = 3  # version of trained tokenizers; to be raised when the sample or the trainer changes


def build_tokenizer(config: TokenizerConfig, data: DataConfig, *, progress: bool) -> Tokenizer:
    """Return the tokenizer of a recipe; `train` trains it on the corpus, once.

    Args:
        config: tokenizer section of the recipe.
        data: data section of the recipe.
        progress: show a progress bar.

    Raises:
        UserError: the tokenizer cannot be loaded, or a setting does not fit it.
    """
    config = _with_defaults(config)
    if config.name == "train":
        check_chat_template(config, data)
    tokenizer = _KINDS[config.name](config, data, progress)
    tokenizer.split_special_tokens = config.split_special_tokens
    _set_chat(tokenizer, config, data)
    return tokenizer


def check_chat_template(config: TokenizerConfig, data: DataConfig) -> None:
    """Check the chat template of a tokenizer before it is trained, with one of bytes.

    Raises:
        UserError: there is no such template, or the tokenizer cannot have it.
    """
    _set_chat(Tokenizer(bytes_backend(), END_OF_TEXT), config, data)


def _set_chat(tokenizer: Tokenizer, config: TokenizerConfig, data: DataConfig) -> None:
    """Give a tokenizer the recipe's tokens, chat template and its variables."""
    tokenizer.add_tokens(config.add_tokens)
    if config.chat_template is not None:
        trusted = config.trust_chat_template
        tokenizer.use_chat_template(config.chat_template, is_trusted=trusted)
    if data.chat_template_kwargs:
        tokenizer.set_chat_variables(data.chat_template_kwargs, key="data.chat_template_kwargs")


def tokenizer_summary(tokenizer: Tokenizer, config: TokenizerConfig) -> str:
    """Return a line about a tokenizer."""
    vocab_size = _with_defaults(config).vocab_size
    line = f"{config.name}, {tokenizer.vocab_size:,} tokens, {tokenizer.eos} is {tokenizer.eos_id}"
    if vocab_size is not None and tokenizer.vocab_size < vocab_size:
        line += f"; the text has too few repeated pairs for the {vocab_size:,} asked for"
    return line


def _with_defaults(config: TokenizerConfig) -> TokenizerConfig:
    config = replace(config)
    config.fill()
    return config


def _train(config: TokenizerConfig, data: DataConfig, progress: bool) -> Tokenizer:
    vocab_size, train_bytes = config.vocab_size, config.train_bytes
    assert vocab_size is not None and train_bytes is not None
    corpus = Corpus(data)

    def build(folder: Path) -> None:
        texts = training_sample(corpus, make_split(corpus), train_bytes)
        backend = train_backend(texts, vocab_size, progress=progress)
        Tokenizer(backend, END_OF_TEXT).save(folder)

    key = cache_key(
        version=_VERSION,
        words=WORDS,
        corpus=corpus.fingerprint(),
        validation_fraction=data.validation_fraction,
        vocab_size=vocab_size,
        train_bytes=train_bytes,
    )
    return _cached(data, key, build)


def _bytes(config: TokenizerConfig, data: DataConfig, progress: bool) -> Tokenizer:
    return Tokenizer(bytes_backend(), END_OF_TEXT)


def _huggingface(config: TokenizerConfig, data: DataConfig, progress: bool) -> Tokenizer:
    folder = Path(config.path or "").expanduser()
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.load(folder)
    check_tokenizer(str(folder))
    import transformers  # takes seconds; only needed for hub ids and folders of older formats

    try:
        # False also prevents the question on the terminal
        loaded = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers and the hub's client raise many unrelated types
        reason = " ".join(str(error).split())
        raise UserError(
            f"tokenizer.path: cannot load {config.path}: {reason}; write a folder with"
            " tokenizer.json or a hub id that this machine can reach"
        ) from error
    if not getattr(loaded, "is_fast", False):
        raise UserError(f"tokenizer.path: {config.path} has no tokenizer.json; choose one that has")
    if loaded.eos_token is None:
        raise UserError(no_end_of_text(f"tokenizer.path: {config.path}"))
    names = ("bos_token", "unk_token", "pad_token", "chat_template")
    entries = {name: getattr(loaded, name, None) for name in names}
    backend = with_bounds(loaded.backend_tokenizer, f"tokenizer.path: {config.path}")
    return Tokenizer(backend, loaded.eos_token, entries)


def _tiktoken(config: TokenizerConfig, data: DataConfig, progress: bool) -> Tokenizer:
    tiktoken = import_optional("tiktoken", "tokenizer.name: tiktoken", extra="tiktoken")
    name = str(config.encoding)
    try:
        name = tiktoken.encoding_name_for_model(name)
    except KeyError:
        if name not in tiktoken.list_encoding_names():
            known = ", ".join(tiktoken.list_encoding_names())
            raise UserError(
                f"tokenizer.encoding: {name!r} is neither a model nor an encoding of tiktoken;"
                f" encodings: {known}"
            ) from None

    def build(folder: Path) -> None:
        encoding = _tiktoken_encoding(name)
        eos = encoding.decode([encoding.eot_token])
        Tokenizer(tiktoken_backend(encoding), eos).save(folder)

    return _cached(data, cache_key(version=_VERSION, tiktoken=name), build)


def _tiktoken_encoding(name: str) -> Any:
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except (OSError, ValueError) as error:  # errors of requests are OSErrors
        raise UserError(
            f"tokenizer.encoding: cannot download {name}: {' '.join(str(error).split())}; on a"
            " machine without network set TIKTOKEN_CACHE_DIR to a copy of another's cache"
        ) from error


def _cached(data: DataConfig, key: str, build: Callable[[Path], None]) -> Tokenizer:
    folder = Path(data.cache_folder).expanduser() / "tokenizers" / key
    build_once(folder, build)
    return Tokenizer.load(folder)


_KINDS: dict[str, Callable[[TokenizerConfig, DataConfig, bool], Tokenizer]] = {
    "train": _train,
    "bytes": _bytes,
    "huggingface": _huggingface,
    "tiktoken": _tiktoken,
}
