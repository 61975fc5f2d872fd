"""`prepare`: the recipe's corpus to two token streams on disk, made once and opened ever after.

Called before training on every process; one of each machine does the work while the others wait.
The one idea: reading and writing are sequential, so that the streams are the same on any number
of threads; only the encoding between them is spread.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from llmfoundry.data.cache import build_once, cache_key
from llmfoundry.data.corpus import Corpus
from llmfoundry.data.encode import Piece, cut, cuts_at_lines, encode_all
from llmfoundry.data.split import Split, make_split
from llmfoundry.data.tokenizer import Tokenizer
from llmfoundry.data.tokens import StreamIndex, TokenDataset
from llmfoundry.data.writer import StreamWriter, sync, text_writer
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig

_VERSION = 1  # of the folder's format and of how documents become tokens
_SHARD_BYTES = 256 << 20


@dataclass(frozen=True)
class Prepared:
    """Both streams of a corpus.

    Attributes:
        train: what is trained on.
        validation: what is held out; empty with validation_fraction: 0.
        summary: lines for the user: counts, sizes, and what was dropped.
    """

    train: TokenDataset
    validation: TokenDataset
    summary: str

    def validation_texts(self) -> list[str]:
        """The held-out documents, exactly as read."""
        return self.validation.texts()


def prepare(
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    progress: bool,
    shard_bytes: int = _SHARD_BYTES,
) -> Prepared:
    """The corpus in tokens, from the cache where it is there.

    Args:
        config: the recipe's data section.
        tokenizer: what to encode with.
        progress: show a bar on stderr.
        shard_bytes: size of the files at most.

    Raises:
        UserError: the corpus cannot be read, no training text is left, or the cache is damaged or
            cannot be written.
    """
    corpus = Corpus(config)
    before = corpus.fingerprint()

    def build(folder: Path) -> None:
        _build(folder, corpus, tokenizer, shard_bytes, progress=progress)
        if Corpus(config).fingerprint() != before:
            raise UserError("data: files of the corpus changed while they were read; start again")

    key = cache_key(
        version=_VERSION,
        corpus=before,
        tokenizer=tokenizer.fingerprint,
        validation_fraction=config.validation_fraction,
        shard_bytes=shard_bytes,
    )
    folder = Path(config.cache_folder).expanduser() / "tokens" / key
    build_once(folder, build)
    return _open(folder)


def _open(folder: Path) -> Prepared:
    file = folder / "index.json"
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
        train, validation = (StreamIndex.from_dict(index[n]) for n in ("train", "validation"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file}: prepared tokens are damaged: {error!r};"
            f" delete {folder}, it will be made again"
        ) from error
    return Prepared(
        TokenDataset(folder, train), TokenDataset(folder, validation), "\n".join(index["summary"])
    )


def _build(
    folder: Path, corpus: Corpus, tokenizer: Tokenizer, shard_bytes: int, *, progress: bool
) -> None:
    split = make_split(corpus)
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    with ExitStack() as stack:
        bar = tqdm(
            total=corpus.size(), unit="B", unit_scale=True, desc="tokenising",
            file=sys.stderr, disable=not progress,
        )  # fmt: skip
        stack.enter_context(bar)
        train, validation = (
            stack.enter_context(StreamWriter(folder, name, dtype, shard_bytes))
            for name in ("train", "validation")
        )
        reader = _Reader(corpus, split, stack.enter_context(text_writer(folder)))
        cuttable = cuts_at_lines(tokenizer)
        workers = corpus.config.num_workers or _cores()
        for piece, ids in encode_all(reader.pieces(cuttable), tokenizer, workers):
            writer = validation if piece.held_out else train
            ids = [tokenizer.eos_id, *ids] if piece.first else ids
            writer.add(ids, n_bytes=piece.n_bytes, starts_document=piece.first)
            bar.update(piece.n_bytes)
    indices = train.index, validation.index
    if not indices[0].n_documents:
        raise UserError(
            f"data.validation_fraction: {corpus.config.validation_fraction:g} holds out every"
            f" document ({indices[1].n_documents}); write a smaller one or add documents"
        )
    summary = _summary(*indices, reader.dropped, corpus.ignored, split.note)
    facts = {index.name: index.to_dict() for index in indices} | {
        "version": _VERSION,
        "tokenizer": tokenizer.fingerprint,
        "summary": summary,
    }
    names = "".join(f"{file}\n" for file in corpus.files)
    (folder / "files.txt").write_bytes(os.fsencode(names))
    with (folder / "index.json").open("w", encoding="utf-8") as file:
        json.dump(facts, file, indent=1)
        sync(file)


@dataclass
class _Reader:
    """The corpus in pieces; keeps held-out texts and counts blank documents on the way."""

    corpus: Corpus
    split: Split
    keep: Callable[[str], None]
    dropped: int = 0

    def pieces(self, cuttable: bool) -> Iterator[Piece]:
        for document in self.corpus:
            if document.blank:
                self.dropped += 1
                continue
            held_out = self.split.holds_out(document.text)
            if held_out:
                self.keep(document.text)
            parts = cut(document.text) if cuttable else iter([document.text])
            for n, text in enumerate(parts):
                yield Piece(text, held_out, n == 0)


def _cores() -> int:
    """Cores that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def _summary(
    train: StreamIndex, validation: StreamIndex, dropped: int, ignored: int, note: str
) -> list[str]:
    documents = train.n_documents + validation.n_documents
    tokens, n_bytes = train.n_tokens + validation.n_tokens, train.n_bytes + validation.n_bytes
    share = validation.n_tokens / tokens
    lines = [
        f"data: {documents:,} documents, {n_bytes / 1e6:,.2f} MB, {tokens:,} tokens"
        f" ({n_bytes / tokens:.2f} bytes each); held out: {validation.n_documents:,} documents,"
        f" {validation.n_tokens:,} tokens ({share:.1%})"
    ]
    if dropped:
        lines.append(f"data: {dropped:,} blank documents dropped")
    if ignored:
        lines.append(f"data: {ignored:,} files of other kinds left out of the folders named")
    return lines + ([f"data: {note}"] if note else [])
