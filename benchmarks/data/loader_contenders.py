"""One reader of samples in a process of its own: this project's, mosaicml-streaming's, litdata's.

    python loader_contenders.py streaming FOLDER

`loaders.py` starts one process for each and lets them take turns: a line of JSON with a setting
comes in, a line with what was measured goes out. A rival runs in another interpreter, which has
neither this project nor what it needs, so this file imports nothing but what a contender is.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLES, SAMPLE_TOKENS = 20_000, 2048
EOS, _IDS = 0, 50_000
_EOS_EVERY = 500  # tokens of a document, on average
_AHEAD = 8192  # samples that mosaicml-streaming reads ahead at its best; by itself 8 batches

Batches = Iterator[tuple[Tensor, Tensor]]  # int64 tokens and labels, what training needs
Make = Callable[[int, int], Batches]  # of the number of workers and of rows in a batch


def samples() -> Iterator[np.ndarray]:
    """The same for all: (SEQ,) int32, in which EOS begins a document."""
    draw = np.random.default_rng(17)
    for _ in range(SAMPLES):
        ids = draw.integers(1, _IDS, SAMPLE_TOKENS, dtype=np.int32)
        ids[draw.integers(0, _EOS_EVERY, SAMPLE_TOKENS) == 0] = EOS
        yield ids


def ours(folder: Path, *, apart: bool = False) -> Make:
    """This project's loader, as a run on a CPU has it; `apart`: with documents' places."""
    from llmfoundry.data.fetch.shard_files import FetchOptions, ShardFolder
    from llmfoundry.data.loader import BatchPrefetcher, Loader
    from llmfoundry.data.mds_source import MDSTexts
    from llmfoundry.data.mixture import Mixture, Phase
    from llmfoundry.data.order import Order
    from llmfoundry.data.shard_index import read_index
    from llmfoundry.data.sources import ONLY, OrderedStream, RowOptions, open_source
    from llmfoundry.ops.host_memory import keep_memory

    keep_memory()

    def make(workers: int, rows: int) -> Batches:
        shards = ShardFolder.open(None, str(folder), FetchOptions())
        reading = RowOptions(seq_len=SAMPLE_TOKENS, tokenizer="", eos_id=EOS, apart=apart)
        source = open_source(ONLY, ONLY, shards, read_index(shards), reading)
        assert not isinstance(source, MDSTexts)
        loader = Loader(
            [OrderedStream(source, Order(source.sizes, seed=17, shuffle=True))],
            Mixture([ONLY], [Phase(0, (1.0,))], batch_size=rows),
            seq_len=SAMPLE_TOKENS,
            eos_id=EOS,
            vocab_size=_IDS,
            attend_across_documents=not apart,
            workers=workers,
        )
        with closing(BatchPrefetcher(loader, 0)) as batches:
            for batch in batches:
                yield batch.tokens, batch.labels

    return make


def streaming(folder: Path, predownload: int | None = None) -> Make:
    """mosaicml-streaming, on MDS that this project wrote."""
    from streaming import StreamingDataset

    def make(workers: int, rows: int) -> Batches:
        data = StreamingDataset(
            local=str(folder / "mds"), shuffle=True, batch_size=rows, predownload=predownload
        )
        loader = torch.utils.data.DataLoader(data, batch_size=rows, num_workers=workers)
        return (_with_labels(batch["tokens"]) for batch in loader)

    return make


def litdata(folder: Path, *, as_dict: bool) -> Make:
    """Its own format: a dictionary a sample, or a stream of tokens cut into blocks."""
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming.cache import Cache

    def item_loader() -> Any:
        return None if as_dict else TokensLoader(SAMPLE_TOKENS)

    path = str(folder / ("litdata" if as_dict else "litdata-tokens"))
    cache = Cache(path, chunk_bytes="64MB", item_loader=item_loader())
    for n, ids in enumerate(samples()):
        tokens = torch.from_numpy(ids)
        cache[n] = {"tokens": tokens} if as_dict else tokens
    cache.done()
    cache.merge()

    def make(workers: int, rows: int) -> Batches:
        data = StreamingDataset(path, shuffle=True, item_loader=item_loader())
        loader = StreamingDataLoader(data, batch_size=rows, num_workers=workers)
        return (_with_labels(batch["tokens"] if as_dict else batch) for batch in loader)

    return make


def _with_labels(ids: Tensor) -> tuple[Tensor, Tensor]:
    """As LLM Foundry's collator does; here after the workers, which costs the rivals least."""
    tokens = ids.long()
    return tokens, tokens.clone()


def time_batches(make: Make, workers: int, rows: int, seconds: float) -> dict[str, float]:
    """Read an epoch, or as much of it as `seconds` allow.

    Returns:
        first: seconds from nothing to the first batch; rate: samples a second after it.
    """
    begun = time.perf_counter()
    batches = make(workers, rows)
    assert all(t.shape == (rows, SAMPLE_TOKENS) and t.dtype == torch.int64 for t in next(batches))
    first = now = time.perf_counter()
    read = 0
    while now < first + seconds and read + 2 * rows <= SAMPLES:
        read += len(next(batches)[0])
        now = time.perf_counter()
    del batches  # ends its workers
    return {"first": first - begun, "rate": read / (now - first)}


CONTENDERS: dict[str, Callable[[Path], Make]] = {
    "mds": lambda folder: ours(folder / "mds"),
    "tokens": lambda folder: ours(folder / "tokens"),
    "mds-apart": lambda folder: ours(folder / "mds", apart=True),
    "streaming": streaming,
    "streaming-ahead": lambda folder: streaming(folder, _AHEAD),
    "litdata": lambda folder: litdata(folder, as_dict=True),
    "litdata-tokens": lambda folder: litdata(folder, as_dict=False),
}
_PACKAGES = {"streaming": "mosaicml-streaming", "litdata": "litdata"}


def loader() -> None:
    """Get ready, say so, and answer settings until there are no more."""
    name, folder = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print too
    torch.set_num_threads(1)
    make = CONTENDERS[name](Path(folder))
    package = _PACKAGES.get(name.split("-")[0])
    ready = {"version": importlib.metadata.version(package) if package else ""}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(time_batches(make, *json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    loader()
