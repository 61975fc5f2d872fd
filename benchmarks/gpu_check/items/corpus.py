"""Token shards at random for the runs of a check: no download, and nothing to tokenise.

Documents have the lengths of web pages, half of them below 450 tokens, so that their borders cost
what they cost on text. Ids are bytes, the only tokenizer that needs no file; the models keep their
own vocabulary, and so the cost of their output heads.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.preparation.write.token_writer import TokenWriter
from llmfoundry.data.token_rows import StreamIndex
from llmfoundry.files import atomic_path, write_json
from llmfoundry.recipe.data import DataConfig
from llmfoundry.recipe.tokenizer import TokenizerConfig

MEDIAN, SPREAD = 450.0, 1.0  # documents' lengths: log-normal
SHARD_BYTES = 1 << 26


def write_corpus(folder: Path, *, tokens: int) -> int:
    """Write token shards and their index, as `scripts/prepare_data.py` would.

    Args:
        folder: where to; one that is there stays as it is.
        tokens: at least so many.

    Returns:
        Documents written.
    """
    if folder.is_dir():
        return 0
    tokenizer = build_tokenizer(TokenizerConfig(name="bytes"), DataConfig(), progress=False)
    generator, dtype = np.random.default_rng(0), np.dtype("<u2")
    folder.parent.mkdir(parents=True, exist_ok=True)
    documents = 0
    with atomic_path(folder) as partial:
        with TokenWriter(partial, "part-00000", dtype, SHARD_BYTES, ("sha1",)) as writer:
            while tokens > 0:
                length = max(1, int(generator.lognormal(np.log(MEDIAN), SPREAD)))
                ids = generator.integers(0, 256, length).tolist()
                writer.add([tokenizer.eos_id, *ids], n_bytes=length, starts_document=True)
                tokens -= length + 1
                documents += 1
        index = StreamIndex(
            dtype.str, tokenizer.eos_id, tokenizer.fingerprint, tuple(writer.shards)
        )
        write_json(partial / "index.json", index.to_dict())
    return documents
