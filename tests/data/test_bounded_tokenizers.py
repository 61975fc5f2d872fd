"""Tokenizers of others: hostile ones end soon, unknown ones give the ids that the library gives."""

from __future__ import annotations

import json
import pickle
import time

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from llmfoundry import bounded
from llmfoundry.data.text import bounded_backend
from llmfoundry.data.text.bounded_backend import PATTERNS, BoundedBackend, is_linear, open_backend
from llmfoundry.data.text.bpe import bytes_backend, train_backend
from llmfoundry.data.text.tokenizer import Tokenizer, check_tokenizer
from llmfoundry.errors import UserError
from tests.data.hostile_tokenizers import HOSTILE_TOKENIZERS

TEXTS = ["", "a", "Hello, world!\n\n  Ünïcode 中文 <|endoftext|> 12345", "a" * 3000, "\x00\ud7ff"]


def written(folder, definition):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.mark.parametrize("name", HOSTILE_TOKENIZERS)
def test_hostile_tokenizers_end_soon_with_a_line(name, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_backend, "SECONDS", 0.5)
    folder = written(tmp_path / "t", HOSTILE_TOKENIZERS[name])
    start = time.process_time()
    with pytest.raises(UserError, match=f"^{folder / 'tokenizer.json'}: ") as error:
        Tokenizer.load(folder)
    assert len(error.value.lines()) == 1 and time.process_time() - start < 5
    with pytest.raises(UserError, match=r"tokenizer.json: "):  # before transformers loads it
        check_tokenizer(str(folder))


def unknown() -> Backend:
    """One with a regular expression that is in no list."""
    backend = train_backend(["hello world " * 50, "12345 abc " * 50], 300, progress=False)
    backend.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\t+"), " ")]
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"[a-z]+|\d"), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )  # fmt: skip
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace(Regex("zq+"), "")])
    return backend


def test_an_unknown_tokenizer_gives_the_same_ids_in_the_child(tmp_path):
    theirs = unknown()
    assert not is_linear(json.loads(theirs.to_str()))
    ours = Tokenizer.load(written(tmp_path / "t", json.loads(theirs.to_str())))
    assert isinstance(ours._backend, BoundedBackend)
    for tokenizer in (ours, pickle.loads(pickle.dumps(ours))):
        for split in (True, False):
            theirs.encode_special_tokens = split
            tokenizer.split_special_tokens = split
            ids = [theirs.encode(text, add_special_tokens=False).ids for text in TEXTS]
            assert [tokenizer.encode(text) for text in TEXTS] == ids
            assert tokenizer.encode_batch(TEXTS) == ids
            assert [tokenizer.decode(i) for i in ids] == [
                theirs.decode(i, skip_special_tokens=False) for i in ids
            ]
        theirs.encode_special_tokens = False
        found = theirs.encode(TEXTS[2], add_special_tokens=False)
        assert tokenizer.encode_spans(TEXTS[2], chat=True) == (found.ids, found.offsets)
        assert tokenizer.encode_chat_batch(TEXTS[2:3]) == [found.ids]
    bounded._end()  # the next call finds a child that has not loaded it
    assert ours.decode(ours.encode(TEXTS[2])) == TEXTS[2]
    ours.use_chat_template("chatml")
    assert ours.encode_chat("<|im_end|>") == [ours.vocab_size - 1]
    ours.split_special_tokens = True
    ours.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").fingerprint == ours.fingerprint


def test_a_text_that_takes_too_long_is_one_line(tmp_path, monkeypatch):
    definition = json.loads(unknown().to_str())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "(qz|qzqz|q|zq)+Q"}
    tokenizer = Tokenizer.load(written(tmp_path / "t", definition))  # no text of the trial
    monkeypatch.setattr(bounded, "CPU_SECONDS", 0.3)
    with pytest.raises(
        UserError, match=r"tokenizer.json: .* and was stopped.* text that begins 'fine"
    ):
        tokenizer.encode_batch(["ok", "fine " + "qz" * 5000])
    assert tokenizer.encode("ok")


def test_common_tokenizers_need_no_child(monkeypatch):
    monkeypatch.setattr(bounded_backend, "run_bounded", None)
    kinds = [bytes_backend()]
    for pattern in PATTERNS.values():
        backend = bytes_backend()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"),
             pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )  # fmt: skip
        kinds.append(backend)
    sentencepiece = Backend(models.BPE({"<unk>": 0, "a": 1, "▁": 2}, [], byte_fallback=True))
    sentencepiece.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    sentencepiece.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    unigram = Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False))
    unigram.pre_tokenizer = pre_tokenizers.Metaspace()
    words = Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.normalizer, words.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    for backend in (*kinds, sentencepiece, unigram, words):
        assert is_linear(json.loads(backend.to_str()))
        assert isinstance(open_backend(backend.to_str(), "f"), tokenizers.Tokenizer)


def saved_after_padding(strategy, length):
    """As transformers saves a tokenizer that has padded and truncated."""
    definition = json.loads(bytes_backend().to_str())
    definition["padding"] = {
        "strategy": strategy, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "\u0000",
    }  # fmt: skip
    definition["truncation"] = {
        "direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    return definition


@pytest.mark.parametrize("size", [256, 10**10])
def test_padding_and_truncation_that_were_saved_are_not_applied(size, tmp_path):
    """1e10 would end the process: the library counts on memory for them."""
    folder = written(tmp_path / "t", saved_after_padding({"Fixed": size}, 2))
    check_tokenizer(str(folder))
    tokenizer = Tokenizer.load(folder)
    plain = bytes_backend()
    assert tokenizer.encode("a long text") == plain.encode("a long text").ids
    assert tokenizer.document_start == (tokenizer.eos_id,) and tokenizer.document_end == ()
    assert json.loads(tokenizer.files()["tokenizer.json"])["padding"] is None


def test_special_tokens_are_counted_whatever_a_text_becomes(tmp_path):
    definition = json.loads(bytes_backend().to_str())
    around = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}] * 65
    single = [*around, {"Sequence": {"id": "A", "type_id": 0}}]
    end = {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}
    definition["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [*single, single[-1]],
        "special_tokens": {"<|endoftext|>": end},
    }  # fmt: skip
    with pytest.raises(UserError, match="puts 65 special tokens around a text; write at most 64"):
        Tokenizer.load(written(tmp_path / "t", definition))


@pytest.mark.parametrize("kind", [models.WordLevel, models.WordPiece])
def test_a_vocabulary_without_its_unknown_token_is_refused(kind, tmp_path):
    backend = Backend(kind({"a": 0, "[UNK]": 1, "<|endoftext|>": 2}, unk_token="[UNK]"))
    definition = json.loads(backend.to_str())
    Tokenizer.load(written(tmp_path / "t", definition))
    definition["model"]["unk_token"] = "zz"
    with pytest.raises(UserError, match=r"Missing.*UNK.*; add its unk_token to the vocabulary"):
        Tokenizer.load(written(tmp_path / "t", definition))


def test_listed_patterns_are_linear():
    """Runs of each kind of character, ten times as long, take at most about ten times as long."""
    for name, pattern in PATTERNS.items():
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        for character in "aA1 \n.中'/\u0301":
            for end in ("", "!", "x", "\n"):
                start = time.process_time()
                split.pre_tokenize_str(character * 20_000 + end)
                assert time.process_time() - start < 1, (name, character, end)  # n^2: a minute
