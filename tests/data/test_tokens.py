"""Token shards: rows against slices of one list of ids, whatever the shards' borders."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from llmfoundry.data import token_shards as tokens_module
from llmfoundry.data.shard_cache.shard_folder import FetchOptions, ShardFolder
from llmfoundry.data.token_shards import StreamIndex, TokenDataset, TokenWriter
from llmfoundry.errors import UserError
from llmfoundry.files import write_json

EOS = 7


def write(
    folder: Path,
    documents: list[list[int]],
    *,
    shard_bytes: int,
    dtype: str = "<u2",
    parts: int = 1,
) -> TokenDataset:
    shards = []
    for part in range(parts):
        writer = TokenWriter(folder, f"part-{part:05}", np.dtype(dtype), shard_bytes, ("sha1",))
        with writer:
            for document in _share(documents, part, parts):
                writer.add([EOS, *document], n_bytes=len(document), starts_document=True)
        shards += writer.shards
    write_json(folder / "index.json", StreamIndex(dtype, EOS, "mine", tuple(shards)).to_dict())
    return read(folder)


def _share(documents: list[list[int]], part: int, parts: int) -> list[list[int]]:
    bounds = [len(documents) * n // parts for n in range(parts + 1)]
    return documents[bounds[part] : bounds[part + 1]]


def read(folder: Path) -> TokenDataset:
    files = ShardFolder.open(None, str(folder), FetchOptions(cache_folder=str(folder / "cache")))
    return TokenDataset(files, StreamIndex.read(files))


def documents(n: int = 40) -> list[list[int]]:
    rng = random.Random(n)
    return [[rng.randrange(8, 500) for _ in range(rng.randrange(30))] for _ in range(n)]


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("shard_bytes", [4, 6, 50, 1 << 20])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_do_not_see_the_borders_of_shards(
    tmp_path: Path, dtype: str, shard_bytes: int, parts: int
) -> None:
    texts = documents()
    dataset = write(tmp_path, texts, shard_bytes=shard_bytes, dtype=dtype, parts=parts)
    ids = [token for text in texts for token in [EOS, *text]]
    starts = {n for n, token in enumerate(ids) if token == EOS}
    assert (dataset.n_tokens, dataset.n_documents) == (len(ids), len(texts))
    assert dataset.n_bytes == sum(map(len, texts))
    for seq_len in (1, 7, 64):
        for row in range(dataset.n_rows(seq_len, partial=True)):
            first, stop = row * seq_len, min(row * seq_len + seq_len, len(ids) - 1)
            found, lengths = dataset.row(row, seq_len)
            assert found.tolist() == ids[first : stop + 1]
            borders = sorted(starts & set(range(first + 1, stop)))
            assert np.cumsum([first, *lengths]).tolist() == [first, *borders, stop]
            found, lengths = dataset.row(row, seq_len, apart=False)
            assert (found.tolist(), lengths) == (ids[first : stop + 1], [stop - first])
    dataset.verify()


@pytest.mark.parametrize("shard_bytes", [6, 50, 333])
def test_rows_are_counted_where_they_begin(tmp_path: Path, shard_bytes: int) -> None:
    dataset = write(tmp_path, documents(), shard_bytes=shard_bytes)
    ends = np.cumsum([shard.n_tokens for shard in dataset.index.shards])
    for seq_len in (1, 5, 64):
        counted = np.zeros(len(ends), int)
        for row in range(dataset.n_rows(seq_len)):
            counted[int(np.argmax(ends > row * seq_len))] += 1
        assert dataset.row_sizes(seq_len).tolist() == counted.tolist()


def test_a_shard_is_opened_when_it_is_read_and_few_stay_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "_OPEN_SHARDS", 3)
    dataset = write(tmp_path, documents(), shard_bytes=50)
    expected = [dataset.row(row, 8)[0].tolist() for row in range(dataset.n_rows(8))]
    assert len(dataset._open) == 3
    rng = random.Random(0)
    copied = pickle.loads(pickle.dumps(dataset))
    for row in rng.sample(range(len(expected)), 20):
        assert copied.row(row, 8)[0].tolist() == expected[row]
    last = dataset.index.shards[-1]
    (tmp_path / last.file).unlink()
    fresh = read(tmp_path)
    assert fresh.row(0, 8)[0].tolist() == expected[0]
    with pytest.raises(UserError, match=last.file):
        fresh.row(len(expected) - 1, 8)


def test_starts_begin_at_a_multiple_of_four_after_the_ids(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [], [3]], shard_bytes=1 << 20)
    content = (tmp_path / "part-00000/shard.00000.tokens").read_bytes()
    ids = np.array([7, 1, 2, 7, 7, 3], "<u2").tobytes()
    assert content == ids + np.array([0, 3, 4], "<u4").tobytes()
    write(tmp_path, [[1, 2]], shard_bytes=1 << 20)
    content = (tmp_path / "part-00000/shard.00000.tokens").read_bytes()
    assert content == np.array([7, 1, 2, 0], "<u2").tobytes() + bytes(4)


def test_the_fingerprint_names_the_ids(tmp_path: Path) -> None:
    one = write(tmp_path / "one", documents(), shard_bytes=50)
    other = write(tmp_path / "other", documents(), shard_bytes=50)
    changed = write(tmp_path / "changed", [*documents()[:-1], [9]], shard_bytes=50)
    assert one.fingerprint == other.fingerprint != changed.fingerprint


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"{", r"index\.json: is damaged"),
        (b"[]", r"index\.json: is damaged"),
        (b"[" * 100_000, r"index\.json: is damaged"),
        (b'{"format": "mds"}', r"index\.json: is not an index of token shards"),
        (b'{"format": "llmfoundry-tokens", "version": 1}', r"of version 1; .* reads 2"),
        (
            b'{"format": "llmfoundry-tokens", "version": ' + b"9" * 5000 + b"}",
            "is damaged: .*range",
        ),
        (b'{"format": "llmfoundry-tokens", "version": 2}', "damaged: .* missing .* `dtype`"),
    ],
)
def test_an_index_that_cannot_be_is_named(tmp_path: Path, content: bytes, line: str) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(UserError, match=line):
        read(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("file", "../x", "shard 1 is damaged: file: '../x' lies outside"),
        ("file", "/x", "shard 1 is damaged: file: '/x' lies outside"),
        ("file", "a\0b", "shard 1 is damaged: file: 'a\\\\x00b' cannot be the name"),
        ("file", "x" * 5000, "too long for the name"),
        ("file", "part-00000/shard.00000.tokens", "that of shard 1 is that of shard 0, too"),
        ("n_tokens", -1, r"shard 1 is damaged: Expected `int` >= 0 - at `\$\.n_tokens`"),
        ("n_tokens", 1e30, "shard 1 is damaged: Expected `int`, got `float`"),
        ("n_tokens", 1 << 32, "shard 1 is damaged: Expected `int` <= 4294967295"),
        ("n_documents", True, "shard 1 is damaged: Expected `int`, got `bool`"),
        ("n_documents", 1 << 20, "shard 1 is damaged: n_documents: 1048576, of "),
        ("n_bytes", "5", "shard 1 is damaged: Expected `int`, got `str`"),
        ("hashes", {"sha1": 5}, "shard 1 is damaged: Expected `str`, got `int`"),
        ("dtype", "O", "is damaged: Invalid enum value 'O'"),
        ("eos_id", -1, "is damaged: Expected `int` >= 0"),
        ("texts", ["../x"], "is damaged: texts: '../x' lies outside"),
    ],
)
def test_what_an_index_cannot_say_is_one_line_with_its_shard(
    tmp_path: Path, key: str, value: object, line: str
) -> None:
    index = write(tmp_path, documents(), shard_bytes=50).index.to_dict()
    shard = index["shards"][1]
    (shard if key in shard else index)[key] = value
    write_json(tmp_path / "index.json", index)
    with pytest.raises(UserError, match=line) as raised:
        read(tmp_path)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_totals_that_are_not_the_shards_are_damage(tmp_path: Path) -> None:
    index = write(tmp_path, documents(), shard_bytes=50).index.to_dict()
    write_json(tmp_path / "index.json", {**index, "n_tokens": 1})
    with pytest.raises(UserError, match="damaged"):
        read(tmp_path)
