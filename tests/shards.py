"""Small data sets as users have them: shards with ids of the bytes tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmfoundry.data.mds.shard import MDSWriter
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.data.token_shards import StreamIndex, TokenWriter
from llmfoundry.files import write_json
from llmfoundry.recipe.data import DataConfig, TokenizerConfig


def bytes_tokenizer() -> Tokenizer:
    """That of tests/tiny.py's recipe."""
    return build_tokenizer(TokenizerConfig(name="bytes"), DataConfig(), progress=False)


def texts(name: str, n: int) -> list[str]:
    """Documents that say whose they are, some shorter and some longer than a row of 64."""
    return [f"{name} {i}: " + " ".join(str(i * k) for k in range(4 + i % 7 * 6)) for i in range(n)]


def write_mds(folder: Path, name: str, *, rows: int = 24, seq_len: int = 64) -> list[list[int]]:
    """Samples of `seq_len` ids, documents end with the end of text; the samples."""
    tokenizer = bytes_tokenizer()
    ids: list[int] = []
    for text in texts(name, rows * 3):
        ids += [*tokenizer.encode(text), tokenizer.eos_id]
    samples = [ids[n * seq_len : (n + 1) * seq_len] for n in range(rows)]
    with MDSWriter(folder, columns={"tokens": "ndarray:int32"}, size_limit=2048) as writer:
        for sample in samples:
            writer.write({"tokens": np.array(sample, np.int32)})
    return samples


def write_tokens(folder: Path, name: str, *, documents: int = 40) -> list[int]:
    """A stream in shards of 1 kB, documents begin with the end of text; the ids."""
    tokenizer = bytes_tokenizer()
    dtype, ids = np.dtype("<u2"), []
    with TokenWriter(folder, "part-00000", dtype, 1024, ("xxh3_64",)) as writer:
        for text in texts(name, documents):
            document = [tokenizer.eos_id, *tokenizer.encode(text)]
            writer.add(document, n_bytes=len(text.encode()), starts_document=True)
            ids += document
    index = StreamIndex(dtype.str, tokenizer.eos_id, tokenizer.fingerprint, tuple(writer.shards))
    write_json(folder / "index.json", index.to_dict())
    return ids
