"""One source of training text: a corpus of documents, or shards that were prepared.

The `data` section is one by itself; with `name: mixture` it has several, below `data.streams`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from llmfoundry.recipe.bounds import PATH, Range, out_of_bounds
from llmfoundry.recipe.checks import fill, inert, one_of

CORPORA = ("python_stdlib", "files", "huggingface")
SOURCES = (*CORPORA, "shards")


@dataclass
class SourceConfig:
    """Where text comes from."""

    name: str = "python_stdlib"
    """python_stdlib (sources of the running Python, tests left out), files, huggingface, or shards
    (MDS or token shards); the data section has mixture too."""
    paths: Annotated[list[str], PATH] = field(default_factory=list)
    """Only for files: files, folders or globs of .txt .md .py .jsonl .csv .parquet .warc.wet, text
    formats also as .gz or .zst; here or at a URL (s3:// gs:// hf:// https:// …)."""
    dataset: Annotated[str | None, PATH] = None
    """Only for huggingface: a hub id, or a local folder that `datasets` loads."""
    subset: str | None = None
    """Only for huggingface: the dataset's configuration name."""
    split: str | None = None
    """For huggingface: the split to read; train there. For shards: a folder below remote or local,
    such as train; unset: the folder itself."""
    text_column: str | None = None
    """Field of .jsonl, .csv, .parquet and huggingface rows, or column of MDS shards, that holds the
    text; text there."""
    remote: Annotated[str | None, PATH] = None
    """Only for shards: their folder at a URL (s3:// gs:// az:// oci:// hf:// https://) or path."""
    local: Annotated[str | None, PATH] = None
    """Only for shards: this machine's copies of remote, and of no other; alone: the shards are
    here. Unset with remote: a folder below data.cache_folder."""

    _USED: ClassVar[dict[str, tuple[str, ...]]] = {
        "python_stdlib": (),
        "files": ("text_column",),
        "huggingface": ("dataset", "subset", "split", "text_column"),
        "shards": ("split", "text_column", "remote", "local"),
        "mixture": (),
    }

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from one_of(f"{key}name", self.name, SOURCES)
        if self.name in SOURCES:
            yield from self._check_source(key)

    def _check_source(self, key: str) -> Iterator[str]:
        fields = ("dataset", "subset", "split", "text_column", "remote", "local")
        unused = [f for f in fields if f not in self._USED[self.name]]
        yield from inert(key, self, unused, f"with name: {self.name}")
        if self.name == "files" and not self.paths:
            yield f"{key}paths: files needs it; write a list of files, folders or globs"
        if self.name != "files" and self.paths:
            yield f"{key}paths: has no effect with name: {self.name}; remove it"
        if self.name == "huggingface" and self.dataset is None:
            yield f"{key}dataset: huggingface needs it; write a hub id or a local folder"
        if self.name == "shards" and self.remote is None and self.local is None:
            yield f"{key}remote: shards needs it, or local; write the folder that has index.json"

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name in ("files", "huggingface"):
            fill(self, text_column="text")
        if self.name == "huggingface":
            fill(self, split="train")


@dataclass
class StreamConfig(SourceConfig):
    """A source within a mixture. Either all streams have a proportion, or none has."""

    name: str = "shards"
    """shards (MDS or token shards), python_stdlib, files, or huggingface."""
    proportion: Annotated[float | None, Range(0)] = None
    """Its part of the rows, in proportion to the other streams'."""
    repeat: Annotated[float | None, Range(0, 2**20)] = None
    """How often an epoch of the mixture goes through it; 0.5: half of it an epoch; 1 where it is
    unset. Excludes proportion and choose."""
    choose: Annotated[int | None, Range(0, 2**48)] = None
    """How many of its rows an epoch of the mixture has. Excludes proportion and repeat."""

    def check(self, key: str) -> Iterator[str]:
        """Lines for values that cannot be, contradict each other, or have no effect."""
        yield from out_of_bounds(key, self)
        yield from super().check(key)
        given = [f for f in ("proportion", "repeat", "choose") if getattr(self, f) is not None]
        if len(given) > 1:
            yield f"{key}{given[1]}: and {given[0]} exclude each other; remove one"
