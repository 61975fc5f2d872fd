"""Batches: rank shares against one rank, layouts against the plain builder, resume, prefetch."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from llmfoundry.data.bpe import END_OF_TEXT, bytes_backend
from llmfoundry.data.loader import Loader, validation_batches
from llmfoundry.data.prepare import Prepared, prepare
from llmfoundry.data.tokenizer import Tokenizer
from llmfoundry.errors import UserError
from llmfoundry.ops.batch import IGNORE, Batch
from llmfoundry.ops.layout import Layout
from llmfoundry.recipe.data import DataConfig

T = 32
EOS = 256


def make(folder: Path, n: int) -> Prepared:
    folder.mkdir(exist_ok=True)
    rows = (json.dumps({"text": f"text {k} " + "word " * (k % 17)}) + "\n" for k in range(n))
    (folder / "rows.jsonl").write_text("".join(rows))
    config = DataConfig(
        name="files",
        paths=[str(folder / "rows.jsonl")],
        validation_fraction=0.2,
        cache_folder=str(folder / "cache"),
    )
    return prepare(config, Tokenizer(bytes_backend(), END_OF_TEXT), progress=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return make(tmp_path_factory.mktemp("loader"), 120)


def loader(prepared: Prepared, **changes: Any) -> Loader:
    settings = {"seq_len": T, "global_batch_size": 8, "seed": 3, "shuffle": True} | changes
    return Loader(prepared.train, **settings)


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.labels, b.labels)
        and (a.layout is None) == (b.layout is None)
        and (a.layout is None or b.layout is None or a.layout.lengths == b.layout.lengths)
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_share_out_the_single_rank_batch(prepared: Prepared, world_size: int) -> None:
    whole = loader(prepared)
    ranks = [loader(prepared, rank=rank, world_size=world_size) for rank in range(world_size)]
    for step in (0, 1, 50):
        expected, parts = whole.batch(step), [rank.batch(step) for rank in ranks]
        assert torch.equal(torch.cat([part.tokens for part in parts]), expected.tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), expected.labels)
        lengths = [row for part in parts if part.layout for row in part.layout.lengths]
        assert expected.layout is not None and tuple(lengths) == expected.layout.lengths


def test_an_epoch_gives_every_row_once(prepared: Prepared) -> None:
    one = loader(prepared, global_batch_size=1)
    rows = {tuple(one.batch(step).tokens[0].tolist()) for step in range(one.n_rows)}
    expected = {tuple(prepared.train.row(r, T)[0][:-1].tolist()) for r in range(one.n_rows)}
    assert rows == expected
    assert one.n_rows * T + one.tokens_left_out == prepared.train.n_tokens - 1


def test_unshuffled_batches_are_the_stream(prepared: Prepared) -> None:
    plain = loader(prepared, shuffle=False)
    tokens = torch.cat([plain.batch(step).tokens.flatten() for step in range(3)])
    labels = torch.cat([plain.batch(step).labels.flatten() for step in range(3)])
    stream = torch.from_numpy(prepared.train.row(0, 3 * 8 * T)[0])
    assert torch.equal(tokens, stream[:-1])
    assert torch.equal(labels, stream[1:])


def test_layout_equals_the_plain_builder(prepared: Prepared) -> None:
    for step in range(20):
        batch = loader(prepared).batch(step)
        assert batch.layout is not None
        expected = Layout.from_lengths(batch.layout.lengths)
        assert torch.equal(batch.layout.positions, expected.positions)
        assert torch.equal(batch.layout.documents, expected.documents)
        assert batch.layout.positions.dtype == torch.int64
        assert batch.layout.documents.dtype == torch.int32
        # A document begins exactly where the stream says so, and at each row's first token.
        begins = batch.tokens == EOS
        begins[:, 0] = True
        assert torch.equal(batch.layout.positions == 0, begins)


def test_attending_across_documents_leaves_the_layout_out(prepared: Prepared) -> None:
    batch = loader(prepared, attend_across_documents=True).batch(0)
    assert batch.layout is None
    assert torch.equal(batch.tokens, loader(prepared).batch(0).tokens)


def test_text_shorter_than_a_row_names_the_key(prepared: Prepared) -> None:
    with pytest.raises(UserError, match=r"max_seq_len: the training text has [\d,]+ tokens, too"):
        loader(prepared, seq_len=10**6)


@pytest.mark.parametrize("after", [4, 16])
def test_resume_goes_on_after_the_last_sample_given(prepared: Prepared, after: int) -> None:
    """Also where the batch size changed with the resume: no sample twice, none left out."""
    before = loader(prepared)
    state = json.loads(json.dumps(before.state(5)))
    assert state["samples"] == {"train": 40}
    resumed = loader(prepared, global_batch_size=after, world_size=2, rank=0)
    other = loader(prepared, global_batch_size=after, world_size=2, rank=1)
    resumed.resume(state, 5)
    other.resume(state, 5)
    assert resumed.state(5)["samples"] == {"train": 40}
    rows = [r.batch(5 + n).tokens for n in range(80 // after) for r in (resumed, other)]
    expected = torch.cat([before.batch(5 + n).tokens for n in range(10)])
    assert torch.equal(torch.cat(rows), expected)


def test_resume_refuses_other_rows(prepared: Prepared, tmp_path: Path) -> None:
    state = loader(prepared).state(5)
    with pytest.raises(UserError, match=r"^max_seq_len: .*with 32, this run has 16; write 32"):
        loader(prepared, seq_len=16).resume(state, 5)
    with pytest.raises(UserError, match=r"^seed: "):
        loader(prepared, seed=4).resume(state, 5)
    with pytest.raises(UserError, match=r"^data\.shuffle: "):
        loader(prepared, shuffle=False).resume(state, 5)
    with pytest.raises(UserError, match=r"^data: the training tokens are not those"):
        loader(make(tmp_path, 119)).resume(state, 5)


def test_prefetch_gives_the_same_batches_and_ends_its_thread(prepared: Prepared) -> None:
    plain = loader(prepared)
    with closing(plain.prefetch(7)) as batches:
        for step, batch in enumerate(itertools.islice(batches, 10), start=7):
            assert same(batch, plain.batch(step))
        assert any(thread.name == "loader" for thread in threading.enumerate())
    assert not any(thread.name == "loader" for thread in threading.enumerate())


def test_prefetch_is_bounded_and_raises_what_went_wrong(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def batch(step: int) -> int:
        made.append(step)
        if step == 6:
            raise OSError("disk gone")
        return step

    failing = loader(prepared)
    monkeypatch.setattr(failing, "batch", batch)
    batches: Iterator[Any] = failing.prefetch(0, depth=2)
    assert next(batches) == 0
    deadline = time.monotonic() + 10
    while len(made) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert made == [0, 1, 2, 3]  # one given, two waiting, one in hand
    assert [next(batches) for _ in range(5)] == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    assert not any(thread.name == "loader" for thread in threading.enumerate())


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("max_rows", [None, 1, 5])
def test_validation_predicts_every_token_once(
    prepared: Prepared, world_size: int, batch_size: int, max_rows: int | None
) -> None:
    dataset = prepared.validation
    ranks = [
        list(
            validation_batches(
                dataset, seq_len=T, batch_size=batch_size, eos_id=EOS,
                rank=rank, world_size=world_size, max_rows=max_rows,
            )
        )
        for rank in range(world_size)
    ]  # fmt: skip
    assert len({len(batches) for batches in ranks}) == 1
    shapes = {batch.tokens.shape for batches in ranks for batch in batches}
    assert len(shapes) == 1 and next(iter(shapes))[0] <= batch_size
    labels = torch.cat(
        [batch.labels.flatten() for group in zip(*ranks, strict=True) for batch in group]
    )
    tokens = torch.cat(
        [batch.tokens.flatten() for group in zip(*ranks, strict=True) for batch in group]
    )
    stream = torch.from_numpy(dataset.row(0, dataset.n_tokens - 1)[0])
    count = len(stream) - 1 if max_rows is None else min(max_rows * T, len(stream) - 1)
    counted = labels != IGNORE
    assert torch.equal(labels[counted], stream[1 : count + 1])
    assert torch.equal(tokens[counted], stream[:count])
    assert (tokens[~counted] == EOS).all()


def test_validation_layout_keeps_what_is_filled_up_apart(prepared: Prepared) -> None:
    batches = list(validation_batches(prepared.validation, seq_len=T, batch_size=4, eos_id=EOS))
    for batch in batches:
        assert batch.layout is not None
        assert all(sum(row) == T for row in batch.layout.lengths)
        expected = Layout.from_lengths(batch.layout.lengths)
        assert torch.equal(batch.layout.positions, expected.positions)
    last = batches[-1]
    filled = last.labels == IGNORE
    assert filled.any() and last.layout is not None
    for row in range(len(last.tokens)):
        inside, outside = last.layout.documents[row][filled[row]], last.layout.documents[row]
        assert not set(inside.tolist()) & set(outside[~filled[row]].tolist())


def test_a_batch_of_8_rows_of_512_takes_about_a_millisecond(tmp_path: Path) -> None:
    fast = loader(make(tmp_path, 3000), seq_len=512)
    times = []
    for step in range(50):
        start = time.perf_counter()
        fast.batch(step)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3  # the fastest: the machine may be busy
