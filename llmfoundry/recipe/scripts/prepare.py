"""The recipe of scripts/prepare_data.py: any training recipe, and what to make of its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from llmfoundry.recipe.scripts.train import TrainRecipe
from llmfoundry.recipe.source import AUTO, CORPORA, TEXT
from llmfoundry.recipe.values.bounds import PATH, TOKENS, Range, choice, out_of_bounds
from llmfoundry.recipe.values.checks import inert, one_of, set_defaults

FORMATS = ("tokens", "mds")
COLUMNS = ("tokens", "text")
ENGINES = ("local", "ray")
DTYPES = ("int32", "uint16", "uint32", "int64")


@dataclass
class PrepareConfig:
    """What to make of the text that `data` names, and where."""

    output: Annotated[str | None, PATH] = None
    """A folder here or at a URL (s3:// gs:// az:// …), for train/, validation/, manifest.json and
    tokenizer/. Unset: data.cache_folder, where training finds it."""
    format: Annotated[str, choice(FORMATS)] = "tokens"
    """tokens: a stream of ids, cut into rows of any length when it is read. mds: the shards of
    mosaicml-streaming, which LLM Foundry trains on."""
    column: Annotated[str | None, choice(COLUMNS)] = None
    """Only for mds. tokens: rows of ids. text: a document a sample, as it was read. Unset:
    tokens."""
    columns: dict[str, str] = field(default_factory=dict)
    """Only for mds, in place of column: keep these columns of each row as they are, each str, or
    json for lists and the like: {prompt: str, response: str}, {messages: json}."""
    concat_tokens: Annotated[int | None, TOKENS] = None
    """Only for mds tokens: ids of a row; unset: the recipe's max_seq_len."""
    bos_text: str | None = None
    """Only for mds tokens: what stands before each document, such as <s>, and before what the
    tokenizer itself puts there; unset: nothing."""
    eos_text: str | None = None
    """Only for mds tokens: what stands behind each document, and behind what the tokenizer itself
    puts there; unset: the end of text, if the tokenizer does not put it there. '': LLM Foundry's
    default."""
    no_wrap: bool | None = None
    """Only for mds tokens: begin each row with a new document; what does not fit of a row's last
    document is left out. Unset: off, documents continue in the next row."""
    dtype: Annotated[str | None, choice(DTYPES)] = None
    """Only for mds tokens: integer type of the ids; default int32, as LLM Foundry writes them."""
    compression: str | None = None
    """Only for mds: of the shards, such as zstd or gz:9 (br, bz2, snappy too); unset: none."""
    hashes: list[str] = field(default_factory=lambda: ["sha1"])
    """Hashes of each shard in the index, so that readers detect damage: sha1, xxh3_64 …"""
    size_limit: Annotated[int, Range(1, 2**32 - 1, "a shard has less than 4 GiB")] = 1 << 26
    """Bytes of a shard, before compression; 64 MiB is Streaming's."""
    licence: str | None = None
    """Free text for the manifest: the licence of the text."""
    source: str | None = None
    """Free text for the manifest: where the text comes from."""
    engine: Annotated[str, choice(ENGINES)] = "local"
    """local: processes of this machine (data.num_workers). ray: a Ray cluster, the one that
    RAY_ADDRESS names (extra: ray)."""

    def check(self, key: str = "prepare.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from self._check_columns(key)
        yield from out_of_bounds(key, self)
        rows = ["concat_tokens", "bos_text", "eos_text", "no_wrap", "dtype"]
        if self.output is None:
            yield from inert(key, self, ["licence", "source"], "without prepare.output")
        if self.output is None and self.format != "tokens":
            yield f"{key}format: {self.format} needs prepare.output; write a folder or a URL"
        if self.output is None and self.engine != "local":
            yield f"{key}engine: {self.engine} needs prepare.output; write a folder that is shared"
        if self.format == "tokens":
            yield from inert(key, self, ["column", "compression", *rows], "with format: tokens")
        elif self.columns or self.column == "text":
            kept = "columns" if self.columns else "column: text"
            yield from inert(key, self, rows, f"with {kept}")

    def _check_columns(self, key: str) -> Iterator[str]:
        for name, kind in self.columns.items():
            yield from one_of(f"{key}columns.{name}", kind, ("str", "json"))
            if {",", ":"} & set(name):
                yield f"{key}columns: {name!r} has a comma or colon; rename the column"
        if self.columns and self.format != "mds":
            yield f"{key}columns: has no effect with format: {self.format}; write format: mds"
        if self.columns and self.column is not None:
            yield f"{key}column: and columns exclude each other; remove one"

    def fill(self, *, max_seq_len: int) -> None:
        """Write derived values in place."""
        if self.format == "mds" and not self.columns:
            set_defaults(self, column="tokens")
        if self.column == "tokens":
            set_defaults(self, concat_tokens=max_seq_len, bos_text="", no_wrap=False, dtype="int32")


@dataclass
class PrepareRecipe(TrainRecipe):
    """A training recipe whose text is prepared and no more."""

    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """What to make of the text."""

    def settle(self) -> None:
        """Take rows of a format that is left open for documents, or for columns to be kept."""
        for source in (self.data, *self.data.streams.values()):
            source.format = TEXT if source.format == AUTO else source.format
        super().settle()

    def check(self) -> Iterator[str]:
        """Every problem of the recipe, a line each."""
        # Nothing is evaluated here: text that is held out by this is not there before it.
        yield from (line for line in super().check() if not line.startswith("eval.validation:"))
        yield from self.prepare.check()
        if self.prepare.columns and self.data.text_column is not None:
            yield "data.text_column: has no effect with prepare.columns; remove it"
        if self.prepare.columns and self.data.name == "python_stdlib":
            yield "prepare.columns: python_stdlib has files, no columns; name other data"
        for key, form in self.data.formats():
            if form != TEXT:
                yield f"{key}: {form} rows are prepared when a run begins; write format: {TEXT}"
        if self.prepare.output is None:
            if self.data.name == "shards":
                yield "data.name: shards are prepared already; for another form: prepare.output"
            return
        if self.data.name not in (*CORPORA, "shards"):
            yield (
                f"prepare.output: holds one source, and data.name is {self.data.name}; prepare"
                " each of its streams by itself"
            )

    def fill(self) -> None:
        """Write derived values in place; call after `check` found nothing."""
        if self.prepare.columns:  # data/preparation/readers.py: columns_of
            columns = (f"{n}:json" if k == "json" else n for n, k in self.prepare.columns.items())
            self.data.text_column = ",".join(columns)
            if len(self.prepare.columns) == 1:
                self.data.text_column += ","
        super().fill()
        self.prepare.fill(max_seq_len=self.max_seq_len)
