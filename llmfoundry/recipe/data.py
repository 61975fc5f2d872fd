"""The `tokenizer` and `data` sections: text, mixtures, order, and the form of training examples.

`data.filter` drops documents and counts them by rule. `data.supervised` defines how examples of
prompts and answers become tokens and labels. A single source of text is defined in `source.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

from llmfoundry.recipe.checks import (
    at_least,
    check_duration,
    inert,
    inert_change,
    nearest,
    set_defaults,
)
from llmfoundry.recipe.schema import (
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    FRACTION,
    PATH,
    PROCESSES,
    Only,
    Range,
    check_fields,
    choice,
)
from llmfoundry.recipe.source import (
    AUTO,
    COMPARED,
    CORPORA,
    SOURCES,
    TEXT,
    SourceConfig,
    StreamConfig,
)

TOKENIZERS = ("train", "bytes", "huggingface", "tiktoken")
PRETRAINED = "pretrained"


@dataclass
class TokenizerConfig:
    """The tokenizer; every kind is saved in Hugging Face's format in the run's folder."""

    name: Annotated[str, choice((*TOKENIZERS, PRETRAINED))] = "train"
    """train (byte-level BPE, trained on the recipe's corpus), bytes, huggingface, tiktoken. In
    fine-tuning also pretrained: the tokenizer of model.pretrained."""
    vocab_size: Annotated[
        int | None, Range(257, 2**22, "as many merges are learned and kept"), Only("name", "train")
    ] = None
    """Vocabulary size with the end-of-text token; default 8192."""
    train_bytes: Annotated[int | None, Range(1), Only("name", "train")] = None
    """Bytes of text from which merges are learned, at most; default 20 MB (more changes little)."""
    path: Annotated[str | None, PATH, Only("name", "huggingface")] = None
    """A folder with tokenizer.json, or a hub id."""
    encoding: Annotated[str | None, Only("name", "tiktoken")] = None
    """An encoding (cl100k_base) or the name of a model (gpt-4); default gpt-4."""
    chat_template: Annotated[str | None, PATH, CHAT_TEMPLATE] = None
    """Template that renders messages as text. zephyr fits any tokenizer; also chatml, llama3, mpt.
    Published templates with marks around the assistant's tokens: qwen2.5, qwen3, phi3, phi3.5,
    gemma, gemma3, mistral, deepseek-v3, deepseek-r1, glm4, gpt-oss. Or a Jinja file. Unset: the
    tokenizer's template."""
    trust_chat_template: bool = False
    """Render the template without limits on time and memory, in the training processes. Only with a
    file as chat_template. Use it for your own templates; an untrusted template runs in a child
    process with limits."""
    add_tokens: list[str] = field(default_factory=list)
    """Special tokens to add, such as "<|im_start|>". Their ids follow those of the tokenizer. A
    model without free rows for them needs model.resize_embeddings: true."""
    split_special_tokens: bool = True
    """Tokenize a special token in a text, such as <|endoftext|>, as plain characters. Off: as the
    special token, as transformers and LLM Foundry do; then any text can contain special tokens."""

    def check(self, key: str = "tokenizer.") -> Iterator[str]:
        """Yield an error line for each invalid or ineffective value."""
        yield from check_fields(key, self)
        if self.chat_template in (None, *CHAT_TEMPLATES):
            yield from inert_change(
                key, self, ["trust_chat_template"], "without a file as chat_template"
            )
        for number, token in enumerate(self.add_tokens):
            if not token.strip():
                yield f"{key}add_tokens: {token!r} is blank; write the text of a token"
            elif token in self.add_tokens[:number]:
                yield f"{key}add_tokens: {token} is written twice; remove one"
        if self.name == "huggingface" and self.path is None:
            yield f"{key}path: huggingface needs it; write a folder with tokenizer.json or a hub id"

    def fill(self) -> None:
        """Resolve defaults in place."""
        if self.name == "train":
            set_defaults(self, vocab_size=8192, train_bytes=20_000_000)
        if self.name == "tiktoken":
            set_defaults(self, encoding="gpt-4")


class ResolvedTokenizerConfig(TokenizerConfig):
    """`TokenizerConfig` with defaults resolved."""

    vocab_size: int
    train_bytes: int
    encoding: str


@dataclass
class FilterConfig:
    """Rules that a document must pass; unset rules pass every document.

    The four published rule sets are for English web pages, as implemented by datatrove (extra
    filters). They select whole documents and change no text.
    """

    min_chars: Annotated[int | None, Range(2)] = None
    """Drop documents with fewer characters. Every document has at least one."""
    max_chars: Annotated[int | None, Range(1)] = None
    """Drop documents with more characters."""
    min_words: Annotated[int | None, Range(2)] = None
    """Drop documents with fewer words, separated by white space."""
    max_words: Annotated[int | None, Range(1)] = None
    """Drop documents with more words."""
    gopher_quality: bool = False
    """Gopher's quality rules (arXiv:2112.11446, A.1.1): 50 to 100,000 words, 3 to 10 letters per
    word on average, few symbols, bullets and ellipses, at least two stop words."""
    gopher_repetition: bool = False
    """Gopher's repetition rules (table A1 of the same paper): limits on repeated lines, paragraphs
    and n-grams."""
    c4: bool = False
    """C4's rules for pages (arXiv:1910.10683, 2.2): at least five sentences in lines that pass, no
    curly bracket, no lorem ipsum. Lines that fail stay in the text, and the list of bad words is
    not used."""
    fineweb: bool = False
    """FineWeb's rules (arXiv:2406.17557, 3.6): most lines end in punctuation, few lines are short,
    few are repeated."""

    def check(self, key: str) -> Iterator[str]:
        """Yield an error line for each invalid, conflicting or ineffective value."""
        if (yield from check_fields(key, self)):
            return
        yield from at_least(f"{key}max_chars", self.max_chars, self.min_chars or 1)
        yield from at_least(f"{key}max_words", self.max_words, self.min_words or 1)
        if self.min_words is not None:
            yield from self._check_min_words(key, 2 * self.min_words - 1)
        if self.max_words is not None and self.max_chars is not None:
            most = (self.max_chars + 1) // 2
            if most <= self.max_words:
                yield (
                    f"{key}max_words: has no effect with max_chars: {self.max_chars}, in which"
                    f" {most} words fit at most; remove it or write less"
                )

    def _check_min_words(self, key: str, chars: int) -> Iterator[str]:
        """Check limits against `chars`, the smallest size of min_words words with spaces."""
        if self.max_chars is not None and chars > self.max_chars:
            yield (
                f"{key}min_words: {self.min_words} words take {chars} characters, more than"
                f" max_chars: {self.max_chars}; no document would be left; write less"
            )
        if self.min_chars is not None and self.min_chars <= chars:
            yield (
                f"{key}min_chars: has no effect with min_words: {self.min_words}, which take"
                f" {chars} characters; remove it or write more"
            )


RESPONSES = ("last", "all")
PACKINGS = ("best_fit", "off")
LOSSES = ("tokens", "sequences")
TOO_LONG = ("truncate", "drop", "error")
NOTHING_LEARNED = ("error", "drop")
CHAT_EOS = ("auto", "always")
BAD_ROWS = ("error", "drop")
_AT_LEAST = re.compile(r"length>=([1-9]\d{0,8})")


@dataclass
class SupervisedConfig:
    """Supervised examples; used by sources whose format is not text."""

    target_prompts: Annotated[str, choice(("none", "all"), "length>=N", _AT_LEAST)] = "none"
    """Prompts in the loss: none, all, or length>=N (prompts of N tokens or more)."""
    target_responses: Annotated[str, choice(RESPONSES)] = "all"
    """Assistant turns of a conversation in the loss: all, or only the last. LLM Foundry's default
    is last, which uses a fraction of the tokens that are computed."""
    chat_eos: Annotated[str, choice(CHAT_EOS)] = "auto"
    """End-of-text token after a conversation. auto: appended only if the last turn ends neither as
    the template ends turns nor with another special token; white space does not count. always:
    appended if the last token differs, as in LLM Foundry, so that <|im_end|>, a line break and
    <|endoftext|> may follow each other. Published templates with marks end conversations
    themselves."""
    packing: Annotated[str, choice(PACKINGS)] = "best_fit"
    """best_fit: several examples share a sequence of max_seq_len tokens and do not attend to each
    other. off: each example is padded to max_seq_len; for kto the previous example takes the place
    of the padding, outside the loss, because its answer is the mismatched one for the prompt."""
    packing_window: Annotated[int, Range(1, 2**24, "their lengths are sorted in memory")] = 8192
    """Number of examples, in a seeded order, that are packed together."""
    loss: Annotated[str, choice(LOSSES)] = "tokens"
    """tokens: the mean over all tokens in the loss of a step. sequences: the mean over examples of
    the mean of each example, so that short and long answers have equal weight."""
    too_long: Annotated[str, choice(TOO_LONG)] = "truncate"
    """Action on examples longer than max_seq_len; a preference example has both answers, each with
    the prompt. truncate (drop the end), drop, or error."""
    nothing_learned: Annotated[str, choice(NOTHING_LEARNED)] = "error"
    """Action on examples without a token in the loss, also because of truncation: error, or
    drop."""
    bad_rows: Annotated[str, choice(BAD_ROWS)] = "error"
    """Action on rows that cannot be used: invalid JSON, a wrong format, or a row that the chat
    template rejects. One pass counts all of them by cause. error: the run ends with a line for each
    cause and its first locations. drop: they are left out, with a log line and an event for each
    cause."""
    drop_duplicates: bool = False
    """Drop examples that repeat another example exactly. They are counted in any case."""

    def check(self, key: str = "data.supervised.") -> Iterator[str]:
        """Yield an error line for each invalid value."""
        yield from check_fields(key, self)

    @property
    def shortest_target_prompt(self) -> float:
        """Length in tokens from which prompts are in the loss; infinity: never."""
        match = _AT_LEAST.fullmatch(self.target_prompts)
        if match:
            return int(match[1])
        return 0 if self.target_prompts == "all" else float("inf")


BATCHING = ("stratified", "per_stream")
UNITS = ("sequences", "tokens", "loss_tokens", "examples")
DEDUPLICATION = ("none", "exact", "minhash")
TOKEN_TYPES = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")
TOKEN_ID = Range(0, 2**31 - 1, "ids have 32 bits")
_SIZE = re.compile(r"([0-9]{0,9}\.?[0-9]{1,9}) ?([kmgt]?b)", re.IGNORECASE)
_FACTOR = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass
class PhaseConfig:
    """Other proportions from a point of the run on, for a curriculum."""

    at: str = "???"
    """Begin of the phase, as a duration from the start of the run: 0.8dur, 1e12tok."""
    proportions: Annotated[dict[str, float], Range(0)] = field(default_factory=dict)
    """Each stream's share of the sequences from this point on; a stream without a share is not
    used."""


@dataclass
class DataConfig(SourceConfig):
    """A source, or a mixture of several, in an order independent of the number of ranks."""

    IMPLIES: ClassVar[dict[str, tuple[str, str]]] = {
        "paths": ("files", "files"),
        "dataset": ("huggingface", "huggingface"),
        "remote": ("shards", "mds"),
        "local": ("shards", "mds"),
    }
    """Keys that imply a source: its name, and the file of the group data/ that the key selects."""

    name: Annotated[str, choice((*SOURCES, "mixture"))] = "python_stdlib"
    """python_stdlib: the source files of the running Python, without tests. files, huggingface:
    documents. shards: MDS or token shards. instructions: generated chats with exact answers.
    mixture: several of these, in data.streams."""
    streams: Annotated[dict[str, StreamConfig], Only("name", "mixture")] = field(
        default_factory=dict
    )
    """The sources, by names of your choice."""
    phases: Annotated[list[PhaseConfig], Only("name", "mixture")] = field(default_factory=list)
    """Other proportions from certain points of the run on, in order."""
    proportion_unit: Annotated[str, choice(UNITS), Only("name", "mixture")] = "sequences"
    """What the proportions of streams and phases are shares of: sequences of max_seq_len tokens;
    tokens, without padding; loss_tokens, those in the loss; or examples (rows of the files). All
    but sequences are counted for supervised streams before training; text has max_seq_len tokens in
    each sequence, all of them in the loss, and no examples."""
    batching_method: Annotated[str, choice(BATCHING)] = "stratified"
    """Used with data.name=mixture. stratified: every batch has each stream's share, to within one
    sequence. per_stream: each batch comes from one stream."""
    validation_fraction: Annotated[float, FRACTION] = 0.02
    """Share of the documents of a corpus that is held out. Documents are chosen by a hash of their
    content, so that the choice never changes. Of a corpus with few documents, the ends of the
    longest ones are held out, with the same share of the text."""
    validation: StreamConfig | None = None
    """Separate validation data: shards, if the training text comes from shards (remote, local,
    split); for supervised examples any source, with their format. Then no training data is held
    out."""
    attend_across_documents: bool = False
    """Let the documents of a sequence attend to each other. Off: each document attends only to
    itself."""
    shuffle: bool = True
    """Visit sequences in a new pseudo-random order each epoch. Off: in the order of the source."""
    shuffle_block_size: Annotated[int, Range(1, 2**32)] = 1 << 18
    """Number of sequences that are shuffled together, from shards in random order. A larger block
    mixes better, a smaller one needs fewer shards at a time. 262144 is Streaming's default."""
    packing_ratio: Annotated[
        float | str, Range(above=0, most=2**20), choice(("auto",), "a number of documents")
    ] = "auto"
    """Used for text that is tokenized during training: mean number of documents that are joined to
    fill a sequence. auto: estimated from the first documents."""
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How examples of prompts and answers become tokens and labels."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for examples of messages: {enable_thinking: false} or {tools:
    [...]}. They are saved in the tokenizer's template, so that chat.py, generate.py and exports
    render with the same values. The tools and chat_template_kwargs of an example take
    precedence."""
    eos_token_id: Annotated[int | None, TOKEN_ID] = None
    """Used with MDS tokens: the token id that ends each document of a sequence. Unset: the
    tokenizer's."""
    bos_token_id: Annotated[int | None, TOKEN_ID] = None
    """Used with MDS tokens: the token id that begins each document, in place of eos_token_id."""
    token_encoding_type: Annotated[str, choice(TOKEN_TYPES)] = "int64"
    """Used with MDS columns of bytes: the integer type of the token ids."""
    allow_changed: list[str] = field(default_factory=list)
    """Streams (or `data`) whose shards may differ from the shards with which the resumed run
    began."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Rules that select the documents of a corpus."""
    deduplicate: Annotated[str, choice(DEDUPLICATION)] = "none"
    """Drop documents of a corpus that repeat another: none, exact, or minhash (near duplicates;
    extra filters)."""
    max_row_size: str = "1gb"
    """Largest size in bytes of a row, a page or a text file of a corpus, uncompressed. A larger one
    is an error, so that no small compressed file fills the memory."""
    cache_folder: Annotated[str, PATH] = "~/.cache/llmfoundry"
    """Folder of trained tokenizers, token shards and the local shard cache."""
    cache_limit: str | None = None
    """Largest size of the local shard cache, such as 500gb; the least recently used shards are
    deleted."""
    prefetch: str = "2gb"
    """Bytes of remote shards that are downloaded in advance."""
    download_retry: Annotated[int, Range(0, 1000)] = 5
    """Retries after a transient error, such as a lost connection."""
    download_timeout: Annotated[float, Range(above=0, most=86_400, why="a day")] = 60.0
    """Seconds within which the next 256 kB, or the rest of a file, must arrive; otherwise the
    request has failed."""
    requests_per_second: Annotated[float | None, Range(above=0, most=1e6)] = None
    """Largest rate of requests from a machine to a remote store; unset: no limit."""
    validate_hash: bool = True
    """Verify each file against the hashes of the index when it is first opened."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Credentials and endpoints of object stores, by protocol: {s3: {endpoint_url: https://...}},
    with the names of obstore or fsspec."""
    num_workers: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Number of processes that prepare a corpus; unset: one per core."""
    loader_workers: Annotated[int, Range(0, 256, PROCESSES)] = 0
    """Number of processes per rank that build batches; 0: the rank builds them in a thread."""
    prefetch_factor: Annotated[int, Range(1, 1024, "each batch is held in memory")] = 2
    """Number of batches that each loader worker builds in advance."""

    def settle(self) -> None:
        """Resolve formats that are `auto`."""
        super().settle()
        for stream in self.streams.values():
            stream.settle()
        if self.validation is None:
            return
        if self._is_supervised_alone() and self.validation.format == AUTO:
            self.validation.format = TEXT  # `fill` replaces it by the format of `data`
        self.validation.settle()

    def check(self, key: str = "data.") -> Iterator[str]:
        """Yield an error line for each invalid, conflicting or ineffective value."""
        yield from check_fields(key, self)
        if self.name not in (*SOURCES, "mixture"):
            return
        yield from self._check_source(key)
        if self.name == "mixture":
            yield from self._check_mixture(key)
        if self.validation is not None:
            yield from self._check_validation(f"{key}validation.", self.validation)
        yield from self._check_order(key)
        yield from self._check_fetching(key)
        yield from self._check_supervised(key)
        yield from self.filter.check(f"{key}filter.")

    def _check_mixture(self, key: str) -> Iterator[str]:
        if not self.streams:
            yield f"{key}streams: mixture needs it; write a name and its source for each"
        for name, stream in self.streams.items():
            yield from stream.check(f"{key}streams.{name}.")
            if name == "data" or not name.strip():
                yield f"{key}streams: a stream is called {name!r}; write another name"
        shared = {n: s.proportion for n, s in self.streams.items() if s.proportion is not None}
        missing = [name for name in self.streams if name not in shared]
        if shared and missing:
            yield (
                f"{key}streams.{missing[0]}.proportion: {next(iter(shared))} has one; write one"
                " for every stream, or for none"
            )
        if shared and not sum(shared.values()) > 0 and not missing:
            yield f"{key}streams: every proportion is 0; give one stream more"
        if not shared and not self.phases:
            why = "without a proportion of the streams"
            yield from inert_change(key, self, ["proportion_unit"], why)
        for name, stream in self.streams.items():
            if self.proportion_unit == "examples" and stream.format == TEXT:
                yield (
                    f"{key}proportion_unit: examples, but {key}streams.{name} is text, which has"
                    " none; write tokens or sequences"
                )
        for n, phase in enumerate(self.phases):
            yield from self._check_phase(f"{key}phases[{n}].", phase)

    def _check_phase(self, key: str, phase: PhaseConfig) -> Iterator[str]:
        yield from check_fields(key, phase)
        yield from check_duration(f"{key}at", phase.at)
        for name in phase.proportions:
            if name not in self.streams:
                yield f"{key}proportions.{name}: no such stream{nearest(name, self.streams)}"
        if not sum(phase.proportions.values()) > 0:
            yield f"{key}proportions: sum to 0; give at least one stream a part"

    def _check_validation(self, key: str, validation: StreamConfig) -> Iterator[str]:
        yield from validation.check(key)
        yield from inert(key, validation, ["proportion", "repeat", "choose"], "on held-out text")
        if self._is_supervised_alone():
            return
        if self.name in CORPORA:
            yield (
                f"{key[:-1]}: has no effect with name: {self.name}, which holds out"
                " data.validation_fraction; remove it"
            )
        elif validation.name != "shards" and not validation.is_supervised:
            yield (
                f"{key}name: {validation.name} cannot hold validation text; write shards, which"
                " scripts/prepare_data.py makes"
            )

    def _is_supervised_alone(self) -> bool:
        return not self.streams and self.is_supervised

    def _check_supervised(self, key: str) -> Iterator[str]:
        yield from self.supervised.check(f"{key}supervised.")
        sources: list[SourceConfig] = [*self.streams.values()] if self.streams else [self]
        is_any = any(source.is_supervised for source in sources)
        if not is_any and self.supervised != SupervisedConfig():
            yield f"{key}supervised: has no effect on text; write {key}format, or remove it"
        if not is_any and self.chat_template_kwargs:
            yield f"{key}chat_template_kwargs: has no effect on text; write {key}format: chat"
        for name in self.chat_template_kwargs:
            if not str(name).isidentifier() or name in ("messages", "add_generation_prompt"):
                yield f"{key}chat_template_kwargs: {name!r} is no variable of a template; remove it"
        tools = self.chat_template_kwargs.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            yield f"{key}chat_template_kwargs.tools: is not a list of JSON schemas; write one"
        if all(source.format in COMPARED for source in sources):
            responses = self.supervised.target_responses
            if responses != SupervisedConfig().target_responses:
                yield (
                    f"{key}supervised.target_responses: {responses} has no effect on answers that"
                    " are compared, the last of each row; remove it"
                )
        if is_any and self.attend_across_documents and self.supervised.packing != "off":
            yield (
                f"{key}attend_across_documents: true lets answers see other rows that are packed"
                f" with theirs; remove it, or write {key}supervised.packing: off"
            )
        if is_any and all(source.is_supervised for source in sources):
            if self.filter != FilterConfig():
                yield f"{key}filter: has no effect on supervised rows; remove it"
            if self.deduplicate != "none":
                yield (
                    f"{key}deduplicate: has no effect on supervised rows; write"
                    f" {key}supervised.drop_duplicates: true"
                )

    def _check_order(self, key: str) -> Iterator[str]:
        if self.eos_token_id is not None and self.bos_token_id is not None:
            yield f"{key}bos_token_id: and eos_token_id exclude each other; remove one"
        known = [*self.streams, "data"]
        for name in self.allow_changed:
            if name not in known:
                yield f"{key}allow_changed: no stream {name!r}{nearest(name, known)}"

    def _check_fetching(self, key: str) -> Iterator[str]:
        for name in ("cache_limit", "prefetch", "max_row_size"):
            text = getattr(self, name)
            if text is not None and _SIZE.fullmatch(text.strip()) is None:
                yield f"{key}{name}: {text!r} is not a size; write a number and kb, mb, gb or tb"

    def formats(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the value of each source's format."""
        if not self.streams:
            yield "data.format", self.format
        for name, stream in self.streams.items():
            yield f"data.streams.{name}.format", stream.format

    def holds_out(self) -> bool:
        """Return whether there is validation data: a part of a corpus, or separate data."""
        if self.validation is not None:
            return True
        sources: list[SourceConfig] = [*self.streams.values()] if self.streams else [self]
        return self.validation_fraction > 0 and any(s.is_read_whole for s in sources)

    def alone(self, stream: SourceConfig) -> DataConfig:
        """Return the data section in which `stream` is the only source."""
        own = {f.name: getattr(stream, f.name) for f in fields(SourceConfig)}
        return replace(self, streams={}, phases=[], validation=None, **own)

    def fill(self) -> None:
        """Resolve defaults in place."""
        super().fill()
        for stream in self.streams.values():
            stream.fill()
        if self.validation is not None:
            self._fill_validation(self.validation)

    def _fill_validation(self, validation: StreamConfig) -> None:
        """Give validation data the format of the training data, unless it names one."""
        if self._is_supervised_alone() and not validation.is_supervised:
            validation.format = self.format
            validation.columns = validation.columns or dict(self.columns)
            validation.preprocess = validation.preprocess or self.preprocess
        validation.fill()


def n_bytes(size: str) -> int:
    """Return the bytes of a size that `check` has accepted: 1.5gb is 1_500_000_000."""
    match = _SIZE.fullmatch(size.strip())
    assert match is not None, size
    return int(float(match[1]) * _FACTOR[match[2].lower()])
