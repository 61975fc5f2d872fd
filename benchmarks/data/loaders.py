"""Loaders side by side: this project's on MDS and on token shards, mosaicml-streaming, litdata.

    python -m benchmarks.data.loaders [--python RIVALS/bin/python] [--rounds 3] [--workers 0 2]

All read samples of 2,048 tokens from this disk, shuffled, in one run: each is a process that stays
alive, and they take turns within a round, so that a busy minute of the machine meets all of them.
Medians over the rounds, and of each round's ratios. All give int64 tokens and labels, the rivals
through two lines of LLM Foundry's collator; ours also once with what keeps documents apart.

The rivals need an environment of their own, because mosaicml-streaming excludes today's numpy:
    python -m venv RIVALS && RIVALS/bin/pip install torch mosaicml-streaming==0.13 litdata==0.2.76
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record
from benchmarks.data import loader_contenders
from benchmarks.data.loader_contenders import EOS, SAMPLES, SAMPLE_TOKENS, samples
from llmfoundry.data.mds.writer import MDSWriter
from llmfoundry.data.preparation.write.token_writer import TokenWriter
from llmfoundry.data.token_rows import StreamIndex
from llmfoundry.files import write_json

NAMES = {
    "mds": "ours, MDS",
    "tokens": "ours, token shards",
    "mds-apart": "ours, MDS, documents apart",
    "streaming": "mosaicml-streaming {}",
    "streaming-ahead": "mosaicml-streaming {}, 8192 ahead",
    "litdata": "litdata {}, dictionaries",
    "litdata-tokens": "litdata {}, blocks of tokens",
}
OURS = ("mds", "tokens", "mds-apart")
YARDSTICKS = 2  # of these, the first: what all others are compared with
_STUB = {  # what mosaicml-streaming imports of torchvision, whose wheels need CUDA's torch
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": "class VisionDataset: ...\nclass CIFAR10: ...\n",
    "torchvision/transforms/__init__.py": "",
    "torchvision/transforms/functional.py": "to_tensor = None\n",
}


@dataclass(frozen=True)
class LoaderTurn:
    """What it found: seconds to the first batch, and samples a second after it."""

    first: float
    rate: float


class Contender:
    """A process that measures when asked, until its context is left."""

    def __init__(self, name: str, python: str, folder: Path) -> None:
        self._log = (folder / f"{name}.log").open("w+", encoding="utf-8")
        stub = {} if name in OURS else {"PYTHONPATH": str(folder / "stub")}
        self._process = subprocess.Popen(
            [python, loader_contenders.__file__, name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | stub,
        )

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # it ends by itself when nothing more is asked
        self._log.close()

    def ready(self) -> tuple[str, str]:
        """Wait until it can measure: its library's version, or else why it cannot."""
        answer = self._answer()
        if answer is not None:
            return answer["version"], ""
        self._log.seek(0)
        return "", self._log.read().strip().rpartition("\n")[2]

    def turn(self, workers: int, rows: int, seconds: float) -> LoaderTurn:
        """Let it measure one setting for so long at most."""
        assert self._process.stdin is not None
        print(json.dumps([workers, rows, seconds]), file=self._process.stdin, flush=True)
        answer = self._answer()
        assert answer is not None, self._log.read()
        return LoaderTurn(**answer)

    def _answer(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def loaders() -> None:
    """Write the samples, run the rounds, print the tables, write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the rivals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, at most")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="in a batch")
    options = parser.parse_args()
    print(f"{SAMPLES:,} samples of {SEQ:,} tokens; medians of {options.rounds} rounds by turns")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_samples(folder)
        contenders = _start(folder, options.python, stack)
        for workers, rows in itertools.product(options.workers, options.rows):
            turns: dict[str, list[LoaderTurn]] = {contender: [] for contender in contenders}
            for _ in range(options.rounds):
                for label, contender in contenders.items():
                    turns[label].append(contender.turn(workers, rows, options.seconds))
            print(f"\n{workers} workers, batches of {rows}")
            print("\n".join(table(turns)), flush=True)
            setting = f"{workers} workers x {rows}"
            found += [{"setting": setting} | row for row in loader_rows(turns)]
    settings = {"samples": SAMPLES, "tokens": SAMPLE_TOKENS, "rounds": options.rounds}
    print(f"\nwritten to {record.write('loaders', found, settings)}")


def write_samples(folder: Path) -> None:
    """`mds/` and `tokens/` with the same ids, and `stub/`, what a rival imports and never uses."""
    dtype = np.dtype("<u2")
    tokens = TokenWriter(folder / "tokens", "part-00000", dtype, 64 << 20, ("xxh3_64",))
    mds = MDSWriter(folder / "mds", columns={"tokens": "ndarray:int32"})
    with mds, tokens:
        tokens.add([EOS], n_bytes=0, starts_document=True)
        for ids in samples():
            mds.write({"tokens": ids})
            for part in filter(len, np.split(ids, np.flatnonzero(ids == EOS))):
                tokens.add(part.tolist(), n_bytes=0, starts_document=bool(part[0] == EOS))
    index = StreamIndex(dtype.str, EOS, "", tuple(tokens.shards))
    write_json(folder / "tokens" / "index.json", index.to_dict())
    for name, content in _STUB.items():
        path = folder / "stub" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")


def _start(folder: Path, rivals: str, stack: ExitStack) -> dict[str, Contender]:
    """Every contender that can run, by its label; says why of each that cannot."""
    pythons = {name: sys.executable if name in OURS else rivals for name in NAMES}
    begun = {n: stack.enter_context(Contender(n, pythons[n], folder)) for n in NAMES}
    started = {}
    for name, contender in begun.items():
        version, problem = contender.ready()
        if problem:
            why = f"{pythons[name]} cannot run it: {problem}"
            print(f"{name}: left out, {why}; name an interpreter that can with --python")
        else:
            started[NAMES[name].format(version)] = contender
    return started


LOADER_COLUMNS = {
    "loader": "{}",
    "samples/s": "{:,.0f}",
    "first batch": "{:,.0f} ms",
    "of it, ours on MDS": "{:.2f}",
    "of it, ours on tokens": "{:.2f}",
}


def table(turns: Mapping[str, Sequence[LoaderTurn]]) -> list[str]:
    """A line for each contender."""
    return record.table(loader_rows(turns), LOADER_COLUMNS)


def loader_rows(turns: Mapping[str, Sequence[LoaderTurn]]) -> list[dict[str, Any]]:
    """A row for each contender: its speed, its first batch, and how many times it ours have."""
    ours = list(turns.values())[:YARDSTICKS]
    found = []
    for label, taken in turns.items():
        facts: list[Any] = [label, record.over_rounds(turn.rate for turn in taken)]
        facts.append(record.over_rounds(turn.first * 1e3 for turn in taken))
        for mine in ours:
            pairs = zip(mine, taken, strict=True)
            facts.append(record.over_rounds(a.rate / b.rate for a, b in pairs))
        found.append(dict(zip(LOADER_COLUMNS, facts, strict=True)))
    return found


if __name__ == "__main__":
    loaders()
