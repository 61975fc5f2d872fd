"""Preparation side by side with `datasets.map`: the Python standard library, the same tokenizer.

    python -m benchmarks.data.preparation [--rounds 3] [--workers 1] [--files 300]

They take turns within a round. Ours is all of `prepare`: it reads files, splits, encodes, writes
shards with checksums and indices to the disk. `datasets.map` gets the texts in memory, encodes them
in batches of 1,000 and writes its Arrow cache: by transformers' tokenizer, as most scripts do, and
by the very call that ours makes. Medians over the rounds, by the clock and by the CPU time of all
processes, which neighbours disturb less, and of each round's ratios.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import over_rounds, table, write
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.preparation.prepare import prepare
from llmfoundry.data.preparation.read.corpus import Corpus
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.tokenizer import TokenizerConfig

_VOCAB = 4096
_WARM_UP = 1 << 20  # characters: the tokenizers library remembers words


@dataclass(frozen=True)
class PreparationTurn:
    """One contender's turn: seconds by the clock, and of all processes' CPU time."""

    clock: float
    cpu: float


def preparation() -> None:
    """Run the rounds, print the table, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--files", type=int, help="only so many of them")
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder:
        names = [file.name for file in Corpus(DataConfig()).files][: options.files]
        data = DataConfig(
            name="files", paths=names, num_workers=options.workers, cache_folder=folder
        )
        texts = [document.text for document in Corpus(data) if not document.blank]
        size = sum(len(text.encode()) for text in texts)
        tokenizer = build_tokenizer(
            TokenizerConfig(vocab_size=_VOCAB, train_bytes=_WARM_UP), data, progress=False
        )
        tokenizer.encode_batch(["".join(texts)[:_WARM_UP]])
        contenders = {
            "ours": lambda n: _ours(data, tokenizer, Path(folder) / str(n)),
            "datasets.map": _map(texts, _transformers(tokenizer), options.workers, Path(folder)),
            "same, our call": _map(texts, tokenizer.encode_batch, options.workers, Path(folder)),
        }
        turns: dict[str, list[PreparationTurn]] = {name: [] for name in contenders}
        for n in range(options.rounds):
            for name, contender in contenders.items():
                turns[name].append(_timed(contender, n))
    print(f"{len(texts):,} documents, {size / 1e6:.2f} MB, {options.workers} process(es)")
    rows = preparation_rows(turns, size)
    print("\n".join(table(rows, PREPARATION_COLUMNS)))
    settings = {"documents": len(texts), "MB": round(size / 1e6, 2), "processes": options.workers}
    print(f"\nwritten to {write('preparation', rows, settings)}")


CLOCKS: dict[str, Callable[[PreparationTurn], float]] = {
    "s": lambda turn: turn.clock,
    "CPU-s": lambda turn: turn.cpu,
}
PREPARATION_COLUMNS = {"contender": "{}"}
for _clock in CLOCKS:
    PREPARATION_COLUMNS |= {f"MB/{_clock}": "{:.2f}", f"of it, ours, MB/{_clock}": "{:.2f}"}


def preparation_rows(turns: dict[str, list[PreparationTurn]], size: int) -> list[dict[str, Any]]:
    """A row for each contender: its speed by both clocks, and how many times it ours is."""
    found = []
    for name, taken in turns.items():
        row: dict[str, Any] = {"contender": name}
        for clock, seconds in CLOCKS.items():
            row[f"MB/{clock}"] = over_rounds(size / 1e6 / seconds(turn) for turn in taken)
            pairs = zip(turns["ours"], taken, strict=True)
            row[f"of it, ours, MB/{clock}"] = over_rounds(seconds(b) / seconds(a) for a, b in pairs)
        found.append(row)
    return found


def _ours(data: DataConfig, tokenizer: Tokenizer, cache: Path) -> None:
    data.cache_folder = str(cache)
    prepare(data, tokenizer, progress=False)


Encode = Callable[[list[str]], Any]


def _transformers(tokenizer: Tokenizer) -> Encode:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
    return lambda texts: loaded(texts, add_special_tokens=False)["input_ids"]


def _map(texts: list[str], encode: Encode, workers: int, folder: Path) -> Callable[[int], Any]:
    import datasets

    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict({"text": texts})

    def ids(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": encode(batch["text"])}

    return lambda n: data.map(
        ids,
        batched=True,
        remove_columns=["text"],
        num_proc=workers if workers > 1 else None,
        cache_file_name=str(folder / f"map-{id(encode)}-{n}.arrow"),
        new_fingerprint=f"turn-{n}",
    )


def _timed(contender: Callable[[int], Any], n: int) -> PreparationTurn:
    clock, cpu = time.perf_counter(), _cpu()
    contender(n)
    return PreparationTurn(time.perf_counter() - clock, _cpu() - cpu)


def _cpu() -> float:
    """Seconds of this process and of those that ended."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usage)


if __name__ == "__main__":
    preparation()
