"""Special tokens around documents and within them: against transformers and LLM Foundry's rows."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from llmfoundry.cli.commands.prepare_data import prepare_data
from llmfoundry.data.held_out import TokenShards
from llmfoundry.data.preparation.build_tokenizer import build_tokenizer
from llmfoundry.data.preparation.prepare import prepare_corpus
from llmfoundry.data.preparation.write_part import split_text
from llmfoundry.data.text.tokenizer import Tokenizer
from llmfoundry.distributed.process_group import ALONE
from llmfoundry.errors import UserError
from llmfoundry.recipe.data import DataConfig, TokenizerConfig
from tests.data.test_prepare_output import folder, recipe, samples, split
from tests.data.test_prepare_output import texts as documents

SPECIAL = ["<unk>", "<s>", "</s>"]  # ids 0, 1, 2
SPELLED = "a<s> b </s>c"


def _byte_level() -> tokenizers.Tokenizer:
    """GPT-2's and Llama 3's kind."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(documents(), trainer)
    return backend


def _sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: a blank is put before each text, unknown characters are bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581documentw", "do"]
    vocabulary = {piece: n for n, piece in enumerate(pieces)}
    model = models.BPE(vocab=vocabulary, merges=[("d", "o")], byte_fallback=True, unk_token="<unk>")
    backend = tokenizers.Tokenizer(model)
    marks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    backend.normalizer = normalizers.Sequence(marks)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(SPECIAL)
    return backend


