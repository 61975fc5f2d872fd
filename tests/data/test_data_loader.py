"""Batches: one sequence on any ranks, workers and restarts; layouts, mixtures, resume, failures."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmfoundry.data.held_out import validation_batches
from llmfoundry.data.loader import BatchPrefetcher, Loader, SequenceFormat
from llmfoundry.data.order import Mixture, Order, Phase
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
from llmfoundry.data.shard_index import read_index
from llmfoundry.data.sources import (
    MDSTexts,
    OrderedStream,
    SequenceOptions,
    TokenSource,
    check_length,
    open_source,
    tokens_left_out,
)
from llmfoundry.data.token_shards import TokenDataset
from llmfoundry.errors import UserError
from llmfoundry.ops.packed_layout import IGNORE, Batch, PackedLayout
from tests.shards import bytes_tokenizer, write_mds, write_tokens

T = 32
EOS = 256
BATCH = 8
TOKENIZER = bytes_tokenizer()


def opened(folder: Path, name: str = "data", *, seq_len: int = T, **order: Any) -> OrderedStream:
    shards = ShardFolder.open(None, str(folder), FetchOptions())
    reading = SequenceOptions(seq_len, TOKENIZER.fingerprint, eos_id=EOS)
    source = open_source(name, name, shards, read_index(shards), reading)
    assert not isinstance(source, MDSTexts)
    if isinstance(source, TokenSource):  # as builders/data.py does
        check_length(source, name, seq_len)
    settings = {"seed": 3, "shuffle": True, "block_size": 1 << 18} | order
    return OrderedStream(source, Order(source.sizes, **settings))


def loader(
    streams: Sequence[OrderedStream],
    *,
    batch_size: int = BATCH,
    seq_len: int = T,
    phases: Sequence[Phase] = (),
    **settings: Any,
) -> Loader:
    names = [stream.name for stream in streams]
    phases = phases or [Phase(0, (1.0,) * len(names))]
    form = {"eos_id": EOS, "vocab_size": TOKENIZER.vocab_size}
    form |= {
        key: settings.pop(key) for key in (*form, "attend_across_documents") if key in settings
    }
    mixture = Mixture(names, phases, batch_size=batch_size)
    return Loader(streams, mixture, SequenceFormat(seq_len, **form), **settings)


def dataset(stream: OrderedStream) -> TokenDataset:
    assert isinstance(stream.source, TokenSource)
    return stream.source.dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("loader")
    for name in ("web", "code"):
        write_tokens(root / name, name, documents=60)
    write_mds(root / "books", "books", rows=30, seq_len=T)
    return root


@pytest.fixture
def web(folder: Path) -> OrderedStream:
    return opened(folder / "web")


def three(folder: Path) -> list[OrderedStream]:
    return [opened(folder / name, name) for name in ("web", "code", "books")]


CURRICULUM = [Phase(0, (5.0, 2.0, 1.0)), Phase(10, (1.0, 1.0, 6.0))]


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and (a.layout is None) == (b.layout is None)
        and (a.layout is None or b.layout is None or a.layout.lengths == b.layout.lengths)
    )


def sequence(make: Callable[..., Loader], steps: Sequence[int], ranks: int, workers: int) -> str:
    """A hash of all rows up to the last of `steps`, stopped at each and gone on from its state."""
    found, state = [], None
    for start, stop in itertools.pairwise([0, *steps]):
        parts = []
        for rank in range(ranks):
            part = make(data_rank=rank, data_size=ranks, workers=workers)
            if state is not None:
                part.resume(state, start)
            with closing(BatchPrefetcher(part, start)) as batches:
                parts.append([next(batches).tokens for _ in range(start, stop)])
            following = json.loads(json.dumps(part.state(stop)))
        state = following
        found += [torch.cat(step) for step in zip(*parts, strict=True)]
    return hashlib.sha256(torch.cat(found).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (4, 0), (1, 2), (2, 1)])
def test_one_sequence_on_any_ranks_workers_and_restarts(
    folder: Path, ranks: int, workers: int
) -> None:
    def make(**settings: Any) -> Loader:
        return loader(three(folder), phases=CURRICULUM, **settings)

    plain = make()
    rows = torch.cat([plain.batch(step).tokens for step in range(20)])
    expected = hashlib.sha256(rows.numpy().tobytes()).hexdigest()
    assert sequence(make, [20], ranks, workers) == expected
    assert sequence(make, [3, 13, 20], ranks, workers) == expected


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_out_the_single_rank_batch(folder: Path, world_size: int) -> None:
    whole = loader(three(folder))
    ranks = [loader(three(folder), data_rank=r, data_size=world_size) for r in range(world_size)]
    for step in (0, 1, 50):
        expected, parts = whole.batch(step), [rank.batch(step) for rank in ranks]
        assert torch.equal(torch.cat([part.tokens for part in parts]), expected.tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), expected.labels)
        lengths = [row for part in parts if part.layout for row in part.layout.lengths]
        assert expected.layout is not None and tuple(lengths) == expected.layout.lengths


def test_an_epoch_gives_every_row_once(web: OrderedStream) -> None:
    one = loader([web], batch_size=1)
    rows = {tuple(one.batch(step).tokens[0].tolist()) for step in range(one.n_rows)}
    held = dataset(web)
    expected = {tuple(held.row(r, T)[0][:-1].tolist()) for r in range(one.n_rows)}
    assert rows == expected
    assert one.n_rows * T + tokens_left_out(one.streams) == held.n_tokens - 1


def test_unshuffled_batches_are_the_stream(folder: Path) -> None:
    stream = opened(folder / "web", shuffle=False)
    plain = loader([stream])
    tokens = torch.cat([plain.batch(step).tokens.flatten() for step in range(3)])
    labels = torch.cat([plain.batch(step).labels.flatten() for step in range(3)])
    ids = torch.from_numpy(dataset(stream).row(0, 3 * BATCH * T)[0].astype(np.int64))
    assert torch.equal(tokens, ids[:-1])
    assert torch.equal(labels, ids[1:])


def test_layout_equals_the_plain_builder(web: OrderedStream) -> None:
    for step in range(20):
        batch = loader([web]).batch(step)
        assert batch.layout is not None
        expected = PackedLayout.from_lengths(batch.layout.lengths)
        assert torch.equal(batch.layout.positions, expected.positions)
        assert torch.equal(batch.layout.documents, expected.documents)
        assert batch.layout.positions.dtype == torch.int64
        assert batch.layout.documents.dtype == torch.int32
        # A document begins exactly where the stream says so, and at each row's first token.
        begins = batch.tokens == EOS
        begins[:, 0] = True
        assert torch.equal(batch.layout.positions == 0, begins)


def test_attending_across_documents_leaves_the_layout_out(web: OrderedStream) -> None:
    batch = loader([web], attend_across_documents=True).batch(0)
    assert batch.layout is None
    assert torch.equal(batch.tokens, loader([web]).batch(0).tokens)


def test_text_shorter_than_a_row_names_the_key(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"max_seq_len: the training text of data has [\d,]+ tokens, too"
    ):
        opened(folder / "web", seq_len=10**6)


def test_changed_proportions_repeat_and_lose_nothing(folder: Path) -> None:
    """At a resume: each stream's rows come in its own order, whatever its part of the batches."""
    before = loader(three(folder), phases=[Phase(0, (6.0, 1.0, 1.0))])
    state = json.loads(json.dumps(before.state(5)))
    after = loader(three(folder), phases=[Phase(0, (1.0, 1.0, 4.0))], data_size=2)
    after.resume(state, 5)
    first = [before.mixture.plan(step) for step in range(5)]
    then = [after.mixture.plan(step) for step in range(5, 12)]
    source, sample = (np.concatenate(part) for part in zip(*first, *then, strict=True))
    for n in range(3):
        mine = np.sort(sample[source == n])
        assert np.array_equal(mine, np.arange(len(mine)))
    assert after.samples(12) == 12 * BATCH


