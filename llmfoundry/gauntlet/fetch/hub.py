"""Rows from the Hugging Face hub: the second route of `fetch`.

A data set is loaded with `datasets`, which keeps what it has downloaded, shows its own progress and
resumes where it was stopped; `fetch/maps.py` turns its rows into LLM Foundry's form. Whatever
forbids it (no network, terms to accept, a data set that moved) is one line for the file concerned.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

from llmfoundry.errors import import_optional
from llmfoundry.gauntlet.fetch.fetch import Fetched, FetchError, Route
from llmfoundry.gauntlet.fetch.maps import MAPS, Row
from llmfoundry.gauntlet.fetch.table import DataFile, HubSource

_SAMPLE_SEED = 1234


def from_hub() -> Route:
    """The route that loads data sets of the hub.

    Raises:
        UserError: a package is missing.
    """
    import_optional("datasets", "from_hub:", extra="data")  # once, before any file is tried
    return _write


def _write(file: DataFile, target: Path) -> Fetched:
    if file.hub is None:
        raise FetchError("only LLM Foundry's repository has it: from_foundry=PATH")
    commit, licence = _card(file.hub)
    source = _load(file.hub, commit)
    rows, dropped = _mapped(source, file.hub)
    with target.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    notes = [f"another task version: {file.differs}"] if file.differs else []
    if dropped:
        notes.append(f"{dropped:,} rows of the source do not fit and were left out")
    at = f" at {commit[:8]}" if commit else ""
    licence = file.licence or licence or "not stated; see the data set's page"
    return Fetched(f"{file.hub.id}{at}", licence, tuple(notes))


def _card(hub: HubSource) -> tuple[str | None, str | None]:
    """Commit and licence of a data set; both unknown for a local folder and in offline mode.

    Raises:
        FetchError: the hub does not answer, or does not show the data set.
    """
    if Path(hub.id).is_dir():
        return None, None
    import huggingface_hub
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        info = huggingface_hub.HfApi().dataset_info(hub.id, revision=hub.revision)
    except OfflineModeIsEnabled:
        return None, None
    except Exception as error:  # its client's errors share no base class
        raise FetchError(_reason(error, hub)) from error
    licence = getattr(info.card_data, "license", None)
    return info.sha, ", ".join(licence) if isinstance(licence, list) else licence


def _load(hub: HubSource, commit: str | None) -> Iterable[Row]:
    """The rows of the asked split, at the commit whose licence was read.

    Raises:
        FetchError: with the library's own reason in it.
    """
    import datasets

    # The library's cache does not notice that a local folder has changed.
    mode = "force_redownload" if Path(hub.id).is_dir() else None
    try:
        return datasets.load_dataset(
            hub.id,
            hub.config,
            split=hub.split,
            revision=commit or hub.revision,
            download_mode=mode,
        )
    except Exception as error:  # the library raises a dozen unrelated types, its client's too
        raise FetchError(_reason(error, hub)) from error


def _mapped(source: Iterable[Row], hub: HubSource) -> tuple[list[Row], int]:
    """All rows in LLM Foundry's form, and how many of the source gave none.

    Raises:
        FetchError: the source does not have the columns and values that its mapping knows.
    """
    make = MAPS[hub.mapping]
    rows: list[Row] = []
    dropped = 0
    for number, row in enumerate(source):
        try:
            made = make(row)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise FetchError(
                f"{hub.id}: row {number}: {type(error).__name__}: {error}; its columns"
                f" ({', '.join(row)}) or values are not those that mapping {hub.mapping} knows"
            ) from error
        dropped += not made
        rows.extend(made)
    if hub.sample is not None and hub.sample < len(rows):
        chosen = random.Random(_SAMPLE_SEED).sample(range(len(rows)), hub.sample)
        rows = [rows[i] for i in sorted(chosen)]
    return rows, dropped


def _reason(error: Exception, hub: HubSource) -> str:
    """One line: what went wrong with a data set, and what to do."""
    text = " ".join(str(error).split()) or type(error).__name__
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if "GatedRepoError" in kinds or re.search(r"\bgated\b", text):
        page = f"https://huggingface.co/datasets/{hub.id}"
        return f"{hub.id}: its terms must be accepted first, at {page}; then: hf auth login"
    if kinds & _NETWORK:
        return f"{hub.id}: no network ({text}); if it is in the cache: HF_HUB_OFFLINE=1"
    if "scripts are no longer supported" in text:
        return f"{hub.id}: is a loading script; write revision: refs/convert/parquet in the table"
    return f"{hub.id}: {type(error).__name__}: {text}"


# Names, as the hub's client has been built on two HTTP libraries: requests, now httpx.
_NETWORK = {
    "ConnectionError",
    "NetworkError",
    "TimeoutException",
    "Timeout",
    "LocalEntryNotFoundError",
}
