"""`manifest.json`: what a preparation read, with which settings, and what came out.

Written last by `prepare`, so a folder that has one is finished. Nothing in it depends on when,
where or on how many workers it was made.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.preparation.write.output_folder import OutputFolder
from llmfoundry.data.preparation.write.outputs import STREAMS, StreamCounts
from llmfoundry.data.preparation.write.parts import REPEAT, Part
from llmfoundry.errors import UserError
from llmfoundry.redaction import public

MANIFEST = "manifest.json"
_LIBRARIES = ("llmfoundry-recipes", "tokenizers", "numpy")


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder is.

    Attributes:
        settings: all that decided it, beside the files.
        corpus: fingerprint of the files.
        about: free text of the recipe: licence, source.
        counts: of each stream.
        dropped: documents left out, by reason.
        ignored: files of other kinds in the folders named.
        note: of the split; empty for the ordinary case.
        sources: every file: name, bytes, and sha256 (read whole, on this machine) or stamp (time of
            its last change in ns, or the store's tag).
        versions: of the programs.
    """

    settings: dict[str, Any]
    corpus: str
    about: dict[str, str]
    counts: dict[str, StreamCounts]
    dropped: dict[str, int]
    ignored: int
    note: str
    sources: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def total(self) -> StreamCounts:
        """Of all streams."""
        return sum(self.counts.values(), StreamCounts())

    def write(self, place: OutputFolder) -> None:
        """Declare the folder finished."""
        place.write(MANIFEST, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @classmethod
    def read(cls, place: OutputFolder) -> Manifest | None:
        """That of a folder, or None: it has none.

        Raises:
            UserError: it is damaged.
        """
        data = place.read(MANIFEST)
        if data is None:
            return None
        try:
            facts = json.loads(data)
            facts["counts"] = {
                name: StreamCounts(**counts) for name, counts in facts["counts"].items()
            }
            return cls(**facts)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{place.folder}/{MANIFEST}: is damaged: {error!r}; delete {place.folder}, it will"
                " be made again"
            ) from error


def make_manifest(
    corpus: Corpus,
    parts: Iterable[Part],
    *,
    settings: dict[str, Any],
    about: Mapping[str, str],
    note: str,
) -> Manifest:
    """The facts of all parts together."""
    counts = {name: StreamCounts() for name in STREAMS}
    dropped: Counter[str] = Counter()
    checksums: dict[int, str] = {}
    for part in parts:
        counts = {name: counts[name] + part.counts[name] for name in STREAMS}
        dropped.update(part.dropped)
        checksums.update(part.checksums)
    sources = [
        {"name": public(file.name), "bytes": file.size}
        | ({"sha256": checksums[n]} if n in checksums else {"stamp": file.stamp})
        for n, file in enumerate(corpus.files)
    ]
    return Manifest(
        settings=settings,
        corpus=corpus.fingerprint(),
        about={name: public(text) for name, text in about.items() if text},
        counts=counts,
        dropped=dict(sorted(dropped.items())),
        ignored=corpus.ignored,
        note=note,
        sources=sources,
        versions={"python": platform.python_version(), **_versions()},
    )


def manifest_summary(manifest: Manifest) -> str:
    """Lines for the user: counts, sizes, and what was dropped."""
    total, held_out = manifest.total, manifest.counts["validation"]
    tokens, share = "", ""
    if total.tokens:
        tokens = f", {total.tokens:,} tokens ({total.bytes / total.tokens:.2f} bytes each)"
        share = f", {held_out.tokens:,} tokens ({held_out.tokens / total.tokens:.1%})"
    lines = [
        f"data: {total.documents:,} documents, {total.bytes / 1e6:,.2f} MB{tokens};"
        f" held out: {held_out.documents:,} documents{share}"
    ]
    for reason, count in manifest.dropped.items():
        lines.append(f"data: {count:,} {_DROPPED.get(reason, reason + ': documents')} dropped")
    if total.tokens_left_out:
        lines.append(f"data: {total.tokens_left_out:,} tokens left out, too few for a last row")
    if manifest.ignored:
        lines.append(
            f"data: {manifest.ignored:,} files of other kinds left out of the folders named"
        )
    return "\n".join([*lines, *([f"data: {manifest.note}"] if manifest.note else [])])


_DROPPED = {"blank": "blank documents", REPEAT: "documents that repeat another"}


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue  # run from a checkout
    return found