def test_batches_that_are_left_out_are_the_only_ones_that_do_not_come(folder: Path) -> None:
    """Each stream continues behind them, phases begin at their own steps, and a resume knows it."""
    plain, cut = (loader(three(folder), phases=CURRICULUM) for _ in range(2))
    cut.batch(4)  # what was planned before is not kept
    cut.skip(4, 3)
    first = [plain.mixture.plan(step) for step in range(7)]
    then = [cut.mixture.plan(step) for step in range(4, 16)]
    source, sample = (np.concatenate(part) for part in zip(*first, *then, strict=True))
    for n in range(3):
        mine = np.sort(sample[source == n])
        assert np.array_equal(mine, np.arange(len(mine)))
    parts = [np.bincount(cut.mixture.plan(step)[0], minlength=3) for step in range(8, 12)]
    assert [part.argmax() for part in parts] == [0, 0, 2, 2]  # the phase of step 10
    resumed = loader(three(folder), phases=CURRICULUM)
    resumed.resume(json.loads(json.dumps(cut.state(8))), 8)
    assert all(same(resumed.batch(step), cut.batch(step)) for step in range(8, 13))


def test_a_stream_that_was_away_comes_back_where_it_was_or_is_refused(folder: Path) -> None:
    """Two checkpoints later: what a stream was is kept while the recipe leaves it out."""
    web, code, books = three(folder)
    state = json.loads(json.dumps(loader([web, code, books]).state(5)))
    for step in (9, 12):
        without = loader([web, code])
        without.resume(state, step - 4)
        state = json.loads(json.dumps(without.state(step)))
    back = loader([web, code, books])
    back.resume(state, 12)
    given = loader([web, code, books]).mixture.consumed(5)[2]
    assert back.mixture.consumed(12)[2] == given > 0
    with pytest.raises(UserError, match=r"^data\.streams\.books: its rows "):
        loader([web, code, opened(folder / "web", "books")]).resume(state, 12)