def _unigram() -> tokenizers.Tokenizer:
    """T5's kind."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(documents(), trainer)
    return backend


# The model, what its post-processor makes of a text ($A), and what a document is in token shards.
KINDS: dict[str, tuple[Any, str, tuple[list[int], list[int]]]] = {
    "GPT-2": (_byte_level, "", ([2], [])),
    "Llama 3": (_byte_level, "<s> $A", ([1], [2])),
    "OPT": (_byte_level, "</s> $A", ([2], [])),
    "RoBERTa": (_byte_level, "<s> $A </s>", ([1], [2])),
    "Llama 2": (_sentencepiece, "<s> $A", ([1], [2])),
    "T5": (_unigram, "$A </s>", ([2], [])),
    "two in front": (_byte_level, "<unk> <s> $A", ([0, 1], [2])),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, as transformers reads it."""
    folders = {}
    for kind, (make, form, _) in KINDS.items():
        backend = make()
        names = [(token, n) for n, token in enumerate(SPECIAL) if token in form]
        if form:
            backend.post_processor = processors.TemplateProcessing(
                single=form, pair=f"{form} $B", special_tokens=names
            )
        folders[kind] = tmp_path_factory.mktemp("kind")
        backend.save(str(folders[kind] / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
        config |= {"eos_token": "</s>"}
        (folders[kind] / "tokenizer_config.json").write_text(json.dumps(config))
    return folders


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    rows = [*documents(), *(f"{SPELLED} {n}" for n in range(9)), " \n"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    return file


def train_documents(source: Path) -> list[str]:
    rows = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    return split([text for text in rows if text.strip()])[0]  # blank ones are counted, not written


def concatenated(
    texts: list[str], tokenizer: Any, *, bos_text: str, eos_text: str, read: bool
) -> Iterator[list[int]]:
    """LLM Foundry's ConcatTokensDataset, with transformers' tokenizer, as its source has it."""
    around = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (bos_text, eos_text)]
    buffer: list[int] = []
    for text in texts:
        ids = tokenizer(text, split_special_tokens=not read)["input_ids"]  # Foundry: the default
        buffer = buffer + around[0] + ids + around[1]
        while len(buffer) >= 16:
            yield buffer[:16]
            buffer = buffer[16:]


@pytest.mark.parametrize(
    ("kind", "around"),
    [
        *((kind, ("", None)) for kind in KINDS),
        ("Llama 3", ("", "")),
        ("Llama 2", ("<s>", "</s>")),
        ("T5", ("ab", " c")),
    ],
)
def test_mds_rows_are_foundrys_for_every_kind_of_tokenizer(
    saved: dict[str, Path], source: Path, kind: str, around: tuple[str, str | None]
) -> None:
    from transformers import AutoTokenizer

    bos, eos = around
    more = [f"prepare.bos_text='{bos}'"] if bos else []
    more += [] if eos is None else [f"prepare.eos_text='{eos}'"]
    if (
        eos is None
    ):  # every document has the end of text once: not again where the tokenizer puts it
        eos = "" if "</s>" in KINDS[kind][1] else "</s>"
    theirs = AutoTokenizer.from_pretrained(saved[kind])
    for read in (False, True):
        out = source.parent / f"{read}"
        prepare_data(
            recipe(
                source,
                *("tokenizer=huggingface", f"tokenizer.path={saved[kind]}", "prepare.format=mds"),
                *(f"prepare.output={out}", f"tokenizer.split_special_tokens={not read}", *more),
            ).resolve()
        )
        texts = train_documents(source)
        expected = concatenated(texts, theirs, bos_text=bos, eos_text=eos, read=read)
        found = samples(out / "train", "tokens")
        assert [row.tolist() for row in found] == list(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_token_shards_hold_what_the_tokenizer_adds_and_the_end_of_text_once(
    saved: dict[str, Path], source: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(split_text, "__defaults__", (30,))  # documents in several pieces
    loaded = Tokenizer.load(saved[kind])
    theirs = AutoTokenizer.from_pretrained(saved[kind], split_special_tokens=True)
    start, end = KINDS[kind][2]
    texts = train_documents(source)
    plain = [theirs(text, add_special_tokens=False)["input_ids"] for text in texts]
    expected = [[*start, *ids, *end] for ids in plain]
    dataset = prepare_corpus(recipe(source).data, loaded, progress=False).train
    ids, lengths = dataset.row(0, dataset.n_tokens - 1)
    assert ids.tolist() == [i for document in expected for i in document]
    assert dataset.n_documents == len(texts) and lengths[:-1] == [*map(len, expected)][:-1]
    assert loaded.encode_documents(texts) == expected  # what text that is packed becomes
    assert loaded.encode_prompt(texts[0]) == [*start, *plain[0]]
    no_texts = TokenShards(dataset, loaded).texts()
    assert no_texts == [loaded.decode(ids) for ids in plain]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_that_spells_special_tokens_is_read_as_in_transformers(
    saved: dict[str, Path], kind: str
) -> None:
    from transformers import AutoTokenizer

    loaded = Tokenizer.load(saved[kind])
    theirs = AutoTokenizer.from_pretrained(saved[kind])(SPELLED)["input_ids"]
    assert [*loaded.encode_prompt(SPELLED), *loaded.eos_ids] == theirs
    assert loaded.encode_prompt("a b") == [*loaded.document_start, *loaded.encode("a b")]


def test_the_gauntlet_asks_a_run_as_it_was_trained(
    saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    from llmfoundry.builders import evaluation
    from llmfoundry.hf.open_class import HuggingFaceTokenizer

    asked = []
    monkeypatch.setattr(
        evaluation, "read_tasks", lambda config, asking, **more: asked.append(asking)
    )
    for kind, (_, form, (start, _)) in KINDS.items():
        recipe = MagicMock(data=DataConfig(), max_seq_len=64)
        recipe.model.learned_pos_emb = False
        tokenizer = Tokenizer.load(saved[kind])
        evaluation.open_gauntlet(recipe, MagicMock(), tokenizer, ALONE, print)
        special = asked[-1].special
        assert list(special.start) == start and bool(special.before) == (form.find("$A") > 0)
        exported = HuggingFaceTokenizer(kind, AutoTokenizer.from_pretrained(saved[kind]))
        assert exported.bos_ids == special.before


def test_ids_before_the_tokenizer_was_followed_are_another_tokenizers(
    saved: dict[str, Path],
) -> None:
    """Shards, caches and checkpoints are known by the fingerprint."""
    for kind, (_, _, around) in KINDS.items():
        tokenizer = Tokenizer.load(saved[kind])
        definition = tokenizers.Tokenizer.from_file(str(saved[kind] / "tokenizer.json")).to_str()
        before = hashlib.blake2b(f"2 {definition}".encode(), digest_size=16).hexdigest()
        assert (tokenizer.fingerprint == before) == (around == ([2], []))


def test_special_tokens_in_a_text_are_read_where_that_is_asked(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    config = TokenizerConfig(name="huggingface", path=str(saved["Llama 3"]))
    apart = build_tokenizer(config, DataConfig(), progress=False)
    config.split_special_tokens = False
    read = build_tokenizer(config, DataConfig(), progress=False)
    assert (
        not {1, 2} & set(apart.encode(SPELLED)) and apart.decode(apart.encode(SPELLED)) == SPELLED
    )
    assert [i for i in read.encode(SPELLED) if i in (1, 2)] == [1, 2]
    assert read.fingerprint != apart.fingerprint
    copy = pickle.loads(pickle.dumps(read))
    assert (copy.encode(SPELLED), copy.fingerprint) == (read.encode(SPELLED), read.fingerprint)
    copy.split_special_tokens = True
    assert copy.fingerprint == apart.fingerprint


def test_token_shards_of_the_other_reading_are_refused(
    saved: dict[str, Path], source: Path
) -> None:
    from llmfoundry.data.shard_index import read_index
    from llmfoundry.data.sources import SequenceOptions, open_source

    choose = ("tokenizer=huggingface", f"tokenizer.path={saved['Llama 3']}")
    prepare_data(recipe(source, *choose).resolve())
    files = folder(source.parent / "out/train")
    read = Tokenizer.load(saved["Llama 3"])
    open_source("a", "data", files, read_index(files), SequenceOptions(16, read.fingerprint))
    read.split_special_tokens = False
    with pytest.raises(UserError, match=r"data: its tokens were made with another tokenizer"):
        open_source("a", "data", files, read_index(files), SequenceOptions(16, read.fingerprint))
