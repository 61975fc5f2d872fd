"""The `tokenizer` and `data` sections: which text, in which mixture and order, read as what.

`data.filter` leaves documents out, each counted; `data.supervised` says how rows of prompts and
answers become tokens and labels. What one source of text is says `source.py`.
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
    choice,
    out_of_bounds,
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
    """One of a few kinds; every kind is saved in Hugging Face's format inside the run."""

    name: Annotated[str, choice((*TOKENIZERS, PRETRAINED))] = "train"
    """train (byte-level BPE on the recipe's own corpus), bytes, huggingface, tiktoken; in
    fine-tuning also pretrained: that of model.pretrained."""
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
    """How messages become a text: zephyr, which fits any tokenizer; chatml, llama3, mpt; a model's
    own text with marks around what is learned, qwen2.5, qwen3, phi3, phi3.5, gemma, gemma3,
    mistral, deepseek-v3, deepseek-r1, glm4, gpt-oss; or a Jinja file. Unset: the tokenizer's."""
    trust_chat_template: bool = False
    """Only with chat_template: a file: run it without bounds on time and memory, in the training
    processes themselves. For your own templates; those of others run in a child process with
    bounds."""
    split_special_tokens: bool = True
    """Read a special token in a text, such as <|endoftext|>, as its plain characters. Off: as that
    token, as transformers and LLM Foundry do; any text can then contain one."""

    def check(self, key: str = "tokenizer.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from out_of_bounds(key, self)
        if self.chat_template in (None, *CHAT_TEMPLATES):
            yield from inert_change(
                key, self, ["trust_chat_template"], "without a file as chat_template"
            )
        if self.name == "huggingface" and self.path is None:
            yield f"{key}path: huggingface needs it; write a folder with tokenizer.json or a hub id"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name == "train":
            set_defaults(self, vocab_size=8192, train_bytes=20_000_000)
        if self.name == "tiktoken":
            set_defaults(self, encoding="gpt-4")


@dataclass
class FilterConfig:
    """Rules that a document must pass; unset ones let everything through.

    The four published sets are for English web pages, as datatrove implements them (extra:
    filters). They decide on whole documents and change no text.
    """

    min_chars: Annotated[int | None, Range(2)] = None
    """Leave out documents of fewer characters; one is what every document has."""
    max_chars: Annotated[int | None, Range(1)] = None
    """Leave out documents of more characters."""
    min_words: Annotated[int | None, Range(2)] = None
    """Leave out documents of fewer words; words are what white space separates."""
    max_words: Annotated[int | None, Range(1)] = None
    """Leave out documents of more words."""
    gopher_quality: bool = False
    """Gopher's rules of quality (arXiv:2112.11446, A.1.1): 50 to 100,000 words of 3 to 10 letters
    on average, few symbols, bullets and ellipses, at least two stop words."""
    gopher_repetition: bool = False
    """Gopher's rules of repetition (its table A1): lines, paragraphs and n-grams that repeat."""
    c4: bool = False
    """C4's rules for pages (arXiv:1910.10683, 2.2): at least five sentences in its good lines, no
    curly bracket, no lorem ipsum. Its bad lines stay in the text, its list of bad words is out."""
    fineweb: bool = False
    """FineWeb's rules (arXiv:2406.17557, 3.6): lines that end in punctuation, few short ones, few
    repeated ones."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        if (yield from out_of_bounds(key, self)):
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
        """`chars` is what so many words and the spaces between them take at least."""
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
    """Only matters for sources whose format is not text."""

    target_prompts: Annotated[str, choice(("none", "all"), "length>=N", _AT_LEAST)] = "none"
    """Prompts that are learned too: none, all, or length>=N (those of N tokens or more)."""
    target_responses: Annotated[str, choice(RESPONSES)] = "all"
    """Answers of a conversation that are learned: all, or the last alone. LLM Foundry's default is
    last; a conversation then teaches a fraction of what it costs."""
    chat_eos: Annotated[str, choice(CHAT_EOS)] = "auto"
    """The end-of-text token behind a conversation. auto: only where its last turn does not end as
    the template ends turns, or with another special token; white space is left out. always: where
    its last token is another, as LLM Foundry does: <|im_end|>, a line break and <|endoftext|> may
    follow each other. Templates that mark their answers end them themselves."""
    packing: Annotated[str, choice(PACKINGS)] = "best_fit"
    """best_fit: several rows share one of max_seq_len, apart from each other. off: each is padded
    to max_seq_len; for kto the row before it stands in the padding, not learned: its answer is what
    a prompt is compared with."""
    packing_window: Annotated[int, Range(1, 2**24, "their lengths are sorted in memory")] = 8192
    """Rows, in a seeded order, that are packed with each other."""
    loss: Annotated[str, choice(LOSSES)] = "tokens"
    """tokens: the mean over all learned tokens of a step. sequences: the mean over its rows of each
    row's mean, so that a short answer weighs as much as a long one."""
    too_long: Annotated[str, choice(TOO_LONG)] = "truncate"
    """Rows of more than max_seq_len tokens, which of preference are both answers, each with the
    prompt: truncate (the end is cut), drop, or error."""
    nothing_learned: Annotated[str, choice(NOTHING_LEARNED)] = "error"
    """Rows in which no token is learned, also because of truncation: error, or drop."""
    bad_rows: Annotated[str, choice(BAD_ROWS)] = "error"
    """Rows that cannot be used: not JSON, not of the format, refused by the chat template. All are
    counted by what is wrong with them in one pass. error: the run ends with a line for each reason
    and the first places of each. drop: they are left out, with a line and an event for each
    reason."""
    drop_duplicates: bool = False
    """Leave out rows that repeat another exactly; they are counted either way."""

    def check(self, key: str = "data.supervised.") -> Iterator[str]:
        """Lines for values that cannot be."""
        yield from out_of_bounds(key, self)

    @property
    def shortest_target_prompt(self) -> float:
        """Tokens from which on a prompt is learned; infinity: never."""
        match = _AT_LEAST.fullmatch(self.target_prompts)
        if match:
            return int(match[1])
        return 0 if self.target_prompts == "all" else float("inf")


BATCHING = ("stratified", "per_stream")
DEDUPLICATION = ("none", "exact", "minhash")
TOKEN_TYPES = ("int64", "uint64", "int32", "uint32", "int16", "uint16", "int8", "uint8")
TOKEN_ID = Range(0, 2**31 - 1, "ids have 32 bits")
_SIZE = re.compile(r"([0-9]{0,9}\.?[0-9]{1,9}) ?([kmgt]?b)", re.IGNORECASE)
_FACTOR = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


@dataclass
class PhaseConfig:
    """From some point of the run on, other proportions: a curriculum."""

    at: str = "???"
    """When it begins, a duration from the run's start: 0.8dur, 1e12tok."""
    proportions: Annotated[dict[str, float], Range(0)] = field(default_factory=dict)
    """Each stream's part of the rows from there on; one that is not named has none."""


@dataclass
class DataConfig(SourceConfig):
    """One source, or a mixture of several, in an order that no number of machines changes."""

    IMPLIES: ClassVar[dict[str, tuple[str, str]]] = {
        "paths": ("files", "files"),
        "dataset": ("huggingface", "huggingface"),
        "remote": ("shards", "mds"),
        "local": ("shards", "mds"),
    }
    """Keys that name a source: its name, and the choice of data/ that such a key makes."""

    name: Annotated[str, choice((*SOURCES, "mixture"))] = "python_stdlib"
    """python_stdlib: sources of the running Python, tests left out. files, huggingface: documents.
    shards: MDS or token shards. instructions: generated chats with exact answers. mixture: several
    of these, below data.streams."""
    streams: Annotated[dict[str, StreamConfig], Only("name", "mixture")] = field(
        default_factory=dict
    )
    """The sources, by names of your choice."""
    phases: Annotated[list[PhaseConfig], Only("name", "mixture")] = field(default_factory=list)
    """Other proportions from certain points of the run on, in order."""
    batching_method: Annotated[str, choice(BATCHING)] = "stratified"
    """Only for mixture. stratified: every batch has every stream's part, to within one row.
    per_stream: a batch is of one stream."""
    validation_fraction: Annotated[float, FRACTION] = 0.02
    """Share of a corpus' documents held out, chosen by their content's hash, so it never moves; of
    few documents the ends of the longest, that share of all text."""
    validation: StreamConfig | None = None
    """Held-out text of its own: shards, where the text comes from shards (remote, local, split).
    For supervised rows any source, of their format. Nothing else is held out then."""
    attend_across_documents: bool = False
    """Let packed documents see each other. Off: each attends to itself alone."""
    shuffle: bool = True
    """Visit rows in a new pseudo-random order each epoch; off: in the source's order."""
    shuffle_block_size: Annotated[int, Range(1, 2**32)] = 1 << 18
    """Rows that are shuffled among each other, from shards in random order: larger mixes better,
    smaller needs fewer shards at a time. 262144 is Streaming's."""
    packing_ratio: Annotated[
        float | str, Range(above=0, most=2**20), choice(("auto",), "a number of documents")
    ] = "auto"
    """Only matters for text that is tokenized while training: mean number of documents that are
    joined to fill a row; auto: estimated from the first documents."""
    supervised: SupervisedConfig = field(default_factory=SupervisedConfig)
    """How rows of prompts and answers become tokens and labels."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Only for rows of messages: what the chat template reads beside them, such as
    {enable_thinking: false} or {tools: [...]}. Saved in the tokenizer's template, so that chat.py,
    generate.py and exports render with the same; a row's own tools and chat_template_kwargs win."""
    eos_token_id: Annotated[int | None, TOKEN_ID] = None
    """Only for MDS tokens: the id that ends each document of a row. Unset: the tokenizer's."""
    bos_token_id: Annotated[int | None, TOKEN_ID] = None
    """Only for MDS tokens: the id that begins each document; in place of eos_token_id."""
    token_encoding_type: Annotated[str, choice(TOKEN_TYPES)] = "int64"
    """Only matters for MDS columns of bytes: the integers that they hold."""
    allow_changed: list[str] = field(default_factory=list)
    """Streams (or `data`) whose shards may differ from those the resumed run began with."""
    filter: FilterConfig = field(default_factory=FilterConfig)
    """Which documents of a corpus to leave out."""
    deduplicate: Annotated[str, choice(DEDUPLICATION)] = "none"
    """Leave out documents of a corpus that repeat another: none, exact, or minhash (nearly equal;
    extra: filters)."""
    max_row_size: str = "1gb"
    """Bytes that a row, a page or a whole text file of a corpus may have, unpacked. What is larger
    is refused, so that no small compressed file fills the memory."""
    cache_folder: Annotated[str, PATH] = "~/.cache/llmfoundry"
    """Where trained tokenizers, token shards and copies of remote shards are kept."""
    cache_limit: str | None = None
    """Bytes that copies of remote shards may take, such as 500gb; the least recently used go."""
    prefetch: str = "2gb"
    """How far ahead remote shards are fetched, in bytes."""
    download_retry: Annotated[int, Range(0, 1000)] = 5
    """Retries after a temporary failure, such as a lost connection."""
    download_timeout: Annotated[float, Range(above=0, most=86_400, why="a day")] = 60.0
    """Seconds within which 256 kB, or the end of a file, must arrive; else a request has failed."""
    requests_per_second: Annotated[float | None, Range(above=0, most=1e6)] = None
    """Most requests that a machine sends to a remote store; unset: no limit."""
    validate_hash: bool = True
    """Compare the hashes that an index gives with each file once, when it is first opened."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Rights and addresses of stores, by protocol: {s3: {endpoint_url: https://...}}, in the names
    of obstore or of fsspec's file systems."""
    num_workers: Annotated[int | None, Range(1, 1024, PROCESSES)] = None
    """Processes that prepare a corpus; unset: one per core."""
    loader_workers: Annotated[int, Range(0, 256, PROCESSES)] = 0
    """Processes of each rank that make batches; 0: it does so itself, in a thread."""
    prefetch_factor: Annotated[int, Range(1, 1024, "each batch is held in memory")] = 2
    """Batches made ahead, by each of the loader_workers."""

    def settle(self) -> None:
        """Find formats that are left open."""
        super().settle()
        for stream in self.streams.values():
            stream.settle()
        if self.validation is None:
            return
        if self.validation.name == "shards" and self.validation.paths:  # of which shards has none
            self.validation.name = "files"
        if self._is_supervised_alone() and self.validation.format == AUTO:
            self.validation.format = TEXT  # unless it names one, that of `data`: see `fill`
        self.validation.settle()

    def check(self, key: str = "data.") -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        yield from out_of_bounds(key, self)
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
        shared = {n: s.proportion for n, s in self.streams.items() if s.proportion is not None}
        missing = [name for name in self.streams if name not in shared]
        if shared and missing:
            yield (
                f"{key}streams.{missing[0]}.proportion: {next(iter(shared))} has one; write one"
                " for every stream, or for none"
            )
        if shared and not sum(shared.values()) > 0 and not missing:
            yield f"{key}streams: every proportion is 0; give one stream more"
        for n, phase in enumerate(self.phases):
            yield from self._check_phase(f"{key}phases[{n}].", phase)

    def _check_phase(self, key: str, phase: PhaseConfig) -> Iterator[str]:
        yield from out_of_bounds(key, phase)
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
        if validation.name != "shards" and not validation.is_supervised:
            yield f"{key}name: {validation.name}; held-out text of its own can be shards alone"
        if self.name in CORPORA:
            yield (
                f"{key[:-1]}: has no effect with name: {self.name}, which holds out"
                " data.validation_fraction; remove it"
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
        """The key of each source's format, and its format."""
        if not self.streams:
            yield "data.format", self.format
        for name, stream in self.streams.items():
            yield f"data.streams.{name}.format", stream.format

    def holds_out(self) -> bool:
        """Whether there is held-out text: a corpus' own part, or shards of it."""
        if self.validation is not None:
            return True
        sources: list[SourceConfig] = [*self.streams.values()] if self.streams else [self]
        return self.validation_fraction > 0 and any(s.is_read_whole for s in sources)

    def alone(self, stream: SourceConfig) -> DataConfig:
        """The data section in which `stream` is the only source."""
        own = {f.name: getattr(stream, f.name) for f in fields(SourceConfig)}
        return replace(self, streams={}, phases=[], validation=None, **own)

    def fill(self) -> None:
        """Write derived values in place."""
        super().fill()
        for stream in self.streams.values():
            stream.fill()
        if self.validation is not None:
            self._fill_validation(self.validation)

    def _fill_validation(self, validation: StreamConfig) -> None:
        """Held-out rows have the format of those to train on, unless they name one."""
        if self._is_supervised_alone() and not validation.is_supervised:
            validation.format = self.format
            validation.columns = validation.columns or dict(self.columns)
            validation.preprocess = validation.preprocess or self.preprocess
        validation.fill()


def n_bytes(size: str) -> int:
    """Bytes of a size that `check` has passed: 1.5gb is 1_500_000_000."""
    match = _SIZE.fullmatch(size.strip())
    assert match is not None, size
    return int(float(match[1]) * _FACTOR[match[2].lower()])
