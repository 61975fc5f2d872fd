"""The `data` section: which text, how it is split, and where prepared tokens are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from llmfoundry.recipe.checks import at_least, fill, fraction, inert, one_of

CORPORA = ("python_stdlib", "files", "huggingface")


@dataclass
class DataConfig:
    """A corpus of documents, split by content into training and validation text."""

    name: str = "python_stdlib"
    """python_stdlib (sources of the running Python, tests left out), files, or huggingface."""
    paths: list[str] = field(default_factory=list)
    """Only for files: files, folders or globs of .txt .md .py .jsonl[.gz|.zst] .parquet."""
    dataset: str | None = None
    """Only for huggingface: a hub id, or a local folder that `datasets` loads."""
    subset: str | None = None
    """Only for huggingface: the dataset's configuration name."""
    split: str | None = None
    """Only for huggingface: the split to read; train there."""
    text_column: str | None = None
    """Field of .jsonl, .parquet and huggingface rows that holds the text; text there."""
    validation_fraction: float = 0.02
    """Share of documents held out, chosen by their content's hash, so it never moves."""
    attend_across_documents: bool = False
    """Let packed documents see each other. Off: each attends to itself alone."""
    shuffle: bool = True
    """Visit rows in a new pseudo-random order each epoch; off: in the corpus' order."""
    cache_folder: str = "~/.cache/llmfoundry"
    """Where trained tokenizers and token shards are kept, keyed by their content."""
    num_workers: int | None = None
    """Threads that tokenise; unset: one per core."""

    _USED: ClassVar[dict[str, tuple[str, ...]]] = {
        "python_stdlib": (),
        "files": ("text_column",),
        "huggingface": ("dataset", "subset", "split", "text_column"),
    }

    def check(self, key: str = "data.") -> Iterator[str]:
        """Lines for values that cannot be, or have no effect."""
        yield from one_of(f"{key}name", self.name, CORPORA)
        if self.name not in CORPORA:
            return
        fields = ("dataset", "subset", "split", "text_column")
        unused = [f for f in fields if f not in self._USED[self.name]]
        yield from inert(key, self, unused, f"with name: {self.name}")
        if self.name == "files" and not self.paths:
            yield f"{key}paths: files needs it; write a list of files, folders or globs"
        if self.name != "files" and self.paths:
            yield f"{key}paths: has no effect with name: {self.name}; remove it"
        if self.name == "huggingface" and self.dataset is None:
            yield f"{key}dataset: huggingface needs it; write a hub id or a local folder"
        yield from fraction(f"{key}validation_fraction", self.validation_fraction)
        yield from at_least(f"{key}num_workers", self.num_workers, 1)

    def fill(self) -> None:
        """Write derived values in place."""
        if self.name in ("files", "huggingface"):
            fill(self, text_column="text")
        if self.name == "huggingface":
            fill(self, split="train")
