"""`Corpus`: the documents that the recipe's `data` section names, in one fixed order.

Read by the split, the tokenizer's training and the preparation. Each pass reads anew and streams,
so a corpus may be larger than memory. The one idea: a corpus is a list of spans, parts that can be
read by themselves, so that any number of processes can share it out without changing its order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from llmfoundry.data.preparation.choose.filters import Filter, build_filter
from llmfoundry.data.preparation.read.bad_row import (
    BadRow,
    OnBadRow,
    raise_bad_row,
    text_of_row,
)
from llmfoundry.data.preparation.read.file_text import FileText
from llmfoundry.data.preparation.read.hub import HubText
from llmfoundry.data.preparation.read.mds_text import MDSText
from llmfoundry.data.preparation.read.open_files import InputFile
from llmfoundry.data.preparation.read.readers import FileRow
from llmfoundry.data.preparation.read.spans import Span, TextSource
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.filter import FilterConfig


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        source: its file, or the name of its dataset.
        row: line or row in it; None where the file is one document.
        text: what to train on; may be blank.
    """

    source: str
    row: FileRow | int | None
    text: str

    @property
    def where(self) -> str:
        """Source and row, for messages."""
        return self.source if self.row is None else f"{self.source}:{self.row}"

    @property
    def blank(self) -> bool:
        """Nothing but white space: dropped, and counted, by the reader's caller."""
        return not self.text or self.text.isspace()


def _unseen(n_bytes: int) -> None:
    """Report no progress."""


class Corpus:
    """Documents of one recipe, read anew at each iteration.

    Raises:
        UserError: a path that does not exist, is of no readable kind, or is named twice.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = replace(config)
        self.config.fill()
        self._texts = _KINDS[self.config.name](self.config)

    @property
    def files(self) -> list[InputFile]:
        """The files behind it, in order; empty for a dataset."""
        return self._texts.files

    @property
    def ignored(self) -> int:
        """Files of other kinds that lie in the named folders."""
        return self._texts.ignored

    def __iter__(self) -> Iterator[Document]:
        """Every document, blank ones too.

        Raises:
            UserError: something cannot be read, or no document holds any text.
        """
        found = False
        for span in self.spans():
            for document in self.read(span):
                found = found or not document.blank
                yield document
        if not found:
            raise self.holds_no_text()

    def spans(self, longest: int | None = None) -> list[Span]:
        """The corpus in parts, in order, of about `longest` bytes at most where that is possible.

        Raises:
            UserError: a file must be looked into, and cannot be read.
        """
        return self._texts.spans(longest)

    def read(
        self,
        span: Span,
        seen: Callable[[int], None] = _unseen,
        on_bad_row: OnBadRow = raise_bad_row,
    ) -> Iterator[Document]:
        """The documents of a part, blank ones too.

        Args:
            span: the part.
            seen: gets the bytes of input on the way.
            on_bad_row: gets each row that cannot be read, for which a blank document stands.

        Raises:
            UserError: something cannot be read.
        """
        for source, row, text in self._texts.read(span, seen, on_bad_row):
            document = Document(source, row, text)
            checked = text_of_row(on_bad_row, _checked_text, document)
            yield document if checked == text else replace(document, text=checked)

    def drops(self, document: Document) -> str | None:
        """Why a document is left out by what it says, or None."""
        return "blank" if document.blank else self._filter(document.text)

    def holds_no_text(self) -> UserError:
        """What to say where not one document is left."""
        return UserError(f"{_KEY[self.config.name]}: holds no text; name a corpus that does")

    def fingerprint(self) -> str:
        """Names the corpus' content without reading it: paths, sizes and times of its files.

        A hub dataset is named by its id, subset and split: it is taken not to change.
        """
        config = self.config
        facts: list[Any] = [config.name, config.text_column, config.subset, config.split]
        facts += self._texts.facts()
        if config.filter != FilterConfig():
            facts.append(asdict(config.filter))
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_filter"}

    @cached_property
    def _filter(self) -> Filter:
        return build_filter(self.config.filter)


def _checked_text(document: Document) -> str:
    """JSON and Python strings may hold half a surrogate pair, which no tokenizer can read."""
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        half = f"half a surrogate pair (U+{ord(document.text[error.start]):04X})"
        why = f"character {error.start} is {half}, which is not text; correct the row"
        raise BadRow(document.where, why, "half a surrogate pair") from error
    return document.text


_KINDS: dict[str, Callable[[DataConfig], TextSource]] = {
    "python_stdlib": FileText,
    "files": FileText,
    "huggingface": HubText,
    "shards": MDSText,
}

_KEY = {
    "python_stdlib": "data.name: python_stdlib",
    "files": "data.paths",
    "huggingface": "data.dataset",
    "shards": "data",
}
