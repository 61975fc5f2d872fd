"""`prepare_corpus`: the recipe's corpus to two streams of shards, made once, then only opened.

Called before training on every process; one of each machine does the work while the others wait.
`prepare_to` is the same for a folder of the user's, here or at a URL. The one idea: the corpus is
cut into tasks, each a pure function from its documents to a part of the output, so that neither the
number of processes nor a kill in the middle can be seen in what comes out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry.data.fetch.shard_files import FetchOptions, ShardFolder
from llmfoundry.data.preparation.cache import build_once, cache_key
from llmfoundry.data.preparation.pipeline import ExecutionOptions, PreparationPlan, prepare_folder
from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.preparation.write.manifest import MANIFEST, Manifest, manifest_summary
from llmfoundry.data.preparation.write.output_folder import OutputFolder
from llmfoundry.data.preparation.write.outputs import STREAMS, Output, token_output
from llmfoundry.data.preparation.write.parts import WORK
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_rows import StreamIndex, TokenDataset
from llmfoundry.errors import UserError
from llmfoundry.files import try_lock
from llmfoundry.recipe.data import DataConfig

__all__ = ["ExecutionOptions", "Prepared", "prepare_corpus", "prepare_to"]

_SETTINGS = f"{WORK}/settings.json"


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


def prepare_corpus(
    config: DataConfig, tokenizer: Tokenizer, *, progress: bool, shard_bytes: int = 64 << 20
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
    plan = PreparationPlan(
        Corpus(config), tokenizer, token_output(tokenizer, shard_bytes=shard_bytes)
    )
    key = cache_key(corpus=plan.corpus.fingerprint(), **plan.settings)
    folder = Path(config.cache_folder).expanduser() / "tokens" / key
    execution = ExecutionOptions(config.num_workers, progress=progress)
    build_once(
        folder, lambda partial: _fill_cache(OutputFolder(str(partial)), plan, execution), keep=WORK
    )
    return _open(folder, config)


def prepare_to(
    place: OutputFolder,
    config: DataConfig,
    tokenizer: Tokenizer,
    *,
    output: Output,
    execution: ExecutionOptions,
    about: Mapping[str, str],
) -> Manifest:
    """The corpus in shards at a place; resumes from what an interrupted call left there.

    Args:
        place: the folder.
        config: the recipe's data section.
        tokenizer: what to encode with; saved beside the shards.
        output: what to write.
        execution: engine and workers.
        about: licence and source of the text, for the manifest.

    Raises:
        UserError: the corpus cannot be read, no training text is left, or the place holds
            something else or cannot be written.
    """
    plan = PreparationPlan(Corpus(config), tokenizer, output, about)
    _check_free(place)
    with _writing(place):
        manifest = Manifest.read(place)
        if manifest is None:
            _claim(place, plan)
            with place.scratch(WORK) as folder:
                tokenizer.save(folder / "tokenizer")
                place.put(folder / "tokenizer", "tokenizer")
            manifest = prepare_folder(place, plan, execution)
        else:
            _check_same(place, manifest.settings, plan.settings)
            if manifest.corpus != plan.corpus.fingerprint():
                raise _other(place, "the corpus' files are others, or changed")
        place.remove(WORK)
    return manifest


def _fill_cache(place: OutputFolder, plan: PreparationPlan, execution: ExecutionOptions) -> None:
    try:
        prepare_folder(place, plan, execution)
    except UserError:
        if not any(name.endswith(".json") for name in place.names_below(WORK)):
            place.remove(WORK)  # not one part to resume from
        raise


def _open(folder: Path, config: DataConfig) -> Prepared:
    options = FetchOptions.from_config(config)
    try:
        manifest = Manifest.read(OutputFolder(str(folder)))
        if manifest is None:
            raise UserError(f"{MANIFEST}: is missing")
        folders = [ShardFolder.open(None, str(folder / name), options) for name in STREAMS]
        train, validation = (TokenDataset(files, StreamIndex.read(files)) for files in folders)
    except UserError as error:
        raise UserError(
            f"{folder}: prepared tokens are damaged: {error}; delete it, it will be made again"
        ) from error
    return Prepared(train, validation, manifest_summary(manifest))


def _check_free(place: OutputFolder) -> None:
    """Whether the folder is empty, or a preparation's."""
    names = place.names()
    if names and MANIFEST not in names and WORK not in names:
        raise _other(place, f"{names[0]} is not of a preparation")


def _claim(place: OutputFolder, plan: PreparationPlan) -> None:
    """Say what the folder will hold, or find that an earlier call would have gone on the same."""
    data = place.read(_SETTINGS)
    if data is None:
        place.write(_SETTINGS, json.dumps(plan.settings).encode())
    else:
        _check_same(place, json.loads(data), plan.settings)


def _check_same(place: OutputFolder, before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = _flat(before), _flat(now)
    for key in dict.fromkeys([*old, *new]):
        if old.get(key) != new.get(key):
            raise _other(place, f"made with {key} {old.get(key)}, and not {new.get(key)}")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= (
            _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def _other(place: OutputFolder, why: str) -> UserError:
    return UserError(
        f"prepare.output: {place.folder} holds something else: {why}; choose another folder, or"
        " delete this one"
    )


@contextmanager
def _writing(place: OutputFolder) -> Iterator[None]:
    """One preparation at a time in a folder of this machine; errors of its disk as a line."""
    if place.here is None:
        yield
        return
    try:
        (place.here / WORK).mkdir(parents=True, exist_ok=True)
        locked = try_lock(place.here / WORK / "lock", mode=0o644)
        if locked is None:
            raise UserError(
                f"prepare.output: another process prepares {place.folder}; wait for it or end it"
            )
        with locked:
            yield
    except OSError as error:
        raise UserError(
            f"prepare.output: cannot write {place.folder}: {error.strerror or error};"
            " free space there or choose another folder"
        ) from error
