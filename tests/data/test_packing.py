"""Packing on the way: against a token-by-token one, its counts, and its independence of ranks."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from llmfoundry.data.loader import BatchPrefetcher, Loader, SequenceFormat
from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.order import Mixture, Order, Phase
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
from llmfoundry.data.shard_index import read_index
from llmfoundry.data.sources import MDSTexts, SequenceOptions, open_source
from llmfoundry.data.text_packing import (
    PackedStream,
    PackingRatio,
    cut_share,
    group_rows,
    pack_texts,
    probe,
)
from llmfoundry.errors import UserError
from llmfoundry.ops.packed_layout import IGNORE
from tests.shards import bytes_tokenizer

T = 24
EOS = 256
TOKENIZER = bytes_tokenizer()


def draw(n: int) -> list[str]:
    lengths = np.random.default_rng(2).integers(0, 70, n).tolist()
    return [f"{k}:" + "x" * length for k, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> MDSTexts:
    folder = tmp_path_factory.mktemp("texts")
    with MDSWriter(folder, columns={"text": "str"}, size_limit=1000) as writer:
        for text in draw(150):
            writer.write({"text": text})
    shards = ShardFolder.open(None, str(folder), FetchOptions())
    reading = SequenceOptions(T, TOKENIZER.fingerprint)
    source = open_source("data", "data", shards, read_index(shards), reading)
    assert isinstance(source, MDSTexts)
    return source


def stream(texts: MDSTexts, packing: PackingRatio, **settings: Any) -> PackedStream:
    order = Order(texts.sizes, seed=3, shuffle=True)
    return PackedStream(texts, TOKENIZER, order, packing, seq_len=T, **settings)


def loader(texts: MDSTexts, packing: PackingRatio, batch_size: int = 8, **settings: Any) -> Loader:
    mixture = Mixture(["data"], [Phase(0, (1.0,))], batch_size=batch_size)
    packed = stream(texts, packing)
    return Loader([packed], mixture, SequenceFormat(T, EOS, 257), **settings)


@pytest.mark.parametrize("n_documents", [0, 1, 2, 5, 9, 40])
def test_packing_is_the_documents_one_after_another(n_documents: int) -> None:
    documents = [TOKENIZER.encode(text) for text in draw(n_documents)]
    rows = pack_texts([[EOS, *ids] for ids in documents], rows=4, seq_len=T)
    everything = [(i, n) for n, d in enumerate(documents) for i in [EOS, *d]]
    assert len(rows) == 4
    for start, row in zip(range(0, 4 * T, T), rows, strict=True):
        expected = everything[start : start + T + 1][: T + 1]
        expected = [] if start >= 4 * T + 1 else expected
        assert row.ids.tolist() == [i for i, _ in expected]
        numbers = [n for _, n in expected[:T]]
        assert row.lengths == [len(list(group)) for _, group in itertools.groupby(numbers)]
    assert sum(row.dropped for row in rows) == max(0, len(everything) - 4 * T - 1)


def test_a_group_has_the_next_documents_of_the_order(texts: MDSTexts) -> None:
    packed = stream(texts, PackingRatio(rows=4, documents=6))
    order = Order(texts.sizes, seed=3, shuffle=True)
    for group in (0, 3, 60):  # the last in a later epoch
        chosen = [texts.text(row) for row in order.rows(group * 6, 6).tolist()]
        ids = [i for text in chosen for i in [EOS, *TOKENIZER.encode(text)]]
        for row in range(4):
            found = packed.read(int(packed.locate(np.array([group * 4 + row]))[0])).ids
            assert found.tolist() == ids[: 4 * T + 1][row * T : row * T + T + 1]


@pytest.mark.parametrize("documents", [2, 6, 30])
def test_what_is_dropped_and_padded_is_counted(texts: MDSTexts, documents: int) -> None:
    one = loader(texts, PackingRatio(4, documents))
    order = Order(texts.sizes, seed=3, shuffle=True)
    for step in range(6):
        rows, given, kept, read = one.rows(step), 0, 0, 0
        for group in (2 * step, 2 * step + 1):
            chosen = order.rows(group * documents, documents).tolist()
            size = sum(1 + len(TOKENIZER.encode(texts.text(row))) for row in chosen)
            given, kept = given + size, kept + min(size, 4 * T + 1)
            read += min(size, 4 * T)
        assert rows.dropped == given - kept
        batch = rows.batch(with_layout=True)
        labelled = int((batch.labels != IGNORE).sum())
        assert labelled == kept - 2  # of each group all but the first
        assert sum(rows.padded) == 8 * T - read


@pytest.mark.parametrize("documents", [2, 6, 30])
def test_the_share_that_is_cut_is_known_before_training(texts: MDSTexts, documents: int) -> None:
    one = loader(texts, PackingRatio(4, documents))
    steps = texts.n_rows // (2 * documents)  # two groups each; what is left over is no whole group
    rows = Order(texts.sizes, seed=3, shuffle=True).rows(0, 2 * documents * steps).tolist()
    sizes = np.array([1 + len(TOKENIZER.encode(texts.text(row))) for row in rows])
    dropped = sum(one.rows(step).dropped for step in range(steps))
    share = cut_share(sizes, PackingRatio(4, documents), T)
    assert share == pytest.approx(dropped / sizes.sum())


def test_the_iterator_sums_up_the_counts(texts: MDSTexts) -> None:
    one = loader(texts, PackingRatio(4, 3))
    rows = [one.rows(step) for step in range(12)]
    with closing(BatchPrefetcher(one, 0)) as batches:
        for _ in rows:
            next(batches)
        assert batches.metrics() == {
            "data/tokens_dropped": sum(r.dropped for r in rows),
            "data/tokens_padded": sum(sum(r.padded) for r in rows),
        }
        assert batches.metrics() == {}


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_and_restarts_pack_alike(texts: MDSTexts, world_size: int) -> None:
    whole = loader(texts, PackingRatio(8, 10))
    state = json.loads(json.dumps(whole.state(3)))
    ranks = []
    for rank in range(world_size):
        ranks.append(loader(texts, PackingRatio(8, 99), data_rank=rank, data_size=world_size))
        ranks[-1].resume(state, 3)  # has the packing of the run
    for step in (3, 4, 40):
        parts = [rank.batch(step).tokens for rank in ranks]
        assert torch.equal(torch.cat(parts), whole.batch(step).tokens)


def test_an_asked_for_packing_must_be_the_checkpoints(texts: MDSTexts) -> None:
    state = stream(texts, PackingRatio(8, 20)).state()
    with pytest.raises(UserError, match=r"^data\.packing_ratio: .* packed with 2\.5; write that"):
        stream(texts, PackingRatio(8, 16), exact=True).resume(state, allow_changed=False)
    stream(texts, PackingRatio(8, 20), exact=True).resume(state, allow_changed=False)


def test_the_ratio_makes_groups_that_are_about_full(texts: MDSTexts) -> None:
    order = Order(texts.sizes, seed=3, shuffle=True)
    found = probe(texts, order, TOKENIZER, seq_len=T, batch_size=8)
    sizes = [1 + len(TOKENIZER.encode(text)) for text in draw(150)]
    assert found.packing.rows == 8
    assert found.packing.documents == round(8 * T / np.mean(sizes))
    assert found.bytes_per_token == pytest.approx(1 - len(sizes) / sum(sizes))


def test_groups_divide_the_batch() -> None:
    assert [group_rows(n) for n in (1, 2, 6, 7, 8, 12, 13, 512)] == [1, 2, 6, 7, 8, 6, 1, 8]
    assert PackingRatio.of_ratio(2.5, 16) == PackingRatio(8, 20)
    assert PackingRatio.of_ratio(0.01, 16) == PackingRatio(8, 1)
