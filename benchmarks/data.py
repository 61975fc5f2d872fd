"""Sample order, loaders, preparation, and what reading costs a step.

    python -m benchmarks.data order
    python -m benchmarks.data loaders [--python RIVALS/bin/python] [--rounds 3] [--workers 0 2]
    python -m benchmarks.data preparation [--rounds 3] [--workers 1] [--files 300]
    python -m benchmarks.data wait [RECIPE.yaml] [key=value …]

`order`: how well the sample order mixes, next to a true permutation and to what Streaming calls
py1e (shards in random order, then each sample moved at random by up to half a block), in three
numbers:

- same shard: how often two consecutive samples are from one shard, over how often they would be if
  each were drawn at random. 1 is perfect, larger means runs of one shard's text.
- shards in 2048: how many shards the samples of a batch of 2,048 are from, as the exponential of
  the entropy: what counts when a shard is of one kind of text. At most the shards of a block.
- apart: mean distance in the order of two adjacent samples of the source, over a third of the
epoch,
  its value for a permutation. What a block costs; 1 only without blocks.

`loaders`: this project's on MDS and on token shards, mosaicml-streaming, litdata. All read samples
of 2,048 tokens from this disk, shuffled: each is a process that stays alive, and they are
interleaved. All give int64 tokens and labels, the rivals through two lines of LLM Foundry's
collator; ours also once with what separates documents. The rivals need an environment of their own,
because mosaicml-streaming excludes today's numpy:
    python -m venv RIVALS && RIVALS/bin/pip install torch mosaicml-streaming==0.13 litdata==0.2.76

`preparation`: next to `datasets.map`, on the Python standard library, with the same tokenizer. Ours
is all of `prepare_corpus`: it reads files, splits, encodes, writes shards with checksums and
indices to the disk. `datasets.map` gets the texts in memory, encodes them in batches of 1,000 and
writes its Arrow cache: by transformers' tokenizer, as most scripts do, and by the very call that
ours makes. By the clock and by the CPU time of all processes.

`wait`: training steps on batches as they are read, next to the same batches made before.
Interleaved in one process, a few steps each, and on the same rows, because a step's time depends on
its documents.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import contenders
from benchmarks.contenders import EOS, SAMPLE_TOKENS, SAMPLES, samples
from benchmarks.harness import interleaved, over_rounds, ratio, table, write
from llmfoundry.builders.callbacks import MAKERS
from llmfoundry.builders.trainer import build_trainer
from llmfoundry.checkpoint.storage import Storage
from llmfoundry.data.loader import BatchPrefetcher
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.order import Order
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.preparation.corpus import Corpus
from llmfoundry.data.preparation.prepare import prepare_corpus
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_shards import StreamIndex, TokenWriter
from llmfoundry.distributed.process_group import join
from llmfoundry.files import write_json
from llmfoundry.loggers.tracker import Tracker
from llmfoundry.ops.packed_layout import Batch
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from llmfoundry.recipe.load import load
from llmfoundry.recipe.train import TrainRecipe
from llmfoundry.resilience.watch.watch import watch
from llmfoundry.train.step import train_step
from llmfoundry.train.trainer import Trainer

SEED = 17
WINDOW = 2048
LAYOUTS = ((20, 8192, 1 << 18), (20, 8192, 1 << 15), (256, 8192, 1 << 18), (489, 4091, 1 << 18))


def order(words: list[str]) -> None:
    """Print the table, which is the same on every machine."""
    columns = {"epoch": "{}", "order": "{}", "same shard": "{:.3f}"}
    columns |= {f"shards in {WINDOW}": "{:.1f}", "apart": "{:.3f}"}
    print("\n".join(table(mixed_rows(), columns)))


def mixed_rows() -> list[dict[str, Any]]:
    """For each layout and order the three numbers."""
    found = []
    for n_shards, size, block_size in LAYOUTS:
        sizes = np.full(n_shards, size)
        rng = np.random.default_rng(SEED)
        n = int(sizes.sum())
        orders = {
            "permutation": rng.permutation(n),
            "py1e": py1e(sizes, block_size, rng),
            "ours": Order(sizes, seed=SEED, shuffle=True, block_size=block_size).rows(0, n),
        }
        epoch = f"{n:,} rows in {n_shards} shards, blocks of {block_size:,}"
        for name, rows in orders.items():
            same, shards, apart = mixing(rows, sizes)
            row = {"same shard": same, f"shards in {WINDOW}": shards, "apart": apart}
            found.append({"epoch": epoch, "order": name, **row})
    return found


def mixing(rows: np.ndarray, sizes: np.ndarray) -> tuple[float, float, float]:
    """The numbers of one epoch's `rows` (n,) from shards of `sizes`."""
    n = len(rows)
    shards = np.repeat(np.arange(len(sizes)), sizes)[rows]
    same = float((shards[1:] == shards[:-1]).mean() / np.square(sizes / n).sum())
    windows = shards[: n // WINDOW * WINDOW].reshape(-1, WINDOW)
    parts = np.stack([np.bincount(window, minlength=len(sizes)) for window in windows]) / WINDOW
    entropy = -(parts * np.log(np.where(parts > 0, parts, 1))).sum(1)
    place = np.empty(n, np.int64)
    place[rows] = np.arange(n)
    apart = float(np.abs(np.diff(place)).mean() / (n / 3))
    return same, float(np.exp(entropy).mean()), apart


def py1e(sizes: np.ndarray, block_size: int, rng: np.random.Generator) -> np.ndarray:
    """(n,) rows of an epoch as Streaming orders them for one canonical node.

    Each shard's samples are spread over a stretch of 0.75 to 1.25 blocks around it.
    """
    shards = rng.permutation(len(sizes))
    starts = np.cumsum(sizes) - sizes
    rows = np.concatenate([starts[n] + rng.permutation(sizes[n]) for n in shards])
    sizes = sizes[shards]
    before = np.repeat(np.cumsum(sizes) - sizes, sizes)
    behind = len(rows) - before - np.repeat(sizes, sizes)
    stretch = np.repeat(rng.uniform(0.75, 1.25, len(sizes)) * block_size - sizes, sizes)
    reach = np.maximum(stretch / 2, 0)
    moved = rng.uniform(-np.minimum(reach, before), np.minimum(reach, behind))
    order: np.ndarray = rows[np.argsort(np.arange(len(rows)) + moved)]
    return order


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
        settings = json.dumps({"name": name, "folder": str(folder)})
        self._process = subprocess.Popen(
            [python, contenders.__file__, "loader", settings],
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


def loaders(words: list[str]) -> None:
    """Write the samples, run the rounds, print the tables, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.data loaders")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with the rivals")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, at most")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64], help="in a batch")
    options = parser.parse_args(words)
    print(f"{SAMPLES:,} samples of {SAMPLE_TOKENS:,} tokens; {options.rounds} interleaved rounds")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        write_samples(folder)
        started = _start(folder, options.python, stack)
        for workers, rows in itertools.product(options.workers, options.rows):
            measure = {
                label: partial(loader.turn, workers, rows, options.seconds)
                for label, loader in started.items()
            }
            turns = interleaved(lambda _, m=measure: m, rounds=options.rounds)  # type: ignore[misc]
            print(f"\n{workers} workers, batches of {rows}")
            print("\n".join(loader_table(turns)), flush=True)
            setting = f"{workers} workers x {rows}"
            found += [{"setting": setting} | row for row in loader_rows(turns)]
    settings = {"samples": SAMPLES, "tokens": SAMPLE_TOKENS, "rounds": options.rounds}
    print(f"\nwritten to {write('loaders', found, settings)}")


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


def loader_table(turns: Mapping[str, Sequence[LoaderTurn]]) -> list[str]:
    """A line for each contender."""
    return table(loader_rows(turns), LOADER_COLUMNS)


def loader_rows(turns: Mapping[str, Sequence[LoaderTurn]]) -> list[dict[str, Any]]:
    """A row for each contender: its speed, its first batch, and how many times it ours have."""
    ours = list(turns.values())[:YARDSTICKS]
    found = []
    for label, taken in turns.items():
        facts: list[Any] = [label, over_rounds(turn.rate for turn in taken)]
        facts.append(over_rounds(turn.first * 1e3 for turn in taken))
        for mine in ours:
            facts.append(ratio(mine, taken, lambda turn: turn.rate))
        found.append(dict(zip(LOADER_COLUMNS, facts, strict=True)))
    return found


_VOCAB = 4096
_WARM_UP = 1 << 20  # characters: the tokenizers library remembers words


@dataclass(frozen=True)
class PreparationTurn:
    """One contender's turn: seconds by the clock, and of all processes' CPU time."""

    clock: float
    cpu: float


def preparation(words: list[str]) -> None:
    """Run the rounds, print the table, write the result."""
    parser = argparse.ArgumentParser(prog="benchmarks.data preparation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--files", type=int, help="only so many of them")
    options = parser.parse_args(words)
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
        ways: dict[str, Callable[[int], Any]] = {
            "ours": lambda n: _ours(data, tokenizer, Path(folder) / str(n)),
            "datasets.map": _map(texts, _transformers(tokenizer), options.workers, Path(folder)),
            "same, our call": _map(texts, tokenizer.encode_batch, options.workers, Path(folder)),
        }
        turns = interleaved(
            lambda n: {name: partial(_timed, way, n) for name, way in ways.items()},
            rounds=options.rounds,
        )
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
            row[f"of it, ours, MB/{clock}"] = ratio(taken, turns["ours"], seconds)
        found.append(row)
    return found


def _ours(data: DataConfig, tokenizer: Tokenizer, cache: Path) -> None:
    data.cache_folder = str(cache)
    prepare_corpus(data, tokenizer, progress=False)


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


def _timed(way: Callable[[int], Any], n: int) -> PreparationTurn:
    clock, cpu = time.perf_counter(), _cpu()
    way(n)
    return PreparationTurn(time.perf_counter() - clock, _cpu() - cpu)


def _cpu() -> float:
    """Seconds of this process and of those that ended."""
    usage = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in usage)


MADE = "of made before"
STEPS, ROUNDS = 5, 48  # 16 rounds were off by up to 3 %


def wait(words: list[str]) -> None:
    """Build the run, train both ways interleaved, print, write the result."""
    path, *overrides = words or ["yamls/quickstart.yaml"]
    with tempfile.TemporaryDirectory() as folder:
        overrides += [f"save_folder={folder}", "logger.mlflow=false"]
        recipe = load(TrainRecipe, path, overrides).resolve()
        with join(recipe.parallel) as world:
            tracker = Tracker(recipe, Path(folder), is_main=world.is_main)
            MAKERS["watch"] = watch
            trainer, _ = build_trainer(recipe, world, tracker, Storage(Path(folder)))
            with closing(BatchPrefetcher(trainer.loader, 0)) as batches:
                rows = wait_rows(trainer, batches)
    print("\n".join(table(rows, {"batches": "{}", "ms a step": "{:.1f}", MADE: "{:.3f}"})))
    settings = {"recipe": Path(path).stem, "rounds": ROUNDS, "steps of a round": STEPS}
    print(f"\nwritten to {write('data-wait', rows, settings)}")


def wait_rows(trainer: Trainer, batches: BatchPrefetcher) -> list[dict[str, Any]]:
    """Rounds of both, after one to warm up; each is first as often as the other."""
    rounds = []
    for number in range(ROUNDS + 1):
        steps = range(number * STEPS, (number + 1) * STEPS)
        held = iter([trainer.loader.batch(step) for step in steps])
        if number % 2:
            read, constant = _seconds(trainer, batches), _seconds(trainer, held)
        else:
            constant, read = _seconds(trainer, held), _seconds(trainer, batches)
        rounds.append((read, constant))
    sides = [list(side) for side in zip(*rounds[1:], strict=True)]
    return [
        {
            "batches": name,
            "ms a step": over_rounds(seconds * 1e3 for seconds in side),
            MADE: over_rounds(a / b for a, b in zip(side, sides[1], strict=True)),
        }
        for name, side in zip(("as they are read", "made before"), sides, strict=True)
    ]


def _seconds(trainer: Trainer, batches: Iterator[Batch]) -> float:
    """Of a step, over some."""
    started = time.perf_counter()
    for _ in range(STEPS):
        result = train_step(
            trainer.module,
            trainer.optimizer,
            next(batches).to(trainer.world.device),
            trainer.settings,
            number=0,
            guard=trainer.spikes.guard,
        )
    result.loss.item()  # waits for the device
    return (time.perf_counter() - started) / STEPS


if __name__ == "__main__":
    works = {"order": order, "loaders": loaders, "preparation": preparation, "wait": wait}
    works[sys.argv[1]](sys.argv[2:])