@pytest.mark.parametrize("after", [4, 16])
def test_resume_continues_after_the_last_sample_given(web: OrderedStream, after: int) -> None:
    """Also where the batch size changed with the resume: no sample twice, none left out."""
    before = loader([web])
    state = json.loads(json.dumps(before.state(5)))
    assert before.samples(5) == 40
    ranks = [loader([web], batch_size=after, data_size=2, data_rank=rank) for rank in (0, 1)]
    for rank in ranks:
        rank.resume(state, 5)
        assert rank.samples(5) == 40
    rows = [r.batch(5 + n).tokens for n in range(80 // after) for r in ranks]
    expected = torch.cat([before.batch(5 + n).tokens for n in range(10)])
    assert torch.equal(torch.cat(rows), expected)


def test_resume_refuses_other_rows(folder: Path, web: OrderedStream, tmp_path: Path) -> None:
    state = loader([web]).state(5)
    with pytest.raises(UserError, match=r"^max_seq_len: .*with 32, this run has 16; write 32"):
        loader([opened(folder / "web", seq_len=16)], seq_len=16).resume(state, 5)
    with pytest.raises(UserError, match=r"^seed: "):
        loader([opened(folder / "web", seed=4)]).resume(state, 5)
    with pytest.raises(UserError, match=r"^data\.shuffle: "):
        loader([opened(folder / "web", shuffle=False)]).resume(state, 5)
    with pytest.raises(UserError, match=r"^data\.shuffle_block_size: .* write 262144"):
        loader([opened(folder / "web", block_size=100)]).resume(state, 5)
    other = opened(folder / "code")
    with pytest.raises(UserError, match=r"^data: its rows .*data\.allow_changed=\[data\]"):
        loader([other]).resume(state, 5)
    changed = loader([other], allow_changed=["data"])
    changed.resume(state, 5)
    assert same(changed.batch(5), loader([other]).batch(5))


def test_the_state_of_ten_streams_is_small(folder: Path) -> None:
    streams = [opened(folder / "web", f"stream{n}") for n in range(10)]
    assert len(json.dumps(loader(streams).state(10**9))) < 3000


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetch_gives_the_same_batches_and_ends_what_it_began(
    web: OrderedStream, workers: int
) -> None:
    plain = loader([web])
    with closing(BatchPrefetcher(loader([web], workers=workers), 7)) as batches:
        for step, batch in enumerate(itertools.islice(batches, 10), start=7):
            assert same(batch, plain.batch(step))
        assert any(thread.name == "loader" for thread in threading.enumerate())
        assert len(multiprocessing.active_children()) == workers
    assert not any(thread.name == "loader" for thread in threading.enumerate())
    assert not multiprocessing.active_children()


def test_a_step_is_not_interrupted_when_a_worker_ends(web: OrderedStream) -> None:
    """PyTorch answers the signal of a child's end in the main thread, if workers began there."""
    before = signal.getsignal(signal.SIGCHLD)
    with closing(BatchPrefetcher(loader([web], workers=1), 0)) as batches:
        next(batches)
        assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_what_goes_wrong_is_raised_at_its_step(folder: Path, tmp_path: Path, workers: int) -> None:
    """As the error that it was, and again at every later step."""
    write_mds(tmp_path, "bad", rows=40, seq_len=T)
    stream = opened(tmp_path, shuffle=False)
    lost = stream.source.where(17).partition(",")[0]
    (tmp_path / lost).unlink()
    first = int(np.searchsorted(np.cumsum(stream.source.sizes), 17, side="right"))
    rows = int(stream.source.sizes[:first].sum())
    with closing(BatchPrefetcher(loader([stream], batch_size=4, workers=workers), 0)) as batches:
        for _ in range(rows // 4):
            next(batches)
        for _ in range(2):
            with pytest.raises(UserError, match=lost):
                next(batches)
    assert not any(thread.name == "loader" for thread in threading.enumerate())
    assert not multiprocessing.active_children()


@pytest.mark.slow  # PyTorch looks after its workers every five seconds
def test_a_worker_that_ends_is_an_error_not_a_hang(web: OrderedStream) -> None:
    with closing(BatchPrefetcher(loader([web], workers=1), 0)) as batches:
        next(batches)
        (worker,) = multiprocessing.active_children()
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)  # that of a run's end: the step continues
        next(batches)
        os.kill(worker.pid, signal.SIGTERM)  # a second one ends it, as it ends the run
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            for _ in range(1000):
                next(batches)


@pytest.fixture
def makers(web: OrderedStream, monkeypatch: pytest.MonkeyPatch) -> tuple[Loader, list[str]]:
    """A loader, and the names of the threads that made its batches, in order."""
    made: list[str] = []
    one = loader([web])
    rows = one.rows

    def noted(step: int) -> Any:
        assert step == len(made)
        made.append(threading.current_thread().name)
        return rows(step)

    monkeypatch.setattr(one, "rows", noted)
    return one, made


def test_batches_are_made_ahead_and_wait_for_the_training(
    makers: tuple[Loader, list[str]],
) -> None:
    one, made = makers
    with closing(BatchPrefetcher(one, 0, depth=2)) as batches:
        for given in range(5):
            deadline = time.monotonic() + 120
            while len(made) < given + 2 and time.monotonic() < deadline:
                time.sleep(0.001)
            time.sleep(0.01)
            assert made == ["loader"] * (given + 2)
            next(batches)


def test_a_batch_that_nobody_has_made_yet_is_made_by_who_asks(
    web: OrderedStream, makers: tuple[Loader, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmfoundry.data.loader._BUSY", 0.5)
    one, made = makers
    plain = loader([web])
    with closing(BatchPrefetcher(one, 0)) as batches:
        for step in range(10):
            assert same(next(batches), plain.batch(step))
    assert made == ["MainThread"] * 10


def test_ids_that_no_token_has_are_refused_with_their_place(folder: Path) -> None:
    stream = opened(folder / "books")
    with pytest.raises(UserError, match=r"^data: shard\.\d+\.mds, sample \d+: has the id 256, but"):
        loader([stream], vocab_size=256).batch(0)


@pytest.mark.parametrize("world_size", [1, 2, 7])
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("max_rows", [None, 1, 5])
def test_validation_predicts_every_token_once(
    web: OrderedStream, world_size: int, batch_size: int, max_rows: int | None
) -> None:
    held_out = dataset(web)
    ranks = [
        list(
            validation_batches(
                held_out, seq_len=T, batch_size=batch_size, eos_id=EOS,
                data_rank=rank, data_size=world_size, max_rows=max_rows,
            )
        )
        for rank in range(world_size)
    ]  # fmt: skip
    assert len({len(batches) for batches in ranks}) == 1
    shapes = {batch.tokens.shape for batches in ranks for batch in batches}
    assert len(shapes) == 1 and next(iter(shapes))[0] <= batch_size
    together = [batch for group in zip(*ranks, strict=True) for batch in group]
    labels = torch.cat([batch.labels.flatten() for batch in together])
    tokens = torch.cat([batch.tokens.flatten() for batch in together])
    stream = torch.from_numpy(held_out.row(0, held_out.n_tokens - 1)[0].astype(np.int64))
    count = len(stream) - 1 if max_rows is None else min(max_rows * T, len(stream) - 1)
    counted = labels != IGNORE
    assert torch.equal(labels[counted], stream[1 : count + 1])
    assert torch.equal(tokens[counted], stream[:count])
    assert (tokens[~counted] == EOS).all()


def test_validation_layout_keeps_what_is_filled_up_apart(web: OrderedStream) -> None:
    batches = list(validation_batches(dataset(web), seq_len=T, batch_size=4, eos_id=EOS))
    for batch in batches:
        assert batch.layout is not None
        assert all(sum(row) == T for row in batch.layout.lengths)
        expected = PackedLayout.from_lengths(batch.layout.lengths)
        assert torch.equal(batch.layout.positions, expected.positions)
    last = batches[-1]
    filled = last.labels == IGNORE
    assert filled.any() and last.layout is not None
    for row in range(len(last.tokens)):
        inside, outside = last.layout.documents[row][filled[row]], last.layout.documents[row]
        assert not set(inside.tolist()) & set(outside[~filled[row]].tolist())
