"""Conversion of text to token ids and back.

Entry point: `Tokenizer`. `build_tokenizer.py` builds the tokenizer of a recipe. Only the
`tokenizers` library is used, because importing transformers takes seconds. Every tokenizer is saved
in the format of Hugging Face, which transformers can load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from llmfoundry.data.text.bounded_backend import (
    MOST_TOKENS,
    AnyBackend,
    BoundedBackend,
    read_backend,
)
from llmfoundry.data.text.bpe import byte_alphabet
from llmfoundry.data.text.chat_template import (
    NAMED,
    ChatTemplate,
    chosen_templates,
    named_templates,
    own_sources,
    template_of,
    with_variables,
)
from llmfoundry.errors import UserError
from llmfoundry.files import atomic_write, read_object_if_there, read_text

GENERATION = "generation_config.json"


class Tokenizer:
    """Converts text to token ids and back.

    Special tokens, such as the end of text, are not parsed in a text: a document that contains the
    name of one is encoded as ordinary characters, unless `split_special_tokens` is turned off.

    Attributes:
        vocab_size: exclusive upper bound of the ids.
        eos_id: id of the end-of-text token.
        bos_ids: special tokens that the tokenizer itself prepends to a text; often none.
        eos_ids: special tokens that the tokenizer itself appends to a text.
        document_start: ids at the start of each document of a token stream, and of each prompt:
            bos_ids or, without them, the end of text.
        document_end: ids at the end of each document: eos_ids, and the end of text if
            document_start does not contain it, so that a model learns where to stop. The end of
            text occurs once per document.
        byte_level: whether encoding and decoding leave any text unchanged.
        generation: entries of the model's generation_config.json, saved with the tokenizer.
        new_tokens: special tokens that were added by the recipe or for its chat template.
        pieces: ids of the tokens that the text of each of them was encoded as before, by its id.
        template_file: source of the chat template, for error messages.
        trusts_template: whether to run the chat template without limits; never read from a file.
    """

    new_tokens: Sequence[str] = ()
    template_file = "tokenizer.chat_template"
    trusts_template: bool | None = None

    def __init__(self, backend: AnyBackend, eos: str, config: dict[str, Any] | None = None) -> None:
        """Take over a backend.

        Args:
            backend: tokenizer of the `tokenizers` library; its truncation and padding are disabled.
            eos: end-of-text token.
            config: other entries for tokenizer_config.json, such as a chat template.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._config = config or {}
        self.generation: dict[str, Any] = {}
        self.pieces: dict[int, list[int]] = {}
        self.eos = eos
        eos_id = backend.token_to_id(eos)
        assert eos_id is not None, eos
        self.eos_id: int = eos_id
        self.bos_ids, self.eos_ids = _added(backend)
        others = tuple(i for i in self.eos_ids if i != eos_id)
        self.document_start = self.bos_ids or (eos_id,)
        self.document_end = others if eos_id in self.document_start else (*others, eos_id)
        self.vocab_size: int = _vocab_size(backend)
        self.byte_level = "ByteLevel" in json.dumps(_part(backend, "decoder"))

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled backend loses settings that its file does not store, such as
        # encode_special_tokens.
        backend = self._backend
        saved = backend if isinstance(backend, BoundedBackend) else backend.to_str()
        state = (saved, self.eos, self._config, self.generation, self.split_special_tokens)
        return _unpickled, (*state, self.template_file, self._is_own_template())

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a generated text, the end of text first.

        The others are the end of a turn, if it is a special token, and the tokens in
        generation_config.json.
        """
        ends = [self.eos_id]
        with suppress(UserError):  # there is no template, or it does not end turns
            turn = self.chat.end_of_turn
            ends += self.encode_chat(turn) if turn in self.special_tokens else ()
        ends += _end_ids(self.generation.get("eos_token_id"))
        return tuple(dict.fromkeys(n for n in ends if 0 <= n < self.vocab_size))

    @property
    def split_special_tokens(self) -> bool:
        """Whether the name of a special token in a text is encoded as ordinary characters."""
        return self._backend.encode_special_tokens

    @split_special_tokens.setter
    def split_special_tokens(self, value: bool) -> None:
        self._backend.encode_special_tokens = value
        for name in ("fingerprint", "_reading"):
            self.__dict__.pop(name, None)

    @property
    def bos_id(self) -> int | None:
        """Return the id of the beginning-of-text token of its configuration, even if unused."""
        token = self._config.get("bos_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._backend.token_to_id(token)

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of everything that the ids of a document depend on."""
        definition = f"{self.eos_id} {self._backend.to_str()}"
        around = (self.document_start, self.document_end)
        if around != ((self.eos_id,), ()):  # the default; hashes of older versions lack it
            definition += f" {around}"
        if not self.split_special_tokens:
            definition += " special tokens are read"
        return hashlib.blake2b(definition.encode(), digest_size=16).hexdigest()

    @cached_property
    def vocabulary(self) -> str:
        """Return a hash of the tokens by id, which a teacher and its student must share."""
        tokens = sorted((n, token) for token, n in self._backend.get_vocab().items())
        return hashlib.blake2b(repr(tokens).encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode texts in parallel, each as `encode` does."""
        return [e.ids for e in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    @property
    def pad_id(self) -> int | None:
        """Return the id of the padding token of its configuration; None if there is none."""
        token = self._config.get("pad_token")
        text = token.get("content") if isinstance(token, dict) else token
        return None if text is None else self._backend.token_to_id(text)

    def encode_documents(self, texts: list[str]) -> list[list[int]]:
        """Return the ids of documents, each with `document_start` and `document_end`."""
        start, end = self.document_start, self.document_end
        return [[*start, *ids, *end] for ids in self.encode_batch(texts)]

    def encode_prompt(self, text: str, *, start: Sequence[int] | None = None) -> list[int]:
        """Return the ids of a prompt to be continued, special tokens read as in transformers.

        A prompt that spells special tokens, such as a rendered conversation, has the ids of
        transformers' `tokenizer(text)`. A plain text begins as a document does.

        Args:
            text: the prompt.
            start: what documents begin with; None: `document_start`.
        """
        is_plain = not any(token in text for token in self.special_tokens)
        plain_start = self.document_start if start is None else start
        return [*(plain_start if is_plain else self.bos_ids), *self.encode_chat(text)]

    @cached_property
    def chat(self) -> ChatTemplate:
        """Return the chat template. `encode_chat` encodes its rendered text.

        Raises:
            UserError: the tokenizer has none.
        """
        template = self._config.get("chat_template")
        if template is None:
            raise UserError(
                "tokenizer.chat_template: the tokenizer has none; write zephyr, which fits any"
                " tokenizer, chatml, llama3 or mpt, or a Jinja file"
            )
        text, tools = chosen_templates(template)
        return ChatTemplate(
            text,
            self._special_tokens(),
            tools=tools,
            file=self.template_file,
            is_trusted=self.trusts_template,
        )

    def _is_own_template(self) -> bool | None:
        """Return `trusts_template` for pickled copies, which then need not read our templates."""
        if self.trusts_template is None and self.has_chat:
            with suppress(UserError):  # `chat` raises it when it is used
                return {*chosen_templates(self._config["chat_template"])} - {""} <= own_sources()
        return self.trusts_template

    def chat_by(self, choice: str, *, key: str = "tokenizer.chat_template") -> ChatTemplate:
        """Return a built-in template or that of a file, without adding special tokens.

        Raises:
            UserError: the tokenizer lacks a special token of the template.
        """
        text = template_of(choice, key=key)
        missing = self.missing(NAMED.get(choice, ()))
        if missing:
            raise UserError(
                f"{key}: {choice} needs the tokens {' '.join(missing)}, which the tokenizer does"
                " not have; write zephyr, whose marks are plain text"
            )
        return ChatTemplate(text, self._special_tokens(), file=f"{key}: {choice}")

    @property
    def has_chat(self) -> bool:
        """Return whether the tokenizer has a chat template."""
        return self._config.get("chat_template") is not None

    def use_chat_template(
        self, choice: str, *, room: int | None = None, is_trusted: bool = False
    ) -> list[str]:
        """Set the chat template and add the special tokens that it needs.

        Args:
            choice: name of a built-in template, or a Jinja file.
            room: number of free rows in the model's embedding; None: unlimited.
            is_trusted: run the template in this process, without limits.

        Returns:
            The added special tokens.

        Raises:
            UserError: the template is not valid, or needs more tokens than `room`.
        """
        text = template_of(choice)
        missing = self.missing(NAMED.get(choice, ()))
        if missing and room is not None and len(missing) > room:
            raise UserError(
                f"tokenizer.chat_template: {choice} needs the tokens {' '.join(missing)}, which the"
                " tokenizer does not have; write zephyr, whose marks are plain text, or"
                " model.resize_embeddings: true, which adds them"
            )
        file, trusted = f"tokenizer.chat_template: {choice}", is_trusted or None
        ChatTemplate(text, self._special_tokens(), file=file, is_trusted=trusted)  # checks it
        self._add(missing)
        self.template_file, self.trusts_template = file, trusted
        self._use_template(text)
        return missing

    def add_tokens(self, tokens: Sequence[str], *, room: int | None = None) -> None:
        """Add special tokens. `room`: number of free rows in the embedding; None: unlimited.

        Raises:
            UserError: a token exists, or there are more tokens than `room`.
        """
        for token in tokens:
            token_id = self._backend.token_to_id(token)
            if token_id is not None:
                raise UserError(
                    f"tokenizer.add_tokens: {token} is a token of the tokenizer already (id"
                    f" {token_id}); remove it"
                )
        if room is not None and len(tokens) > room:
            raise UserError(
                f"tokenizer.add_tokens: {len(tokens)} tokens need as many rows, and the model has"
                f" {max(room, 0)} free; write model.resize_embeddings: true, which adds rows"
            )
        self._add(tokens)

    def missing(self, tokens: Iterable[str]) -> list[str]:
        """Return the tokens that the tokenizer does not have, each once."""
        return [t for t in dict.fromkeys(tokens) if self._backend.token_to_id(t) is None]

    @property
    def new_ids(self) -> list[int]:
        """Return the ids of `new_tokens`."""
        return [n for n in map(self.id_of, self.new_tokens) if n is not None]

    def id_of(self, token: str) -> int | None:
        """Return the id of a token; None: the tokenizer does not have it."""
        return self._backend.token_to_id(token)

    def _add(self, tokens: Sequence[str]) -> None:
        if not tokens:
            return
        pieces = [self._backend.encode(token, add_special_tokens=False).ids for token in tokens]
        ids_in_use = {*self._backend.get_vocab(with_added_tokens=True).values()}
        added = [AddedToken(token, special=True, normalized=False) for token in tokens]
        self._backend.add_special_tokens(added)
        for token, ids in zip(tokens, pieces, strict=True):
            token_id = self._backend.token_to_id(token)
            assert token_id is not None
            if token_id in ids_in_use:
                raise UserError(
                    f"tokenizer: its ids have gaps, and {token} would get the id {token_id} of"
                    " another token; number its tokens without gaps, or add no tokens"
                )
            self.pieces[token_id] = ids
        self.new_tokens = (*self.new_tokens, *tokens)
        self.vocab_size = _vocab_size(self._backend)
        self._forget()

    def set_chat_variables(self, variables: Mapping[str, Any], *, key: str) -> None:
        """Set defaults of variables in the chat template; they are saved with the template.

        Args:
            variables: values by name.
            key: recipe key, for errors.

        Raises:
            UserError: the template does not read a variable, or a value has no JSON type.
        """
        chat = self.chat
        for name in variables:
            if not chat.reads(name):
                raise UserError(
                    f"{key}.{name}: the chat template does not read it, so that it has no effect;"
                    " remove it, or write another tokenizer.chat_template"
                )
        text, tools = chosen_templates(self._config["chat_template"])
        try:
            sources = [with_variables(source, variables) for source in (text, tools) if source]
        except ValueError as error:
            raise UserError(f"{key}: {error}") from error
        changed = dict(zip(("default", "tool_use"), sources, strict=False))
        templates = named_templates(self._config["chat_template"]) | changed
        entries = [{"name": name, "template": source} for name, source in templates.items()]
        self.trusts_template = chat.is_trusted or None
        self._use_template(entries if len(templates) > 1 else sources[0])

    def _use_template(self, template: Any) -> None:
        self._config = {**self._config, "chat_template": template}
        self._forget()

    def _forget(self) -> None:
        """Forget what was derived from the former tokens and template."""
        for name in ("chat", "end_ids", "fingerprint", "vocabulary", "_reading"):
            self.__dict__.pop(name, None)

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation: special tokens are parsed, none is added."""
        return self._reading.encode(text, add_special_tokens=False).ids

    def encode_chat_batch(self, texts: list[str]) -> list[list[int]]:
        """Encode rendered conversations in parallel, each as `encode_chat` does."""
        encodings = self._reading.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_spans(self, text: str, *, chat: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of a text and the span of characters (start, end) of each id.

        Args:
            text: the text.
            chat: parse special tokens, as `encode_chat` does.
        """
        backend = self._reading if chat else self._backend
        encoding = backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    @property
    def special_tokens(self) -> list[str]:
        """Return the special tokens, which `encode_chat` parses."""
        tokens = self._backend.get_added_tokens_decoder().values()
        return [token.content for token in tokens if token.special]

    @cached_property
    def _reading(self) -> AnyBackend:
        """Return a backend that parses special tokens.

        It is a copy, because other threads may encode with the original at the same time.
        """
        original = self._backend
        if not self.split_special_tokens:
            return original
        backend: AnyBackend
        if isinstance(original, BoundedBackend):
            backend = original.copy()
        else:
            backend = Backend.from_str(original.to_str())
        backend.encode_special_tokens = False
        return backend

    def _special_tokens(self) -> dict[str, str]:
        """Return the special tokens by template variable (bos_token …), as in transformers."""
        tokens = {"eos_token": self.eos, "pad_token": self.eos}
        for name in ("bos", "unk", "sep", "pad", "cls", "mask"):
            token = self._config.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[f"{name}_token"] = token
        return tokens

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of ids, including special tokens; invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def spelled(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of a token within a text; those of its name if it is special.

        Exact for byte-level vocabularies. In others, a word piece's mark is a space or nothing.
        """
        added = self._backend.get_added_tokens_decoder().get(token_id)
        piece = self._backend.id_to_token(token_id) or ""
        if added is not None:
            return added.content.encode()
        if self.byte_level and _BYTE_OF.keys() >= {*piece}:
            return bytes(_BYTE_OF[character] for character in piece)
        if _BYTE_PIECE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return _plain_piece(piece).encode()

    def token_bytes(self) -> np.ndarray:
        """Return the number of UTF-8 bytes of each token, (vocab_size,) int32; 0 if special.

        Exact for byte-level vocabularies. In others, a word piece counts without its marks.
        """
        sizes = np.zeros(self.vocab_size, np.int32)
        for piece, token_id in self._backend.get_vocab(with_added_tokens=True).items():
            sizes[token_id] = len(piece) if self.byte_level else _piece_bytes(piece)
        for token_id, token in self._backend.get_added_tokens_decoder().items():
            sizes[token_id] = 0 if token.special else len(token.content.encode())
        return sizes

    def save(self, folder: Path, *, max_length: int | None = None) -> None:
        """Write the files of Hugging Face. AutoTokenizer of transformers loads the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files(max_length=max_length).items():
            atomic_write(folder / name, content)

    def files(self, *, max_length: int | None = None) -> dict[str, str]:
        """Return the contents of the files of `save`, by name."""
        config = {name: value for name, value in self._config.items() if value is not None}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.eos}
        config.setdefault("pad_token", self.eos)
        config.setdefault("clean_up_tokenization_spaces", False)
        if max_length is not None:
            config["model_max_length"] = max_length
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {name: config[name] for name in names if name in config}
        generation = {GENERATION: _json(self.generation)} if self.generation else {}
        return {
            **generation,
            "tokenizer.json": self._backend.to_str(pretty=True),
            "tokenizer_config.json": _json(config),
            "special_tokens_map.json": _json(tokens),
        }

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load a folder with tokenizer.json, written by `save` or by another program.

        Raises:
            UserError: a file is missing or damaged.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"{folder}: holds no tokenizer.json; name a folder that does")
        backend = read_backend(file)
        config = {name: v for name, v in _read_config(folder).items() if name not in _NOT_KEPT}
        tokenizer = cls(backend, _eos_in(folder, backend), config)
        tokenizer.template_file = _template_file(folder)
        tokenizer.generation = _read_generation(folder)
        return tokenizer


@dataclass(frozen=True)
class SpecialTokens:
    """Special tokens around a text.

    Training puts tokens before each document, a tokenizer may add tokens around any text, and
    lm-evaluation-harness needs a token in place of an empty text.

    Attributes:
        start: tokens before every native prompt.
        before: tokens that the tokenizer itself prepends to a text, such as Llama's <s>.
        after: tokens that the tokenizer itself appends to a text, such as T5's </s>.
        prefix: token in place of an empty text in lm-evaluation-harness.
    """

    start: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    prefix: int


def special_tokens(tokenizer: Tokenizer, *, start: Sequence[int] | None = None) -> SpecialTokens:
    """Return the special tokens of a tokenizer.

    Args:
        tokenizer: tokenizer of the model.
        start: tokens at the start of each document in the model's training; None: unknown, hence
            the tokenizer's `document_start`.
    """
    first = tokenizer.document_start if start is None else tuple(start)
    prefix = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    return SpecialTokens(first, tokenizer.bos_ids, tokenizer.eos_ids, prefix)


def check_tokenizer(name: str) -> None:
    """Check that a tokenizer.json is safe to load with transformers.

    Args:
        name: folder or hub id.

    Raises:
        UserError: it is damaged or exceeds a limit.
    """
    from transformers.utils import cached_file  # takes seconds; the caller imports it, too

    try:
        file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    except Exception:  # the caller reports a folder or hub that cannot be read
        return
    if file is not None:
        read_backend(Path(file))


def _unpickled(
    saved: Any,
    eos: str,
    config: dict[str, Any],
    generation: dict[str, Any],
    split: bool,
    template_file: str,
    trusts_template: bool | None,
) -> Tokenizer:
    backend = Backend.from_str(saved) if isinstance(saved, str) else saved
    tokenizer = Tokenizer(backend, eos, config)
    tokenizer.split_special_tokens, tokenizer.generation = split, generation
    tokenizer.template_file, tokenizer.trusts_template = template_file, trusts_template
    return tokenizer


def _vocab_size(backend: AnyBackend) -> int:
    return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _added(backend: AnyBackend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor prepends and appends to a text."""
    encoding = backend.encode("a")
    text = [n for n, added in enumerate(encoding.special_tokens_mask) if not added]
    if not text:  # the vocabulary has neither "a" nor an unknown token
        return (), ()
    return tuple(encoding.ids[: text[0]]), tuple(encoding.ids[text[-1] + 1 :])


_NAMES = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
# Entries of a tokenizer_config.json that would make transformers build a different tokenizer.
_NOT_KEPT = ("tokenizer_class", "auto_map", "eos_token", "tokenizer_file", "name_or_path")


def _eos_in(folder: Path, backend: AnyBackend) -> str:
    """Return the end-of-text token of a folder; files are searched in the order of transformers.

    Raises:
        UserError: no file names one, or it is not in the vocabulary.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _token_texts(read_object_if_there(folder / name), folder / name).get("eos_token")
        if token is not None:
            break
    else:
        token = _eos_by_id(folder, backend)
    if token is None:
        raise UserError(no_end_of_text(str(folder)))
    if backend.token_to_id(token) is None:
        raise UserError(f"{folder}: its eos_token {token!r} is not in its vocabulary; correct it")
    return token


def _token_texts(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """Return the special tokens of a configuration: text, or an object with the text."""
    texts = {}
    for name, token in config.items():
        if name in _NAMES and token is not None:
            text = token.get("content") if isinstance(token, dict) else token
            if not isinstance(text, str):
                raise UserError(f"{file}: {name}: {str(token)[:80]} is no token; write its text")
            texts[name] = text
    return texts


def _eos_by_id(folder: Path, backend: AnyBackend) -> str | None:
    for name in ("generation_config.json", "config.json"):
        token_id = read_object_if_there(folder / name).get("eos_token_id")
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        if type(token_id) is int and 0 <= token_id < MOST_TOKENS:
            return backend.id_to_token(token_id)
    return None


def _read_generation(folder: Path) -> dict[str, Any]:
    """Return generation_config.json of a folder; without it, eos_token_id of config.json.

    Raises:
        UserError: eos_token_id is not a token id.
    """
    file = folder / GENERATION
    settings = read_object_if_there(file)
    if not settings:
        file = folder / "config.json"
        config = read_object_if_there(file)
        text_config = config.get("text_config")
        both = {**(text_config if isinstance(text_config, dict) else {}), **config}
        settings = {name: both[name] for name in ("eos_token_id",) if both.get(name) is not None}
    try:
        _end_ids(settings.get("eos_token_id"))
    except ValueError as error:
        raise UserError(f"{file}: eos_token_id: {error}; write a token's id, or a list") from error
    return {name: value for name, value in settings.items() if name not in _OF_A_VERSION}


# Entries of a generation_config.json that describe how it was written.
_OF_A_VERSION = ("transformers_version", "_from_model_config")


def _end_ids(value: Any) -> list[int]:
    """Return the ids of an `eos_token_id`: an id, a list of ids, or None.

    Raises:
        ValueError: the value is something else.
    """
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if type(token_id) is not int:
            raise ValueError(f"{str(token_id)[:40]!r} is no token id")
    return ids


def no_end_of_text(where: str) -> str:
    """Return the error for a tokenizer without an end-of-text token."""
    return (
        f"{where}: names no end-of-text token, which separates documents;"
        ' add "eos_token" to its tokenizer_config.json'
    )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json with the chat templates, which newer versions store in files."""
    config = read_object_if_there(folder / "tokenizer_config.json")
    _token_texts(config, folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = read_text(template)
    others = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if others:
        templates = named_templates(config.get("chat_template"))
        templates |= {file.stem: read_text(file) for file in others}
        config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]
    return config


def _template_file(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    return str(file) if file.is_file() else f"{folder / 'tokenizer_config.json'}: chat_template"


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _part(backend: AnyBackend, name: str) -> Any:
    part = getattr(backend, name)
    return None if part is None else json.loads(part.__getstate__())


def _piece_bytes(piece: str) -> int:
    """Return the number of bytes of a SentencePiece or WordPiece token, without its mark."""
    return 1 if _BYTE_PIECE.fullmatch(piece) else len(_plain_piece(piece).encode())


def _plain_piece(piece: str) -> str:
    return piece.removeprefix("##").replace("\u2581", " ")


_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}
